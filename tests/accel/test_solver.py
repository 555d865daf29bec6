"""SwapScheduler: what is carried over, what is refused, and whether every solver comes to the exact solution.

The oracle is Gaussian data of many means and widths: its denoiser and the solution of the sampling equation are known
in closed form, so that a solver, its schedule and its conversion are judged by one number.
"""

import json
import threading
from itertools import pairwise

import diffusers
import pytest
import torch
from diffusers import (
    CogVideoXDDIMScheduler,
    DDIMScheduler,
    DDPMScheduler,
    DEISMultistepScheduler,
    DPMSolverMultistepScheduler,
    EDMEulerScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    HeunDiscreteScheduler,
    PNDMScheduler,
    UniPCMultistepScheduler,
)

from fewstep import AcceleratedPipeline, Recipe
from fewstep.accel.conversion import KINDS
from fewstep.accel.errors import InvalidRecipe, Unsupported
from fewstep.accel.pure_noise import HeunFromPureNoise
from fewstep.accel.solver import SOLVERS, SwapScheduler
from fewstep.accel.target import Target
from fewstep.accel.zoo.tiny import FAMILIES, tiny

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")  # in diffusers' kdpm2 and lms

SD = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
ZERO_SNR = {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}


def zero_snr(**kwargs):
    return DDIMScheduler(**(SD | ZERO_SNR | {"clip_sample": False} | kwargs))


def flow(**kwargs):
    return FlowMatchEulerDiscreteScheduler(**({"shift": 3.0} | kwargs))


SOURCES = {
    "zero_snr": zero_snr,
    "sd15": lambda: PNDMScheduler(**SD, skip_prk_steps=True),
    "flow": flow,
}
RANDOM = ("ddpm", "euler_ancestral", "kdpm2_ancestral", "dpmpp_2m_sde", "sasolver", "lcm", "flow_lcm")


def swapped(name, source, **options):
    return SwapScheduler(name, options=options).convert(source)


# ------------------------------------------------------------------------------------------------ the oracle


