"""A server's cache and batches, of vLLM's own classes, and attention over them in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionBackend, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheLayout,
    KVCacheTensor,
    compute_layout_strides,
    create_kv_cache_views,
    get_kv_quant_mode,
)

from archflash import reference

HEADS, HEADS_KV, DIM, PAGE, PAGES = 4, 2, 16, 3, 12
FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
SCALE = 0.3


def rand(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def spec(dtype: str = "auto", dim_v: int = DIM, heads: int = HEADS_KV) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=PAGE,
        num_kv_heads=heads,
        head_size=DIM,
        head_size_v=dim_v,
        dtype=torch.uint8 if dtype in FP8 else torch.bfloat16,
        kv_quant_mode=get_kv_quant_mode(dtype),
    )


def cache(of: FullAttentionSpec, layout: KVCacheLayout, pages: int = PAGES) -> Tensor:
    """The second of two layers, full of NaN."""
    strides = compute_layout_strides(of, pages, 2, layout)
    size = 2 * of.page_size_bytes * pages
    raw = torch.full((size,), 127, dtype=torch.int8)
    if of.dtype == torch.bfloat16:
        raw.view(torch.bfloat16).fill_(torch.nan)
    place = KVCacheTensor(
        size=size, layers=["0", "1"], layer_stride=strides[0], block_stride=strides[1]
    )
    return create_kv_cache_views(raw, of, pages, layout, place)[1]


def metadata(
    lengths: Sequence[int], seq_lens: Sequence[int], table: Tensor, slots: list[int], **more: Any
) -> CommonAttentionMetadata:
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    given = {
        "query_start_loc": ends,
        "query_start_loc_cpu": ends,
        "seq_lens": lens,
        "num_reqs": len(lengths),
        "num_actual_tokens": sum(lengths),
        "max_query_len": max(lengths),
        "max_seq_len": int(lens.max()),
        "block_table_tensor": table,
        "slot_mapping": torch.tensor(slots),
        "seq_lens_cpu_upper_bound": lens,
    }
    return CommonAttentionMetadata(**(given | more))


class Server:
    """A paged cache with three requests: it holds the rows that each has seen."""

    def __init__(
        self,
        backend: type[AttentionBackend],
        dtype: str = "auto",
        layout: KVCacheLayout = KVCacheLayout.LBNHC,
        dim_v: int = DIM,
        **impl: Any,
    ) -> None:
        self.backend, self.dtype, self.dim_v = backend, dtype, dim_v
        self.impl = backend.get_impl_cls()(
            HEADS, DIM, SCALE, HEADS_KV, kv_cache_dtype=dtype, **impl
        )
        self.spec = spec(dtype, dim_v)
        self.cache = cache(self.spec, layout)
        self.builder = backend.get_builder_cls()(
            self.spec, ["layer"], VllmConfig(), torch.device("cpu")
        )
        self.table = torch.tensor([[7, 2, 9], [0, 11, 5], [3, 1, 8]], dtype=torch.int32)
        self.rows: list[list[tuple[Tensor, Tensor]]] = [[], [], []]
        self.layer = SimpleNamespace(
            _k_scale=torch.tensor(0.5),
            _v_scale=torch.tensor(2.0),
            kv_sharing_target_layer_name=None,
        )

    def stored(self, x: Tensor, scale: Tensor) -> Tensor:
        """A row (kv heads, head dim) as the cache keeps it."""
        if self.dtype not in FP8:
            return x
        by = scale.reshape(-1, 1)
        return ((x.float() / by).to(FP8[self.dtype]).float() * by).bfloat16()

    def slots(self, lengths: Sequence[int], first: Sequence[int] = (0, 0, 0)) -> list[int]:
        """Where so many rows of each request go, from a first one on."""
        return [
            int(self.table[request, row // PAGE]) * PAGE + row % PAGE
            for request, length in enumerate(lengths)
            for row in range(first[request], first[request] + length)
        ]

    def step(self, lengths: Sequence[int], seed: int = 1, **common: Any) -> tuple[Tensor, Tensor]:
        """A batch with so many new rows of each request, and two rows that pad it: queries and
        output.
        """
        total = sum(lengths)
        q = rand(total + 2, HEADS, DIM, seed=seed)
        k = rand(total + 2, HEADS_KV, DIM, seed=seed + 1)
        v = rand(total + 2, HEADS_KV, self.dim_v, seed=seed + 2)
        slots = self.slots(lengths, [len(rows) for rows in self.rows])
        row = 0
        for request, length in enumerate(lengths):
            for _ in range(length):
                scales = self.layer._k_scale, self.layer._v_scale
                new = (self.stored(x[row], by) for x, by in zip((k, v), scales, strict=True))
                self.rows[request].append(tuple(new))  # type: ignore[arg-type]
                row += 1
        lens = [len(rows) for rows in self.rows]
        batch = self.builder.build(0, metadata(lengths, lens, self.table, slots, **common))
        output = torch.full((total + 2, HEADS * self.dim_v), 7.0, dtype=torch.bfloat16)
        if not self.backend.forward_includes_kv_cache_update:
            self.impl.do_kv_cache_update(self.layer, k, v, self.cache, batch.slot_mapping)
        args = (self.layer, q, k, v, self.cache, batch, output)
        assert self.impl.forward(*args) is output
        assert bool((output[total:] == 7.0).all())
        return q[:total], output[:total].view(total, HEADS, self.dim_v)

    def check(
        self, q: Tensor, out: Tensor, lengths: Sequence[int], **call: Any
    ) -> reference.Report:
        """Compares with float64, and fails where they disagree."""
        return check(q, out, self.rows, lengths, **call)


def check(
    q: Tensor, out: Tensor, rows: Sequence[Any], lengths: Sequence[int], **call: Any
) -> reference.Report:
    """Compares attention of packed queries to the rows of each request with float64."""
    ends_k = [0, *torch.tensor([len(some) for some in rows]).cumsum(0)]
    k, v = (torch.stack([row[i] for some in rows for row in some]) for i in range(2))
    call = {
        "causal": True,
        "scale": SCALE,
        "cu_seqlens_q": torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor(ends_k, dtype=torch.int32),
    } | call
    expected = reference.attention(q, k, v, **call)[0]
    report = reference.check(out, expected, reference.baseline(q, k, v, **call))
    assert report.ok, report
    assert math.isfinite(float(out.float().abs().sum()))
    return report
