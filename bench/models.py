"""Measures the attention calls of well-known models (models.toml), forward and both passes.

    python -m bench.models [--lengths] [--only REGEX] [--group NAME] [--passes forward|both]
                           [--forced NAME] [--rounds N] [--output FOLDER]

Every call is made by name and without a forced kernel, as a model makes it, beside PyTorch's own
choice, each of PyTorch's fused kernels, and FlashAttention-3 (forward). It is timed twice: in a
CUDA graph, so without the host, and eagerly, so with it. With --lengths the calls are 16,384 rows
in sequences of 512 to 16,384, which bench.pictures draws. The rows go to models-<gpu>.csv; those of
the eager way have `timing=eager` among their features, and ours the kernel that dispatch chose.
With --forced one implementation is measured beside those kernels of PyTorch that run on the GPUs
for which it is made, in graphs only; the rows go to models-<NAME>-<gpu>.csv.
Exit status: 0 when all is measured, 1 when a result of ours was wrong, 2 when nothing can be
measured.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from bench import gradients
from bench.candidates import (
    Candidate,
    chosen_candidates,
    flash_attention_candidates,
    flash_attention_varlen,
    torch_candidates,
    torch_varlen,
)
from bench.cases import MODELS_FILE, Case, choose_cases, load_cases
from bench.correctness import Checker, sinks_of
from bench.results import EAGER, GRADIENTS, Row, append_rows, call_features, row_key
from bench.run import CaseResult, cases_to_run, open_results, run_case, short_parser
from bench.timing import CudaLab

if TYPE_CHECKING:
    import torch

    Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

OURS = "archflash"
# The kernels of PyTorch that also run where an implementation is the one that dispatch chooses.
PEERS = {"ampere": ("torch-flash", "torch-efficient")}
WINDOW, DOCUMENTS, SINKS = "window=", "documents=", "sinks"  # words in `features`


def load_models() -> list[Case]:
    """The calls of models.toml, whose tensors have rows before heads, as models have them."""
    return [dataclasses.replace(case, packed=True) for case in load_cases(MODELS_FILE)]


ROWS = 16_384
LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384)


def length_cases() -> list[Case]:
    """As many rows in sequences of each length, with 2,048 numbers of q a row."""
    return [
        Case(
            f"{ROWS // n}x{2048 // d} {n} d{d}{' c' if causal else ''}",
            "bf16", ROWS // n, 2048 // d, 2048 // d, n, n, d, d, causal, ("lengths",), packed=True,
        )
        for d in (64, 128)
        for causal in (False, True)
        for n in LENGTHS
    ]  # fmt: skip


def words(case: Case) -> list[str]:
    """What the shape columns of a row do not say about a case, as words of `features`."""
    window = [] if case.window is None else [WINDOW + ":".join(str(keys) for keys in case.window)]
    documents = [] if case.documents is None else [DOCUMENTS + ":".join(map(str, case.documents))]
    return window + documents + ([SINKS] if case.sinks else [])


def our_options(case: Case) -> dict[str, Any]:
    """The keywords of archflash.attention that a case has."""
    options: dict[str, Any] = {"causal": case.causal, "window": case.window}
    if case.sinks:
        options["sinks"] = sinks_of(case, "cuda")
    return options


def chosen_kernel(case: Case, *, both: bool) -> str:
    """The implementation that dispatch chooses for a case on this GPU."""
    import torch

    import archflash

    def empty(heads: int, rows: int, d: int) -> torch.Tensor:
        x = torch.empty((case.b, rows, heads, d), dtype=torch.bfloat16, device="cuda")
        x = x[0] if case.documents else x.transpose(1, 2)
        return x.requires_grad_(both)

    q, k = empty(case.hq, case.nq, case.d), empty(case.hkv, case.nk, case.d)
    v = empty(case.hkv, case.nk, case.dv)
    options = our_options(case)
    if case.documents:
        ends, longest = gradients.ends_of(case), max(case.lengths())
        options |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
        options |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
    return archflash.explain(q, k, v, **options).chosen


def sdpa_of(case: Case) -> Call:
    """PyTorch's scaled_dot_product_attention of a case, with a mask tensor where it takes no other
    description of what a query sees.
    """
    import torch
    from torch.nn.attention.bias import causal_lower_right

    options: dict[str, Any] = {"enable_gqa": True} if case.hq != case.hkv else {}
    if case.window is not None:
        options["attn_mask"] = gradients.seen_keys(case, "cuda")
    elif case.causal and case.nq != case.nk:
        options["attn_mask"] = causal_lower_right(case.nq, case.nk)
    else:
        options["is_causal"] = case.causal
    return functools.partial(torch.nn.functional.scaled_dot_product_attention, **options)


def windows_of_flash(case: Case) -> Call:
    """PyTorch's flash kernel through its operator for packed sequences, which takes windows."""
    import torch

    ends_q, ends_k = (
        torch.arange(0, (case.b + 1) * rows, rows, dtype=torch.int32, device="cuda")
        for rows in (case.nq, case.nk)
    )
    left, right = case.window or (-1, -1)
    window = (left, 0 if case.causal else right)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        given = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
        out = torch_varlen(*given, ends_q, ends_k, case.nq, case.nk, window=window)
        return out.unflatten(0, (case.b, case.nq)).transpose(1, 2)

    return call


