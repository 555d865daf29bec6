"""The feature extractor: shapes, batches, and refusals."""

import pytest
import torch

from fewstep.accel.errors import Unsupported
from fewstep.benchmarks.metrics.features import extract, feature_maps


@pytest.fixture(scope="module")
def images():
    return torch.rand(3, 3, 32, 48, generator=torch.Generator().manual_seed(0))


def test_shapes_and_batches(images):
    found, apart = extract(images), extract(images, batch_size=1)
    widths = {"block4": 40, "block10": 112, "block15": 320, "head": 1280}
    for name, width in widths.items():
        assert getattr(found, name).shape == (3, width)
        torch.testing.assert_close(getattr(found, name), getattr(apart, name), rtol=1e-3, atol=1e-4)
    assert len(found) == 3


def test_features_are_the_mean_of_their_maps(images):
    maps = feature_maps(images)
    torch.testing.assert_close(extract(images).block10, maps["block10"].mean(dim=(2, 3)))


@pytest.mark.parametrize("images", [torch.zeros(3, 8, 8), torch.zeros(1, 1, 8, 8), torch.zeros(1, 3, 8, 8).byte()])
def test_misfits_are_refused(images):
    with pytest.raises(Unsupported, match="floats in"):
        extract(images)


def test_nothing_is_refused():
    with pytest.raises(Unsupported, match="no images"):
        extract(torch.zeros(0, 3, 8, 8))
