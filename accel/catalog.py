"""Every technique by the name that recipes use. Imported when asked for, so that `import fewstep` stays light."""

from importlib import import_module

from .errors import InvalidRecipe
from .technique import Technique

TECHNIQUES: dict[str, str] = {
    "text_cache": ".cache.text:TextCache",
    "cross_attention_cache": ".cache.cross_attention:CrossAttentionCache",
    "deep_cache": ".cache.deep:DeepCache",
    "first_block_cache": ".cache.first_block:FirstBlockCache",
    "forecast": ".cache.forecast:Forecast",
    "attention_broadcast": ".cache.attention:AttentionBroadcast",
    "cross_attention_gate": ".cache.gate:CrossAttentionGate",
    "tea_cache": ".cache.modulated:TeaCache",
    "tiny_decoder": ".decoder:TinyDecoder",
    "swap_scheduler": ".solver:SwapScheduler",
    "channels_last": ".kernels.memory_format:ChannelsLast",
    "bfloat16": ".kernels.precision:Bfloat16",
    "compile_blocks": ".kernels.compile:CompileBlocks",
}


def technique(name: str | None) -> type[Technique]:
    """The class of a technique. Raises `InvalidRecipe` for an unknown name, listing the known ones."""
    if name not in TECHNIQUES:
        raise InvalidRecipe(f"unknown technique {name!r}; known: {', '.join(TECHNIQUES)}")
    module, _, attribute = TECHNIQUES[name].partition(":")
    return getattr(import_module(module, __package__), attribute)


# No setting of theirs has saved 10 % at 25 dB on an embedded model yet: for models whose text costs more.
EXPERIMENTAL = frozenset({"text_cache", "cross_attention_cache", "cross_attention_gate"})

# A working instance of each technique that has no default one, for documentation, doctor and tests.
EXAMPLES: dict[str, dict[str, object]] = {"swap_scheduler": {"scheduler": "dpmpp_2m"}}


def example(name: str) -> Technique:
    return technique(name)(**EXAMPLES.get(name, {}))
