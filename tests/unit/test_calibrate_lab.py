"""How `archflash calibrate` times candidates, on a card that is a clock: its kernels are PyTorch on
the CPU, and a call takes as long as a table says.
"""

from __future__ import annotations

import io
import json
import math
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from archflash import _dispatch
from archflash._api import find_device
from archflash._calibrate import calls, lab, measuring, worker
from archflash._calibrate.grid import Point
from archflash._calibrate.lab import Lab, Result
from archflash._call_times import BOTH, FORWARD, Kind
from archflash._errors import LaunchError

H200 = find_device("H200")
HOST_US = 7.0  # what the host needs for a call
POINT = Point(Kind("16 bits", FORWARD, "many", True), (1, 2, 2, 40, 40), 32, 32)
US = {"hopper": 10.0, "ampere": 12.0, "torch-cudnn": 11.0, "torch-flash": 14.0, "simt": 80.0}
Function = Callable[..., tuple[Tensor, ...]]


class Card:
    """What lab.py uses of torch and time. Calls wait for one another; a graph has no host time.

    Attributes:
        us: microseconds of a call, by candidate.
        spoil: makes outputs of a candidate wrong, knowing whether a graph is replayed.
        fails: what a candidate raises.
        broken: what is raised where the card is waited for.
    """

    def __init__(self, us: dict[str, float]) -> None:
        self.us, self.now, self.recording = us, 0.0, None
        self.spoil: dict[str, Callable[[Tensor, bool], object]] = {}
        self.fails: dict[str, Exception] = {}
        self.broken: Exception | None = None
        self.ran: list[str] = []

    def perf_counter(self) -> float:
        return self.now / 1e6

    def function(self, name: str, real: Function) -> Function:
        def run(*inputs: Tensor) -> tuple[Tensor, ...]:
            if name in self.fails:
                raise self.fails[name]
            outputs = tuple(x.detach().clone() for x in real(*inputs))

            def again() -> None:
                for x, right in zip(outputs, real(*inputs), strict=True):
                    x.copy_(right)
                    self.spoil.get(name, lambda x, replayed: None)(x, True)
                self.now += self.us[name]

            self.ran.append(name)
            if self.recording is not None:
                self.recording.append(again)
            else:
                self.now += self.us[name] + HOST_US
                for x in outputs:
                    self.spoil.get(name, lambda x, replayed: None)(x, False)
            return outputs

        return run

    def torch(self) -> types.SimpleNamespace:
        card = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.at = math.nan

            def record(self) -> None:
                self.at = card.now

            def synchronize(self) -> None:
                assert not math.isnan(self.at), "it was not recorded"

            def elapsed_time(self, end: Event) -> float:
                return (end.at - self.at) / 1e3

        class Graph:
            def capture_begin(self, pool: object) -> None:
                card.recording = self.calls = []

            def capture_end(self) -> None:
                card.recording = None

            def replay(self) -> None:
                for call in self.calls:
                    call()

        class Stream:
            def wait_stream(self, other: Stream) -> None:
                pass

        @contextmanager
        def entered(stream: Stream) -> Iterator[None]:
            yield

        def synchronize() -> None:
            if card.broken is not None:
                raise card.broken

        cuda = types.SimpleNamespace(
            set_device=lambda device: None, graph_pool_handle=lambda: (0, 0), Stream=Stream,
            current_stream=Stream, stream=entered, Event=Event, CUDAGraph=Graph,
            _sleep=lambda cycles: None, synchronize=synchronize,
        )  # fmt: skip
        return types.SimpleNamespace(
            cuda=cuda, device=lambda kind, index: torch.device("cpu"), randn=torch.randn,
            zeros=torch.zeros, Generator=torch.Generator, bfloat16=torch.bfloat16,
        )  # fmt: skip


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    made = Card(US)
    monkeypatch.setattr(lab, "torch", made.torch())
    monkeypatch.setattr(lab, "time", made)
    small = type(H200).from_dict(H200.to_dict() | {"l2_bytes": 50_000})  # tensors fill it twice
    monkeypatch.setattr(_dispatch, "query_device", lambda index: small)
    monkeypatch.setattr(calls.Call, "candidates", lambda call: list(made.us))
    monkeypatch.setattr(calls.Call, "context", lambda call, name: contextmanager(_nothing)())
    real = calls.Call.function
    monkeypatch.setattr(
        calls.Call, "function", lambda call, name: made.function(name, real(call, "torch"))
    )
    return made


