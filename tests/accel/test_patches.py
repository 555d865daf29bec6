"""Every change has its way back, whoever else works on the same module, and in whatever order it ends."""

import copy
import inspect
import pickle

import accelerate
import pytest
import torch
from diffusers.hooks import HookRegistry, ModelHook
from torch import nn

from fewstep.accel.errors import Unsupported
from fewstep.accel.patches import Dispatcher, Patches
from fewstep.accel.run import Run, entered


class Owner:
    """Stands for an attachment: patches only need its identity and whether it has a pipeline."""

    def __init__(self):
        self.pipe, self.patches = object(), None
        self.patches = Patches(self)

    def inside(self):
        return entered(Run(self))


def doubling(inner, *args, **kwargs):
    return 2 * inner(*args, **kwargs)


def adding(inner, *args, **kwargs):
    return 1 + inner(*args, **kwargs)


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return nn.Linear(3, 3)


X = torch.ones(1, 3)


def test_an_around_acts_inside_its_own_run_only(layer):
    plain, mine, other = layer(X), Owner(), Owner()
    mine.patches.wrap_forward(layer, doubling)
    assert torch.equal(layer(X), plain)
    with other.inside():
        assert torch.equal(layer(X), plain)
    with mine.inside():
        assert torch.equal(layer(X), 2 * plain)
        with other.inside():  # a callback that calls another pipeline which shares the module
            assert torch.equal(layer(X), plain)


def test_later_arounds_are_outside_earlier_ones(layer):
    plain, mine = layer(X), Owner()
    mine.patches.wrap_forward(layer, doubling)
    mine.patches.wrap_forward(layer, adding)
    with mine.inside():
        assert torch.equal(layer(X), 1 + 2 * plain)


@pytest.mark.parametrize("first", [0, 1])
def test_two_owners_detach_in_any_order(layer, first):
    plain, before, owners = layer(X), dict(vars(layer)), [Owner(), Owner()]
    owners[0].patches.wrap_forward(layer, doubling)
    owners[1].patches.wrap_forward(layer, adding)
    owners[first].patches.undo()
    with owners[1 - first].inside():
        assert torch.equal(layer(X), 2 * plain if first else 1 + plain)
    owners[1 - first].patches.undo()
    assert vars(layer) == before
    assert torch.equal(layer(X), plain)


@pytest.mark.parametrize("when", ["before", "after"])
def test_offload_hook_stays_above(layer, when):
    """accelerate's hook moves the weights, so it must run first, and re-installing it must not erase the wrapper."""
    plain, mine = layer(X), Owner()
    if when == "before":
        accelerate.hooks.add_hook_to_module(layer, accelerate.hooks.ModelHook())
    mine.patches.wrap_forward(layer, doubling)
    if when == "after":
        accelerate.hooks.add_hook_to_module(layer, accelerate.hooks.ModelHook())
    for _ in range(3):  # what diffusers does at the end of every call
        with mine.inside():
            mine.patches.recheck()
            assert torch.equal(layer(X), 2 * plain)
        accelerate.hooks.remove_hook_from_module(layer)
        accelerate.hooks.add_hook_to_module(layer, accelerate.hooks.ModelHook())
    assert isinstance(vars(layer)["_old_forward"], Dispatcher)
    mine.patches.undo()
    assert torch.equal(layer(X), plain)
    accelerate.hooks.remove_hook_from_module(layer)
    assert "_old_forward" not in vars(layer) and not isinstance(layer.forward, Dispatcher)


@pytest.mark.parametrize("count", [1, 2])
def test_diffusers_hooks_before_and_after(layer, count):
    plain, mine = layer(X), Owner()
    HookRegistry.check_if_exists_or_initialize(layer).register_hook(ModelHook(), "first")
    mine.patches.wrap_forward(layer, doubling)
    if count == 2:
        layer._diffusers_hook.register_hook(ModelHook(), "second")
    with mine.inside():
        assert torch.equal(layer(X), 2 * plain)
    mine.patches.undo()
    with mine.inside():
        assert torch.equal(layer(X), plain)
    assert not isinstance(layer.forward, Dispatcher)


def test_a_hook_installed_over_a_wrapper_may_outlive_it(layer):
    plain, mine = layer(X), Owner()
    mine.patches.wrap_forward(layer, doubling)
    layer_hooks = HookRegistry.check_if_exists_or_initialize(layer)
    layer_hooks.register_hook(ModelHook(), "late")
    mine.patches.undo()
    layer_hooks.remove_hook("late")
    assert torch.equal(layer(X), plain) and not isinstance(layer.forward, Dispatcher)


def test_signature_is_kept(layer):
    expected, mine = inspect.signature(layer.forward), Owner()
    mine.patches.wrap_forward(layer, doubling)
    assert inspect.signature(layer.forward) == expected


def test_a_deep_copy_is_plain_and_its_own(layer):
    plain, mine = layer(X), Owner()
    mine.patches.wrap_forward(layer, doubling)
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.weight.zero_()
    with mine.inside():
        assert torch.equal(twin(X), twin.bias.expand(1, 3))
        assert torch.equal(layer(X), 2 * plain)


def test_pickle_is_refused_in_words(layer):
    Owner().patches.wrap_forward(layer, doubling)
    with pytest.raises(Unsupported, match="detach"):
        pickle.dumps(layer)


def test_data_attributes_and_strides_come_back(layer):
    mine, weight = Owner(), layer.weight.data.clone()
    conv = nn.Conv2d(2, 4, 3)
    strides, storage = conv.weight.stride(), layer.weight.data_ptr()
    mine.patches.set_data(layer.weight, layer.weight.data.bfloat16(), "test")
    mine.patches.set_strides(conv.weight, conv.weight.data.contiguous(memory_format=torch.channels_last))
    mine.patches.set_attr(layer, "fresh", 1)
    mine.patches.set_attr(layer, "in_features", 7)
    assert layer.weight.dtype == torch.bfloat16 and conv.weight.stride() != strides
    mine.patches.undo()
    assert layer.weight.data_ptr() == storage and torch.equal(layer.weight, weight)
    assert conv.weight.stride() == strides and layer.in_features == 3 and not hasattr(layer, "fresh")


def test_freed_originals_refuse_the_undo(layer):
    mine = Owner()
    mine.patches.keep_original = False
    mine.patches.set_data(layer.weight, layer.weight.data.bfloat16(), "bfloat16")
    with pytest.raises(Unsupported, match="bfloat16 freed"):
        mine.patches.undo()


def test_undo_runs_to_its_end_past_an_error(layer):
    mine, done = Owner(), []
    mine.patches.on_undo(lambda: done.append(1))
    mine.patches.on_undo(lambda: 1 / 0)
    mine.patches.on_undo(lambda: done.append(2))
    with pytest.raises(ZeroDivisionError):
        mine.patches.undo()
    assert done == [2, 1]


def test_an_adapter_put_on_a_replaced_module_survives():
    model, mine = nn.Sequential(nn.Linear(3, 3)), Owner()
    before, ours = model[0], nn.Linear(3, 3)
    mine.patches.replace_module(model, "0", ours)
    adapter = nn.Module()
    adapter.base_layer = ours
    model[0] = adapter
    mine.patches.undo()
    assert model[0] is adapter and adapter.base_layer is before


def test_a_module_replaced_over_ours_is_refused_by_name():
    model, mine = nn.Sequential(nn.Linear(3, 3)), Owner()
    mine.patches.replace_module(model, "0", nn.Linear(3, 3))
    model[0] = nn.Identity()
    with pytest.raises(Unsupported, match="0 was replaced by Identity"):
        mine.patches.undo()
