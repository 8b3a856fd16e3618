"""Findings that are as they must be."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from archflash import sim

SOURCES = Path(__file__).parents[2] / "src"


@dataclass(frozen=True)
class Explained:
    """A finding that every run of a kernel may have.

    Attributes:
        kernel: how the names of its kernels start.
        kind: of the finding.
        source: a part of a line of CUDA, in the kernel's folder, that the instruction came from or
            is inlined at.
        reason: why it is as it must be.
    """

    kernel: str
    kind: str
    source: str
    reason: str


EXPLAINED = (
    Explained(
        "blackwell_dc",
        "tcgen05-order",
        "multiply_qk<",
        "S of the next step overwrites P that the product before it reads: products of one thread "
        "run in the order in which they are issued, which FlashAttention-4 relies on too "
        "(src/blackwell_dc/NOTES.md)",
    ),
)


def explanation(kernel: str, finding: sim.Finding) -> Explained | None:
    """What explains a finding in a kernel, which may be called by its implementation's name."""
    for known in EXPLAINED:
        if (
            kernel.startswith(known.kernel)
            and finding.kind == known.kind
            and any(known.source in line for line in _lines(known.kernel, finding.source))
        ):
            return known
    return None


def unexplained(kernel: str, report: sim.Report) -> list[sim.Finding]:
    """What is wrong with a run of a kernel, which may be called by its implementation's name."""
    return [finding for finding in report.findings if explanation(kernel, finding) is None]


def _lines(folder: str, source: str) -> list[str]:
    """The lines of a folder that a "file:line, inlined at ..." names, from src/ on or wholly."""
    return [
        (SOURCES / file).read_text().splitlines()[int(number) - 1]
        for file, number in re.findall(r"([^, ]+):(\d+)", source)
        if f"/{folder}/" in f"/{file}"
    ]
