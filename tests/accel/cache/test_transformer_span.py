"""What flows through a transformer's blocks, and what of it is read."""

import pytest
import torch

from fewstep.accel.cache.transformer_span import Contract, lists
from fewstep.accel.zoo.tiny import FAMILIES, tiny


def final(pipe, call):
    options = {"output_type": "pt" if type(pipe).__name__ == "DiTPipeline" else "latent"}
    return torch.as_tensor(pipe(**call | options)[0])


@pytest.mark.parametrize("family", [f for f in FAMILIES if "transformer" in FAMILIES[f].tags])
def test_nobody_reads_what_the_last_block_makes_of_the_text(family):
    """So a reused span need not keep it: the pictures are the same with noise in its place."""
    pipe = tiny(family)
    for denoiser in (getattr(pipe, n) for n in ("transformer", "transformer_2") if getattr(pipe, n, None) is not None):
        last = [block for found in lists(denoiser, "test") for block in found][-1]
        contract = Contract(last)
        keep = [name == contract.parameters[0] for name in contract.returns]

        def noisy(module, args, output, contract=contract, keep=keep):
            values = zip(contract.unpack(output), keep, strict=True)
            return contract.pack(tuple(v if k or v is None else torch.randn_like(v) for v, k in values))

        last.register_forward_hook(noisy)
    call = FAMILIES[family].call
    assert torch.equal(final(pipe, call()), final(tiny(family), call()))
