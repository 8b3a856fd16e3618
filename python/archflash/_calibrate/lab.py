"""How calls are timed: CUDA graphs of some calls on tensors that fill the L2 cache twice, replayed
in turns, and eager calls by the clock of the host.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from archflash import _dispatch, _registry
from archflash._calibrate.calls import Call, Inputs, Outputs
from archflash._calibrate.grid import Point
from archflash._call_times import FORWARD
from archflash._dispatch import pytorch
from archflash._errors import ArchflashError

_SECTION_US = 600.0  # a replay takes about so long
_MOST_CALLS = 64
# A candidate that is so much slower than the fastest is not timed in a graph.
SLOW = 1.5
_LONG_US = 4000.0  # a round of all candidates that is longer is repeated less often
_EAGER_ROUNDS = 5  # in which eager calls are timed; the host is often disturbed
_PAUSE = 600_000  # clock cycles in which the host puts a call into the queue


@dataclass
class Result:
    """What was seen of a point.

    Attributes:
        graph_us: microseconds of a call in a CUDA graph, by candidate.
        eager_us: microseconds of an eager call, where that was asked for.
        wrong: what was wrong with the results of a candidate.
        refused: why a candidate did not run.
        first_s: seconds of the host until its first calls were done.
    """

    graph_us: dict[str, float] = field(default_factory=dict)
    eager_us: dict[str, float] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    first_s: dict[str, float] = field(default_factory=dict)


class Lab:
    """A GPU on which points are measured.

    Args:
        index: which GPU.
        largest: bytes of the largest call.
        rounds: how often each candidate is measured.
        trying: is told each point and candidate before it runs.
    """

    def __init__(
        self,
        index: int,
        largest: int,
        rounds: int = 6,
        trying: Callable[[Point, str], None] = lambda point, name: None,
    ) -> None:
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(self.device)
        self._fill = 2 * _dispatch.query_device(index).l2_bytes
        self._bytes = max(self._fill, largest) + 4096
        self._pools: dict[torch.dtype, Tensor] = {}
        self._graphs = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._rounds, self._trying = rounds, trying
        self._shuffle = random.Random(0).shuffle
        # The memory of graphs can be shared as long as one of them is there.
        number = torch.zeros(1, device=self.device)
        self._keeper = self._recorded(lambda: number.add_(1))

    def pool(self, dtype: torch.dtype) -> Tensor:
        """Random numbers, of which the tensors of all calls are made."""
        if dtype not in self._pools:
            made = torch.bfloat16 if dtype.itemsize == 1 else dtype
            generator = torch.Generator(self.device).manual_seed(0)
            size = self._bytes // dtype.itemsize
            pool = torch.randn(size, dtype=made, device=self.device, generator=generator)
            self._pools[dtype] = pool.to(dtype)
        return self._pools[dtype]

    def measure(
        self,
        point: Point,
        leave: Callable[[str], bool] = lambda name: False,
        *,
        eager: bool = False,
        more: Sequence[str] = (),
    ) -> Result:
        """Measures a point.

        Args:
            point: the call.
            leave: tells of a candidate whether it is left out.
            eager: whether eager calls are timed, too.
            more: candidates beside those that the point has.
        """
        call, result = Call(point, self.device), Result()
        sets = call.inputs(
            self.pool(call.dtype), min(max(2, -(-self._fill // point.bytes())), _MOST_CALLS)
        )
        functions: dict[str, Callable[..., Outputs]] = {}
        once: dict[str, float] = {}
        known: dict[str, Any] = {}
        for name in dict.fromkeys((*call.candidates(), *more)):
            if leave(name):
                continue
            self._trying(point, name)
            with self._refusals(name, result), call.context(name):
                functions[name] = call.function(name)
                begin = time.perf_counter()
                once[name] = self._once(functions[name], sets[0], point)
                result.first_s[name] = time.perf_counter() - begin
        graphs: dict[str, Graph] = {}
        eagerly: dict[str, list[float]] = {}
        for name, us in once.items():
            self._trying(point, name)
            with self._refusals(name, result), call.context(name):
                function = functions[name]
                if us > SLOW * min(once.values()):
                    wrong = call.wrong(sets[0], function(*sets[0]), known)
                    if wrong is None:
                        result.graph_us[name] = us
                else:
                    graph = self._capture(function, sets, us)
                    wrong = call.wrong(*graph.last(), known)
                    if wrong is None:
                        graphs[name] = graph
                        if eager:
                            eagerly[name] = []
                if wrong is not None:
                    result.wrong[name] = wrong
        result.graph_us.update(self._in_turns(graphs))
        for _ in range(_EAGER_ROUNDS):
            for name, found in eagerly.items():
                with call.context(name):
                    found.append(self._eager(functions[name], sets, once[name]))
        result.eager_us = {name: statistics.median(found) for name, found in eagerly.items()}
        return result

    @contextmanager
    def _refusals(self, name: str, result: Result) -> Iterator[None]:
        """Notes that a candidate does not serve a call."""
        try:
            yield
        except (ArchflashError, RuntimeError, ValueError, TypeError) as error:
            _require_healthy(error)
            result.refused[name] = " ".join(str(error).split())[:300]

    def _once(self, function: Callable[..., Outputs], inputs: Inputs, point: Point) -> float:
        """Microseconds of one call on the device, the shorter of two."""
        function(*inputs)  # the first one loads and plans
        pause = _PAUSE if point.kind.passes == FORWARD else 3 * _PAUSE
        found = []
        for _ in range(2):
            # The device waits, so that the whole call is in its queue when it begins.
            torch.cuda._sleep(pause)  # type: ignore[no-untyped-call]
            with self._timed() as elapsed:
                function(*inputs)
            found.append(elapsed())
        return min(found)

    @contextmanager
    def _timed(self) -> Iterator[Callable[[], float]]:
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()

        def elapsed() -> float:
            end.synchronize()
            return float(start.elapsed_time(end)) * 1e3

        yield elapsed
        end.record()

    def _capture(
        self, function: Callable[..., Outputs], sets: list[Inputs], once_us: float
    ) -> Graph:
        calls = min(max(1, round(_SECTION_US / once_us)), _MOST_CALLS)
        outputs: list[Outputs] = []

        def run() -> None:
            # The last call is on the first set, so that all candidates are compared with the same.
            for number in reversed(range(calls)):
                outputs.append(function(*sets[number % len(sets)]))

        graph = self._recorded(run)
        return Graph(graph, calls, calls * once_us, sets[0], outputs[-1])

    def _recorded(self, run: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """A function as a CUDA graph. torch.cuda.graph would collect garbage and empty the cache
        each time.
        """
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._graphs)
            try:
                run()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph

    def _in_turns(self, graphs: dict[str, Graph]) -> dict[str, float]:
        """Microseconds of a call of each, measured in turns."""
        names = list(graphs)
        times: dict[str, list[Callable[[], float]]] = {name: [] for name in names}
        for graph in graphs.values():
            graph.replay()
        rounds = self._rounds
        if graphs and sum(graph.us for graph in graphs.values()) > _LONG_US:
            rounds = max(3, rounds // 2)
        for _ in range(rounds):
            self._shuffle(names)
            for name in names:
                with self._timed() as elapsed:
                    graphs[name].replay()
                times[name].append(elapsed)
        return {
            name: statistics.median(elapsed() for elapsed in found) / graphs[name].calls
            for name, found in times.items()
        }

    def _eager(self, function: Callable[..., Outputs], sets: list[Inputs], once_us: float) -> float:
        """Microseconds of an eager call among many."""
        calls = min(max(8, round(4000.0 / once_us)), 200)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for number in range(calls):
            function(*sets[number % len(sets)])
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / calls * 1e6

    def ours(self, point: Point) -> list[str]:
        """The kernels of ours that serve a point."""
        kernels = _registry.kernel_names()
        return [x for x in Call(point, self.device).candidates() if x in kernels]

    def pytorchs(self, point: Point) -> str | None:
        """The kernel that PyTorch chooses for a point; None if it has none."""
        call = Call(point, self.device)
        kernel = pytorch.kernel_of(call.problem, call.capability)
        return kernel if isinstance(kernel, str) else None

    def host_us(self, point: Point, name: str) -> float:
        """Microseconds that the host needs for a call, whose work is small."""
        call = Call(point, self.device)
        sets = call.inputs(self.pool(call.dtype), 4)
        with call.context(name):
            function = call.function(name)
            for _ in range(20):
                function(*sets[0])
            found = [self._eager(function, sets, 40.0) for _ in range(_EAGER_ROUNDS)]
        return statistics.median(found)


@dataclass
class Graph:
    """Some calls of a candidate as a CUDA graph.

    Attributes:
        graph: the graph.
        calls: how many they are.
        us: about how long they take.
        inputs, outputs: those of the last call.
    """

    graph: torch.cuda.CUDAGraph
    calls: int
    us: float
    inputs: Inputs
    outputs: Outputs

    def replay(self) -> None:
        self.graph.replay()

    def last(self) -> tuple[Inputs, Outputs]:
        """Inputs and outputs of the last call. What it does not write is NaN."""
        for x in self.outputs:
            x.fill_(float("nan"))
        self.graph.replay()
        torch.cuda.synchronize()
        return self.inputs, self.outputs


def _require_healthy(error: BaseException) -> None:
    """Raises the error where the GPU's context is broken, so that nothing can run after it."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        raise error from None
