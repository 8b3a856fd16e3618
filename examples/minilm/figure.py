"""The picture of `archflash show`, by matplotlib."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from examples.minilm.heads import Compared, Heads, Shown


def require() -> Any:
    """The module matplotlib.figure.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ValueError(
            "pictures need matplotlib: pip install matplotlib; a page (.html) does not"
        ) from error


def save(shown: Shown, file: Path) -> None:
    """Writes the picture.

    Args:
        shown: what it shows.
        file: .png, .svg or .pdf.
    """
    figure = require().Figure(figsize=(14, 2 + 1.25 * len(shown.layers) + 3 + 3), dpi=110)
    heights = [1.25 * len(shown.layers) or 0.01, 3, 3 * len(shown.compared)]
    top, middle, bottom = figure.subfigures(3, 1, height_ratios=heights)
    if shown.layers:
        top.suptitle(f"all-MiniLM-L6-v2: {shown.sentence}", fontsize=10)
        axes = top.subplots(len(shown.layers), len(shown.layers[0].names), squeeze=False)
        for heads, row in zip(shown.layers, axes, strict=True):
            _maps(heads, row, with_names=heads is shown.layers[0])
            row[0].set_ylabel(heads.title, fontsize=8)
    middle.suptitle("synthetic heads", fontsize=10)
    _maps(shown.synthetic, middle.subplots(1, len(shown.synthetic.names)), with_names=True)
    charts = bottom.subplots(len(shown.compared), 2, squeeze=False)
    bottom.subplots_adjust(hspace=0.5)
    for compared, row in zip(shown.compared, charts, strict=True):
        _errors(compared, row)
    figure.savefig(file)


def _maps(heads: Heads, axes: Any, *, with_names: bool) -> None:
    for name, weights, axis in zip(heads.names, heads.weights, axes, strict=True):
        axis.imshow((weights / weights.max()).sqrt().tolist(), cmap="Oranges", vmin=0, vmax=1)
        axis.set_xticks([])
        axis.set_yticks([])
        if with_names:
            axis.set_title(name, fontsize=8)


def _errors(compared: Compared, axes: Any) -> None:
    by_position, by_head = axes
    for number, found in enumerate(reversed(compared.errors), 1):
        label = f"{found.implementation} ({found.where})"
        size = 1.2 * (len(compared.errors) + 1 - number)  # so that no series hides another
        by_position.plot(found.by_position.tolist(), label=label, linewidth=size)
        by_head.plot(found.by_head.tolist(), "o", label=label, markersize=2 * size + 2)
    for axis, what in ((by_position, "position"), (by_head, "head")):
        axis.set_yscale("log")
        axis.set_title(f"{compared.heads.title}: error against float64 by {what}", fontsize=9)
    by_head.set_xticks(range(len(compared.heads.names)), compared.heads.names, fontsize=7)
    by_position.legend(fontsize=6)
