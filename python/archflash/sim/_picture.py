"""Pictures of traced CTAs as SVG or PNG: what each warp did, and which copies were in flight."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from archflash.sim._trace import Batch, Region, Slice, Timeline

WIDTH = 1200
MARGIN = 24
LABELS = 80  # width of the labels to the left of the bars
BAR = 30
COPIES = 22  # height of the copies below a warp's bar
MAP = 96  # height of the map of tensor memory
GAP = 14
LINE = 23  # height of a line of text
ENTRY = 27  # distance between two entries of the legend

# Regions with a smaller share of the instructions are drawn as the kernel's other code.
SMALLEST_SHARE = 0.02
MATRIX = ("#2f6fde", "#12a594", "#6e56cf", "#0b7a8f")
SHADES = {
    "matrix": MATRIX,
    "arithmetic": MATRIX,
    "copies": ("#ffb224", "#ffcf70", "#d98200"),
    "load": ("#f2a20c", "#d98200", "#ffc653"),
    "exponential": ("#cf3897", "#a3307f", "#e879b9"),
    "store": ("#2f9e44", "#5cb96d"),
    "other": ("#8d99ab", "#a8b2c1", "#6f7c90"),
}
TECHNIQUES = {
    "matrix": " (mma)",
    "copies": " (cp.async)",
    "exponential": " (ex2)",
    "arithmetic": " (fma)",
}
OTHER = "#cdd4de"
WAIT = "#ffffff"
# Tensor memory is drawn as a map. Its columns run down; each part has the colour of its writer.
TENSOR_MEMORY, TENSOR_COLUMNS = "tensor memory", 512
WRITERS = {
    "allocated": ("#f4f6f9", "allocated"),
    "tcgen05.mma": (MATRIX[0], "results of products"),
    "tcgen05.st": ("#cf3897", "stored by warps"),
    "tcgen05.cp": ("#ffb224", "copied from shared memory"),
    "tcgen05.shift": ("#8d99ab", "shifted"),
}
USE = re.compile(r"(.+): columns (\d+)-(\d+)")
BUFFERS = ("#8a6d3b", "#e8590c", "#7c9a12", "#5c7cfa", "#868e96")
PAPER, INK, FAINT, EDGE = "#ffffff", "#1c2430", "#5b6675", "#d5dbe3"


@dataclass
class Drawing:
    """Shapes on a sheet of WIDTH x `height`, in pixels from the upper left corner."""

    height: float
    shapes: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def rectangle(
        self, x: float, y: float, width: float, height: float, fill: str, edge: str = ""
    ) -> None:
        """Draws a filled rectangle, with an edge unless `edge` is empty."""
        self.shapes.append(
            ("rectangle", {"x": x, "y": y, "w": width, "h": height, "fill": fill, "edge": edge})
        )

    def polygon(self, points: Sequence[tuple[float, float]], fill: str) -> None:
        """Draws a filled polygon."""
        self.shapes.append(("polygon", {"points": list(points), "fill": fill}))

    def line(self, x: float, y: float, to_x: float, to_y: float, ink: str) -> None:
        """Draws a line one pixel wide."""
        self.shapes.append(("line", {"x": x, "y": y, "to_x": to_x, "to_y": to_y, "ink": ink}))

    def text(
        self, x: float, y: float, text: str, size: int = 13, ink: str = INK, anchor: str = "start"
    ) -> None:
        """Draws text on the base line y. Its `anchor` ("start", "middle" or "end") is at x."""
        self.shapes.append(
            ("text", {"x": x, "y": y, "text": text, "size": size, "ink": ink, "anchor": anchor})
        )

    def svg(self) -> str:
        """The drawing as SVG text."""
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {_n(self.height)}" '
            f'width="{WIDTH}" height="{_n(self.height)}" '
            'font-family="system-ui, Segoe UI, Roboto, Helvetica, Arial, sans-serif">'
        ]
        for kind, s in self.shapes:
            if kind == "rectangle":
                edge = f' stroke="{s["edge"]}"' if s["edge"] else ""
                lines.append(
                    f'<rect x="{_n(s["x"])}" y="{_n(s["y"])}" width="{_n(s["w"])}" '
                    f'height="{_n(s["h"])}" fill="{s["fill"]}"{edge}/>'
                )
            elif kind == "polygon":
                points = " ".join(f"{_n(x)},{_n(y)}" for x, y in s["points"])
                lines.append(f'<polygon points="{points}" fill="{s["fill"]}"/>')
            elif kind == "line":
                lines.append(
                    f'<line x1="{_n(s["x"])}" y1="{_n(s["y"])}" x2="{_n(s["to_x"])}" '
                    f'y2="{_n(s["to_y"])}" stroke="{s["ink"]}"/>'
                )
            else:
                lines.append(
                    f'<text x="{_n(s["x"])}" y="{_n(s["y"])}" font-size="{s["size"]}" '
                    f'fill="{s["ink"]}" text-anchor="{s["anchor"]}">{escape(s["text"])}</text>'
                )
        return "\n".join([*lines, "</svg>", ""])

    def png(self, scale: int = 2) -> bytes:
        """The drawing as a PNG of `scale` times the size.

        Raises:
            ValueError: Pillow is not installed.
        """
        require_pillow()
        from PIL import Image, ImageDraw, ImageFont

        oversampled = 2 * scale
        image = Image.new("RGB", (WIDTH * oversampled, round(self.height * oversampled)), PAPER)
        draw = ImageDraw.Draw(image)
        anchors = {"start": "ls", "middle": "ms", "end": "rs"}
        for kind, s in self.shapes:
            if kind == "rectangle":
                x, y = s["x"] * oversampled, s["y"] * oversampled
                corner = (x + s["w"] * oversampled - 1, y + s["h"] * oversampled - 1)
                if corner[0] < x or corner[1] < y:
                    continue
                draw.rectangle(
                    ((x, y), corner), s["fill"], s["edge"] or None, oversampled if s["edge"] else 0
                )
            elif kind == "polygon":
                draw.polygon(
                    [(x * oversampled, y * oversampled) for x, y in s["points"]], s["fill"]
                )
            elif kind == "line":
                ends = (
                    (s["x"] * oversampled, s["y"] * oversampled),
                    (s["to_x"] * oversampled, s["to_y"] * oversampled),
                )
                draw.line(ends, s["ink"], oversampled)
            else:
                font = ImageFont.load_default(s["size"] * oversampled)
                place = (s["x"] * oversampled, s["y"] * oversampled)
                draw.text(place, s["text"], s["ink"], font, anchors[s["anchor"]])
        image = image.resize((WIDTH * scale, round(self.height * scale)), Image.Resampling.LANCZOS)
        file = io.BytesIO()
        image.save(file, "PNG", optimize=True)
        return file.getvalue()


def require_pillow() -> None:
    """Checks that PNG pictures can be drawn.

    Raises:
        ValueError: Pillow is not installed, or too old to scale text.
    """
    try:
        from PIL import ImageFont, __version__

        ImageFont.load_default(12)
    except ImportError:
        raise ValueError(
            "PNG pictures are drawn with Pillow, which is not installed: "
            "pip install 'pillow>=10.1', or write an .svg"
        ) from None
    except TypeError:
        raise ValueError(
            f"PNG pictures need Pillow 10.1 or newer, and {__version__} is installed: "
            "pip install -U pillow, or write an .svg"
        ) from None


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def draw(
    line: Timeline, title: str, notes: Sequence[str] = (), begin: int = 0, end: int | None = None
) -> Drawing:
    """Draws one CTA: a bar for each warp, whose colours show where in the source it is, and below
    it the bytes of its asynchronous copies in flight.

    Args:
        line: the CTA.
        title: text above the picture.
        notes: lines of text below the title.
        begin, end: the part to show, in warp-instructions of the CTA; default all.

    Raises:
        ValueError: the part is empty.
    """
    last = line.end if end is None else min(end, line.end)
    if not 0 <= begin < last:
        raise ValueError(f"nothing to draw between {begin} and {last} of {line.end} instructions")
    colours = _colours(line)
    buffers = {
        label: BUFFERS[min(index, len(BUFFERS) - 1)]
        for index, label in enumerate(
            dict.fromkeys(batch.label for batch in line.batches if batch.bytes)
        )
    }
    lanes = {
        warp: [batch for batch in line.batches if batch.track.startswith(f"warp {warp} ")]
        for warp in range(line.warps)
    }
    others = [
        batch for batch in line.batches if not any(batch in batches for batches in lanes.values())
    ]
    extra = sorted({batch.track for batch in others})
    most = max((_peak(batches) for batches in [*lanes.values(), others]), default=0)
    copies = COPIES if most else 0

    left, right = MARGIN + LABELS, WIDTH - MARGIN
    top = MARGIN + 34 + LINE * len(notes) + 16
    step = BAR + copies + GAP
    places = [top + step * line.warps]  # where the tracks that belong to no warp are drawn
    for track in extra:
        places.append(places[-1] + (MAP if track == TENSOR_MEMORY else COPIES) + GAP)
    axis = places[-1]
    entries = _legend(colours, buffers) + _writers(others)
    legend_rows = _wrap(entries, right - MARGIN)
    drawing = Drawing(axis + 66 + ENTRY * len(legend_rows) + MARGIN / 2)
    drawing.rectangle(0, 0, WIDTH, drawing.height, PAPER, EDGE)
    drawing.text(MARGIN, MARGIN + 20, title, 24)
    for index, note in enumerate(notes):
        drawing.text(MARGIN, MARGIN + 48 + LINE * index, note, 17, FAINT)

    def x(time: float) -> float:
        return left + (min(max(time, begin), last) - begin) / (last - begin) * (right - left)

    waits = [wait for wait in line.waits if wait.end > wait.begin]
    for warp in range(line.warps):
        y = top + step * warp
        drawing.text(left - 10, y + BAR / 2 + 6, f"warp {warp}", 17, INK, "end")
        drawing.rectangle(left, y, right - left, BAR, "#f4f6f9")
        for piece_begin, piece_end, colour in _bars(line, warp, colours):
            if piece_end > begin and piece_begin < last:
                drawing.rectangle(x(piece_begin), y, x(piece_end) - x(piece_begin), BAR, colour)
        for wait in waits:
            if wait.track == warp and wait.end > begin and wait.begin < last:
                width = x(wait.end) - x(wait.begin)
                drawing.rectangle(x(wait.begin), y, width, BAR, WAIT)
                drawing.rectangle(x(wait.begin), y + BAR / 2 - 2, width, 4, "#e03131")
        if copies:
            _draw_copies(drawing, lanes[warp], buffers, x, y + BAR + 2, COPIES, most)
    for index, track in enumerate(extra):
        y = places[index]
        mine = [batch for batch in others if batch.track == track]
        if track == TENSOR_MEMORY:
            drawing.text(left - 10, y + MAP / 2 + 5, track, 17, INK, "end")
            _draw_map(drawing, mine, x, y, begin, last)
            continue
        drawing.text(left - 10, y + COPIES / 2 + 5, track, 17, INK, "end")
        _draw_copies(drawing, [b for b in mine if b.bytes], buffers, x, y, COPIES, most)
        for first, final in _under_way(batch for batch in mine if not batch.bytes):
            if final > begin and first < last:
                drawing.rectangle(x(first), y, x(final) - x(first), COPIES, MATRIX[0])

    _draw_axis(drawing, _ticks(begin, last), x, left, right, axis)
    _draw_legend(drawing, legend_rows, axis + 74)
    return drawing


def _draw_axis(
    drawing: Drawing, ticks: Iterable[int], x: Any, left: float, right: float, axis: float
) -> None:
    drawing.line(left, axis, right, axis, FAINT)
    for tick in ticks:
        drawing.line(x(tick), axis, x(tick), axis + 5, FAINT)
        drawing.text(x(tick), axis + 21, f"{tick:,}", 15, FAINT, "middle")
    drawing.text(
        (left + right) / 2, axis + 43,
        "warp-instructions executed by the CTA: an order of events, not time on a GPU",
        16, FAINT, "middle",
    )  # fmt: skip


def _draw_legend(drawing: Drawing, rows: list[list[tuple[str, str, str]]], top: float) -> None:
    for row, entries in enumerate(rows):
        at = float(MARGIN)
        y = top + ENTRY * row
        for kind, colour, text in entries:
            if kind == "bar":
                drawing.rectangle(at, y - 11, 22, 13, colour)
            elif kind == "wait":
                drawing.rectangle(at, y - 11, 22, 13, WAIT, EDGE)
                drawing.rectangle(at, y - 6.5, 22, 4, colour)
            else:
                drawing.polygon(
                    [(at, y + 2), (at + 8, y - 10), (at + 14, y - 10), (at + 22, y + 2)], colour
                )
            drawing.text(at + 29, y, text, 16)
            at += _entry_width(text)


def _colours(line: Timeline) -> dict[Region, str]:
    """Colours of the regions that are large enough, in order of their first appearance."""
    executed: Counter[Region] = Counter()
    for piece in sorted(line.slices, key=lambda piece: piece.begin):
        executed[piece.region] += piece.executed
    total = max(executed.total(), 1)
    used: Counter[str] = Counter()
    colours: dict[Region, str] = {}
    for region, count in executed.items():
        smallest = {"copies": 0.0, "store": 0.0, "other": 4 * SMALLEST_SHARE}
        if count < smallest.get(region.role, SMALLEST_SHARE) * total:
            continue
        shades = SHADES[region.role]
        colours[region] = shades[min(used[region.role], len(shades) - 1)]
        used[region.role] += 1
    return colours


def _bars(line: Timeline, warp: int, colours: dict[Region, str]) -> list[tuple[int, int, str]]:
    """The (begin, end, colour) of a warp's bars. Regions too small for a colour are other code."""
    bars: list[tuple[int, int, str]] = []
    pieces: list[Slice] = [piece for piece in line.slices if piece.warp == warp]
    waits = sorted(
        wait.begin for wait in line.waits if wait.track == warp and wait.end > wait.begin
    )
    for index, piece in enumerate(pieces):
        colour = colours.get(piece.region, OTHER)
        # A bar lasts until the warp is elsewhere or waits; in between other warps have their turns.
        end = pieces[index + 1].begin if index + 1 < len(pieces) else piece.end
        while waits and waits[0] < piece.end:
            waits.pop(0)
        if waits and waits[0] < end:
            end = waits[0]
        if bars and bars[-1][2] == colour and bars[-1][1] == piece.begin:
            bars[-1] = (bars[-1][0], end, colour)
        else:
            bars.append((piece.begin, end, colour))
    return bars


