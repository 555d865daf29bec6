"""Multiply-adds are the textbook's."""

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from fewstep.benchmarks.cost import multiply_adds


def test_linear():
    assert multiply_adds(lambda: nn.Linear(5, 7)(torch.zeros(3, 5))) == 3 * 5 * 7


def test_conv2d():
    conv = nn.Conv2d(4, 6, 3, padding=1, groups=2)
    assert multiply_adds(lambda: conv(torch.zeros(2, 4, 8, 9))) == 2 * 6 * 8 * 9 * (4 // 2) * 3 * 3


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention(grad, dtype):
    query, key, value = (torch.zeros(2, 3, length, width, dtype=dtype) for length, width in ((8, 4), (5, 4), (5, 4)))
    with torch.set_grad_enabled(grad):
        found = multiply_adds(lambda: scaled_dot_product_attention(query, key, value))
    assert found == 2 * 3 * 8 * 5 * (4 + 4)


def test_masked_attention_counts_in_full():
    x = torch.zeros(1, 2, 6, 4)
    with torch.no_grad():
        assert multiply_adds(lambda: scaled_dot_product_attention(x, x, x, is_causal=True)) == 2 * 6 * 6 * 8


def test_errors_of_the_call_pass():
    with pytest.raises(ZeroDivisionError):
        multiply_adds(lambda: 1 // 0)
