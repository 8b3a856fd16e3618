"""What the kernels of approximate="nvfp4" multiply, in float64, and the rule for their outputs."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from archflash.reference.blocks import seen_keys
from archflash.reference.formula import attention
from archflash.reference.rule import ErrorReport, check_lse, report_of

_BLOCK = 128  # keys that share a unit
_ROWS = 16  # rows of q that share a unit
_LARGEST = 6.0 * 448.0  # what e2m1 times a scale of ue4m3 can say
_MEAN_KEYS = 512


def nvfp4(q: Tensor, k: Tensor, v: Tensor, **call: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The numbers that approximate="nvfp4" multiplies in place of q, k and v.

    The mean over the keys (at most 512 of them, evenly spread) is subtracted from k. Then q, k and
    v are rounded to multiples of e2m1 with a scale of ue4m3 for each 16 numbers, which lie along
    the columns of q and k and along the keys of v, and with units behind the scales: one for 16
    rows of q, one for 128 keys of k, one for a head of v. The mean is added back exactly.

    Args:
        q: ``(B, Hq, Nq, D)``, or ``(B, Nq, Hq, D)`` with layout "bnhd"; no NaN, no infinities.
        k, v: ``(B, Hkv, Nk, D)`` and ``(B, Hkv, Nk, Dv)``, or in that layout.
        **call: the call, as for `attention`: keys that no query sees count as zeros.

    Returns:
        float64 tensors in the layout of q, k and v, those of q and k with one more column. The
        products of their rows are the scores that such a kernel computes, before scale.
    """
    turned = call.get("layout") == "bnhd"
    if turned:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    most = max(q.shape[3], v.shape[3])  # no kernel takes more than 128
    columns = 64 if most <= 64 else -(-most // 128) * 128
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    seen = seen_keys(len(q), q.shape[2], k.shape[2], call)
    made = [_of_batch(q[i], k[i], v[i], columns, group, seen[i]) for i in range(len(q))]
    if not made:
        empty = (q.shape[3] + 1, k.shape[3] + 1, v.shape[3])
        results = [
            x.new_zeros(*x.shape[:3], n, dtype=torch.float64)
            for x, n in zip((q, k, v), empty, strict=True)
        ]
    else:
        results = [torch.stack(x) for x in zip(*made, strict=True)]
    wide_q, wide_k, stored_v = (x.transpose(1, 2) if turned else x for x in results)
    return wide_q, wide_k, stored_v


def check_nvfp4(
    out: Tensor, lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, **call: Any
) -> tuple[ErrorReport, ErrorReport | None]:
    """Compares the output of a kernel of approximate="nvfp4" with float64 on the numbers of
    `nvfp4`. Such a kernel also rounds the weights P to four bits: each by at most 0.18 of the
    largest in its group of 16 keys. The rule for each element is::

        |out - ref| <= 0.18 * sum(w V) + 2^-7 * max|v|

    with V the sum of |v| over the group of a key. The mean error may be 0.15 of the root mean
    square of ref. A number in the middle of two may be rounded the other way, because reciprocals
    are not exact: the log-sum-exp may be off by what this makes of one score, a twelfth of the
    largest product of a number of q and one of k, and by 2^-9 of itself and 2^-9.

    Args:
        out: the output to judge.
        lse: its log-sum-exp; None if there is none.
        q, k, v, **call: the call, as for `attention`.

    Returns:
        The reports of out and of lse.
    """
    scale = call.get("scale")
    asked = call | {"scale": 1 / math.sqrt(q.shape[-1]) if scale is None else scale}
    wide_q, wide_k, stored_v = nvfp4(q, k, v, **call)
    of_q, of_k = (float(x[..., :-1].abs().max()) if x.numel() else 0.0 for x in (wide_q, wide_k))
    largest = float(v.double().abs().max()) if v.numel() else 0.0
    one_score = abs(asked["scale"]) * of_q * of_k / 12
    return _check(out, lse, (wide_q, wide_k, stored_v), asked, largest, one_score)


def check_stored_nvfp4(
    out: Tensor, lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, **call: Any
) -> tuple[ErrorReport, ErrorReport | None]:
    """`check_nvfp4` for an output of `archflash.attention_nvfp4`.

    Args:
        out: the output to judge.
        lse: its log-sum-exp; None if there is none.
        q, k, v: the numbers that the inputs stand for (`dequantize_nvfp4`).
        **call: the call, as for `attention`.

    Returns:
        The reports of out and of lse.
    """
    largest = float(v.abs().max()) if v.numel() else 0.0
    return _check(out, lse, (q, k, v), call, largest, 0.0)


def _check(
    out: Tensor,
    lse: Tensor | None,
    numbers: tuple[Tensor, Tensor, Tensor],
    call: dict[str, Any],
    largest: float,
    one_score: float,
) -> tuple[ErrorReport, ErrorReport | None]:
    """The rule of `check_nvfp4` for numbers that a kernel multiplies."""
    q, k, v = numbers
    expected, expected_lse = attention(q, k, v, **call)
    rows = 1 if call.get("layout") == "bnhd" else 2
    by_key = v.abs().movedim(rows, -1)
    groups = _by(16, _padded(by_key, by_key.shape[-2], -(-by_key.shape[-1] // 16) * 16))
    of_group = groups.sum(-1).repeat_interleave(16, -1)[..., : by_key.shape[-1]].movedim(-1, rows)
    bound = 0.18 * attention(q, k, of_group, return_lse=False, **call)
    rms = float(expected.square().mean().sqrt()) if expected.numel() else 0.0
    report = report_of(out, expected, bound + 2.0**-7 * largest, 0.15 * rms + 2.0**-9 * largest)
    if lse is None:
        return report, None
    finite = expected_lse[expected_lse.isfinite()].abs()
    size = float(finite.max()) if finite.numel() else 0.0
    return report, check_lse(lse, expected_lse, one_score + 2.0**-9 * (1 + size))


def _of_batch(
    q: Tensor, k: Tensor, v: Tensor, columns: int, group: int, seen: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """`nvfp4` of (H, N, D)."""
    begin, end = seen
    nq, nk, dv = q.shape[1], k.shape[1], v.shape[2]
    keys = -(-nk // _BLOCK) * _BLOCK
    whole_q = _padded(q, -(-nq // _ROWS) * _ROWS, columns)
    whole_k, less = _padded(k, keys, columns), q.new_zeros(k.shape[0], keys, columns).float()
    whole_v = torch.zeros_like(less)
    mean = whole_q.new_zeros(len(k), 1, columns)
    if end > begin:
        step = -(-(end - begin) // _MEAN_KEYS) | 1
        mean = whole_k[:, begin:end:step].mean(1, keepdim=True)
        less[:, begin:end] = whole_k[:, begin:end] - mean
        whole_v[:, begin:end, :dv] = v[:, begin:end].float()
    stored_q = _rounded(whole_q, _units(whole_q, _ROWS))
    stored_k = _rounded(less, _units(less, _BLOCK))
    by_key = whole_v.transpose(1, 2)
    unit = _unit(whole_v.abs().flatten(1).amax(1) if keys else q.new_zeros(len(v)).float())
    stored_v = _rounded(by_key, unit[:, None, None])
    shift = (whole_q * mean.repeat_interleave(group, 0)).sum(-1, keepdim=True)
    return (
        torch.cat([stored_q, shift], -1)[:, :nq].double(),
        torch.cat([stored_k, torch.ones_like(stored_k[..., :1])], -1)[:, :nk].double(),
        stored_v.transpose(1, 2)[:, :nk, :dv].double(),
    )


def _padded(x: Tensor, rows: int, columns: int) -> Tensor:
    more = (0, columns - x.shape[-1], 0, rows - x.shape[-2])
    return torch.nn.functional.pad(x if x.dtype == torch.float64 else x.float(), more)


def _by(count: int, x: Tensor) -> Tensor:
    """x with its last dimension in parts of `count`."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // count, count)


def _unit(largest: Tensor) -> Tensor:
    return torch.where(largest == 0, 1.0, (largest * (1 / _LARGEST)).clamp(min=2.0**-60))


def _units(x: Tensor, rows: int) -> Tensor:
    """The unit of each row of (H, N, D)."""
    if not x.shape[1]:
        return x[..., :1]
    largest = _by(rows, x.abs().amax(-1)).amax(-1)
    return _unit(largest).repeat_interleave(rows, 1)[..., None]


def _rounded(x: Tensor, unit: Tensor) -> Tensor:
    """Rounds float32 whose last dimension is a multiple of 16."""
    if not x.numel():
        return x
    parts = _by(16, x * (1 / unit))
    scale = (parts.abs().amax(-1, keepdim=True) * (1 / 6)).to(torch.float8_e4m3fn).float()
    size = parts.abs() * (1 / scale.clamp(min=2.0**-9))
    size = size.clamp(max=6)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    stored: Tensor = torch.round(size / step) * step * parts.sign() * scale
    return stored.reshape(x.shape) * unit


def dequantize_nvfp4(values: Tensor, scales: Tensor, unit: Tensor, dim: int = -1) -> Tensor:
    """The numbers that `archflash.quantize_nvfp4` has made of others, in float64.

    Args:
        values: uint8 ``(..., d / 2)``.
        scales: float8_e4m3fn, shaped as the numbers but with a 16th of their size along `dim`.
        unit: float32, broadcastable to ``(..., d)``.
        dim: the dimension along which 16 numbers share a scale.

    Returns:
        float64 ``(..., d)``.
    """
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    numbers = torch.cat([numbers, -numbers]).to(values.device)
    codes = torch.stack([values & 15, values >> 4], -1).flatten(-2).long()
    by_number = scales.double().repeat_interleave(16, dim).narrow(dim, 0, codes.shape[dim])
    return numbers[codes] * by_number * unit.double()