def _under_way(batches: Iterable[Batch]) -> list[tuple[int, int]]:
    """The times in which any of these batches is in flight, as (begin, end), in order."""
    spans: list[tuple[int, int]] = []
    for begin, end in sorted((e.begin, e.end) for batch in batches for e in batch.copies):
        if spans and begin <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], end))
        else:
            spans.append((begin, end))
    return spans


def _levels(batches: Sequence[Batch], label: str) -> list[tuple[int, int]]:
    changes: Counter[int] = Counter()
    for batch in batches:
        if batch.label == label:
            for copy in batch.copies:
                changes[copy.begin] += copy.bytes
                changes[copy.end] -= copy.bytes
    level, levels = 0, []
    for time in sorted(changes):
        level += changes[time]
        levels.append((time, level))
    return levels


def _peak(batches: Sequence[Batch]) -> int:
    changes: Counter[int] = Counter()
    for batch in batches:
        for copy in batch.copies:
            changes[copy.begin] += copy.bytes
            changes[copy.end] -= copy.bytes
    level = peak = 0
    for time in sorted(changes):
        level += changes[time]
        peak = max(peak, level)
    return peak


def _draw_copies(
    drawing: Drawing, batches: Sequence[Batch], buffers: dict[str, str], x: Any, y: float,
    height: float, most: int,
) -> None:  # fmt: skip
    """Draws the bytes in flight over time, with one buffer on top of the other."""
    base = y + height
    drawing.line(x(0), base, x(1 << 62), base, EDGE)
    times = sorted(
        {t for batch in batches for copy in batch.copies for t in (copy.begin, copy.end)}
    )
    below = [0] * len(times)
    for label, colour in buffers.items():
        changes = dict(_levels(batches, label))
        level, upper = 0, []
        for index, time in enumerate(times):
            level = changes.get(time, level)
            upper.append(below[index] + level)
        if not any(top > bottom for top, bottom in zip(upper, below, strict=True)):
            continue
        start = None
        for index in range(len(times)):
            filled = upper[index] > below[index]
            if filled and start is None:
                start = index
            if not filled and start is not None:
                outline = (
                    _steps(times, upper, start, index) + _steps(times, below, start, index)[::-1]
                )
                drawing.polygon([(x(t), base - v / most * height) for t, v in outline], colour)
                start = None
        below = upper