def _nothing() -> Iterator[None]:
    yield


@pytest.mark.slow
@pytest.mark.parametrize("passes", [FORWARD, BOTH])
def test_each_candidate_has_the_time_of_its_calls_in_a_graph(card: Card, passes: str) -> None:
    tried: list[str] = []
    point = POINT._replace(kind=POINT.kind._replace(passes=passes))
    found = Lab(0, 1 << 20, trying=lambda point, name: tried.append(name)).measure(point)
    fast = {name: us for name, us in US.items() if us <= lab.SLOW * (US["hopper"] + HOST_US)}
    assert set(US) - set(fast) == {"simt"}
    for name, us in fast.items():
        assert found.graph_us[name] == pytest.approx(us)
    # What is far behind is not recorded: it has the time of its one call.
    assert found.graph_us["simt"] == pytest.approx(US["simt"] + HOST_US)
    assert (found.wrong, found.refused, found.eager_us) == ({}, {}, {})
    assert tried == [*US, *US]
    assert found.first_s["ampere"] == pytest.approx(3 * (US["ampere"] + HOST_US) / 1e6)


def test_eager_calls_have_the_hosts_time_too(card: Card) -> None:
    found = Lab(0, 1 << 20).measure(POINT, lambda name: name == "torch-cudnn", eager=True)
    assert set(found.eager_us) == {"hopper", "ampere", "torch-flash"}
    for name, us in found.eager_us.items():
        assert us == pytest.approx(US[name] + HOST_US)
    assert "torch-cudnn" not in card.ran
    assert Lab(0, 1 << 20).host_us(POINT, "ampere") == pytest.approx(US["ampere"] + HOST_US)


def unwritten(x: Tensor, replayed: bool) -> None:
    if replayed:
        x[(-1,) * x.ndim] = math.nan


def test_what_is_wrong_anywhere_has_no_time(card: Card) -> None:
    card.spoil = {
        "ampere": lambda x, replayed: x.mul_(1.5),
        "hopper": unwritten,  # right at first: only the graph leaves a number out
        "simt": lambda x, replayed: x.zero_(),
    }
    found = Lab(0, 1 << 20).measure(POINT)
    assert set(found.wrong) == {"ampere", "hopper", "simt"}
    assert found.wrong["hopper"] == "NaN or infinite numbers"
    assert found.wrong["ampere"].startswith("max error ")
    assert found.refused == {}
    assert set(found.graph_us) == {"torch-cudnn", "torch-flash"}


def test_a_refusal_is_noted_and_a_broken_card_ends_everything(card: Card) -> None:
    card.fails["hopper"] = LaunchError("no\n such    kernel")
    found = Lab(0, 1 << 20).measure(POINT, more=("ampere",))
    assert found.refused == {"hopper": "no such kernel"}
    assert set(found.graph_us) == set(US) - {"hopper"}
    card.broken = RuntimeError("an illegal memory access was encountered")
    with pytest.raises(LaunchError, match="no\n such    kernel"):
        Lab(0, 1 << 20).measure(POINT)


def test_long_rounds_are_fewer(card: Card) -> None:
    card.us = dict.fromkeys(("hopper", "ampere"), 3000.0)
    measuring = Lab(0, 1 << 20, rounds=8)
    before = card.now
    graphs = {name: measuring._capture(card.function(name, _one), [(torch.ones(1),)], 3000.0)
              for name in card.us}  # fmt: skip
    assert [graph.calls for graph in graphs.values()] == [1, 1]
    assert measuring._in_turns(graphs) == pytest.approx(card.us)
    assert card.now - before == pytest.approx((1 + 4) * 2 * 3000.0)
    assert measuring._in_turns({}) == {}


def _one(x: Tensor) -> tuple[Tensor]:
    return (x,)


def test_the_kernels_that_would_serve_a_point(card: Card) -> None:
    measuring = Lab(0, 1 << 20)
    assert measuring.ours(POINT) == ["hopper", "ampere", "simt"]
    card.us = {"torch-cudnn": 1.0}
    assert measuring.ours(POINT) == []
    assert measuring.pytorchs(POINT) == "torch-cudnn"
    fp8 = POINT._replace(kind=POINT.kind._replace(dtype="fp8"))
    assert measuring.pytorchs(fp8) is None


