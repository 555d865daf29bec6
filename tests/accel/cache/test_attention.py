"""Kept attention outputs against diffusers' own hook, processors frozen by hand, and pictures made alone."""

import pytest
import torch
from diffusers import HeunDiscreteScheduler, PyramidAttentionBroadcastConfig, apply_pyramid_attention_broadcast

from fewstep import AcceleratedPipeline, Recipe
from fewstep.accel import attachment
from fewstep.accel.cache.attention import OFF, AttentionBroadcast, by_kind
from fewstep.accel.cache.deep import DeepCache
from fewstep.accel.cache.first_block import FirstBlockCache
from fewstep.accel.cache.gate import CrossAttentionGate
from fewstep.accel.errors import InvalidRecipe, Unsupported
from fewstep.accel.kernels.compile import CompileBlocks
from fewstep.accel.policy import Dynamic, Every, Listed, Window
from fewstep.accel.zoo.tiny import FAMILIES, tiny

STEPS = 6
NAME, GATE = "attention_broadcast", "cross_attention_gate"
TWICE = AttentionBroadcast(spatial=Every(2), cross=Every(3), temporal=Every(4))


def final(pipe, family, prompts=None, seeds=(0,), **options):
    """The final latents (or pixels, of families without) and the report; row k is drawn from seed k."""
    rng = [torch.Generator().manual_seed(i) for i in seeds]
    call = FAMILIES[family].call() | {"num_inference_steps": STEPS, "generator": rng}
    if prompts is None:
        call["generator"] = rng[0]
    else:
        call["prompt"] = list(prompts)
        call |= {"negative_prompt": [""] * len(prompts)} if call.get("negative_prompt") else {}
    call |= ({} if family in ("ddpm", "dit") else {"output_type": "latent"}) | options
    with torch.no_grad():
        if isinstance(pipe, AcceleratedPipeline):
            result = pipe.run(**call)
            return torch.as_tensor(result.output[0]), result.report
        return torch.as_tensor(pipe(**call)[0]), None


def fast(family, *techniques):
    return AcceleratedPipeline(tiny(family), Recipe(*techniques))


def close(found, expected, tolerance=1e-5):
    assert found.isfinite().all()
    assert (found - expected).norm() <= tolerance * expected.norm()


# ---------------------------------------------------------------------------------------------------- the peer


NO_CFG = {
    "flux": {"true_cfg_scale": 1.0, "negative_prompt": None},
    "sd": {"guidance_scale": 1.0},
    "pixart": {"guidance_scale": 1.0},
    "cogvideox": {"guidance_scale": 1.0},
}


@pytest.mark.parametrize("family", list(NO_CFG))
def test_it_equals_diffusers_own_hook(family):
    """Of one row without guidance, where the hook's count of a module's calls is the row's count of evaluations."""
    options, technique = NO_CFG[family], AttentionBroadcast(spatial=Every(2), cross=Every(3), temporal=OFF)
    ours, report = final(fast(family, technique), family, **options)
    peer = tiny(family)
    config = PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        cross_attention_block_skip_range=3,
        spatial_attention_timestep_skip_range=(-1, 1001),
        cross_attention_timestep_skip_range=(-1, 1001),
        current_timestep_callback=lambda: 500,
    )
    apply_pyramid_attention_broadcast(peer.unet if family == "sd" else peer.transformer, config)
    close(ours, final(peer, family, **options)[0])
    assert report.counts[NAME]["reused"] in (3, 3 + 4)  # spatial alone, or cross too
    assert not torch.equal(ours, final(tiny(family), family, **options)[0])


# ---------------------------------------------------------------------------------------------------- by hand


class ByHand:
    """A processor that computes at some evaluations and returns at the others what it had then; it adds its layer's
    input itself. When the batch shrinks the last rows, the prompt's, are those that stay."""

    def __init__(self, processor, computes, evaluation, adds):
        self.processor, self.computes, self.evaluation, self.adds = processor, computes, evaluation, adds
        self.kept, self.met = {}, {}

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, temb=None, **kwargs):
        now = self.evaluation[0]
        self.met[now] = place = self.met.get(now, -1) + 1
        entry = hidden_states if self.adds else 0.0
        if self.computes(now):
            args = (attn, hidden_states, encoder_hidden_states, attention_mask, temb)
            self.kept[place] = self.processor(*args, **kwargs) - entry
        return self.kept[place][-len(hidden_states) :] + entry


