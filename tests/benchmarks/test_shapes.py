"""What is cut out of a model by hand is what a cache computes: the same operations, the same result."""

import copy
import functools
import json

import pytest
import torch

from fewstep.accel.cache.deep import DeepCache
from fewstep.accel.cache.forecast import Forecast
from fewstep.accel.denoiser import accelerate, run
from fewstep.accel.recipe import Recipe
from fewstep.accel.zoo.tiny import tiny
from fewstep.benchmarks import shapes


def unet(family):
    model = tiny(family).unet
    width = model.config.cross_attention_dim
    inputs = shapes.unet_inputs(2, width)
    if family == "sdxl":
        ids = torch.full((2, 6), 32.0)
        pooled = model.config.projection_class_embeddings_input_dim - 6 * model.config.addition_time_embed_dim
        inputs["added_cond_kwargs"] = {"text_embeds": shapes.drawn(2, pooled), "time_ids": ids}
    return model, inputs


def flux():
    model = tiny("flux").transformer
    inputs = shapes.flux_inputs(2)
    inputs["hidden_states"] = shapes.drawn(2, 64, model.config.in_channels)
    inputs["encoder_hidden_states"] = shapes.drawn(2, 32, model.config.joint_attention_dim)
    inputs["pooled_projections"] = shapes.drawn(2, model.config.pooled_projection_dim)
    return model, inputs


CASES = {
    "sd": (lambda: unet("sd"), DeepCache(when=shapes.ALWAYS), shapes.edge_of_unet),
    "sdxl": (lambda: unet("sdxl"), Forecast(when=shapes.ALWAYS), shapes.edge_of_unet),
    "flux, all blocks": (flux, Forecast(when=shapes.ALWAYS), shapes.flux_of(0)),
    "flux, behind the first": (flux, shapes.ALL_BUT_FIRST, shapes.flux_of(1)),
}


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_a_reused_evaluation_costs_what_is_left_and_nothing_else(name):
    build, technique, left = CASES[name]
    model, inputs = build()
    plain = copy.deepcopy(model)
    beside = left(plain, inputs)
    accelerate(model, Recipe(technique))
    with run() as state:
        first = model(**inputs)[0]
        state.advance()
        assert torch.equal(first, plain(**inputs)[0])
        torch.testing.assert_close(model(**inputs)[0], first, rtol=1e-4, atol=1e-5)
        state.advance()
        assert shapes.count(lambda: model(**inputs)) == shapes.count(beside) < shapes.count(lambda: plain(**inputs)) / 2
    if "flux" not in name:  # the transformer's cut lacks what the blocks add
        torch.testing.assert_close(beside(), first, rtol=1e-4, atol=1e-5)


def test_a_table_that_stopped_goes_on_where_it_was(tmp_path):
    file, measured = tmp_path / "new" / "table.json", []

    def job(name):
        if name == "b" and len(measured) == 1:
            raise KeyboardInterrupt
        measured.append(name)
        return {"found": ord(name)}

    jobs = {(name, 1): functools.partial(job, name) for name in "ab"}
    with pytest.raises(KeyboardInterrupt):
        shapes.completed(file, ("name", "images"), jobs)
    assert [row["name"] for row in json.loads(file.read_text())] == ["a"]
    measured += "x"
    rows = shapes.completed(file, ("name", "images"), jobs)
    assert measured == ["a", "x", "b"] and rows == json.loads(file.read_text())
    assert [(row["name"], row["images"], row["found"]) for row in rows] == [("a", 1, 97), ("b", 1, 98)]
    assert all(row["machine"]["threads"] for row in rows)
