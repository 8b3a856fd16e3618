"""Refuses each allocation of each kind of call once, or one of STEP allocations: the call raises or
is right all the same, and the next is right.

It runs in a process of its own, in front of whose libraries failing_allocations.c is loaded:
python -m tests.failing_worker cpu|cuda STEP. Prints how many allocations were refused.
"""

from __future__ import annotations

import ctypes
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import archflash
from archflash.compat import flash_attn_interface, flash_mla, sageattention

NOTHING = -1
Calls = dict[str, Callable[[], Any]]


def calls_of(device: str) -> Calls:
    """Calls of every kind, by plain PyTorch and by kernels; on the CPU these are simulated."""
    torch.manual_seed(0)
    gpu = device == "cuda"
    nq, nk = (200, 600) if gpu else (3, 130)

    def rand(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    q, k, v = rand(1, 4, nq, 64), rand(1, 2, nk, 64), rand(1, 2, nk, 64)
    wide = [x.float() for x in (q, k, v)]
    caches = rand(2, nk, 2, 64), rand(2, nk, 2, 64)
    lengths = torch.full((2,), nk - 1, dtype=torch.int32, device=device)
    of_cache = {"cache_seqlens": lengths, "k_new": rand(2, 1, 2, 64), "v_new": rand(2, 1, 2, 64)}
    mask = torch.rand(nq, nk, device=device) < 0.7
    out, lse = archflash.attention(q, k, v, return_lse=True, implementation="torch")
    kernels = ["ampere", "simt", *(["hopper"] if gpu and _is_hopper() else [])]

    def both_passes(name: str | None) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        made = archflash.attention(*leaves, causal=True, implementation=name)
        return [made, *torch.autograd.grad(made.sum(), leaves)]

    calls: Calls = {
        "splits": lambda: archflash.attention(q, k, v, num_splits=2, implementation="ampere"),
        "torch": lambda: archflash.attention(*wide, softcap=3.0, return_lse=True),
        "torch, mask": lambda: archflash.attention(*wide, attn_mask=mask),
        "torch, both passes": lambda: both_passes("torch"),
        "merge": lambda: archflash.merge_attention([out, out], [lse, lse]),
        "quantize": lambda: archflash.quantize_fp8(q),
        "sdpa": lambda: archflash.scaled_dot_product_attention(q, k, v, enable_gqa=True),
    }
    for name in kernels:
        given = wide if name == "simt" else [q, k, v]
        calls[name] = lambda given=given, name=name: archflash.attention(
            *given, return_lse=True, implementation=name
        )
        calls[f"{name}, mask"] = lambda given=given, name=name: archflash.attention(
            *given, attn_mask=mask, implementation=name
        )
    for name in ("ampere", "torch"):
        calls[f"{name}, cache"] = lambda name=name: archflash.attention_with_kvcache(
            q[:, :, :1].expand(2, 4, 1, 64).transpose(1, 2), *caches, implementation=name,
            num_splits=2 if name == "ampere" else None, **of_cache,
        )  # fmt: skip
    ends = [torch.tensor([0, n // 2, n], dtype=torch.int32, device=device) for n in (nq, nk)]
    rows = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
    lists = torch.arange(nq, dtype=torch.int32, device=device).expand(1, 1, nq, nq)
    latent, pool = rand(2, 1, 4, 576), rand(6, 64, 1, 576)
    pages = torch.arange(6, dtype=torch.int32, device=device).view(2, 3)
    few = torch.full((2,), 120, dtype=torch.int32, device=device)
    chosen = torch.arange(8, dtype=torch.int32, device=device).expand(2, 1, 8)
    half_out, half_lse = archflash.attention(q, k, v, return_lse=True, implementation="ampere")
    calls |= {
        "packed": lambda: archflash.attention(
            *rows, cu_seqlens_q=ends[0], cu_seqlens_k=ends[1], return_lse=True,
            implementation="ampere",
        ),
        "lists of keys": lambda: archflash.attention(
            q, k, v, key_indices=lists, implementation="ampere"
        ),
        "latent cache": lambda: archflash.attention_with_kvcache(
            latent, pool, dv=512, cache_seqlens=few, page_table=pages, scale=0.1,
            implementation="ampere",
        ),
        "MLA, two caches": lambda: flash_mla.flash_mla_with_kvcache(
            latent, pool[:1], None, None, 512, softmax_scale=0.1, indices=chosen,
            extra_k_cache=pool[:1], extra_indices_in_kvcache=chosen,
            attn_sink=torch.zeros(4, device=device),
        ),
        "FlashAttention-3, second query": lambda: flash_attn_interface.flash_attn_func(
            *(x.transpose(1, 2) for x in (q, k, v)), qv=q.transpose(1, 2), return_attn_probs=True
        ),
        "shared prefix": lambda: archflash.attention_with_shared_prefix(
            q[:, :, :1].expand(2, 4, 1, 64).transpose(1, 2), *(x[:1] for x in caches), *caches,
            cache_seqlens=few,
        ),
        "float32 output": lambda: archflash.attention(
            q, k, v, out_dtype=torch.float32, implementation="ampere"
        ),
        "gradients alone": lambda: archflash.attention_backward(
            half_out, q, k, v, half_out, half_lse, implementation="torch"
        ),
        "nvfp4": lambda: archflash.quantize_nvfp4(q),
        "SageAttention": lambda: sageattention.sageattn(q, k, v),
    }  # fmt: skip
    if gpu:
        calls["chosen, both passes"] = lambda: both_passes(None)
        calls["ampere, both passes"] = lambda: both_passes("ampere")
    return calls


def _is_hopper() -> bool:
    return torch.cuda.get_device_capability()[0] == 9


def bits(result: Any) -> list[Tensor]:
    results = result if isinstance(result, (tuple, list)) else [result]
    return [x.detach().clone() for x in results if x is not None]


def same(name: str, found: list[Tensor], right: list[Tensor]) -> bool:
    """The same bits; of gradients only the same numbers, which PyTorch's kernels add in any order
    on a GPU.
    """
    pairs = list(zip(found, right, strict=True))
    if "both passes" in name or "gradients" in name:
        return all(torch.allclose(x, y, atol=0.05, rtol=0.05) for x, y in pairs)
    return all(torch.equal(x, y) for x, y in pairs)


def main(device: str, step: int) -> None:
    warnings.simplefilter("ignore")
    library = ctypes.CDLL(None)
    refused = 0
    for name, call in calls_of(device).items():
        right = bits(call())  # also plans, and loads kernels
        assert same(name, bits(call()), right), f"{name}: other bits without a failure"
        library.failing_begin(NOTHING)
        result = call()
        count = library.failing_end()
        del result
        assert count > 0, f"{name}: no allocation was seen"
        for number in range(len(name) % min(step, count), count, step):
            refused += 1
            library.failing_begin(number)
            try:
                found = bits(call())
                library.failing_end()  # it may have asked for the memory in another way
                assert same(name, found, right), f"{name}: other bits without allocation {number}"
            except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is one
                library.failing_end()
                said = str(error)
                assert "memory" in said or "allocate" in said, f"{name}, {number}: {said!r}"
            assert same(name, bits(call()), right), (
                f"{name}: other bits after allocation {number} failed"
            )
        print(f"{name}: {count}", flush=True)
    print(f"{refused} allocations refused")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
