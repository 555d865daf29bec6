"""TinyDecoder: the right latents in, the right pictures out, and nothing else touched."""

import pytest
import torch
from diffusers import AutoencoderKL, AutoencoderTiny

from fewstep import AcceleratedPipeline, Recipe, Unsupported
from fewstep.accel import catalog
from fewstep.accel.decoder import CARRIED, DECODERS, TinyDecoder
from fewstep.accel.errors import InvalidConfig, InvalidRecipe
from fewstep.accel.zoo.embedded import HERE, load
from fewstep.accel.zoo.tiny import FAMILIES, tiny


def small(folder, **changes):
    """A random AutoencoderTiny for the latents of the tiny families."""
    shape = {"encoder_block_out_channels": (8, 8), "num_encoder_blocks": (0, 0)}
    shape |= {"decoder_block_out_channels": (8, 8), "num_decoder_blocks": (1, 1)}
    torch.manual_seed(0)
    AutoencoderTiny(**shape | changes).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def weights(tmp_path):
    return small(tmp_path / "decoder")


def accelerated(family, weights):
    return AcceleratedPipeline(tiny(family), Recipe(TinyDecoder(weights=weights)))


@pytest.mark.parametrize("family", ["sd", "sdxl", "sd3", "pixart", "z_image", "animatediff", "sd_inpaint"])
def test_latents_arrive_in_the_scale_of_the_denoiser(family, weights, outputs):
    """By hand: the pipeline's final latents through the decoder alone. SD3 and Z-Image shift theirs."""
    fast, decoder = accelerated(family, weights), AutoencoderTiny.from_pretrained(weights)
    latents, found = outputs(fast, family, output_type="latent"), outputs(fast, family)
    frames = latents.transpose(1, 2).flatten(0, 1) if family == "animatediff" else latents
    with torch.no_grad():
        expected = (decoder.decode(frames).sample / 2 + 0.5).clamp(0, 1)
    assert expected.std() > 1e-3
    torch.testing.assert_close(found.view_as(expected), expected, atol=1e-5, rtol=0)


def test_the_latents_are_untouched_and_encoding_is_the_autoencoders_own(weights, outputs):
    for family in ("sd_img2img", "flux_img2img"):
        plain = outputs(tiny(family), family, output_type="latent")
        assert torch.equal(outputs(accelerated(family, weights), family, output_type="latent"), plain)


def test_detach_gives_the_own_decoder_back(weights, outputs):
    pipe = tiny("sd")
    plain, attributes = outputs(pipe, "sd"), dict(vars(pipe.vae))
    fast = AcceleratedPipeline(pipe, Recipe(TinyDecoder(weights=weights)))
    assert not torch.equal(outputs(fast, "sd"), plain)
    with pytest.warns(UserWarning, match="runs plain"):
        assert torch.equal(outputs(pipe, "sd"), plain)
    fast.detach()
    assert vars(pipe.vae) == attributes and torch.equal(outputs(pipe, "sd"), plain)


def in_call(fast, function):
    """What `function(vae)` gives inside a call of the pipeline."""
    found = []

    def tell(pipe, step, timestep, kwargs):
        found.append(function(pipe.vae))
        return {}

    fast(**FAMILIES["sd"].call() | {"num_inference_steps": 1, "callback_on_step_end": tell})
    return found[0]


def test_outputs_come_as_asked_for_and_in_the_precision_of_the_latents(weights):
    fast, z = accelerated("sd", weights), torch.randn(2, 4, 8, 8)
    whole = in_call(fast, lambda vae: vae.decode(z).sample)
    assert torch.equal(in_call(fast, lambda vae: vae.decode(z, return_dict=False, generator=None)[0]), whole)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        lower = in_call(fast, lambda vae, dtype=dtype: vae.decode(z.to(dtype)).sample)
        assert lower.dtype == dtype and (lower.double() - whole).abs().max() < 0.05
    assert torch.equal(in_call(fast, lambda vae: vae.decode(z).sample), whole)  # half precision left no trace


def test_slices_and_tiles(tmp_path):
    """As the autoencoder was told; diffusers' tiles for a small decoder are right for factor 8 alone."""
    shape = {"decoder_block_out_channels": (8,) * 4, "num_decoder_blocks": (1, 0, 0, 0)}
    weights, blocks = small(tmp_path, **shape), {"block_out_channels": (8, 8, 8, 8), "norm_num_groups": 4}
    pipe = tiny("sd")
    kinds = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    pipe.vae = AutoencoderKL(latent_channels=4, **blocks, **kinds)
    fast, z = AcceleratedPipeline(pipe, Recipe(TinyDecoder(weights=weights))), torch.randn(2, 4, 72, 8)
    decode = lambda vae: vae.decode(z).sample  # noqa: E731
    whole = in_call(fast, decode)
    fast.vae.enable_slicing()
    torch.testing.assert_close(in_call(fast, decode), whole, atol=1e-5, rtol=0)
    fast.vae.enable_tiling()
    tiled = in_call(fast, decode)
    assert tiled.shape == whole.shape and not torch.equal(tiled, whole)
    assert (tiled - whole).abs().mean() < 0.02


