"""`archflash bench`: how fast every candidate is on this machine's GPU, for a few calls or one."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from archflash import _archflash as _native
from archflash import _dispatch, _overrides, _registry
from archflash._calibrate.calls import Call
from archflash._calibrate.grid import Point
from archflash._calibrate.lab import Lab, Result
from archflash._call_times import BOTH, FORWARD, Kind
from archflash._measured import FEW_QUERIES
from archflash.cli import gpus
from archflash.cli.calibrate import words_of
from archflash.cli.explain import dtype_named, parse_shape

DTYPES = {"bfloat16": "16 bits", "float32": "float32", "float8_e4m3fn": "fp8"}
COLUMNS = (
    "gpu", "driver_cuda", "torch", "archflash", "dtype", "b", "hq", "hkv", "nq", "nk", "d", "dv",
    "causal", "passes", "candidate", "chosen", "graph_us", "eager_us", "tflops", "gbps", "note",
)  # fmt: skip


def standard() -> list[Point]:
    """The calls that are timed where none is given."""

    def of(passes: str, causal: bool, shape: tuple[int, int, int, int, int], d: int) -> Point:
        few = shape[3] <= FEW_QUERIES
        return Point(Kind("16 bits", passes, "few" if few else "many", causal), shape, d, d)

    return [
        of(FORWARD, True, (2, 32, 8, 4096, 4096), 128),
        of(FORWARD, False, (4, 16, 16, 4096, 4096), 64),
        of(FORWARD, False, (32, 12, 12, 512, 512), 64),
        of(FORWARD, False, (16, 32, 8, 1, 4096), 128),
        of(BOTH, True, (2, 16, 16, 2048, 2048), 128),
    ]


def add_parser(commands: Any) -> None:
    """Adds the command to the parser of `archflash`."""
    parser = commands.add_parser(
        "bench", help="time every candidate on this GPU, for some standard calls or for one"
    )
    parser.add_argument("--shape", metavar="B,H,N,D", help="of q; without it, standard calls")
    parser.add_argument("--dtype", type=dtype_named, choices=DTYPES, default="bfloat16")
    parser.add_argument("--heads-kv", type=int, help="heads of k and v")
    parser.add_argument("--keys", type=int, help="rows of k and v")
    parser.add_argument("--dv", type=int, help="head dim of v")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--gradients", action="store_true", help="a call and its gradients")
    gpus.add_argument(parser)
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the table there, too")
    parser.set_defaults(run=run)


def read_point(arguments: argparse.Namespace) -> Point:
    """The call that the arguments describe.

    Raises:
        ValueError: sizes that make no call.
    """
    batch, heads, rows, d = parse_shape(arguments.shape)
    heads_kv = heads if arguments.heads_kv is None else arguments.heads_kv
    keys = rows if arguments.keys is None else arguments.keys
    dv = d if arguments.dv is None else arguments.dv
    if min(batch, heads, heads_kv, rows, keys, d, dv) < 1:
        raise ValueError("--shape, --heads-kv, --keys and --dv: every size must be at least 1")
    if heads % heads_kv:
        raise ValueError(f"--heads-kv {heads_kv}: it must divide the {heads} heads of q")
    dtype = DTYPES[arguments.dtype]
    if arguments.gradients and dtype == "fp8":
        raise ValueError("--gradients: FP8 has none")
    few = rows <= FEW_QUERIES
    kind = Kind(
        dtype, BOTH if arguments.gradients else FORWARD, "few" if few else "many", arguments.causal
    )
    return Point(kind, (batch, heads, heads_kv, rows, keys), d, dv)


def run(arguments: argparse.Namespace) -> int:
    """Prints the tables; 1 if a kernel of ours was wrong."""
    points = [read_point(arguments)] if arguments.shape else standard()
    # Otherwise what is timed as PyTorch's, and as chosen, could be ours, or what is forced.
    _overrides.disable()
    _dispatch.forcing.force_nothing()
    _dispatch.approximating.ask_for_nothing()
    index = arguments.device
    device = gpus.find(index, "time")
    lab = Lab(index, max(point.bytes() for point in points), rounds=15)
    rows: list[dict[str, Any]] = []
    wrong = False
    print(f"{_dispatch.describe_device(device)}, torch {torch.__version__}")
    for point in points:
        chosen = Call(point, torch.device("cuda", index)).decision().chosen
        result = lab.measure(point, eager=True, more=(_registry.TORCH,))
        mine = rows_of(point, result, chosen)
        wrong = wrong or any(name in _registry.kernel_names() for name in result.wrong)
        print(f"\n{title(point)}\n{text_of(point, mine)}", flush=True)
        facts = {
            "gpu": device.name, "driver_cuda": _native.driver_status().cuda_version,
            "torch": torch.__version__, "archflash": _native.version,
        }  # fmt: skip
        rows += [facts | row for row in mine]
    if arguments.csv is not None:
        with arguments.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
        print(f"\nwritten to {arguments.csv}")
    return 1 if wrong else 0


def title(point: Point) -> str:
    """A point in words."""
    b, hq, hkv, nq, nk = point.shape
    heads = f"{hq}" if hq == hkv else f"{hq}/{hkv}"
    rows = f"{nq}" if nq == nk else f"{nq}x{nk}"
    dims = f"d{point.d}" if point.d == point.dv else f"d{point.d}/{point.dv}"
    return f"{b}x{heads} {rows} {dims}, {words_of(point.kind)}"


def rows_of(point: Point, result: Result, chosen: str) -> list[dict[str, Any]]:
    """A row for each candidate, the fastest first, then those that were not timed."""
    b, hq, hkv, nq, nk = point.shape
    call = {
        "dtype": point.kind.dtype, "b": b, "hq": hq, "hkv": hkv, "nq": nq, "nk": nk,
        "d": point.d, "dv": point.dv, "causal": int(point.kind.causal), "passes": point.kind.passes,
    }  # fmt: skip
    rows = []
    for name, us in sorted(result.graph_us.items(), key=lambda item: item[1]):
        eager = result.eager_us.get(name)
        rows.append(call | {
            "candidate": name, "chosen": int(name == chosen), "graph_us": f"{us:.2f}",
            "eager_us": "" if eager is None else f"{eager:.2f}",
            "tflops": f"{point.flops() / us / 1e6:.1f}",
            "gbps": f"{point.bytes() / us / 1e3:.0f}", "note": "",
        })  # fmt: skip
    for name, text in {**result.wrong, **result.refused}.items():
        note = f"WRONG: {text}" if name in result.wrong else f"not run: {text}"
        rows.append(call | {"candidate": name, "chosen": int(name == chosen), "note": note})
    return rows


def text_of(point: Point, rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a table; `*` marks the one that dispatch chooses."""
    speed = "GB/s" if point.kind.rows == "few" else "TFLOP/s"
    column = "gbps" if point.kind.rows == "few" else "tflops"
    lines = [f"  {'':22}{'graph us':>10}{'eager us':>10}{speed:>9}"]
    for row in rows:
        name = row["candidate"] + (" *" if row["chosen"] else "")
        times = (row.get("graph_us", ""), row.get("eager_us", ""), row.get(column, ""))
        lines.append(
            f"  {name:22}{times[0]:>10}{times[1]:>10}{times[2]:>9}  {row['note']}".rstrip()
        )
    return "\n".join(lines)
