"""The only way to change a pipeline: every change is recorded with its way back.

A module's `forward` is replaced by one `Dispatcher`, which runs the arounds of the attachment whose Run is open and
otherwise the original. So a sibling pipeline that shares the module, the user's own call of it, and two attachments,
detached in any order, each see what they should.
"""

import functools
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from .errors import Unsupported
from .run import Run, current_run

Around = Callable[..., Any]  # around(inner, *args, **kwargs)


class Slot:
    """A place where a callable is kept: an attribute of a module, or a field of a hook on it."""

    def __init__(self, holder: Any, name: str) -> None:
        self.holder, self.name = holder, name

    @property
    def value(self) -> Any:
        return getattr(self.holder, self.name)

    @value.setter
    def value(self, value: Any) -> None:
        setattr(self.holder, self.name, value)


def slots(owner: Any, name: str) -> Iterator[Slot]:
    """Where `owner.name` may be kept, deepest first: under diffusers' hooks, under accelerate's hook, on `owner`."""
    if name == "forward" and isinstance(owner, nn.Module):
        registry = getattr(owner, "_diffusers_hook", None)
        for reference in getattr(registry, "_fn_refs", ()):
            yield Slot(reference, "forward" if reference.original_forward is None else "original_forward")
        if "_old_forward" in vars(owner):
            yield Slot(owner, "_old_forward")
    yield Slot(owner, name)


def bottom(owner: Any, name: str) -> Slot:
    """The slot that holds the dispatcher, or else the class's own method, or else the deepest one."""
    found = list(slots(owner, name))
    own = getattr(type(owner), name, None)
    for slot in found:
        if isinstance(slot.value, Dispatcher) or getattr(slot.value, "__func__", None) is own:
            return slot
    return found[0]


