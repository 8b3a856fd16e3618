"""The benchmark's arithmetic, files and order of measurement, with stand-ins for the GPU."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import archflash
from archflash import _archflash as _native
from archflash import _measured, reference

# The benchmarks are no part of the installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench import (
    correctness,
    environment,
    gradients,
    host_overhead,
    host_training,
    kvcache,
    masks,
    measured,
    report,
    results,
    run,
    timing,
)
from bench.candidates import Candidate
from bench.cases import GRADIENTS_FILE, MASKS_FILE, Case, load_cases

CASES = {case.name: case for case in load_cases()}
SMALL = Case("small", "fp32", b=2, hq=4, hkv=2, nq=8, nk=12, d=16, dv=16, causal=True)
FACTS = {
    "run_id": "20260101T000000Z-h200-aaaa",
    "date": "2026-01-01",
    "commit": "0123456789ab",
    "dirty": "0",
    "gpu": "NVIDIA H200",
    "driver": "580.1",
    "cuda": "13.0",
    "torch": "2.11.0",
}


def row(case: Case, implementation: str, p50_us: float, **columns: str) -> results.Row:
    made = results.make_row(
        FACTS, case, implementation=implementation, version="1", features="", clocks_mhz="1980",
        samples_us=[p50_us], max_err=1e-6, host_us=7.0,
    )  # fmt: skip
    return {**made, **columns}


# ---- cases


def test_flops_and_bytes_of_hand_computed_cases() -> None:
    # 4 * 4 * 16 * 512 * 512 * 64 operations; four tensors of 4 * 16 * 512 * 64 floats.
    dense = CASES["fp32 4x16 512 d64"]
    assert (dense.flops(), dense.bytes()) == (4_294_967_296, 33_554_432)
    # Three tensors of 64 * 64 * 1024 * 64 bytes, and an output of two bytes for each element.
    assert CASES["e4m3 64x64 1024 d64"].bytes() == 5 * 268_435_456
    # Causal counts as half; q and out have 32 heads of 8192 rows, k and v 8 heads; 2 bytes each.
    grouped = CASES["bf16 4x32/8 8192 d128 c"]
    assert grouped.flops() == 4 * 4 * 32 * 8192 * 8192 * 128 // 2
    assert grouped.bytes() == 2 * 2 * 4 * (32 + 8) * 8192 * 128
    # D != Dv: 2 * Nq * Nk * (192 + 128) for one head.
    uneven = Case("uneven", "bf16", b=1, hq=1, hkv=1, nq=4, nk=4, d=192, dv=128, causal=False)
    assert (uneven.flops(), uneven.bytes()) == (2 * 16 * 320, 2 * 2 * 4 * 320)


# ---- arithmetic of timing


class FakeMark:
    def __init__(self, us: float, log: list[str], name: str) -> None:
        self._us, self._log, self._name = us, log, name

    def wait(self) -> None:
        self._log.append(f"wait {self._name}")

    def elapsed_us(self) -> float:
        return self._us


class FakeTimed:
    """Takes 100 us for the first enqueued call of a name, one more for each further one."""

    def __init__(self, name: str, log: list[str], out: Any = None) -> None:
        self.calls, self.captured = 10, True
        self._name, self._log, self._out, self._us = name, log, out, 100.0

    def enqueue(self) -> FakeMark:
        self._log.append(self._name)
        self._us += 1.0
        return FakeMark(self._us - 1.0, self._log, self._name)

    def last_output(self) -> Any:
        return self._out


def test_round_robin_takes_turns_and_keeps_work_queued() -> None:
    log: list[str] = []
    timed = {name: FakeTimed(name, log) for name in "ab"}
    samples = timing.round_robin(timed, 3, lambda: log.append("probe"))
    # In each round both run in either order, and only the round before is waited for.
    orders = [log[0:2], log[3:5], log[7:9]]
    assert all(sorted(order) == ["a", "b"] for order in orders)
    waits = [f"wait {order[-1]}" for order in orders]
    assert log[2] == log[6] == log[10] == "probe"
    assert [log[5], log[9], log[11]] == waits
    assert list(samples) == ["a", "b"]
    assert samples == {"a": [10.0, 10.1, 10.2], "b": [10.0, 10.1, 10.2]}


# --- masks as data ---


def small_case(case: Case) -> Case:
    rows = masks.DOCUMENTS.get(case.mask, 74) + 76
    return replace(case, name="small", b=2, hq=2, hkv=2, nq=rows, nk=rows, d=8, dv=8)


@pytest.mark.parametrize("case", load_cases(MASKS_FILE), ids=lambda case: case.name)
def test_each_mask_means_the_same_for_ours_and_for_sdpa(case: Case) -> None:
    small = small_case(case)
    mask = masks.mask_of(small, "cpu")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, small.nk, 8, generator=generator) for _ in range(3))
    options = {name: x.float() if x.is_floating_point() else x for name, x in mask.options.items()}
    ours = reference.attention(q, k, v, causal=small.causal, return_lse=False, **options)
    dense = mask.dense()
    if dense is not None and dense.is_floating_point():
        dense = dense.double()
    theirs = torch.nn.functional.scaled_dot_product_attention(
        *(x.double() for x in (q, k, v)), attn_mask=dense
    )
    assert torch.allclose(ours, theirs, atol=1e-12)
    assert 0 < masks.SHARES[case.mask](case) <= 1


@pytest.mark.parametrize(
    "case", [x for x in load_cases(GRADIENTS_FILE) if x.mask], ids=lambda case: case.name
)
def test_gradients_with_masks_are_compared_with_those_of_the_mask(case: Case) -> None:
    small = replace(small_case(case), dtype="fp32")
    q, k, v = (torch.randn(2, 2, small.nk, 8, requires_grad=True) for _ in range(3))
    dout = gradients.dout_of(small, "cpu")
    for mask, right in ((masks.mask_of(small, "cpu").dense(), True), (None, False)):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        found = gradients.Gradients(*torch.autograd.grad(out, (q, k, v), dout))
        verdict = gradients.Checker(small, dout)(
            q.detach(), k.detach(), v.detach(), found, ours=True
        )
        assert (verdict.problem == "") == right
    named = [candidate.name for candidate in gradients.candidates(case)]
    assert {"hopper", "ampere", "torch-cudnn", "torch-efficient", "torch"} <= set(named)
    kind = measured.kind_of(case, gradients=True)
    assert kind is not None
    assert kind.mask in ("bool", "added")


# ---- correctness check


def plain_attention(q: Any, k: Any, v: Any) -> Any:
    """What a candidate for the causal SMALL, or another number of keys, computes."""
    return reference.baseline(q, k, v, causal=True)


@pytest.fixture(params=["whole", "sliced"])
def checker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> correctness.Checker:
    if request.param == "sliced":
        monkeypatch.setattr(correctness, "WHOLE_SCORES", 0)
        monkeypatch.setattr(correctness, "WINDOW_ROWS", 3)
    return correctness.Checker(SMALL)


def test_check_passes_the_right_output_and_finds_wrong_ones(checker: correctness.Checker) -> None:
    q, k, v = timing.make_sets(SMALL, "cpu", 1)[0]
    right = plain_attention(q, k, v)
    verdict = checker(q, k, v, right, ours=True)
    assert verdict.problem == ""
    assert verdict.meets_rule
    assert verdict.max_err < 1e-5
    top_left = reference.baseline(q, k, v, causal=True, q_offset=0)
    assert "computes something else" in checker(q, k, v, top_left, ours=False).problem
    assert "error rule" in checker(q, k, v, right + 1e-3, ours=True).problem
    # A peer that is less exact is measured, and the table says so.
    inexact = checker(q, k, v, right + 1e-3, ours=False)
    assert inexact.problem == ""
    assert not inexact.meets_rule
    unwritten = right.clone()
    unwritten[1, 2, 5] = torch.nan
    assert "not finite" in checker(q, k, v, unwritten, ours=False).problem
    assert "float16" in checker(q, k, v, right.half(), ours=False).problem


def test_fp8_outputs_are_held_to_the_rule_for_fp8() -> None:
    case = Case("tiny", "e4m3", 1, 2, 1, 5, 70, 16, 16, causal=True)
    ((q, k, v),) = timing.make_sets(case, "cpu", 1)
    right = reference.attention(q, k, v, return_lse=False, causal=True).bfloat16()
    check = correctness.Checker(case)
    assert check(q, k, v, right, ours=True).problem == ""
    assert "breaks the error rule" in check(q, k, v, 1.2 * right, ours=True).problem


# ---- one case, with a stand-in for the GPU


class FakeLab:
    """Computes on the CPU; candidate `broken` writes wrong numbers, `refusing` raises."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def inputs(self, case: Case) -> Any:
        return timing.make_sets(case, "cpu", 2)

    def try_call(self, candidate: Candidate, case: Case, sets: Any) -> None:
        candidate.bind(case)(*sets[0])

    def prepare(self, candidate: Candidate, case: Case, sets: Any) -> Any:
        out = candidate.bind(case)(*sets[-1])
        timed = FakeTimed(candidate.name, self.log, (sets[-1], out))
        timed.captured = candidate.name != "eager"
        return timed, "" if timed.captured else "no CUDA graph: not permitted"

    def host_us(self, candidate: Candidate, case: Case) -> float:
        return 5.0

    def clock_mhz(self) -> int:
        return 1980

    def energy_j(self) -> float | None:
        return None

    def release(self) -> None:
        pass


