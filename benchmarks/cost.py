"""Cost that does not depend on the machine's mood: multiply-adds of a call. Never counted while timing."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode


def multiply_adds(call: Callable[[], Any]) -> int:
    """Of matrix products, convolutions and attention in `call`; compiled code counts as what it was compiled from.

    Masked attention counts in full. Raises what `call` raises.
    """
    with FlopCounterMode(display=False, custom_mapping=UNCOUNTED) as counter:
        call()
    return counter.get_total_flops() // 2  # torch counts a multiply-add as two


def attention(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    """Of shapes (batch, heads, length, width): scores, and their product with the values."""
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[-2] * (width + value[-1])


# torch's counter knows the fused attention of GPUs, but takes a CPU's for free.
UNCOUNTED = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention}
