"""TeaCache against a plain loop, rows that decide differently, what every block's table entry computes, and the fit."""

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fewstep import AcceleratedPipeline, Recipe
from fewstep.accel import fit
from fewstep.accel.cache import modulated
from fewstep.accel.cache.first_block import FirstBlockCache
from fewstep.accel.cache.fit_indicator import fitted, pairs_of
from fewstep.accel.cache.modulated import Accumulated, Given, ModulatedCache, TeaCache, modulation
from fewstep.accel.cache.transformer_span import Contract, lists
from fewstep.accel.errors import InvalidConfig, InvalidRecipe, Unsupported
from fewstep.accel.zoo.tiny import FAMILIES, tiny

STEPS = 8
SHORT = {"max_sequence_length": 16}
ALONE = {
    "flux": SHORT | {"guidance_scale": 3.5},
    "pixart": SHORT | {"guidance_scale": 1.0, "use_resolution_binning": False},
}


def latents(pipe, prompts=("a red fox",), seeds=None, **options):
    """Final latents and the report; prompt k is drawn from seed k."""
    rng = [torch.Generator().manual_seed(i) for i in seeds or range(len(prompts))]
    call = {"num_inference_steps": STEPS, "output_type": "latent", "height": 32, "width": 32}
    call |= {"prompt": list(prompts), "generator": rng} | options
    if isinstance(pipe, AcceleratedPipeline):
        result = pipe.run(**call)
        return result.output.images, result.report
    return pipe(**call).images, None


def close(found, expected, tolerance=1e-5):
    assert (found - expected).norm() <= tolerance * expected.norm()


def by_hand(pipe, family, threshold, coefficients, limit):
    """TeaCache in a plain loop over one transformer, its forward replaced whole; the second value says what it did."""
    blocks = [block for found in lists(pipe.transformer, "test") for block in found]
    plain = {block: block.forward for block in blocks}
    state = {"sum": 0.0, "reused": 0, "before": None, "skip": False, "added": None}
    done = []

    def streams(args, kwargs):
        given = Given(zip(Contract(blocks[0]).parameters, args, strict=False), **kwargs)
        return given["hidden_states"], given["encoder_hidden_states"], given

    def modulate(block, given):
        if family == "flux":
            return block.norm1(given["hidden_states"], emb=given["temb"])[0]
        rows = block.scale_shift_table[None] + given["timestep"].reshape(len(given["hidden_states"]), 6, -1)
        shift, scale, *_ = rows.chunk(6, dim=1)
        return block.norm1(given["hidden_states"]) * (1 + scale) + shift

    def first(block, *args, **kwargs):
        hidden, _, given = streams(args, kwargs)
        now, before = modulate(block, given), state["before"]
        if before is not None:
            change = (now - before).abs().mean() / before.abs().mean()
            state["sum"] += float(np.polyval(coefficients, float(change)))
        skip = before is not None and state["sum"] < threshold and state["reused"] < limit
        state.update(before=now, skip=skip, reused=state["reused"] + 1 if skip else 0, entry=hidden)
        if not skip:
            state["sum"] = 0.0
        done.append(skip)

    def forward(block, *args, **kwargs):
        if block is blocks[0]:
            first(block, *args, **kwargs)
        hidden, text, _ = streams(args, kwargs)
        if not state["skip"]:
            output = plain[block](*args, **kwargs)
            picture = output[1] if family == "flux" else output
            if block is blocks[-1]:
                state["added"] = picture - state["entry"]
            return output
        picture = hidden + state["added"] if block is blocks[-1] else hidden
        return (text, picture) if family == "flux" else picture

    for block in blocks:
        block.forward = lambda *args, block=block, **kwargs: forward(block, *args, **kwargs)
    return done


@pytest.mark.parametrize("family", ["flux", "pixart"])
@pytest.mark.parametrize(
    ("threshold", "coefficients", "limit"), [(0.3, (1.0, 0.0), 3), (0.35, (1.0, 0.0), 99), (0.2, (2.0, -0.1, 0.05), 2)]
)
def test_it_equals_a_plain_loop(family, threshold, coefficients, limit):
    technique = TeaCache(threshold=threshold, coefficients=coefficients, max_consecutive=limit)
    fast = AcceleratedPipeline(tiny(family), Recipe(technique))
    ours, report = latents(fast, **ALONE[family])
    peer = tiny(family)
    done = by_hand(peer, family, threshold, coefficients, limit)
    close(ours, latents(peer, **ALONE[family])[0])
    assert report.counts["tea_cache"] == {"reused": sum(done), "computed": STEPS - sum(done)}
    assert 0 < sum(done) < STEPS - 1