# --- the process that measures ---


class Ask:
    """The worker with a Lab whose times come from a table, and the time that it believes.

    Attributes:
        now: seconds.
        us: microseconds by candidate.
        wrong: candidates that are wrong at a point.
        plans_s: what the first call of a candidate costs.
        seen: points and candidates that were measured.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, us: dict[str, float]) -> None:
        self.us, self.now, self.seen = us, 1000.0, []
        self.wrong: Callable[[str, Point], bool] = lambda name, point: False
        self.refused: dict[str, str] = {}
        self.plans_s: dict[str, float] = {}
        self.patch = monkeypatch
        asking = self

        class Measures:
            def __init__(self, index: int, largest: int, trying: Callable[..., None]) -> None:
                self.trying = trying

            def measure(self, point: Point, leave: Callable[[str], bool]) -> Result:
                found = Result()
                for name, us in asking.us.items():
                    if leave(name):
                        continue
                    self.trying(point, name)
                    if name in asking.refused:
                        found.refused[name] = asking.refused[name]
                        continue
                    found.first_s[name] = asking.plans_s.get(name, 0.001)
                    asking.now += found.first_s[name] + 0.001
                    if asking.wrong(name, point):
                        found.wrong[name] = "max error 3"
                    else:
                        found.graph_us[name] = us
                asking.seen.append((point, tuple(found.first_s)))
                return found

            def ours(self, point: Point) -> list[str]:
                return ["hopper", "ampere"]

            def host_us(self, point: Point, name: str) -> float:
                return {"hopper": 8.0, "ampere": 9.0}.get(name, 30.0)

            def pytorchs(self, point: Point) -> str | None:
                return "torch-cudnn"

        monkeypatch.setattr(worker, "Lab", Measures)
        monkeypatch.setattr(worker.gc, "freeze", lambda: None)
        monkeypatch.setattr(
            worker, "time", types.SimpleNamespace(time=lambda: self.now, monotonic=self._later)
        )
        monkeypatch.setattr(_dispatch, "query_device", lambda index: H200)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (141 << 30, 141 << 30))

    def _later(self) -> float:
        self.now += 0.1
        return self.now

    def __call__(self, capsys: pytest.CaptureFixture[str], seconds: float, **asked: Any) -> Any:
        """The exit status, and what it says, by its first word."""
        self.seen.clear()
        told = {"device": 0, "known": [], "skip": [], "host": HOST, "until": self.now + seconds}
        self.patch.setattr("sys.stdin", io.StringIO(json.dumps(told | asked)))
        status = worker.main()
        said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        return status, {key: [x[key] for x in said if key in x] for x in said for key in x}


HOST = [[passes, name] for passes in (FORWARD, BOTH) for name in ("hopper", "ampere", "torch")]


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Ask:
    return Ask(monkeypatch, {"hopper": 10.0, "ampere": 11.0, "torch-cudnn": 12.0, "simt": 90.0})


def test_points_are_measured_until_the_time_is_over(
    ask: Ask, capsys: pytest.CaptureFixture[str]
) -> None:
    status, said = ask(capsys, 3.0, host=[], skip=[["hopper", BOTH]])
    assert status == 0
    assert said["done"] == [True]
    assert said["host"] == [
        [FORWARD, "hopper", 8.0], [FORWARD, "ampere", 9.0], [FORWARD, "torch", 30.0],
        [BOTH, "ampere", 9.0], [BOTH, "torch", 30.0],
    ]  # fmt: skip
    points = [worker.point_of(told) for told in said["point"]]
    assert len(points) == len(set(points)) >= 20
    assert {point.kind.passes for point in points} == {FORWARD, BOTH}
    assert said["graph_us"][0] == ask.us
    # Another process goes on after them.
    known = list(zip(said["point"], said["graph_us"], strict=True))
    _, more = ask(capsys, 3.0, known=known)
    assert "host" not in more
    assert not set(points) & {worker.point_of(told) for told in more["point"]}


@pytest.mark.slow
def test_what_is_far_behind_at_four_points_of_a_kind_is_left_out_at_its_others(
    ask: Ask, capsys: pytest.CaptureFixture[str]
) -> None:
    _, said = ask(capsys, 6.0)
    counts: dict[Any, int] = {}
    for point, names in ask.seen[-len(said["point"]) :]:
        group = worker.group_of(point)
        counts[group] = counts.get(group, 0) + ("simt" in names)
        assert {"hopper", "ampere", "torch-cudnn"} <= set(names)
    assert max(counts.values()) == 4


def test_a_wrong_kernel_of_ours_is_left_out_of_its_pass_and_pytorchs_of_its_kind(
    ask: Ask, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = [Kind("16 bits", FORWARD, "many", causal) for causal in (False, True)]
    ask.wrong = lambda name, point: (
        point.d == 64 and point.kind == kinds[0] and name in ("hopper", "torch-cudnn")
    )
    _, said = ask(capsys, 3.0)
    assert [told[0] for told in said["wrong"]] == ["hopper", "torch-cudnn"]
    first = worker.point_of(said["wrong"][0][1])
    assert (first.kind, first.d) == (kinds[0], 64)
    after = ask.seen[[point for point, _ in ask.seen].index(first) + 1 :]
    served = {(name, point.kind) for point, names in after for name in names}
    assert not {("hopper", kind) for kind in kinds} & served
    assert ("hopper", kinds[0]._replace(passes=BOTH)) in served
    assert ("torch-cudnn", kinds[0]) not in served
    assert ("torch-cudnn", kinds[1]) in served


def test_a_kernel_that_plans_long_waits_until_every_kind_was_measured(
    ask: Ask, capsys: pytest.CaptureFixture[str]
) -> None:
    ask.plans_s = {"torch-cudnn": 0.5}
    _, said = ask(capsys, 60.0)
    speed = ask.seen[0][0].flops() / ask.us["hopper"]
    left = {point.kind for point in worker.grid.points(H200.sm_count, speed)}
    assert left == {point.kind for point, _ in ask.seen}
    counts, more = dict[Any, int](), 0
    for point, names in ask.seen[-len(said["point"]) :]:
        group = point.kind.family(), point.d, point.dv
        left.discard(point.kind)
        if left:
            counts[group] = counts.get(group, 0) + ("torch-cudnn" in names)
        else:
            more += "torch-cudnn" in names
    for (family, *_), count in counts.items():
        assert 1 <= count <= (8 if family.rows == "few" else 1)
    assert more > 20


@pytest.mark.parametrize("of", ["refused", "wrong"])
def test_a_card_on_which_nothing_runs_is_told(
    ask: Ask, capsys: pytest.CaptureFixture[str], of: str
) -> None:
    ask.us = {"ampere": 10.0}
    if of == "refused":
        ask.refused["ampere"] = "no kernel image"
    else:
        ask.wrong = lambda name, point: True
    status, said = ask(capsys, 9.0)
    assert status == 1
    assert said["error"] == [
        f"nothing could be measured: {{'ampere': "
        f"'{'no kernel image' if of == 'refused' else 'max error 3'}'}}"
    ]


def test_refusals_are_told_and_what_broke_before_is_not_tried(
    ask: Ask, capsys: pytest.CaptureFixture[str]
) -> None:
    ask.refused["ampere"] = "no such tile"
    _, said = ask(capsys, 2.0, skip=[["hopper", FORWARD]])
    assert {(told[0], told[2]) for told in said["refused"]} == {("ampere", "no such tile")}
    served = {(name, point.kind.passes) for point, names in ask.seen for name in names}
    assert ("hopper", FORWARD) not in served
    assert ("hopper", BOTH) in served


# --- who is measured ---


def call_of(
    monkeypatch: pytest.MonkeyPatch, *, gpu: str = "H200", heads_kv: int = 4, nk: int = 40,
    d: int = 64, dv: int = 64, **kind: Any,
) -> calls.Call:  # fmt: skip
    device = find_device(gpu)
    monkeypatch.setattr(_dispatch, "query_device", lambda index: device)
    what = Kind(*("16 bits", FORWARD, "many", False))._replace(**kind)
    return calls.Call(Point(what, (1, 4, heads_kv, 40, nk), d, dv), torch.device("cpu"))


PYTORCHS = set(calls.PYTORCHS)


@pytest.mark.parametrize(
    ("call", "there", "not_there"),
    [
        ({}, {"hopper", "ampere", *PYTORCHS}, {"torch", "blackwell_dc"}),
        ({"causal": True}, {"hopper", *PYTORCHS}, {"torch"}),
        ({"causal": True, "nk": 60}, {"hopper"}, PYTORCHS),
        ({"heads_kv": 2}, {"torch-cudnn", "torch-flash"}, {"torch-efficient"}),
        ({"d": 192, "dv": 128}, {"torch-efficient"}, {"torch-flash"}),
        ({"dtype": "fp8"}, {"hopper", "ada"}, {"torch", *PYTORCHS}),
        ({"dtype": "float32"}, {"simt", "torch"}, PYTORCHS),
        ({"mask": "bool"}, {"ampere", "torch"}, PYTORCHS),
        ({"way": "packed"}, {"hopper"}, {"torch", *PYTORCHS}),
        ({"way": "cache", "rows": "few"}, {"ampere"}, {"torch", *PYTORCHS}),
        ({"passes": BOTH}, {"hopper", "ampere", "torch-flash"}, {"ada"}),
        ({"gpu": "T4"}, {"simt"}, {"hopper", "ampere"}),
    ],
    # The order of a set differs between processes.
    ids=lambda given: str(sorted(given) if isinstance(given, set) else given),
)
def test_candidates_are_who_may_serve_the_call(
    monkeypatch: pytest.MonkeyPatch, call: dict[str, Any], there: set[str], not_there: set[str]
) -> None:
    found = call_of(monkeypatch, **call).candidates()
    assert len(set(found)) == len(found)
    assert there <= set(found)
    assert not not_there & set(found)


def test_gpus_without_bfloat16_are_measured_with_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    assert call_of(monkeypatch, gpu="T4").dtype == torch.float16
    assert call_of(monkeypatch, gpu="A100").dtype == torch.bfloat16


def test_pytorchs_kernels_are_called_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_of(monkeypatch, heads_kv=2, dtype="float32")
    q, k, v = call.inputs(torch.randn(50_000, generator=torch.manual_seed(0)), 1)[0]
    (out,) = call.function("torch-flash")(q, k, v)
    (expected,) = call.function("torch")(q, k, v)
    assert torch.allclose(out, expected, atol=1e-5)
    switches = torch.backends.cuda
    before = switches.flash_sdp_enabled(), switches.cudnn_sdp_enabled()
    with call.context("torch-flash"):
        assert switches.flash_sdp_enabled()
        assert not switches.cudnn_sdp_enabled()
        assert not switches.math_sdp_enabled()
    with call.context("hopper"):
        assert (switches.flash_sdp_enabled(), switches.cudnn_sdp_enabled()) == before


# --- what the process that measures says ---


def measured_by(
    *lines: dict[str, Any], seconds: float = 100.0, end: str = ""
) -> measuring.Findings:
    """What is found of a process that says these lines, and then does something."""
    said = "".join(f"print({json.dumps(line)!r}, flush=True)\n" for line in lines)
    program = f"import sys, time\nsys.stdin.read()\n{said}{end}"
    return measuring.measure(0, seconds, worker=(sys.executable, "-c", program), silent_s=9.0)


def test_an_error_of_the_process_is_an_error() -> None:
    with pytest.raises(LaunchError, match="nothing could be measured: no kernel image"):
        measured_by({"error": "nothing could be measured: no kernel image"})


def test_what_was_wrong_or_refused_is_found_with_its_first_reason() -> None:
    other = POINT._replace(d=64, dv=64)
    found = measured_by(
        {"wrong": ["ampere", POINT, "max error 3"]},
        {"refused": ["simt", POINT, "one reason"]},
        {"refused": ["simt", other, "another"]},
        {"point": POINT, "graph_us": {"hopper": 3.5}},
        {"done": True},
    )
    assert found.wrong == {("ampere", FORWARD): f"max error 3, at {POINT}"}
    assert found.wrong_kinds == {("ampere", POINT.kind)}
    assert found.refused == {"simt": "one reason"}
    assert found.times == [(POINT, {"hopper": 3.5})]


def test_a_kernel_that_breaks_when_the_time_is_over_is_named() -> None:
    with pytest.raises(LaunchError, match=r"nothing could be measured; hopper: it broke: bad luck"):
        measured_by({"trying": [POINT, "hopper"]}, seconds=1.0, end="sys.exit('bad luck')")
    with pytest.raises(LaunchError, match=r"nothing could be measured$"):
        measured_by({"done": True})
