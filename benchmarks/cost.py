"""Cost that does not depend on the machine's mood: multiply-adds of a call. Never counted while timing."""

from collections.abc import Callable
from typing import Any

from torch.utils.flop_counter import FlopCounterMode


def multiply_adds(call: Callable[[], Any]) -> int:
    """Of matrix products, convolutions and attention in `call`. Raises what `call` raises."""
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops() // 2  # torch counts a multiply-add as two
