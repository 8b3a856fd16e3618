"""The check before every timing: against float64, on a whole case or on slices of a large one."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from bench.cases import Case

if TYPE_CHECKING:
    import torch

WHOLE_SCORES = 2**26  # score elements up to which everything is compared: 0.5 GB in float64
WHOLE_HEADS = 128  # heads up to which everything is compared; the reference computes one at a time
SLICED_HEADS = 16
WINDOW_ROWS = 64  # query rows of one slice
# The NRMSE above which a peer computes something other than the case. Approximate kernels have
# about 1e-2, a wrong mask gives about 1.
PEER_LIMIT = 0.1


@dataclass(frozen=True)
class Slice:
    """Query rows [first_row, end_row) of one head of one batch entry."""

    batch: int
    head: int
    first_row: int
    end_row: int


@dataclass(frozen=True)
class Verdict:
    """Result of a check.

    Args:
        max_err: largest absolute difference from float64.
        meets_rule: whether everything that was compared satisfies the package's error rule.
        problem: why the output does not solve the case; "" if it does.
    """

    max_err: float
    meets_rule: bool
    problem: str


def slices(case: Case) -> list[Slice]:
    """The parts of a large case that are compared: rows at start, middle and end of some heads."""
    heads = case.b * case.hq
    count = min(SLICED_HEADS, heads)
    numbers = {i * (heads - 1) // max(1, count - 1) for i in range(count)}
    starts = {0, max(0, case.nq // 2 - WINDOW_ROWS // 2), max(0, case.nq - WINDOW_ROWS)}
    return [
        Slice(number // case.hq, number % case.hq, start, min(case.nq, start + WINDOW_ROWS))
        for number in sorted(numbers)
        for start in sorted(starts)
    ]


class Checker:
    """Compares outputs of one case with float64; candidates with the same inputs share the work."""

    def __init__(self, case: Case) -> None:
        from archflash import reference

        self._case = case
        self._reference = reference
        # Inputs are compared as objects, and nothing writes to them. q is kept with what belongs to
        # it: a new tensor may have the id of one that is gone.
        self._expected: dict[
            tuple[int, Slice | None], tuple[torch.Tensor, torch.Tensor, torch.Tensor]
        ] = {}

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, *, ours: bool
    ) -> Verdict:
        """Judges one output.

        Args:
            q: queries (B, Hq, Nq, D).
            k: keys (B, Hkv, Nk, D).
            v: values (B, Hkv, Nk, Dv).
            out: what a candidate computed (B, Hq, Nq, Dv), dtype of q; bf16 for FP8.
            ours: whether the output must satisfy the package's error rule. A peer must only satisfy
                a coarse limit; its error is shown in the table.

        Returns:
            The verdict; its `problem` is empty when the candidate may be timed.
        """
        import torch

        case = self._case
        expected_shape = (case.b, case.hq, case.nq, case.dv)
        dtype = torch.bfloat16 if case.dtype == "e4m3" else q.dtype
        if tuple(out.shape) != expected_shape or out.dtype != dtype:
            found = f"{tuple(out.shape)} {out.dtype}"
            wanted = f"{expected_shape} {dtype}"
            return Verdict(float("nan"), False, f"output is {found}, not {wanted}")
        if not bool(torch.isfinite(out).all()):
            return Verdict(float("nan"), False, "output has elements that are not finite")

        scores = case.b * case.hq * case.nq * case.nk
        whole = scores <= WHOLE_SCORES and case.b * case.hq <= WHOLE_HEADS
        max_err, meets_rule, problem = 0.0, True, ""
        for part in [None] if whole else slices(case):
            expected, baseline = self._expect(q, k, v, part)
            if case.dtype == "e4m3":
                part_q, part_k, part_v, mask = self._call(q, k, v, part)
                report = self._reference.check_fp8(
                    _part(out, part), expected, part_q, part_k, part_v, **mask
                )
            else:
                report = self._reference.check(_part(out, part), expected, baseline)
            max_err = max(max_err, float(report.max_error))
            meets_rule = meets_rule and bool(report.ok)
            if ours and not report.ok:
                problem = problem or f"breaks the error rule: {report}"
            if not report.nrmse <= PEER_LIMIT:
                problem = problem or f"computes something else: {report}"
        return Verdict(max_err, meets_rule, problem)

    def _expect(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: Slice | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Float64 output and the baseline's output for a slice, or for everything."""
        key = (id(q), part)
        if key not in self._expected:
            part_q, part_k, part_v, mask = self._call(q, k, v, part)
            expected, _ = self._reference.attention(part_q, part_k, part_v, **mask)
            fp8 = self._case.dtype == "e4m3"  # whose rule needs no baseline
            baseline = self._reference.baseline(part_q, part_k, part_v, **mask) if not fp8 else None
            self._expected[key] = (q, expected, expected if baseline is None else baseline)
        return self._expected[key][1:]

    def _call(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: Slice | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
        """The inputs of a slice, and the options that make it the same rows of the case."""
        import torch

        case = self._case
        offset = case.nk - case.nq
        if part is not None:
            kv_head = part.head // (case.hq // case.hkv)
            kv = (slice(part.batch, part.batch + 1), slice(kv_head, kv_head + 1))
            k, v = k[kv], v[kv]
            offset += part.first_row
        mask: dict[str, Any] = {"causal": True} if case.causal else {}
        if case.window is not None:
            mask["window"] = case.window
        if mask:
            mask["q_offset"] = offset
        if case.documents is not None:
            ends = torch.tensor([0, *accumulate(case.lengths())], device=q.device)
            rows = torch.arange(case.nq, device=q.device)
            if part is not None:
                rows = rows[part.first_row : part.end_row]
            document = torch.bucketize(rows, ends, right=True)
            ranges = torch.stack([ends[document - 1], ends[document]], 1)
            mask["key_ranges"] = ranges.int()[None, None, :, None]
        if case.sinks:
            mask["sinks"] = sinks_of(case, q.device, part.head if part is not None else None)
        return _part(q, part), k, v, mask


def sinks_of(case: Case, device: torch.device | str, head: int | None = None) -> torch.Tensor:
    """The sinks of a case in float32, the same for everyone: (Hq,), or (1,) of the named head."""
    import torch

    sinks = torch.linspace(-2.0, 2.0, case.hq, device=device)
    return sinks if head is None else sinks[head : head + 1]


def _part(x: torch.Tensor, part: Slice | None) -> torch.Tensor:
    """The rows of q or of an output that a slice names; all for None."""
    if part is None:
        return x
    return x[part.batch : part.batch + 1, part.head : part.head + 1, part.first_row : part.end_row]
