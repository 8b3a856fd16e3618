"""clusterlaunchcontrol: running clusters take the work of clusters that have not started."""

from __future__ import annotations

import pytest
import torch

from archflash import sim

from .schedules import MODES

# A CTA counts the clusters that it has computed, and writes the count for each of them. It asks for
# a further cluster before it computes one, until none is left.
KERNEL = """.version 8.8
.target sm_100f
.address_size 64
.visible .entry test(.param .u64 out)
{
.reg .pred %p<8>;
.reg .b32 %r<20>;
.reg .b64 %rd<8>;
.reg .b128 %q<2>;
.shared .align 16 .b8 response[16];
.shared .align 8 .b64 full;
ld.param.u64 %rd0, [out];
mov.u32 %r0, %tid.x;
mov.u32 %r1, %cluster_ctarank;
mov.u32 %r2, %ctaid.x;
sub.u32 %r2, %r2, %r1;
mov.u32 %r3, response;
mov.u32 %r4, full;
mov.u32 %r5, 0;
mov.u32 %r10, 0;
setp.eq.u32 %p0, %r0, 0;
setp.eq.and.u32 %p1, %r1, 0, %p0;
@!%p0 bra START;
mbarrier.init.shared::cta.b64 [%r4], 1;
fence.mbarrier_init.release.cluster;
START:
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
NEXT:
@%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r4], 16;
@%p1 clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.ALL.b128
    [%r3], [%r4];
add.u32 %r6, %r2, %r1;
mul.wide.u32 %rd1, %r6, 4;
add.u64 %rd1, %rd0, %rd1;
add.u32 %r10, %r10, 1;
@%p0 st.global.u32 [%rd1], %r10;
WAIT:
mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r4], %r5;
@!%p2 bra WAIT;
xor.b32 %r5, %r5, 1;
ld.shared.b128 %q0, [%r3];
clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p3, %q0;
@!%p3 bra END;
clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%r2, %r7, %r8, %r9}, %q0;
fence.proxy.async.shared::cta;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
bra NEXT;
END:
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
ret;
}
"""
PAIR = KERNEL.replace(".ALL.", ".multicast::cluster::all.")
ALONE = KERNEL.replace(".ALL.", ".")


def launch(
    text: str, ctas: int, cluster: int = 1, **options: object
) -> tuple[sim.Report, list[int]]:
    out = torch.zeros(ctas, dtype=torch.int32)
    limit = {"max_instructions": 1 << 16, "check": False}
    options = {"grid": (ctas,), "cluster": (cluster,)} | limit | options
    report = sim.launch(sim.load(text), "test", [out], **options)
    return report, out.tolist()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cluster", [1, 2])
def test_every_cluster_is_computed_once_by_whoever_gets_it(mode: str, cluster: int) -> None:
    started = set()
    for seed in range(4):
        text = PAIR if cluster == 2 else ALONE
        report, counts = launch(text, 12, cluster, mode=mode, seed=seed, block=(64,))
        assert not report.findings, report
        assert all(counts)
        assert counts[::cluster] == counts[cluster - 1 :: cluster]
        started.add(counts.count(1))
    if mode == "lazy":
        assert started == {cluster}  # the first cluster takes all
    elif mode == "eager":
        assert started == {12}  # all start at once
    else:
        assert len(started) > 1


