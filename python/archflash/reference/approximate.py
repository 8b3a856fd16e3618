"""What the kernels of approximate= compute, in float64, and how far they may be from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from archflash.reference.blocks import SCALE_ROWS, seen_keys
from archflash.reference.formula import attention, baseline
from archflash.reference.four_bits import check_nvfp4
from archflash.reference.int8_pv import attention_in_int8
from archflash.reference.rule import ErrorReport, check, check_lse

_SAMPLED_ROWS = 512  # most rows of k, and for "int8" of q, by which columns are judged


def check_approximate(
    approximate: str, out: Tensor, lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, **call: Any
) -> tuple[ErrorReport, ErrorReport | None]:
    """Compares the output of a kernel that approximates with float64 of what it is to compute: the
    numbers that q and k are rounded to, and for "int8" and "fp16_accumulate" sums of P V in fp16;
    for "int8_pv" P and V are rounded, too.

    Args:
        approximate: what the call asked for.
        out: the output to judge.
        lse: its log-sum-exp; None if there is none.
        q, k, v, **call: the call, as for `attention`.

    Returns:
        The reports of out and of lse.
    """
    if approximate == "int8_qk":
        return check_int8_qk(out, lse, q, k, v, **call)
    if approximate == "nvfp4":
        return check_nvfp4(out, lse, q, k, v, **call)
    asked = dict(call)
    more_of_lse = 0.0
    if approximate in ("int8", "int8_pv"):
        scale = call.get("scale")
        asked["scale"] = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        wide_q, wide_k = int8(q, k, v, _ends(q, k, call), **call)
        # An integer is another one where the mean, summed in another order, is another number.
        more_of_lse = 2.0**-10
    else:
        wide_q, wide_k = q.double(), k.double()
    if approximate == "int8_pv":
        expected, expected_lse, more = attention_in_int8(wide_q, wide_k, v, **asked)
    else:
        expected, expected_lse = attention(wide_q, wide_k, v.double(), **asked)
        more = _fp16_sums(q, k, v, call)
    report = check(out, expected, expected + _rounding(q, k, v, call), more)
    return report, None if lse is None else check_lse(lse, expected_lse, more_of_lse)


def _fp16_sums(q: Tensor, k: Tensor, v: Tensor, call: dict[str, Any]) -> float:
    """The error of P V in fp16. A sum of 64 keys is rounded four times, each time by at most 2^-11
    of what was added up so far; numbers near 0 by 2^-24 of the largest of v.
    """
    size = v.double().abs()
    weighted = attention(q, k, size, return_lse=False, **call)
    weighted, size = (x[x.isfinite()] for x in (weighted, size))
    largest = float(size.max()) if size.numel() else 0.0
    return 2.0**-9 * (float(weighted.max()) if weighted.numel() else 0.0) + 2.0**-16 * largest


def int8(
    q: Tensor, k: Tensor, v: Tensor, keys: Sequence[int] | None = None, **call: Any
) -> tuple[Tensor, Tensor]:
    """The numbers that approximate="int8" multiplies in place of q and k.

    The mean over the keys (at most 512 of them, evenly spread) is subtracted from k. A column that
    is large in k and small in q, or the other way round, is multiplied by a power of two in k and
    divided by it in q. The rows of both are filled up with zeros to 64, 128 or 256 columns and
    rotated: the sign of some columns changes, and a Hadamard transform mixes all. Then each row is
    rounded to multiples of a scale, which is 1/127 of its largest magnitude. The mean is added back
    exactly.

    Args:
        q, k, v: as for `attention`; no NaN, no infinities. Of v only the number of columns counts.
        keys: how many keys of each batch count for the mean. None: all.
        **call: layout and cu_seqlens_k, as for `attention`.

    Returns:
        float64 tensors in the layout of q and k, with more columns. The products of their rows are
        the scores that such a kernel computes, before scale.
    """
    packed = call.get("cu_seqlens_k") is not None
    rows_first = packed or call.get("layout") == "bnhd"
    if packed:
        q, k = q[None], k[None]
        keys = [min(int(call["cu_seqlens_k"][-1]), k.shape[1])]
    if rows_first:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    mean = q.new_zeros((k.shape[0], k.shape[1], 1, k.shape[3]), dtype=torch.float32)
    factor = torch.ones_like(mean)
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    for batch, seen in enumerate([k.shape[2]] * len(k) if keys is None else keys):
        if seen and q.shape[2] and group:
            sample = k[batch, :, : seen : -(-seen // _SAMPLED_ROWS) | 1].float()
            mean[batch] = sample.mean(1, keepdim=True)
            by_head = q[batch].reshape(k.shape[1], group, *q.shape[2:])
            rows = by_head.transpose(1, 2).flatten(1, 2)
            of_q = rows[:, :: -(-rows.shape[1] // _SAMPLED_ROWS) | 1].float().abs().amax(1)
            factor[batch] = _balance(sample.amax(1) - sample.amin(1), of_q)[:, None]
    # Calls without rows may have more columns than a kernel takes.
    columns = next(n for n in (64, 128, 256, 512) if n >= max(q.shape[3], v.shape[-1]))
    stored_k = _rotated_to_int8((k.float() - mean) * factor, columns)
    stored_q = _rotated_to_int8(q.float() / factor.repeat_interleave(group, 1), columns)
    by_head = mean.double().repeat_interleave(group, 1)
    shift = (q.double() * by_head).sum(-1, keepdim=True)
    wide_q = torch.cat([stored_q, shift], -1)
    wide_k = torch.cat([stored_k, torch.ones_like(stored_k[..., :1])], -1)
    if rows_first:
        wide_q, wide_k = wide_q.transpose(1, 2), wide_k.transpose(1, 2)
    return (wide_q[0], wide_k[0]) if packed else (wide_q, wide_k)


def _balance(range_of_k: Tensor, of_q: Tensor) -> Tensor:
    """By what to multiply columns of k, and divide those of q: powers of two."""
    exponents = [torch.frexp(x)[1].clamp(-99, 101) - 1 for x in (range_of_k, of_q)]
    halves = (exponents[0] - exponents[1]) // 2
    halves = torch.where((range_of_k > 0) & range_of_k.isfinite() & (of_q > 0), halves, 0)
    return torch.ldexp(torch.ones_like(of_q), -halves.clamp(-30, 30))


def _rotated_to_int8(x: Tensor, columns: int) -> Tensor:
    """Rotates and rounds float32 (B, H, N, D) in the order in which the kernel does; returns the
    numbers in float64, rotated.
    """
    x = torch.nn.functional.pad(x, (0, columns - x.shape[3]))
    largest = x.abs().amax(-1, keepdim=True)
    exponent = torch.frexp(largest)[1].clamp(-99, 51) - 1
    unit = torch.ldexp(torch.ones_like(largest), exponent)
    x = (x / unit).clamp(-2.0, 2.0)
    place = torch.arange(columns, dtype=torch.int64, device=x.device)
    x = torch.where((place * 0x9E3779B1 & 0xFFFFFFFF) >> 31 != 0, -x, x)
    distance = 1
    while distance < columns:
        pairs = x.reshape(*x.shape[:-1], columns // (2 * distance), 2, distance)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack([a + b, a - b], -2).flatten(-3)
        distance *= 2
    rounding = x.abs().amax(-1, keepdim=True) / torch.full_like(largest, 127.0)
    rounding = (rounding.view(torch.int32) & ~0xFF).view(torch.float32)
    integer = torch.where(rounding == 0, 1.0, rounding)
    values = (x * (1.0 / integer)).round().double()
    return values * integer.double() * unit.double() / math.sqrt(columns)


def int8_qk(
    q: Tensor, k: Tensor, layout: str = "bhnd", keys: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """The numbers that approximate="int8_qk" multiplies in place of q and k.

    The mean over the keys (at most 512 of them, evenly spread) is subtracted from k. Then q and k
    are rounded to multiples of a scale, which is 1/127 of the largest magnitude in each 64 rows of
    a head. The mean is added back exactly.

    Args:
        q: ``(B, Hq, Nq, D)``, or ``(B, Nq, Hq, D)`` with layout "bnhd"; no NaN, no infinities.
        k: ``(B, Hkv, Nk, D)`` or ``(B, Nk, Hkv, D)``; no NaN, no infinities.
        keys: how many keys of each batch count; later ones, which no query sees, count as zeros.
            None: all.

    Returns:
        float64 tensors in the layout of q and k, with one column more. The products of their rows
        are the scores that such a kernel computes, before scale.
    """
    if layout == "bnhd":
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    mean = q.new_zeros((k.shape[0], k.shape[1], 1, k.shape[3]), dtype=torch.float32)
    less = torch.zeros_like(k, dtype=torch.float32)
    for batch, seen in enumerate([k.shape[2]] * len(k) if keys is None else keys):
        if seen:
            step = -(-seen // _SAMPLED_ROWS) | 1
            mean[batch] = k[batch, :, :seen:step].float().mean(1, keepdim=True)
            less[batch, :, :seen] = k[batch, :, :seen].float() - mean[batch]
    stored_q, stored_k = _to_int8(q.float()), _to_int8(less)
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    by_head = mean.double().repeat_interleave(group, 1)
    shift = (q.double() * by_head).sum(-1, keepdim=True)
    wide_q = torch.cat([stored_q, shift], -1)
    wide_k = torch.cat([stored_k, torch.ones_like(stored_k[..., :1])], -1)
    if layout == "bnhd":
        wide_q, wide_k = wide_q.transpose(1, 2), wide_k.transpose(1, 2)
    return wide_q, wide_k


def _to_int8(x: Tensor) -> Tensor:
    """Rounds float32 (B, H, N, D) to int8 with scales; returns the numbers in float64."""
    rows = x.shape[2]
    largest = x.abs().amax(-1) if x.numel() else x.new_zeros(x.shape[:3])
    padded = torch.nn.functional.pad(largest, (0, -rows % SCALE_ROWS))
    blocks = (
        padded.reshape(*padded.shape[:2], padded.shape[2] // SCALE_ROWS, SCALE_ROWS).amax(-1)
        if rows
        else padded
    )
    scale = torch.where(blocks == 0, 1.0, blocks / torch.full_like(blocks, 127.0))
    scale = scale.repeat_interleave(SCALE_ROWS, 2)[:, :, :rows, None] if rows else x[..., :1]
    return (x * (1.0 / scale)).round().double() * scale.double()


def check_int8_qk(
    out: Tensor, lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, **call: Any
) -> tuple[ErrorReport, ErrorReport | None]:
    """Compares the output of a kernel of approximate="int8_qk" with float64. The error rule is that
    of exact kernels, applied to the rounded q and k of `int8_qk`.

    The log-sum-exp may be off by 2^-10 more, because such kernels add 1.5 * 2^23 times the scale of
    the exponent, which is at most 2^-10, to a row's base.

    Args:
        out: the output to judge.
        lse: its log-sum-exp; None if there is none.
        q, k, v, **call: the call, as for `attention`.

    Returns:
        The reports of out and of lse.
    """
    scale = call.get("scale")
    call["scale"] = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    layout = call.get("layout", "bhnd")
    wide_q, wide_k = int8_qk(q, k, layout, _ends(q, k, call))
    expected, expected_lse = attention(wide_q, wide_k, v.double(), **call)
    report = check(out, expected, expected + _rounding(q, k, v, call))
    return report, None if lse is None else check_lse(lse, expected_lse, 2.0**-10)


def _rounding(q: Tensor, k: Tensor, v: Tensor, call: dict[str, Any]) -> Tensor:
    """The error of the baseline."""
    return baseline(q, k, v, **call).double() - attention(q, k, v, return_lse=False, **call)


def _ends(q: Tensor, k: Tensor, call: dict[str, Any]) -> list[int]:
    """For each batch, the number of keys up to the last one that some query sees."""
    rows = 0 if q.ndim == 3 else 1 if call.get("layout") == "bnhd" else 2
    return [end for _, end in seen_keys(len(q), q.shape[rows], k.shape[rows], call)]
