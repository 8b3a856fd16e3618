"""Mutants of the kernels are caught on the simulator: a sample; ``python -m tests.sim.mutation``
runs all.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from archflash import sim
from tests.kernel_files import KERNELS, ptx_texts

from . import tags
from .explained import EXPLAINED, explanation
from .mutation import backward, gathered, latent, masked, planned, protocols, short, targets
from .mutation.excuses import EXCUSES
from .mutation.mutants import Mutant, is_sync, mutants
from .mutation.runner import (
    Score,
    find_excuse,
    run_mutants,
    sample,
    sample_of_all,
    subject_of,
    targets_of,
)
from .mutation.statements import split
from .mutation.summaries import hashes, older_kernels, summaries
from .mutation.targets import TARGETS, Target, implementations
from .ptx_hash import ptx_hash
from .tags import EXPLANATION, KINDS, tagged_lines, tags_of, unexplained

# Mutants of an implementation besides those of synchronisation, which are all run; where that is
# more, five for four of those.
SAMPLE = 60
FLOOR = 0.90
MOST_EXCUSED = 0.10
SUMMARIES = summaries()


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.rest
@pytest.mark.parametrize("implementation", implementations())
def test_mutants_are_caught(implementation: str, capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = []
    # The first kernel of each of the first two head dimensions. The others, which differ in the
    # size of tiles or in the number of rows, are in the committed summaries.
    first: dict[int, Target] = {}
    for target in targets_of(implementation):
        first.setdefault(target.d, target)
    mutated = list(first.values())[:2]
    for target in mutated:
        subject = subject_of(target)
        assert subject.coverage() > 0.9
        assert all(subject.executed(s.index) for s in subject.statements if is_sync(s))
        found = [mutant for mutant in subject.mutants(0) if not mutant.equivalent]
        syncs = sum(mutant.kind == "sync" for mutant in found)
        if target.sample:
            chosen = sample_of_all(found, target.sample, seed=0)
        else:
            chosen = sample(found, syncs + max(SAMPLE // len(mutated), 5 * syncs // 4), seed=0)
        # Every mutated instruction is executed: as `trap` it stops the run.
        for mutant in chosen[:: len(chosen) // 3]:
            assert subject.traps(subject.statements[mutant.statement]), mutant
        outcomes += run_mutants(subject, chosen, briefly=True)
    score = Score(outcomes)
    survivors = "".join(
        f"\n  survived: {o.change} | {o.statement} | {o.source}" for o in score.survivors
    )
    with capsys.disabled():
        print(f"\n{implementation}: mutation score {score}{survivors}")
    assert score.run >= SAMPLE
    assert score.value >= FLOOR, survivors
    assert score.excused <= MOST_EXCUSED * score.run
    assert not any(outcome.kind == "sync" for outcome in score.survivors), survivors


BACKWARD_SAMPLE = 12
# Two of the first 12 mutants of simt's kernel for lists survive: in one all lanes but one set bits,
# the other changes turns that no CTA takes.
LARGER_SAMPLES = {"simt_attention_bwd_f32_d64_lists": 36}
BACKWARD_FLOOR = 0.9


GATHERED = {("ampere", "d64_gather"), ("ampere", "mla_packed"), ("hopper", "d64_gather")}
MASKED = (
    "ampere_attention_fwd_bf16_d64_masked", "d64_dense_short",
    "hopper_attention_fwd_bf16_d64_table", "scatter",
)  # fmt: skip
# Kernels of each kind, the least share of their instructions that their calls execute, and a seed.
# ``python -m tests.sim.mutation.KIND`` runs larger samples of all.
SAMPLED: list[tuple[Any, float, int]] = [
    # The calls of a masked kernel have some of the kinds of attn_mask, each with code of its own.
    # The calls of ampere add gradients in turns: the code for any order does not run. None of them
    # adds to what gradients hold, for which a kernel of hopper has a branch at each pair.
    *(
        (x, 0.6 if x.masked else 0.7 if x.implementation == "hopper" else 0.75, 2)
        for x in backward.TARGETS
    ),
    *((x, 0.95, 0) for x in latent.TARGETS),
    *((x, 0.85, 0) for x in short.TARGETS),
    # Of the kernels for lists of keys, only those whose calls take the least time are sampled.
    *((x, 0.85, 0) for x in gathered.TARGETS if (x.implementation, x.name) in GATHERED),
    # Copies of a tensor have code for units of every size, of which the calls have some. Those of
    # the tile with three CTAs on an SM have few of the kinds of mask.
    *(
        (x, 0.3 if x.kernel.startswith("copy") else 0.7 if "_short" in x.kernel else 0.75, 0)
        for x in masked.TARGETS
        if x.kernel.endswith(MASKED)
    ),
]


@pytest.mark.rest
@pytest.mark.parametrize(
    ("target", "coverage", "seed"), SAMPLED, ids=[target.kernel for target, *_ in SAMPLED]
)
def test_mutants_of_further_kernels_are_caught(
    target: Any, coverage: float, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    subject = planned.subject_of(target)
    assert subject.coverage() > coverage
    count = LARGER_SAMPLES.get(target.kernel, BACKWARD_SAMPLE)
    score = planned.run_sample(subject, count, seed=seed, briefly=True)
    survivors = "".join(
        f"\n  survived: {o.change} | {o.statement} | {o.source}" for o in score.survivors
    )
    with capsys.disabled():
        print(f"\n{target.kernel}: mutation score {score}{survivors}")
    assert score.value >= BACKWARD_FLOOR, survivors


def test_mutants_of_protocols_are_caught(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = []
    for subject in protocols.subjects():
        assert subject.coverage() == 1
        found = [mutant for mutant in subject.mutants(0) if not mutant.equivalent]
        assert {"sync", "protocol", "predicate", "constant"} == {mutant.kind for mutant in found}
        outcomes += run_mutants(subject, found)
    score = Score(outcomes)
    survivors = "".join(
        f"\n  survived: {o.kernel}: {o.change} | {o.statement[:80]}" for o in score.survivors
    )
    with capsys.disabled():
        print(f"\nprotocols: mutation score {score}{survivors}")
    assert score.value >= FLOOR, survivors
    assert score.excused <= MOST_EXCUSED * score.run
    assert not any(o.kind in ("sync", "protocol") for o in score.survivors), survivors


def test_every_call_of_a_target_is_planned_on_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of those whose mutants are run by hand only."""
    monkeypatch.setattr(targets, "hashed", lambda shape, stream: torch.zeros(shape))  # is faster
    for target in TARGETS:
        for made in target.made():
            assert target.kernel in target.plan(*made).kernels


