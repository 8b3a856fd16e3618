"""Findings that are as they must be."""

from __future__ import annotations

from archflash import sim

# By how the names of kernels start. blackwell_dc: S of the next step overwrites P that the product
# before it reads: products of one thread run in the order in which they are issued, which
# FlashAttention-4 relies on too (src/blackwell_dc/NOTES.md).
EXPLAINED = {"blackwell_dc": {"tcgen05-order"}}


def unexplained(kernel: str, report: sim.Report) -> list[sim.Finding]:
    """What is wrong with a run of a kernel; all of an implementation are called by its name."""
    known = {kind for name, kinds in EXPLAINED.items() if kernel.startswith(name) for kind in kinds}
    return [finding for finding in report.findings if finding.kind not in known]