def _writers(batches: Sequence[Batch]) -> list[tuple[str, str, str]]:
    """The entries of the legend for the map of tensor memory."""
    matches = [USE.fullmatch(b.label) for b in batches if b.track == TENSOR_MEMORY]
    present = {match[1] for match in matches if match is not None}
    return [
        ("bar", colour, f"{TENSOR_MEMORY}: {text}")
        for writer, (colour, text) in WRITERS.items()
        if writer in present
    ]


def _draw_map(
    drawing: Drawing, batches: Sequence[Batch], x: Any, y: float, begin: int, last: int
) -> None:
    """Draws what the columns of tensor memory hold, each from its first write to its last use."""
    order = list(WRITERS)
    pieces = []
    for batch in batches:
        match = USE.fullmatch(batch.label)
        if match is None:
            continue
        writer, first, final = match[1], int(match[2]), int(match[3])
        pieces += [
            (order.index(writer), use.begin, use.end, first, final + 1) for use in batch.copies
        ]
    scale = MAP / TENSOR_COLUMNS
    drawing.rectangle(x(begin), y, x(last) - x(begin), MAP, PAPER, EDGE)
    for writer_index, start, end, first, final in sorted(pieces, key=lambda p: (p[0] > 0, p[1])):
        if end > begin and start < last:
            drawing.rectangle(
                x(start), y + first * scale, x(end) - x(start), (final - first) * scale,
                WRITERS[order[writer_index]][0], EDGE,
            )  # fmt: skip