class Spy(Accumulated):
    """Notes the decisions of every row."""

    def decide(self, changes):
        flags = super().decide(changes)
        for row, flag, change in zip(self.rows, flags, changes, strict=True):
            self.cache.seen.setdefault((row.image, row.branch), []).append((flag, change))
        return flags


GUIDED = {
    "pixart": SHORT | {"guidance_scale": 4.0, "use_resolution_binning": False},
    "sd3": SHORT | {"guidance_scale": 4.0},
    "sd": {"guidance_scale": 4.0},
}


@pytest.mark.parametrize(("family", "threshold"), [("pixart", 0.228), ("sd3", 0.0912), ("sd", 0.745)])
def test_rows_decide_for_themselves_and_a_picture_is_the_one_made_alone(family, threshold, monkeypatch):
    monkeypatch.setattr(ModulatedCache, "seen", {}, raising=False)
    monkeypatch.setattr(modulated, "Accumulated", Spy)
    prompts = ["a red fox", "two blue cubes", "sand"]
    fast = AcceleratedPipeline(tiny(family), Recipe(TeaCache(threshold=threshold)))
    together, _ = latents(fast, prompts, **GUIDED[family])
    seen, alone = dict(ModulatedCache.seen), {}
    for k, prompt in enumerate(prompts):
        ModulatedCache.seen.clear()
        close(together[k : k + 1], latents(fast, [prompt], [k], **GUIDED[family])[0], 1e-4)
        alone |= {(k, branch): decisions for (_, branch), decisions in ModulatedCache.seen.items()}
    assert {k: [f for f, _ in v] for k, v in seen.items()} == {k: [f for f, _ in v] for k, v in alone.items()}
    assert len({tuple(f for f, _ in v) for v in seen.values()}) > 1, "all rows decided alike: nothing was proved"


MEETS = {  # the module whose input the first block's modulated input is
    "dit": "attn1",
    "pixart": "attn1",
    "sd3": "attn",
    "flux": "attn",
    "sana": "attn1",
    "wan": "attn1",
    "cogvideox": "attn1",
    "qwen_image": "attn",
    "z_image": "attention",
}


@pytest.mark.parametrize("family", MEETS)
def test_the_table_computes_what_the_block_hands_to_its_attention(family, monkeypatch):
    """In its second, computed evaluation too: nothing of the first is met again."""
    pipe = tiny(family)
    block = modulated.first_block(lists(pipe.transformer, "test"))
    measured, met = [], []
    probe = Accumulated.probe
    monkeypatch.setattr(Accumulated, "probe", lambda self, feature: measured.append(feature) or probe(self, feature))

    def record(module, args, kwargs):
        met.append(args[0] if args else kwargs["hidden_states"])

    getattr(block, MEETS[family]).register_forward_pre_hook(record, with_kwargs=True)
    AcceleratedPipeline(pipe, Recipe(TeaCache(threshold=0.0)))(**FAMILIES[family].call())
    assert len(measured) == len(met) > 2
    for found, expected in zip(measured, met, strict=True):
        torch.testing.assert_close(found, expected)


def test_an_identity_stays_one_under_a_polynomial_that_falls_below_zero():
    pipe, family = tiny("pixart"), "pixart"
    plain, _ = latents(pipe, **ALONE[family])
    fast = AcceleratedPipeline(pipe, Recipe(TeaCache(threshold=0.0, coefficients=(1.0, -9.0))))
    assert torch.equal(latents(fast, **ALONE[family])[0], plain)


def test_a_threshold_that_decides_nothing_is_told_with_the_measured_range():
    for threshold, words in ((1e-6, "never allowed reuse"), (99.0, "always allowed reuse")):
        fast = AcceleratedPipeline(tiny("pixart"), Recipe(TeaCache(threshold=threshold, max_consecutive=99)))
        (note,) = latents(fast, **ALONE["pixart"])[1].notes
        assert words in note and "choose a value in between" in note


class Untimed(torch.nn.Module):
    pass