def by_hand(pipe, computes, adds=False):
    """The plain pipeline, where layers of each kind compute at the evaluations that `computes[kind]` says."""
    evaluation = [-1]

    def count(*_):
        evaluation[0] += 1

    pipe.unet.register_forward_pre_hook(count)
    for kind, layers in by_kind(pipe.unet).items():
        for layer in layers:
            layer.processor = ByHand(layer.processor, computes.get(kind, lambda i: True), evaluation, adds)
    return pipe


def level(pipe, below):
    """The first evaluation below a noise level."""
    alphas = pipe.scheduler.alphas_cumprod[pipe.scheduler.timesteps]
    return int((((1 - alphas) / alphas).sqrt() < below).int().argmax())


def switch_off(at):
    def switch(pipe, step, timestep, kwargs):
        if step == at:
            pipe._guidance_scale = 0.0
            kwargs["prompt_embeds"] = kwargs["prompt_embeds"].chunk(2)[1]
        return kwargs

    return {"callback_on_step_end": switch, "callback_on_step_end_tensor_inputs": ["latents", "prompt_embeds"]}


SWITCHES = [{}, switch_off(0), switch_off(2), switch_off(3)]


@pytest.mark.parametrize("options", SWITCHES, ids=["on", "off_0", "off_2", "off_3"])
@pytest.mark.parametrize("below", [0.6, 2.0])
def test_the_gate_freezes_each_rows_own_output(below, options):
    ours, report = final(fast("sd", CrossAttentionGate(below=below)), "sd", **options)
    pipe = tiny("sd")
    pipe.scheduler.set_timesteps(STEPS)
    gate = level(pipe, below)
    assert 0 < gate < STEPS - 1
    close(ours, final(by_hand(pipe, {"cross": lambda i: i <= gate}), "sd", **options)[0])
    if not options:
        assert report.counts[GATE] == {"computed": 2 * (gate + 1), "reused": 2 * (STEPS - gate - 1)}


@pytest.mark.parametrize("options", SWITCHES, ids=["on", "off_0", "off_2", "off_3"])
def test_policies_of_two_kinds_with_guidance_switched_off_mid_run(options):
    ours, _ = final(fast("sd", TWICE), "sd", **options)
    pipe = by_hand(tiny("sd"), {"spatial": lambda i: i % 2 == 0, "cross": lambda i: i % 3 == 0})
    close(ours, final(pipe, "sd", **options)[0])


def test_temporal_layers_go_by_their_own_policy():
    ours, report = final(fast("animatediff", TWICE), "animatediff")
    each = {"spatial": lambda i: i % 2 == 0, "cross": lambda i: i % 3 == 0, "temporal": lambda i: i % 4 == 0}
    close(ours, final(by_hand(tiny("animatediff"), each), "animatediff")[0])
    assert report.counts[NAME] == {"computed": 2 * (3 + 2 + 2), "reused": 2 * (3 + 4 + 4)}


def test_a_layer_called_once_a_window_of_frames_keeps_an_output_for_each():
    options, pipes = {"num_frames": 5}, [tiny("animatediff"), tiny("animatediff")]
    for pipe in pipes:
        pipe.enable_free_noise(context_length=3, context_stride=2)
    temporal = AttentionBroadcast(spatial=OFF, cross=OFF, temporal=Every(2))
    ours, _ = final(AcceleratedPipeline(pipes[0], Recipe(temporal)), "animatediff", **options)
    close(ours, final(by_hand(pipes[1], {"temporal": lambda i: i % 2 == 0}), "animatediff", **options)[0])