@pytest.mark.parametrize("mode", MODES)
def test_no_more_clusters_start_than_there_is_room_for(mode: str) -> None:
    for resident, cluster in ((3, 1), (5, 2), (1, 2)):
        text = PAIR if cluster == 2 else ALONE
        report, counts = launch(text, 24, cluster, mode=mode, seed=2, resident_ctas=resident)
        assert not report.findings, report
        assert all(counts)
        most = max(resident // cluster, 1)
        if mode in ("lazy", "eager"):  # in the other modes a request may be refused
            assert counts[::cluster].count(1) == (1 if mode == "lazy" else most)


@pytest.mark.parametrize("cluster", [1, 2])
def test_a_request_may_be_refused_while_clusters_have_not_started(cluster: int) -> None:
    """Those start then by themselves: without a refusal the first cluster takes all."""
    text = PAIR if cluster == 2 else ALONE
    alone = []
    for seed in range(8):
        report, counts = launch(text, 24, cluster, resident_ctas=1, seed=seed)
        assert not report.findings, report
        assert all(counts)
        alone.append(counts[::cluster].count(1))
    assert min(alone) == 1
    assert max(alone) > 1


def test_a_kernel_that_relies_on_its_requests_is_reported() -> None:
    """It computes as many clusters as there are, and does not look whether requests succeed."""
    counts = ALONE.replace("@!%p3 bra END;", "setp.lt.u32 %p3, %r10, 24;\n@!%p3 bra END;")
    assert not launch(counts, 24, mode="lazy")[0].findings
    reports = [launch(counts, 24, resident_ctas=1, seed=seed)[0] for seed in range(4)]
    assert {f.kind for report in reports for f in report.findings} == {"launch-control"}


def test_a_run_does_not_depend_on_the_number_of_threads() -> None:
    for seed in range(3):
        runs = [launch(ALONE, 40, seed=seed, threads=threads)[1] for threads in (1, 3)]
        assert runs[0] == runs[1]


@pytest.mark.parametrize("mode", MODES)
def test_clusters_that_nobody_asks_for_start(mode: str) -> None:
    once = ALONE.replace("bra NEXT;\nEND", "bra END;\nEND")
    report, counts = launch(once, 9, mode=mode)
    assert not report.findings, report
    # What a cluster has taken and not computed is lost; all others are computed.
    lost = counts.count(0)
    assert lost == {"lazy": 1, "eager": 0}.get(mode, lost)
    assert lost <= 4


SYNC = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n"
BUGS = {
    # The next response may overwrite this one before the other warp has read it.
    "reused-early": (SYNC + "bra NEXT;", "bra NEXT;", {"race", "in-flight", "proxy"}, ""),
    "not-waited": (
        "mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r4], %r5;\n@!%p2 bra WAIT;",
        "",
        {"race", "in-flight", "uninitialised"},
        "",
    ),
    "failed": ("@!%p3 bra END;", "", {"launch-control"}, "that failed"),
    "misaligned": ("[%r3], [%r4];", "[%r3+8], [%r4];", {"misaligned"}, ""),
    "no-response": (
        "ld.shared.b128 %q0, [%r3];",
        "mov.u64 %rd5, 7;\nmov.b128 %q0, {%rd5, %rd5};",
        {"launch-control"},
        "no response",
    ),
    "bytes": ("_, [%r4], 16;", "_, [%r4], 32;", {"deadlock"}, "16 bytes are expected"),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("bug", BUGS)
def test_a_seeded_bug_is_reported_with_its_cause(bug: str, cluster: int, mode: str) -> None:
    old, new, kinds, words = BUGS[bug]
    text = PAIR if cluster == 2 else ALONE
    assert old in text
    options = {"mode": mode, "block": (64,), "resident_ctas": 2 * cluster}
    report, _ = launch(text.replace(old, new), 12, cluster, **options)
    assert [f for f in report.findings if f.kind in kinds and words in f.message], report


@pytest.mark.parametrize("mode", MODES)
def test_a_request_after_one_that_failed_is_an_error(mode: str) -> None:
    again = ALONE.replace("@!%p3 bra END;\n", "")
    again = again.replace(
        "clusterlaunchcontrol.query_cancel.get", "@%p3 clusterlaunchcontrol.query_cancel.get"
    )
    report, _ = launch(again, 3, mode=mode)
    (found,) = [f for f in report.findings if f.kind == "launch-control"][:1]
    assert "earlier one failed" in found.message


def test_one_coordinate_of_the_first_cta_is_read_at_a_time() -> None:
    one = ALONE.replace(
        "get_first_ctaid.v4.b32.b128 {%r2, %r7, %r8, %r9}", "get_first_ctaid::x.b32.b128 %r2"
    )
    for dimension in "yz":
        one = one.replace(
            "fence.proxy.async",
            f"clusterlaunchcontrol.query_cancel.get_first_ctaid::{dimension}.b32.b128 %r7, %q0;\n"
            "setp.ne.u32 %p5, %r7, 0;\n@%p5 trap;\nfence.proxy.async",
            1,
        )
    report, counts = launch(one, 7, mode="lazy")
    assert not report.findings, report
    assert counts == [1, 2, 3, 4, 5, 6, 7]
