"""The commands whose programs are in a clone of archflash and not in the wheel."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Each has a module in the clone, with main(arguments), and what it does.
PROGRAMS = {
    "demo": (
        "examples.minilm.demo",
        "run a sentence-embedding model with archflash and check every layer; needs a clone",
    ),
    "show": (
        "examples.minilm.show",
        "attention weights of a real model, and the errors of every implementation; needs a clone",
    ),
    "ladder": (
        "bench.ladder.__main__",
        "run kernels that each add one idea to the previous one; needs a clone and nvcc",
    ),
}


def add_parsers(commands: Any) -> None:
    """Adds the commands to the list that `archflash --help` prints."""
    for name, (_, text) in PROGRAMS.items():
        commands.add_parser(name, help=text)


def run(name: str, arguments: Sequence[str]) -> int:
    """Runs the clone's program with its own arguments; its exit status."""
    module = PROGRAMS[name][0]
    sys.path.insert(0, str(find_clone(name)))
    return int(importlib.import_module(module).main(arguments))


def find_clone(name: str) -> Path:
    """The clone that the current folder is in.

    Raises:
        ValueError: it is in none; the message says what to do.
    """
    file = Path(*PROGRAMS[name][0].split(".")).with_suffix(".py")
    for place in (Path.cwd(), *Path.cwd().parents):
        if (place / file).is_file():
            return place
    raise ValueError(
        f"`archflash {name}` is in archflash's source tree and not in the wheel: run it in a clone"
    )
