"""The page of `archflash show`: one HTML file without scripts, that loads nothing else."""

from __future__ import annotations

import base64
import html
import math
import struct
import zlib
from collections.abc import Sequence

from torch import Tensor

from examples.minilm.heads import Compared, Heads, Shown

HEAT = (217, 98, 43)  # a colour that stands out on white and on black; the weight is its opacity
SERIES = ("#d9622b", "#3f7fbf", "#4e9a52", "#a05fb5", "#b08a1e", "#c2506e", "#6b7a8f")
WIDTH, HEIGHT, LEFT, BOTTOM = 640, 240, 64, 34  # of a chart

STYLE = """
:root { color-scheme: light dark; --page: #fcfcfa; --ink: #1d1f23; --faint: #6d7178;
  --line: #d8d9dc; --cell: #ffffff; }
@media (prefers-color-scheme: dark) {
  :root { --page: #15171b; --ink: #e8e8e6; --faint: #9a9ea6; --line: #363a42; --cell: #0d0e11; }
}
body { background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
  max-width: 1080px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 19px; margin: 36px 0 4px; }
p, figcaption, th { color: var(--faint); } p { margin: 4px 0 14px; max-width: 76ch; }
.tokens span { display: inline-block; border: 1px solid var(--line); border-radius: 4px;
  padding: 0 5px; margin: 0 3px 4px 0; font-size: 13px; color: var(--ink); }
.layer { display: grid; grid-template-columns: 64px repeat(12, minmax(0, 1fr)); gap: 6px;
  align-items: center; margin-bottom: 6px; font-size: 13px; color: var(--faint); }
.four { display: grid; grid-template-columns: repeat(4, minmax(0, 1fr)); gap: 16px; }
figure { margin: 0; } figcaption { font-size: 13px; text-align: center; }
figure img { width: 100%; aspect-ratio: 1; background: var(--cell); border: 1px solid var(--line);
  box-sizing: border-box; image-rendering: pixelated; display: block; }
.layer figure:hover { transform: scale(3.2); z-index: 1; position: relative; }
table { border-collapse: collapse; margin: 8px 0 16px; font-size: 14px; }
th, td { text-align: left; padding: 3px 14px 3px 0; border-bottom: 1px solid var(--line); }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 20px; }
.mark { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 7px; }
svg { width: 100%; height: auto; } svg text { fill: var(--faint); font-size: 12px; }
svg .grid { stroke: var(--line); } .wrong { color: #d03c3c; font-weight: 600; }
"""


def render(shown: Shown) -> str:
    """The whole page."""
    body = [
        "<h1>Where attention looks, and how exact it is</h1>",
        "<p>A map has a row for each query and a column for each key. The colour grows with the "
        "square root of the weight, relative to the largest of the map.</p>",
    ]
    if shown.layers:
        tokens = "".join(f"<span>{html.escape(token)}</span>" for token in shown.tokens)
        body += [
            "<h2>all-MiniLM-L6-v2, layer by layer, head by head</h2>",
            f'<p class="tokens">{tokens}</p>',
            *(_layer(layer) for layer in shown.layers),
        ]
    body += [
        "<h2>Four synthetic heads</h2>",
        "<p>Keys are unit vectors, so that each query can be the row of scores that it gets.</p>",
        '<div class="four">' + "".join(_maps(shown.synthetic)) + "</div>",
    ]
    for compared in shown.compared:
        body += _comparison(compared)
    return "\n".join([
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        "<title>archflash show</title>",
        f"<style>{STYLE}</style></head><body>",
        *body,
        "</body></html>",
        "",
    ])  # fmt: skip


# --- heat maps ---


def _layer(heads: Heads) -> str:
    return f'<div class="layer"><div>{heads.title}</div>' + "".join(_maps(heads)) + "</div>"


def _maps(heads: Heads) -> list[str]:
    maps = []
    for name, weights in zip(heads.names, heads.weights, strict=True):
        said = html.escape(name)
        source = base64.b64encode(heat_map(weights)).decode()
        maps.append(
            f'<figure><img alt="{heads.title}, {said}" '
            f'src="data:image/png;base64,{source}"><figcaption>{said}</figcaption></figure>'
        )
    return maps


