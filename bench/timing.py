"""How calls are timed: CUDA graphs of K calls on rotating buffers, replayed in one of two ways.

round_robin replays the graphs of all candidates in turns. back_to_back replays the graph of one
candidate alone for a second or so: a GPU at its power limit then lowers its clock.

Only make_sets and the classes whose name starts with Cuda use a GPU or torch, so that the order of
measurement can be tested without a GPU.
"""

from __future__ import annotations

import collections
import random
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from bench.candidates import Candidate
from bench.cases import TORCH_DTYPES, Case
from bench.environment import open_nvml, run_facts
from bench.results import percentile

if TYPE_CHECKING:
    import torch

    Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

MAX_CALLS = 8192  # calls in one graph; limits the time of its capture
MAX_SETS = 1024  # buffer sets of a tiny case


class Mark(Protocol):
    """A measured section of work in the device's queue."""

    def wait(self) -> None:
        """Returns when the work is done."""

    def elapsed_us(self) -> float:
        """Microseconds from its start to its end on the device; may be called after wait()."""


class Timed(Protocol):
    """A candidate that is ready to be measured."""

    calls: int  # attention calls in one enqueue()

    @property
    def captured(self) -> bool:
        """Whether one enqueue() is the replay of a CUDA graph."""

    def enqueue(self) -> Mark:
        """Puts `calls` calls into the device's queue."""


