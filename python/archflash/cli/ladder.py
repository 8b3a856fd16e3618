"""`archflash ladder`: kernels that each add one idea to the previous one, checked and timed.

The kernels and the program that runs them (`python -m bench.ladder`) are in a clone of archflash,
and not in the wheel: nvcc compiles each kernel together with headers of the clone.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

PROGRAM = Path("bench", "ladder", "__main__.py")


def add_parser(commands: Any) -> None:
    """Adds the command to the parser of `archflash`."""
    parser = commands.add_parser(
        "ladder",
        help="run kernels that each add one idea to the previous one; needs a clone and nvcc",
        description="Compares every rung of a ladder with float64. On a GPU that runs the rungs it "
        "also times them beside PyTorch's kernels; without one it runs them on the simulator and "
        "prints what that counts.",
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="such as ampere (default: every ladder)"
    )
    parser.add_argument("--simulate", action="store_true", help="on the simulator, also with a GPU")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write an SVG of one ladder")
    parser.add_argument("--rounds", type=int, metavar="N", help="timed rounds (default: 20)")
    parser.add_argument(
        "--clone",
        type=Path,
        metavar="FOLDER",
        help="a clone of archflash (default: the current folder or one above it)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the clone's program; its exit status."""
    clone = find_clone(arguments.clone)
    command = [sys.executable, "-m", "bench.ladder", *arguments.names]
    command += ["--simulate"] if arguments.simulate else []
    command += ["--rounds", str(arguments.rounds)] if arguments.rounds is not None else []
    command += ["--plot", str(arguments.plot.resolve())] if arguments.plot else []
    return subprocess.run(command, cwd=clone).returncode


def find_clone(folder: Path | None) -> Path:
    """The clone whose ladders run.

    Args:
        folder: where it is; None for the current folder or one above it.

    Raises:
        ValueError: there is none; the message says what to do.
    """
    places = [folder] if folder else [Path.cwd(), *Path.cwd().parents]
    for place in places:
        if (place / PROGRAM).is_file():
            return place
    where = f"{folder} is no clone of archflash" if folder else "this folder is in no clone"
    raise ValueError(
        f"{where}: the ladders' kernels are in the source tree and not in the wheel. In a clone "
        "run `python -m bench.ladder`, or give --clone FOLDER. nvcc 13.0 or newer compiles them"
    )