@pytest.mark.rest
@pytest.mark.parametrize("module", [backward, gathered, latent, masked, short])
def test_every_call_of_a_further_target_is_planned_on_its_kernel(module: Any) -> None:
    for target in module.TARGETS:
        assert list(target.calls()), target  # which asserts it


def test_every_kernel_of_blackwell_dc_has_a_target() -> None:
    """Those for fp16 and bf16 count as one: they differ in a few conversions. The backward pass has
    targets of its own (mutation/backward.py).
    """
    files = (KERNELS / "blackwell_dc").glob("*.json")
    forward = [file for file in files if not file.name.startswith("bwd_")]
    built = {kernel for file in forward for kernel in json.loads(file.read_text())["sm_100f"]}
    mutated = {target.kernel for target in targets_of("blackwell_dc")}
    assert mutated <= built
    assert {re.sub("_b?f16", "", name) for name in mutated} == {
        re.sub("_b?f16", "", name) for name in built
    }


# --- summaries of the last runs ---


def test_every_implementation_has_a_summary_of_its_last_run() -> None:
    assert {summary["implementation"] for summary in SUMMARIES} == {*implementations(), "protocols"}


@pytest.mark.parametrize("summary", SUMMARIES, ids=lambda summary: summary["implementation"])
def test_the_last_run_is_above_the_floor(summary: dict[str, Any]) -> None:
    """docs/simulator.md says whether it is of today's kernels, and a test that this is so."""
    assert summary["run"] >= 300
    assert summary["score"] >= FLOOR
    assert summary["excused"] <= MOST_EXCUSED * summary["run"]
    assert set(summary["by_kind"]["sync"]) <= {"error", "numbers", "lint", "excused"}
    kernels = summary["kernels"].values()
    listed = sum(sum(kernel["survivors"].values()) for kernel in kernels)
    assert listed == sum(kind.get("survived", 0) for kind in summary["by_kind"].values())
    # Each reason is one that still stands in the list.
    assert set(summary["excused_because"]) <= {excuse.reason for excuse in EXCUSES}


