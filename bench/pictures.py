"""Draws speed over sequence length, from the rows of `python -m bench.models --lengths`.

    python -m bench.pictures [--results FOLDER] [--to FOLDER] [GPU]

Writes speed-light.svg and speed-dark.svg, which the README shows: TFLOP/s of a plain call and of
its peers in CUDA graphs, forward and both passes, head dimensions 64 and 128, causal and not. GPU
is the name of a file in bench/results, `h200` by default. Needs matplotlib
(`pip install matplotlib`). Exit status 2 where there are no such rows.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import models
from bench.cases import Case
from bench.results import RESULTS_FOLDER, Row, load_rows, row_key

DOCS = Path(__file__).resolve().parent.parent / "docs"
# Name of the row, name in the legend, and colour on a light and on a dark page.
LINES = (
    ("archflash", "archflash", "#0b7a3b", "#3fcf7f"),
    ("torch-flash", "PyTorch, flash", "#8a8a8a", "#9a9a9a"),
    ("torch-cudnn", "PyTorch, cuDNN", "#c2571a", "#f0905a"),
    ("fa3", "FlashAttention-3", "#3d63c9", "#8aa8ff"),
)
THEMES = {"light": ("#1f2328", "#d0d7de", 2), "dark": ("#e6edf3", "#3d444d", 3)}


def speed(rows: Sequence[Row], case: Case, name: str, *, both: bool) -> float | None:
    """TFLOP/s of a candidate in the latest run that timed it in a graph; None without one."""
    timed = models.rows_of(rows, case, both=both, eager=False)
    found = [row for row in timed if row["implementation"] == name]
    return float(found[-1]["tflops"]) if found else None


def draw(rows: Sequence[Row], theme: str, to: Path) -> None:
    """Writes the picture for one kind of page."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    ink, grid, column = THEMES[theme]
    style: Mapping[str, Any] = {
        "svg.fonttype": "none", "svg.hashsalt": "archflash", "font.family": "sans-serif",
        "font.size": 9, "text.color": ink, "axes.labelcolor": ink, "xtick.color": ink,
        "ytick.color": ink, "axes.edgecolor": grid, "axes.spines.top": False,
        "axes.spines.right": False,
    }  # fmt: skip
    with pyplot.rc_context(dict(style)):
        figure, panels = pyplot.subplots(2, 4, figsize=(11, 4.6), sharex=True)
        cases = models.length_cases()
        kinds = [(d, causal) for d in (64, 128) for causal in (False, True)]
        for both, line in zip((False, True), panels, strict=True):
            for (d, causal), panel in zip(kinds, line, strict=True):
                mine = [case for case in cases if case.d == d and case.causal == causal]
                for number, look in enumerate(LINES):
                    points = [(case.nq, speed(rows, case, look[0], both=both)) for case in mine]
                    known = [(n, value) for n, value in points if value is not None]
                    if known:
                        panel.plot(
                            *zip(*known, strict=True), label=look[1], color=look[column],
                            marker="o", markersize=3, linewidth=2 if number == 0 else 1.2,
                            zorder=3 if number == 0 else 2,
                        )  # fmt: skip
                if not panel.lines:
                    panel.text(0.5, 0.5, "unmeasured", transform=panel.transAxes, ha="center")
                passes = "forward and backward" if both else "forward"
                panel.set_title(f"{passes}, D {d}{', causal' if causal else ''}", fontsize=9)
                panel.set_xscale("log", base=2)
                panel.set_xticks(models.LENGTHS, [_short(n) for n in models.LENGTHS])
                panel.set_ylim(bottom=0)
                panel.grid(axis="y", color=grid, linewidth=0.6)
        for panel in panels[:, 0]:
            panel.set_ylabel("TFLOP/s")
        for panel in panels[1]:
            panel.set_xlabel("sequence length")
        handles, labels = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="upper center", ncols=len(labels), frameon=False)
        figure.tight_layout(rect=(0, 0, 1, 0.94))
        metadata = {"Date": None, "Creator": None}
        figure.savefig(to, format="svg", transparent=True, metadata=metadata)
        pyplot.close(figure)


def _short(rows: int) -> str:
    return f"{rows // 1024}k" if rows >= 1024 else str(rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Draws both pictures; see the top of this file."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.pictures", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("gpu", nargs="?", default="h200", metavar="GPU")
    parser.add_argument("--results", type=Path, default=RESULTS_FOLDER, metavar="FOLDER")
    parser.add_argument("--to", type=Path, default=DOCS, metavar="FOLDER")
    options = parser.parse_args(argv)
    path = options.results / f"models-{options.gpu}.csv"
    rows = load_rows(path) if path.exists() else []
    keys = {case.key for case in models.length_cases()}
    if not any(row_key(row) in keys for row in rows):
        print(f"{path} has no rows of python -m bench.models --lengths", file=sys.stderr)
        return 2
    for theme in THEMES:
        draw(rows, theme, options.to / f"speed-{theme}.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
