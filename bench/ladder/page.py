"""What the page of the ladders says: tables and plots, made from results, counters and definitions.

`python -m bench.ladder NAME --write` writes docs/ladder-NAME.svg, and docs/ladders.md anew.
"""

from __future__ import annotations

import html
import json
import subprocess
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from bench.ladder.definitions import FOLDER, LADDERS, Ladder, Rung
from bench.ladder.rungs import Counters
from bench.results import RESULTS_FOLDER, Row, load_rows, row_key

REPOSITORY = FOLDER.parents[1]
UNMEASURED = "unmeasured"


def row_name(ladder: Ladder, rung: Rung) -> str:
    """A rung in the column `implementation` of result files."""
    return f"{ladder.name}/{rung.name}"


def names(ladder: Ladder, extra: Sequence[str] = ()) -> list[tuple[str, str, str]]:
    """The lines of a table: what is shown, how result rows name it, and what it adds."""
    lines = [(rung.name, row_name(ladder, rung), rung.idea) for rung in ladder.rungs]
    lines += [(name, name, "the kernel that is shipped") for name in ladder.ours]
    lines += [(name, name, "PyTorch") for name in ladder.peers]
    return lines + [(name, name, "") for name in extra]


def speeds(ladder: Ladder, rows: Sequence[Row], cases: Sequence[str]) -> list[list[str]]:
    """TFLOP/s: a line for each kernel, a column for each case."""
    keys = {case.name: case.key for case in ladder.cases()}
    found = {(row["implementation"], row_key(row)): float(row["tflops"]) for row in rows}
    lines = [["kernel", "what it adds", *cases]]
    for shown, name, idea in names(ladder):
        cells = [found.get((name, keys[case])) for case in cases]
        lines.append([shown, idea, *("-" if x is None else f"{x:.1f}" for x in cells)])
    return lines


def counter_lines(ladder: Ladder, counters: Mapping[str, Counters]) -> list[list[str]]:
    """What the simulator counts: a line for each rung."""
    lines = [["rung", "what it adds", "right", "instructions", "wavefronts", "worst"]]
    for rung in ladder.rungs:
        found = counters[rung.name]
        lines.append([
            rung.name, rung.idea, "no" if found.problem else "yes",
            f"{found.instructions:.0f}", f"{found.conflicts:.2f}", found.conflicts_of or "-",
        ])  # fmt: skip
    return lines


# --- counters that are kept ---


def counters_file(ladder: Ladder) -> Path:
    """Where the counters of a ladder are kept."""
    return FOLDER / ladder.name / "counters.json"


def nvcc_version(nvcc: str) -> str:
    """Version of nvcc, such as "V13.0.88"."""
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    return next((word for word in said.split() if word[0] == "V" and word[1:2].isdigit()), "?")


def save_counters(ladder: Ladder, counters: Mapping[str, Counters], nvcc: str) -> None:
    """Keeps the counters of a ladder, with the compiler that they hold for."""
    rungs = {name: asdict(found) for name, found in counters.items()}
    made = {"nvcc": nvcc_version(nvcc), "rungs": rungs}
    counters_file(ladder).write_text(json.dumps(made, indent=1) + "\n")


def load_counters(ladder: Ladder) -> dict[str, Counters]:
    """The counters that were kept; none where there is no file."""
    path = counters_file(ladder)
    if not path.exists():
        return {}
    rungs = json.loads(path.read_text())["rungs"]
    return {name: Counters(**found) for name, found in rungs.items()}


# --- results that are kept ---


def measured(ladder: Ladder, results: Path = RESULTS_FOLDER) -> dict[str, dict[str, list[Row]]]:
    """The rows of a ladder's last run for each case: by GPU, then by the case's name."""
    found: dict[str, dict[str, list[Row]]] = {}
    rungs = {row_name(ladder, rung) for rung in ladder.rungs}
    for path in sorted(results.glob("ladder-*.csv")):
        rows = load_rows(path)
        for case in ladder.cases():
            here = [row for row in rows if row_key(row) == case.key]
            runs = [row["run_id"] for row in here if row["implementation"] in rungs]
            if runs:
                last = [row for row in here if row["run_id"] == runs[-1]]
                found.setdefault(last[0]["gpu"], {})[case.name] = last
    return found


