"""How evenly walks over row tiles fill GPUs, by the model of their makespan: docs/walks.md.

``python -m bench.walks`` checks that the table is up to date, ``--write`` writes it anew. No GPU is
needed. The column "before" is the same model of the walks of 2026-11-22, which walks_before.json
keeps.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.cases import TORCH_DTYPES, load_cases, tomllib

if TYPE_CHECKING:
    from archflash import _archflash as native

HERE = Path(__file__).parent
CASES = HERE / "walks.toml"
BEFORE = HERE / "walks_before.json"
TABLE = HERE.parent / "docs" / "walks.md"
GPUS = {
    "B200": ("blackwell_dc",),
    "RTX 5090": ("blackwell_consumer",),
    "H200": ("hopper", "blackwell_consumer", "ampere"),
    "A100": ("ampere",),
}
# Less of the even share than this is too little, where each worker has at least two tiles: of fewer
# than four, OTHER_GOAL is enough, because the last tile is a large part of the whole.
CAUSAL_GOAL, OTHER_GOAL = 0.93, 0.90
ABOUT = """# How evenly walks fill a GPU

Row tiles take unequal time under a causal mask or a window, and in packed sequences. This table
says how much of an even share of the work a GPU gets: the sum of all tiles' times shared out over
the CTAs that run at the same time (or the longest tile, if that takes longer), divided by the time
until the last tile is done. It comes from a model (`src/common/planning/makespan.h`), not from a
measurement: a tile takes as long as the keys of its blocks and 192 more. `archflash explain` shows
the same number as "balance".

- **tiles**: row tiles for each CTA that runs at the same time. With less than two, the longest tile
  often takes all the time.
- **before**: the walks of 2026-11-22. blackwell_dc handed its tiles out in fixed rounds, and ampere
  left a remnant of heads for the end. Kernels that are younger have no such number.
- **reads**: how often K and V are read from memory, by the model, because they do not stay in L2.
  Packed sequences have no such number.

`python -m bench.walks --write` writes this page.
"""


@dataclass(frozen=True)
class Shape:
    """A call whose walk is judged.

    Args:
        name: for the table.
        problem: what is planned.
        lengths: of packed sequences, of queries as of keys; empty for calls without.
        goal: the share that is enough.
    """

    name: str
    problem: native.Problem
    lengths: tuple[int, ...]
    goal: float


@dataclass(frozen=True)
class Walk:
    """What the model says of one walk: see the columns of the table."""

    tile: str
    tiles: float
    share: float
    reads: float | None


def shapes() -> list[Shape]:
    """The causal shapes of cases.toml with more than one query row, and those of walks.toml."""
    import torch

    from archflash._api import make_problem

    def empty(dtype: str, *sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=getattr(torch, TORCH_DTYPES[dtype]), device="meta")

    made = []
    for case in load_cases():
        if not case.causal or case.nq == 1 or case.dtype == "fp32":
            continue
        q = empty(case.dtype, case.b, case.hq, case.nq, case.d)
        k = empty(case.dtype, case.b, case.hkv, case.nk, case.d)
        v = empty(case.dtype, case.b, case.hkv, case.nk, case.dv)
        made.append(Shape(case.name, make_problem(q, k, v, causal=True), (), CAUSAL_GOAL))
    with CASES.open("rb") as file:
        tables: list[dict[str, Any]] = tomllib.load(file)["case"]
    for table in tables:
        lengths = tuple(table.get("lengths", ()))
        hq, hkv = table["heads"]
        d = table["d"]
        if lengths:
            q, k = (empty("bf16", sum(lengths), heads, d) for heads in (hq, hkv))
            ends = torch.empty(len(lengths) + 1, dtype=torch.int32, device="meta")
            options = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "causal": "causal" in table,
                       "max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}  # fmt: skip
        else:
            batch, length = table.get("batch", 1), table["length"]
            q, k = (empty("bf16", batch, heads, length, d) for heads in (hq, hkv))
            options = {"window": tuple(table["window"])}
        made.append(Shape(table["name"], make_problem(q, k, k, **options), lengths, OTHER_GOAL))
    return made


def walk_of(plan: native.LaunchPlan, lengths: Sequence[int]) -> Walk:
    """The model of a plan."""
    from archflash import _archflash as native

    assert plan.tile is not None
    model = native.makespan(plan, lengths, lengths)
    tiles = sum(time > 0 for _, time in native.tile_times(plan, lengths, lengths))
    reads = None if lengths else native.reads_of_keys(plan)
    return Walk(plan.tile.name, tiles / model.workers, model.share, reads)


def in_rounds(plan: native.LaunchPlan) -> bool:
    """Whether CTAs that stay share the tiles out in fixed rounds."""
    tile = plan.tile
    assert tile is not None
    tiles = tile.tiles * tile.splits * tile.v_slices
    return tile.ctas < tiles * tile.cluster and not plan.zeroed_bytes


def plans(shape: Shape) -> dict[tuple[str, str], native.LaunchPlan]:
    """The plans of a shape by GPU and implementation, of those that serve it."""
    from archflash import _archflash as native
    from archflash._api import find_device

    made = {}
    for gpu, implementations in GPUS.items():
        for name in implementations:
            plan = native.plan(name, shape.problem, find_device(gpu))
            if not isinstance(plan, list):
                made[gpu, name] = plan
    return made


def before(plan: native.LaunchPlan, kept: dict[str, Any]) -> native.LaunchPlan:
    """The plan with the tile and the walk that walks_before.json keeps."""
    from archflash import _archflash as native

    fields = plan.to_dict()
    fields["tile"] |= kept | {"turned_begin": 0, "turned_end": 0}
    return native.LaunchPlan.unchecked_from_dict(fields)


def table() -> str:
    """The page."""
    kept: dict[str, Any] = json.loads(BEFORE.read_text())
    lines = [ABOUT]
    for gpu, implementations in GPUS.items():
        for name in implementations:
            lines += [f"## {name} on {gpu}", "", "| shape | tile | tiles | before | now | reads |"]
            lines.append("| --- | --- | --- | --- | --- | --- |")
            for shape in shapes():
                plan = plans(shape).get((gpu, name))
                if plan is None:
                    continue
                now = walk_of(plan, shape.lengths)
                old = "-"
                if of_then := kept.get(shape.name, {}).get(f"{name} on {gpu}"):
                    old = f"{walk_of(before(plan, of_then), shape.lengths).share:.2f}"
                reads = "-" if now.reads is None else f"{now.reads:.1f}"
                lines.append(
                    f"| {shape.name} | {now.tile} | {now.tiles:.1f} | {old} | "
                    f"{now.share:.2f} | {reads} |"
                )
            lines.append("")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Checks or writes the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.walks", description=__doc__)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(argv)
    made = table()
    if options.write:
        TABLE.write_text(made)
    elif not TABLE.is_file() or TABLE.read_text() != made:
        print(f"{TABLE} is not up to date: run python -m bench.walks --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
