"""A peer and our recipe of its configuration, on one denoiser: the same steps computed, the same result."""

import copy

import pytest
import torch

from fewstep.benchmarks import shape_peers, shapes

from .test_shapes import flux, unet

MODELS = {"sd15": lambda: unet("sd"), "sdxl": lambda: unet("sdxl"), "flux": flux}


@pytest.mark.parametrize("match", shape_peers.MATCHES, ids=lambda match: f"{match.peer}, {match.shape}")
@torch.no_grad()
def test_our_recipe_of_a_peers_configuration_does_the_peers_work(match):
    model, inputs = MODELS[match.shape]()
    plain = copy.deepcopy(model)
    theirs = match.loop(copy.deepcopy(model), match.config, inputs)
    ours = shape_peers.ours(model, match.config, inputs)
    for _ in range(2):  # the second generation starts anew, as the first did
        torch.testing.assert_close(ours(), theirs(), rtol=1e-4, atol=1e-4)
        skipped = shape_peers.STEPS * shapes.count(lambda: plain(**inputs)) - shapes.count(theirs)
        assert skipped > 0
        assert abs(shapes.count(ours) - shapes.count(theirs)) < 0.05 * skipped
