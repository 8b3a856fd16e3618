"""mbarrier objects: phases, transactions, waits, and what is wrong with how they are used."""

from __future__ import annotations

import pytest
import torch

from .ptx import findings, program, run

MODES = ("lazy", "eager", "random", "priority")


def words(count: int = 256) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int32)


def kinds(text: str, *arguments: object, **options: object) -> set[tuple[str, str]]:
    return {(f.kind, f.severity) for f in findings(text, *arguments, **options)}


# Thread 0 writes both parities of the object at smem to the next word of the output.
PROBE = """
mbarrier.test_wait.parity.shared::cta.b64 %p8, [smem], 0;
mbarrier.test_wait.parity.shared::cta.b64 %p9, [smem], 1;
selp.u32 %r50, 1, 0, %p8;
selp.u32 %r51, 2, 0, %p9;
or.b32 %r52, %r50, %r51;
st.global.u32 [%rd0+{place}], %r52;
"""


# This sequence was run on an H200, with an object for two arrivals.
STEPS = [
    "mbarrier.init.shared::cta.b64 [smem], 2;",
    "mbarrier.arrive.shared::cta.b64 %rd20, [smem];",
    "mbarrier.arrive.shared::cta.b64 %rd20, [smem];",
    "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [smem], 64;",
    "mbarrier.arrive.shared::cta.b64 %rd20, [smem], 2;",
    "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [smem], 64;",
]


def test_phases_flip_as_on_an_h200() -> None:
    body = "".join(step + PROBE.format(place=4 * i) for i, step in enumerate(STEPS))
    out = words()
    run(program(body, shared=16), out, words(), block=(1, 1, 1))
    assert out[:6].tolist() == [2, 2, 1, 1, 1, 2]


STATES = """
mbarrier.init.shared.b64 [smem], 3;
mbarrier.arrive.shared.b64 %rd20, [smem];
mbarrier.pending_count.b64 %r1, %rd20;
st.global.u32 [%rd0], %r1;
mbarrier.arrive.noComplete.shared.b64 %rd21, [smem], 1;
mbarrier.pending_count.b64 %r1, %rd21;
st.global.u32 [%rd0+4], %r1;
mbarrier.test_wait.shared.b64 %p1, [smem], %rd21;
selp.u32 %r1, 1, 0, %p1;
st.global.u32 [%rd0+8], %r1;
mbarrier.arrive_drop.shared.b64 %rd22, [smem];
mbarrier.test_wait.shared.b64 %p1, [smem], %rd21;
selp.u32 %r1, 1, 0, %p1;
st.global.u32 [%rd0+12], %r1;
mbarrier.arrive.shared.b64 %rd22, [smem];
mbarrier.pending_count.b64 %r1, %rd22;
st.global.u32 [%rd0+16], %r1;
mbarrier.arrive.shared.b64 %rd22, [smem];
mbarrier.inval.shared.b64 [smem];
"""


def test_states_and_pending_counts() -> None:
    out = words()
    run(program(STATES, shared=16), out, words(), block=(1, 1, 1))
    assert out[:5].tolist() == [3, 2, 0, 1, 2]


# Two warps: warp 0 fills a buffer, warp 1 reads it back, once for each of four rounds.
RING = """
.reg .b32 %i;
setp.ne.u32 %p1, %r0, 0;
@%p1 bra READY;
mbarrier.init.shared::cta.b64 [smem+256], FULL_COUNT;
mbarrier.init.shared::cta.b64 [smem+264], 32;
READY:
bar.sync 0;
mov.u32 %i, 0;
shl.b32 %r20, %r0, 2;
and.b32 %r20, %r20, 127;
mov.u32 %r21, smem;
add.u32 %r21, %r21, %r20;
setp.ge.u32 %p2, %r0, 32;
@%p2 bra CONSUMER;
PRODUCER:
and.b32 %r22, %i, 1;
xor.b32 %r22, %r22, EMPTY_PARITY;
WAIT_EMPTY:
mbarrier.try_wait.parity.shared::cta.b64 %p3, [smem+264], %r22;
@!%p3 bra WAIT_EMPTY;
shl.b32 %r23, %i, 8;
add.u32 %r23, %r23, %r0;
st.shared.u32 [%r21], %r23;
mbarrier.arrive.shared::cta.b64 %rd20, [smem+256];
add.u32 %i, %i, 1;
setp.lt.u32 %p4, %i, 4;
@%p4 bra PRODUCER;
bra DONE;
CONSUMER:
and.b32 %r22, %i, 1;
xor.b32 %r22, %r22, FULL_PARITY;
WAIT_FULL:
mbarrier.WAIT.parity.shared::cta.b64 %p3, [smem+256], %r22;
@!%p3 bra WAIT_FULL;
RELEASE_EARLY
ld.shared.u32 %r24, [%r21];
RELEASE
sub.u32 %r25, %r0, 32;
shl.b32 %r26, %i, 5;
add.u32 %r26, %r26, %r25;
mad.wide.u32 %rd21, %r26, 4, %rd0;
st.global.u32 [%rd21], %r24;
add.u32 %i, %i, 1;
setp.lt.u32 %p4, %i, 4;
@%p4 bra CONSUMER;
DONE:
"""
ARRIVE = "mbarrier.arrive.shared::cta.b64 %rd20, [smem+264];"