@pytest.mark.parametrize("summary", SUMMARIES, ids=lambda summary: summary["implementation"])
def test_a_summary_says_of_how_many_mutants_it_is(summary: dict[str, Any]) -> None:
    for part in (summary, *summary["kernels"].values()):
        if part["of"] is None:  # a sample from before this was noted, and so of older kernels
            assert summary["extent"] == "sample"
            assert set(older_kernels(summary)) == set(summary["kernels"])
        elif summary["extent"] == "full":
            assert part["run"] == part["of"]
        else:
            assert 0 < part["run"] <= part["of"]
    assert summary["run"] == sum(kernel["run"] for kernel in summary["kernels"].values())


def test_a_summary_of_other_ptx_is_of_older_kernels() -> None:
    name = "ampere_attention_fwd_bf16_d64_few"
    (today,) = hashes(name)
    assert older_kernels({"kernels": {name: {"ptx": today}}}) == []
    assert older_kernels({"kernels": {name: {"ptx": today[::-1]}}}) == [name]
    assert older_kernels({"kernels": {name: {"ptx": None}}}) == [name]
    (sample,) = hashes("protocol_multicast")
    assert older_kernels({"kernels": {"protocol_multicast": {"ptx": sample}}}) == []


def test_the_hash_of_ptx_is_that_of_the_code_of_one_kernel() -> None:
    same = TEXT.replace("mov.u32 %r8", "// a comment\n .loc 1 2 3\n\tmov.u32  %r8")
    same = same.replace(".visible", '.file 1 "a.cu"\n.visible')
    assert ptx_hash(same, "test") == ptx_hash(TEXT, "test")
    assert ptx_hash(TEXT + TEXT[TEXT.index(".visible") :].replace("test()", "other()"), "test") == (
        ptx_hash(TEXT, "test")
    )
    for old, new in (("12345", "12346"), ("bar.sync 0;", ""), ("smem[1024]", "smem[1040]")):
        assert ptx_hash(TEXT.replace(old, new), "test") != ptx_hash(TEXT, "test")
    with pytest.raises(ValueError, match="no kernel other"):
        ptx_hash(TEXT, "other")


# --- tags in the sources ---


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("mutants", {excuse.tag for excuse in EXCUSES if excuse.tag}),
        ("findings", {known.tag for known in EXPLAINED if known.tag}),
    ],
)
def test_tags_in_the_sources_are_those_that_the_lists_name(kind: str, named: set[str]) -> None:
    assert set(tagged_lines(kind)) == named


def test_the_first_tag_of_a_file_says_where_tags_are_explained() -> None:
    assert unexplained() == [], f"add {EXPLANATION!r} to the first tag of these files"


@pytest.mark.parametrize("kind", KINDS)
def test_every_tag_covers_an_instruction_of_a_kernel(kind: str) -> None:
    """The wheel that is installed must have been built from these sources."""
    lines = lines_with_instructions()
    for tag, covered in tagged_lines(kind).items():
        assert covered & lines, f"{kind}: {tag} covers no instruction"


@functools.cache
def lines_with_instructions() -> set[tuple[str, int]]:
    """(file, line) of all line information in the PTX that is installed, inlined lines too."""
    found = set()
    read = set()
    for image, _, text in ptx_texts():
        # The image for fp16, and the texts for other GPUs, are made from the same lines.
        if image.endswith("_f16") or image in read:
            continue
        read.add(image)
        names = dict(re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, re.MULTILINE))
        # Most places come many times, so that few are looked at.
        for place in set(re.findall(r"\.loc\s+(.*)", text)):
            locations = re.findall(r"(?:^|inlined_at )(\d+) (\d+)", place)
            found |= {(names[number], int(line)) for number, line in locations}
    return found


TAGGED = """void f(int x) {
  // Told to people. mutants: prose
  // mutants: one, two
  // More for people.
  g(x,  // mutants: ignored
    x + 1);
  h(x);  // mutants: behind
  // findings: three
  // mutants: four
  if (x) {
    h(x);
  }
}
"""


def test_a_tag_covers_the_statement_below_it() -> None:
    both = {"one", "two"}
    assert tags_of(TAGGED, "mutants") == {5: both, 6: both, 10: {"four"}}
    assert tags_of(TAGGED, "findings") == {10: {"three"}}


