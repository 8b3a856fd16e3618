"""Attention of every implementation and peer, grouped by shape: for looking and comparing.

    pytest bench --benchmark-only [--all-cases] [-k fp32]

One round is a CUDA graph of K calls on rotating buffers and one synchronisation; the tables show
wall time per call, round / K. extra_info has K, the median by CUDA events, TFLOP/s and GB/s.
Committed results come from bench/run.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from bench.candidates import Candidate, reason_of, refusals
from bench.cases import Case
from bench.correctness import Checker
from bench.results import percentile
from bench.timing import CudaCalls, CudaLab

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

ROUNDS = 10
WARMUP_ROUNDS = 5  # 100 ms of load: clocks settle
# A round this long makes the price of launching and of waking up (tens of microseconds) small
# beside the limit below; where it does not, a round four times as long has to.
ROUND_US = (20_000.0, 80_000.0)
WALL_LIMIT = 0.03  # wall clock and CUDA events agree within 3 percent


@pytest.fixture(autouse=True)
def _free_memory() -> Iterator[None]:
    """Frees the memory of a finished benchmark, and keeps autograd off."""
    import torch

    with torch.no_grad():
        yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


class Round:
    """Runs one round and keeps both clocks' readings in microseconds."""

    def __init__(self, calls: CudaCalls) -> None:
        self._calls = calls
        self.wall_us: list[float] = []
        self.event_us: list[float] = []

    def __call__(self) -> None:
        start = time.perf_counter()
        mark = self._calls.enqueue()
        mark.wait()
        self.wall_us.append((time.perf_counter() - start) * 1e6)
        self.event_us.append(mark.elapsed_us())


def wall_excess(wall_us: float, event_us: list[float]) -> float:
    """How far a wall clock's median is from the median of the events, as a fraction."""
    return abs(wall_us / percentile(event_us, 0.5) - 1.0)


def test_attention_speed(benchmark: BenchmarkFixture, case: Case, candidate: Candidate) -> None:
    sets: list[Any] = CudaLab().inputs(case)
    try:
        with refusals() as warned:
            CudaLab().try_call(candidate, case, sets)
    except Exception as error:  # any exception is the candidate's reason for not running
        pytest.skip(f"{candidate.name}: {reason_of(error, warned)}")

    for target_us in ROUND_US:
        lab = CudaLab(target_us=target_us, ceiling_us=2 * target_us)
        calls, eager_reason = lab.prepare(candidate, case, sets)
        one_round = Round(calls)
        for _ in range(3):
            one_round()
        if wall_excess(percentile(one_round.wall_us, 0.5), one_round.event_us) <= WALL_LIMIT:
            break

    (q, k, v), out = calls.last_output()
    verdict = Checker(case)(q, k, v, out, ours=candidate.ours)
    assert not verdict.problem, verdict.problem

    one_round = Round(calls)
    benchmark.group = case.name
    benchmark.pedantic(one_round, rounds=ROUNDS, iterations=1, warmup_rounds=WARMUP_ROUNDS)

    event_us = one_round.event_us[-ROUNDS:]
    wall_us = one_round.wall_us[-ROUNDS:]
    if benchmark.stats is not None:  # None with --benchmark-disable
        # Tables compare times of one call. pytest-benchmark would divide a round by its iterations,
        # but those are calls of a Python function, so its samples are divided here, before it
        # derives anything from them.
        samples = benchmark.stats.stats.data
        wall_us = [seconds * 1e6 for seconds in samples]
        samples[:] = [seconds / calls.calls for seconds in samples]
    excess = wall_excess(percentile(wall_us, 0.5), event_us)
    call_us = percentile(event_us, 0.5) / calls.calls
    benchmark.extra_info.update(
        implementation=candidate.name,
        version=candidate.version,
        calls_per_round=calls.calls,
        event_median_us=round(call_us, 3),
        wall_us_per_call=round(percentile(wall_us, 0.5) / calls.calls, 3),
        tflops=round(case.flops() / call_us / 1e6, 2),
        gbps=round(case.bytes() / call_us / 1e3, 1),
        max_err=verdict.max_err,
        eager_reason=eager_reason,
    )
    if calls.captured:
        assert excess <= WALL_LIMIT, (
            f"the wall clock is {100 * excess:.1f}% away from CUDA events over rounds of "
            f"{percentile(event_us, 0.5) / 1e3:.1f} ms"
        )