def ring(**changes: str) -> str:
    parts = {
        "RELEASE_EARLY": "",
        "RELEASE": ARRIVE,
        "FULL_COUNT": "32",
        "EMPTY_PARITY": "1",
        "FULL_PARITY": "0",
        ".WAIT.": ".try_wait.",
    }
    text = RING
    for name, value in (parts | changes).items():
        text = text.replace(
            name + "\n" if name.startswith("REL") else name,
            value + ("\n" if name.startswith("REL") else ""),
        )
    return program(text, shared=512)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wait", [".try_wait.", ".test_wait."])
def test_a_ring_of_one_slot_hands_everything_over(mode: str, wait: str) -> None:
    for seed in range(4):
        out = torch.zeros(128, dtype=torch.int32)
        report = run(ring(**{".WAIT.": wait}), out, words(), block=(64, 1, 1), mode=mode, seed=seed)
        expected = (torch.arange(4)[:, None] * 256 + torch.arange(32)).flatten().to(torch.int32)
        assert torch.equal(out, expected)
        assert not report.findings


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("changes", "kind", "words_of"),
    [
        ({"FULL_COUNT": "33"}, "deadlock", "1 of 33 arrivals pending"),
        ({"FULL_COUNT": "31"}, "mbarrier", "more arrivals"),
        ({"EMPTY_PARITY": "0"}, "deadlock", "shared offset 264"),
        ({"FULL_PARITY": "1"}, "deadlock", "shared offset 256"),
        ({"RELEASE_EARLY": ARRIVE, "RELEASE": ""}, "race", "not ordered"),
        ({"RELEASE": ""}, "deadlock", "32 of 32 arrivals pending"),
    ],
    ids=["count-high", "count-low", "empty-parity", "full-parity", "early-release", "no-release"],
)
def test_a_wrong_protocol_is_reported(
    changes: dict[str, str], kind: str, words_of: str, mode: str
) -> None:
    found = findings(
        ring(**changes), torch.zeros(128, dtype=torch.int32), words(), block=(64, 1, 1), mode=mode
    )
    named = [f for f in found if f.kind == kind and f.severity == "error"]
    assert named, found
    assert words_of in named[0].message


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("which", ["FULL", "EMPTY"])
def test_a_missing_wait_is_reported(which: str, mode: str) -> None:
    lines = ring().splitlines()
    at = lines.index(f"WAIT_{which}:")
    text = "\n".join(lines[: at + 1] + lines[at + 3 :])
    seen = kinds(text, torch.zeros(128, dtype=torch.int32), words(), block=(64, 1, 1), mode=mode)
    # Without the second wait the producer runs ahead until parities repeat.
    assert seen & {(kind, "error") for kind in ("race", "uninitialised", "deadlock")}


FILLED = "mbarrier.arrive.shared::cta.b64 %rd20, [smem+256];"
TOGETHER = "bar.warp.sync -1;\n"
FIRST = "setp.eq.u32 %p5, {lane}, 0;\n@%p5 "


def elected(producer: str = TOGETHER, consumer: str = TOGETHER) -> str:
    """The ring with one arrival for each warp."""
    text = ring(
        FULL_COUNT="1",
        RELEASE=consumer + "and.b32 %r27, %r0, 31;\n" + FIRST.format(lane="%r27") + ARRIVE,
    )
    text = text.replace("[smem+264], 32;", "[smem+264], 1;")
    return text.replace(FILLED, producer + FIRST.format(lane="%r0") + FILLED)


@pytest.mark.parametrize("mode", MODES)
def test_one_lane_arrives_for_the_others_once_they_are_together(mode: str) -> None:
    def found(text: str) -> set[tuple[str, str]]:
        return kinds(text, words(), words(), block=(64, 1, 1), mode=mode)

    assert not found(elected())
    assert ("race", "error") in found(elected(producer=""))
    assert ("race", "error") in found(elected(consumer=""))


def test_a_wait_that_is_not_repeated_is_found_by_some_seed() -> None:
    text = ring().replace("@!%p3 bra WAIT_FULL;", "")
    seen = set()
    for seed in range(8):
        seen |= kinds(
            text, torch.zeros(128, dtype=torch.int32), words(), block=(64, 1, 1), seed=seed
        )
    assert ("race", "error") in seen