def scores_with_sinks(case: Case) -> Call:
    """Attention with sinks in plain operations, as transformers' models have it in eager mode."""
    import torch

    sinks = sinks_of(case, "cuda").to(torch.bfloat16)
    seen = gradients.seen_keys(case, "cuda")
    shared = case.hq // case.hkv

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = (x.repeat_interleave(shared, 1) for x in (k, v))
        scores = q @ keys.transpose(2, 3) * case.d**-0.5
        if seen is not None:
            scores.masked_fill_(~seen, -torch.inf)
        column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
        return weights @ values

    return call


def candidates(case: Case, *, both: bool, forced: str | None = None) -> list[Candidate]:
    """Ours and PyTorch's own choice, PyTorch's fused kernels and FlashAttention-3; or a forced
    implementation and its PEERS.
    """

    def of(candidate: Candidate, bind: Callable[[Case], Call]) -> Candidate:
        features = ";".join([word for word in (candidate.features, *words(case)) if word])
        return dataclasses.replace(
            candidate, bind=bind, features=features, refuses=lambda case: None
        )

    def ours_of(case: Case) -> Call:
        import archflash

        return functools.partial(archflash.attention, implementation=forced, **our_options(case))

    ours, torch_itself = chosen_candidates()
    kernel = f"{ours.features};kernel={forced or chosen_kernel(case, both=both)}"
    ours = dataclasses.replace(ours, features=kernel, exact=case.dtype == "bf16")
    if case.sinks:
        plain = dataclasses.replace(torch_itself, name="torch-math")
        return [of(ours, ours_of), of(plain, scores_with_sinks)]
    if case.documents:
        found = packed_candidates(ours, of, forced=forced)
        return [x for x in found if not both or x.name not in ("fa3", "fa4")]
    found = [of(ours, ours_of), of(torch_itself, sdpa_of)]
    for peer in torch_candidates():
        if peer.name == "torch-flash" and case.window is not None:
            found.append(dataclasses.replace(of(peer, windows_of_flash), refuses=peer_of_windows))
        elif peer.name != "torch-math":
            found.append(of(peer, sdpa_of))
    if not both:
        for peer in flash_attention_candidates():
            found.append(dataclasses.replace(peer, features=";".join(words(case))))
    if forced is not None:
        return [x for x in found if x.name in (OURS, *PEERS[forced])]
    return found


def packed_candidates(
    ours: Candidate,
    of: Callable[[Candidate, Callable[[Case], Call]], Candidate],
    *,
    forced: str | None,
) -> list[Candidate]:
    """Ours, PyTorch's flash kernel and FlashAttention-3 of documents.

    Args:
        ours: the candidate that names what serves ours.
        of: a candidate with another function of a case.
        forced: the implementation to measure, or None for what dispatch chooses.
    """

    def bound(attend: Callable[..., Any]) -> Callable[[Case], Call]:
        return functools.partial(gradients.packed_call, attend=attend)

    (flash,) = (peer for peer in torch_candidates() if peer.name == "torch-flash")
    found = [of(ours, bound(gradients.our_packed(forced))), of(flash, bound(torch_varlen))]
    if forced is None:
        for peer in flash_attention_candidates():
            made = of(peer, bound(flash_attention_varlen(peer.name)))
            found.append(dataclasses.replace(made, refuses=peer.refuses))
    return found


def peer_of_windows(case: Case) -> str | None:
    """Why PyTorch's operator for packed sequences does not serve a case."""
    if case.d != case.dv:
        return "it takes one head dimension only"
    return None