def heat_map(weights: Tensor) -> bytes:
    """A PNG with one pixel for each weight, transparent where it is 0.

    Args:
        weights: (rows, columns), none negative.
    """
    rows, columns = weights.shape
    levels = (weights / weights.max()).sqrt().mul(255).round().int().tolist()
    lines = b"".join(b"\0" + bytes(line) for line in levels)
    palette = bytes(HEAT) * 256

    def chunk(kind: bytes, data: bytes) -> bytes:
        checked = kind + data
        return struct.pack(">I", len(data)) + checked + struct.pack(">I", zlib.crc32(checked))

    return b"".join([
        b"\x89PNG\r\n\x1a\n",
        chunk(b"IHDR", struct.pack(">IIBBBBB", columns, rows, 8, 3, 0, 0, 0)),
        chunk(b"PLTE", palette),
        chunk(b"tRNS", bytes(range(256))),
        chunk(b"IDAT", zlib.compress(lines, 9)),
        chunk(b"IEND", b""),
    ])  # fmt: skip


# --- errors ---


def _comparison(compared: Compared) -> list[str]:
    title = html.escape(compared.heads.title)
    body = [
        f"<h2>Error against float64: {title}</h2>",
        "<p>The largest absolute difference of the outputs. The rule allows twice the error of the "
        "same formula in plain PyTorch at the same dtype, and two units in the last place. Where "
        "implementations have the same error, the later ones are drawn smaller on top.</p>",
        "<table><tr><th>implementation</th><th>where</th><th>largest error</th><th>allowed</th>"
        "<th>error rule</th></tr>",
    ]
    for number, found in enumerate(compared.errors):
        verdict = "met" if found.report.ok else '<span class="wrong">broken</span>'
        body.append(
            f"<tr><td>{_mark(number)}{found.implementation}</td><td>{html.escape(found.where)}</td>"
            f'<td class="number">{found.report.max_error:.2e}</td>'
            f'<td class="number">{found.report.bound:.2e}</td><td>{verdict}</td></tr>'
        )
    for name, why in compared.refused.items():
        body.append(f'<tr><td>{name}</td><td colspan="4">did not run: {html.escape(why)}</td></tr>')
    body.append("</table>")
    if compared.errors:
        heads, errors = compared.heads, compared.errors
        positions = [str(i) for i in range(heads.q.shape[2])]
        lines = chart([e.by_position.tolist() for e in errors], positions, joined=True)
        dots = chart([e.by_head.tolist() for e in errors], heads.names, joined=False)
        body.append(
            '<div class="charts">'
            f"<figure>{lines}<figcaption>by position</figcaption></figure>"
            f"<figure>{dots}<figcaption>by head</figcaption></figure></div>"
        )
    return body


def _mark(number: int) -> str:
    return f'<span class="mark" style="background:{SERIES[number % len(SERIES)]}"></span>'


def chart(series: Sequence[Sequence[float]], labels: Sequence[str], *, joined: bool) -> str:
    """An SVG of some series on a logarithmic scale.

    Args:
        series: of one length; numbers that are 0 are drawn at the bottom.
        labels: along the x axis; only as many are written as there is room for.
        joined: lines instead of dots.
    """
    numbers = [x for values in series for x in values if x > 0]
    low = math.floor(math.log10(min(numbers, default=1e-9)))
    high = math.ceil(math.log10(max(numbers, default=1.0))) + (not numbers)
    high += high == low
    step = (WIDTH - LEFT - 12) / max(1, len(labels) - (1 if joined else 0))
    first = LEFT if joined else LEFT + step / 2

    def at(i: int, x: float) -> tuple[float, float]:
        share = (math.log10(x) - low) / (high - low) if x > 0 else 0.0
        return first + i * step, 8 + (HEIGHT - BOTTOM - 8) * (1 - share)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    for power in range(low, high + 1):
        y = at(0, 10.0**power)[1]
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - 12}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">1e{power}</text>'
        )
    every = math.ceil(len(labels) * max(map(len, labels)) * 8 / (WIDTH - LEFT))
    for i in range(0, len(labels), every):
        parts.append(
            f'<text x="{at(i, 0)[0]:.1f}" y="{HEIGHT - 12}" text-anchor="middle">'
            f"{html.escape(labels[i])}</text>"
        )
    for number, values in enumerate(series):
        colour = SERIES[number % len(SERIES)]
        size = 2 + 1.5 * (len(series) - 1 - number)  # so that no series hides another
        points = [at(i, x) for i, x in enumerate(values)]
        if joined:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            parts.append(
                f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{size}"/>'
            )
        else:
            parts += [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size / 2 + 2}" fill="{colour}"/>'
                for x, y in points
            ]
    return "".join([*parts, "</svg>"])
