"""TextCache: the embeddings of a prompt that was encoded before.

*What* keeps what `encode_prompt` returned, on its device, by everything that it depends on: the prompts, negative
prompts and every other argument, the encoders and the state of their weights and LoRAs, the tokenizers. A later call
that is the same in all of this gets copies, and no text encoder runs.
*Pays when* prompts recur: seeds of one prompt, a server, a sweep; the more, the larger the encoder (T5, Gemma, Qwen),
and most under offload, where the encoder need not be brought in.
*Hurts when* they never recur: about a hundredth of the encoding's time for the key, and `max_bytes` of memory.
*Exact?* bit-equal. What was encoded in a batch is only given back to the same batch: padding to the longest prompt
and dynamic quantization make a row depend on its mates. Encoded anew, and counted as bypassed: calls with embeddings
or images, with a LoRA scale of their own, with an encoder in training mode, or under autograd. One gap: weights that
are written through `.data` and differ in none of the sampled values (see fingerprint.py): one row of a linear layer
may, a fused LoRA or a textual inversion hardly can.
*Settings* `max_bytes`: of embeddings kept; the least recently used go first.
*Source* the obvious idea, as in every serving system.
*Measured* one thread, CLIP-L in float32 with its negative prompt: 318 ms to encode, 2.7 ms for the key (a hit is that
and a copy); T5-large in bfloat16, 128 tokens: 269 ms and 3.4 ms.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import BoundArguments, signature
from itertools import count
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from .. import anatomy
from ..errors import InvalidRecipe, Unsupported
from ..patches import Patches
from ..run import open_run
from ..target import Target
from ..technique import Claim, Fidelity, Stage, Technique
from .fingerprint import dropouts, fingerprint

PLAIN = (str, int, float, bool, type(None), torch.device, torch.dtype)
# What else encodes, or is returned: in Stable Audio, AudioLDM2, VQ Diffusion.
MORE_ENCODERS = ("projection_model", "language_model", "learned_classifier_free_sampling_embeddings")

# Pipelines that set their tokenizer's padding side before they use it: what it was, or is after, says nothing.
PADS_ITSELF = ("Sana", "LTX2")


@dataclass(frozen=True, kw_only=True)
class TextCache(Technique):
    """Prompt embeddings of recurring prompts. `max_bytes`: of embeddings kept, 256 MiB unless told."""

    name: ClassVar[str] = "text_cache"
    stage: ClassVar[Stage] = Stage.CACHE
    fidelity: ClassVar[Fidelity] = Fidelity.EXACT
    claims: ClassVar[frozenset[Claim]] = frozenset({Claim("prompt embeddings", "text encoders")})

    max_bytes: int = 256 * 2**20

    def __post_init__(self) -> None:
        if self.max_bytes <= 0:
            raise InvalidRecipe(f"TextCache: max_bytes is {self.max_bytes}; give the bytes to keep, more than 0")

    def check(self, target: Target) -> None:
        if encoding_method(target.need_pipeline("TextCache")) is None:
            raise Unsupported(f"TextCache needs a pipeline with encode_prompt; {target.label} has none: leave it out")

    def apply(self, target: Target, patches: Patches) -> None:
        store, serial = Store(self.max_bytes), Serial()
        name = encoding_method(target.pipe) or ""
        encode = signature(getattr(type(target.pipe), name))

        def around(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            """Calls come one at a time: the view locks whatever encodes."""
            run = open_run()
            view = run.slot("view", lambda: None)
            key = call_key(view, serial, encode.bind(view, *args, **kwargs))
            if key is None:
                run.count(self.name, "bypassed")
                return inner(*args, **kwargs)
            if key in store:
                run.count(self.name, "hits")
                return copied(store.get(key))
            run.count(self.name, "misses")
            output = inner(*args, **kwargs)
            if made_of_tensors(output):
                store.put(key, copied(output))
            return output

        patches.wrap_method(target.pipe, name, around)


def encoding_method(pipe: Any) -> str | None:
    """The older name is a deprecated alias where there are both."""
    return next((name for name in ("encode_prompt", "_encode_prompt") if hasattr(type(pipe), name)), None)


class Store:
    """Outputs by key, at most `max_bytes` of tensors, the least recently used leaving first."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.bytes = max_bytes, 0
        self.entries: OrderedDict[bytes, tuple[Any, int]] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self.entries

    def get(self, key: bytes) -> Any:
        self.entries.move_to_end(key)
        return self.entries[key][0]

    def put(self, key: bytes, output: Any) -> None:
        size = sum(tensor.nbytes for tensor in tensors(output))
        if size > self.max_bytes:
            return
        self.entries[key] = output, size
        self.bytes += size
        while self.bytes > self.max_bytes:
            self.bytes -= self.entries.popitem(last=False)[1][1]


