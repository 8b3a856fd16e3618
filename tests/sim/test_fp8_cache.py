"""Caches of 8-bit numbers: kernels that convert by an instruction (8.9 and newer), and without."""

from __future__ import annotations

import pytest
import torch

from archflash import sim
from archflash.sim._attention import ptx_text

from ..core_set.checks import same_bits
from ..kvcache_cases import make


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("d", [64, 256])
def test_gpus_with_and_without_the_instruction_compute_the_same_bits(
    d: int, dtype: torch.dtype
) -> None:
    call = make([70, 33], nq=2, d=d, causal=True, dtype=torch.bfloat16, cache_dtype=dtype)
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype)
    call.v_cache[0, :4, 0, :64] = numbers.reshape(4, 64)
    runs = [
        sim.run(
            call.q, call.k_cache, call.v_cache, implementation="ampere", device=device,
            num_splits=1, return_lse=True, **call.options,
        )
        for device in ("A100", "H200")
    ]  # fmt: skip
    assert same_bits(runs[0].out, runs[1].out)
    assert runs[0].lse is not None
    assert runs[1].lse is not None
    assert same_bits(runs[0].lse, runs[1].lse)
    image = runs[0].plan.to_dict()["launches"][0]["image"]
    texts = [ptx_text(image, capability) for capability in ((8, 0), (9, 0))]
    assert ["cvt.rn.f16x2.e4m3x2" in text for text in texts] == [False, True]