def _steps(
    times: Sequence[int], levels: Sequence[int], start: int, stop: int
) -> list[tuple[int, int]]:
    points = []
    for index in range(start, stop):
        points += [(times[index], levels[index]), (times[index + 1], levels[index])]
    return points


def _legend(colours: dict[Region, str], buffers: dict[str, str]) -> list[tuple[str, str, str]]:
    entries = [
        ("bar", colour, region.name + TECHNIQUES.get(region.role, ""))
        for region, colour in colours.items()
    ]
    entries += [("bar", OTHER, "other code"), ("wait", "#e03131", "waits at a barrier")]
    entries += [
        ("copy", colour, f"copies of {label} in flight") for label, colour in buffers.items()
    ]
    return entries


def _entry_width(text: str) -> float:
    return 29 + 8.5 * len(text) + 20


def _wrap(
    entries: Sequence[tuple[str, str, str]], width: float
) -> list[list[tuple[str, str, str]]]:
    rows: list[list[tuple[str, str, str]]] = [[]]
    used = 0.0
    for entry in entries:
        if rows[-1] and used + _entry_width(entry[2]) > width:
            rows.append([])
            used = 0.0
        rows[-1].append(entry)
        used += _entry_width(entry[2])
    return rows


def _ticks(begin: int, end: int) -> list[int]:
    steps = (unit * scale for scale in (10**n for n in range(19)) for unit in (1, 2, 5))
    step = next(step for step in steps if (end - begin) / step <= 11)
    return list(range(-(-begin // step) * step, end + 1, step))