class Serial:
    """A number for each object that is never given to another, as an id is."""

    def __init__(self) -> None:
        self.numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self.next = count()

    def __call__(self, value: Any) -> int:
        if value not in self.numbers:
            self.numbers[value] = next(self.next)
        return self.numbers[value]


def call_key(pipe: Any, serial: Serial, bound: BoundArguments) -> bytes | None:
    """What this call's embeddings depend on, or None if they are not to be kept."""
    bound.apply_defaults()
    given = dict(list(bound.arguments.items())[1:])
    # A LoRA scale is multiplied into the encoder's layers and divided out again, which may leave them changed.
    if not plain(given) or given.get("lora_scale") is not None or torch.is_grad_enabled():
        return None
    encoders = text_modules(pipe)
    if any(encoder.training or any(d.training for d in dropouts(encoder)) for encoder in encoders.values()):
        return None
    weights = [(name, serial(encoder), fingerprint(encoder)) for name, encoder in encoders.items()]
    parts = (given, weights, tokenizer_state(pipe, serial), pipeline_state(pipe), numerics(pipe))
    return hashlib.blake2b(repr(parts).encode(), digest_size=32).digest()


def plain(value: Any) -> bool:
    """Whether `repr` says all there is: no tensor, image or object anywhere in it."""
    if isinstance(value, dict):
        return all(type(name) is str and plain(entry) for name, entry in value.items())
    if type(value) in (list, tuple):
        return all(plain(entry) for entry in value)
    return type(value) in PLAIN


def text_modules(pipe: Any) -> dict[str, nn.Module]:
    more = {name: getattr(pipe, name, None) for name in MORE_ENCODERS}
    return anatomy.text_encoders(pipe) | {name: part for name, part in more.items() if isinstance(part, nn.Module)}


def tokenizer_state(pipe: Any, serial: Serial) -> list[tuple[Any, ...]]:
    """Textual inversions add tokens."""
    found: dict[str, Any] = dict(vars(pipe))
    found |= {name: getattr(p, "tokenizer", None) for name, p in found.items() if isinstance(p, ProcessorMixin)}
    settled = type(pipe).__name__.startswith(PADS_ITSELF)
    tokenizers: dict[str, Any] = {n: t for n, t in found.items() if isinstance(t, PreTrainedTokenizerBase)}
    return [
        (name, serial(t), sorted(t.get_added_vocab().items()), len(t), t.model_max_length, settled or t.padding_side)
        for name, t in tokenizers.items()
    ]


def pipeline_state(pipe: Any) -> tuple[Any, ...]:
    """Templates, lengths and the like, which pipelines keep as public attributes or in their configuration."""
    own = {name: value for name, value in vars(pipe).items() if not name.startswith("_") and plain(value)}
    guided = getattr(pipe, "do_classifier_free_guidance", None)  # I2VGenXL asks itself
    return type(pipe).__name__, own, dict(pipe.config), guided


def numerics(pipe: Any) -> tuple[Any, ...]:
    """Where and in which precision it is computed; threads, because they decide how sums are split."""
    device = pipe._execution_device
    castable = torch.amp.is_autocast_available(device.type)
    autocast = castable and torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
    configs = [getattr(module, "config", None) for module in text_modules(pipe).values()]
    attention = [getattr(config, "_attn_implementation", None) for config in configs]
    dtypes = [getattr(part, "dtype", None) for part in anatomy.denoisers(pipe).values()]
    return device, autocast, attention, dtypes, torch.get_float32_matmul_precision(), torch.get_num_threads()


def made_of_tensors(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(made_of_tensors(entry) for entry in value)
    return isinstance(value, Tensor) or plain(value)


def copied(value: Any) -> Any:
    """The same with tensors of its own: pipelines may change in place what they are given."""
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) in (list, tuple):
        return type(value)(copied(entry) for entry in value)
    return value


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from tensors(entry)
