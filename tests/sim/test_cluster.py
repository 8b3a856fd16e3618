"""Clusters: shared memory of other CTAs, barriers, multicast; and the pool of registers."""

from __future__ import annotations

import pytest
import torch
from bench.on_the_spot import find_nvcc

from archflash import sim
from archflash.sim import _attention

from ..gpu import pair_of_roles
from .test_tma import MODES, WAIT, kernel, run, tensor

HEADER = """.version 8.7
.target sm_90a
.address_size 64
"""

# Each CTA of two gives its rank and thread to the other one's shared memory.
EXCHANGE = """
.visible .entry test(.param .u64 out)
{
.reg .pred %p<4>;
.reg .b32 %r<20>;
.reg .b64 %rd<8>;
.shared .align 16 .b8 box[128];
.shared .align 8 .b64 bar;
ld.param.u64 %rd0, [out];
mov.u32 %r0, %tid.x;
mov.u32 %r1, %cluster_ctarank;
xor.b32 %r2, %r1, 1;
setp.ne.u32 %p0, %r0, 0;
mov.u32 %r10, bar;
@%p0 bra READY;
mbarrier.init.shared::cta.b64 [%r10], 32;
fence.mbarrier_init.release.cluster;
READY:
barrier.cluster.arrive.relaxed.aligned;
barrier.cluster.wait.aligned;
mov.u32 %r3, box;
shl.b32 %r4, %r0, 2;
add.u32 %r3, %r3, %r4;
mapa.shared::cluster.u32 %r5, %r3, %r2;
mad.lo.u32 %r6, %r1, 100, %r0;
st.shared::cluster.u32 [%r5], %r6;
mapa.shared::cluster.u32 %r11, %r10, %r2;
mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r11];
WAIT:
mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p1, [%r10], 0;
@!%p1 bra WAIT;
ld.shared.u32 %r7, [%r3];
mad.lo.u32 %r8, %r1, 32, %r0;
mad.wide.u32 %rd1, %r8, 4, %rd0;
getctarank.shared::cluster.u32 %r9, %r11;
mad.lo.u32 %r7, %r9, 1000, %r7;
st.global.u32 [%rd1], %r7;
barrier.cluster.arrive.release.aligned;
barrier.cluster.wait.acquire.aligned;
ret;
}
"""


def exchange(text: str, size: int = 128, **options: object) -> tuple[sim.Report, torch.Tensor]:
    out = torch.zeros(size, dtype=torch.int32)
    program = sim.load(HEADER + text)
    options = {"grid": (2,), "cluster": (2,), "check": False} | options
    return sim.launch(program, "test", [out], **options), out


@pytest.mark.parametrize("mode", MODES)
def test_ctas_of_a_cluster_reach_each_others_shared_memory(mode: str) -> None:
    for seed in range(3):
        report, out = exchange(EXCHANGE, mode=mode, seed=seed)
        assert not report.findings
        lanes = torch.arange(32, dtype=torch.int32)
        assert torch.equal(out[:64], torch.cat([1000 + 100 + lanes, lanes]))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("@!%p1 bra WAIT;", "", "race"),
        ("st.shared::cluster.u32 [%r5]", "st.shared.u32 [%r5]", "out-of-bounds"),
        ("fence.mbarrier_init.release.cluster;", "", "mbarrier-fence"),
        ("bar], 32", "bar], 33", "deadlock"),
        ("mov.u32 %r2, 3;", "", "cluster"),
        ("barrier.cluster.wait.aligned;", "", "mbarrier"),
        ("barrier.cluster.wait.acquire.aligned;", "barrier.cluster.arrive.aligned;", "barrier"),
    ],
)
def test_what_is_wrong_between_ctas_is_named(old: str, new: str, kind: str, mode: str) -> None:
    text = EXCHANGE
    if kind == "cluster":
        text = text.replace(
            "mapa.shared::cluster.u32 %r5", "mov.u32 %r2, 3;\n" + "mapa.shared::cluster.u32 %r5"
        )
    elif kind == "deadlock":
        text = text.replace("[%r10], 32", "[%r10], 33")
    else:
        assert old in text
        text = text.replace(old, new, 1)
    if kind == "race":
        kinds = {f.kind for seed in range(8) for f in exchange(text, seed=seed)[0].findings}
        assert kinds & {"race", "uninitialised"}
        return
    report, _ = exchange(text, mode=mode)
    assert kind in {f.kind for f in report.findings}, report.findings