def test_the_report_counts_pictures(weights):
    report = accelerated("sd", weights).run(**FAMILIES["sd"].call() | {"num_images_per_prompt": 2}).report
    assert report.counts["tiny_decoder"] == {"decoded": 2}
    assert "tiny_decoder: 2 decoded" in str(report)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"latent_channels": 16}, "has 16 latent channels, the pipeline's autoencoder has 4"),
        ({"out_channels": 1}, "has 1 picture channels, the pipeline's autoencoder has 3"),
        (
            {"decoder_block_out_channels": (8,) * 4, "num_decoder_blocks": (1,) * 4},
            "has 8 times upsampling, the pipeline's autoencoder has 2",
        ),
    ],
)
def test_another_decoder_is_refused_before_weights_are_read(changes, words, tmp_path):
    weights = small(tmp_path, **changes)
    (tmp_path / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(Unsupported, match=words):
        accelerated("sd", weights)


def test_what_is_no_small_decoder_is_refused_in_words(tmp_path):
    tiny("sd").vae.save_pretrained(tmp_path / "vae")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidConfig, match="of class AutoencoderKL: TinyDecoder takes an AutoencoderTiny"):
        accelerated("sd", str(tmp_path / "vae"))
    with pytest.raises(InvalidConfig, match="no small decoder can be read"):
        accelerated("sd", str(tmp_path / "empty"))
    with pytest.raises(InvalidRecipe, match="give auto, a folder"):
        TinyDecoder(weights="")
    with pytest.raises(Unsupported, match="not of WanPipeline, whose decoder is of AutoencoderKLWan"):
        accelerated("wan", "auto")


def test_unknown_latents_are_refused_with_the_way_out():
    """Those of the tiny families have SD's scaling factor and another size."""
    with pytest.raises(Unsupported, match=r"4 channels, factor 2, scaling_factor 0\.18215.*fewstep train decoder"):
        accelerated("sd", "auto")


@pytest.mark.parametrize(("latents", "name"), DECODERS.items())
def test_auto_knows_the_published_latents(latents, name):
    channels, scale, shift = latents
    pipe = tiny("sd")
    config = {"scaling_factor": scale, "shift_factor": shift or None, "latent_channels": channels}
    pipe.vae.register_to_config(**config, block_out_channels=(8, 8, 8, 8))
    assert str(TinyDecoder().source(pipe.vae)).endswith(name)


def test_recipes_name_the_weights(tmp_path):
    for technique in (TinyDecoder(), TinyDecoder(weights="some/folder"), TinyDecoder(weights=tmp_path)):
        recipe = Recipe(technique)
        recipe.save(tmp_path / "recipe.json")
        assert Recipe.load(tmp_path / "recipe.json") == recipe
    assert isinstance(catalog.example("tiny_decoder"), TinyDecoder)


# ---------------------------------------------------------------------------------------------- the one carried along


def test_the_carried_decoder_draws_what_the_full_one_draws():
    """On samples of the embedded model at its guidance; at 7.5 latents leave what the small one was trained on."""
    pipe = load("emoji-unet")
    pipe.set_progress_bar_config(disable=True)
    styles = ("noto", "twemoji", "fluent-emoji", "emojione")
    captions = [f"{label}, {style} style" for label in ("red apple", "dog face") for style in styles]

    def pictures(pipe):
        rng = [torch.Generator().manual_seed(i) for i in range(len(captions))]
        return pipe(captions, num_inference_steps=6, guidance_scale=3.0, generator=rng, output_type="pt").images

    full = pictures(pipe)
    found = pictures(AcceleratedPipeline(pipe, Recipe(TinyDecoder())))
    psnr = -10 * (full - found).square().mean(dim=(1, 2, 3)).log10()
    assert psnr.mean() > 26 and psnr.min() > 20
    assert (full - found).mean().abs() < 0.01


def test_the_carried_decoder_is_stock():
    decoder = AutoencoderTiny.from_pretrained(HERE / CARRIED)
    assert decoder.config.latent_channels == 8 and not any(p.any() for p in decoder.encoder.parameters())
    assert (HERE / CARRIED / "README.md").exists()
