"""The averaged weights."""

import torch

from fewstep.distill.ema import Ema


def test_the_average_is_the_closed_form_and_moves_in_half_precision():
    layer = torch.nn.Linear(1, 1, bias=False).bfloat16()
    with torch.no_grad():
        layer.weight.fill_(1.0)
    ema = Ema(layer, 0.999)
    with torch.no_grad():
        layer.weight.fill_(2.0)
    expected = 1.0
    for step in range(200):
        ema.update(layer)
        decay = min(0.999, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * 2.0
    assert abs(ema.shadow["weight"].item() - expected) < 1e-5
    with ema.applied(layer):
        assert layer.weight.item() == ema.shadow["weight"].bfloat16().item()
    assert layer.weight.item() == 2.0