# --- the plot ---

WIDTH, LEFT, BAR, GAP, HEAD = 860, 190, 16, 10, 34
COLOURS = ("#3a6ea5", "#c2703d", "#5a8f5a", "#8a6aa8")


def plot(ladder: Ladder, counters: Mapping[str, Counters], results: Path = RESULTS_FOLDER) -> str:
    """An SVG with a bar for each kernel: measured and published TFLOP/s where there are any, else
    the simulator's warp-instructions, which are no speed and are labelled so.
    """
    series: list[tuple[str, dict[str, float]]] = []
    for gpu, cases in measured(ladder, results).items():
        case, rows = next(iter(cases.items()))
        shown = {name: text for text, name, _ in names(ladder)}
        values = {shown.get(r["implementation"], ""): float(r["tflops"]) for r in rows}
        series.append((f"{gpu}, {case}: TFLOP/s", values))
    series += [(f"{column.title}: TFLOP/s", column.tflops) for column in ladder.columns]
    if not series and counters:
        values = {name: found.instructions for name, found in counters.items()}
        series = [("no speed: warp-instructions for 1024 scores, on the simulator", values)]
    order = [text for text, _, _ in names(ladder, extra_names(ladder))]
    lines = [name for name in order if any(name in values for _, values in series)]
    top = HEAD + 20 * len(series)
    step = len(series) * BAR + GAP
    height = top + step * len(lines) + 8
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="sans-serif" font-size="13" role="img">',
        f'<title>{html.escape(ladder.title)}</title><rect width="100%" height="100%" '
        'fill="#ffffff"/>',
        f'<text x="10" y="20" font-size="15">The ladder {ladder.name}: '
        f"{html.escape(ladder.title)}</text>",
    ]
    for i, (title, _) in enumerate(series):
        y = HEAD + 20 * i
        out.append(f'<rect x="10" y="{y}" width="12" height="12" fill="{COLOURS[i % 4]}"/>')
        out.append(f'<text x="28" y="{y + 11}">{html.escape(title)}</text>')
    largest = max((x for _, values in series for x in values.values()), default=1.0)
    for i, name in enumerate(lines):
        y = top + step * i
        middle = y + len(series) * BAR / 2 + 5
        out.append(f'<text x="{LEFT - 8}" y="{middle:g}" text-anchor="end">{name}</text>')
        for j, (_, values) in enumerate(series):
            if name not in values:
                continue
            width = (WIDTH - LEFT - 70) * values[name] / largest
            at = y + BAR * j
            out.append(
                f'<rect x="{LEFT}" y="{at}" width="{width:.1f}" height="{BAR - 2}" '
                f'fill="{COLOURS[j % 4]}"/>'
            )
            number = f"{values[name]:.1f}" if largest < 1000 else f"{values[name]:.0f}"
            out.append(f'<text x="{LEFT + width + 6:.1f}" y="{at + 12}">{number}</text>')
    return "\n".join([*out, "</svg>", ""])


def extra_names(ladder: Ladder) -> list[str]:
    """Kernels that only a published column has."""
    known = {text for text, _, _ in names(ladder)}
    extra = [name for column in ladder.columns for name in column.tflops if name not in known]
    return list(dict.fromkeys(extra))


# --- the page ---


