"""The calls that kernels for masks as data, and mutants of them, have to get right. Their rows fill
no tile.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...core_set.odd_strides import laid_out
from ..cards.cases import DTYPES
from ..hashed import hashed

Call = tuple[tuple[Tensor, ...], dict[str, Any]]  # q, k, v and the options

NK = 250  # the last block, which comes first, has keys of each lane

# Names of tests/core_set/odd_strides.py for q, k and v: copies by units of 8, 4 and 2 bytes.
ODD_STRIDES = {
    "odd rows": ("row", "dense", "one head"),
    "columns apart": ("every other", "transposed", "offset of 8 bytes"),
}


@dataclass(frozen=True)
class MaskedCalls:
    """Calls by their kind, for the dtype, the head dimension and the rows of a kernel's target."""

    folder: str
    dtype: str
    d: int
    rows: int

    def of(self, kind: str) -> Call:
        if kind in ODD_STRIDES:
            return self._odd_strides(kind)
        groups = (self._attn_mask, self._key_ranges, self._block_mask, self._alibi, self._plain)
        return next(call for call in (group(kind) for group in groups) if call is not None)

    def _qkv(
        self, heads: tuple[int, int], nk: int = NK, d: int = 0, rows: int = 0, batch: int = 1
    ) -> tuple[Tensor, ...]:
        d, rows = d or self.d, rows or self.rows
        kv = (batch, heads[1], nk, d)
        shapes = ((batch, heads[0], rows, d), kv, kv)
        return tuple(
            hashed(shape, stream).to(DTYPES[self.dtype]) for stream, shape in enumerate(shapes, 1)
        )

    @property
    def _both(self) -> tuple[Tensor, ...]:
        return self._qkv((2, 2))

    @property
    def _shared(self) -> tuple[Tensor, ...]:
        return self._qkv((2, 1))

    @functools.cached_property
    def _noise(self) -> Tensor:
        return hashed((1, 2, self.rows, NK), 7)

    def _keep(self) -> Tensor:
        keep = self._noise > -0.3
        keep[:, :, 64:128, 64:128] = True  # blocks that are seen or hidden as a whole
        keep[:, :, 64:192, :64] = False
        keep[:, :, 2] = False  # a row that sees nothing
        return keep

    def _ranges(self) -> Tensor:
        made = torch.tensor([[0, 20], [90, 150]], dtype=torch.int32).repeat(1, 2, self.rows, 1, 1)
        made[:, 1] += 30
        made[:, :, 5] = 0
        return made

    def _blocks(self) -> Tensor:
        tiles = -(-self.rows // 64)
        return (torch.arange(2 * tiles * 4).reshape(1, 2, -1, 4) % 3).to(torch.int8)

    def _attn_mask(self, kind: str) -> Call | None:
        rows, keep, noise = self.rows, self._keep(), self._noise
        if kind == "keys":  # padding of all heads and rows alike; keys that lie two bytes apart
            apart = torch.zeros(1, 1, 1, 2 * NK, dtype=torch.bool)[..., ::2]
            apart.copy_(torch.arange(NK) < NK - 5)
            q, k, v = self._shared
            # Bases beyond 2^24, where scores have to be rounded as they are.
            return (q * 4096, k * 4096, v), {"attn_mask": apart, "scale": 2.0**20}
        if kind == "bool":
            return self._shared, {"attn_mask": keep, "causal": True}
        if kind == "bool, window":  # rows that begin behind a block which others see
            return self._shared, {"attn_mask": keep, "window": (20, 7)}
        if kind == "bool, aligned rows":  # which are read by words
            wide = torch.zeros(1, 2, rows, 256, dtype=torch.bool)[..., :NK]
            return self._shared, {"attn_mask": wide.copy_(keep)}
        if kind == "bool of all heads":
            return self._both, {"attn_mask": keep[:, :1], "softcap": 1.5, "window": (90, 40)}
        if kind in ("added", "lowest"):  # rows of which TMA can take boxes: padded to 16 bytes
            padded = torch.zeros(1, 1, rows, 256, dtype=DTYPES[self.dtype])[..., :NK]
            padded.copy_(torch.where(keep[:, :1], 2 * noise[:, :1], -math.inf))
            padded[:, :, 128:192, 128:192] = 0  # a block in which nothing is added
            if kind == "added":
                return self._both, {"attn_mask": padded}
            padded.clamp_(min=max(torch.finfo(padded.dtype).min, -2e38))
            return self._both, {"attn_mask": padded, "causal": True, "q_offset": 0}
        if kind == "added of each head":  # -inf in one of the heads
            padded = torch.zeros(1, 2, rows, 256, dtype=DTYPES[self.dtype])[..., :NK]
            padded.copy_(noise)
            padded[:, 1] = padded[:, 1].masked_fill(~keep[:, 1], -math.inf)
            return self._shared, {"attn_mask": padded, "causal": True, "q_offset": 0}
        if kind in ("added, float32", "added, odd rows"):
            mask = torch.where(keep, noise, -math.inf)
            if kind == "added, odd rows":  # rows that begin at odd multiples of two bytes
                wide = torch.zeros(1, 2, rows, NK + 1, dtype=DTYPES[self.dtype])
                mask = wide[..., :NK].copy_(mask)
            options = {"attn_mask": mask, "alibi_slopes": hashed((2,), 8).abs() / 8}
            return self._shared, options | {"window": (90, 40)}
        if kind == "softcap, fewer columns":  # rows of the mask that are read by words
            wide = torch.zeros(1, 2, rows, 256, dtype=torch.bool)[..., :NK]
            options = {"attn_mask": wide.copy_(keep), "softcap": 1.5}
            slopes = hashed((2,), 8).abs()
            return self._qkv((2, 2), d=self.d - 8), options | {"alibi_slopes": slopes}
        return None

    def _key_ranges(self, kind: str) -> Call | None:
        rows, ranges = self.rows, self._ranges()
        if kind == "shares, ranges":
            inputs = self._qkv((4, 2), d=self.d - 40, rows=5)  # a lane has two rows
            return inputs, {"num_splits": 2, "key_ranges": ranges[:, :1, :5]}
        if kind == "ranges":
            q, k, v = self._shared
            if self.folder != "hopper":  # where V of keys that no row sees never matters
                v[:, :, 50:90] = math.nan
            return (q, k, v), {"key_ranges": ranges, "causal": True, "q_offset": 40}
        if kind == "one range":
            # Scores are huge behind the first block that is computed, and there all rows see all
            # keys.
            ranges[..., 1, 0] = 50
            q, k, v = self._both
            inputs = q * 4096, torch.cat([k[:, :, :128] * 4096, k[:, :, 128:] / 2**20], 2), v
            return inputs, {"key_ranges": ranges[:, :1, :, 1:], "scale": -200.0}
        if kind == "ranges, softcap":  # rows of each 64 see other blocks first and last
            ranges += 64 * (rows // 64 - torch.arange(rows, dtype=torch.int32) // 64)[:, None, None]
            return self._shared, {"key_ranges": ranges, "softcap": 1.5}
        if kind == "four ranges":
            return self._both, {"key_ranges": self._four_ranges(), "window": (120, 90)}
        if kind == "ranges of many blocks":  # more of them than the threads of a CTA take at once
            nk = 65000
            made = torch.tensor([[0, 20], [nk - 9, nk]], dtype=torch.int32).repeat(1, 1, 150, 1, 1)
            made[:, :, 64:, 0] = torch.tensor([130, 140])
            made[:, :, 64:, 1] = 0
            return self._qkv((1, 1), nk, rows=150), {"key_ranges": made}
        return None

    def _four_ranges(self) -> Tensor:
        """Ranges whose ends are those of blocks, or next to them."""
        generator = torch.Generator().manual_seed(3)
        shape = (1, 2, self.rows, 4, 2)
        made = 64 * torch.randint(0, 4, shape, generator=generator, dtype=torch.int32)
        made += torch.randint(-1, 2, shape, generator=generator, dtype=torch.int32)
        for place in range(4):  # a block of keys that all rows of a block see by this range
            rows_here = slice(64 * place, 64 * place + 64)
            made[:, :, rows_here, place] = torch.tensor([64, 128])
            # In the other head its last row lacks the first or the last key.
            lacking = [[64, 127], [65, 128]][place // 2]
            made[:, 1 - place % 2, 64 * place + 63] = 0
            made[:, 1 - place % 2, 64 * place + 63, place] = torch.tensor(lacking)
        made[:, :, 256:] = 0  # the last rows see keys before and behind a hidden block
        made[:, :, 256:, 0, 1] = 64
        made[:, :, 256:, 3] = torch.tensor([128, NK])
        return made

    def _block_mask(self, kind: str) -> Call | None:
        rows, blocks = self.rows, self._blocks()
        if kind == "many blocks":  # a row of the table of which words are read
            table = torch.arange(2 * -(-rows // 64) * 16).reshape(1, 2, -1, 16) % 5 == 0
            return self._qkv((2, 2), 1000), {"block_mask": table.to(torch.int8), "softcap": 20.0}
        if kind == "many tiles":  # more to be ordered than one CTA does
            table = torch.arange(100 * 3 * 33).reshape(1, 100, 3, 33) * 37 % 41 == 0
            return self._qkv((100, 2), 2049, rows=129), {"block_mask": table, "softcap": 20.0}
        if kind == "blocks":
            return self._both, {"block_mask": blocks, "sinks": hashed((2,), 9)}
        if kind == "blocks, ranges, slopes":
            options = {"block_mask": blocks, "key_ranges": self._ranges()[:, :1]}
            return self._both, options | {"alibi_slopes": hashed((1, 2), 8).abs()}
        if kind == "many heads":  # more tiles than CTAs
            options = {"block_mask": blocks[:, :1, :, :2], "softcap": 20.0}
            return self._qkv((7, 7), 70), options
        if kind == "table, causal":
            inputs = self._qkv((2, 1), batch=2)
            return inputs, {"block_mask": blocks, "causal": True, "q_offset": 0}
        if kind == "table, window":  # bases beyond 2^24; keys that no row sees
            q, k, v = self._both
            # Two blocks have the largest score of a row, so that it has to be the same in both.
            k[:, :, 128:192] = k[:, :, 64:128]
            options = {"block_mask": blocks[:, :1], "window": (90, 40), "q_offset": -100}
            return (q * 4096, k * 4096, v), options
        if kind == "table of many tiles":  # whose last one is cut; one has to wait for buffers
            table = torch.arange(3 * 8 * 40).reshape(1, 3, 8, 40) * 7 % 11 == 0
            table[:, 0, 1] = True
            return self._qkv((3, 3), 2500, rows=500), {"block_mask": table}
        return None

    def _alibi(self, kind: str) -> Call | None:
        if kind == "packed, slopes":
            ends = [torch.tensor(x, dtype=torch.int32) for x in ((0, 0, 40, 60), (0, 9, 80, 190))]
            q, k, v = (x[0].transpose(0, 1).contiguous() for x in self._shared)
            for x, end in ((q, 60), (k, 190), (v, 190)):
                x[end:] = math.nan  # of no sequence
            options = {"cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1]}
            return (q, k, v), options | {"alibi_slopes": hashed((3, 2), 8).abs(), "causal": True}
        if kind in ("slopes", "slopes on both sides"):
            slopes = hashed((2,), 8).abs() / 8
            return self._shared, {"alibi_slopes": slopes, "causal": kind == "slopes"}
        return None

    def _plain(self, kind: str) -> Call | None:
        if kind == "causal":
            return self._shared, {"causal": True, "sinks": hashed((2,), 9)}
        if kind == "window, softcap":
            return self._qkv((2, 2), d=self.d - 40), {"window": (20, 7), "softcap": 2.0}
        if kind == "shares":
            return self._qkv((6, 2), rows=2), {"num_splits": 3}
        if kind == "huge scores":
            q, k, v = self._shared
            return (q * 4096, k * 4096, v), {}
        return None

    def _odd_strides(self, kind: str) -> Call:
        rows, d = self.rows, self.d - 3
        shapes = ((1, 2, rows, d), (1, 2, NK, d), (1, 2, NK, d))
        tensors = [
            laid_out(name, shape, DTYPES[self.dtype], seed=seed)
            for seed, (name, shape) in enumerate(zip(ODD_STRIDES[kind], shapes, strict=True))
        ]
        return tuple(tensors), {"causal": True}