def test_a_block_that_is_not_known_is_refused_with_what_to_use():
    with pytest.raises(Unsupported, match="how Untimed modulates its input by the time: use FirstBlockCache"):
        modulation(Untimed())
    pipe = tiny("pixart")
    for block in pipe.transformer.transformer_blocks:
        block.norm_type = "layer_norm"  # of blocks that the time does not enter
    with pytest.raises(Unsupported, match="use FirstBlockCache"):
        AcceleratedPipeline(pipe, Recipe(TeaCache()))
    AcceleratedPipeline(tiny("pixart"), Recipe(FirstBlockCache()))


@pytest.mark.parametrize("coefficients", [(), (1.0, float("nan")), ("a",)])
def test_coefficients_that_are_no_polynomial_are_refused(coefficients):
    with pytest.raises(InvalidRecipe, match="highest power first"):
        TeaCache(coefficients=coefficients)


# ---------------------------------------------------------------------------------------------------- the fit


def test_the_fit_recovers_the_polynomial():
    rng = np.random.default_rng(0)
    x = rng.uniform(0.02, 0.6, 200)
    truth = (3.0, -1.0, 0.5, 0.1)
    exact = fitted(list(zip(x, np.polyval(truth, x), strict=True)), 3)
    np.testing.assert_allclose(exact["coefficients"], truth, rtol=1e-6)
    assert exact["r2"] == pytest.approx(1.0) and exact["range"] == [x.min(), x.max()] and exact["pairs"] == 200
    noise = fitted(list(zip(x, rng.normal(size=200), strict=True)), 3)
    assert noise["r2"] < 0.1


@pytest.mark.parametrize(
    ("pairs", "degree", "words"),
    [
        ([(0.1, 0.2)] * 9, 4, "9 pairs are too few for a polynomial of degree 4, which wants 10: give more steps"),
        ([(0.1, 0.2)] * 20, 2, "lie too close together for a polynomial of degree 2: give a lower degree"),
    ],
)
def test_a_fit_that_cannot_be_made_says_what_to_do(pairs, degree, words):
    with pytest.raises(InvalidConfig, match=words):
        fitted(pairs, degree)


@pytest.mark.parametrize("family", ["flux", "sd3", "sd"])
def test_the_pairs_are_the_changes_of_the_plain_pipeline(family):
    """Of every row and evaluation but the first; and the pipeline is the plain one afterwards."""
    pipe = tiny(family)
    call = {"num_inference_steps": 4, "output_type": "latent"}
    plain = pipe("a fox", generator=torch.Generator().manual_seed(0), **call)[0]
    pairs = pairs_of(pipe, ["a fox", "sand"], 4)
    rows = 1 if family == "flux" else 2  # branches of guidance
    assert len(pairs) == 2 * rows * 3
    assert all(0 < x < 9 and 0 < y < 9 for x, y in pairs)
    again = pipe("a fox", generator=torch.Generator().manual_seed(0), **call)[0]
    assert torch.equal(again, plain)


def test_the_command_writes_what_a_recipe_takes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny("flux").save_pretrained("flux")
    (tmp_path / "words.txt").write_text("a red fox\n\nsand\n")
    arguments = ["indicator", "flux", "--prompts", "words.txt", "--steps", "6", "--degree", "2"]
    result = CliRunner().invoke(fit.app, [*arguments, "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert (
        "10 pairs" in result.output
        and "R2 " in result.output
        and "TeaCache.from_file('indicator.json'" in result.output
    )
    found = json.loads((tmp_path / "indicator.json").read_text())
    assert found["format"] == 1 and found["model"] == "FluxTransformer2DModel" and len(found["coefficients"]) == 3
    recipe = Recipe(TeaCache.from_file("indicator.json", threshold=0.2))
    recipe.save("recipe.json")
    assert Recipe.load("recipe.json") == recipe
    latents(AcceleratedPipeline(tiny("flux"), recipe), **ALONE["flux"])


def test_a_missing_file_says_how_to_make_one(tmp_path):
    with pytest.raises(InvalidConfig, match="one prompt a line"):
        fit.read(tmp_path / "none.txt")
    with pytest.raises(InvalidRecipe, match="make one with: fewstep fit indicator"):
        TeaCache.from_file(tmp_path / "none.json")
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(InvalidRecipe, match="holds no fitted indicator"):
        TeaCache.from_file(tmp_path / "other.json")
