"""`archflash calibrate`: measures this machine's GPU, and keeps what it found for dispatch."""

from __future__ import annotations

import argparse
import datetime
import sys
from typing import Any

from archflash import _archflash as _native
from archflash import _calibrated, _dispatch, _proofs, _user_tables
from archflash._calibrate import fit, measuring
from archflash._calibrated import EQUAL, Table
from archflash._call_times import BOTH, Kind, Sizes
from archflash.cli import gpus

SECONDS = 60.0
_TABLES = 8  # that are kept of a GPU
_ENOUGH = 8  # measured sizes from which crossovers are worth telling


def add_parser(commands: Any) -> None:
    """Adds the command to the parser of `archflash`."""
    parser = commands.add_parser(
        "calibrate",
        help="measure this GPU for a minute; from then on the fastest measured kernel is chosen",
        description="Measures archflash's and PyTorch's kernels on this GPU, after comparing their "
        "results with float64, and keeps a table from which calls choose the fastest from then on. "
        "It holds for this GPU, driver, torch, cuDNN, archflash and power limit.",
    )
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="how long (default: %(default).0f)"
    )
    gpus.add_argument(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--show", action="store_true", help="print what was measured")
    what.add_argument("--forget", action="store_true", help="delete what was measured on all GPUs")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measures, shows or forgets."""
    if arguments.forget:
        return _forget()
    if arguments.show:
        return _show()
    if not 1 <= arguments.seconds <= 3600:
        raise ValueError(f"--seconds {arguments.seconds:g}: it must be from 1 to 3600")
    index = arguments.device
    device = gpus.find(index, "measure")
    _user_tables.check_writable(_calibrated.TABLE)  # before a minute is spent
    print(f"{_dispatch.describe_device(device)}: {arguments.seconds:.0f} s", flush=True)
    found = measuring.measure(
        index, arguments.seconds, lambda text: print(f"  {text}", file=sys.stderr, flush=True),
        silent_s=measuring.silence_on(device.capability),
    )  # fmt: skip
    entry = fit.entry(
        _calibrated.key_of(device), f"{datetime.date.today():%Y-%m-%d}", device.sm_count,
        found.measured(), found.host_us, found.wrong, found.wrong_kinds,
    )  # fmt: skip
    table = Table.read(entry)
    file = keep(entry)
    # A minute of plain calls does not overturn what was found wrong here.
    settled = _proofs.committed() | _proofs.own() | _proofs.own(_proofs.REFUTED)
    new = [
        (name, of)
        for name, of in found.proved()
        if _proofs.Proof(name, of, device.capability) not in settled
    ]
    if new or found.refuted():
        _proofs.keep(device, new, found.refuted())
    if new:
        print("proved here: " + ", ".join(f"{name} ({of} pass)" for name, of in new))
    print(describe(table))
    print(f"kept in {file}; `archflash calibrate --forget` deletes it")
    return 0


def keep(entry: dict[str, Any]) -> Any:
    """Writes a table in place of one with the same key; the file. Of each GPU the newest tables are
    kept, because environments with other versions of torch share the file.
    """
    gpu = entry["key"]["gpu"]
    file = _user_tables.put(_calibrated.TABLE, entry)
    mine = [x["key"] for x in _user_tables.entries(_calibrated.TABLE) if x["key"].get("gpu") == gpu]
    if old := mine[:-_TABLES]:
        _user_tables.forget(_calibrated.TABLE, lambda one: one["key"] in old)
    _calibrated.read_again()
    return file


def _forget() -> int:
    file = _user_tables.file_of(_calibrated.TABLE)
    if not _user_tables.entries(_calibrated.TABLE) and not (file and file.exists()):
        print("nothing was kept")
        return 0
    print(f"{_user_tables.forget(_calibrated.TABLE)}: emptied")
    _calibrated.read_again()
    return 0


def _show() -> int:
    entries = _user_tables.entries(_calibrated.TABLE)
    if not entries:
        print("nothing was measured here yet: `archflash calibrate` does")
        return 0
    here: dict[str, _native.Device] = {}
    if _dispatch.driver_problem() is None:
        for index in range(_native.driver_status().device_count):
            found = _dispatch.query_device(index)
            here.setdefault(found.name, found)
    for entry in entries:
        device = here.get(entry["key"].get("gpu", ""))
        if entry.get("format") != _calibrated.FORMAT:
            print(_calibrated.of_another_version(entry))
            continue
        try:
            print(describe(Table.read(entry)))
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            print(f"{entry['key'].get('gpu')}: damaged ({type(error).__name__}: {error})")
            continue
        if device is None:
            print("it does not count: there is no such GPU here")
        elif entry["key"] != (now := _calibrated.key_of(device)):
            print(_calibrated.stale(entry, now))
    return 0


def describe(table: Table) -> str:
    """Who was the fastest at how many sizes of each kind of call, and where that changes."""
    lines = [f"{table.gpu}, {table.date}, {table.key}"]
    for family in table.families.values():
        alike: dict[tuple[Kind, int, int], list[dict[str, float]]] = {}
        for call in family.calls:
            alike.setdefault((call.kind, call.d, call.dv), []).append(call.graph_us)
        for (kind, d, dv), found in alike.items():
            first: dict[str, int] = {}
            for times in found:
                for name, us in times.items():
                    if us <= min(times.values()) * (1 + EQUAL):
                        first[name] = first.get(name, 0) + 1
            counts = sorted(first.items(), key=lambda item: -item[1])
            words = ", ".join(f"{name} {count}" for name, count in counts)
            dims = f"d {d}" if d == dv else f"d {d}/{dv}"
            lines.append(f"  {words_of(kind)}, {dims}: of {len(found)} sizes {words}")
            changes = crossovers(table, kind, d, dv) if len(found) >= _ENOUGH else []
            if len(changes) > 1:
                lines.append("    by rows: " + ", ".join(f"{n} to {rows}" for n, rows in changes))
    for (name, passes), text in table.wrong.items():
        lines.append(f"  {name}, {passes}: WRONG: {text}")
    return "\n".join(lines)


_ROWS = 16_384  # of all sequences, with 16 heads


def crossovers(table: Table, kind: Kind, d: int, dv: int) -> list[tuple[str, int]]:
    """Who is the fastest by the table in sequences up to how many rows."""
    found: list[tuple[str, int]] = []
    if kind.rows == "few":
        return found
    for step in range(15):
        rows = round(128 * 2 ** (step / 2))
        sizes = Sizes.of((_ROWS // rows, 16, 16, rows, rows), kind.causal)
        us = table.families[kind.family()].predict(kind, sizes, d, dv).us
        name = min(us, key=us.__getitem__)
        if found and found[-1][0] == name:
            found.pop()
        found.append((name, rows))
    return found


def words_of(kind: Kind) -> str:
    """A kind of calls in words."""
    words = [kind.dtype, "with gradients" if kind.passes == BOTH else "forward"]
    words += ["few rows"] if kind.rows == "few" else ["causal"] if kind.causal else []
    words += [] if kind.mask == "none" else [f"mask: {kind.mask}"]
    return ", ".join(words + ([] if kind.way == "dense" else [kind.way]))
