"""Writes python/archflash/_measured.json from the result files. The file tells dispatch
which kernels are the fastest, and on GPUs of which compute capability each was shown right.

    python -m bench.measured [--check]

Exit status: 0 when the file is up to date or written, 1 when --check finds that it is not.

Two candidates are compared on every case by the newest run that has both, never across runs. For a
kind of problem the geometric mean over its cases counts. Candidates whose speeds differ by less
than NOISE are ordered as in CANDIDATES.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from archflash import _registry
from archflash._measured import Kind
from archflash._proofs import BACKWARD, FORWARD
from archflash.verify._verdict import FAILED, PROVED
from bench import receive
from bench.cases import CASES_FILE, GRADIENTS_FILE, MASKS_FILE, TORCH_DTYPES, Case, load_cases
from bench.day_one import record
from bench.day_one.jobs import make_jobs
from bench.results import (
    GRADIENTS,
    MASK,
    PACKED,
    RESULTS_FOLDER,
    Row,
    call_features,
    figure,
    is_sustained,
    load_rows,
    row_key,
    speedup,
)

FILE = Path(__file__).resolve().parent.parent / "python" / "archflash" / "_measured.json"
NOISE = 0.02
# With few query rows, as in decoding, every call may have another number of keys, and PyTorch's
# cuDNN kernel makes a plan for each new shape, which takes the host tens of milliseconds. So a
# kernel of PyTorch comes before one of ours only if it is faster by more than this. With a mask as
# data it is the other way round: a kernel of PyTorch comes before one of ours unless it is slower
# by more than NOISE. With masks the order counts only in PyTorch's operators (archflash.enable()),
# where to leave a call alone costs nothing.
FEW_ROWS_MARGIN = 0.05
_OURS = sorted(
    _registry.kernel_names(), key=lambda name: not _registry.made_for(name, "float16", None)
)
# In the order that holds for equal speed. Dispatch has no use for other rows.
CANDIDATES = (
    *(name for name in _OURS if _registry.uses_tensor_cores(name)),
    "torch-cudnn",
    "torch-flash",
    "torch-efficient",
    *(name for name in _OURS if not _registry.uses_tensor_cores(name)),
)
# The files of cases, and whether their rows are of calls with their gradients.
FILES = {CASES_FILE: False, GRADIENTS_FILE: True, MASKS_FILE: False}
# The `mask` of Kind for what `mask` of a case begins with, where that is another word. It does not
# matter whether each head has a dense mask of its own. The calls of bench/masks.toml without a mask
# are there for ratios, but they count, too.
MASKS = {"": "none", "documents": "ranges", "padding": "bool", "bias": "added"}
# The compute capability of each GPU that has rows, because the rows do not name it. The runs of all
# GPUs of one compute capability count together.
CAPABILITIES = {"NVIDIA H100 80GB HBM3": (9, 0), "NVIDIA H200": (9, 0)}

# The parts of a day that compare results with float64.
COMPARISONS = ("correctness", "pairs")

Runs = dict[str, dict[str, Row]]  # the rows of one case by run (newest last) and candidate


def runs_of(rows: Sequence[Row], case: Case, features: tuple[str, ...] = ()) -> Runs:
    """The rows of a case of candidates that dispatch can choose, timed in turns, with just these
    features.
    """
    runs: Runs = {}
    for row in rows:
        name = row["implementation"]
        if row_key(row) != case.key or call_features(row) != features or is_sustained(row):
            continue
        if name in CANDIDATES:
            runs.setdefault(row["run_id"], {})[name] = row
    return runs


def newest_with(runs: Runs, names: Sequence[str]) -> Mapping[str, Row] | None:
    """The newest run that measured all of `names`."""
    return next((run for run in reversed(runs.values()) if set(names) <= run.keys()), None)


def times_faster(cases: Mapping[Case, Runs], one: str, other: str) -> float:
    """How many times faster one candidate is: geometric mean over cases; 1 if never compared."""
    logs = [
        math.log(speedup(run[one], run[other]))
        for runs in cases.values()
        if (run := newest_with(runs, (one, other))) is not None
    ]
    return math.exp(sum(logs) / len(logs)) if logs else 1.0


def order_of(cases: Mapping[Case, Runs]) -> list[str]:
    """The measured candidates, the fastest first; see NOISE and FEW_ROWS_MARGIN."""
    kinds = [kind for case in cases if (kind := kind_of(case))]
    least_of_torch = NOISE
    if all(kind.query_rows == "few" for kind in kinds):
        least_of_torch = FEW_ROWS_MARGIN
    elif any(kind.mask != "none" for kind in kinds):
        least_of_torch = -NOISE
    order: list[str] = []
    for name in CANDIDATES:
        if not any(name in run for runs in cases.values() for run in runs.values()):
            continue
        place = len(order)
        least = least_of_torch if name.startswith("torch-") else NOISE
        while place > 0 and times_faster(cases, name, order[place - 1]) > 1 + least:
            place -= 1
        order.insert(place, name)
    return order


def evidence(cases: Mapping[Case, Runs], order: Sequence[str]) -> dict[str, Any]:
    """The case with the most work, in the newest run that measured the two fastest candidates, or
    the fastest alone where no run measured both.
    """
    for together in (order[:2], order[:1]):
        shown = {case: run for case, runs in cases.items() if (run := newest_with(runs, together))}
        if shown:
            break
    case = max(shown, key=Case.flops)
    rows = shown[case]
    return {
        "gpu": rows[order[0]]["gpu"],
        "run_id": rows[order[0]]["run_id"],
        "case": case.name,
        "unit": "GB/s" if case.is_decode else "TFLOP/s",
        "speeds": {name: float(figure(rows[name]).rstrip("*")) for name in order if name in rows},
    }


def kind_of(case: Case, gradients: bool = False) -> Kind | None:
    """The kind of problem that a case is, with its gradients or without."""
    word = case.mask.partition("-")[0]
    return Kind.of(
        TORCH_DTYPES[case.dtype],
        sequences=case.b,
        heads_q=case.hq,
        rows=case.b * case.nq,
        keys=case.nk,
        d=case.d,
        dv=case.dv,
        gradients=gradients,
        causal=case.causal,
        mask=MASKS.get(word, word),
    )


def features_of(case: Case, gradients: bool) -> tuple[str, ...]:
    """The words in `features` of the rows that say who serves calls like a case the fastest."""
    packed = (PACKED,) if case.packed else ()
    return packed + ((GRADIENTS,) if gradients else ()) + ((MASK + case.mask,) if case.mask else ())


def measurements(results: Path = RESULTS_FOLDER) -> list[dict[str, Any]]:
    """The entries of the file.

    Args:
        results: folder of result files.

    Returns:
        One entry for each compute capability and kind of problem that has rows.

    Raises:
        ValueError: rows of a GPU whose compute capability is unknown here.
    """
    entries = []
    for capability, rows in sorted(rows_by_capability(results).items()):
        kinds: dict[Kind, dict[Case, Runs]] = {}
        for file, gradients in FILES.items():
            for case in load_cases(file):
                kind = kind_of(case, gradients)
                runs = runs_of(rows, case, features_of(case, gradients))
                if kind is not None and runs:
                    kinds.setdefault(kind, {})[case] = runs
        for kind, cases in sorted(kinds.items()):
            order = order_of(cases)
            entry = {"capability": list(capability), **kind._asdict()}
            entries.append({**entry, "order": order, **evidence(cases, order)})
    return entries


def proofs(results: Path = RESULTS_FOLDER) -> list[dict[str, Any]]:
    """The runs that show a pass of a folder right on GPUs of a compute capability, the newest of
    each. What was timed was right (bench.run). A day's record (bench.day_one) shows the forward
    pass right where all comparisons with float64, alone and in pairs, were made and went well; so
    does a verdict of `archflash verify` (bench.receive). Where one was wrong, the rows of earlier
    runs do not count.

    Args:
        results: folder of result files.
    """
    found: dict[tuple[str, str, tuple[int, int]], str] = {}
    for capability, rows in rows_by_capability(results).items():
        for row in rows:
            if row["implementation"] in _OURS:
                of = BACKWARD if GRADIENTS in call_features(row) else FORWARD
                found[row["implementation"], of, capability] = row["run_id"]
    runs: list[tuple[str, tuple[str, str, tuple[int, int]], bool]] = []  # run, of what, was right
    for path in results.glob("*-day-one.csv"):
        rows = record.load(path)
        facts = json.loads(rows[0]["detail"])
        if facts["dirty"] == "1":  # the kernels may be others than those of the commit
            continue
        major, minor = map(int, facts["capability"].split("."))
        key = (facts["implementation"], FORWARD, (major, minor))
        statuses = record.status_of_jobs(rows)
        asked = make_jobs(facts["implementation"], tuple(facts["dtypes"].split()), simulate=False)
        compared = {statuses.get((x.part, x.name)) for x in asked if x.part in COMPARISONS}
        if compared == {record.OK}:
            runs.append((facts["run_id"], key, True))
        elif compared - {record.OK, None}:
            runs.append((facts["run_id"], key, False))
    for row in receive.verdicts(results):
        major, minor = map(int, row["capability"].split("."))
        key = (row["kernel"], row["pass"], (major, minor))
        if row["status"] in (PROVED, FAILED):
            runs.append((row["run_id"], key, row["status"] == PROVED))
    for run_id, key, right in sorted(runs):
        if right:
            found[key] = max(found.get(key, ""), run_id)
        elif found.get(key, "") <= run_id:
            found.pop(key, None)
    return [
        {"implementation": name, "pass": of, "capability": list(capability), "run_id": run_id}
        for (name, of, capability), run_id in sorted(found.items())
    ]


def rows_by_capability(results: Path) -> dict[tuple[int, int], list[Row]]:
    """The rows of all GPUs of each compute capability, the oldest run first.

    Raises:
        ValueError: rows of a GPU whose compute capability is unknown here.
    """
    other = (
        "calibrated",
        "day-one",
        "distributed",
        "ladder",
        "sparse",
        "training",
        "verify",
    )  # what these files hold serves no call
    found: dict[tuple[int, int], list[Row]] = {}
    for path in sorted(results.glob("*.csv")):
        if any(word in path.name for word in other):
            continue
        for row in load_rows(path):
            if row["gpu"] not in CAPABILITIES:
                raise ValueError(
                    f"{path}: add the compute capability of {row['gpu']} to CAPABILITIES"
                )
            found.setdefault(CAPABILITIES[row["gpu"]], []).append(row)
    for rows in found.values():
        rows.sort(key=lambda row: row["run_id"])  # it begins with the time; rows of a run stay
    return found


def text_of(
    entries: Sequence[Mapping[str, Any]], proved: Sequence[Mapping[str, Any]] | None = None
) -> str:
    """The file, one measurement a paragraph.

    Args:
        entries: as measurements() gives them.
        proved: as proofs() gives them, which is the default.
    """
    fields = [
        ",\n".join(f"   {json.dumps(name)}: {json.dumps(value)}" for name, value in entry.items())
        for entry in entries
    ]
    listed = ",\n".join(f"  {{\n{text}\n  }}" for text in fields)
    shown = ",\n".join(
        f"  {json.dumps(proof)}" for proof in (proofs() if proved is None else proved)
    )
    made_by = json.dumps("python -m bench.measured, from bench/results")
    return (
        f'{{\n "made_by": {made_by},\n "proofs": [\n{shown}\n ],\n'
        f' "measurements": [\n{listed}\n ]\n}}\n'
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Writes or checks the file; see the top of this module."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.measured", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--check", action="store_true", help="write nothing, fail on a stale file")
    options = parser.parse_args(argv)
    text = text_of(measurements())
    if FILE.exists() and FILE.read_text() == text:
        return 0
    if options.check:
        print(f"{FILE}: stale; run python -m bench.measured", file=sys.stderr)
        return 1
    FILE.write_text(text)
    print(f"{FILE}: written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
