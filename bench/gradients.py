"""Measures calls together with their gradients: one forward and one backward pass through autograd,
for every implementation that has a backward pass and for PyTorch's fused kernels.

    python -m bench.gradients [--only REGEX] [--rounds N] [--output FOLDER]

The rows go to <gpu>.csv with the word `gradients` among their features; bench.measured tells
dispatch from them who computes gradients the fastest. Exit status: 0 when all is measured, 1 when
gradients of ours were wrong, 2 when nothing can be measured.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from bench import masks
from bench.candidates import (
    Candidate,
    chosen_candidates,
    our_candidates,
    torch_candidates,
    torch_varlen,
)
from bench.cases import GRADIENTS_FILE, TORCH_DTYPES, Case, choose_cases, load_cases
from bench.correctness import Verdict
from bench.results import GRADIENTS, PACKED, Row, append_rows
from bench.run import cases_to_run, open_results, run_case, short_parser, summary
from bench.timing import CudaLab

if TYPE_CHECKING:
    import torch

# Operations of a call and its gradients, and the bytes that they must move, in those of the call:
# five products of the backward pass beside two; q, k, v and the output are read once more, and
# their gradients written or read.
FLOPS, BYTES = 3.5, 3
# The NRMSE above which gradients are wrong. Those of 16-bit kernels have about 3e-3; the tests of
# gradients hold ours to the error rule.
LIMIT = 0.02
# torch-math keeps every score for the backward pass.
LEFT_OUT = ("torch-math",)
MASKED = (*masks.OURS, *masks.PEERS, "archflash", "torch")


class Gradients(NamedTuple):
    """The gradients of q, k and v, in their shapes."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor

    def fill_(self, value: float) -> None:
        for gradient in self:
            gradient.fill_(value)


def dout_of(case: Case, device: str = "cuda") -> torch.Tensor:
    """The gradient of the output (b, hq, nq, dv) in the dtype of q: the same for everyone."""
    import torch

    generator = torch.Generator(device).manual_seed(1)
    dtype = getattr(torch, TORCH_DTYPES[case.dtype])
    heads_and_rows = (case.nq, case.hq) if case.packed else (case.hq, case.nq)
    shape = (case.b, *heads_and_rows, case.dv)
    dout = torch.randn(shape, generator=generator, device=device, dtype=dtype)
    return dout.transpose(1, 2) if case.packed else dout


def with_gradients(candidate: Candidate, dout: torch.Tensor) -> Candidate:
    """A candidate that also computes the gradients of its calls."""

    def bind(case: Case) -> Callable[..., Any]:
        import torch

        call = candidate.bind(case)
        given = dout if tuple(dout.shape) == (case.b, case.hq, case.nq, case.dv) else None

        def forward_and_backward(*inputs: torch.Tensor) -> Gradients:
            with torch.enable_grad():
                leaves = [x.detach().requires_grad_() for x in inputs]
                out = call(*leaves)
                wanted = given if given is not None else torch.ones_like(out)
                return Gradients(*torch.autograd.grad(out, leaves, wanted))

        return forward_and_backward

    words = [word for word in (candidate.features, GRADIENTS) if word]
    return dataclasses.replace(candidate, bind=bind, features=";".join(words))


def seen_keys(case: Case, device: torch.device | str) -> torch.Tensor | None:
    """Which keys a query sees, (nq, nk) bool; None where it sees all of them."""
    import torch

    if not case.causal and case.window is None and case.documents is None:
        return None
    seen = torch.ones((case.nq, case.nk), dtype=torch.bool, device=device)
    if case.documents is not None:
        lengths = torch.tensor(case.lengths(), device=device)
        document = torch.arange(len(lengths), device=device).repeat_interleave(lengths)
        seen = document[:, None] == document
    offset = case.nk - case.nq
    if case.causal:
        seen = seen.tril(offset)
    if case.window is not None:
        left, right = case.window
        seen = seen.triu(offset - left).tril(offset + right)
    return seen


class Checker:
    """Compares gradients with float64: all of those of the first and the last head of k."""

    def __init__(self, case: Case, dout: torch.Tensor) -> None:
        self._case, self._dout = case, dout
        self._mask = masks.mask_of(case, dout.device.type).dense() if case.mask else None
        # q is kept with what belongs to it: a new tensor may have the id of one that is gone.
        self._expected: dict[tuple[int, int], tuple[torch.Tensor, list[torch.Tensor]]] = {}

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: Gradients, *, ours: bool
    ) -> Verdict:
        """Judges the gradients of q, k and v; `ours` makes no difference."""
        import torch

        case = self._case
        max_err, problem = 0.0, ""
        for batch, head in sorted({(0, 0), (case.b - 1, case.hkv - 1)}):
            expected = self._expect(q, k, v, batch, head)
            found = (self._heads(out.dq, batch, head), out.dk[batch, head], out.dv[batch, head])
            for name, mine, right in zip(("dq", "dk", "dv"), found, expected, strict=True):
                error = mine.double() - right
                max_err = max(max_err, float(error.abs().max()))
                nrmse = float(error.norm() / right.norm())
                if not nrmse <= LIMIT:  # NaN, too
                    problem = problem or f"{name} of batch {batch}, head {head}: NRMSE {nrmse:.3g}"
        if not all(bool(torch.isfinite(x).all()) for x in out):
            problem = problem or "gradients have elements that are not finite"
        return Verdict(max_err, not problem, problem)

    def _heads(self, x: torch.Tensor, batch: int, head: int) -> torch.Tensor:
        """The query heads of a head of k."""
        group = self._case.hq // self._case.hkv
        return x[batch, head * group : (head + 1) * group]

    def _expect(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: int, head: int
    ) -> list[torch.Tensor]:
        """dq of a head's query heads, dk and dv in float64."""
        import torch

        key = (id(q), batch * self._case.hkv + head)
        if key not in self._expected:
            mine = self._heads(q, batch, head).double()
            keys, values = k[batch, head].double(), v[batch, head].double()
            scale = self._case.d**-0.5
            seen = seen_keys(self._case, q.device)
            dq, dk, dv = [], torch.zeros_like(keys), torch.zeros_like(values)
            douts = self._heads(self._dout, batch, head).double()
            first = head * len(mine)  # of the heads of q
            for number, (rows, dout) in enumerate(zip(mine, douts, strict=True), first):
                scores = rows @ keys.T * scale
                if self._mask is not None:
                    heads = (self._case.b, self._case.hq, -1, -1)
                    seen = self._mask.expand(heads)[batch, number]
                if seen is not None and seen.dtype == torch.bool:
                    scores.masked_fill_(~seen, -torch.inf)
                elif seen is not None:
                    scores += seen
                p = torch.softmax(scores, -1)
                del scores
                dp = dout @ values.T
                dv += p.T @ dout
                ds = p.mul_(dp - (p * dp).sum(-1, keepdim=True)).mul_(scale)
                dq.append(ds @ keys)
                dk += ds.T @ rows
            self._expected[key] = q, [torch.stack(dq), dk, dv]
        return self._expected[key][1]