def test_excuses_and_explanations_hang_on_tags_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other comments and names change nothing; without the tag there is no excuse."""
    mutant = Mutant("sync", 0, "delete bar.warp.sync", 0, 0, "")
    source = "cuda/sm_30_intrinsics.hpp:110, inlined at a.cuh:3"
    values = dict.fromkeys((field.name for field in dataclasses.fields(sim.Finding)), 0)
    finding = sim.Finding(**values | {"kind": "tcgen05-order", "source": source})  # type: ignore
    for above, excused, explained in (
        ("// mutants: rows-were-read", True, False),
        ("// findings: s-overwrites-p", False, True),
        ("// rows-were-read, s-overwrites-p", False, False),
    ):
        (tmp_path / "a.cuh").write_text(f"f();\n{above}\nanything(at_all);  // whatever\n")
        monkeypatch.setattr(tags, "SOURCES", tmp_path)
        tags.tags_in.cache_clear()
        assert bool(find_excuse(mutant, source, "any kernel", {"causal"})) == excused
        assert (explanation("blackwell_dc", finding) is not None) == explained
    tags.tags_in.cache_clear()


def test_an_excuse_may_hold_only_where_a_call_does_not_come() -> None:
    lines = tagged_lines("mutants")["zeros-without-keys"]
    file, line = min(lines)
    mutant = Mutant("constant", 0, "or.b32: 32 -> 16", 0, 0, "")
    assert find_excuse(mutant, f"{file}:{line}", "any kernel", {"causal"})
    assert not find_excuse(mutant, f"{file}:{line}", "any kernel", {"causal", "small scores"})


# --- the harness itself ---

TEXT = """.version 8.0
.target sm_80
.address_size 64
.visible .entry test()
{
.reg .pred %p<3>;
.reg .b32 %r<20>;
.shared .align 16 .b8 smem[1024];
mov.u32 %r1, %tid.x; // %r1, 77;
shr.s32 %r2, %r1, 31;
shr.u32 %r3, %r2, 29;
add.s32 %r4, %r1, %r3;
and.b32 %r5, %r4, -8;
mov.u32 %r6, smem;
add.s32 %r7, %r6, %r5;
setp.lt.s32 %p1, %r1, 8;
@%p1 bra $DONE;
{ st.shared.u32 [%r7+8], %r1; }
bar.sync 0;
mov.u32 %r8, 12345;
$DONE: ret;
}
"""


def test_statements_are_found_with_their_places_and_operands() -> None:
    statements = split(TEXT)
    assert [s.parts[0] for s in statements] == [
        "mov", "shr", "shr", "add", "and", "mov", "add", "setp", "bra", "st", "bar", "mov", "ret",
    ]  # fmt: skip
    assert all(TEXT[s.begin : s.end] == s.text for s in statements)
    branch, store = statements[8], statements[9]
    assert (branch.guard, branch.opcode, branch.operands) == ("%p1", "bra", ["$DONE"])
    assert store.operands == ["[%r7+8]", "%r1"]
    assert (store.defined, store.used) == ([], ["%r7", "%r1"])
    assert (statements[3].defined, statements[3].used) == (["%r4"], ["%r1", "%r3"])


def test_mutants_are_what_feeds_addresses_predicates_and_synchronisation() -> None:
    statements = split(TEXT)
    found = mutants(statements, [True] * len(statements), 32, seed=0)
    changes = [(m.kind, m.statement, bool(m.equivalent)) for m in found]
    # The shifts of a sign that is never set change nothing for any thread; 12345 feeds nothing.
    assert changes == [
        ("constant", 1, True),
        ("constant", 2, True),
        ("constant", 4, False),
        ("predicate", 8, False),
        ("constant", 9, False),
        ("sync", 10, False),
    ]
    texts = [mutant.apply(TEXT) for mutant in found]
    assert "and.b32 %r5, %r4, -16;" in texts[2] or "and.b32 %r5, %r4, -4;" in texts[2]
    assert "@!%p1 bra $DONE;" in texts[3]
    assert "bar.sync" not in texts[5]
    assert len({*texts, TEXT}) == len(texts) + 1
    # Instructions that are not executed have none.
    executed = [s.parts[0] != "bar" for s in statements]
    assert "sync" not in {m.kind for m in mutants(statements, executed, 32, seed=0)}
    # With threads beyond 8, rounding down to a multiple of 4 or 16 is seen; with 1 thread nothing.
    alone = mutants(statements, [True] * len(statements), 1, seed=0)
    assert [m.statement for m in alone if m.equivalent] == [1, 2, 4]
