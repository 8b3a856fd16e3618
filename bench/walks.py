"""How evenly tile schedulers fill GPUs, by the model of their makespan: writes bench/walks.csv.

``python -m bench.walks`` checks that the table is up to date, ``--write`` writes it anew. No GPU is
needed.

Row tiles take unequal time under a causal mask or a window, and in packed sequences. The column
``share`` says how much of an even share of the work a GPU gets: the sum of all tiles' times shared
out over the CTAs that run at the same time (or the longest tile, if that takes longer), divided by
the time until the last tile is done. It comes from a model (src/common/planning/makespan.h), not
from a measurement. ``archflash explain`` shows the same number as "balance". The other columns are
the tile that the plan takes; ``tiles``, the row tiles for each CTA that runs at the same time (with
less than two, the longest tile often takes all the time); and ``reads``, how often K and V are read
from memory because they do not stay in L2 (empty for packed sequences).
"""

from __future__ import annotations

import argparse
import csv
import io
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
TABLE = HERE / "walks.csv"
GPUS = {
    "B200": ("blackwell_dc",),
    "RTX 5090": ("blackwell_consumer",),
    "H200": ("hopper", "blackwell_consumer", "ampere"),
    "A100": ("ampere",),
}
# Less of the even share than this is too little, where each worker has at least two tiles: of fewer
# than four, OTHER_GOAL is enough, because the last tile is a large part of the whole.
CAUSAL_GOAL, OTHER_GOAL = 0.93, 0.90


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


def table() -> str:
    """The table, as CSV."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("gpu", "implementation", "shape", "tile", "tiles", "share", "reads"))
    made = [(shape, plans(shape)) for shape in shapes()]
    for gpu, implementations in GPUS.items():
        for name in implementations:
            for shape, plans_of_shape in made:
                plan = plans_of_shape.get((gpu, name))
                if plan is None:
                    continue
                walk = walk_of(plan, shape.lengths)
                reads = "" if walk.reads is None else f"{walk.reads:.1f}"
                numbers = (f"{walk.tiles:.1f}", f"{walk.share:.2f}", reads)
                writer.writerow((gpu, name, shape.name, walk.tile, *numbers))
    return out.getvalue()


def main(argv: Sequence[str] | None = None) -> int:
    """Checks or writes the table."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.walks", description=(__doc__ or "").split("\n")[0]
    )
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
