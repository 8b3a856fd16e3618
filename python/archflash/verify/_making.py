"""Random tensors, and calls of caches, for kernels to be checked with."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from archflash.verify._setup import Setup

FP8 = ("float8_e4m3fn", "float8_e5m2")
Tensors = tuple[Tensor, Tensor, Tensor]
Call = dict[str, Any]


class Maker:
    """Random tensors, the same for the same name."""

    def __init__(self, setup: Setup, name: str) -> None:
        self.device = setup.device
        self._generator = torch.Generator(device=setup.device).manual_seed(
            zlib.crc32(name.encode())
        )

    def rand(self, *shape: int, dtype: str = "float32") -> Tensor:
        x = torch.randn(shape, generator=self._generator, device=self.device)
        return x.to(getattr(torch, dtype))

    def qkv(
        self, dtype: str, dims: tuple[int, int], heads: tuple[int, int], nq: int, nk: int,
        batch: int = 1,
    ) -> Tensors:  # fmt: skip
        d, dv = dims
        return (
            self.rand(batch, heads[0], nq, d, dtype=dtype),
            self.rand(batch, heads[1], nk, d, dtype=dtype),
            self.rand(batch, heads[1], nk, dv, dtype=dtype),
        )

    def int32(self, values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def ranges(self, rows: int, keys: int) -> Tensor:
        """key_ranges that begin later and later, and end near the end."""
        row = torch.arange(rows, dtype=torch.int32, device=self.device)
        both = torch.stack([row * keys // (2 * rows), keys - row % 7], -1)
        return both[None, None, :, None]

    def lists(self, *shape: int, keys: int) -> Tensor:
        """key_indices of distinct keys, some of them none."""
        step = torch.arange(shape[-1], device=self.device)
        first = torch.arange(math.prod(shape[:-1]), device=self.device).reshape(*shape[:-1], 1)
        listed = (step * 7 + first * 3) % (keys + 5) - 2
        return torch.where(step < keys, listed, -1).int()

    def ends(self, lengths: Sequence[int]) -> Tensor:
        return self.int32([0, *itertools.accumulate(lengths)])


def cache_call(maker: Maker, dtype: str, made: dict[str, Any]) -> tuple[Tensor, list[Tensor], Call]:
    """Queries, caches whose unused rows are NaN, and the options of a call."""
    lengths: list[int] = made["lengths"]
    heads: tuple[int, int] = made.get("heads", (8, 2))
    latent = bool(made.get("latent"))
    d, dv = (64, 512) if latent else (made.get("d", 128),) * 2
    nq, n_new, page = made.get("nq", 1), made.get("n_new", 0), made.get("page_size", 0)
    kind = made.get("cache_dtype", dtype)
    batch, capacity = len(lengths), -(-(max(lengths) + n_new) // 64) * 64
    call: Call = {"cache_seqlens": maker.int32(lengths), "causal": True}
    caches = [maker.rand(batch, capacity, heads[1], n, dtype=kind) for n in (d, dv)]
    for sequence, length in enumerate(lengths if maker.device != "meta" else ()):
        for cache in caches:
            cache[sequence, length:] = float("nan")
    if page:
        pages = batch * capacity // page
        order = torch.arange(pages, device=maker.device).flip(0)
        for number, cache in enumerate(caches):
            mixed = torch.empty_like(cache).reshape(pages, page, *cache.shape[2:])
            mixed[order] = cache.reshape(mixed.shape)
            caches[number] = mixed
        call["page_table"] = order.to(torch.int32).reshape(batch, -1)
    if n_new:
        call["k_new"] = maker.rand(batch, n_new, heads[1], d, dtype=kind)
        call["v_new"] = maker.rand(batch, n_new, heads[1], dv, dtype=kind)
    if kind in FP8:
        call |= {"k_descale": maker.rand(1).abs() + 0.5, "v_descale": maker.rand(1).abs() + 0.5}
    if made.get("masked"):
        call["attn_mask"] = maker.rand(1, 1, nq, 32) > -1.0
    rows: list[int] | None = made.get("rows")
    if rows is not None:
        call["cu_seqlens_q"] = maker.int32([0, *itertools.accumulate(rows)])
    shape = (batch, nq) if rows is None else (sum(rows),)
    q = maker.rand(*shape, heads[0], d, dtype=dtype)
    if made.get("listed"):
        call["key_indices"] = maker.lists(batch, 1, nq, 300, keys=max(lengths))
    if latent:
        call |= {"qv": maker.rand(batch, nq, heads[0], dv, dtype=dtype), "scale": 0.05}
    return q, caches, call
