"""Kernels of hopper for short sequences, and the calls that a mutant of them has to get right."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from archflash import _api, reference
from archflash import _archflash as _runtime

from ..cards.cases import DTYPES
from ..hashed import hashed
from .planned import ForwardCall, main

REFERENCES = (reference.attention, reference.baseline)


@dataclass(frozen=True)
class ShortTarget:
    """One kernel.

    Attributes:
        name: the end of its name, behind "hopper_attention_fwd_".
        d: head dimension.
    """

    name: str
    d: int

    @property
    def kernel(self) -> str:
        return f"hopper_attention_fwd_{self.name}"

    def calls(self) -> Iterator[ForwardCall]:
        # So few SMs that the calls fill the GPU, and a CTA has several tiles.
        device = _runtime.Device.from_dict(_api.find_device("H200").to_dict() | {"sm_count": 1})
        d = self.d

        def make(shape: tuple[int, ...], stream: int) -> Tensor:
            return hashed(shape, stream).to(DTYPES[self.name.split("_")[0]])

        def qkv(nq: int, nk: int, heads: int, batch: int = 1, width: int = d) -> list[Tensor]:
            rows = (nq, nk, nk)
            return [make((batch, heads, n, width), i) for i, n in enumerate(rows, 1)]

        def packed(heads: tuple[int, int], queries: list[int], keys: list[int]) -> list[Any]:
            starts = [torch.tensor([0, *accumulate(x)], dtype=torch.int32) for x in (queries, keys)]
            q = make((sum(queries) + 5, heads[0], d), 1)  # and rows of no sequence
            k, v = (make((sum(keys) + 9, heads[1], d), stream) for stream in (2, 3))
            for x in (k, v):
                x[sum(keys) :] = math.nan
            options = {
                "cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1], "causal": True,
                "max_seqlen_q": max(queries), "max_seqlen_k": max(keys),
            }  # fmt: skip
            return [[q, k, v], options]

        huge = qkv(70, 190, 3)
        huge = [huge[0] * 4096, huge[1] * 4096, huge[2]]
        huge[1][:, :, :60] = huge[1][:, :, 130:]  # the largest score of a row is in two blocks
        capped = qkv(100, 150, 3, width=d - 8)
        capped[0] = capped[0] * 8  # scores come near the cap
        for hidden in (slice(20), slice(134, None)):  # keys that no row sees
            capped[2][:, :, hidden] = math.nan
        sinks = {"sinks": hashed((2,), 4)}
        inputs, options = packed((2, 2), [5, 70, 9, 130], [50, 70, 9, 130])
        calls = [
            # A tile has rows of several heads.
            ("packed heads", *packed((4, 1), [5, 0, 20, 9, 30, 70], [5, 0, 90, 9, 30, 70])),
            ("packed", inputs, options | sinks),
            ("two sequences", qkv(70, 100, 3, batch=2), {"scale": -0.2}),
            ("window, softcap", capped, {"window": (10, 4), "softcap": 2.0, "q_offset": 30}),
            ("huge scores", huge, {}),
            # Tiles of one block, fewer than there are stages, and without any.
            ("few keys", qkv(100, 20, 5), {"causal": True}),
            # Rows that see the first keys of a block alone, beside rows that see the next block.
            ("causal", qkv(98, 100, 2), {"causal": True}),
        ]
        for name, tensors, given in calls:
            yield ForwardCall(
                self.kernel, "hopper", device, name, tuple(tensors), given, REFERENCES
            )


TARGETS = (ShortTarget("bf16_d64_short", 64),)


if __name__ == "__main__":
    main(TARGETS)