def measure(
    lab: CudaLab,
    eager: CudaLab | None,
    case: Case,
    facts: dict[str, str],
    *,
    both: bool,
    rounds: int,
    forced: str | None = None,
) -> CaseResult:
    """One case in a graph and, with a lab for it, eagerly: the result of the first, with the rows
    of both.
    """
    measured = candidates(case, both=both, forced=forced)
    check: Callable[..., Any] = Checker(case)
    if both:
        dout = gradients.dout_of(case)
        measured = [gradients.with_gradients(candidate, dout) for candidate in measured]
        check = gradients.Checker(case, dout)
    result = run_case(lab, case, measured, facts, rounds=rounds, check=check)
    lab.release()
    if eager is not None:
        again = run_case(eager, case, measured, facts, rounds=rounds, check=check)
        lab.release()
        result.rows += again.rows
        result.wrong |= again.wrong
    if both:
        gradients.count_both_passes(result.rows, case)
    return result


@dataclasses.dataclass(frozen=True)
class Ratio:
    """How ours stands in one case.

    Args:
        best: name of the fastest peer.
        ratio: its time divided by ours.
        kernel: the implementation that dispatch chose.
        tflops: what ours reaches.
    """

    best: str
    ratio: float
    kernel: str
    tflops: float


def rows_of(rows: Sequence[Row], case: Case, *, both: bool, eager: bool) -> list[Row]:
    """The rows of a case, timed in one of the two ways, in their order."""

    def fits(row: Row) -> bool:
        features = call_features(row)
        return (
            row_key(row) == case.key
            and (GRADIENTS in features) == both
            and [w for w in features if w.startswith((WINDOW, DOCUMENTS)) or w == SINKS]
            == words(case)
            and (EAGER in row["features"].split(";")) == eager
        )

    return [row for row in rows if fits(row)]


def ratio_of(rows: Sequence[Row], case: Case, *, both: bool, eager: bool) -> Ratio | None:
    """Ours beside the fastest peer, in the latest run that has the case; None without one."""
    fitting = rows_of(rows, case, both=both, eager=eager)
    ours = [row for row in fitting if row["implementation"] == OURS]
    if not ours:
        return None
    mine = ours[-1]
    peers = [
        row for row in fitting if row["run_id"] == mine["run_id"] and row["implementation"] != OURS
    ]
    if not peers:
        return None
    best = min(peers, key=lambda row: float(row["p50_us"]))
    said = dict(word.partition("=")[::2] for word in mine["features"].split(";"))
    ratio = float(best["p50_us"]) / float(mine["p50_us"])
    return Ratio(best["implementation"], ratio, said["kernel"], float(mine["tflops"]))


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(math.log(value) for value in values) / len(values))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; see the top of this file."""
    parser = short_parser("bench.models", __doc__)
    parser.add_argument("--group", metavar="NAME", help="calls of one kind of models")
    parser.add_argument("--passes", choices=("forward", "both"), help="one of the two only")
    parser.add_argument("--lengths", action="store_true", help="sequences of 512 to 16,384 rows")
    parser.add_argument("--forced", choices=tuple(PEERS), help="one implementation and its peers")
    options = parser.parse_args(argv)
    known = length_cases() if options.lengths else load_models()
    cases = cases_to_run(lambda: choose_cases(known, options.only, options.group))
    if cases is None:
        return 2

    lab, eager = CudaLab(), None if options.forced else CudaLab(capture=False)
    prefix = f"models-{options.forced}-" if options.forced else "models-"
    facts, path = open_results(lab, options.output, prefix)
    wrong = False
    for both in (False, True):
        passes = "both" if both else "forward"
        if options.passes not in (None, passes):
            continue
        served = [case for case in cases if not both or case.passes == "both"]
        for case in served:
            if options.forced and case.sinks:
                continue  # none of PEERS has sinks
            result = measure(
                lab, eager, case, facts, both=both, rounds=options.rounds, forced=options.forced
            )
            append_rows(path, result.rows)
            wrong = wrong or bool(result.wrong)
            told = []
            for way in ("graph", "eager"):
                found = ratio_of(result.rows, case, both=both, eager=way == "eager")
                if found is not None:
                    told.append(f"{way} {found.ratio:.2f} of {found.best} ({found.kernel})")
            print(f"{passes} {case.name}: {', '.join(told)}", flush=True)
            for what, said in (("not run", result.refused), ("WRONG", result.wrong)):
                for name, reason in said.items():
                    print(f"    {name} {what}: {reason}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
