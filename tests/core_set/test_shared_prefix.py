"""attention_with_shared_prefix by kernels. What it means: tests/unit/test_shared_prefix.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import archflash

from .. import kvcache_cases
from ..kvcache_cases import CacheCall, make
from .executors import executor

here = executor()


@pytest.mark.parametrize("kernel", here.kernels("kv_cache"))
def test_pages_of_a_prefix_and_own_pages_are_one_sequence(kernel: str) -> None:
    page, pages = 16, 4  # of the prefix
    call = make(
        [70, 90, 66], page_size=page, capacity=112, shared_pages=pages, nq=2, heads=(8, 2), d=64,
        n_new=1, causal=True, device=here.device,
        dtype=getattr(torch, here.dtypes_of(kernel, ("bfloat16", "float32"))[-1]),
    )  # fmt: skip
    options = dict(call.options)
    table = options.pop("page_table")
    lengths = options.pop("cache_seqlens")

    def serve(mine: CacheCall) -> tuple[Tensor, Tensor]:
        answer: tuple[Tensor, Tensor] = archflash.attention_with_shared_prefix(
            mine.q, mine.k_cache, mine.v_cache, mine.k_cache, mine.v_cache, **options,
            cache_seqlens=lengths - page * pages, page_table=table[:, pages:].contiguous(),
            prefix_page_table=table[:1, :pages].contiguous(), implementation=kernel,
            return_lse=True,
        )  # fmt: skip
        return answer

    kvcache_cases.check(call, serve)