@pytest.mark.parametrize("mode", MODES)
def test_ctas_of_a_cluster_write_the_same_words_in_order(mode: str) -> None:
    # CTA 1 writes first, and CTA 0 after the barrier of the cluster.
    text = """
    .visible .entry test(.param .u64 out)
    {
    .reg .pred %p<2>;
    .reg .b32 %r<4>;
    .reg .b64 %rd<3>;
    ld.param.u64 %rd0, [out];
    mov.u32 %r0, %tid.x;
    mov.u32 %r1, %cluster_ctarank;
    mad.wide.u32 %rd1, %r0, 4, %rd0;
    setp.eq.u32 %p0, %r1, 0;
    @!%p0 st.global.u32 [%rd1], %r1;
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;
    @%p0 st.global.u32 [%rd1], 7;
    ret;
    }
    """
    report, out = exchange(text, mode=mode)
    assert not report.findings
    assert out[:32].tolist() == [7] * 32
    for opcode in ("arrive.release", "wait.acquire"):
        text = text.replace(f"barrier.cluster.{opcode}.aligned;", "")
    report, _ = exchange(text, mode=mode)
    assert {f.kind for f in report.findings} == {"race"}
    # CTAs of different clusters are never in order.
    report, _ = exchange(text, mode=mode, grid=(4,))
    assert {f.kind for f in report.findings} == {"race"}


@pytest.mark.parametrize("mode", MODES)
def test_a_cta_that_leaves_its_cluster_early_is_reported(mode: str) -> None:
    # CTA 0 exits at once; CTA 1 works for a while and then writes to the shared memory of CTA 0.
    text = EXCHANGE.replace(
        "mapa.shared::cluster.u32 %r5",
        """setp.eq.u32 %p2, %r1, 0;
        @%p2 bra GONE;
        mov.u32 %r12, 0;
        SPIN:
        add.u32 %r12, %r12, 1;
        setp.lt.u32 %p3, %r12, 2000;
        @%p3 bra SPIN;
        mapa.shared::cluster.u32 %r5""",
        1,
    ).replace("ret;", "GONE:\nret;")
    report, _ = exchange(text, mode=mode)
    assert "exited-cta" in {f.kind for f in report.findings}


MULTICAST = (
    """
mov.u32 %r5, %cluster_ctarank;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
@!%p0 bra LOADED;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r30], 4096;
shl.b32 %r6, %r5, 4;
shl.b32 %r7, %r5, 11;
add.u32 %r8, %r31, %r7;
cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
    [%r8], [%map, {0, %r6}], [%r30], 3;
LOADED:
"""
    + WAIT.format(n=0, parity=0)
    + """
mov.u32 %r1, %r0;
COPY:
shl.b32 %r2, %r1, 2;
add.u32 %r3, %r2, %r31;
ld.shared.u32 %r4, [%r3];
mad.lo.u32 %r2, %r5, 4096, %r2;
cvt.u64.u32 %rd1, %r2;
add.u64 %rd1, %rd1, %out;
st.global.u32 [%rd1], %r4;
add.u32 %r1, %r1, 32;
setp.lt.u32 %p1, %r1, 1024;
@%p1 bra COPY;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
"""
)


