"""The view of a call: the pipeline's own class and parts, with schedulers of the call's own.

A call writes to its pipeline (`_guidance_scale`, `_interrupt`, the scheduler's step index); on a view two threads do
not meet. Techniques that wrap a method of the pipeline have it worn by the view's class, so that pipeline code that
calls `self.encode_prompt` finds it, and the pipeline itself stays as it was.
"""

import functools
from collections.abc import Callable, Mapping
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary

from diffusers import DiffusionPipeline
from diffusers.schedulers import SchedulerMixin

from . import anatomy
from .patches import Around
from .scheduling import call_copy, publish

# Tokenizers, an autoencoder cast to float32 for one decode, a causal decoder's feature map: one call at a time.
LOCKED_PREFIXES = ("encode_", "_encode_", "prepare_", "check_image", "get_timesteps", "_get_t5", "_get_clip")
_locks: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
_guard = RLock()


def lock_of(pipe: Any) -> Any:
    """One lock for all pipelines that share a decoder or text encoder."""
    parts = [*anatomy.decoders(pipe).values(), *anatomy.text_encoders(pipe).values(), *anatomy.denoisers(pipe).values()]
    with _guard:
        return _locks.setdefault(parts[0], RLock())


def is_scheduler(value: Any) -> bool:
    return isinstance(value, SchedulerMixin) or (hasattr(value, "set_timesteps") and hasattr(value, "step"))


def view_class(cls: type, methods: Mapping[str, list[Around]], lock: Any) -> type:
    """A subclass of the pipeline's class in which `methods` are wrapped and what shares state is locked."""
    body: dict[str, Any] = {"__init__": functools.wraps(cls.__init__)(_no_init), "__module__": __name__}
    for name in {*methods, *(n for n in dir(cls) if n.startswith(LOCKED_PREFIXES))}:
        inner = getattr(cls, name)
        if callable(inner) and not isinstance(vars_of(cls, name), (staticmethod, classmethod)):
            body[name] = _method(inner, methods.get(name, ()), lock)
    body["_interrupt"] = property(_get_interrupt, _set_interrupt)
    return type(cls.__name__, (cls,), body)


def vars_of(cls: type, name: str) -> Any:
    return next(vars(base)[name] for base in cls.__mro__ if name in vars(base))


def _no_init(self: Any, *args: Any, **kwargs: Any) -> None:
    """A view is made from its pipeline's parts."""


def _method(inner: Callable[..., Any], arounds: Any, lock: Any) -> Callable[..., Any]:
    @functools.wraps(inner)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        call: Callable[..., Any] = functools.partial(inner, self)
        for around in arounds:
            call = functools.partial(around, call)
        with lock:
            return call(*args, **kwargs)

    return method


def _get_interrupt(self: Any) -> bool:
    """Set by a callback on the view, or by anyone on the pipeline."""
    return vars(self).get("_interrupt", False) or vars(vars(self)["_viewed"]).get("_interrupt", False)


def _set_interrupt(self: Any, value: bool) -> None:
    vars(self)["_interrupt"] = value


def make_view(
    pipe: Any, cls: type, components: Mapping[str, Callable[[Any], Any]]
) -> tuple[Any, list[tuple[Any, Any]]]:
    """The view, and its (copy, original) pairs of schedulers, those of sub-pipelines too."""
    view: Any = object.__new__(cls)
    vars(pipe).pop("_interrupt", None)
    vars(view).update(vars(pipe), _viewed=pipe, _before=dict(vars(pipe)))
    pairs: list[tuple[Any, Any]] = []
    for name, value in vars(pipe).items():
        if is_scheduler(value):
            source = components[name](value) if name in components else value
            vars(view)[name] = call_copy(source)
            pairs.append((vars(view)[name], source))
        elif isinstance(value, DiffusionPipeline):
            plain = view_class(type(value), {}, lock_of(value))
            vars(view)[name], inner = make_view(value, plain, {})
            pairs += inner
    return view, pairs


def settle(view: Any, pipe: Any, pairs: list[tuple[Any, Any]]) -> None:
    """Leaves on the pipeline what a plain call would have left: its public numbers, its offload hooks, timesteps."""
    for copied, original in pairs:
        publish(copied, original)
    before = vars(view)["_before"]
    for name, value in vars(view).items():
        ours = name in ("_viewed", "_before") or is_scheduler(value) or isinstance(value, DiffusionPipeline)
        if not ours and value is not before.get(name):
            vars(pipe)[name] = value