def count_both_passes(rows: Sequence[Row], case: Case) -> None:
    """Changes the speeds of rows to those of a call together with its gradients."""
    for row in rows:
        p50 = float(row["p50_us"])
        row["tflops"] = f"{FLOPS * case.flops() / p50 / 1e6:.2f}"
        row["gbps"] = f"{BYTES * case.bytes() / p50 / 1e3:.1f}"


def ends_of(case: Case, *, keys: bool = False) -> torch.Tensor:
    """cu_seqlens of the rows, or keys, of a case's documents, or of the entries of its batch."""
    import torch

    lengths = case.lengths() if case.documents else [case.nk if keys else case.nq] * case.b
    on = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=on)


def packed_call(
    case: Case, attend: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]
) -> Callable[..., torch.Tensor]:
    """A call of packed sequences, whose tensors are views of q, k and v.

    Args:
        case: the call.
        attend: a function of packed q, k and v, cu_seqlens of both, the longest of both, and the
            keyword `causal`; of what it returns the first tensor is the output.
    """
    ends_q, ends_k = ends_of(case), ends_of(case, keys=True)
    longest = (max(case.lengths()),) * 2 if case.documents else (case.nq, case.nk)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        given = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
        made = attend(*given, ends_q, ends_k, *longest, causal=case.causal)
        out = made[0] if isinstance(made, tuple) else made
        return out.unflatten(0, (case.b, case.nq)).transpose(1, 2)

    return call


def our_packed(name: str | None = None) -> Callable[..., torch.Tensor]:
    """archflash.attention of packed sequences, by an implementation or as dispatch chooses."""
    import archflash

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        ends_q: torch.Tensor, ends_k: torch.Tensor, longest_q: int, longest_k: int, *, causal: bool,
    ) -> torch.Tensor:  # fmt: skip
        out: torch.Tensor = archflash.attention(
            q, k, v, cu_seqlens_q=ends_q, cu_seqlens_k=ends_k, max_seqlen_q=longest_q,
            max_seqlen_k=longest_k, causal=causal, implementation=name,
        )  # fmt: skip
        return out

    return attend


def candidates(case: Case) -> list[Candidate]:
    """Every implementation of ours, which refuses where it has no backward pass, PyTorch's fused
    kernels, and both as they are chosen; of packed sequences ours and PyTorch's flash kernel; with
    a mask those that take one.
    """
    if case.mask:
        every = masks.masked_candidates()
        return [candidate for candidate in every if candidate.name in MASKED]
    if not case.packed:
        every = [*our_candidates(), *torch_candidates(), *chosen_candidates()]
        return [candidate for candidate in every if candidate.name not in LEFT_OUT]

    def packed(candidate: Candidate, attend: Callable[..., Any]) -> Candidate:
        bind = functools.partial(packed_call, attend=attend)
        return dataclasses.replace(candidate, bind=bind, features=PACKED)

    (flash,) = (x for x in torch_candidates() if x.name == "torch-flash")
    ours = [packed(candidate, our_packed(candidate.name)) for candidate in our_candidates()]
    return [*ours, packed(flash, torch_varlen)]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; see the top of this file."""
    options = short_parser("bench.gradients", __doc__).parse_args(argv)
    cases = cases_to_run(lambda: choose_cases(load_cases(GRADIENTS_FILE), options.only))
    if cases is None:
        return 2

    lab = CudaLab(target_us=8_000.0)
    facts, path = open_results(lab, options.output)
    results = {}
    for case in cases:
        dout = dout_of(case)
        measured = [with_gradients(candidate, dout) for candidate in candidates(case)]
        if case.mask:
            measured = [masks.for_mask(candidate, case) for candidate in measured]
        result = run_case(
            lab, case, measured, facts, rounds=options.rounds, check=Checker(case, dout)
        )
        count_both_passes(result.rows, case)
        del measured, dout
        lab.release()
        append_rows(path, result.rows)
        results[case.name] = result
        print(
            f"{case.name}: "
            + ", ".join(f"{r['implementation']} {r['tflops']}" for r in result.rows),
            flush=True,
        )
    print(summary(cases, results))
    return 1 if any(r.wrong for r in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
