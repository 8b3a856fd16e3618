"""Kernels for lists of keys that are mutated, and the calls that a mutant has to get right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from archflash import _api, reference
from archflash import _archflash as native

from ...kvcache_cases import CacheCall, make, with_latent_rows, with_places
from ..cards.cases import DTYPES
from ..hashed import hashed
from .planned import ForwardCall, main

GARBAGE = (-1, 2**31 - 1, -(2**31), 1 << 29)  # entries that name no key
OF_TENSORS = (reference.attention, reference.baseline)
OF_CACHES = (reference.attention_with_kvcache, reference.baseline_with_kvcache)


def lists_of(shape: tuple[int, int, int, int], keys: int, lengths: Tensor | None = None) -> Tensor:
    """Lists in any order, one entry in five of which names no key; behind the lengths others do."""
    generator = torch.Generator().manual_seed(sum(shape))
    order = torch.rand(*shape[:3], max(keys, shape[3]), generator=generator).argsort(-1)
    lists = order[..., : shape[3]].int()
    garbage = torch.tensor(GARBAGE)[torch.randint(0, 4, shape, generator=generator)].int()
    hidden = torch.rand(shape, generator=generator) < 0.2
    if lengths is not None:
        hidden &= torch.arange(shape[3]) < lengths[..., None]
    return torch.where(hidden, garbage, lists)


def rising(common: dict[str, Any]) -> CacheCall:
    """Blocks of keys four times as large as those that are visited before them, so that rows raise
    their bases in each, far beyond what P can be without; but eight rows of a warp's 16 see zeros.
    An even and an odd number of blocks.
    """
    call = make(
        [200, 140], heads=(16, 1), page_size=64, capacity=256, scale=0.3,
        key_indices=torch.arange(200, dtype=torch.int32)[None, None, None],
        topk_lengths=torch.tensor([[[200]], [[140]]], dtype=torch.int32), **common,
    )  # fmt: skip
    for pages in call.options["page_table"].tolist():
        for block, page in enumerate(pages):
            for cache in (call.k_cache, call.v_cache):
                cache[page] *= 4.0 ** (3 - block)
    for q in (call.q, call.options["qv"]):
        q[:, :, 8:] = 0
    return call


@dataclass(frozen=True)
class GatherTarget:
    """One kernel.

    Attributes:
        implementation: its folder.
        name: the end of its name.
        device: planned for this known GPU.
        d: head dimension; 0: latent rows.
        dtype: of its inputs.
        packed: whether its rows are packed ones.
        heads: of q where its number does not matter, in tiles of 64.
        rows: that share a list of K and V as they are given, at least and at most.
        stays: whether CTAs take one tile after another, as planned for a GPU with one SM.
    """

    implementation: str
    name: str
    device: str
    d: int = 0
    dtype: str = "bf16"
    packed: bool = False
    heads: int = 0
    rows: tuple[int, int] = (1, 1 << 20)
    stays: bool = False

    @property
    def kernel(self) -> str:
        return f"{self.implementation}_attention_fwd_{self.dtype}_{self.name}"

    def calls(self) -> Iterator[ForwardCall]:
        for name, (inputs, options) in (self._dense() if self.d else {}).items():
            yield self._planned(name, inputs, options, OF_TENSORS)
        for name, call in (self._latent() if self.d == 0 else self._cached()).items():
            # hopper has kernels of their own for latent rows with a softcap.
            here = ("softcap" in call.options) == self.name.endswith("_capped")
            if self.d == 0 and self.implementation == "hopper" and not here:
                continue
            inputs = (call.q, call.k_cache, call.v_cache)
            yield self._planned(name, inputs, call.options, OF_CACHES)

    def _planned(
        self, name: str, inputs: tuple[Tensor, ...], options: dict[str, Any], references: Any
    ) -> ForwardCall:
        device = _api.find_device(self.device)
        if self.stays:
            device = native.Device.from_dict(device.to_dict() | {"sm_count": 1})
        return ForwardCall(
            self.kernel, self.implementation, device, name, inputs, options, references
        )

    def _qkv(
        self, nq: int, nk: int, heads: tuple[int, int], narrower: tuple[int, int] = (0, 0),
        batch: int = 1,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        d, dv = (self.d - less for less in narrower)
        shapes = ((batch, heads[0], nq, d), (batch, heads[1], nk, d), (batch, heads[1], nk, dv))
        made = [hashed(shape, stream) for stream, shape in enumerate(shapes, 1)]
        return tuple(x.to(DTYPES[self.dtype]) for x in made)

    def _heads(self, q: int, kv: int, list_rows: int = 1) -> tuple[int, int]:
        """Heads of q and of K, with as many of the former as the rows of a list want."""
        least, most = self.rows
        return kv * min(max(q // kv, -(-least // list_rows)), most // list_rows), kv

    def _dense(self) -> dict[str, tuple[tuple[Tensor, ...], dict[str, Any]]]:
        """Of K and V as they are given: tiles of few and of many heads, lists for a row, a head and
        64 rows, shares, and every mask that may stand beside lists.
        """
        lengths = torch.tensor([[[9], [70]], [[0], [141]]], dtype=torch.int32)
        made: dict[str, tuple[tuple[Tensor, ...], dict[str, Any]]] = {
            "lists of heads": (
                self._qkv(2, 190, self._heads(6, 2), (24, 0), batch=2),
                {"key_indices": lists_of((2, 2, 2, 140), 190, lengths), "topk_lengths": lengths},
            ),
            "two tiles of heads, shares": (
                self._qkv(1, 300, self._heads(72, 1), (0, 40)),
                {"key_indices": lists_of((1, 1, 1, 290), 300), "num_splits": 3},
            ),
            "causal, sinks": (
                self._qkv(5, 40, self._heads(20, 1), batch=2),
                {"key_indices": lists_of((1, 1, 5, 33), 40), "causal": True,
                 "sinks": torch.linspace(-1, 3, self._heads(20, 1)[0])},
            ),
            "lists of 64 rows, window": (
                self._qkv(70, 80, self._heads(4, 2, 64)),
                {"key_indices": lists_of((1, 2, 2, 50), 80), "window": (9, 5), "q_offset": 4},
            ),
            "rows of a head alone, huge scores": (
                self._qkv(70, 150, self._heads(2, 2, 64)),
                {"key_indices": lists_of((1, 2, 2, 130), 150), "scale": 1e7},
            ),
        }  # fmt: skip
        if self.stays:
            made["more blocks than stages"] = (
                self._qkv(9, 190, self._heads(3, 1)),
                {"key_indices": lists_of((1, 1, 9, 180), 190)},
            )
        q, k, v = (x.transpose(1, 2).contiguous() for x in self._qkv(2, 150, self._heads(33, 1)))
        every = torch.arange(149, dtype=torch.int32).expand(1, 1, 2, 149).contiguous()
        made["softcap, bnhd"] = (
            (q, k, v),
            {"key_indices": every, "softcap": 7.0, "layout": "bnhd",
             "scale": 1.0},
        )  # fmt: skip
        for fewer in range(8, self.d, 16):  # each place where a row of K or of V may end
            for number, (narrower, keys) in enumerate(
                (((fewer, 0), 20), ((0, fewer), 20), ((0, fewer), 300))
            ):
                lists = lists_of((1, 1, 1, keys - 8), keys)
                made[f"{narrower} columns fewer, {keys} keys"] = (
                    self._qkv(1, keys, self._heads(12, 1), narrower),
                    {"key_indices": lists, "num_splits": 1 + number // 2},
                )
        return made

    def _cached(self) -> dict[str, CacheCall]:
        common: dict[str, Any] = {"d": self.d, "dtype": DTYPES[self.dtype]}
        paged = make([60, 33], nq=2, heads=self._heads(6, 2), page_size=7, **common)
        return {
            "pages": paged.with_options(key_indices=lists_of((2, 1, 2, 44), 60), num_splits=2),
            "places": with_places(paged.with_options(key_indices=lists_of((2, 2, 2, 44), 60))),
            "leftpad": make(
                [60, 33], nq=2, heads=self._heads(20, 1), leftpad=[3, 30], causal=True,
                rows_of=[1, 0], key_indices=lists_of((2, 1, 2, 90), 60), **common,
            ),
        }  # fmt: skip

    def _latent(self) -> dict[str, CacheCall]:
        """An odd and an even number of blocks, one to three tiles of heads, lists and lengths of
        each kind, shares, bases that rise.
        """
        common: dict[str, Any] = {"d": 64, "dv": 512, "qv": True, "dtype": DTYPES[self.dtype]}
        lengths = torch.tensor([[[130]], [[7]]], dtype=torch.int32)
        rows = 3 if self.heads else 70
        tiles = self.heads or 192  # an odd number of them, which no cluster of two shares
        made = {
            "pages, lengths": make(
                [190, 33], nq=2, heads=(self.heads or 20, 1), page_size=7, capacity=196,
                key_indices=lists_of((2, 1, 2, 140), 190, lengths), topk_lengths=lengths, **common,
            ),
            "shares, sinks, tiles of heads": make(
                [250], heads=(tiles, 1), page_size=64, capacity=256, num_splits=2,
                sinks=torch.linspace(-2, 2, tiles), key_indices=lists_of((1, 1, 1, 240), 250),
                **common,
            ),
            "causal, lists of 64 rows": make(
                [100], nq=rows, heads=(self.heads or 2, 1), page_size=16, capacity=112, causal=True,
                key_indices=lists_of((1, 1, (rows + 63) // 64, 90), 100), **common,
            ),
            # As many blocks as leave one alone, of which scores are capped too; a row sees a few
            # keys, so that each of them counts.
            "softcap, window": make(
                [150, 130], nq=6, heads=(self.heads or 16, 1), page_size=16, capacity=160,
                softcap=1.5, scale=0.3, window=(12, 0),
                key_indices=lists_of((1, 1, 6, 140), 150), **common,
            ),
            # Capped scores decide, those of every key: without the cap one of them has all weight.
            "softcap": make(
                [180], heads=(self.heads or 16, 1), page_size=64, capacity=192, softcap=1.5,
                scale=0.3, key_indices=lists_of((1, 1, 1, 178), 180), **common,
            ),
            "huge scores": make(
                [200, 40], heads=(self.heads or 40, 1), page_size=64, capacity=256, scale=1e7,
                key_indices=lists_of((2, 1, 1, 199), 200), **common,
            ),
            "no key": make(
                [30, 0], heads=(self.heads or 1, 1), page_size=16, capacity=32,
                sinks=torch.ones(self.heads or 1), key_indices=lists_of((2, 1, 1, 8), 30) * 0 - 1,
                **common,
            ),
        }  # fmt: skip
        paged = make(
            [120, 66], nq=2, heads=(self.heads or 33, 1), page_size=5, capacity=120,
            key_indices=lists_of((2, 1, 2, 70), 120), **common,
        )  # fmt: skip
        if not self.packed:
            made["contiguous, two heads"] = make(
                [130, 60], nq=2, heads=(10, 2), capacity=130,
                key_indices=lists_of((2, 2, 2, 100), 130), **common,
            )  # fmt: skip
            made["places"] = with_places(paged)
            made["half of a warp's bases rise"] = rising(common)
            return {name: with_latent_rows(call, None) for name, call in made.items()}
        forms = {name: with_latent_rows(call, "fp8_656") for name, call in made.items()}
        forms["places"] = with_places(with_latent_rows(paged, "fp8_584"))
        forms["fp8_584, pages"] = with_latent_rows(made["pages, lengths"], "fp8_584")
        return forms


TARGETS = (
    GatherTarget("ampere", "d64_gather", "A100", 64),
    GatherTarget("ampere", "d128_gather", "A100", 128),
    GatherTarget("ampere", "d256_gather", "A100", 256),
    GatherTarget("ampere", "mla_gather", "A100"),
    GatherTarget("ampere", "mla_packed", "A100", packed=True),
    GatherTarget("hopper", "d64_gather", "H200", 64, rows=(1, 64), stays=True),
    GatherTarget("hopper", "d64_gather_large", "H200", 64, rows=(65, 1 << 20), stays=True),
    GatherTarget("hopper", "d128_gather", "H200", 128, rows=(1, 64), stays=True),
    GatherTarget("hopper", "d128_gather_large", "H200", 128, rows=(65, 1 << 20), stays=True),
    GatherTarget("hopper", "d256_gather", "H200", 256, rows=(1, 64), stays=True),
    GatherTarget("hopper", "d256_gather_large", "H200", 256, rows=(65, 1 << 20), stays=True),
    GatherTarget("hopper", "mla_gather", "H200"),
    GatherTarget("hopper", "mla_gather_capped", "H200"),
    GatherTarget("hopper", "mla_packed", "H200", packed=True),
    GatherTarget("hopper", "mla_packed_pair", "H200", packed=True, heads=128),
    GatherTarget("simt", "d64_gather", "A100", 64, dtype="f32"),
)


if __name__ == "__main__":
    main(TARGETS)
