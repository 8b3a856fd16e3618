"""The summaries of the last runs of mutants, and whether they are of the kernels of today.

`<implementation>.json` beside this file is written by ``python -m tests.sim.mutation``. It says how
many mutants were run of how many, and for each kernel the hash of the PTX that was mutated (null in
summaries from before hashes were kept).
"""

from __future__ import annotations

import json
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from tests.kernel_files import KERNELS, ptx_texts

from ..protocols.cases import cases, sample_cases
from ..ptx_hash import ptx_hash

FOLDER = Path(__file__).parent


def summaries() -> list[dict[str, Any]]:
    """All summaries, by name of the implementation."""
    return [json.loads(file.read_text()) for file in sorted(FOLDER.glob("*.json"))]


@cache
def hashes(kernel: str) -> frozenset[str]:
    """The hashes of a kernel's PTX as it is installed, one for each target; for the kernels of
    tests/sim/protocols of the text that is there.
    """
    if kernel.startswith("protocol_"):
        return frozenset(
            ptx_hash(case.text, "test")
            for case in [*cases(), *sample_cases()]
            if f"protocol_{case.name}" == kernel
        )
    folder = next(x.name for x in KERNELS.iterdir() if kernel.startswith(f"{x.name}_"))
    texts = texts_of(folder)
    return frozenset(ptx_hash(text, kernel) for text in texts if f".entry {kernel}(" in text)


@lru_cache(maxsize=1)  # all kernels of a folder are asked for one after another
def texts_of(folder: str) -> list[str]:
    """The PTX of a folder's kernels as it is installed."""
    return [text for _, _, text in ptx_texts(folder)]


def older_kernels(summary: dict[str, Any]) -> list[str]:
    """The kernels of a summary whose PTX is another today, or was not noted."""
    return [
        name for name, kernel in summary["kernels"].items() if kernel["ptx"] not in hashes(name)
    ]