def table(lines: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table whose first two columns are text."""
    rule = ["---", "---", *["---:"] * (len(lines[0]) - 2)]
    return ["| " + " | ".join(line) + " |" for line in [lines[0], rule, *lines[1:]]]


def render(ladder: Ladder, results: Path = RESULTS_FOLDER) -> str:
    """The section of a ladder."""
    counters = load_counters(ladder)
    runs = measured(ladder, results)
    heads, n = ladder.simulated
    named = names(ladder, extra_names(ladder))
    cases = [case.name for case in ladder.cases()]
    columns: list[tuple[str, dict[str, str]]] = []
    notes = []
    for gpu, by_case in runs.items():
        for case, rows in by_case.items():
            values = {row["implementation"]: f"{float(row['tflops']):.1f}" for row in rows}
            columns.append((f"{gpu}, {case}" if len(runs) > 1 else case, values))
        row = next(iter(by_case.values()))[0]
        notes.append(f"{gpu}: driver {row['driver']}, torch {row['torch']}, {row['date']}.")
    if not runs:
        columns += [(f"H200, {case}", {}) for case in cases[:1]]
    columns += [
        (column.title, {k: f"{v:.1f}" for k, v in column.tflops.items()})
        for column in ladder.columns
    ]
    rows_of_rungs = {row_name(ladder, rung) for rung in ladder.rungs}
    lines = [["kernel", "what it adds", *(title for title, _ in columns)]]
    for text, name, idea in named:
        cells = []
        for _, values in columns:
            own = name in rows_of_rungs or name in (*ladder.ours, *ladder.peers)
            missing = UNMEASURED if own and not values else "-"
            cells.append(values.get(name) or values.get(text) or missing)
        lines.append([text, idea, *cells])
    said = [
        ["rung", "what it is for, and what it bought", "instructions", "wavefronts over the least"]
    ]
    for rung in ladder.rungs:
        found = counters[rung.name]
        worst = f" ({found.conflicts_of})" if found.conflicts_of else ""
        said.append(
            [rung.name, rung.bought, f"{found.instructions:.0f}", f"{found.conflicts:.2f}{worst}"]
        )
    size = f"{heads} heads" if heads > 1 else "one head"
    folder = f"bench/ladder/{ladder.name}"
    return "\n".join(
        [
            f"## The ladder {ladder.name}: {ladder.title}",
            "",
            *wrapped(f"{ladder.about} Kernels: [{folder}](../{folder}).", *notes),
            "",
            f"![Bars for each kernel of the ladder {ladder.name}](ladder-{ladder.name}.svg)",
            "",
            *table(lines),
            "",
            *wrapped(f"Counters of {size} of {n} rows:"),
            "",
            *table(said),
            "",
        ]
    )


def render_page() -> str:
    """The text of docs/ladders.md."""
    head = [
        "# Kernels, one idea at a time",
        "",
        *wrapped(
            "Each ladder leads to a kernel of src. Each of its rungs is one small file that adds "
            "one idea to the one before it. In a clone with nvcc, this checks every rung against "
            "float64 and times it on the GPU beside PyTorch's kernels; without a GPU it runs the "
            "rungs on the simulator (`python -m bench.ladder ampere` is the same):"
        ),
        "",
        "```sh",
        *(f"archflash ladder {ladder.name}" for ladder in LADDERS),
        "```",
        "",
        *wrapped(
            "Speeds are in TFLOP/s (4\\*B\\*H\\*N\\*N\\*D operations, half when causal). "
            "Counters are the simulator's: warp-instructions of PTX for 1024 scores, and "
            "wavefronts of shared memory over the fewest that its accesses need (in brackets the "
            "worst opcode). They are no speed: a GPU runs machine code, in which ptxas has "
            "combined some of these instructions."
        ),
        "",
    ]
    return "\n".join([*head, *(render(ladder) for ladder in LADDERS)])


def wrapped(*sentences: str) -> list[str]:
    """A paragraph in lines of at most 130 characters."""
    return textwrap.wrap(" ".join(sentences), 130, break_long_words=False)


def write(ladder: Ladder) -> None:
    """Writes a ladder's plot, and the page of all ladders."""
    docs = REPOSITORY / "docs"
    (docs / f"ladder-{ladder.name}.svg").write_text(plot(ladder, load_counters(ladder)))
    (docs / "ladders.md").write_text(render_page())
