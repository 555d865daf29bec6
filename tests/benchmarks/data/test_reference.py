"""What travels with the package, and that it is made from the set as the training splits it."""

import numpy as np
import pytest
import torch

from fewstep.benchmarks.data import make_reference
from fewstep.benchmarks.data import reference as module
from fewstep.benchmarks.data.reference import reference
from fewstep.distill.data import GROUPS, DataConfig, EmojiData


def test_shapes_and_ranges():
    data = reference()
    n = len(data.concept)
    assert data.gallery.shape == (n, 3, 16, 16) and data.style.shape == data.held_out.shape == (n,)
    assert data.gallery.min() >= 0 and data.gallery.max() <= 1
    assert data.concept.min() >= 0 and data.concept.max() < len(data.labels)
    assert data.style.unique().tolist() == list(range(len(data.styles)))
    assert len({(int(c), int(s)) for c, s in zip(data.concept, data.style, strict=True)}) == n


def test_splits_part_the_gallery_and_keep_each_concept():
    data = reference()
    train, test = data.indices("train"), data.indices("test")
    assert sorted([*train.tolist(), *test.tolist()]) == list(range(len(data.concept)))
    assert len(test) == pytest.approx(len(data.concept) / 10, abs=1)
    assert set(data.concept[test].tolist()) <= set(data.concept[train].tolist())


@pytest.mark.parametrize("split", ["train", "test"])
def test_features(split):
    data = reference()
    assert data.head[split].shape == (500, 1280) and data.head[split].isfinite().all()
    gaussian = data.block10[split]
    assert gaussian.n == len(data.indices(split)) and gaussian.mean.shape == (112,)
    torch.testing.assert_close(gaussian.cov, gaussian.cov.T)
    assert torch.linalg.eigvalsh(gaussian.cov).min() > -1e-6


def test_every_picture_is_of_a_group():
    data = reference()
    assert data.groups == list(GROUPS) and len(data.group) == len(data.labels)
    assert data.group[data.concept].unique().tolist() == list(range(len(GROUPS)))
    names = {label: data.groups[group] for label, group in zip(data.labels, data.group.tolist(), strict=True)}
    assert names["red apple"] == "food & drink" and names["tractor"] == "travel & places"


def test_captions():
    data = reference()
    place = int(data.indices("test")[0])
    label, style = data.labels[data.concept[place]], data.styles[data.style[place]]
    assert data.caption(place) == f"{label}, {style} style"


def test_made_from_the_set(tmp_path, monkeypatch):
    """On a small set of flat pictures: gallery, split and captions are those that the training sees."""
    draw, n = np.random.default_rng(0), 24
    colours = draw.integers(0, 256, (n, 1, 1, 3), dtype=np.uint8)
    emoji = tmp_path / "emoji.npz"
    np.savez(
        emoji,
        X=np.broadcast_to(colours, (n, 64, 64, 3)),
        concept=(np.arange(n) % 12).astype(np.int16),
        style=(np.arange(n) // 12).astype(np.uint8),
        labels=np.array([f"thing {i}" for i in range(12)]),
        tags=np.array([""] * 12),
        group=np.array([GROUPS[i % len(GROUPS)] for i in range(12)]),
        styles=np.array(["one", "two"]),
    )
    make_reference.main(emoji, tmp_path / "reference.npz")
    monkeypatch.setattr(module, "FILE", tmp_path / "reference.npz")
    made, data = reference.__wrapped__(), EmojiData(DataConfig(path=str(emoji)))
    torch.testing.assert_close(made.gallery[:, :, 3, 5], torch.from_numpy(colours[:, 0, 0]).float() / 255)
    assert made.indices("test").tolist() == data.test.tolist()
    assert [made.caption(i) for i in range(n)] == [data.caption(i) for i in range(n)]
    assert [made.groups[g] for g in made.group] == data.group
    assert len(made.head["train"]) == made.block10["train"].n == len(data.train)
