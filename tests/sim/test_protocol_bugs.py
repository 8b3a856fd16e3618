"""A small matrix product as our kernels are built (TMA, mbarriers, wgmma, roles with registers of
their own, a TMA store), and bugs seeded into it: each is reported with its cause.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from archflash import sim
from archflash.sim._picture import draw
from archflash.sim._trace import chrome_trace, timeline

from .protocols.samples.kernels import ROWS, STAGE, TILE_K, WGMMA_COLUMNS, WGMMA_SHARED, wgmma_text

MODES = ("lazy", "eager", "random", "priority")
M, N, TILES = ROWS, WGMMA_COLUMNS, 5


def multiply(text: str, **options: object) -> tuple[sim.Report, torch.Tensor, torch.Tensor]:
    """The report, what the kernel gave, and what is right."""
    generator = torch.Generator().manual_seed(3)
    a = torch.randint(-4, 5, (M, TILE_K * TILES), generator=generator).to(torch.bfloat16)
    b = torch.randint(-4, 5, (TILE_K * TILES, N), generator=generator).to(torch.bfloat16)
    c = torch.zeros(M, N)
    maps = [
        sim.TensorMap(a, [64, 64], 128, writable=False, name="a"),
        sim.TensorMap(b, [64, 64], 128, writable=False, name="b"),
        sim.TensorMap(c, [128, 64], initialised=False, name="c"),
    ]
    options = {"block": (256,), "shared_bytes": WGMMA_SHARED, "check": False} | options
    report = sim.launch(sim.load(text), "test", [*maps, TILES], **options)
    return report, c.double(), a.double() @ b.double()


@pytest.mark.parametrize("mode", MODES)
def test_the_kernel_is_right(mode: str) -> None:
    for seed in range(3):
        report, result, expected = multiply(wgmma_text(), mode=mode, seed=seed)
        assert not report.findings
        assert torch.equal(result, expected)


COMMIT = "wgmma.commit_group.sync.aligned;"
ARRIVE = "@%p4 mbarrier.arrive.shared::cta.b64 _, [%r14+16];\n"
# The change, the kinds of findings of which one must be there, and what one of them must say.
BUGS = {
    "tx-bytes-high": ({"_, [%r34], 24576": "_, [%r34], 24592"}, {"deadlock"}, "16 bytes are exp"),
    "tx-bytes-low": ({"_, [%r34], 24576": "_, [%r34], 24560"}, {"deadlock"}, "16 bytes have come"),
    "arrive-count": ({"[%r4+16], 4;": "[%r4+16], 5;"}, {"deadlock"}, "1 of 5 arrivals pending"),
    "arrive-count-low": (
        {"[%r4+16], 4;": "[%r4+16], 3;"}, {"race", "mbarrier", "deadlock"}, "",
    ),
    "parity": ({"xor.b32 %r32, %r32, 1;": ""}, {"deadlock"}, "mbarrier"),
    "early-release": (
        {ARRIVE: "", COMMIT: ARRIVE + COMMIT},
        {"race"},
        "a wgmma of",
    ),
    "no-full-wait": (
        {"FULL:\nmbarrier.try_wait.parity.shared::cta.b64 %p3, [%r14], %r12;\n@!%p3 bra FULL;": ""},
        {"race", "uninitialised", "in-flight"},
        "wgmma",
    ),
    "no-empty-wait": (
        {
            "EMPTY:\nmbarrier.try_wait.parity.shared::cta.b64 %p6, [%r34+16], %r32;\n"
            "@!%p6 bra EMPTY;": ""
        },
        {"race", "mbarrier"},
        "",
    ),
    "no-proxy-fence": ({"fence.proxy.async.shared::cta;": ""}, {"proxy"}, "fence.proxy.async"),
    "no-mbarrier-fence": (
        {"fence.mbarrier_init.release.cluster;": ""}, {"mbarrier-fence"}, "fence.mbarrier_init",
    ),
    "tile-base": (
        {"mov.u32 %r3, smem;": "mov.u32 %r3, smem;\nadd.u32 %r3, %r3, 256;"},
        {"alignment"},
        "the pattern does not start",
    ),
    "sbo": ({"A_DESCRIPTOR": "0x4000002000010000"}, {"descriptor"}, "stride offset of 512"),
    "lbo": ({"B_DESCRIPTOR": "0x4000004001000000"}, {"descriptor"}, "leading offset of 4096"),
    "swizzle": ({"A_DESCRIPTOR": "0x8000004000010000"}, {"descriptor"}, "where TMA wrote with 128"),
    "registers": ({"aligned.u32 216": "aligned.u32 224"}, {"deadlock"}, "waits for 224 registers"),
    "no-store-wait": ({"cp.async.bulk.wait_group.read 0;": ""}, {"pending-copy"}, "wait_group"),
    "wait-of-one-warp": (
        {
            COMMIT: COMMIT + "\nsetp.ne.u32 %p8, %r1, 1;\n@%p8 bra OTHERS;\n"
            "wgmma.wait_group.sync.aligned 0;\nOTHERS:"
        },
        {"wgmma"},
        "all warps of a warpgroup",
    ),
    "no-product-wait": ({"wgmma.wait_group.sync.aligned 0;": ""}, {"wgmma"}, "wait_group"),
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bug", BUGS)
def test_a_seeded_bug_is_reported_with_its_cause(bug: str, mode: str) -> None:
    changes, kinds, words = BUGS[bug]
    extra = {"shared_bytes": WGMMA_SHARED + 256} if bug == "tile-base" else {}
    report, _, _ = multiply(wgmma_text(**changes), mode=mode, **extra)
    named = [f for f in report.findings if f.kind in kinds]
    assert named, report.findings
    assert any(words in f.message for f in named), named


FENCE = "wgmma.fence.sync.aligned;\n"


def test_registers_that_others_used_need_a_fence_before_wgmma_uses_them() -> None:
    text = wgmma_text()
    late = text.replace(FENCE, FENCE + "@%p2 mul.f32 %d9, %d9, 0f3F800000;\n")
    early = text.replace(FENCE, "@%p2 mul.f32 %d9, %d9, 0f3F800000;\n" + FENCE)
    registers = wgmma_text(a_in_registers=True)
    loads = registers.index("and.b32 %r40"), registers.index(FENCE)
    fence_first = (
        registers[: loads[0]]
        + FENCE
        + registers[slice(*loads)]
        + registers[loads[1] + len(FENCE) :]
    )
    for mode in MODES:
        for changed, words in ((late, "an accumulator"), (fence_first, "a register of matrix A")):
            report, _, _ = multiply(changed, mode=mode)
            assert {(f.kind, f.severity) for f in report.findings} == {("wgmma-fence", "lint")}
            assert all(words in finding.message for finding in report.findings)
        assert not multiply(early, mode=mode)[0].findings


def test_a_trace_shows_copies_and_what_waits_waited_for() -> None:
    report, _, _ = multiply(wgmma_text(), mode="lazy", traced_ctas=1)
    trace = report.traces[0]
    work = [e for e in trace.events if e.kind == "async"]
    copies = [e for e in work if trace.tracks[e.track] == "bulk copies"]
    assert sum(e.bytes for e in copies) == TILES * STAGE + 4 * M * N
    assert all(e.end > e.begin for e in copies)
    waits = [e for e in trace.events if e.kind == "wait" and e.label.startswith("mbarrier")]
    by_copies = {e.track for e in waits if e.cause == copies[0].track}
    assert by_copies == {0, 1, 2, 3}  # full: ended by the bytes
    by_warps = [e for e in waits if e.cause in (0, 1, 2, 3)]
    assert by_warps  # empty: ended by the last of the warps that multiply
    assert {e.track for e in by_warps} == {4}
    products = [e for e in work if e not in copies]
    assert {trace.tracks[e.track] for e in products} == {"tensor pipe"}
    assert Counter(e.label for e in products) == {f"of warp {w}": 4 * TILES for w in range(4)}
    # A product is under way from its issue to the wait, and the wait shows what it waited for.
    waits = [e for e in trace.events if e.kind == "wait" and e.label == "4 wgmma"]
    assert Counter(e.track for e in waits) == dict.fromkeys(range(4), TILES)
    assert {trace.tracks[e.cause] for e in waits} == {"tensor pipe"}
    assert all(e.begin < e.end <= e.seen and e.bytes == 0 for e in products)


def test_the_tensor_pipe_is_in_the_files_of_a_trace() -> None:
    report, _, _ = multiply(wgmma_text(), mode="lazy", traced_ctas=1)
    line = timeline(report, 0)
    events = chrome_trace([line], report.listing)["traceEvents"]
    rows = {
        e["args"]["name"]: e["tid"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"
    }
    for warp in range(4):
        groups = [
            e["args"]["products"]
            for e in events
            if e["ph"] == "X" and e["tid"] == rows[f"tensor pipe of warp {warp}"]
        ]
        assert groups == [4] * TILES
    texts = [shape["text"] for kind, shape in draw(line, "t").shapes if kind == "text"]
    assert "tensor pipe" in texts
