"""Every rung of every ladder that this GPU can run computes attention on it."""

from __future__ import annotations

import pytest
import torch
from bench.cases import TORCH_DTYPES
from bench.ladder import rungs
from bench.ladder.definitions import LADDERS, Ladder, Rung
from bench.on_the_spot import find_nvcc

from .gpu_cases import assert_close

pytestmark = pytest.mark.gpu
NVCC = find_nvcc()
EVERY = [(ladder, rung) for ladder in LADDERS for rung in ladder.rungs]


@pytest.mark.skipif(NVCC is None, reason="nvcc is not found")
@pytest.mark.parametrize(("ladder", "rung"), EVERY, ids=[f"{x.name}-{y.name}" for x, y in EVERY])
def test_a_rung_computes_attention_with_the_same_bits_again(ladder: Ladder, rung: Rung) -> None:
    assert NVCC is not None
    if reason := ladder.why_no_gpu(torch.cuda.get_device_capability()):
        pytest.skip(reason)
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (2, 3, 5 * ladder.multiple if ladder.multiple > 1 else 333, ladder.head_dim)
    dtype = getattr(torch, TORCH_DTYPES[ladder.dtype])
    q, k, v = (torch.randn(shape, device="cuda", generator=generator).to(dtype) for _ in range(3))
    for causal in ladder.masks:
        call = rungs.Launcher(ladder, rung, NVCC).bind(causal)
        out = call(q, k, v)
        assert_close(out, None, q, k, v, causal=causal)
        for _ in range(5):
            assert torch.equal(call(q, k, v), out)
