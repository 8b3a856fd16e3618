"""What must hold of the output of a call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from archflash import _options, reference


class Guarded:
    """An output full of NaN, with a pattern around it and between its rows that shows stray writes.

    Args:
        shape: of the output, in elements.
        strides: of the output, in elements.
        dtype: of the output.
        device: "cpu" or "cuda".
    """

    PATTERN = 12288.0  # exact in every dtype
    ZONE = 4096  # elements on either side

    def __init__(
        self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: str
    ) -> None:
        empty = 0 in shape
        extent = 0 if empty else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        total = self.ZONE + extent + self.ZONE
        self._buffer = torch.full((total,), self.PATTERN, dtype=dtype, device=device)
        self.view = self._buffer.as_strided(shape, strides, self.ZONE)
        self.view.fill_(math.nan)
        inside = torch.zeros(total, dtype=torch.bool, device=device)
        inside.as_strided(shape, strides, self.ZONE).fill_(True)
        self._outside = ~inside

    def assert_untouched_outside(self) -> None:
        stray = (self._buffer != self.PATTERN) & self._outside
        assert not stray.any(), (
            f"written outside the output, first at element {int(stray.nonzero()[0]) - self.ZONE} "
            f"counted from its start: {int(stray.sum())} elements"
        )


def guarded_output(q: Tensor, v: Tensor, pad: int, call: dict[str, Any]) -> Guarded:
    """An output for a call, with row-major strides; each row lies `pad` elements from the next."""
    shape = (*q.shape[:-1], v.shape[-1])
    default = torch.bfloat16 if is_fp8(q) else q.dtype
    strides = dense_strides(shape, pad)
    return Guarded(shape, strides, call.get("out_dtype") or default, q.device.type)


def dense_strides(shape: Sequence[int], pad: int = 0) -> list[int]:
    """Row-major strides in elements, each row `pad` elements longer than it is."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * max(size, 1) + (pad if len(strides) == 1 else 0))
    return strides


def is_fp8(x: Tensor) -> bool:
    return x.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal values, NaN where the other has NaN."""
    if a.shape == b.shape and a.dtype == b.dtype and torch.equal(as_bits(a), as_bits(b)):
        return True  # nearly always, and the fastest to find out
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def as_bits(x: Tensor) -> Tensor:
    """The same memory as integers."""
    return x.view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    )


def assert_close(
    out: Tensor,
    lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ran_on: tuple[str, tuple[int, int]] | None = None,
    **call: Any,
) -> None:
    """Output and log-sum-exp agree with float64 by the error rule for the call's inputs.

    Args:
        out, lse: what the call gave.
        q, k, v, **call: the call, as for `archflash.attention`.
        ran_on: the implementation, and the GPU's capability; needed for FP8.
    """
    semantics = {name: value for name, value in call.items() if name not in _options.ADVICE}
    if call.get("approximate") is not None:
        report, lse_report = reference.check_approximate(
            call["approximate"], out, lse, q, k, v, **semantics
        )
    else:
        expected, expected_lse = reference.attention(q, k, v, **semantics)
        if is_fp8(q):
            report = reference.check_fp8(out, expected, q, k, v, **semantics)
        else:
            report = reference.check(out, expected, reference.baseline(q, k, v, **semantics))
        more = reference.fp8_score_error(*ran_on, q, k, v, **semantics) if ran_on else 0.0
        lse_report = None if lse is None else reference.check_lse(lse, expected_lse, more)
    assert report.ok, report
    if lse is not None:
        assert lse_report is not None
        assert lse_report.ok, f"log-sum-exp {lse_report}"


def assert_rows_close(
    rows: Tensor, out: Tensor, q: Tensor, k: Tensor, v: Tensor, **call: Any
) -> None:
    """The chosen rows of an output, `rows` bool (B, H, N), agree with float64."""
    expected, _ = reference.attention(q, k, v, **call)
    baseline = reference.baseline(q, k, v, **call)
    report = reference.check(out[rows], expected[rows], baseline[rows])
    assert report.ok, report


def relative_rms_error(out: Tensor, expected: Tensor) -> float:
    """The root mean square of the error over that of what is expected."""
    error = (out.double() - expected).square().mean().sqrt()
    return float(error / expected.square().mean().sqrt())