class Oracle:
    """Gaussian data of `mean` and `width` an entry, its denoiser, and the end of the path that starts at `noise`."""

    def __init__(self, source, count=1, consistency=False):
        self.consistency = consistency  # a student's answer: the end of the path instead of the mean of all ends
        self.source, self.flow = source, "flow_prediction" in str(source.config) or hasattr(source, "set_shift")
        self.mean = torch.linspace(-0.8, 0.8, 64).double().view(1, 64, 1, 1)
        self.width = torch.linspace(0.05, 1.2, 64).double().view(1, 64, 1, 1)
        self.noise = torch.randn(count, 64, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        if not self.flow:
            levels = source.alphas_cumprod.double().clamp_min(2.0**-24)
            self.log_sigmas = 0.5 * ((1 - levels) / levels).log()

    def level(self, t):
        """Signal and noise at a timestep, whole or not."""
        t = float(t)
        if self.flow:
            return torch.tensor(1 - t / 1000), torch.tensor(t / 1000)
        low, share = int(t), t % 1
        sigma = torch.lerp(self.log_sigmas[low], self.log_sigmas[min(low + 1, 999)], share).exp()
        return 1 / (1 + sigma**2).sqrt(), sigma / (1 + sigma**2).sqrt()

    def predict(self, x, t):
        a, b = self.level(t)
        image = self.mean + a * self.width**2 * (x - a * self.mean) / ((a * self.width) ** 2 + b**2)
        if self.consistency:
            image = self.end(x, t)
        noise = (x - a * image) / b
        if self.flow:
            return noise - image
        return {"epsilon": noise, "sample": image, "v_prediction": a * noise - b * image}[
            self.source.config.prediction_type
        ]

    def end(self, x, t):
        a, b = self.level(t)
        return self.mean + self.width * (x - a * self.mean) / ((a * self.width) ** 2 + b**2).sqrt()

    def exact(self):
        return self.end(self.noise, 1000 if self.flow else 999)

    def sample(self, scheduler, steps, dtype=torch.float32, start=0):
        scheduler.set_timesteps(steps)
        x = (self.noise.to(dtype) * getattr(scheduler, "init_noise_sigma", 1)).to(dtype)
        extra = (
            {"generator": torch.Generator().manual_seed(1)}
            if "generator" in scheduler.step.__code__.co_varnames
            else {}
        )
        if isinstance(scheduler, diffusers.TCDScheduler):
            extra["eta"] = 0.0  # without its fresh noise it solves the equation
        wide = torch.float32 if getattr(scheduler, "steps_in_float32", False) else dtype
        for t in scheduler.timesteps[start:]:
            scaled = scheduler.scale_model_input(x, t) if hasattr(scheduler, "scale_model_input") else x
            output = self.predict(scaled.double(), t).to(dtype)
            x = scheduler.step(output.to(wide), t, x.to(wide), **extra)[0].to(dtype)
        return x.double()

    def error(self, scheduler, steps, dtype=torch.float32):
        return float((self.sample(scheduler, steps, dtype) - self.exact()).pow(2).mean().sqrt())


BETA_TARGETS = [n for n, (c, options) in SOLVERS.items() if "discrete" in KINDS[c] and "use_flow_sigmas" not in options]
FLOW_TARGETS = [n for n, (c, _) in SOLVERS.items() if "flow" in KINDS[c]]
CASES = [(case, n) for case in SOURCES for n in (FLOW_TARGETS if case == "flow" else BETA_TARGETS)]
CASES = [c for c in CASES if c[1] != "dpmpp_2s" and c not in (("zero_snr", "kdpm2"), ("zero_snr", "kdpm2_ancestral"))]


@pytest.mark.parametrize(("case", "name"), [c for c in CASES if c[1] not in RANDOM])
def test_solver_converges_to_the_exact_solution(case, name):
    oracle = Oracle(SOURCES[case]())
    scheduler = swapped(name, oracle.source)
    errors = {n: oracle.error(scheduler, n) for n in range(2, 21)}
    euler = Oracle(oracle.source).error(swapped("flow_euler" if oracle.flow else "euler", oracle.source), 20)
    assert max(errors.values()) < 0.75, errors  # all of the data's spread is 0.85
    assert errors[20] < 0.5 * errors[4] < errors[2]
    assert errors[20] < 1.5 * euler + 1e-3
    most = 50 if name == "tcd" else 100  # the steps that its students were trained on
    assert oracle.error(scheduler, most) < 0.045


@pytest.mark.parametrize(("case", "name"), [c for c in CASES if c[1] in RANDOM])
def test_solver_with_fresh_noise_comes_to_the_right_distribution(case, name):
    student = name in ("lcm", "flow_lcm")
    oracle = Oracle(SOURCES[case](), count=64, consistency=student)
    steps = 4 if student else 50
    images = oracle.sample(swapped(name, oracle.source), steps).transpose(0, 1).flatten(1)
    assert (images.mean(1) - oracle.mean.flatten()).abs().max() < 0.4
    ratio = images.std(1)[16:] / oracle.width.flatten()[16:]
    assert ratio.min() > 0.55 and ratio.max() < 1.35, ratio


@pytest.mark.parametrize("name", ["ddim", "euler", "heun", "dpmpp_2m", "unipc", "deis", "lms"])
@pytest.mark.parametrize("steps", [2, 5, 10, 20])
def test_pure_noise_start_is_right_in_bfloat16(name, steps):
    oracle = Oracle(zero_snr())
    scheduler = swapped(name, oracle.source)
    assert abs(oracle.error(scheduler, steps, torch.bfloat16) - oracle.error(scheduler, steps)) < 0.02


@pytest.mark.parametrize("steps", [2, 3, 6, 7, 10, 20, 50])
def test_euler_is_exact_ddim_at_every_number_of_steps(steps):
    oracle, source = Oracle(zero_snr()), zero_snr()
    times = [round(1000 - k * 1000 / steps) - 1 for k in range(steps)]
    x = oracle.noise
    for here, there in zip(times, [*times[1:], None], strict=True):
        a, b = oracle.level(here)
        v = oracle.predict(x, here)
        image, noise = a * x - b * v, a * v + b * x
        a, b = (1, 0) if there is None else oracle.level(there)
        x = a * image + b * noise
    assert (oracle.sample(swapped("euler", source), steps) - x).abs().max() < 2e-3


def test_plain_heun_is_wrong_from_pure_noise_and_ours_is_not():
    oracle = Oracle(zero_snr())
    ours = swapped("heun", oracle.source)
    plain = HeunDiscreteScheduler.from_config(ours.config)
    assert type(ours) is HeunFromPureNoise
    assert oracle.error(plain, 4) > 3 and oracle.error(ours, 4) < 0.2


def test_heun_from_pure_noise_starts_in_the_middle_as_heun_does():
    oracle = Oracle(zero_snr())
    ours = swapped("heun", oracle.source)
    plain = HeunDiscreteScheduler.from_config(ours.config)
    assert torch.equal(oracle.sample(ours, 10, start=4), oracle.sample(plain, 10, start=4))


def test_edm_solver_of_the_same_preconditioning():
    made = swapped("EDMDPMSolverMultistepScheduler", EDMEulerScheduler(sigma_data=0.7, sigma_max=40.0, rho=5.0))
    assert (made.config.sigma_data, made.config.sigma_max, made.config.rho) == (0.7, 40.0, 5.0)
    with pytest.raises(Unsupported, match="EDMEulerScheduler or EDMDPM"):
        swapped("dpmpp_2m", EDMEulerScheduler())


# ------------------------------------------------------------------------------------------------ what is carried

BETA_SOURCES = {
    "sd_ddim": DDIMScheduler(**SD, clip_sample=False, set_alpha_to_one=False),
    "sd_pndm": PNDMScheduler(**SD, skip_prk_steps=True),
    "sd_euler": EulerDiscreteScheduler(**SD, timestep_spacing="leading"),
    "zero_snr": zero_snr(),
    "cosine": DDIMScheduler(beta_schedule="squaredcos_cap_v2", clip_sample=False, prediction_type="v_prediction"),
    "sigmoid": DDPMScheduler(beta_schedule="sigmoid", clip_sample=False, timestep_spacing="trailing"),
    "trained": DDIMScheduler(
        trained_betas=torch.linspace(1e-4, 0.03, 500).tolist(), num_train_timesteps=500, clip_sample=False
    ),
    "cogvideox": CogVideoXDDIMScheduler(**(SD | ZERO_SNR)),
}


@pytest.mark.parametrize("name", BETA_TARGETS)
@pytest.mark.parametrize("case", BETA_SOURCES)
def test_conversion_keeps_the_model_and_the_way_of_sampling(case, name):
    source = BETA_SOURCES[case]
    if case in ("zero_snr", "cogvideox", "cosine") and name.startswith("kdpm2"):
        with pytest.raises(Unsupported, match="pure noise: use heun"):
            swapped(name, source)
        return
    options = {"timestep_spacing": "linspace"} if name == "dpmpp_2s" else {}
    before = dict(source.config)
    made = swapped(name, source, **options)
    assert torch.allclose(made.alphas_cumprod.double(), source.alphas_cumprod.double(), rtol=1e-4, atol=2**-23)
    same = ("num_train_timesteps", "prediction_type", "steps_offset", "timestep_spacing")
    for field in same[: 2 if options else 4]:
        assert made.config[field] == source.config[field]
    assert not made.config.get("thresholding") and not made.config.get("use_karras_sigmas")
    assert name == "tcd" or not made.config.get("clip_sample") or case == "cogvideox"
    assert dict(source.config) == before
    made.set_timesteps(10)
    times = made.timesteps.tolist()
    assert all(here > there - 1e-3 for here, there in pairwise(times))
    if made.config.timestep_spacing == "trailing" and name not in ("lcm", "tcd", "dpmpp_2s", "pndm"):
        assert round(times[0]) == made.config.num_train_timesteps - 1


def test_a_class_without_clipping_does_not_make_another_clip():
    for source in (PNDMScheduler(**SD), EulerDiscreteScheduler(**SD), DPMSolverMultistepScheduler(**SD)):
        assert DDIMScheduler.from_config(source.config).config.clip_sample  # what diffusers would do
        assert swapped("ddim", source).config.clip_sample is False
        assert swapped("ddpm", source).config.clip_sample is False


def test_spacing_that_was_never_stated_is_kept():
    assert DPMSolverMultistepScheduler.from_config(DDIMScheduler().config).config.timestep_spacing == "linspace"
    source = DDIMScheduler(clip_sample=False)
    assert swapped("dpmpp_2m", source).config.timestep_spacing == "leading"
    assert swapped("ddim", EulerDiscreteScheduler()).config.timestep_spacing == "linspace"


def test_clipping_is_carried_with_its_range():
    made = swapped("heun", DDPMScheduler(clip_sample_range=2.0))
    assert made.config.clip_sample and made.config.clip_sample_range == 2.0


def test_zero_snr_that_only_the_checkpoint_states_is_restored():
    hidden = DEISMultistepScheduler.from_config(zero_snr().config)
    assert hidden.alphas_cumprod[-1] > 1e-3
    assert swapped("ddim", hidden).alphas_cumprod[-1] == 0
    assert swapped("lms", hidden).alphas_cumprod[-1] < 1e-6


def test_options_override_and_the_rest_of_the_same_class_stays():
    source = DPMSolverMultistepScheduler(**SD, solver_order=3, use_karras_sigmas=True)
    made = swapped("DPMSolverMultistepScheduler", source, euler_at_final=True)
    assert made.config.euler_at_final and made.config.use_karras_sigmas and made.config.solver_order == 3
    assert swapped("dpmpp_2m", source).config.solver_order == 2
    assert swapped("euler", source).config.use_karras_sigmas
    assert swapped("euler", source, use_karras_sigmas=False).config.use_karras_sigmas is False


def test_solver_settings_do_not_travel_between_classes():
    source = DPMSolverMultistepScheduler(**SD, algorithm_type="sde-dpmsolver++", solver_type="heun", solver_order=3)
    made = swapped("unipc", source)
    assert (made.config.solver_type, made.config.solver_order) == ("bh2", 2)


@pytest.mark.parametrize(
    "name", ["flow_euler", "flow_heun", "flow_lcm", "dpmpp_2m", "dpmpp_2s", "unipc", "deis", "sasolver"]
)
def test_flow_shift_is_carried(name):
    for source in (UniPCMultistepScheduler(**(FLOW | {"flow_shift": 5.0})), flow(shift=5.0), moved(5.0)):
        made = swapped(name, source)
        field = "shift" if name.startswith("flow") else "flow_shift"
        assert (made.shift if hasattr(made, "set_shift") else made.config[field]) == 5.0
        assert name.startswith("flow") or made.config.prediction_type == "flow_prediction"
        made.set_timesteps(8)
        assert made.timesteps[0] > 995


def moved(shift):
    source = flow(shift=1.0)
    source.set_shift(shift)
    return source


def test_what_pipelines_read_from_the_config_is_still_there():
    source = flow(use_dynamic_shifting=True, base_image_seq_len=64, max_shift=0.9)
    made = swapped("unipc", source)
    assert made.config.use_dynamic_shifting and made.config.max_shift == 0.9 and made.config.base_image_seq_len == 64


# ------------------------------------------------------------------------------------------------ what is refused

REFUSED = [
    ("euler", DDIMScheduler(**SD), {}, "clip_sample=True.*options={'clip_sample': False}"),
    ("pndm", DDIMScheduler(**SD, thresholding=True, clip_sample=False), {}, "thresholding"),
    ("ddim", EulerDiscreteScheduler(use_karras_sigmas=True), {}, "use_karras_sigmas"),
    ("dpmpp_2s", zero_snr(), {}, "timestep_spacing='trailing'"),
    ("ddim", EulerDiscreteScheduler(timestep_type="continuous", prediction_type="v_prediction"), {}, "continuous"),
    ("euler", zero_snr(prediction_type="epsilon"), {}, "v_prediction"),
    ("kdpm2", zero_snr(), {}, "use heun"),
    ("pndm", DDIMScheduler(prediction_type="sample", clip_sample=False), {}, "predicts the image"),
    ("ddim", DDPMScheduler(variance_type="learned_range"), {}, "variance"),
    ("flow_euler", zero_snr(), {}, "another kind of model.*use ddim"),
    ("flow_unipc", zero_snr(), {}, "another kind of model"),
    ("ddim", flow(), {}, "use flow_euler"),
    ("unipc", flow(), {"use_flow_sigmas": False}, "another kind"),
    ("IPNDMScheduler", zero_snr(), {}, "another kind of model"),
    ("flow_heun", flow(use_dynamic_shifting=True), {}, "use_dynamic_shifting"),
    ("dpmpp_2m", flow(shift_terminal=0.1), {}, "shift_terminal"),
    ("dpmpp_2m", flow(use_dynamic_shifting=True, time_shift_type="linear"), {}, "unipc"),
    ("dpmpp_2m", flow(), {"use_karras_sigmas": True}, "noise levels"),
    ("unipc", zero_snr(), {"predict_x0": False}, "NaN"),
    ("unipc", zero_snr(), {"solver_type": "bh1"}, "NaN"),
    ("euler", zero_snr(), {"use_karras_sigmas": True, "use_beta_sigmas": True}, "refuses these settings"),
]


@pytest.mark.parametrize(("name", "source", "options", "words"), REFUSED)
def test_what_cannot_be_expressed_is_refused(name, source, options, words):
    with pytest.raises(Unsupported, match=words):
        swapped(name, source, **options)


def test_a_difference_that_was_accepted_is_not_refused():
    assert swapped("euler", DDIMScheduler(**SD), clip_sample=False).config.beta_end == 0.012


def test_learned_variance_goes_to_a_class_that_takes_it():
    source = DDPMScheduler(variance_type="learned_range", clip_sample=False)
    assert swapped("dpmpp_2m", source).config.variance_type == "learned_range"
    assert swapped("dpmpp_2m", DDPMScheduler(clip_sample=False)).config.variance_type is None


def test_unknown_names_and_options_are_refused_before_any_model():
    with pytest.raises(InvalidRecipe, match="known: ddim, "):
        SwapScheduler("dpmpp_9m")
    with pytest.raises(InvalidRecipe, match="unknown scheduler 'UNet2DModel'"):
        SwapScheduler("UNet2DModel")
    with pytest.raises(InvalidRecipe, match=r"has no order; known: .*solver_order"):
        SwapScheduler("unipc", options={"order": 3})
    with pytest.raises(InvalidRecipe, match="clip_sample"):
        SwapScheduler("unipc", options={"clip_sample": True})
    with pytest.raises(InvalidRecipe, match="JSON"):
        SwapScheduler("unipc", options={"trained_betas": torch.ones(3)})


MISFITS = [
    ("ddpm", "euler", {"clip_sample": False}, "scale latents|generator"),
    ("ddpm", "unipc", {"clip_sample": False}, "generator to step"),
    ("dit", "euler", {}, "scale latents"),
    ("qwen_image", "dpmpp_2m", {}, "passes sigmas"),
    ("z_image", "unipc", {}, "sigmas as a list"),
    ("flux_img2img", "unipc", {}, "scale_noise"),
]


@pytest.mark.parametrize(("family", "name", "options", "words"), MISFITS)
def test_what_the_pipeline_would_hand_over_is_looked_at_first(family, name, options, words):
    with pytest.raises(Unsupported, match=words):
        SwapScheduler(name, options=options).check(Target.of_pipeline(tiny(family)))


def test_mu_without_dynamic_shifting():
    pipe = tiny("flux")
    pipe.scheduler = flow(shift=1.0)
    with pytest.raises(Unsupported, match="mu"):
        SwapScheduler("dpmpp_2m").check(Target.of_pipeline(pipe))
    SwapScheduler("unipc").check(Target.of_pipeline(pipe))


def test_a_denoiser_alone_has_no_scheduler():
    with pytest.raises(Unsupported, match="pipeline"):
        SwapScheduler("ddim").check(Target(None, {"unet": tiny("sd").unet}))


# ------------------------------------------------------------------------------------------------ on pipelines


def images(output):
    first = output[0]
    return first if isinstance(first, torch.Tensor) else torch.as_tensor(first)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_the_pipelines_own_class_is_bit_equal(family):
    pipe = tiny(family)
    plain = images(pipe(**FAMILIES[family].call()))
    swap = SwapScheduler(type(pipe.scheduler).__name__)
    assert torch.equal(images(AcceleratedPipeline(pipe, Recipe(swap))(**FAMILIES[family].call())), plain)


BY_HAND = {
    "sd": ("unipc", lambda: UniPCMultistepScheduler(**SD, timestep_spacing="leading")),
    "sdxl": ("euler", lambda: EulerDiscreteScheduler(**SD, timestep_spacing="leading")),
    "sd_img2img": ("heun", lambda: HeunDiscreteScheduler(**SD, timestep_spacing="leading")),
    "sd_inpaint": ("dpmpp_2m", lambda: DPMSolverMultistepScheduler(**SD, timestep_spacing="leading")),
    "sd3": ("unipc", lambda: UniPCMultistepScheduler(**FLOW)),
    "wan": ("flow_euler", flow),
}


@pytest.mark.parametrize("family", list(BY_HAND))
def test_swap_equals_the_pipeline_with_the_right_scheduler(family):
    name, right = BY_HAND[family]
    swapped_images = images(AcceleratedPipeline(tiny(family), Recipe(SwapScheduler(name)))(**FAMILIES[family].call()))
    pipe = tiny(family)
    pipe.scheduler = right()
    assert torch.equal(swapped_images, images(pipe(**FAMILIES[family].call())))


def test_the_pipeline_and_its_folder_keep_their_scheduler(tmp_path):
    pipe = tiny("sd")
    own, before = pipe.scheduler, {k: repr(v) for k, v in vars(pipe.scheduler).items()}
    plain = images(pipe(**FAMILIES["sd"].call()))
    pipe.scheduler.timesteps = own.timesteps
    before = {k: repr(v) for k, v in vars(own).items()}
    fast = AcceleratedPipeline(pipe, Recipe(SwapScheduler("dpmpp_2m"), num_inference_steps=3))
    first = images(fast(**FAMILIES["sd"].call()))
    assert fast.scheduler is own and {k: repr(v) for k, v in vars(own).items()} == before
    fast.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "model_index.json").read_text())["scheduler"][1] == "DDIMScheduler"
    again = AcceleratedPipeline.from_pretrained(tmp_path)
    again.set_progress_bar_config(disable=True)
    assert torch.equal(images(again(**FAMILIES["sd"].call())), first) and not torch.equal(first, plain)
    assert torch.equal(images(fast.detach()(**FAMILIES["sd"].call())), plain)


