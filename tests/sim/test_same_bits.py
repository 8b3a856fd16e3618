"""The simulator gives the same bits on every processor, with AVX2 and without: 8 small calls, one
for each kind of kernel. `make test-aarch64` runs them on another processor.

A change of a kernel may change its bits. The message of the test that fails then says the new hash.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import archflash
from archflash import _archflash_sim

from .hashed import hashed

BF16, F16, F32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn


def qkv(dtype: torch.dtype, nq: int, nk: int, d: int, heads: tuple[int, int] = (2, 1)) -> Any:
    shapes = ((1, heads[0], nq, d), (1, heads[1], nk, d), (1, heads[1], nk, d))
    return [hashed(shape, stream).to(dtype) for stream, shape in enumerate(shapes)]


def forward(name: str, dtype: torch.dtype, *shape: int, **options: Any) -> Callable[[], Any]:
    return lambda: archflash.attention(
        *qkv(dtype, *shape), implementation=name, return_lse=True, **options
    )


def gradients() -> Any:
    q, k, v = (x.requires_grad_() for x in qkv(BF16, 70, 90, 64))
    out = archflash.attention(q, k, v, causal=True, implementation="hopper")
    return torch.autograd.grad(out, (q, k, v), hashed(tuple(out.shape), 3).to(BF16))


def decoding() -> Any:
    q, k, v = (x.transpose(1, 2) for x in qkv(F16, 1, 150, 64, (4, 2)))
    lengths = torch.tensor([139], dtype=torch.int32)
    return archflash.attention_with_kvcache(
        q, k, v, cache_seqlens=lengths, return_lse=True, implementation="ampere"
    )


CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "simt": (forward("simt", F32, 20, 50, 32, window=(30, 3)), "758189d393b929ec"),
    "ampere": (forward("ampere", BF16, 40, 90, 64, causal=True, softcap=5.0), "b423a2e805acb92c"),
    "ada": (forward("ada", E4M3, 40, 90, 64), "604275cb6643bef1"),
    "hopper": (forward("hopper", F16, 70, 150, 64, causal=True), "e46018be3f19ae75"),
    "blackwell_consumer": (forward("blackwell_consumer", BF16, 40, 150, 64), "035554ebe5fdb3a8"),
    "blackwell_dc": (forward("blackwell_dc", BF16, 70, 150, 64, causal=True), "24412f55d38cb406"),
    "hopper, gradients": (gradients, "ce9e00b04c7c9ab1"),
    "ampere, decoding": (decoding, "2a65df1928525d38"),
}


def digest(tensors: Any) -> str:
    given = [tensors] if isinstance(tensors, Tensor) else tensors
    raw = [x.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for x in given]
    return hashlib.sha256(b"".join(raw)).hexdigest()[:16]


@pytest.mark.parametrize("name", CALLS)
def test_a_call_gives_the_stored_bits(name: str) -> None:
    call, stored = CALLS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that the simulator runs
        assert digest(call()) == stored


def test_code_without_avx2_gives_the_stored_bits() -> None:
    """What other processors run."""
    was = _archflash_sim.uses_avx2()
    _archflash_sim.set_avx2(False)
    try:
        test_a_call_gives_the_stored_bits("ampere")
    finally:
        _archflash_sim.set_avx2(was)
