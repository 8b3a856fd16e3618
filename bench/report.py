"""Writes the benchmark tables of README and docs from the result files.

    python -m bench.report [--check] [--run RUN_ID] [--results FOLDER] [FILE ...]

A table stands between `<!-- bench:GPU/TABLE -->` and `<!-- /bench -->`, each on a line of its own.
GPU is the name of a file in bench/results. TABLE is a group of bench/cases.toml (every kernel and
every peer), `plain` (what a plain call gets, beside the best peer, for the cases of the group
`readme`), `masks` (calls with mask tensors, of bench/masks.toml), `models` (calls of well-known
models, of bench/models.toml), `models-ampere` (the same calls by `ampere` beside its peers),
`published` (ratios to torch-math beside published ones), `host` (cost of one call on the host),
`end-to-end` (models with PyTorch's attention and with archflash) or `by-name` (small ones of them,
which train eagerly). But for the last column of `plain` candidates took turns. What a plain call
gets is what `archflash.explain` chooses for that GPU, so tables of speed need the installed
package, with PyTorch 2.10 or newer.

Exit status: 0 when the tables are up to date, 1 when --check finds one that is not, 2 when a marker
or a result file cannot be read.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from bench import models
from bench.cases import MASKS_FILE, Case, load_cases
from bench.model_tables import (
    UNMEASURED,
    by_name_table,
    end_to_end_table,
    host_table,
    markdown,
    models_table,
    source_note,
)
from bench.results import (
    EAGER,
    RESULTS_FOLDER,
    Row,
    call_features,
    figure,
    is_peer,
    is_sustained,
    load_rows,
    row_key,
    speedup,
)

REPOSITORY = Path(__file__).resolve().parent.parent
AGAINST = "what dispatch gives / best peer"
UNITS = "TFLOP/s, GB/s where marked."
TABLE = re.compile(
    r"^(?P<open><!-- bench:(?P<name>\S+) -->)[ ]*\n(?P<body>.*?)^(?P<close><!-- /bench -->)",
    re.DOTALL | re.MULTILINE,
)
MARKER = re.compile(r"^<!-- (bench:\S+|/bench) -->", re.MULTILINE)


def rows_of_case(
    rows: Sequence[Row], case: Case, run_id: str | None = None, *, sustained: bool = False
) -> dict[str, Row]:
    """The rows of one case, all of one run.

    Args:
        rows: rows of one GPU, in file order.
        case: the shape; rows whose calls ask for more than the shape are left out.
        run_id: the run; None for the latest one that has the case.
        sustained: the rows of candidates that ran alone, instead of those of candidates in turns.

    Returns:
        Row by implementation; empty when the case is unmeasured.
    """
    matching = [
        row
        for row in rows
        if row_key(row) == case.key and not call_features(row) and is_sustained(row) == sustained
    ]
    if run_id is None and matching:
        run_id = matching[-1]["run_id"]  # files are append-only
    return {row["implementation"]: row for row in matching if row["run_id"] == run_id}


def speed_table(rows: Sequence[Row], cases: Sequence[Case], run_id: str | None) -> str:
    """Speed of every kernel and every peer, and what dispatch gives against the best peer."""
    measured = {case.name: rows_of_case(rows, case, run_id) for case in cases}
    names = list(dict.fromkeys(name for found in measured.values() for name in found))
    kernels = [name for name in names if not is_peer(name)]
    peers = [name for name in names if is_peer(name)]
    head = ["case", *(kernels or ["archflash"]), *peers]
    head += ["a plain call runs", AGAINST]
    lines = []
    for case in cases:
        found = measured[case.name]
        speeds = [
            figure(found[name]) if name in found else UNMEASURED
            for name in [*(kernels or ["archflash"]), *peers]
        ]
        choice, given = what_dispatch_gives(rows, case, found)
        lines.append([case.name + unit_note(case), *speeds, choice, against(given, found)])
    rows_shown = [row for found in measured.values() for row in found.values()]
    eager = any(EAGER in row["features"] for row in rows_shown)
    note = " *: timed eagerly, not in a CUDA graph." if eager else ""
    return f"{markdown(head, lines)}\n\n{UNITS}{note}{source_note(rows_shown)}"


def plain_table(rows: Sequence[Row], cases: Sequence[Case], run_id: str | None) -> str:
    """What a plain call runs, its speed, and the best peer beside it."""
    measured = {case.name: rows_of_case(rows, case, run_id) for case in cases}
    alone = {case.name: rows_of_case(rows, case, run_id, sustained=True) for case in cases}
    head = ["case", "a plain call runs", "speed", "best peer", "its speed", AGAINST]
    head += ["the same, sustained"] if any(alone.values()) else []
    lines = []
    used: list[Row] = []
    for case in cases:
        found = measured[case.name]
        choice, given = what_dispatch_gives(rows, case, found)
        peer = best_peer(found)
        used += [row for row in (given, peer) if row is not None]
        last = [against(what_dispatch_gives(rows, case, alone[case.name])[1], alone[case.name])]
        lines.append(
            [
                case.name + unit_note(case),
                choice,
                figure(given) if given else UNMEASURED,
                peer["implementation"] if peer else UNMEASURED,
                figure(peer) if peer else UNMEASURED,
                f"{speedup(given, peer):.2f}" if given and peer else UNMEASURED,
                *(last if any(alone.values()) else []),
            ]
        )
    dates = sorted({row["date"] for row in used})
    machine = ", ".join(dict.fromkeys(f"{row['gpu']}, torch {row['torch']}" for row in used))
    source = f" {machine}, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}." if used else ""
    note = (
        f"{UNITS} Ratios are times within one run: above 1 the plain call is "
        "faster than the best peer. `torch` is PyTorch's own kernel."
    )
    if any(alone.values()):
        note += " Sustained: each kernel ran alone for a second, after a second of warming."
    return f"{markdown(head, lines)}\n\n{note}{source}"


def unit_note(case: Case) -> str:
    """What the name of a case needs behind it where its figures are no TFLOP/s."""
    return " (GB/s)" if case.is_decode else ""


def what_dispatch_gives(
    rows: Sequence[Row], case: Case, found: Mapping[str, Row]
) -> tuple[str, Row | None]:
    """What a call of a case gets when nothing is forced, and the row that measured it.

    Args:
        rows: rows of one GPU.
        case: the shape.
        found: the rows of that shape in one run, as rows_of_case gives them.

    Returns:
        The implementation that dispatch chooses today, and a row of that run: that of the chosen
        kernel, else that of the plain call (`archflash`), which ran what dispatch chose then. None
        where the run has neither.
    """
    if not found:
        return UNMEASURED, None
    some = next(iter(found.values()))
    chosen = dispatch_choice(some["gpu"], case)
    if chosen in found:
        return chosen, found[chosen]
    plain = [
        row
        for row in rows
        if row["run_id"] == some["run_id"]
        and row_key(row) == case.key
        and row["implementation"] == "archflash"
        and is_sustained(row) == is_sustained(some)
    ]
    return chosen, plain[-1] if plain else None


@cache
def dispatch_choice(gpu: str, case: Case) -> str:
    """The implementation that dispatch chooses for a case.

    Args:
        gpu: the GPU as its driver names it; one of the known devices.
        case: the shape.

    Returns:
        The name of a kernel, or `torch`.

    Raises:
        ValueError: the GPU is unknown, or PyTorch is older than 2.10, which prefers other kernels.
    """
    import torch
    from torch.torch_version import TorchVersion

    import archflash

    if not TorchVersion(torch.__version__) >= (2, 10):  # type: ignore[operator]
        raise ValueError(
            f"tables of speed say what dispatch chooses beside PyTorch 2.10 or newer; this is "
            f"{torch.__version__}"
        )
    dtype = {
        "fp32": torch.float32,
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
        "e4m3": torch.float8_e4m3fn,
    }[case.dtype]
    q, k, v = (
        torch.empty(case.b, heads, rows, dim, dtype=dtype, device="meta")
        for heads, rows, dim in (
            (case.hq, case.nq, case.d),
            (case.hkv, case.nk, case.d),
            (case.hkv, case.nk, case.dv),
        )
    )
    return archflash.explain(q, k, v, causal=case.causal, device=gpu).chosen


def best_peer(found: Mapping[str, Row]) -> Row | None:
    """The row of the fastest peer; None where no peer was measured."""
    peers = [row for name, row in found.items() if is_peer(name)]
    return min(peers, key=lambda row: float(row["p50_us"])) if peers else None


def against(given: Row | None, found: Mapping[str, Row]) -> str:
    """Ratio of what dispatch gives to the fastest peer, such as "1.02 (torch-flash)"."""
    peer = best_peer(found)
    if given is None or peer is None:
        return UNMEASURED
    return f"{speedup(given, peer):.2f} ({peer['implementation']})"


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


def masks_table(rows: Sequence[Row], cases: Sequence[Case], run_id: str | None) -> str:
    """Microseconds of the calls of bench/masks.toml, how many times faster the fastest kernel of
    ours is than the fastest peer, and its time relative to that of the same call without a mask,
    where the run has one.
    """
    names = {
        "hopper": "hopper",
        "ampere": "ampere",
        "hopper-packed": "hopper, packed sequences",
        "torch-varlen": "torch-varlen, packed sequences",
        "torch-cudnn": "torch-cudnn",
        "torch-efficient": "torch-efficient",
        "torch-flex": "FlexAttention",
    }
    measured = {case: masked_rows(rows, case, run_id) for case in cases}
    names = {
        name: shown for name, shown in names.items()
        if any(name in found for found in measured.values())
    }  # fmt: skip
    lines = []
    used: list[Row] = []
    for case, found in measured.items():
        used += [row for name, row in found.items() if name in names]
        cells = [f"{float(found[n]['p50_us']):.0f}" if n in found else "" for n in names]
        ours = [found[name] for name in ("hopper", "ampere") if name in found]
        given = min(ours, key=lambda row: float(row["p50_us"])) if ours else None
        peers = {n: row for n, row in found.items() if n in names and is_peer(n)}
        relative = ""
        if given is not None and case.mask != "none":
            plain = dataclasses.replace(case, mask="none")
            without = masked_rows(rows, plain, given["run_id"]).get(given["implementation"])
            if without is not None:
                relative = f"{float(given['p50_us']) / float(without['p50_us']):.2f}"
        lines.append([case.name, *cells, against(given, peers), relative])
    head = ["us", *names.values(), "ours / best peer", "time / without a mask"]
    return f"{markdown(head, lines)}\n\nMedians.{source_note(used)}"


def masked_rows(rows: Sequence[Row], case: Case, run_id: str | None) -> dict[str, Row]:
    """The rows of a case of bench/masks.toml by implementation: of a run, or of the latest one that
    has the case.
    """
    matching = [
        row
        for row in rows
        if row_key(row) == case.key and f"mask={case.mask}" in call_features(row)
    ]
    if run_id is None and matching:
        run_id = matching[-1]["run_id"]
    return {row["implementation"]: row for row in matching if row["run_id"] == run_id}


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
    if table == "end-to-end":
        return end_to_end_table(results / f"{gpu}-end-to-end.json")
    if table == "by-name":
        return by_name_table(results / f"{gpu}-end-to-end.json")
    if table == "models":
        return models_table(load_rows(results / f"models-{gpu}.csv"))
    forced = table.removeprefix("models-")
    if table != forced and forced in models.PEERS:
        return models_table(load_rows(results / f"{table}-{gpu}.csv"), forced=forced)
    rows = load_rows(results / f"{gpu}.csv")
    if table == "masks":
        return masks_table(rows, load_cases(MASKS_FILE), run_id)
    if table == "published":
        return published_table(rows, cases, run_id)
    if table == "plain":
        return plain_table(rows, [case for case in cases if "readme" in case.groups], run_id)
    chosen = [case for case in cases if table in case.groups]
    if not chosen:
        others = ("plain", "masks", "published", "models", "host", "end-to-end", "by-name")
        of_one = [f"models-{name}" for name in models.PEERS]
        known = ", ".join([*others, *of_one, *groups])
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