@pytest.mark.parametrize(
    ("statements", "kind"),
    [
        ("mbarrier.arrive.shared.b64 %rd20, [smem];", "mbarrier"),
        ("mbarrier.init.shared.b64 [smem], 0;", "mbarrier"),
        ("mbarrier.init.shared.b64 [smem], 1048576;", "mbarrier"),
        ("mbarrier.init.shared.b64 [smem+4], 1;", "misaligned"),
        ("mbarrier.init.shared.b64 [smem+16], 1;", "out-of-bounds"),
        (
            "mbarrier.init.shared.b64 [smem], 1;\n"
            "mbarrier.test_wait.parity.shared.b64 %p1, [smem], 2;",
            "mbarrier",
        ),
        (
            "mbarrier.init.shared.b64 [smem], 1;\nld.shared.u32 %r1, [smem];\n"
            "st.global.u32 [%rd0], %r1;",
            "mbarrier",
        ),
        ("mbarrier.init.shared.b64 [smem], 1;\nst.shared.u32 [smem+4], %r1;", "mbarrier"),
        ("mbarrier.init.shared.b64 [smem], 1;\nmbarrier.init.shared.b64 [smem], 1;", "mbarrier"),
        (
            "mbarrier.init.shared.b64 [smem], 1;\nmbarrier.inval.shared.b64 [smem];\n"
            "mbarrier.arrive.shared.b64 %rd20, [smem];",
            "mbarrier",
        ),
        (
            "mbarrier.init.shared.b64 [smem], 1;\n"
            "mbarrier.expect_tx.relaxed.cta.shared.b64 [smem], 1048575;\n"
            "mbarrier.expect_tx.relaxed.cta.shared.b64 [smem], 1;",
            "mbarrier",
        ),
        (
            "mbarrier.init.shared.b64 [smem], 1;\n"
            "mbarrier.arrive.noComplete.shared.b64 %rd20, [smem], 1;",
            "mbarrier",
        ),
        (
            "mbarrier.init.shared.b64 [smem], 1;\nmbarrier.arrive.shared.b64 %rd20, [smem];\n"
            "mbarrier.arrive.shared.b64 %rd21, [smem];\nmbarrier.arrive.shared.b64 %rd21, [smem];\n"
            "mbarrier.test_wait.shared.b64 %p1, [smem], %rd20;",
            "mbarrier",
        ),
    ],
)
def test_what_the_rules_forbid_is_an_error(statements: str, kind: str) -> None:
    found = findings(program(statements, shared=16), words(), words(), block=(1, 1, 1))
    assert (kind, "error") in {(f.kind, f.severity) for f in found}, found


def test_an_object_that_other_threads_were_not_told_of_is_a_race() -> None:
    body = """
    setp.ne.u32 %p1, %r0, 0;
    @%p1 bra READY;
    mbarrier.init.shared.b64 [smem], 64;
    READY:
    {sync}
    mbarrier.arrive.shared.b64 %rd20, [smem];
    """
    good = program(body.format(sync="bar.sync 0;"), shared=16)
    assert not findings(good, words(), words(), block=(64, 1, 1), mode="lazy")
    bad = program(body.format(sync=""), shared=16)
    seen = kinds(bad, words(), words(), block=(64, 1, 1), mode="lazy")
    assert ("race", "error") in seen or ("mbarrier", "error") in seen


def test_a_phase_that_is_half_full_at_the_exit_is_a_lint() -> None:
    body = "mbarrier.init.shared.b64 [smem], 2;\nmbarrier.arrive.shared.b64 %rd20, [smem];"
    assert kinds(program(body, shared=16), words(), words(), block=(1, 1, 1)) == {
        ("mbarrier", "lint")
    }


def copies(noinc: bool) -> str:
    """cp.async by 32 lanes, each waiting for another one's word."""
    body = """
setp.ne.u32 %p1, %r0, 0;
@%p1 bra READY;
mbarrier.init.shared.b64 [smem+128], COUNT;
READY:
bar.sync 0;
mov.u32 %r1, smem;
shl.b32 %r2, %r0, 2;
add.u32 %r1, %r1, %r2;
cp.async.ca.shared.global [%r1], [%rd10], 4;
cp.async.mbarrier.arriveNOINC.shared.b64 [smem+128];
AGAIN
WAIT:
mbarrier.try_wait.parity.shared.b64 %p2, [smem+128], 0;
@!%p2 bra WAIT;
xor.b32 %r2, %r2, 64;
mov.u32 %r1, smem;
add.u32 %r1, %r1, %r2;
ld.shared.u32 %r3, [%r1];
st.global.u32 [%rd11], %r3;
"""
    body = body.replace("NOINC", ".noinc" if noinc else "").replace("COUNT", "32")
    body = body.replace("AGAIN", "" if noinc else "mbarrier.arrive.shared.b64 %rd20, [smem+128];")
    return program(body, shared=256)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("noinc", [False, True])
def test_copies_arrive_when_they_have_landed(mode: str, noinc: bool) -> None:
    out = words()
    report = run(copies(noinc), words() * 3, out, mode=mode)
    assert not report.findings
    assert torch.equal(out[:32], (torch.arange(32, dtype=torch.int32) ^ 16) * 3)
