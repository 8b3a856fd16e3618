"""CTAs of a cluster start and exit at times of their own: what a CTA uses of another one must come
after that CTA's start and before its exit, as the program knows them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from archflash import sim

from . import test_tcgen05 as tensor
from .test_cluster import HEADER, MULTICAST
from .test_tma import kernel, run
from .test_tma import tensor as matrix

MODES = ("lazy", "eager", "random", "priority")
BARRIER = "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;"
RELAXED = "barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;"

# The warps of CTA 0 use CTA 1: %r1 is a word of its own for each warp of CTA 1, %r2 an mbarrier
# there. %p0: not lane 0 of CTA 0.
TEXT = """
.visible .entry test()
{{
.reg .pred %p<4>;
.reg .b32 %r<12>;
.shared .align 16 .b8 box[64];
.shared .align 8 .b64 bar;
mov.u32 %r0, %tid.x;
mov.u32 %r3, %cluster_ctarank;
and.b32 %r4, %r0, 31;
or.b32 %r4, %r4, %r3;
setp.ne.u32 %p0, %r4, 0;
shr.u32 %r4, %r0, 5;
shl.b32 %r4, %r4, 4;
mov.u32 %r5, box;
add.u32 %r5, %r5, %r4;
mov.u32 %r6, bar;
setp.ne.u32 %p1, %r0, 0;
and.b32 %r4, %r0, 31;
setp.ne.u32 %p2, %r4, 0;
@!%p2 st.shared.v4.u32 [%r5], {{0, 0, 0, 0}};
@!%p1 mbarrier.init.shared::cta.b64 [%r6], 4;
fence.mbarrier_init.release.cluster;
fence.proxy.async;
bar.sync 0;
{start}
mapa.shared::cluster.u32 %r1, %r5, 1;
mapa.shared::cluster.u32 %r2, %r6, 1;
@%p0 bra USED;
{use}
USED:
bar.warp.sync -1;
{end}
ret;
}}
"""
USES = {
    "store": "st.shared::cluster.u32 [%r1], 7;",
    "load": "ld.shared::cluster.u32 %r7, [%r1];",
    "atomic": "atom.shared::cluster.add.u32 %r7, [%r1], 1;",
    "arrival": "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r2];",
    "expected bytes": "mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%r2], 0;",
}
# These end when their bytes are there, and CTA 1 would have to wait for that.
COPIES = {
    "st.async": "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r1], %r0, [%r2];",
    "bulk copy": "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes\n"
    "    [%r1], [%r5], 16, [%r2];",
}


def launch(use: str, start: str = BARRIER, end: str = BARRIER, **options: Any) -> sim.Report:
    program = sim.load(HEADER + TEXT.format(start=start, use=use, end=end))
    shape: dict[str, Any] = {"grid": (2,), "cluster": (2,), "block": (64,), "check": False}
    return sim.launch(program, "test", [], **(shape | options))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [*USES, *COPIES])
def test_a_use_of_a_cta_that_may_not_have_started_is_named(name: str, mode: str) -> None:
    use = (USES | COPIES)[name]
    found = [f for f in launch(use, start="", mode=mode).errors if f.kind == "unstarted-cta"]
    assert {(f.cta, f.warp, f.lane) for f in found} <= {(0, 0, 0), (0, 1, 0)}
    assert found[0].instruction.startswith(use.split()[0])
    assert "CTA 1, which may not have started yet" in found[0].message
    assert "arrive and wait at barrier.cluster before it" in found[0].message
    if mode == "random":  # nothing is known of the order without the race check
        errors = launch(use, start="", mode=mode, race_check=False).errors
        assert errors[0].kind == "unstarted-cta"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", USES)
@pytest.mark.parametrize("start", [BARRIER, RELAXED], ids=["barrier", "relaxed"])
def test_a_barrier_of_the_cluster_says_that_its_ctas_have_started(
    start: str, name: str, mode: str
) -> None:
    kinds = {f.kind for f in launch(USES[name], start=start, mode=mode).errors}
    # A relaxed arrival tells of the start, not of what was written before.
    assert kinds <= ({"race"} if start == RELAXED else set())


@pytest.mark.parametrize("mode", MODES)
def test_one_warp_that_has_waited_tells_the_others(mode: str) -> None:
    wait = "setp.gt.u32 %p3, %r0, 31;\n@%p3 bra ON;\nbarrier.cluster.wait;\nON:\n"
    start = f"barrier.cluster.arrive.release;\n{wait}bar.sync 0;"
    kinds = {f.kind for f in launch(USES["store"], start, end="", mode=mode).findings}
    assert "unstarted-cta" not in kinds
    without = start.replace("bar.sync 0;", "")
    found = launch(USES["store"], without, end="", mode=mode).errors
    # Warp 1 has not waited, whether or not warp 0 had when it stored.
    assert {f.warp for f in found if f.kind == "unstarted-cta"} == {1}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", USES)
def test_a_use_of_a_cta_that_may_have_exited_is_named(name: str, mode: str) -> None:
    assert not [f for f in launch(USES[name], mode=mode).findings if f.severity == "error"]
    for end in ("", RELAXED):  # a relaxed arrival orders no access
        for seed in range(3):
            found = launch(USES[name], end=end, mode=mode, seed=seed).errors
            exits = [f for f in found if f.kind == "exited-cta"]
            assert exits, found
            assert all("CTA 1" in f.message and f.cta == 0 for f in exits)
            opcode = USES[name].split()[0]
            assert all(f.instruction.startswith(opcode) for f in exits)
            # An address in the shared memory of CTA 1: its rank stands in the upper bits.
            assert {f.address >> 24 for f in exits} == {1}


@pytest.mark.parametrize("mode", MODES)
def test_a_cta_that_has_waited_for_all_arrivals_may_exit(mode: str) -> None:
    wait = """setp.eq.u32 %p3, %r3, 0;
    @%p3 bra DONE;
    WAIT:
    mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p3, [%r6], 0;
    @!%p3 bra WAIT;
    DONE:
    """
    arrival = USES["store"] + USES["arrival"] * 2
    for seed in range(3):
        assert not launch(arrival, end=wait, mode=mode, seed=seed).findings
    # CTA 1 waits, but the store comes behind the arrival.
    late = USES["arrival"] * 2 + USES["store"]
    kinds = {f.kind for f in launch(late, end=wait, mode=mode).errors}
    assert "exited-cta" in kinds


@pytest.mark.parametrize("mode", MODES)
def test_a_multicast_needs_the_start_of_all_its_ctas(mode: str) -> None:
    body = MULTICAST.replace(
        "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n", "", 1
    )
    assert body != MULTICAST
    map_ = sim.TensorMap(matrix(32, 64), [64, 16])
    out = torch.zeros(2, 32, 64, dtype=torch.int16)
    found = run(kernel(body), map_, out, grid=(2,), cluster=(2,), mode=mode, check=False).findings
    assert "unstarted-cta" in {f.kind for f in found}


# ---- Pairs and tensor memory ----


# CTA 0 waits for its mbarrier, CTA 1 does not.
FIRST_WAITS = f"setp.ne.u32 %p5, %r14, 0;\n@%p5 bra OVER;\n{tensor.WAIT}OVER:\n"


def pair(text: str, **options: Any) -> list[sim.Finding]:
    return [f for f in tensor.run(text, **options)[0].findings if f.severity == "error"]


@pytest.mark.parametrize("mode", MODES)
def test_a_pair_allocates_after_the_start_of_both_ctas(mode: str) -> None:
    text = tensor.program("", pair=True, allocated=128)
    assert not pair(text, mode=mode)
    started = "@%p1 bra READY;\ntcgen05.alloc"
    early = text.replace(f"{tensor.CLUSTER_SYNC}\n{started}", started)
    assert early != text
    for race_check in (True, False):
        found = pair(early, mode=mode, race_check=race_check)
        assert {f.kind for f in found} == {"unstarted-cta"}
        assert all(f.instruction.startswith("tcgen05.alloc.cta_group::2") for f in found)
        assert any("tcgen05.alloc for a pair with CTA 1" in f.message for f in found)


@pytest.mark.parametrize("mode", MODES)
def test_a_pair_frees_after_both_ctas_have_allocated(mode: str) -> None:
    text = tensor.program("", pair=True, allocated=128)
    begin = text.index(tensor.CLUSTER_SYNC) + len(tensor.CLUSTER_SYNC)
    # Each CTA frees what it has as soon as its own threads know the address.
    alone = text[:begin] + text[begin:].replace(tensor.CLUSTER_SYNC, "bar.sync 0;")
    found = pair(alone, mode=mode)
    assert {f.kind for f in found} == {"tmem"}
    assert all("may not have come out of tcgen05.alloc" in f.message for f in found)
    # One barrier of the cluster between the two is enough.
    once = text[:begin] + text[begin:].replace(tensor.CLUSTER_SYNC, "bar.sync 0;", 1)
    assert not pair(once, mode=mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("multicast", [False, True])
def test_the_other_cta_of_a_product_stays_until_it_is_done(multicast: bool, mode: str) -> None:
    commit = tensor.COMMIT
    if not multicast:
        commit = commit.replace("MULTICAST", ".b64 [%r4];")
    descriptor = tensor.instruction(256, 64, torch.bfloat16, torch.bfloat16)
    body = f"""@%p6 bra ISSUED;
    tcgen05.mma.GROUP.kind::f16 [%r2], %rd2, %rd3, {descriptor}, 0;
    {commit}
    ISSUED:
    {FIRST_WAITS}"""
    a = tensor.random(128, 16, torch.bfloat16)
    images = []
    for _ in range(2):
        image = torch.zeros(tensor.SHARED, dtype=torch.uint8)
        places = tensor.tiles.strides(True, 128, 128, 2)
        adesc = tensor.put(image, 0, a, True, 128, *places)
        bdesc = tensor.put(image, tensor.B_PLACE, a[:32], True, 128, *places)
        images.append(image)
    arguments = (torch.cat(images), adesc, bdesc)
    text = tensor.program(body, pair=True)
    assert not tensor.run(text, *arguments, mode=mode)[0].errors
    end = text.rindex(tensor.CLUSTER_SYNC)
    early = text[:end] + "bar.sync 0;" + text[end + len(tensor.CLUSTER_SYNC) :]
    found = tensor.run(early, *arguments, mode=mode)[0].errors
    exits = [f for f in found if f.kind == "exited-cta"]
    assert len(exits) == 1, found
    # The last of the two that use CTA 1.
    what = "tcgen05.commit to CTA 1" if multicast else "tcgen05.mma for a pair with CTA 1"
    assert what in exits[0].message
