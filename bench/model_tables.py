"""The tables of models, of host times and of whole models, which `bench.report` writes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from bench import models
from bench.cases import Case
from bench.host_training import ratio_to_peer
from bench.results import Row, power_w

UNMEASURED = "unmeasured"


def source_note(rows: Sequence[Row]) -> str:
    """Where the numbers of a table come from: each machine, and its runs with their commits."""
    notes = []
    machines = dict.fromkeys((row["gpu"], row["driver"], row["cuda"], row["torch"]) for row in rows)
    for gpu, driver, cuda, torch in machines:
        here = [
            row
            for row in rows
            if (row["gpu"], row["driver"], row["cuda"], row["torch"]) == (gpu, driver, cuda, torch)
        ]
        clocks = sorted({int(r["clocks_mhz"]) for r in here if r["clocks_mhz"].isdecimal()})
        clock = f", SM clock {clocks[0]} to {clocks[-1]} MHz" if clocks else ""
        powers = sorted(watts for row in here if (watts := power_w(row)) is not None)
        clock += f", {powers[0]} to {powers[-1]} W" if powers else ""
        runs = {
            row["run_id"]: f"{row['run_id']} ({row['commit']}"
            + (" with local changes" if row["dirty"] == "1" else "")
            + ")"
            for row in here
        }
        said = f"Run{'s' if len(runs) > 1 else ''} {', '.join(runs.values())}"
        if len(runs) > MOST_RUNS_NAMED:  # bench/results has them
            days = sorted(row["date"] for row in here)
            said = f"{len(runs)} runs of {days[0]} to {days[-1]}"
        notes.append(f" {gpu}, driver {driver}, CUDA {cuda}, torch {torch}{clock}. {said}.")
    return "".join(notes)


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A markdown table: first column to the left, others to the right."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, rule, *lines])


MOST_RUNS_NAMED = 3  # below a table
# What the card of a table has that others, on which the forced implementation is chosen, have not.
NEED_OF_GRADIENTS = {
    "ampere": " Some tiles of gradients need the 227 KB of an SM of 9.0: an A100 runs smaller ones."
}
UNFUSED = ("torch-math",)  # a ratio to it says nothing about kernels, and is in no mean


def models_table(rows: Sequence[Row], *, forced: str = "") -> str:
    """Ours beside the fastest peer in the calls of models: both passes and ways of timing. What
    most rows share is said once, below the table.

    Args:
        rows: rows of bench/results.
        forced: the one implementation that they are of, which was timed in graphs only.
    """
    ways = (False,) if forced else (False, True)
    columns = [(both, eager) for both in (False, True) for eager in ways]
    usual_peer = models.PEERS[forced][0] if forced else ""
    lines, ratios = [], {column: dict[str, float]() for column in columns}
    kernels = dict[str, str]()
    for case in models.load_models():
        if forced and case.sinks:
            continue
        cells, served_by = [], []
        for both, eager in columns:
            found = models.ratio_of(rows, case, both=both, eager=eager)
            if found is None:
                cells.append("unmeasured" if case.passes == "both" or not both else "")
                continue
            if found.best not in UNFUSED:
                ratios[both, eager][case.name] = found.ratio
            ratio = f"{found.ratio:.2f}"
            behind = found.ratio < 0.995 and found.best not in UNFUSED
            peer = "" if found.best == usual_peer else f" ({found.best})"
            cells.append((f"**{ratio}**" if behind else ratio) + peer)
            served_by += [] if eager else [found.kernel]
        shape = f"{case.b}x{heads(case)} {rows_and_keys(case)} d{head_dims(case)}"
        lines.append([case.name, shape + (" c" if case.causal else ""), *cells])
        if served_by:
            kernels[case.name] = ", ".join(dict.fromkeys(served_by))
    means = [models.geometric_mean(list(of.values())) if of else None for of in ratios.values()]
    lines.append(["geometric mean", "", *(UNMEASURED if x is None else f"{x:.3f}" for x in means)])
    names = [
        ("eager" if eager else "both passes" if both else "forward") for both, eager in columns
    ]
    if forced:
        note = f"Bold: behind the best peer, which is {usual_peer} where none is named."
        note += NEED_OF_GRADIENTS.get(forced, "")
    else:
        ((usual, _),) = Counter(kernels.values()).most_common(1) or [("dispatch", 0)]
        others = [f"{name} ({by})" for name, by in kernels.items() if by != usual]
        note = f"Served by {', but for '.join([usual, *others])}. Bold: behind the best peer."
        note += " The mean leaves out rows whose only peer is plain operations (torch-math)."
    return f"{markdown(['model', 'call', *names], lines)}\n\n{note}{source_note(rows)}"


def heads(case: Case) -> str:
    """Heads of q, and of k where there are fewer."""
    return f"{case.hq}/{case.hkv}" if case.hq != case.hkv else str(case.hq)


def rows_and_keys(case: Case) -> str:
    """Rows of q, and keys where their number is another."""
    return f"{case.nq}x{case.nk}" if case.nq != case.nk else str(case.nq)


def head_dims(case: Case) -> str:
    """The head dimension of q and k, and that of v where it is another."""
    return f"{case.d}/{case.dv}" if case.d != case.dv else str(case.d)


def host_table(path: Path) -> str:
    """Host cost of one eager call from the file that bench/host_overhead.py writes."""
    head = ["call", "p50 us", "p80 us"]
    if not path.exists():
        return markdown(head, [["archflash.attention", UNMEASURED, UNMEASURED]])
    data = json.loads(path.read_text())
    lines = [
        [name, *(f"{figures[p]:.2f}" for p in ("p50", "p80"))]
        for section in ("calls", "registry", "breakdown")
        for name, figures in data.get(section, {}).items()
    ]
    training = data["training"]
    of_training = []
    for name, found in training.items():
        times = [f"{found[way]['p50']:.0f}" for way in ("forward", "both")]
        ratio = ratio_to_peer(training, name)
        compared = ["", ""] if ratio is None else [found["peer"], f"{ratio:.2f}"]
        of_training.append([name, *times, *compared])
    head_of_training = ["call with gradients", "forward us", "both passes us", "PyTorch's", "ratio"]
    return (
        f"{markdown(head, lines)}\n\n{markdown(head_of_training, of_training)}\n\nTime until one "
        f"eager call returns, on a tiny shape; medians of {data['count']} interleaved calls, with "
        f"gradients of {data['count_training']}. {data['gpu']}, torch {data['torch']}, commit "
        f"{data['commit']}, {data['date']}."
    )


def end_to_end_table(path: Path) -> str:
    """Models with PyTorch's attention and with archflash, from what bench/end_to_end.py writes."""
    ways = ("eager", "compiled")
    head = ["model"]
    head += [f"{how}, {what}" for how in ways for what in ("torch", "archflash", "ratio")]
    head += ["commit, date, rounds"]
    if not path.exists():
        return markdown(head, [["any", *[UNMEASURED] * 7]])
    lines: list[list[str]] = []
    machines: set[str] = set()
    for name, case in json.loads(path.read_text()).items():
        cells = []
        if BY_NAME in case["ways"]:
            continue
        for how in ways:
            before, after = (
                case["ways"][f"{how}, {provider}"]["per_second"]
                for provider in ("torch", "archflash")
            )
            cells += [f"{before:,.0f}", f"{after:,.0f}", f"{after / before:.2f}"]
        cells += [f"{case['commit']}, {case['date']}, {case['rounds']}"]
        lines.append([f"{name} ({case['unit']})", *cells])
        machines.add(f"{case['gpu']}, driver {case['driver']}, torch {case['torch']}")
    return (
        f"{markdown(head, lines)}\n\n{'; '.join(sorted(machines))}; medians of rounds in which "
        "the ways took turns."
    )


BY_NAME = "eager, by name"


def by_name_table(path: Path) -> str:
    """Small models that train eagerly, from what bench/end_to_end.py writes: speeds relative to
    PyTorch's attention.
    """
    ways = {"archflash": "enable()", "by name": "archflash.attention", "compat": "flash_attn_func"}
    head = ["model", "torch", *ways.values(), "commit, date, rounds"]
    cases = json.loads(path.read_text()) if path.exists() else {}
    lines = [
        [
            f"{name} ({case['unit']})",
            f"{case['ways']['eager, torch']['per_second']:,.0f}",
            *(
                f"{found['per_second'] / case['ways']['eager, torch']['per_second']:.2f}"
                for found in (case["ways"][f"eager, {way}"] for way in ways)
            ),
            f"{case['commit']}, {case['date']}, {case['rounds']}",
        ]
        for name, case in cases.items()
        if BY_NAME in case["ways"]
    ]
    return markdown(head, lines or [["any", *[UNMEASURED] * 5]])
