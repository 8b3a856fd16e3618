"""Writes the benchmark tables of README and docs from the result files.

    python -m bench.report [--check] [--run RUN_ID] [--results FOLDER] [FILE ...]

A table stands between `<!-- bench:GPU/TABLE -->` and `<!-- /bench -->`, each on a line of its own.
GPU is the name of a file in bench/results. TABLE is a group of bench/cases.toml (every kernel and
every peer), `plain` (what a plain call gets, beside the best peer, for the cases of the group
`readme`), `sustained` (every candidate timed alone, for the cases of 16 and 8 bits with more than
one query), `masks` (calls with mask tensors, of bench/masks.toml), `models` (calls of well-known
models, of bench/models.toml), `models-ampere` (the same calls by `ampere` beside its peers),
`published` (ratios to torch-math beside published ones), `host` (cost of one call on the host),
`end-to-end` (models with PyTorch's attention and with archflash) or `by-name` (small ones of them,
which train eagerly). In all tables but `sustained`,
and but for the last column of `plain`, candidates took turns. What a plain call gets is what
`archflash.explain` chooses for that GPU, so tables of speed need the installed package, with
PyTorch 2.10 or newer.

Exit status: 0 when the tables are up to date, 1 when --check finds one that is not, 2 when a marker
or a result file cannot be read.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from bench import models
from bench.cases import MASKS_FILE, Case, load_cases
from bench.host_overhead import ratio_to_peer
from bench.results import (
    EAGER,
    RESULTS_FOLDER,
    Row,
    call_features,
    figure,
    is_peer,
    is_sustained,
    load_rows,
    power_w,
    row_key,
    speedup,
)

REPOSITORY = Path(__file__).resolve().parent.parent
UNMEASURED = "unmeasured"
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


def speed_table(
    rows: Sequence[Row], cases: Sequence[Case], run_id: str | None, *, sustained: bool = False
) -> str:
    """Speed of every kernel and every peer, and what dispatch gives against the best peer."""
    measured = {case.name: rows_of_case(rows, case, run_id, sustained=sustained) for case in cases}
    names = list(dict.fromkeys(name for found in measured.values() for name in found))
    kernels = [name for name in names if not is_peer(name)]
    peers = [name for name in names if is_peer(name)]
    head = ["case", *(kernels or ["archflash"]), *peers]
    head += [AGAINST] if sustained else ["a plain call runs", AGAINST]
    lines = []
    for case in cases:
        found = measured[case.name]
        speeds = [
            figure(found[name]) if name in found else UNMEASURED
            for name in [*(kernels or ["archflash"]), *peers]
        ]
        choice, given = what_dispatch_gives(rows, case, found)
        last = [against(given, found)] if sustained else [choice, against(given, found)]
        lines.append([case.name + unit_note(case), *speeds, *last])
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
        notes.append(
            f" {gpu}, driver {driver}, CUDA {cuda}, torch {torch}{clock}. "
            f"Run{'s' if len(runs) > 1 else ''} {', '.join(runs.values())}."
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
    if table == "sustained":
        many = [case for case in cases if case.dtype != "fp32" and not case.is_decode]
        return speed_table(rows, many, run_id, sustained=True)
    chosen = [case for case in cases if table in case.groups]
    if not chosen:
        others = (
            "plain",
            "sustained",
            "masks",
            "published",
            "models",
            "host",
            "end-to-end",
            "by-name",
        )
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
