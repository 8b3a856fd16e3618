"""Writes the benchmark tables of README and docs from the result files.

    python -m bench.report [--check] [--run RUN_ID] [--results FOLDER] [FILE ...]

A table stands between `<!-- bench:GPU/TABLE -->` and `<!-- /bench -->`, each on a line of its own.
GPU is the name of a file in bench/results; TABLE is a group of bench/cases.toml, `all`,
`published` (ratios to torch-math beside published ones) or `host` (cost of one call on the host).
Exit status: 0 when the tables are up to date, 1 when --check finds one that is not, 2 when a marker
or a result file cannot be read. Needs nothing beyond Python.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.cases import BYTES_RULE, FLOPS_RULE, Case, load_cases
from bench.results import (
    EAGER,
    RESULTS_FOLDER,
    Row,
    call_features,
    figure,
    is_peer,
    load_rows,
    row_key,
    speedup,
)

REPOSITORY = Path(__file__).resolve().parent.parent
UNMEASURED = "unmeasured"
TABLE = re.compile(
    r"^(?P<open><!-- bench:(?P<name>\S+) -->)[ ]*\n(?P<body>.*?)^(?P<close><!-- /bench -->)",
    re.DOTALL | re.MULTILINE,
)
MARKER = re.compile(r"^<!-- (bench:\S+|/bench) -->", re.MULTILINE)


def rows_of_case(rows: Sequence[Row], case: Case, run_id: str | None = None) -> dict[str, Row]:
    """The rows of one case, all of one run.

    Args:
        rows: rows of one GPU, in file order.
        case: the shape; rows whose calls ask for more than the shape are left out.
        run_id: the run; None for the latest one that has the case.

    Returns:
        Row by implementation; empty when the case is unmeasured.
    """
    matching = [row for row in rows if row_key(row) == case.key and not call_features(row)]
    if run_id is None and matching:
        run_id = matching[-1]["run_id"]  # files are append-only
    return {row["implementation"]: row for row in matching if row["run_id"] == run_id}


def speed_table(rows: Sequence[Row], cases: Sequence[Case], run_id: str | None) -> str:
    """Speed of every implementation and what the best of ours is against the best peer."""
    measured = {case.name: rows_of_case(rows, case, run_id) for case in cases}
    names = list(dict.fromkeys(name for found in measured.values() for name in found))
    ours = [name for name in names if not is_peer(name)]
    peers = [name for name in names if is_peer(name)]
    head = ["case", *(ours or ["archflash"]), *peers, "ours / best peer"]
    lines = []
    for case in cases:
        found = measured[case.name]
        speeds = [
            figure(found[name]) if name in found else UNMEASURED
            for name in [*(ours or ["archflash"]), *peers]
        ]
        unit = " (GB/s)" if case.is_decode else ""
        lines.append([case.name + unit, *speeds, against_best_peer(found)])
    note = (
        f"TFLOP/s, GB/s where marked ({FLOPS_RULE}; {BYTES_RULE}). Medians (p50) of interleaved "
        "rounds; ratios are times, within one run: above 1 ours is faster."
    )
    if any(EAGER in row["features"] for found in measured.values() for row in found.values()):
        note += " *: timed eagerly, not in a CUDA graph."
    sources = source_note([row for found in measured.values() for row in found.values()])
    return f"{markdown(head, lines)}\n\n{note}{sources}"


def against_best_peer(found: Mapping[str, Row]) -> str:
    """Ratio of the fastest row of ours to the fastest peer, such as "1.02x (torch-flash)"."""
    ours = [row for name, row in found.items() if not is_peer(name)]
    peers = [row for name, row in found.items() if is_peer(name)]
    if not ours or not peers:
        return UNMEASURED
    best = min(ours, key=lambda row: float(row["p50_us"]))
    peer = min(peers, key=lambda row: float(row["p50_us"]))
    return f"{speedup(best, peer):.2f} ({peer['implementation']})"


def published_table(rows: Sequence[Row], cases: Sequence[Case], run_id: str | None) -> str:
    """Ratios to torch-math of every implementation of ours beside the published ones."""
    lines = []
    used: list[Row] = []
    names: list[str] = []
    chosen = [case for case in cases if case.published_vs_math is not None]
    for case in chosen:
        found = rows_of_case(rows, case, run_id)
        names += [name for name in found if not is_peer(name) and name not in names]
    names = names or ["archflash"]
    for case in chosen:
        found = rows_of_case(rows, case, run_id)
        used += found.values()
        ratios = [
            f"{speedup(found[name], found['torch-math']):.2f}"
            if name in found and "torch-math" in found
            else UNMEASURED
            for name in names
        ]
        lines.append([case.name, *ratios, f"{case.published_vs_math:.2f}"])
    head = ["case", *(f"{name} / torch-math" for name in names), "published, on an A10G"]
    return f"{markdown(head, lines)}\n\nTimes faster than torch-math.{source_note(used)}"


def host_table(path: Path) -> str:
    """Host cost of one eager call from the file that bench/host_overhead.py writes."""
    head = ["call", "p20 us", "p50 us", "p80 us"]
    if not path.exists():
        return markdown(head, [["archflash.attention", UNMEASURED, UNMEASURED, UNMEASURED]])
    data = json.loads(path.read_text())
    lines = [
        [name, *(f"{figures[p]:.2f}" for p in ("p20", "p50", "p80"))]
        for section in ("calls", "breakdown")
        for name, figures in data[section].items()
    ]
    return (
        f"{markdown(head, lines)}\n\nTime until one eager call returns, on a tiny shape; median of "
        f"{data['count']} interleaved calls. {data['gpu']}, torch {data['torch']}, commit "
        f"{data['commit']}, {data['date']}."
    )


def source_note(rows: Sequence[Row]) -> str:
    """Where the numbers of a table come from: one sentence for each run."""
    notes = []
    for run_id in dict.fromkeys(row["run_id"] for row in rows):
        run = [row for row in rows if row["run_id"] == run_id]
        row = run[0]
        dirty = " with local changes" if row["dirty"] == "1" else ""
        clocks = sorted({int(r["clocks_mhz"]) for r in run if r["clocks_mhz"].isdecimal()})
        clock = f", SM clock {clocks[0]} to {clocks[-1]} MHz" if clocks else ""
        notes.append(
            f" Run {run_id}: {row['gpu']}, driver {row['driver']}, CUDA {row['cuda']}, torch "
            f"{row['torch']}, commit {row['commit']}{dirty}, {row['date']}{clock}."
        )
    return "".join(notes)


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A markdown table: first column to the left, others to the right."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, rule, *lines])


def make_table(name: str, results: Path, run_id: str | None = None) -> str:
    """The table that a marker asks for.

    Args:
        name: "GPU/TABLE" as the top of this file says.
        results: folder of result files.
        run_id: take this run; None for the latest one of each case.

    Returns:
        Markdown text.

    Raises:
        ValueError: the name means nothing.
    """
    gpu, slash, table = name.partition("/")
    cases = load_cases()
    groups = sorted({group for case in cases for group in case.groups})
    if not slash or not re.fullmatch(r"[a-z0-9-]+", gpu):
        raise ValueError(f"bench:{name}: write bench:GPU/TABLE, such as bench:h200/fp32")
    if table == "host":
        return host_table(results / f"{gpu}-host.json")
    rows = load_rows(results / f"{gpu}.csv")
    if table == "published":
        return published_table(rows, cases, run_id)
    chosen = cases if table == "all" else [case for case in cases if table in case.groups]
    if not chosen:
        known = ", ".join(["all", "published", "host", *groups])
        raise ValueError(f"bench:{name}: no table {table!r}; there are {known}")
    return speed_table(rows, chosen, run_id)


def fill(text: str, results: Path, run_id: str | None = None) -> str:
    """Replaces what stands between the markers of a text.

    Args:
        text: a markdown document.
        results: folder of result files.
        run_id: see make_table.

    Returns:
        The document with fresh tables.

    Raises:
        ValueError: a marker without its partner, or with an unknown name.
    """
    kinds = ["close" if m.group(1) == "/bench" else "open" for m in MARKER.finditer(text)]
    if kinds != ["open", "close"] * (len(kinds) // 2):
        raise ValueError("every <!-- bench:... --> needs its own <!-- /bench --> below it")

    def table(match: re.Match[str]) -> str:
        body = make_table(match["name"], results, run_id)
        return f"{match['open']}\n{body}\n{match['close']}"

    return TABLE.sub(table, text)


def default_files() -> list[Path]:
    """README and every page of docs."""
    return [p for p in [REPOSITORY / "README.md", *sorted(REPOSITORY.glob("docs/**/*.md"))]
            if p.exists()]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Fills or checks documents; see the top of this file."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.report", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--check", action="store_true", help="write nothing, fail on stale tables")
    parser.add_argument("--run", metavar="RUN_ID", help="this run instead of each case's latest")
    parser.add_argument("--results", type=Path, default=RESULTS_FOLDER, metavar="FOLDER")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    stale = False
    for path in options.files or default_files():
        try:
            text = path.read_text()
            fresh = fill(text, options.results, options.run)
        except (OSError, ValueError) as error:
            print(f"{path}: {error}", file=sys.stderr)
            return 2
        if fresh == text:
            continue
        if options.check:
            stale = True
            lines = difflib.unified_diff(
                text.splitlines(), fresh.splitlines(), str(path), "from results", lineterm=""
            )
            print("\n".join(lines))
            print(f"{path}: stale tables; run python -m bench.report", file=sys.stderr)
        else:
            path.write_text(fresh)
            print(f"{path}: tables written")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
