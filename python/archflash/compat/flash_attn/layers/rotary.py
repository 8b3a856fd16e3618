"""FlashAttention-2's `layers.rotary`: rotary embeddings, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from archflash import _sequences
from archflash._autocast import no_autocast
from archflash._given import check_dense


def apply_rotary_emb(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, inplace: bool = False,
    seqlen_offsets: int | Tensor = 0, cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:  # fmt: skip
    """Turns pairs of the first channels of each row by the angles of its position.

    Args:
        x: (batch, rows, heads, d), or (total rows, heads, d) with cu_seqlens.
        cos, sin: (positions, channels / 2), of the channels that are turned, at most d. Rows
            at positions beyond the last one stay as they are.
        interleaved: pairs are channels 0 and 1, 2 and 3, ...; by default they are channels i and
            i + channels / 2.
        inplace: write the result to x; off by default.
        seqlen_offsets: the position of row 0, an int or int32 (batch,); 0 by default.
        cu_seqlens: int32 (sequences + 1,), where each packed sequence begins.
        max_seqlen: not read.

    Returns:
        x's shape and dtype; computed in float32.

    Raises:
        ValueError: more than d channels, or fewer positions than rows of an unpacked x.
    """
    check_dense(x=x, cos=cos, sin=sin)
    for name, table in (("cos", cos), ("sin", sin)):
        if not table.is_floating_point() or table.ndim != 2 or table.shape != cos.shape:
            raise ValueError(
                f"{name} has dtype {table.dtype} and shape {tuple(table.shape)}: cos and sin must "
                "be floating point, (positions, channels / 2)"
            )
    positions, channels = cos.shape[0], 2 * cos.shape[1]
    if channels > x.shape[-1]:
        raise ValueError(f"cos is for {channels} channels, but x has {x.shape[-1]}: shorten cos")
    rows = torch.arange(x.shape[-3], device=x.device)
    if cu_seqlens is None:
        if x.shape[-3] > positions:
            raise ValueError(
                f"cos has {positions} positions, but x has {x.shape[-3]} rows: make cos longer"
            )
        offsets = torch.as_tensor(seqlen_offsets, device=x.device)
        position = rows + (offsets[:, None] if offsets.ndim else offsets)
        inside = torch.ones_like(position, dtype=torch.bool)
    else:
        ends = cu_seqlens.long()
        sequence = _sequences.of_rows(rows, ends)
        inside = sequence < len(ends) - 1
        sequence = sequence.clamp(max=max(len(ends) - 2, 0))
        offsets = torch.as_tensor(seqlen_offsets, device=x.device)
        position = rows - ends[sequence] + (offsets[sequence] if offsets.ndim else offsets)
    inside = inside & (position >= 0) & (position < positions)
    where = position.clamp(0, max(positions - 1, 0)).long()
    c, s = cos[where].float()[..., None, :], sin[where].float()[..., None, :]
    turned = x[..., :channels].float()
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned.chunk(2, -1)
    pair = (first * c - second * s, first * s + second * c)
    with no_autocast(x.device.type):  # on a CPU it refuses to join tensors of another 16-bit dtype
        turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
        result = torch.cat([turned.to(x.dtype), x[..., channels:]], -1)
    result = torch.where(inside[..., None, None], result, x)
    return x.copy_(result) if inplace else result


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_torch(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> Tensor:
    """x (batch, rows, heads, d) turned by cos and sin (rows, channels / 2), or (batch, rows,
    channels / 2) for angles of each sequence.
    """
    if cos.ndim == 2:
        return apply_rotary_emb(x, cos, sin, interleaved)
    turned = [
        apply_rotary_emb(row[None], c, s, interleaved)
        for row, c, s in zip(x, cos, sin, strict=True)
    ]
    return torch.cat(turned) if turned else x


def apply_rotary_emb_qkv_(
    qkv: Tensor, cos: Tensor, sin: Tensor, cos_k: Tensor | None = None, sin_k: Tensor | None = None,
    interleaved: bool = False, seqlen_offsets: int | Tensor = 0, num_heads_q: int | None = None,
) -> Tensor:  # fmt: skip
    """Turns q and k of qkv in place.

    Args:
        qkv: (batch, rows, 3, heads, d); or (batch, rows, heads, d) with num_heads_q, where q's
            heads come first, and those of k and v share the rest.
        cos_k, sin_k: those of k; by default cos and sin.
        cos, sin, interleaved, seqlen_offsets: as for `apply_rotary_emb`.

    Raises:
        ValueError: qkv of four dimensions without num_heads_q.
    """
    if qkv.ndim == 5:
        q, k = qkv[:, :, 0], qkv[:, :, 1]
    elif num_heads_q is None:
        raise ValueError(f"qkv {tuple(qkv.shape)} without num_heads_q: say how many heads are q's")
    else:
        of_k = (qkv.shape[2] - num_heads_q) // 2
        q, k = qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : num_heads_q + of_k]
    apply_rotary_emb(q, cos, sin, interleaved, True, seqlen_offsets)
    cos_k, sin_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    apply_rotary_emb(k, cos_k, sin_k, interleaved, True, seqlen_offsets)
    return qkv


def apply_rotary_emb_kv_(
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
) -> Tensor:
    """Turns k of kv (batch, rows, 2, heads, d) in place."""
    apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, True, seqlen_offsets)
    return kv


class RotaryEmbedding(torch.nn.Module):
    """Turns q and k in place. The tables of angles grow with the longest sequence seen.

    Args:
        dim: how many channels are turned.
        base: pair i of the channels turns by base ** (-2 i / dim) from one position to the next.
        interleaved: as for `apply_rotary_emb`.
        scale_base: also scales q, and k inversely, by a power of each pair's factor that grows by 1
            every scale_base positions from the middle of the table (XPos); none by default.
        device: where the angles are kept.
    """

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.base, self.interleaved = dim, float(base), interleaved
        self.scale_base = scale_base
        first = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
        self.inv_freq: Tensor
        self.scale: Tensor | None
        self.register_buffer("inv_freq", self.base ** (-first / dim), persistent=False)
        factors = None if scale_base is None else (first + 0.4 * dim) / (1.4 * dim)
        self.register_buffer("scale", factors, persistent=False)
        self._seq_len_cached = 0
        self._cos_cached: Tensor | None = None
        self._sin_cached: Tensor | None = None
        self._cos_k_cached: Tensor | None = None
        self._sin_k_cached: Tensor | None = None

    def _update_cos_sin_cache(
        self,
        seqlen: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        kept = self._cos_cached
        device = self.inv_freq.device if device is None else torch.device(device)
        if kept is not None and seqlen <= self._seq_len_cached and kept.device == device:
            outdated = self.training and kept.is_inference()  # autograd cannot save such a table
            if kept.dtype == (dtype or kept.dtype) and not outdated:
                return
        self._seq_len_cached = seqlen
        frequencies = self.inv_freq.to(device)
        if frequencies.dtype != torch.float32:  # the model is in 16 bits, which have too few digits
            first = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
            frequencies = self.base ** (-first / self.dim)
        position = torch.arange(seqlen, device=device, dtype=torch.float32)
        angles = torch.outer(position, frequencies)
        cos, sin = angles.cos(), angles.sin()
        if self.scale is None or self.scale_base is None:
            self._cos_cached, self._sin_cached = cos.to(dtype), sin.to(dtype)
            return
        power = (position - seqlen // 2) / self.scale_base
        scale = self.scale.to(device=device, dtype=torch.float32) ** power[:, None]
        self._cos_cached, self._sin_cached = (cos * scale).to(dtype), (sin * scale).to(dtype)
        self._cos_k_cached, self._sin_k_cached = (cos / scale).to(dtype), (sin / scale).to(dtype)

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """qkv turned in place, or q and kv.

        Args:
            qkv, num_heads_q: as for `apply_rotary_emb_qkv_`; with kv q alone, (batch, rows, heads,
                d).
            kv: (batch, rows, 2, heads, d).
            seqlen_offset: the position of row 0, an int or int32 (batch,).
            max_seqlen: the positions that are needed; without it the tables fit an int offset.
        """
        if max_seqlen is None and isinstance(seqlen_offset, int):
            max_seqlen = qkv.shape[1] + seqlen_offset
        if max_seqlen is not None:
            self._update_cos_sin_cache(max_seqlen, qkv.device, qkv.dtype)
        cos, sin = self._cos_cached, self._sin_cached
        if cos is None or sin is None:
            raise ValueError("seqlen_offset is a tensor: pass max_seqlen at the first call")
        cos_k = cos if self._cos_k_cached is None else self._cos_k_cached
        sin_k = sin if self._sin_k_cached is None else self._sin_k_cached
        how = (self.interleaved, seqlen_offset)
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, cos_k, sin_k, *how, num_heads_q)
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        return q, apply_rotary_emb_kv_(kv, cos_k, sin_k, *how)


def turned_at(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, starts: int | Tensor, *, interleaved: bool,
    apart: bool, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Turns the queries and the new keys of a call with a KV cache, whose positions begin anywhere.

    Args:
        q: (batch, rows, heads, d), or (total rows, heads, d) with cu_seqlens_q.
        k: (batch, new rows, heads, d), or (total new rows, heads, d) with cu_seqlens_k.
        cos, sin, interleaved: as for `apply_rotary_emb`.
        starts: the position of row 0 of each sequence, an int or int32 (batch,).
        apart: whether row i of q has position starts + i. Otherwise all rows of q have position
            starts, as FlashAttention has it where no mask depends on positions. Row i of k always
            has position starts + i.
        cu_seqlens_q, cu_seqlens_k: int32 (batch + 1,), where each packed sequence begins.

    Returns:
        q and k, turned.
    """
    check_dense(q=q, k=k, rotary_cos=cos, rotary_sin=sin)
    for name, x, ends in (("q", q, cu_seqlens_q), ("k", k, cu_seqlens_k)):
        ndim = 4 if ends is None else 3
        if cu_seqlens_q is ends is None and x.ndim == ndim and x.shape[0] != q.shape[0]:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, batch {x.shape[0]}: it must be {q.shape[0]} "
                "as in q"
            )
        if x.ndim != ndim or 2 * cos.shape[-1] > x.shape[-1]:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}: it must have {ndim} dimensions, and at least "
                f"the {2 * cos.shape[-1]} columns that rotary_cos turns"
            )

    def turned(x: Tensor, cu_seqlens: Tensor | None, apart: bool) -> Tensor:
        if cu_seqlens is not None:
            position = _packed_positions(len(x), cu_seqlens, starts, apart)
            rows = x[:, None]
            return apply_rotary_emb(rows, cos, sin, interleaved, seqlen_offsets=position)[:, 0]
        rows = x if apart else x.flatten(1, 2)[:, None]  # all heads of all rows are one row
        return apply_rotary_emb(rows, cos, sin, interleaved, seqlen_offsets=starts).view(x.shape)

    return turned(q, cu_seqlens_q, apart), turned(k, cu_seqlens_k, True)


def _packed_positions(total: int, cu_seqlens: Tensor, starts: int | Tensor, apart: bool) -> Tensor:
    """The position of each row of packed sequences. Rows that belong to no sequence have an
    arbitrary one: nothing reads them.

    Args:
        total: the number of rows.
        cu_seqlens, starts, apart: as for `turned_at`.
    """
    rows = torch.arange(total, device=cu_seqlens.device)
    ends = cu_seqlens.long()
    sequence = _sequences.of_rows(rows, ends)
    sequence = sequence.clamp(max=max(len(ends) - 2, 0))
    position = torch.as_tensor(starts, device=rows.device).expand(len(ends) - 1)[sequence]
    return position + rows - ends[sequence] if apart else position