def candidate(name: str, ours: bool = True, change: float = 0.0, **fields: Any) -> Candidate:
    def bind(case: Case) -> Any:
        def call(q: Any, k: Any, v: Any) -> Any:
            if name == "refusing":
                raise RuntimeError("head_dim=16: not built\n\nmore")
            return change + plain_attention(q, k, v)

        return call

    return Candidate(name, "1.0", ours, bind, **fields)


def run_small(candidates: list[Candidate]) -> run.CaseResult:
    return run.run_case(FakeLab(), SMALL, candidates, FACTS, rounds=20, warm_seconds=0.0)


def test_case_gives_rows_refusals_and_wrong_results() -> None:
    result = run_small(
        [
            candidate("simt"),
            candidate("broken", change=0.01),
            candidate("refusing"),
            candidate("eager"),
            candidate("torch-flash", ours=False, change=0.01),
            candidate("torch-math", ours=False, refuses=lambda case: "too large"),
        ]
    )
    assert [r["implementation"] for r in result.rows] == ["simt", "eager", "torch-flash"]
    assert list(result.wrong) == ["broken"]
    assert result.refused == {
        "refusing": "RuntimeError: head_dim=16: not built",
        "torch-math": "too large",
    }
    assert "error rule" in result.notes["torch-flash"]
    assert "no CUDA graph" in result.notes["eager"]
    first = result.rows[0]
    assert list(first) == results.COLUMNS
    assert (first["clocks_mhz"], first["host_us"], first["features"]) == ("1980", "5.00", "")
    assert result.rows[1]["features"] == results.EAGER
    # One warm-up round, then 20: 101 to 120 us for 10 calls.
    assert first["p50_us"] == "11.050"
    assert float(first["gbps"]) == pytest.approx(SMALL.bytes() / 11.05 / 1e3, abs=0.06)