def test_of_a_layer_that_adds_its_own_input_what_it_adds_is_kept():
    ours, _ = final(fast("ddpm", TWICE), "ddpm")
    pipe = by_hand(tiny("ddpm"), {"spatial": lambda i: i % 2 == 0}, adds=True)
    close(ours, final(pipe, "ddpm")[0])


# ---------------------------------------------------------------------------------------------------- rows

PROMPTS = ("a red fox", "two blue cubes", "sand")
FLOW_GATE = CrossAttentionGate(below=0.9)


@pytest.mark.parametrize(
    ("family", "technique"),
    [(f, TWICE) for f in ("sd", "pixart", "sd3", "flux", "sana", "animatediff", "cogvideox", "wan")]
    + [("sd", CrossAttentionGate(below=1.5)), ("animatediff", CrossAttentionGate(below=1.5))]
    + [(f, FLOW_GATE) for f in ("sana", "wan", "wan22")],
)
def test_an_image_is_the_one_made_alone(family, technique):
    pipe = fast(family, technique)
    together, report = final(pipe, family, PROMPTS, range(3))
    assert report.counts[technique.name]["reused"] > 0
    for k, prompt in enumerate(PROMPTS):
        close(together[k : k + 1], final(pipe, family, [prompt], [k])[0], 1e-4)


@pytest.fixture
def apart(monkeypatch):
    """Images of one batch at noise levels a factor of 4 apart, as requests of a serving engine are: their policies
    decide differently. `apart(k)`: the first image of the next calls counts as image k."""
    describe, first = attachment.describe_rows, [0]

    def described(run, rows):
        return tuple(row._replace(sigma=row.sigma / 4 ** (row.image + first[0])) for row in describe(run, rows))

    monkeypatch.setattr(attachment, "describe_rows", described)
    return lambda k: first.__setitem__(0, k)


WINDOWS = AttentionBroadcast(spatial=Every(2) & Window(1.0, 0.1), cross=Every(3) & Window(0.5), temporal=OFF)
BLOCKS = FirstBlockCache(threshold=10.0, max_consecutive=1)


@pytest.mark.parametrize(
    "techniques",
    [(WINDOWS,), (CrossAttentionGate(below=0.5),), (BLOCKS, WINDOWS), (WINDOWS, DeepCache(when=Every(2)))],
)
def test_rows_of_a_batch_decide_each_for_itself(techniques, apart):
    pipe, calls = fast("sd", *techniques), []
    pipe.unet.conv_in.register_forward_pre_hook(lambda *_: calls.append(1))
    together, report = final(pipe, "sd", PROMPTS, range(3))
    assert len(calls) > STEPS, "all rows decided alike: nothing was proved"
    for k, prompt in enumerate(PROMPTS):
        apart(k)
        close(together[k : k + 1], final(pipe, "sd", [prompt], [k])[0], 1e-4)
    counts = report.counts[techniques[0].name]
    assert counts["computed"] + counts["reused"] > 0


def test_a_cache_that_decides_inside_must_stand_beneath(apart):
    with pytest.raises(Unsupported, match="name that technique after it"):
        final(fast("sd", WINDOWS, BLOCKS), "sd", PROMPTS, range(3))


def test_perturbed_attention_keeps_its_batch_whole(apart):
    """Its processors split the batch in three: rows that decide differently are all computed."""
    found, report = final(fast("sd_pag", WINDOWS), "sd_pag", PROMPTS, range(3))
    assert found.isfinite().all() and report.counts[NAME]["computed"] > 0


# ---------------------------------------------------------------------------------------------------- the rest


def test_heun_evaluates_twice_a_step_and_is_counted_so():
    pipe = tiny("sd")
    pipe.scheduler = HeunDiscreteScheduler.from_config(pipe.scheduler.config)
    accelerated = AcceleratedPipeline(pipe, Recipe(AttentionBroadcast(spatial=Every(2), cross=OFF)))
    assert final(accelerated, "sd")[1].counts[NAME] == {"computed": 12, "reused": 10}  # 11 evaluations of two rows