# Each CTA of two stores two words a thread in the other one's shared memory, and adds to its four
# counters.
STORE_ASYNC = """
.visible .entry test(.param .u64 out)
{
.reg .pred %p<4>;
.reg .b32 %r<20>;
.reg .b64 %rd<8>;
.shared .align 16 .b8 box[256];
.shared .align 16 .b8 counters[16];
.shared .align 8 .b64 bar;
ld.param.u64 %rd0, [out];
mov.u32 %r0, %tid.x;
mov.u32 %r1, %cluster_ctarank;
xor.b32 %r2, %r1, 1;
setp.ne.u32 %p0, %r0, 0;
mov.u32 %r10, bar;
mov.u32 %r12, counters;
@%p0 bra READY;
mbarrier.init.shared::cta.b64 [%r10], 1;
fence.mbarrier_init.release.cluster;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r10], 384;
st.shared.v4.u32 [%r12], {1000, 2000, 3000, 4000};
READY:
barrier.cluster.arrive.release.aligned;
barrier.cluster.wait.acquire.aligned;
mov.u32 %r3, box;
shl.b32 %r4, %r0, 3;
add.u32 %r3, %r3, %r4;
mapa.shared::cluster.u32 %r5, %r3, %r2;
mapa.shared::cluster.u32 %r11, %r10, %r2;
mad.lo.u32 %r6, %r1, 100, %r0;
add.u32 %r7, %r6, 500;
st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%r5], {%r6, %r7}, [%r11];
and.b32 %r13, %r0, 3;
shl.b32 %r13, %r13, 2;
add.u32 %r13, %r13, %r12;
mapa.shared::cluster.u32 %r14, %r13, %r2;
red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32
    [%r14], %r6, [%r11];
WAIT:
mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p1, [%r10], 0;
@!%p1 bra WAIT;
ld.shared.v2.u32 {%r6, %r7}, [%r3];
ld.shared.u32 %r8, [%r13];
mad.lo.u32 %r9, %r1, 32, %r0;
mad.wide.u32 %rd1, %r9, 16, %rd0;
st.global.v4.u32 [%rd1], {%r6, %r7, %r8, %r9};
barrier.cluster.arrive.release.aligned;
barrier.cluster.wait.acquire.aligned;
ret;
}
"""


@pytest.mark.parametrize("mode", MODES)
def test_asynchronous_stores_and_reductions_arrive_with_their_bytes(mode: str) -> None:
    for seed in range(3):
        report, out = exchange(STORE_ASYNC, size=256, mode=mode, seed=seed)
        assert not report.findings
        rows = out.view(2, 32, 4)
        for rank in range(2):
            sent = torch.arange(32, dtype=torch.int32) + 100 * (1 - rank)
            assert torch.equal(rows[rank, :, 0], sent)
            assert torch.equal(rows[rank, :, 1], sent + 500)
            sums = torch.arange(1000, 5000, 1000) + sent.view(8, 4).sum(0)
            assert torch.equal(rows[rank, :, 2].view(8, 4), sums.int().expand(8, 4))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("old", "new", "kinds"),
    [
        (
            "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p1, [%r10], 0;\n"
            "@!%p1 bra WAIT;",
            "",
            {"race", "in-flight", "uninitialised"},
        ),
        ("_, [%r10], 384", "_, [%r10], 400", {"deadlock"}),
        ("_, [%r10], 384", "_, [%r10], 368", {"race", "in-flight", "pending-copy"}),
        ("st.shared.v4.u32 [%r12], {1000, 2000, 3000, 4000};", "", {"uninitialised"}),
        ("{%r6, %r7}, [%r11];", "{%r6, %r7}, [%r10];", {"mbarrier"}),
        (".add.u32\n    [%r14]", ".add.u32\n    [%r5]", {"race"}),
        ("[%r5], {%r6, %r7}", "[%r5+4], {%r6, %r7}", {"misaligned"}),
        ("[%r5], {%r6, %r7}", "[%r11], {%r6, %r7}", {"mbarrier"}),
    ],
)  # fmt: skip
def test_what_is_wrong_with_asynchronous_stores_is_named(
    old: str, new: str, kinds: set[str], mode: str
) -> None:
    assert STORE_ASYNC.count(old) == 1
    report, _ = exchange(STORE_ASYNC.replace(old, new), size=256, mode=mode)
    assert kinds & {f.kind for f in report.findings}, report.findings