# ---- results file


def test_ratio_only_within_a_run_and_a_case() -> None:
    ours, peer = row(SMALL, "simt", 10.0), row(SMALL, "torch-math", 25.0)
    assert results.speedup(ours, peer) == 2.5
    with pytest.raises(ValueError, match="two runs"):
        results.speedup(ours, {**peer, "run_id": "other"})
    with pytest.raises(ValueError, match="two cases"):
        results.speedup(ours, {**peer, "nk": "13"})
    with pytest.raises(ValueError, match="two cases"):
        results.speedup(ours, {**peer, "features": "softcap"})


# ---- environment


def test_commit_comes_from_git_else_from_the_environment(tmp_path: Path) -> None:
    told = {"ARCHFLASH_COMMIT": "abc", "ARCHFLASH_DIRTY": "0"}
    assert environment.git_state(tmp_path, {}) == ("unknown", "unknown")
    assert environment.git_state(tmp_path, told) == ("abc", "0")
    name = ["-c", "user.name=t", "-c", "user.email=t@t"]
    (tmp_path / "file").write_text("1")
    for command in (["init", "-q"], ["add", "file"], ["commit", "-q", "-m", "one"]):
        subprocess.run(["git", *name, "-C", str(tmp_path), *command], check=True)
    commit, dirty = environment.git_state(tmp_path, told)
    assert (len(commit), dirty) == (12, "0")
    results_file = tmp_path / "bench/results/h200.csv"  # files of results do not count
    results_file.parent.mkdir(parents=True)
    results_file.write_text("x")
    assert environment.git_state(tmp_path, {})[1] == "0"
    assert environment.git_state(tmp_path / "bench", told) == ("abc", "0")
    (tmp_path / "file").write_text("2")
    assert environment.git_state(tmp_path, {})[1] == "1"


def test_without_a_gpu_exits_2_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for module in (run, host_overhead, kvcache):
        assert module.main([]) == 2
        assert "need an NVIDIA GPU" in capsys.readouterr().err


# ---- report