def test_a_scheduler_put_in_later_is_swapped_anew():
    pipe = tiny("sd")
    fast = AcceleratedPipeline(pipe, Recipe(SwapScheduler("euler")))
    leading = images(fast(**FAMILIES["sd"].call()))
    pipe.scheduler = DDIMScheduler(**SD, clip_sample=False, timestep_spacing="trailing")
    trailing = images(fast(**FAMILIES["sd"].call()))
    pipe.scheduler.register_to_config(timestep_spacing="leading")
    assert not torch.equal(leading, trailing)
    assert torch.equal(images(fast(**FAMILIES["sd"].call())), leading)


def test_bfloat16_pipeline_from_pure_noise():
    """The step itself is in float32: what the oracle shows above, through the pipeline's own call."""
    call = FAMILIES["sd"].call() | {"output_type": "latent"}
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        pipe = tiny("sd").to(dtype)
        pipe.scheduler = zero_snr()
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(1, 4, 16, 16, generator=generator).to(dtype)
        fast = AcceleratedPipeline(pipe, Recipe(SwapScheduler("deis")))
        found[dtype] = fast(**(call | {"latents": noise}))[0]
    assert found[torch.bfloat16].dtype == torch.bfloat16
    assert (found[torch.bfloat16].float() - found[torch.float32]).abs().mean() < 0.1 * found[torch.float32].std()


