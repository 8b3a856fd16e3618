"""Whole attention calls that a card and the simulator both run, on inputs of the same bits."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..hashed import hashed

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        name: of the case; also what its recorded arrays are called.
        implementation: whose kernel runs.
        dtype: "f16", "bf16" or "f32".
        heads: of q, and of k and v.
        lengths: for each batch (queries, keys). With `packed` they are sequences of one call with
            cu_seqlens; otherwise all are the same.
        d, dv: head dimensions.
        kept: every so many rows of the output are recorded, an odd number to meet every row of a
            tile and every head.
        options: of the call.
        sinks: whether it has sinks.
    """

    name: str
    implementation: str
    dtype: str
    heads: tuple[int, int]
    lengths: tuple[tuple[int, int], ...]
    d: int
    dv: int
    kept: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    packed: bool = False
    sinks: bool = False

    def call(self, device: str) -> tuple[list[Tensor], dict[str, Any]]:
        """q, k, v and the keywords of the call, on a device."""
        queries = [nq for nq, _ in self.lengths]
        keys = [nk for _, nk in self.lengths]
        dtype = DTYPES[self.dtype]
        options = dict(self.options)
        if self.packed:
            q = hashed((sum(queries), self.heads[0], self.d), 1)
            k = hashed((sum(keys), self.heads[1], self.d), 2)
            v = hashed((sum(keys), self.heads[1], self.dv), 3)
            for name, lengths in (("cu_seqlens_q", queries), ("cu_seqlens_k", keys)):
                starts = [0, *itertools.accumulate(lengths)]
                options[name] = torch.tensor(starts, dtype=torch.int32).to(device)
        else:
            batch = len(self.lengths)
            q = hashed((batch, self.heads[0], queries[0], self.d), 1)
            k = hashed((batch, self.heads[1], keys[0], self.d), 2)
            v = hashed((batch, self.heads[1], keys[0], self.dv), 3)
        if self.sinks:
            options["sinks"] = hashed((self.heads[0],), 4).to(device)
        return [x.to(dtype).to(device) for x in (q, k, v)], options

    def rows(self, out: Tensor) -> Tensor:
        """The recorded rows of an output: (rows, dv)."""
        return out.reshape(-1, self.dv)[:: self.kept]


def bits(x: Tensor) -> np.ndarray[Any, Any]:
    """The raw bits of a tensor on the CPU, as signed integers of the elements' width."""
    integers = {2: torch.int16, 4: torch.int32}[x.element_size()]
    return x.contiguous().view(integers).numpy()


CASES = (
    Case("ampere-f16-d64-causal-gqa", "ampere", "f16", (4, 2), ((70, 133),), 64, 64,
         options={"causal": True}, kept=3),
    # 134 CTAs, more than the card has SMs: the tiles for long sequences.
    Case("ampere-bf16-d64-many-ctas", "ampere", "bf16", (67, 1), ((65, 300),) * 2, 64, 64,
         kept=131),
    Case("ampere-bf16-d128-window-softcap", "ampere", "bf16", (2, 1), ((65, 150),), 128, 128,
         options={"window": (40, 10), "softcap": 5.0}, kept=3),
    Case("ampere-f16-d128-many-ctas-causal", "ampere", "f16", (67, 67), ((80, 140),) * 2, 128, 128,
         options={"causal": True}, kept=171),
    Case("ampere-bf16-d256-sinks", "ampere", "bf16", (2, 1), ((40, 190),), 256, 256, sinks=True,
         kept=3),
    Case("ampere-f16-d128-varlen-causal", "ampere", "f16", (2, 2), ((33, 70), (0, 20), (50, 50)),
         128, 128, options={"causal": True}, packed=True, kept=3),
    Case("ampere-bf16-d192-dv128-scale", "ampere", "bf16", (1, 1), ((30, 99),), 192, 128,
         options={"scale": -0.2}),
    Case("ampere-f16-d80-dv40-q-offset", "ampere", "f16", (2, 1), ((17, 129),), 80, 40,
         options={"causal": True, "q_offset": 60}),
    Case("simt-f32-d64-causal-gqa", "simt", "f32", (4, 2), ((70, 133),), 64, 64,
         options={"causal": True}, kept=7),
    Case("simt-f32-d128-window-softcap", "simt", "f32", (2, 1), ((65, 150),), 128, 128,
         options={"window": (40, 10), "softcap": 5.0}, kept=5),
    Case("simt-f32-d256-sinks", "simt", "f32", (2, 1), ((40, 90),), 256, 256, sinks=True, kept=5),
    Case("simt-f32-d64-varlen-causal", "simt", "f32", (2, 2), ((33, 70), (0, 20), (50, 50)), 64,
         64, options={"causal": True}, packed=True, kept=5),
    Case("simt-f32-d128-many-ctas", "simt", "f32", (67, 1), ((40, 40),), 128, 128, kept=131),
    Case("simt-bf16-d128-causal", "simt", "bf16", (2, 1), ((40, 70),), 128, 128,
         options={"causal": True}, kept=3),
    Case("simt-f16-d64-window", "simt", "f16", (2, 1), ((40, 70),), 64, 64,
         options={"window": (20, 0)}, kept=3),
)  # fmt: skip
