"""An instruction that a target lacks is refused, and none that it has: as ptxas says."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from bench.on_the_spot import find_nvcc

from archflash import LaunchError, sim

KERNEL = """.version 9.0
.target {target}
.address_size 64
.visible .entry k(.param .u64 p) .maxntid 128
{{
.reg .pred %p<4>; .reg .b16 %h<8>; .reg .b32 %r<24>; .reg .b64 %d<8>;
.reg .f32 %f<12>; .reg .f64 %g<8>; .reg .b128 %q<2>;
ld.param.u64 %d0, [p];
{statement}
ret;
}}
"""
TARGETS = [
    "75", "80", "86", "89", "90", "90a", "100", "100f", "100a", "103f", "103a", "110", "110f",
    "110a", "120", "120f", "120a", "121f",
]  # fmt: skip
# Statements by the targets that they need (sim/load/targets.h); with "" all have them.
STATEMENTS = {
    "": [
        "tanh.approx.f32 %f1, %f2;",
        "add.f16 %h1, %h2, %h3;",
        "neg.f16x2 %r1, %r2;",
        "ex2.approx.f16x2 %r1, %r2;",
        "setp.lt.f16 %p1, %h1, %h2;",
        "cvt.rn.f16.f32 %h1, %f1;",
        "ld.global.b128 %q0, [%d0];",
        "ld.global.L1::no_allocate.L2::128B.b32 %r1, [%d0];",
        "ld.acquire.gpu.global.b32 %r1, [%d0];",
        "atom.global.add.noftz.f16x2 %r1, [%d0], %r2;",
        "fence.acq_rel.gpu;",
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1,%r2,%r3,%r4}, [%r5];",
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
        "{%f0,%f1,%f2,%f3}, {%r1,%r2}, {%r3}, {%f0,%f1,%f2,%f3};",
        "mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%r1,%r2}, {%r3}, {%r4}, {%r1,%r2};",
    ],
    "80": [
        "min.NaN.f32 %f1, %f2, %f3;",
        "fma.rn.relu.f16 %h1, %h2, %h3, %h4;",
        "fma.rn.bf16x2 %r1, %r2, %r3, %r4;",
        "max.f16 %h1, %h2, %h3;",
        "neg.bf16x2 %r1, %r2;",
        "cvt.rn.bf16.f32 %h1, %f1;",
        "cvt.f32.bf16 %f1, %h1;",
        "cvt.rn.f16x2.f32 %r1, %f1, %f2;",
        "cvt.rna.tf32.f32 %r1, %f1;",
        "ld.global.L2::cache_hint.b32 %r1, [%d0], %d1;",
        "ld.global.L2::256B.b32 %r1, [%d0];",
        "prefetch.global.L2::evict_last [%d0];",
        "createpolicy.fractional.L2::evict_last.b64 %d1, 1.0;",
        "cp.async.cg.shared.global [%r1], [%d0], 16;",
        "cp.async.wait_all;",
        "redux.sync.add.u32 %r1, %r2, -1;",
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%f0,%f1,%f2,%f3}, {%r1,%r2,%r3,%r4}, {%r5,%r6}, {%f0,%f1,%f2,%f3};",
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
        "{%r7,%r8,%r9,%r10}, {%r1,%r2,%r3,%r4}, {%r5,%r6}, {%r7,%r8,%r9,%r10};",
        "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%g0,%g1}, {%g2}, {%g3}, {%g0,%g1};",
        "mbarrier.init.shared::cta.b64 [%r1], 1;",
        "mbarrier.arrive.shared::cta.b64 %d1, [%r1];",
        "mbarrier.test_wait.parity.shared::cta.b64 %p1, [%r1], 1;",
    ],
    "86": ["min.xorsign.abs.f32 %f1, %f2, %f3;"],
    "89": [
        "cvt.rn.satfinite.e4m3x2.f32 %h1, %f1, %f2;",
        "cvt.rn.f16x2.e5m2x2 %r1, %h1;",
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
        "{%f0,%f1,%f2,%f3}, {%r1,%r2,%r3,%r4}, {%r5,%r6}, {%f0,%f1,%f2,%f3};",
    ],
    "90": [
        "max.relu.s32 %r1, %r2, %r3;",
        "fma.rn.oob.f16 %h1, %h2, %h3, %h4;",
        "mul.bf16x2 %r1, %r2, %r3;",
        "ex2.approx.ftz.bf16x2 %r1, %r2;",
        "setp.lt.bf16 %p1, %h1, %h2;",
        "cvt.rn.bf16.s32 %h1, %r1;",
        "cvt.rn.tf32.f32 %r1, %f1;",
        "ld.acquire.cluster.global.b32 %r1, [%d0];",
        "ld.shared::cluster.b32 %r1, [%r2];",
        "atom.global.add.noftz.bf16x2 %r1, [%d0], %r2;",
        "red.relaxed.gpu.global.add.v4.f32 [%d0], {%f1,%f2,%f3,%f4};",
        "fence.acq_rel.cluster;",
        "fence.proxy.async.shared::cta;",
        "elect.sync %r1|%p1, -1;",
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r5], {%r1,%r2,%r3,%r4};",
        "mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 "
        "{%g0,%g1,%g2,%g3}, {%g2,%g3,%g4,%g5}, {%g3,%g4}, {%g0,%g1,%g2,%g3};",
        "mbarrier.arrive.shared::cta.b64 %d1, [%r1], 2;",
        "mbarrier.arrive.release.cluster.shared::cta.b64 %d1, [%r1];",
        "mbarrier.arrive.expect_tx.shared::cta.b64 %d1, [%r1], 16;",
        "mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r1], 1;",
        "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%d0], 16, [%r2];",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%d0], [%r1], 16;",
        "cp.async.bulk.wait_group 0;",
        "prefetch.tensormap [%d0];",
        "barrier.cluster.arrive.release.aligned;",
        "mapa.shared::cluster.u32 %r1, %r2, %r3;",
        "mov.u32 %r1, %cluster_ctarank;",
        "griddepcontrol.wait;",
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r1], %r2, [%r3];",
    ],
    "100": [
        "fma.rn.f32x2 %d1, %d2, %d3, %d4;",
        "max.f32 %f1, %f2, %f3, %f4;",
        "cvt.rn.satfinite.tf32.f32 %r1, %f1;",
        "ld.global.v8.b32 {%r1,%r2,%r3,%r4,%r5,%r6,%r7,%r8}, [%d0];",
        "st.global.v4.b64 [%d0], {%d1,%d2,%d3,%d4};",
        "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p1, %q0;",
    ],
    "90a": [
        "wgmma.fence.sync.aligned;",
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
        "{%f0, %f1, %f2, %f3}, %d1, %d2, 1, 1, 1, 0, 0;",
    ],
    "90a|100f|110f|120f": ["setmaxnreg.dec.sync.aligned.u32 64;"],
    "100f": ["redux.sync.min.f32 %f1, %f2, -1;"],
    "100f|110f": [
        "tcgen05.wait::ld.sync.aligned;",
        "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;",
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".cta_group::2 [%r1], [%d0, {%r3,%r4}], [%r2];",
    ],
    "100f|110f|120f": [
        "cvt.rn.satfinite.e2m3x2.f32 %h1, %f1, %f2;",
        "cvt.rz.ue8m0x2.f32 %h1, %f1, %f2;",
        "mma.sync.aligned.kind::f8f6f4.m16n8k32.row.col.f32.e4m3.e5m2.f32 "
        "{%f0,%f1,%f2,%f3}, {%r1,%r2,%r3,%r4}, {%r5,%r6}, {%f0,%f1,%f2,%f3};",
        "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes"
        ".multicast::cluster::all.b128 [%r1], [%r2];",
    ],
    "120f": [
        "mma.sync.aligned.kind::f8f6f4.m16n8k32.row.col.f32.e2m1.e3m2.f32 "
        "{%f0,%f1,%f2,%f3}, {%r1,%r2,%r3,%r4}, {%r5,%r6}, {%f0,%f1,%f2,%f3};",
        "mma.sync.aligned.kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32.row.col.f32.e4m3.e5m2"
        ".f32.ue8m0 {%f0,%f1,%f2,%f3}, {%r1,%r2,%r3,%r4}, {%r5,%r6}, {%f0,%f1,%f2,%f3}, "
        "%r7, {3, 1}, {%r8}, {0, %h1};",
        "mma.sync.aligned.m16n8k64.row.col.kind::mxf4.block_scale.f32.e2m1.e2m1"
        ".f32.ue8m0 {%f0,%f1,%f2,%f3}, {%r1,%r2,%r3,%r4}, {%r5,%r6}, {%f0,%f1,%f2,%f3}, "
        "%r7, {2, 1}, %r8, {0, 3};",
        "mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1"
        ".f32.ue4m3 {%f0,%f1,%f2,%f3}, {%r1,%r2,%r3,%r4}, {%r5,%r6}, {%f0,%f1,%f2,%f3}, "
        "%r7, {0, 1}, %r8, {0, 3};",
    ],
    "100a|103a|110a": ["tcgen05.shift.cta_group::1.down [%r1];"],
}
ALL = [statement for statements in STATEMENTS.values() for statement in statements]


def has(target: str, needed: str) -> bool:
    """Whether a target is one of those that a key of STATEMENTS names."""

    def is_one(name: str) -> bool:
        number, least = (int(re.sub(r"\D", "", x)) for x in (target, name))
        if name.endswith("a"):
            return target == name
        if name.endswith("f"):
            return target[-1] in "af" and number // 10 == least // 10 and number >= least
        return number >= least

    return not needed or any(map(is_one, needed.split("|")))


def refusal(target: str, statement: str) -> str:
    """Why the simulator does not load a statement; empty: it does."""
    try:
        sim.load(KERNEL.format(target=f"sm_{target}", statement=statement))
    except LaunchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_has_the_instructions_that_it_should(target: str) -> None:
    for needed, statements in STATEMENTS.items():
        for statement in statements:
            said = refusal(target, statement)
            assert (not said) == has(target, needed), (statement, said)
            assert not said or f"and this is sm_{target}" in said


def test_the_sentence_names_what_is_needed() -> None:
    for target, statement, words in (
        (
            "80",
            "mul.bf16x2 %r1, %r2, %r3;",
            "mul.bf16x2 %r1, %r2, %r3 needs target sm_90 or higher",
        ),
        ("90", "wgmma.fence.sync.aligned;", "needs target sm_90a, and this is sm_90"),
        ("120f", "tcgen05.wait::ld.sync.aligned;", "sm_100f, sm_110f, or a higher one of such a"),
    ):
        with pytest.raises(LaunchError, match=re.escape(words)):
            sim.load(KERNEL.format(target=f"sm_{target}", statement=statement))


@pytest.mark.parametrize("target", TARGETS)
def test_ptxas_refuses_the_same(target: str, tmp_path: Path) -> None:
    """One module with all statements: ptxas names the line of each that the target lacks."""
    nvcc = find_nvcc()
    ptxas = Path(nvcc).resolve().with_name("ptxas") if nvcc else None
    if ptxas is None or not ptxas.exists():
        pytest.skip("ptxas is not beside nvcc")
    text = KERNEL.format(target=f"sm_{target}", statement="\n".join(ALL))
    (tmp_path / "x.ptx").write_text(text)
    done = subprocess.run(
        [str(ptxas), f"-arch=sm_{target}", "-o", "x.cubin", "x.ptx"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    first = text.splitlines().index(ALL[0]) + 1
    refused = {ALL[int(line) - first] for line in re.findall(r"line (\d+); error", done.stderr)}
    needed = {x: key for key, statements in STATEMENTS.items() for x in statements}
    assert refused == {x for x in ALL if not has(target, needed[x])}, done.stderr
