"""Where the name of a folder of kernels stands outside of that folder: a new folder changes the
tables that are listed here, and nothing else.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from archflash import _registry

ROOT = Path(__file__).parents[2]
FOLDERS = _registry.kernel_names()
CODE = ("src", "python", "_build", "CMakeLists.txt")
CODE_ENDINGS = {".h", ".cpp", ".cuh", ".cu", ".in", ".py", ".txt", ".json"}

# Code that names a folder, and what for.
PLACES = {
    "CMakeLists.txt": "the line that adds each folder",
    "_build/archflash_backend.py": "the folder that wants a newer assembler",
    "python/archflash/_dispatch/order.py": "a comment on tables that were measured",
    "python/archflash/_measured.json": "made by bench.measured from bench/results",
    "python/archflash/_measured.py": "a comment on what is not measured",
    "python/archflash/_api.py": "examples for people",
    "python/archflash/_backward.py": "an example for people",
    "python/archflash/_merge.py": "the name that a caller writes",
    "python/archflash/_quantize.py": "the name that a caller writes",
    "python/archflash/_warm_up.py": "an example for people",
    "python/archflash/sim/_attention.py": "an example for people",
    "python/archflash/sim/_trace.py": "an example for people",
}

# Tests and benchmarks that name every folder: their tables want a row for a new one.
TABLES = {
    "tests/build/test_kernels.py": "the instructions that kernels are made for",
    "tests/core_set/test_every_kernel.py": "the shapes and GPUs with which each kernel is planned",
    "tests/sim/mutation/targets.py": "the kernels that are mutated",
    "tests/sim/test_same_bits.py": "a call of each folder, whose outputs have known bits",
    "tests/sim/test_order.py": "a GPU and a dtype for each folder whose order of tiles is run",
    "tests/unit/test_ada_plans.py": "who serves FP8 on which GPU",
    "tests/unit/test_dispatch.py": "who serves which call on which capability",
    "tests/unit/test_proofs.py": "where each folder has run",
    "tests/unit/test_registry.py": "the order, and what each folder is built for",
    "tests/unit/test_warm_up.py": "the kernels that a GPU loads",
}


def named_in(file: Path) -> set[str]:
    """The folders that a file names, other than the one that it lies in; in C++ comments are free
    to do so.
    """
    text = file.read_text(encoding="utf-8", errors="replace")
    if file.suffix in {".h", ".cpp", ".cuh", ".cu"}:
        text = re.sub(r"//.*", "", text)
    named = {name for name in FOLDERS if re.search(rf"(?<![\w.]){name}(?![a-z])", text)}
    return named - set(
        file.relative_to(ROOT / "src").parts if file.is_relative_to(ROOT / "src") else ()
    )


def files_below(*roots: str) -> list[Path]:
    files: list[Path] = []
    for root in roots:
        top = ROOT / root
        files += [top] if top.is_file() else top.rglob("*")
    return [
        file for file in files if file.suffix in CODE_ENDINGS and "__pycache__" not in file.parts
    ]


def test_code_outside_of_a_folder_names_it_in_known_places_only() -> None:
    naming = {file.relative_to(ROOT).as_posix() for file in files_below(*CODE) if named_in(file)}
    assert naming == set(PLACES)


def test_tables_that_name_every_folder_are_listed() -> None:
    tables = {
        file.relative_to(ROOT).as_posix()
        for file in files_below("tests", "bench", "sim")
        if file.suffix == ".py" and named_in(file) == set(FOLDERS)
    }
    assert tables == set(TABLES)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_includes_nothing_of_another(folder: str) -> None:
    for file in (ROOT / "src" / folder).rglob("*"):
        if file.suffix not in {".h", ".cpp", ".cuh", ".cu"}:
            continue
        included = re.findall(r'#include "(\w+)/', file.read_text())
        assert set(included) <= {"common", folder}, file


@pytest.mark.parametrize("room", ["common", "runtime"])
def test_what_folders_share_includes_none_of_them(room: str) -> None:
    for file in (ROOT / "src" / room).rglob("*"):
        if file.suffix not in {".h", ".cpp", ".cuh"}:
            continue
        included = set(re.findall(r'#include "(\w+)/', file.read_text()))
        assert not included & {*FOLDERS, "copy", "quantize", "merge", "probes"}, file
