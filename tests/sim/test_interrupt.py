"""Ctrl-C ends a simulation: KeyboardInterrupt comes soon, and the next run works."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from archflash import sim

from .ptx import program, run

ENDLESS = "L: add.u32 %r1, %r1, 1;\nbra L;"
# Warps that wait for each other's progress: they rest instead of running.
POLLING = """setp.eq.u32 %p1, %r0, 0;
    @%p1 mbarrier.init.shared.b64 [smem], 64;
    bar.sync 0;
    L: mbarrier.try_wait.parity.shared.b64 %p2, [smem], 1;
    bra L;"""
# A fast machine finds after 0.3 seconds that the waiting warps are in a deadlock.
SECONDS_BEFORE = 0.1
# An interrupt takes a twentieth of a second, but the machine may be busy.
SECONDS_AFTER = 2


@pytest.fixture
def interrupt() -> Iterator[threading.Timer]:
    """A timer that, once it is started, sends SIGINT to this process."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(SECONDS_BEFORE, os.kill, (os.getpid(), signal.SIGINT))
    yield timer
    timer.cancel()
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("mode", ["lazy", "random"])
@pytest.mark.parametrize(
    ("body", "threads"),
    [(ENDLESS, 1), (ENDLESS, 2), (POLLING, 1)],
    ids=["loop-1-thread", "loop-2-threads", "waiting-1-thread"],
)
def test_ctrl_c_ends_a_simulation_within_two_seconds(
    interrupt: threading.Timer, mode: str, body: str, threads: int
) -> None:
    words = torch.zeros(64, dtype=torch.int32)
    interrupt.start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run(
            program(body, shared=16), words, words, grid=(4,), block=(64,), mode=mode,
            threads=threads, max_instructions=1 << 40,
        )  # fmt: skip
    assert SECONDS_BEFORE / 2 < time.monotonic() - begin < SECONDS_BEFORE + SECONDS_AFTER
    out = torch.zeros(32, dtype=torch.int32)
    run(program("st.global.u32 [%rd11], %r0;"), words, out)
    assert out.tolist() == list(range(32))


def test_a_handler_that_raises_nothing_does_not_end_a_simulation() -> None:
    caught = []
    before = signal.signal(signal.SIGINT, lambda *_: caught.append(1))
    timer = threading.Timer(SECONDS_BEFORE / 3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        words = torch.zeros(64, dtype=torch.int32)
        loop = program(ENDLESS)
        with pytest.raises(sim.SimulationError, match="endless loop"):
            run(loop, words, words, max_instructions=30_000_000, mode="lazy")
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)
    assert caught == [1]
