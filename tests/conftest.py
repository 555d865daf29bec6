"""What the tests share: one small call of a tiny pipeline, and its output as a tensor."""

import torch

torch.set_num_threads(1)

import numpy as np  # noqa: E402  (threads first: torch's pool is made at the first operation)
import pytest  # noqa: E402

from fewstep.accel.zoo.tiny import FAMILIES  # noqa: E402


@pytest.fixture(scope="session")
def outputs():
    """`outputs(pipe, family, seed=1, **changes)`: what a small call of the family's pipeline gives, as one tensor."""

    def call(pipe, family, seed=1, **changes):
        kwargs = FAMILIES[family].call() | {"generator": torch.Generator().manual_seed(seed)} | changes
        return as_tensor(pipe(**kwargs)[0])

    return call


def as_tensor(images):
    if isinstance(images, torch.Tensor):
        return images.clone()
    if isinstance(images, np.ndarray):
        return torch.from_numpy(images.copy())
    if isinstance(images, list) and images and isinstance(images[0], list):
        return torch.stack([as_tensor(frames) for frames in images])
    return torch.stack([torch.from_numpy(np.asarray(image)) for image in images])