@pytest.mark.parametrize("family", ["sana", "wan", "wan22"])
def test_the_gate_of_a_flow_is_a_share_and_its_identity_the_plain_pipeline(family):
    plain, _ = final(tiny(family), family)
    assert torch.equal(final(fast(family, FLOW_GATE.identity()), family)[0], plain)
    found, report = final(fast(family, FLOW_GATE), family)
    assert not torch.equal(found, plain) and report.counts[GATE]["reused"] > 0
    with pytest.raises(Unsupported, match="choose a level in between, for instance"):
        fast(family, CrossAttentionGate(below=2.0))


@pytest.mark.parametrize(("family", "technique"), [("sd", TWICE), ("flux", TWICE), ("sd", CrossAttentionGate())])
def test_beneath_compiled_blocks(family, technique):
    alone, _ = final(fast(family, technique), family)
    both, _ = final(fast(family, technique, CompileBlocks(backend="eager")), family)
    close(both, alone, 1e-4)


def test_layers_of_another_size_start_anew():
    """The next call's latents have another size, and so do the latents of one call half-way."""
    pipe = fast("sd", TWICE)
    fresh, _ = final(pipe, "sd")
    final(pipe, "sd", height=16, width=48)
    assert torch.equal(final(pipe, "sd")[0], fresh)

    def shrink(pipe, step, timestep, kwargs):
        return kwargs | ({"latents": kwargs["latents"][..., ::2, :]} if step == 0 else {})

    found, report = final(pipe, "sd", callback_on_step_end=shrink)
    assert found.isfinite().all() and found.shape[-2] * 2 == fresh.shape[-2]
    assert report.counts[NAME]["computed"] > 2 * (3 + 2)


def test_another_text_length_half_way_is_computed_after_all():
    def shorten(pipe, step, timestep, kwargs):
        return kwargs | ({"prompt_embeds": kwargs["prompt_embeds"][:, :8]} if step == 0 else {})

    options = {"callback_on_step_end": shorten, "callback_on_step_end_tensor_inputs": ["prompt_embeds"]}
    ours, report = final(fast("sd", AttentionBroadcast(spatial=OFF, cross=Every(3), temporal=OFF)), "sd", **options)
    assert report.counts[NAME] == {"computed": 2 * 3, "reused": 2 * 3}
    close(ours, final(by_hand(tiny("sd"), {"cross": lambda i: i in (0, 1, 4)}), "sd", **options)[0])


@pytest.mark.parametrize(
    ("technique", "family", "error", "words"),
    [
        (AttentionBroadcast(spatial=Dynamic(0.1)), "sd", Unsupported, "use FirstBlockCache"),
        (AttentionBroadcast(cross=Window()), "sd", Unsupported, r"\(cross=.* never computes inside its window"),
        (AttentionBroadcast(cross=3), "sd", InvalidRecipe, r"\(cross=3\): give a policy"),
        (AttentionBroadcast(spatial=OFF, cross=OFF), "sd", Unsupported, "its attention is spatial and cross"),
        (AttentionBroadcast(spatial=OFF, temporal=OFF), "flux", Unsupported, "its attention is spatial"),
        (CrossAttentionGate(), "flux", Unsupported, "use AttentionBroadcast"),
        (CrossAttentionGate(), "ddpm", Unsupported, "use AttentionBroadcast"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_changes(technique, family, error, words):
    with pytest.raises(error, match=words):
        fast(family, technique)


def test_a_gate_is_a_noise_level():
    with pytest.raises(InvalidRecipe, match=r"from 0 .never. up"):
        CrossAttentionGate(below=-1.0)


def test_both_claim_attention_and_leave_blocks_to_others():
    with pytest.raises(InvalidRecipe, match="both own the reuse of attention"):
        Recipe(TWICE, CrossAttentionGate())
    Recipe(TWICE, DeepCache())


def test_a_listed_policy_goes_through_json():
    recipe = Recipe(AttentionBroadcast(spatial=Listed((0, 3)), cross=OFF, temporal=OFF))
    assert Recipe.from_dict(recipe.to_dict()) == recipe
