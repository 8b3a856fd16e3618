"""The error rule: how far an output may be from the float64 reference."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from archflash import _archflash as _native
from archflash.reference.formula import attention

_LSE_ULPS = 64  # float32 sums of up to a few thousand products, and an approximate exp2 in between


@dataclasses.dataclass(frozen=True)
class ErrorReport:
    """How far an output is from the float64 reference, and whether that is near enough.

    Attributes:
        ok: both bounds hold, and NaN and infinities are exactly where the reference has them.
        max_error: largest absolute error; inf if an element is wrongly NaN or infinite.
        mean_error: mean absolute error.
        nrmse: root of the mean squared error over the root of the mean squared reference.
        bad_elements: how many elements exceed `bound`, or differ from the reference in being NaN or
            infinite.
        elements: how many elements were compared.
        worst: coordinate of the largest error; empty for an empty output.
        value: the output at that coordinate.
        expected: the reference at that coordinate.
        bound: largest error that an element may have.
        mean_bound: largest mean error that is accepted.
    """

    ok: bool
    max_error: float
    mean_error: float
    nrmse: float
    bad_elements: int
    elements: int
    worst: tuple[int, ...]
    value: float
    expected: float
    bound: float
    mean_bound: float

    def __str__(self) -> str:
        return (
            f"{'ok' if self.ok else 'WRONG'}: "
            f"max error {self.max_error:.3g} (bound {self.bound:.3g}), "
            f"mean {self.mean_error:.3g} (bound {self.mean_bound:.3g}), NRMSE {self.nrmse:.3g}, "
            f"{self.bad_elements} of {self.elements} elements bad; "
            f"worst at {self.worst}: {self.value:.8g}, expected {self.expected:.8g}"
        )


def check(out: Tensor, ref: Tensor, base: Tensor, more: float = 0.0) -> ErrorReport:
    """Compares an output with the float64 reference by the error rule.

    The rule: ``max|out - ref| <= 2 * max|base - ref| + 2 ulp`` of the output dtype at ``max|ref|``,
    the same for the means, and NaN and infinities exactly where the reference has them. For float32
    it is 4 ulp: there the baseline's own error is of some ulp, and another on each processor,
    because libraries sum in different orders.

    Args:
        out: the output to judge, any floating-point dtype.
        ref: the reference, float64, same shape.
        base: the baseline's output, same shape.
        more: error of an element that is accepted on top, for an approximate kernel.

    Returns:
        An ErrorReport.

    Raises:
        ValueError: if the shapes differ.
    """
    if not out.shape == ref.shape == base.shape:
        raise ValueError(
            f"out {tuple(out.shape)}, ref {tuple(ref.shape)} and base {tuple(base.shape)} "
            "differ in shape: compare outputs of the same call"
        )
    finite = ref.isfinite()
    # Where the baseline overflowed it does not show what error to expect, so only its finite values
    # count.
    base_error = (base.double() - ref).abs()[finite & base.isfinite()]
    size = ref.abs()[finite]
    ulps = 4 if out.dtype == torch.float32 else 2
    bound = 2 * _max(base_error) + ulps * _ulp(_max(size), out.dtype)
    mean_bound = 2 * _mean(base_error) + ulps * _ulp(_mean(size), out.dtype)
    return report_of(out, ref, bound + more, mean_bound + more)


def check_fp8(
    out: Tensor, ref: Tensor, q: Tensor, k: Tensor, v: Tensor, **call: Any
) -> ErrorReport:
    """Compares the output of an FP8 kernel with the float64 reference on the same FP8 inputs.

    Such a kernel rounds its output and also its weights, to e4m3. The error of a weight is at most
    2^-4 of itself, or 2^-18 of the largest weight. The rule for each element is::

        |out - ref| <= (2^-4 + 2^-8) * sum(w |v|) + 2^-18 * sum(|v|) + 2 ulp

    with sums over the keys that the row sees, w the weights of the softmax, and the ulp of the
    output dtype at max|ref|; 2^-8 is for the products of the scores. The mean error may be a
    quarter of that. NaN and infinities must be exactly where the reference has them.

    Args:
        out: the output to judge, float16 or bfloat16.
        ref: the reference, float64, same shape.
        q, k, v, **call: the call, as for `attention`.

    Returns:
        An ErrorReport; its bound is the one at the worst element.

    Raises:
        ValueError: if the shapes differ.
    """
    if out.shape != ref.shape:
        raise ValueError(
            f"out {tuple(out.shape)} and ref {tuple(ref.shape)} differ in shape: "
            "compare outputs of the same call"
        )
    size = v.double().abs()
    if (descale := call.get("v_descale")) is not None and descale.ndim < 4:  # scales are positive
        call["v_descale"] = descale.abs()
    weighted = attention(q, k, size, return_lse=False, **call)
    keys = k.shape[1] if call.get("layout") == "bnhd" else k.shape[-2]
    if call.get("cu_seqlens_k") is not None:
        keys = k.shape[0]
    even = call | {"softcap": None, "scale": 0.0, "sinks": None}
    total = attention(q, k, size, return_lse=False, **even) * keys
    ulp = _ulp(_max(ref.abs()[ref.isfinite()]), out.dtype)
    bound = (2.0**-4 + 2.0**-8) * weighted + 2.0**-18 * total + 2 * ulp
    bound = torch.where(bound.isfinite(), bound, 0.0)
    return report_of(out, ref, bound, _mean(bound) / 2)


def fp8_score_error(
    implementation: str, capability: tuple[int, int], q: Tensor, k: Tensor, v: Tensor, **call: Any
) -> float:
    """What `check_lse` accepts on top from a kernel on a GPU whose tensor cores keep 13 bits of a
    sum of 8-bit products: 2^-12 of the largest sum of |q k|.

    Args:
        implementation: the kernel's implementation.
        capability: the GPU's compute capability.
        q, k, v, **call: the call, as for `attention`.

    Returns:
        The error; 0.0 for other GPUs, kernels and inputs.
    """
    if implementation not in _native.folder_names() or q.dtype.itemsize > 1:
        return 0.0
    if capability not in _native.describe(implementation).fp8_sums_of_13_bits_on:
        return 0.0
    call |= {"softcap": None, "sinks": None}
    for name in ("q_descale", "k_descale"):
        if (descale := call.get(name)) is not None and descale.ndim < 4:
            call[name] = descale.abs()
    if call.get("scale") is not None:
        call["scale"] = abs(call["scale"])
    # The log-sum-exp of these sums is at least the largest of them.
    q_size, k_size = (x.float().abs().to(x.dtype) for x in (q, k))
    _, lse = attention(q_size, k_size, v, **call)
    largest = lse[lse.isfinite()]
    return 2.0**-12 * max(float(largest.max()), 0.0) if largest.numel() else 0.0


def check_lse(lse: Tensor, ref: Tensor, more: float = 0.0) -> ErrorReport:
    """Compares a float32 log-sum-exp with the float64 reference.

    The rule: each element is within 64 ulp of float32 at ``max(1, max|ref|)``, and -inf exactly
    where the reference is.

    Args:
        lse: the log-sum-exp to judge, float32.
        ref: the reference, float64, same shape.
        more: error that is accepted on top, for an approximate kernel.

    Returns:
        An ErrorReport.

    Raises:
        ValueError: if the shapes differ.
    """
    if lse.shape != ref.shape:
        raise ValueError(
            f"lse {tuple(lse.shape)} and ref {tuple(ref.shape)} differ in shape: "
            "compare those of the same call"
        )
    bound = _LSE_ULPS * _ulp(max(1.0, _max(ref.abs()[ref.isfinite()])), torch.float32) + more
    return report_of(lse, ref, bound, bound)


def report_of(out: Tensor, ref: Tensor, bound: float | Tensor, mean_bound: float) -> ErrorReport:
    value = out.double()
    same = (value == ref) | (
        value.isnan() & ref.isnan()
    )  # equal infinities, and NaN where the reference is NaN
    comparable = value.isfinite() & ref.isfinite()
    error = (value - ref).abs().masked_fill(~comparable, math.inf).masked_fill(same, 0.0)
    bad = int((error > bound).sum())
    finite = ref.isfinite()
    # Where the reference is not finite, an element is right or wrong; the wrong ones are counted
    # above and have no size of error.
    mean_error = _mean(error[finite])
    power = _mean(ref[finite].square())
    nrmse = (
        math.sqrt(_mean(error[finite].square()) / power)
        if power
        else (0.0 if mean_error == 0 else math.inf)
    )
    worst: tuple[int, ...] = ()
    at, expected = 0.0, 0.0
    bound_there = 0.0 if isinstance(bound, Tensor) else bound
    if error.numel():
        excess = error - bound if isinstance(bound, Tensor) else error
        worst = tuple(int(i) for i in torch.unravel_index(excess.argmax(), error.shape))
        bound_there = float(bound[worst]) if isinstance(bound, Tensor) else bound
        at, expected = float(value[worst]), float(ref[worst])
    return ErrorReport(
        ok=bad == 0 and mean_error <= mean_bound, max_error=_max(error), mean_error=mean_error,
        nrmse=nrmse, bad_elements=bad, elements=error.numel(), worst=worst, value=at,
        expected=expected, bound=bound_there, mean_bound=mean_bound,
    )  # fmt: skip


def _max(x: Tensor) -> float:
    return float(x.max()) if x.numel() else 0.0


def _mean(x: Tensor) -> float:
    return float(x.mean()) if x.numel() else 0.0


def _ulp(size: float, dtype: torch.dtype) -> float:
    """The distance between neighbouring numbers of `dtype` at this size, also near zero."""
    info = torch.finfo(dtype)
    return float(2.0 ** math.floor(math.log2(max(size, info.tiny))) * info.eps)