def choose_calls(call_us: float, sets: int, target_us: float, ceiling_us: float) -> int:
    """How many calls one measured section should have.

    Args:
        call_us: expected microseconds of one call.
        sets: buffer sets that the calls rotate over.
        target_us: wanted microseconds of the section.
        ceiling_us: microseconds that it may take in order to use every set.

    Returns:
        At least 1 and at most MAX_CALLS. A multiple of `sets` if `ceiling_us` allows it, so that
        the next section does not find the first set in the cache; else the calls that take
        `target_us`.
    """
    wanted = target_us / max(call_us, 0.1)
    if sets <= MAX_CALLS and call_us * sets <= ceiling_us:
        turns = min(max(1, round(wanted / sets)), MAX_CALLS // sets)
        return turns * sets
    return min(max(1, int(wanted)), MAX_CALLS)


def set_count(case: Case, l2_bytes: int) -> int:
    """Buffer sets (inputs and output) that fill the L2 cache twice; at least two."""
    return min(max(2, -(-2 * l2_bytes // case.bytes())), MAX_SETS)


def round_robin(
    timed: Mapping[str, Timed], rounds: int, probe: Callable[[], object] = lambda: None
) -> dict[str, list[float]]:
    """Measures candidates in turns, so that drift of clock and temperature affects all alike.

    Each round has an order of its own, because a candidate that takes much power lowers the clock
    that the next one finds, and because the first one may find an idle device. The orders are the
    same in every run.

    Args:
        timed: candidates by name.
        rounds: how often each of them is measured.
        probe: called once a round while the device is busy with that round.

    Returns:
        For each name, microseconds per call, one number per round.
    """
    names = list(timed)
    shuffle = random.Random(0).shuffle
    marks: dict[str, list[Mark]] = {name: [] for name in names}
    previous: Mark | None = None
    for _ in range(rounds):
        shuffle(names)
        latest: Mark | None = None
        for name in names:
            latest = timed[name].enqueue()
            marks[name].append(latest)
        # This waits for the previous round, not for the current one, so that the queue has work.
        if previous is not None:
            previous.wait()
        previous = latest
        probe()
    if previous is not None:
        previous.wait()
    return {name: [m.elapsed_us() / timed[name].calls for m in marks[name]] for name in timed}


def back_to_back(
    timed: Timed, seconds: float, probe: Callable[[], object] = lambda: None
) -> list[float]:
    """Measures one candidate alone, without a pause, for at least one section and the given time.

    Args:
        timed: the candidate.
        seconds: how long sections are put into the device's queue.
        probe: called once a section while the device is busy.

    Returns:
        Microseconds per call, one number per section.
    """
    marks: list[Mark] = []
    deadline = time.perf_counter() + seconds
    while True:
        marks.append(timed.enqueue())
        probe()
        # This waits for the section before the current one, so that the queue always has work.
        if len(marks) > 1:
            marks[-2].wait()
        if time.perf_counter() >= deadline:
            break
    marks[-1].wait()
    return [mark.elapsed_us() / timed.calls for mark in marks]


def warm_up(timed: Mapping[str, Timed], seconds: float) -> None:
    """Runs all candidates for at least one round and the given time: clocks settle under load."""
    deadline = time.perf_counter() + seconds
    while True:
        round_robin(timed, 1)
        if time.perf_counter() >= deadline:
            return


def enqueue_times_us(
    loops: Mapping[str, tuple[Callable[..., object], list[tuple[Any, ...]]]],
    count: int,
    synchronize: Callable[[], object],
    *,
    every: int = 100,
    warm: int = 20,
) -> dict[str, list[float]]:
    """Times how long calls take to return on the host, interleaved.

    Args:
        loops: for each name, a function and the argument tuples that its calls take in turn.
        count: measured calls of each function.
        synchronize: waits for the device; outside of what is timed.
        every: calls of each function between two synchronisations. The device's queue holds about
            a thousand launches, and a call that finds it full waits for the device.
        warm: calls of each function before the measured ones.

    Returns:
        Microseconds of each call, by name. They include reading the clock (about 0.05 us), but not
        the release of a result.
    """
    clock = time.perf_counter_ns
    times: dict[str, list[float]] = {name: [] for name in loops}
    for number in range(-warm, count):
        if number % every == 0:
            synchronize()
        for name, (function, arguments) in loops.items():
            current = arguments[number % len(arguments)]
            start = clock()
            result = function(*current)
            end = clock()
            del result
            if number >= 0:
                times[name].append((end - start) / 1e3)
    synchronize()
    return times


def make_sets(case: Case, device: str, count: int) -> list[Tensors]:
    """Random inputs: q, k and v from a standard normal distribution.

    Args:
        case: the shape.
        device: torch device.
        count: number of sets, each of its own data.

    Returns:
        `count` tuples of q (B, Hq, Nq, D), k (B, Hkv, Nk, D) and v (B, Hkv, Nk, Dv), which are
        views of rows before heads where the case is packed.
    """
    import torch

    dtype = getattr(torch, TORCH_DTYPES[case.dtype])
    made = torch.bfloat16 if case.dtype == "e4m3" else dtype  # torch makes no random FP8 numbers
    generator = torch.Generator(device=device).manual_seed(0)
    q_shape = (case.b, case.hq, case.nq, case.d)
    k_shape = (case.b, case.hkv, case.nk, case.d)
    v_shape = (case.b, case.hkv, case.nk, case.dv)

    def normal(shape: tuple[int, ...]) -> torch.Tensor:
        b, h, n, d = shape
        lies = (b, n, h, d) if case.packed else shape
        x = torch.randn(lies, device=device, dtype=made, generator=generator).to(dtype)
        return x.transpose(1, 2) if case.packed else x

    return [(normal(q_shape), normal(k_shape), normal(v_shape)) for _ in range(count)]


class CudaMark:
    """A pair of CUDA events around work of the current stream."""

    def __init__(self, work: Callable[[], object]) -> None:
        import torch

        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)
        self._start.record()
        work()
        self._end.record()

    def wait(self) -> None:
        self._end.synchronize()

    def elapsed_us(self) -> float:
        return float(self._start.elapsed_time(self._end)) * 1e3


class CudaCalls:
    """K calls of a candidate over rotating buffers: one CUDA graph, or eager if that fails.

    Args:
        candidate: what to call.
        case: the shape.
        sets: buffer sets; outputs rotate with them.
        calls: K.
        capture: False for eager calls.
    """

    def __init__(
        self, candidate: Candidate, case: Case, sets: list[Tensors], calls: int, capture: bool
    ) -> None:
        import torch

        self.calls = calls
        self._call = candidate.bind(case)
        self._context = candidate.context
        self._sets = sets
        # The latest outputs stay alive, so that no call writes into memory that is still cached.
        self._outputs: collections.deque[torch.Tensor] = collections.deque(maxlen=len(sets))
        self._graph: torch.cuda.CUDAGraph | None = None
        if capture:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._run()
            self._graph = graph

    def _run(self) -> None:
        with self._context():
            for number in range(self.calls):
                self._outputs.append(self._call(*self._sets[number % len(self._sets)]))

    def enqueue(self) -> CudaMark:
        return CudaMark(self._run if self._graph is None else self._graph.replay)

    @property
    def captured(self) -> bool:
        """Whether one enqueue() is the replay of a CUDA graph."""
        return self._graph is not None

    def last_output(self) -> tuple[Tensors, torch.Tensor]:
        """Fills the last call's output with NaN, runs everything, and returns inputs and output.

        Elements that a kernel does not write stay NaN. Eager calls write to new memory, which is
        not filled.
        """
        import torch

        if self._graph is not None:
            self._outputs[-1].fill_(float("nan"))
        self.enqueue().wait()
        torch.cuda.synchronize()
        return self._sets[(self.calls - 1) % len(self._sets)], self._outputs[-1]


def prepare(
    candidate: Candidate,
    case: Case,
    sets: list[Tensors],
    *,
    target_us: float,
    ceiling_us: float,
    capture: bool = True,
) -> tuple[CudaCalls, str]:
    """Makes a candidate ready for timing, with a K that fits its measured speed.

    Args:
        candidate: what to call; has run before on this case.
        case: the shape.
        sets: buffer sets.
        target_us: wanted microseconds of one section of K calls.
        ceiling_us: see choose_calls.
        capture: whether the calls shall be a CUDA graph.

    Returns:
        The calls, and why they could not be captured ("" when they are what was asked for).
    """
    import torch

    def call_us(timed: CudaCalls) -> float:
        timed.enqueue().wait()
        mark = timed.enqueue()
        mark.wait()
        return mark.elapsed_us() / timed.calls

    def wanted_calls(us: float) -> int:
        return choose_calls(us, len(sets), target_us, ceiling_us)

    timed = CudaCalls(candidate, case, sets, 2, capture=False)
    wanted = wanted_calls(call_us(timed))
    if not capture:
        timed = CudaCalls(candidate, case, sets, wanted, capture=False)
        call_us(timed)
        return timed, ""
    # For short kernels eager calls show the host's speed, so a graph is timed to correct K.
    for _ in range(3):
        del timed  # before the next one takes memory
        try:
            timed = CudaCalls(candidate, case, sets, wanted, capture=True)
        except RuntimeError as error:
            torch.cuda.synchronize()  # raises if more than the capture failed
            timed = CudaCalls(candidate, case, sets, wanted, capture=False)
            call_us(timed)
            return timed, f"no CUDA graph: {str(error).strip().splitlines()[0]}"
        wanted = wanted_calls(call_us(timed))
        if timed.calls / 1.5 <= wanted <= timed.calls * 1.5:
            break
    return timed, ""


class CudaLab:
    """The GPU as run.py uses it; tests put a fake one in its place.

    Args:
        target_us: wanted microseconds of one section of calls.
        ceiling_us: microseconds that it may take in order to use every buffer set.
        capture: False for eager calls, whose time is the host's where that is the longer one.
    """

    def __init__(
        self, target_us: float = 4_000.0, ceiling_us: float = 20_000.0, capture: bool = True
    ) -> None:
        import torch

        self._target_us = target_us
        self._ceiling_us = ceiling_us
        self._capture = capture
        self._nvml = open_nvml()
        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        self._l2_bytes = int(device.L2_cache_size)
        self._host_us: dict[tuple[str, Case], float] = {}

    def facts(self) -> dict[str, str]:
        """The columns that all rows of this run share."""
        return run_facts(self._nvml)

    def inputs(self, case: Case) -> list[Tensors]:
        """Random buffer sets that fill the L2 cache twice."""
        return make_sets(case, "cuda", set_count(case, self._l2_bytes))

    def try_call(self, candidate: Candidate, case: Case, sets: list[Tensors]) -> None:
        """Makes one eager call, which raises if the candidate does not serve the case."""
        import torch

        with candidate.context():
            candidate.bind(case)(*sets[0])
        torch.cuda.synchronize()

    def prepare(
        self, candidate: Candidate, case: Case, sets: list[Tensors]
    ) -> tuple[CudaCalls, str]:
        """The candidate ready for timing, and why it is not a CUDA graph ("" when it is)."""
        return prepare(
            candidate,
            case,
            sets,
            target_us=self._target_us,
            ceiling_us=self._ceiling_us,
            capture=self._capture,
        )

    def host_us(self, candidate: Candidate, case: Case) -> float:
        """Median microseconds of 1000 eager calls on the host, on a tiny case of the same kind."""
        import torch

        small = tiny(case)
        known = self._host_us.get((candidate.name, small))
        if known is None:
            loops = {"": (candidate.bind(small), [tuple(s) for s in make_sets(small, "cuda", 4)])}
            with candidate.context():
                times = enqueue_times_us(loops, 1000, torch.cuda.synchronize)[""]
            known = self._host_us[candidate.name, small] = percentile(times, 0.5)
        return known

    def clock_mhz(self) -> int | None:
        """SM clock at this moment in MHz; None where it cannot be read."""
        return self._nvml.sm_clock_mhz()

    def energy_j(self) -> float | None:
        """Energy in joules that the GPU took since an unknown start; None where unknown."""
        return self._nvml.energy_j()

    def release(self) -> None:
        """Gives the memory of a finished case back."""
        import gc

        import torch

        gc.collect()
        torch.cuda.empty_cache()


def tiny(case: Case) -> Case:
    """A case of the same kind that a GPU computes faster than a host can ask for it."""
    return Case(
        name="tiny", dtype=case.dtype, b=1, hq=case.hq // case.hkv, hkv=1, nq=min(case.nq, 64),
        nk=min(case.nk, 64), d=case.d, dv=case.dv, causal=case.causal,
        mask=case.mask, packed=case.packed,
    )  # fmt: skip


def median_clock(samples: Iterable[int | None]) -> str:
    """Median of the clock readings in MHz, or "unknown" when there are none."""
    known = [float(sample) for sample in samples if sample is not None]
    return f"{percentile(known, 0.5):.0f}" if known else "unknown"
