"""Real pictures find themselves; wrong captions do not."""

import pytest
import torch
from torch.nn.functional import interpolate

from fewstep.accel.errors import Unsupported
from fewstep.benchmarks.data.reference import reference
from fewstep.benchmarks.metrics.retrieval import Gallery, hits


@pytest.fixture(scope="module")
def gallery():
    data = reference()
    return Gallery(images=data.gallery, concept=data.concept, style=data.style)


@pytest.fixture(scope="module")
def chosen(gallery):
    return torch.randperm(len(gallery.concept), generator=torch.Generator().manual_seed(0))[:150]


def rates(images, concepts, styles, gallery):
    return {k: v.double().mean().item() for k, v in hits(images, concepts, styles, gallery).items()}


def test_real_pictures_find_themselves_at_any_size(gallery, chosen):
    images = interpolate(gallery.images[chosen], scale_factor=4, mode="nearest")
    assert rates(images, gallery.concept[chosen], gallery.style[chosen], gallery) == {1: 1.0, 5: 1.0}


def test_shuffled_captions_are_near_chance(gallery, chosen):
    found = rates(gallery.images[chosen], gallery.concept[chosen.roll(1)], gallery.style[chosen], gallery)
    assert found[1] < 0.05 and found[5] < 0.1


def test_only_the_wanted_style_is_searched():
    """Two styles hold the same picture under other concepts: the style decides which one is found."""
    picture = torch.rand(1, 3, 16, 16).expand(2, -1, -1, -1)
    gallery = Gallery(images=picture, concept=torch.tensor([7, 8]), style=torch.tensor([0, 1]))
    assert hits(picture, [7, 8], [0, 1], gallery)[1].tolist() == [True, True]
    assert hits(picture, [7, 8], [1, 0], gallery)[5].tolist() == [False, False]
    with pytest.raises(Unsupported, match="no picture of style 3"):
        hits(picture, [7, 8], [3, 3], gallery)


def test_rank_five_reaches_further():
    values = torch.arange(8).view(8, 1, 1, 1).expand(8, 3, 16, 16) / 8
    gallery = Gallery(images=values, concept=torch.arange(8), style=torch.zeros(8, dtype=torch.long))
    found = hits(values[:1].expand(3, -1, -1, -1), [0, 4, 5], [0, 0, 0], gallery)
    assert found[1].tolist() == [True, False, False]
    assert found[5].tolist() == [True, True, False]