class Dispatcher:
    """Stands in for `owner.name`. One for all attachments; removed when the last of them is gone."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self.on_instance = name in vars(owner)
        self.original = bottom(owner, name).value
        self.chains: dict[Any, Callable[..., Any]] = {}
        self.arounds: dict[Any, list[Around]] = {}
        self.cores: dict[Any, Callable[..., Any]] = {}
        self.bare_warning: str | None = None
        functools.update_wrapper(self, self.original)
        self.put()

    @classmethod
    def on(cls, owner: Any, name: str) -> "Dispatcher":
        found = bottom(owner, name).value
        return found if isinstance(found, Dispatcher) else cls(owner, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = current_run()
        if run is None and self.bare_warning:
            warnings.warn(self.bare_warning, stacklevel=2)
            self.bare_warning = None
        chain = self.chain_in(run) if run is not None else None
        return self.original(*args, **kwargs) if chain is None else chain(*args, **kwargs)

    def chain_in(self, run: Run) -> Callable[..., Any] | None:
        """A pipeline's call wakes its own attachment; a Run of the user's own loop those made by `accelerate`."""
        if run.owner is not None:
            return self.chains.get(run.owner)
        loose = self.loose
        if loose is not None and loose not in run.loose:
            run.loose.append(loose)
        return self.chains.get(loose)

    @property
    def loose(self) -> Any:
        """The attachment that `accelerate` made, which belongs to no pipeline; None where there is none."""
        return next((owner for owner in self.chains if owner.pipe is None), None)

    def add(self, owner: Any, around: Around) -> None:
        self.arounds.setdefault(owner, []).append(around)
        self.build(owner)

    def set_core(self, owner: Any, around: Around) -> None:
        self.cores[owner] = functools.partial(around, self.original)
        self.build(owner)

    def build(self, owner: Any) -> None:
        chain: Callable[..., Any] = self.cores.get(owner) or self.original
        for around in self.arounds.get(owner, ()):
            chain = functools.partial(around, chain)
        self.chains[owner] = chain

    def put(self) -> None:
        """Takes its place, again if a hook that was installed over it has erased it."""
        slot = bottom(self.owner, self.name)
        if slot.value is not self:
            slot.value = self

    def drop(self, owner: Any) -> None:
        for kept in (self.chains, self.arounds, self.cores):
            kept.pop(owner, None)
        if not self.chains:
            self.remove()

    def remove(self) -> None:
        for slot in slots(self.owner, self.name):
            if slot.value is self:
                slot.value = self.original
        if not self.on_instance and vars(self.owner).get(self.name) == self.original:
            delattr(self.owner, self.name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """In a copy of the module stands the plain method, bound to the copy."""
        owner = memo.get(id(self.owner), self.owner)
        function = getattr(self.original, "__func__", None)
        return self.original if function is None else types.MethodType(function, owner)

    def __reduce__(self) -> Any:
        raise Unsupported(
            f"{type(self.owner).__name__}.{self.name} is accelerated and cannot be pickled: detach() first, or "
            "save_pretrained(folder) and AcceleratedPipeline.from_pretrained(folder) elsewhere"
        )


class Patches:
    """The changes of one attachment. `undo` takes all of them back, in reverse order, whatever happens on the way."""

    def __init__(self, owner: Any, keep_original: bool = True) -> None:
        self.owner, self.keep_original = owner, keep_original
        self.freed: str | None = None  # the technique whose originals were not kept
        self.methods: dict[str, list[Around]] = {}  # of the pipeline, worn by the view of each call
        self.steps: list[Around] = []
        self.components: dict[str, Callable[[Any], Any]] = {}
        self.ready: list[Callable[[], None]] = []
        self._dispatchers: list[Dispatcher] = []
        self._stack = ExitStack()

    def wrap_forward(self, module: nn.Module, around: Around) -> None:
        """`around(inner, *args, **kwargs)` in place of `module.forward`, inside Runs of this attachment."""
        self.wrap_method(module, "forward", around)

    def wrap_method(self, owner: Any, name: str, around: Around) -> None:
        """The same for any method. On the pipeline itself, calls' views wear it: the pipeline does not change."""
        if owner is getattr(self.owner, "pipe", None):
            self.methods.setdefault(name, []).append(around)
            return
        self._dispatcher(owner, name).add(self.owner, around)

    def wrap_innermost(self, module: nn.Module, around: Around) -> None:
        """`around` beneath every other of `module.forward`, those put on before it too: its `inner` is the original."""
        self._dispatcher(module, "forward").set_core(self.owner, around)

    def _dispatcher(self, owner: Any, name: str) -> Dispatcher:
        dispatcher = Dispatcher.on(owner, name)
        if dispatcher not in self._dispatchers:
            self._dispatchers.append(dispatcher)
            self._stack.callback(dispatcher.drop, self.owner)
        return dispatcher

    def wrap_step(self, around: Around) -> None:
        """`around(inner, *args, **kwargs)` in place of the step of the call's own scheduler."""
        self.steps.append(around)

    def set_attr(self, owner: Any, name: str, value: Any) -> None:
        existed, before = name in vars(owner), vars(owner).get(name)
        setattr(owner, name, value)
        self._stack.callback(setattr, owner, name, before) if existed else self._stack.callback(delattr, owner, name)

    def set_data(self, tensor: Tensor, data: Tensor, technique: str) -> None:
        """Other contents for a parameter or buffer. The original is kept, unless the attachment was told to free it."""
        if self.keep_original:
            self._stack.callback(_put_data, tensor, tensor.data)
        else:
            self.freed = technique
        _assign(tensor, data)

    def set_strides(self, tensor: Tensor, data: Tensor) -> None:
        """The same values in another memory format; nothing needs to be kept for the way back."""
        self._stack.callback(_restore_strides, tensor, tensor.stride())
        _assign(tensor, data)

    def replace_module(self, parent: nn.Module, name: str, module: nn.Module) -> None:
        """Another submodule in place of `parent.name`. An adapter put on it later survives the undo."""
        before = parent.get_submodule(name)
        self._stack.callback(_put_back, parent, name, module, before)
        setattr(parent, name, module)

    def replace_component(self, name: str, make: Callable[[Any], Any]) -> None:
        """Calls use `make(current component)` instead of the pipeline's component; the pipeline keeps its own."""
        self.components[name] = make

    def on_undo(self, function: Callable[[], None]) -> None:
        self._stack.callback(function)

    def on_ready(self, function: Callable[[], None]) -> None:
        """Calls `function` when every technique of the recipe has been applied."""
        self.ready.append(function)

    def wrapped(self, module: nn.Module) -> bool:
        """Whether some attachment wraps this module or one inside it."""
        return any(
            isinstance(bottom(m, "forward").value, Dispatcher)
            or any(isinstance(v, Dispatcher) for v in vars(m).values())
            for m in module.modules()
        )

    def recheck(self) -> None:
        for dispatcher in self._dispatchers:
            dispatcher.put()

    def undo(self) -> None:
        if self.freed:
            raise Unsupported(
                f"{self.freed} freed the original weights (keep_original=False), so they cannot be put back: load the "
                "pipeline again, or attach with keep_original=True"
            )
        self._stack.close()


@torch.no_grad()
def _assign(tensor: Tensor, data: Tensor) -> None:
    tensor.data = data


def _put_data(tensor: Tensor, data: Tensor) -> None:
    """The very same tensor, unless the module has moved to another device since."""
    _assign(tensor, data.to(tensor.device))


def _restore_strides(tensor: Tensor, strides: tuple[int, ...]) -> None:
    plain = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    _assign(tensor, plain.copy_(tensor.data))


def _put_back(parent: nn.Module, name: str, ours: nn.Module, before: nn.Module) -> None:
    found = parent.get_submodule(name)
    if found is ours:
        setattr(parent, name, before)
    elif getattr(found, "base_layer", None) is ours:
        found.base_layer = before
    else:
        raise Unsupported(
            f"{name} was replaced by {type(found).__name__} after attaching: take that off before detach()"
        )