@pytest.fixture
def fixture_results(tmp_path: Path) -> Path:
    dense, causal = CASES["fp32 4x16 512 d64"], CASES["fp32 4x16 512 d64 c"]
    decode = CASES["bf16 128x32/8 1x2048 d128"]
    old = {"run_id": "20250101T000000Z-h200-bbbb", "date": "2025-01-01"}
    rows = [
        row(dense, "simt", 1.0, **old),
        row(dense, "torch-math", 1000.0, **old),
        row(causal, "torch-math", 1000.0, **old),
        row(causal, "simt", 500.0, **old),
        row(dense, "simt", 200.0),
        row(dense, "torch-efficient", 150.0),
        row(dense, "torch-math", 300.0),
        row(dense, "simt", 1.0, features="softcap"),
        row(decode, "torch-flash", 400.0),
    ]
    folder = tmp_path / "results"
    folder.mkdir()
    results.append_rows(folder / "h200.csv", rows)
    return folder


AGAINST = "what dispatch gives / best peer"


def test_table_takes_the_latest_run_and_keeps_losses(fixture_results: Path) -> None:
    lines = report.make_table("h200/fp32-d64", fixture_results).splitlines()
    head = "| case | simt | torch-efficient | torch-math | a plain call runs |"
    assert lines[0] == f"{head} {AGAINST} |"
    dense = next(line for line in lines if line.startswith("| fp32 4x16 512 d64 |"))
    assert "| 21.5 |" in dense
    assert dense.endswith("| simt | 0.75 (torch-efficient) |")
    # The older run is all there is of the causal case, and it has no torch-efficient.
    causal = next(line for line in lines if line.startswith("| fp32 4x16 512 d64 c |"))
    assert causal.endswith("| simt | 2.00 (torch-math) |")
    assert "unmeasured" in causal
    other = next(line for line in lines if line.startswith("| fp32 8x16 59 d64 |"))
    assert other.count("unmeasured") == 5
    assert "NVIDIA H200, driver 580.1, CUDA 13.0, torch 2.11.0, SM clock 1980" in lines[-1]
    assert "20260101T000000Z-h200-aaaa (0123456789ab)" in lines[-1]
    assert "20250101T000000Z-h200-bbbb (0123456789ab)" in lines[-1]


