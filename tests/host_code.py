"""Headers of the kernels in programs for the host."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[1] / "src"
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler here: install g++")


def compiled(text: str, folder: Path) -> Path:
    """The program that C++ text makes, in a folder."""
    source, program = folder / "program.cpp", folder / "program"
    source.write_text(text)
    options = [
        "-std=c++20",
        "-Wall",
        "-Wextra",
        "-Werror",
        f"-I{SOURCES}",
        "-o",
        str(program),
        str(source),
    ]
    built = subprocess.run([str(COMPILER), *options], capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stderr
    return program


def printed(program: Path, given: str = "") -> list[list[str]]:
    """The words of the lines that a program prints."""
    done = subprocess.run(
        [program], input=given, capture_output=True, text=True, check=True, timeout=60
    )
    return [line.split() for line in done.stdout.splitlines()]
