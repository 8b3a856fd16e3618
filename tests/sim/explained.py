"""Findings that are as they must be."""

from __future__ import annotations

from dataclasses import dataclass

from archflash import sim

from .tags import tags_at


@dataclass(frozen=True)
class Explained:
    """A finding that every run of a kernel may have.

    Attributes:
        kernel: how the names of its kernels start.
        kind: of the finding.
        tag: of the statement that the instruction comes from: `// findings: tag` in the CUDA source
            (tests/sim/tags.py); empty for all of a kernel's findings of this kind.
        reason: why it is as it must be.
    """

    kernel: str
    kind: str
    tag: str
    reason: str


EXPLAINED = (
    Explained(
        "blackwell_dc",
        "tcgen05-order",
        "s-overwrites-p",
        "S of the next step overwrites P that the product before it reads: products of one thread "
        "run in the order in which they are issued, which FlashAttention-4 relies on too "
        "(src/blackwell_dc/NOTES.md)",
    ),
    Explained(
        "blackwell_dc",
        "tcgen05-order",
        "overwrites-what-was-multiplied",
        "S, dP and dQ of the backward pass overwrite P or dS that the product before them reads, "
        "as above (src/blackwell_dc/BACKWARD.md)",
    ),
    Explained(
        "ampere",
        "relaxed-order",
        "",
        "add_dq() of common/mma_sync/fused_dq.cuh looks for its turn by a relaxed load while it "
        "multiplies, and adds, by red in L2, if that says that the turn has come: an acquire there "
        "would cost 2 to 6% (docs/lab/ampere.md)",
    ),
    Explained(
        "protocol_pipeline",
        "proxy-read",
        "",
        "it is the text that an H200 ran, from before the simulator asked for this fence",
    ),
)


def explanation(kernel: str, finding: sim.Finding) -> Explained | None:
    """What explains a finding in a kernel, which may be called by its implementation's name."""
    for known in EXPLAINED:
        if (
            kernel.startswith(known.kernel)
            and finding.kind == known.kind
            and (not known.tag or known.tag in tags_at(finding.source, "findings"))
        ):
            return known
    return None


def unexplained(kernel: str, report: sim.Report) -> list[sim.Finding]:
    """What is wrong with a run of a kernel, which may be called by its implementation's name."""
    return [finding for finding in report.findings if explanation(kernel, finding) is None]