def test_report_fills_and_check_finds_stale_tables(
    fixture_results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- bench:h200/fp32 -->\n<!-- /bench -->\nafter\n")
    arguments = ["--results", str(fixture_results), str(page)]
    assert report.main(["--check", *arguments]) == 1
    assert "stale" in capsys.readouterr().err
    assert report.main(arguments) == 0
    text = page.read_text()
    assert text.startswith("before\n<!-- bench:h200/fp32 -->\n| case |")
    assert text.endswith("\n<!-- /bench -->\nafter\n")
    assert report.main(["--check", *arguments]) == 0
    page.write_text(text.replace("0.75", "1.75"))
    assert report.main(["--check", *arguments]) == 1
    assert "1.75" in page.read_text()


# ---- the order for dispatch


@pytest.mark.rest  # as `make lint` says it after a build
def test_the_order_of_the_kernels_is_that_of_the_results() -> None:
    text = measured.text_of(measured.measurements())
    assert measured.FILE.read_text() == text, "run python -m bench.measured"


def test_the_order_that_dispatch_reads_is_that_of_the_checkout() -> None:
    text = measured.FILE.read_text()
    assert _measured.FILE.read_text() == text, "install the package again"


def test_the_newest_run_that_has_both_compares_them() -> None:
    case = CASES["fp16 16x16 8192 d128"]
    old = [row(case, name, us) for name, us in (("ampere", 9.0), ("ada", 5.0), ("simt", 50.0))]
    new = [row(case, name, us) for name, us in (("ampere", 2.0), ("ada", 4.0))]
    rows = old + [{**each, "run_id": "newer"} for each in new]
    cases = {case: measured.runs_of(rows, case)}
    assert measured.times_faster(cases, "ampere", "ada") == pytest.approx(2.0)
    assert measured.times_faster(cases, "ada", "simt") == pytest.approx(10.0)  # of the older run
    assert measured.times_faster(cases, "ada", "hopper") == 1.0  # never compared
    assert measured.order_of(cases) == ["ampere", "ada", "simt"]
    assert measured.evidence(cases, ["ampere", "ada", "simt"])["run_id"] == "newer"
    assert measured.evidence(cases, ["simt", "hopper"])["run_id"] == FACTS["run_id"]


def test_cases_of_a_kind_count_by_their_geometric_mean_and_noise_changes_no_order() -> None:
    first, second = CASES["fp16 16x16 8192 d128"], CASES["bf16 4x32/8 8192 d128 c"]

    def order(ada_us: float) -> list[str]:
        rows = [row(first, "ampere", 1.0), row(first, "ada", 2.0)]
        rows += [row(second, "ampere", 8.0), row(second, "ada", ada_us)]
        return measured.order_of({case: measured.runs_of(rows, case) for case in (first, second)})

    assert order(3.95) == ["ampere", "ada"]  # 1.3% faster: no difference, so by CANDIDATES
    assert order(3.8) == ["ada", "ampere"]
    # Rows that ask for more than the shape make no order.
    more = {
        "ada": "approximate=int8",
        "archflash": "chosen=archflash",
        "simt": "sustained;power=690W",
    }
    rows = [row(first, name, 1.0, features=features) for name, features in more.items()]
    rows.append(row(first, "ampere", 2.0))
    assert measured.order_of({first: measured.runs_of(rows, first)}) == ["ampere"]


def test_calls_with_masks_are_kinds_of_their_own() -> None:
    """What is the fastest with a mask says nothing of calls without one, or with another."""
    cases = load_cases(MASKS_FILE)
    kinds = {case.mask: measured.kind_of(case) for case in cases if case.d == 128}
    assert kinds["documents"] == kinds["documents-256"]
    assert kinds["added"] == kinds["added-heads"]
    assert {kind.mask for kind in kinds.values() if kind} == {
        *("none", "bool", "added", "slopes", "blocks", "ranges")
    }
    case = next(case for case in cases if case.mask == "bool")
    rows = [
        row(case, "hopper", 9.0, features="mask=bool"),
        row(case, "torch-cudnn", 1.0),
        row(case, "ampere", 1.0, features="mask=bool-heads"),
    ]
    runs = measured.runs_of(rows, case, measured.features_of(case, gradients=False))
    assert [list(run) for run in runs.values()] == [["hopper"]]
    # Where both are equally fast, PyTorch's kernel comes first with a mask, and ours without one.
    for mask, first in (("bool", "torch-cudnn"), ("", "hopper")):
        of_mask = replace(case, mask=mask)
        equal = [row(of_mask, "hopper", 1.0), row(of_mask, "torch-cudnn", 1.01)]
        assert measured.order_of({of_mask: measured.runs_of(equal, of_mask)})[0] == first
    assert measured.kind_of(case) != measured.kind_of(replace(case, mask=""))


def test_gpus_of_one_compute_capability_are_measured_together(tmp_path: Path) -> None:
    case = CASES["bf16 16x16 8192 d128"]
    newest = {"gpu": "NVIDIA H100 80GB HBM3", "run_id": "20260102T000000Z-h100-0001"}
    for facts, hopper_us in ((FACTS, 9.0), (newest, 2.0), ({"run_id": FACTS["run_id"] + "2"}, 8.0)):
        rows = [row(case, "hopper", hopper_us), row(case, "torch-cudnn", 4.0)]
        file = tmp_path / f"{facts['run_id'].split('-')[1]}.csv"
        results.append_rows(file, [{**one, **facts} for one in rows])
    (entry,) = measured.measurements(tmp_path)
    assert entry["capability"] == [9, 0]
    # The newest run says who is first, whichever GPU it ran on.
    assert entry["order"] == ["hopper", "torch-cudnn"]
    assert {name: entry[name] for name in newest} == newest


# ---- host overhead


def test_calls_with_gradients_are_timed_beside_those_of_pytorch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_training, "TENSOR_SETS", 2)
    monkeypatch.setattr(host_training, "GROWING_STEPS", 3)
    monkeypatch.setenv("ARCHFLASH_SIM_DEVICE", "H200")
    launched = []
    _native.set_simulate(lambda plan, tensors: launched.append("dq" in tensors))
    try:
        calls = host_training.training_calls("cpu", archflash)
        found = host_training.measure_training(calls, 1, lambda: None)
    finally:
        _native.set_simulate(archflash._simulate)
    assert list(found) == list(calls)
    forced = [name for name in calls if "forced" in name]
    # Both passes once to warm up, in as many rounds as there are tensors, and once measured; the
    # forward pass alone as often.
    assert launched.count(True) == len(forced) * 2 * 3
    assert launched.count(False) == len(forced) * 4 * 3
    for name, kind in calls.items():
        assert kind.peer in calls or kind.peer == "varlen_attn" or kind.peer is None, name
        ratio = host_training.ratio_to_peer(found, name)
        assert (ratio is None) == (kind.peer not in calls), name
