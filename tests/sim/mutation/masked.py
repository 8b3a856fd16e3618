"""Kernels for masks as data, for head dimensions above 256 and for copies that are mutated, and the
calls that a mutant has to get right. Dropout is left to the kernels of the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from archflash import _api, reference
from archflash import _archflash as _runtime

from ...core_set.odd_strides import laid_out
from ..cards.cases import DTYPES
from ..hashed import hashed
from .planned import ForwardCall, main

REFERENCES = (reference.attention, reference.baseline)


@dataclass(frozen=True)
class MaskedTarget:
    """One kernel.

    Attributes:
        folder: of the kernel.
        name: the end of its name, behind "<folder>_".
        device: planned for this known GPU.
        dtype: of q, k and v.
        d: head dimension.
        rows: of q, many enough for the kernel.
        kinds: of the calls that it serves.
        on_few_sms: kinds of calls that it serves where the GPU has fewer SMs, see SMS.
    """

    folder: str
    name: str
    device: str
    dtype: str
    d: int
    rows: int
    kinds: tuple[str, ...]
    on_few_sms: tuple[str, ...] = ()

    @property
    def kernel(self) -> str:
        return f"{self.folder}_{self.name}"

    def calls(self) -> Iterator[ForwardCall]:
        implementation = "ampere" if self.folder == "copy" else self.folder
        device = _api.find_device(self.device)
        sms = [(kind, device.sm_count) for kind in self.kinds]
        sms += [(kind, SMS.get(kind, 1)) for kind in self.on_few_sms]
        for kind, count in sms:
            gpu = _runtime.Device.from_dict(device.to_dict() | {"sm_count": count})
            inputs, options = self._call(kind)
            yield ForwardCall(
                self.kernel, implementation, gpu, kind, inputs, options, REFERENCES,
                prepares=self.folder == "hopper" and "attention" not in self.name,
            )  # fmt: skip

    def _qkv(
        self, heads: tuple[int, int], nk: int, d: int = 0, rows: int = 0
    ) -> tuple[Tensor, ...]:
        d, rows = d or self.d, rows or self.rows
        shapes = ((1, heads[0], rows, d), (1, heads[1], nk, d), (1, heads[1], nk, d))
        return tuple(
            hashed(shape, stream).to(DTYPES[self.dtype]) for stream, shape in enumerate(shapes, 1)
        )

    def _call(self, kind: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """q, k, v and the options of one call, whose rows fill no tile."""
        rows, nk = self.rows, 250  # the last block, which comes first, has keys of each lane
        noise = hashed((1, 2, rows, nk), 7)
        keep = noise > -0.3
        keep[:, :, 64:128, 64:128] = True  # blocks that are seen or hidden as a whole
        keep[:, :, 64:192, :64] = False
        keep[:, :, 2] = False  # a row that sees nothing
        ranges = torch.tensor([[0, 20], [90, 150]], dtype=torch.int32).repeat(1, 2, rows, 1, 1)
        ranges[:, 1] += 30
        ranges[:, :, 5] = 0
        blocks = (torch.arange(2 * -(-rows // 64) * 4).reshape(1, 2, -1, 4) % 3).to(torch.int8)
        both, shared = self._qkv((2, 2), nk), self._qkv((2, 1), nk)
        if (
            kind == "keys"
        ):  # padding, the same for all heads and rows; keys that lie two bytes apart
            apart = torch.zeros(1, 1, 1, 2 * nk, dtype=torch.bool)[..., ::2]
            apart.copy_(torch.arange(nk) < nk - 5)
            q, k, v = shared
            # Bases beyond 2^24, where scores have to be rounded as they are.
            return (q * 4096, k * 4096, v), {"attn_mask": apart, "scale": 2.0**20}
        if kind == "shares, ranges":
            inputs = self._qkv((4, 2), nk, self.d - 40, rows=5)  # a lane has two rows
            return inputs, {"num_splits": 2, "key_ranges": ranges[:, :1, :5]}
        if kind == "packed, slopes":
            ends = [torch.tensor(x, dtype=torch.int32) for x in ((0, 0, 40, 60), (0, 9, 80, 190))]
            q, k, v = (x[0].transpose(0, 1).contiguous() for x in shared)
            for x, end in ((q, 60), (k, 190), (v, 190)):
                x[end:] = math.nan  # of no sequence
            options = {"cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1]}
            return (q, k, v), options | {"alibi_slopes": hashed((3, 2), 8).abs(), "causal": True}
        if kind == "bool":
            return shared, {"attn_mask": keep, "causal": True}
        if kind == "bool, aligned rows":  # which are read by words
            wide = torch.zeros(1, 2, rows, 256, dtype=torch.bool)[..., :nk]
            return shared, {"attn_mask": wide.copy_(keep)}
        if kind == "bool of all heads":
            return both, {"attn_mask": keep[:, :1], "softcap": 1.5, "window": (90, 40)}
        if kind in ("added", "lowest"):  # rows of which TMA can take boxes: padded to 16 bytes
            padded = torch.zeros(1, 1, rows, 256, dtype=DTYPES[self.dtype])[..., :nk]
            padded.copy_(torch.where(keep[:, :1], 2 * noise[:, :1], -math.inf))
            padded[:, :, 128:192, 128:192] = 0  # a block in which nothing is added
            if kind == "added":
                return both, {"attn_mask": padded}
            padded.clamp_(min=max(torch.finfo(padded.dtype).min, -2e38))
            return both, {"attn_mask": padded, "causal": True, "q_offset": 0}
        if kind == "added of each head":  # -inf in one of the heads
            padded = torch.zeros(1, 2, rows, 256, dtype=DTYPES[self.dtype])[..., :nk]
            padded.copy_(noise)
            padded[:, 1] = padded[:, 1].masked_fill(~keep[:, 1], -math.inf)
            return shared, {"attn_mask": padded, "causal": True, "q_offset": 0}
        if kind in ("added, float32", "added, odd rows"):
            mask = torch.where(keep, noise, -math.inf)
            if kind == "added, odd rows":  # rows that begin at odd multiples of two bytes
                wide = torch.zeros(1, 2, rows, nk + 1, dtype=DTYPES[self.dtype])
                mask = wide[..., :nk].copy_(mask)
            options = {"attn_mask": mask, "alibi_slopes": hashed((2,), 8).abs() / 8}
            return shared, options | {"window": (90, 40)}
        if kind == "ranges":
            q, k, v = shared
            if self.folder != "hopper":  # where V of keys that no row sees never matters
                v[:, :, 50:90] = math.nan
            return (q, k, v), {"key_ranges": ranges, "causal": True, "q_offset": 40}
        if kind == "one range":
            # Scores are huge behind the first block that is computed, and there all rows see all
            # keys.
            ranges[..., 1, 0] = 50
            q, k, v = both
            inputs = q * 4096, torch.cat([k[:, :, :128] * 4096, k[:, :, 128:] / 2**20], 2), v
            return inputs, {"key_ranges": ranges[:, :1, :, 1:], "scale": -200.0}
        if kind == "ranges, softcap":  # rows of each 64 see other blocks first and last
            ranges += 64 * (rows // 64 - torch.arange(rows, dtype=torch.int32) // 64)[:, None, None]
            return shared, {"key_ranges": ranges, "softcap": 1.5}
        if kind == "four ranges":  # whose ends are those of blocks, or next to them
            generator = torch.Generator().manual_seed(3)
            shape = (1, 2, rows, 4, 2)
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
            made[:, :, 256:, 3] = torch.tensor([128, nk])
            return both, {"key_ranges": made, "window": (120, 90)}
        if kind == "ranges of many blocks":  # more of them than the threads of a CTA take at once
            nk = 65000
            made = torch.tensor([[0, 20], [nk - 9, nk]], dtype=torch.int32).repeat(1, 1, 150, 1, 1)
            made[:, :, 64:, 0] = torch.tensor([130, 140])
            made[:, :, 64:, 1] = 0
            return self._qkv((1, 1), nk, rows=150), {"key_ranges": made}
        if kind in ("slopes", "slopes on both sides"):
            slopes = hashed((2,), 8).abs() / 8
            return shared, {"alibi_slopes": slopes, "causal": kind == "slopes"}
        if kind == "softcap, fewer columns":  # rows of the mask that are read by words
            wide = torch.zeros(1, 2, rows, 256, dtype=torch.bool)[..., :nk]
            wide.copy_(keep)
            inputs = self._qkv((2, 2), nk, self.d - 8)
            return inputs, {
                "attn_mask": wide,
                "softcap": 1.5,
                "alibi_slopes": hashed((2,), 8).abs(),
            }
        if kind == "many blocks":  # a row of the table of which words are read
            table = (torch.arange(2 * -(-rows // 64) * 16).reshape(1, 2, -1, 16) % 5 == 0).to(
                torch.int8
            )
            return self._qkv((2, 2), 1000), {"block_mask": table, "softcap": 20.0}
        if kind == "many tiles":  # more to be ordered than one CTA does
            table = torch.arange(100 * 3 * 33).reshape(1, 100, 3, 33) * 37 % 41 == 0
            return self._qkv((100, 2), 2049, rows=129), {"block_mask": table, "softcap": 20.0}
        if kind == "blocks":
            return both, {"block_mask": blocks, "sinks": hashed((2,), 9)}
        if kind == "blocks, ranges, slopes":
            options = {"block_mask": blocks, "key_ranges": ranges[:, :1]}
            return both, options | {"alibi_slopes": hashed((1, 2), 8).abs()}
        if kind == "many heads":  # more tiles than CTAs
            options = {"block_mask": blocks[:, :1, :, :2], "softcap": 20.0}
            return self._qkv((7, 7), 70), options
        if kind == "table, causal":
            return shared, {"block_mask": blocks, "causal": True, "q_offset": 0}
        if kind == "table, window":  # bases beyond 2^24; keys that no row sees
            q, k, v = both
            options = {"block_mask": blocks[:, :1], "window": (90, 40), "q_offset": -100}
            return (q * 4096, k * 4096, v), options
        if kind == "table of many tiles":  # whose last one is cut
            table = torch.arange(3 * 8 * 40).reshape(1, 3, 8, 40) * 7 % 11 == 0
            return self._qkv((3, 3), 2500, rows=500), {"block_mask": table}
        if kind == "causal":
            return shared, {"causal": True, "sinks": hashed((2,), 9)}
        if kind == "window, softcap":
            return self._qkv((2, 2), nk, self.d - 40), {"window": (20, 7), "softcap": 2.0}
        if kind == "shares":
            return self._qkv((6, 2), nk, rows=2), {"num_splits": 3}
        if kind == "huge scores":
            q, k, v = shared
            return (q * 4096, k * 4096, v), {}
        names = ODD_STRIDES[kind]
        shapes = ((1, 2, rows, self.d - 3), (1, 2, nk, self.d - 3), (1, 2, nk, self.d - 3))
        tensors = [
            laid_out(name, shape, DTYPES[self.dtype], seed=seed)
            for seed, (name, shape) in enumerate(zip(names, shapes, strict=True))
        ]
        return tuple(tensors), {"causal": True}


# Names of tests/core_set/odd_strides.py for q, k and v: copies by units of 8, 4 and 2 bytes.
ODD_STRIDES = {
    "odd rows": ("row", "dense", "one head"),
    "columns apart": ("every other", "transposed", "offset of 8 bytes"),
}
WHOLE = (
    "bool", "keys", "added", "added, odd rows", "added, float32", "ranges", "slopes", "blocks",
    "blocks, ranges, slopes", "packed, slopes", "softcap, fewer columns",
)  # fmt: skip
DATA = (*WHOLE, "shares, ranges")
BLOCKS = ("blocks, ranges, slopes", "many heads", "many blocks")
TABLES = ("blocks", "table, causal", "table, window", "table of many tiles")
DENSE = (
    "bool", "bool of all heads", "added", "ranges", "one range", "four ranges",
    "slopes on both sides", "lowest", "added of each head", "ranges, softcap",
)  # fmt: skip
MASKS = (*DENSE[:3], "bool, aligned rows")
TILES = (*BLOCKS, "many tiles")
RANGES = (*DENSE[3:6], "ranges of many blocks")
SMS = {"many tiles": 70, "table of many tiles": 2}  # one where no number stands
PLAIN = ("causal", "window, softcap", "huge scores", "shares")
COPIES = tuple(ODD_STRIDES)

TARGETS = (
    MaskedTarget("ampere", "attention_fwd_bf16_d64_masked", "A100", "bf16", 64, 140, DATA),
    MaskedTarget("ampere", "attention_fwd_f16_d128_masked", "RTX 4090", "f16", 128, 70, DATA),
    MaskedTarget("ampere", "attention_fwd_bf16_d512_masked", "A100", "bf16", 512, 70, DATA),
    MaskedTarget("ampere", "attention_fwd_bf16_d384_large", "A100", "bf16", 384, 70, PLAIN),
    MaskedTarget("ampere", "attention_fwd_f16_d512", "RTX 4090", "f16", 512, 70, PLAIN),
    MaskedTarget("hopper", "attention_fwd_bf16_d64_masked", "H200", "bf16", 64, 140, DATA, BLOCKS),
    MaskedTarget("hopper", "attention_fwd_f16_d128_masked", "H200", "f16", 128, 140, DATA, BLOCKS),
    MaskedTarget("hopper", "attention_fwd_bf16_d64_dense", "H200", "bf16", 64, 260, (), DENSE),
    MaskedTarget("hopper", "attention_fwd_f16_d128_dense", "H200", "f16", 128, 260, (), DENSE),
    MaskedTarget("hopper", "attention_fwd_bf16_d64_table", "H200", "bf16", 64, 260, (), TABLES),
    MaskedTarget("hopper", "attention_fwd_f16_d128_table", "H200", "f16", 128, 260, (), TABLES),
    MaskedTarget(
        "blackwell_consumer", "attention_fwd_bf16_d64_table", "RTX 5090", "bf16", 64, 260, TABLES
    ),
    MaskedTarget("hopper", "summarize_mask_bf16", "H200", "bf16", 64, 260, (), MASKS),
    MaskedTarget("hopper", "summarize_ranges_bf16", "H200", "bf16", 64, 260, (), RANGES),
    MaskedTarget("hopper", "order_tiles_bf16", "H200", "bf16", 64, 260, (), TILES),
    MaskedTarget("simt", "attention_fwd_f32_d64_masked", "A100", "f32", 64, 70, WHOLE),
    # Whoever plans a call, the kernels that copy its tensors are the same.
    MaskedTarget("copy", "gather", "A100", "bf16", 64, 70, COPIES),
    MaskedTarget("copy", "scatter", "A100", "bf16", 64, 70, COPIES),
)


if __name__ == "__main__":
    main(TARGETS)