@pytest.mark.parametrize("mode", MODES)
def test_multicast_gives_every_cta_both_halves(mode: str) -> None:
    source = tensor(32, 64)
    out = torch.zeros(2, 32, 64, dtype=torch.int16)
    map_ = sim.TensorMap(source, [64, 16])
    report = run(kernel(MULTICAST), map_, out, grid=(2,), cluster=(2,), mode=mode, seed=5)
    assert not report.findings
    assert torch.equal(out[0], source)
    assert torch.equal(out[1], source)
    few = kernel(MULTICAST).replace("[%r30], 3;", "[%r30], 1;")
    found = run(few, map_, out, grid=(2,), cluster=(2,), mode=mode, check=False).findings
    assert {f.kind for f in found} & {"deadlock", "mbarrier"}
    absent = kernel(MULTICAST).replace("[%r30], 3;", "[%r30], 5;")
    found = run(absent, map_, out, grid=(2,), cluster=(2,), mode=mode, check=False).findings
    assert "multicast" in {f.kind for f in found}


REGISTERS = """
.visible .entry test(.param .u64 out) .maxntid 256 .minnctapersm 1
{{
.reg .pred %p<4>;
.reg .b32 %r<4>;
mov.u32 %r0, %tid.x;
setp.lt.u32 %p0, %r0, 128;
@%p0 bra LOW;
setmaxnreg.inc.sync.aligned.u32 {high};
bra DONE;
LOW:
setmaxnreg.dec.sync.aligned.u32 {low};
DONE:
griddepcontrol.wait;
ret;
}}
"""


@pytest.mark.parametrize("mode", MODES)
def test_registers_come_from_the_pool(mode: str) -> None:
    def launch(low: int, high: int) -> sim.Report:
        text = HEADER + REGISTERS.format(low=low, high=high).replace("256 .min", "512 .min")
        return sim.launch(
            sim.load(text), "test", [torch.zeros(4)], block=(256,), mode=mode, check=False
        )

    assert not launch(24, 232).findings  # 128 at the launch
    found = launch(24, 240).findings
    assert [f.kind for f in found] == ["deadlock"]
    assert "waits for 240 registers" in found[0].message
    assert "232" not in found[0].message
    assert [f.kind for f in launch(136, 232).findings][:1] == ["registers"]


def test_some_warps_of_a_warpgroup_do_not_change_registers_alone() -> None:
    text = HEADER + REGISTERS.format(low=24, high=232).replace("%r0, 128", "%r0, 32").replace(
        "setmaxnreg.inc.sync.aligned.u32 232;", ""
    )
    found = sim.launch(sim.load(text), "test", [torch.zeros(4)], block=(256,), check=False).findings
    assert [f.kind for f in found] == ["registers"]
    assert "warpgroup" in found[0].message


@pytest.mark.skipif(find_nvcc() is None, reason="nvcc is not found")
@pytest.mark.parametrize("mode", MODES)
def test_the_pair_of_roles_that_cards_run_is_right_here_too(mode: str) -> None:
    program = sim.load(pair_of_roles.compiled(str(find_nvcc()), "ptx").decode())
    for tiles, clusters in ((5, 2), (9, 1)):  # with 9, the ring of 7 stages is used again
        tensors = pair_of_roles.tensors(tiles, "cpu")
        plan = pair_of_roles.plan(tiles, clusters)
        settings = _attention.Settings(mode=mode, program=program, check=False)
        (report,) = _attention.simulate(plan, tensors, settings)
        assert not report.findings
        assert torch.equal(tensors["out"], pair_of_roles.expected(tensors["q"]))
