"""The models that the package carries: stock diffusers loads them with no code of ours, and they are small."""

from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline

from fewstep import AcceleratedPipeline, Recipe
from fewstep.accel.cache.first_block import FirstBlockCache
from fewstep.accel.cache.forecast import Forecast
from fewstep.accel.policy import Every
from fewstep.accel.zoo import embedded

CAPTIONS = ["red apple, noto style", "cat face, twemoji style"]


def pictures(pipe, captions=CAPTIONS, seeds=(0, 1), **options):
    pipe.set_progress_bar_config(disable=True)
    rng = [torch.Generator().manual_seed(s) for s in seeds]
    call = {"num_inference_steps": 8, "guidance_scale": 3.0, "output_type": "pt"} | options
    return pipe(captions, generator=rng, **call).images


def megabytes(folder):
    return sum(f.stat().st_size for f in Path(folder).rglob("*") if f.is_file()) / 1e6


@pytest.mark.parametrize("name", embedded.EMBEDDED)
def test_stock_diffusers_loads_it_and_draws_the_same(name):
    stock = DiffusionPipeline.from_pretrained(embedded.folder(name))
    found = pictures(stock)
    assert type(stock).__module__.startswith("diffusers.") and found.shape == (2, 3, 64, 64)
    torch.testing.assert_close(found, pictures(embedded.load(name)), rtol=0, atol=1e-4)
    assert found[0, 0].mean() > found[0, 2].mean()  # a red apple is more red than blue


@pytest.mark.parametrize("name", embedded.EMBEDDED)
def test_a_picture_is_the_same_beside_any_other(name):
    pipe = embedded.load(name)
    alone = pictures(pipe, CAPTIONS[:1], (0,))
    torch.testing.assert_close(pictures(pipe)[:1], alone, rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", embedded.EMBEDDED)
def test_it_is_small(name):
    assert megabytes(embedded.folder(name)) < 25
    assert megabytes(embedded.HERE) < 80


@pytest.mark.parametrize("name", embedded.EMBEDDED)
def test_the_card_states_what_was_done_and_measured(name):
    card = (embedded.folder(name) / "README.md").read_text()
    for part in ("licence", "seed", "fewstep train", "held-out", "KID", "Limits", "memoris"):
        assert part in card, part


def psnr(a, b):
    """The mean over pictures."""
    return -10 * torch.log10((a - b).square().mean(dim=(1, 2, 3))).mean().item()


@pytest.mark.parametrize("name", embedded.EMBEDDED)
def test_forecast_is_nearer_to_plain_than_reuse_and_both_save(name):
    """On average: of two recipes either can be the nearer one on a single picture."""
    pipe = embedded.load(name)
    captions = [*CAPTIONS, "rocket, fluent-emoji style", "pizza, noto-v1 style", "deciduous tree, emojione style"]
    call = {"captions": captions, "seeds": range(5), "num_inference_steps": 25}
    plain = pictures(pipe, **call)
    found = {}
    for order in (0, 1):
        fast = AcceleratedPipeline(pipe, Recipe(Forecast(when=Every(2), order=order)))
        found[order] = psnr(pictures(fast, **call), plain)
        fast.detach()
    assert found[1] > found[0] + 3 and found[1] > 30, found


def test_the_first_block_of_the_transformer_decides():
    pipe = embedded.load("emoji-dit")
    plain = pictures(pipe, num_inference_steps=20)
    fast = AcceleratedPipeline(pipe, Recipe(FirstBlockCache(threshold=0.1)))
    rng = [torch.Generator().manual_seed(s) for s in (0, 1)]
    call = {"num_inference_steps": 20, "guidance_scale": 3.0, "output_type": "pt"}
    result = fast.run(CAPTIONS, generator=rng, **call)
    counts = result.report.counts["first_block_cache"]
    assert counts["computed"] + counts["reused"] == 80 and counts["reused"] >= 8
    assert psnr(result.output.images, plain) > 25