def test_threads_share_one_conversion():
    pipe = tiny("sd")
    fast = AcceleratedPipeline(pipe, Recipe(SwapScheduler("unipc")))
    alone, found = images(fast(**FAMILIES["sd"].call())), []
    calls = [threading.Thread(target=lambda: found.append(images(fast(**FAMILIES["sd"].call())))) for _ in range(4)]
    for call in calls:
        call.start()
    for call in calls:
        call.join()
    assert len(found) == 4 and all(torch.equal(image, alone) for image in found)
    make = fast.attachment.patches.components["scheduler"]
    assert make(pipe.scheduler) is make(pipe.scheduler)


# ------------------------------------------------------------------------------------------------ as a value


def test_recipe_round_trip_and_value_semantics():
    swap = SwapScheduler("unipc", options={"solver_order": 3, "disable_corrector": (0, 1)})
    recipe = Recipe(swap, num_inference_steps=10)
    back = Recipe.from_dict(json.loads(json.dumps(recipe.to_dict())))
    assert back == recipe and hash(back) == hash(recipe)
    assert str(SwapScheduler("ddim")) == "SwapScheduler(scheduler='ddim')" and SwapScheduler("ddim").identity() is None
    with pytest.raises(TypeError):
        swap.options["solver_order"] = 2
    given = {"solver_order": 3}
    kept = SwapScheduler("unipc", options=given)
    given["solver_order"] = 1
    assert kept.options == {"solver_order": 3}


def test_every_name_is_a_diffusers_class_and_takes_its_options():
    for name, (cls, options) in SOLVERS.items():
        assert cls in KINDS and hasattr(diffusers, cls)
        SwapScheduler(name, options=dict(options))
