"""How commands name a GPU of this machine."""

from __future__ import annotations

import argparse

from archflash import _archflash as _native
from archflash import _dispatch


def add_argument(parser: argparse.ArgumentParser) -> None:
    """Adds `--device`, which gives the index of a GPU."""
    parser.add_argument(
        "--device", type=index_of, default="cuda:0",
        help="a GPU of this machine, such as cuda:1 or 1 (default: %(default)s)",
    )  # fmt: skip


def index_of(name: str) -> int:
    """The index of "cuda:1" or "1"."""
    digits = name.removeprefix("cuda:")
    if not (digits.isascii() and digits.isdecimal() and len(digits) < 4):
        said = f"{name!r}: it must be a GPU of this machine such as cuda:0"
        raise argparse.ArgumentTypeError(said)
    return int(digits)


def find(index: int, purpose: str, instead: str = "") -> _native.Device:
    """The GPU of an index.

    Args:
        index: its index.
        purpose: what it is for, as a verb.
        instead: what can be done without one.

    Raises:
        ValueError: it is not here.
    """
    if trouble := _dispatch.driver_problem():
        raise ValueError(f"there is no GPU to {purpose}: {trouble}{instead}")
    return _dispatch.query_device(index)
