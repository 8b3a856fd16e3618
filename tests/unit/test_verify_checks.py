"""What the checks of `archflash verify` see of a wrong kernel. The GPU is made up: its kernels are
PyTorch on the CPU, and spoil what they give.
"""

from __future__ import annotations

import io
import itertools
import json
import operator
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import archflash
from archflash import _archflash as native
from archflash import _dispatch, sim
from archflash._api import find_device
from archflash.sim import _attention
from archflash.verify import _calls, _checks, _jobs, _probes, _times, _worker
from archflash.verify._making import Call, Maker, Tensors
from archflash.verify._setup import Item, Job, NotHereError, Setup, Told, kernels_on
from archflash.verify._wrong import WrongError


class MadeUp(Setup):
    """A GPU of whose kind there are plans, and whose tensors are on the CPU."""

    simulate = False

    @property
    def planned_for(self) -> str:
        return self.gpu


H200 = MadeUp("H200", "cpu", (9, 0), 1 << 20, False, kernels_on((9, 0)))
FUNCTIONS = (
    "attention", "attention_backward", "attention_with_kvcache", "quantize_fp8", "merge_attention",
)  # fmt: skip


class Kernels:
    """The public functions, served by PyTorch.

    Attributes:
        spoil: is given the number of the call, its tensors and its results, which it may change.
        forced: what was forced.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spoil: Callable[[int, Tensors, list[Tensor]], object] = lambda *given: None
        self.forced: list[str] = []
        for name in FUNCTIONS:
            monkeypatch.setattr(archflash, name, self.served(name, getattr(archflash, name)))
        properties = SimpleNamespace(L2_cache_size=1 << 10)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    def served(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        count = itertools.count()
        known: dict[str, Any] = {}  # the last tensors, and the results of them

        def call(*tensors: Any, implementation: str, **options: Any) -> Any:
            self.forced.append(implementation)
            wanted = name != "attention" or options.pop("return_lse", False)
            if name == "attention":  # its bits depend on it on the CPU
                options["return_lse"] = True
            if known and name != "merge_attention" and bool(tensors[0].float().isnan().all()):
                results = [torch.full_like(x, torch.nan) for x in known["are"]]
            else:
                asked = options.get("per")
                same = known and all(map(operator.is_, known["of"], tensors))
                if not same or known["asked"] != asked:
                    are = real(*tensors, implementation="torch", **options)
                    known.update(of=tensors, asked=asked, are=are)
                results = [x.clone() for x in known["are"]]
            self.spoil(next(count), tensors, results)
            if name == "attention_with_kvcache":
                self.spoil(-1, tensors, list(tensors[1:3]))
            return tuple(results) if wanted else results[0]

        return call


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    return Kernels(monkeypatch)


def plain(make: Maker) -> tuple[Tensors, Call]:
    return make.qkv("bfloat16", (64, 64), (4, 2), 40, 50), {"causal": True}


def packed(make: Maker) -> tuple[Tensors, Call]:
    q, k, v = (x[0].transpose(0, 1) for x in make.qkv("float16", (64, 64), (2, 2), 40, 40))
    ends = make.ends([17, 0, 23])
    return (q, k, v), {"cu_seqlens_q": ends, "cu_seqlens_k": ends}


def rows_first(make: Maker) -> tuple[Tensors, Call]:
    q, k, v = make.qkv("float16", (64, 64), (2, 2), 40, 40)
    return (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)), {"layout": "bnhd"}


def eight_bits(make: Maker) -> tuple[Tensors, Call]:
    return make.qkv("float8_e4m3fn", (64, 64), (2, 2), 40, 40), {}


CALLS = [("ampere", plain), ("ampere", packed), ("ampere", rows_first), ("ada", eight_bits)]


@pytest.mark.parametrize(("kernel", "make"), CALLS)
def test_a_right_kernel_passes_and_its_plan_is_told(
    kernels: Kernels, kernel: str, make: Callable[[Maker], tuple[Tensors, Call]]
) -> None:
    told = _checks.check_call(kernel, "x", make, H200)
    assert told.kernels
    assert set(kernels.forced) == {kernel}
    assert len(kernels.forced) == 2 * _checks.REPEATS - 1


def first_run(n: int, tensors: Tensors, results: list[Tensor]) -> None:
    if n == 0:
        results[0][..., -1, 0, -1] += 0.25


def sometimes(n: int, tensors: Tensors, results: list[Tensor]) -> None:
    if n == 2 * _checks.REPEATS - 2:
        results[1][..., 3] += 1e-3


def leaking(n: int, tensors: Tensors, results: list[Tensor]) -> None:
    results[0] = results[0] + 0 * KEPT.get("v", torch.zeros(()))
    KEPT["v"] = tensors[2].float().sum().to(results[0].dtype)


def everywhere(n: int, tensors: Tensors, results: list[Tensor]) -> None:
    results[0] *= 1.25


def wrong_sums(n: int, tensors: Tensors, results: list[Tensor]) -> None:
    results[1] += 0.5


KEPT: dict[str, Tensor] = {}  # what a kernel keeps between calls, though it must not


@pytest.mark.parametrize(("kernel", "make"), CALLS)
@pytest.mark.parametrize(
    ("spoil", "said"),
    [(first_run, "output: .* elements differ between two runs"),
     (sometimes, "log-sum-exp: .* elements differ between two runs"),
     (leaking, "output: .* elements differ between two runs"),
     (everywhere, "output: WRONG"), (wrong_sums, "log-sum-exp: WRONG")],
)  # fmt: skip
def test_every_kind_of_wrong_result_is_seen(
    kernels: Kernels, kernel: str, make: Callable[[Maker], tuple[Tensors, Call]],
    spoil: Callable[[int, Tensors, list[Tensor]], None], said: str,
) -> None:  # fmt: skip
    KEPT.clear()
    kernels.spoil = spoil
    with pytest.raises(WrongError, match=said) as caught:
        _checks.check_call(kernel, "x", make, H200)
    assert caught.value.where["wrong"] > 0


def test_what_a_kernel_refuses_is_not_tried(kernels: Kernels) -> None:
    with pytest.raises(archflash.ForcedImplementationError):
        _checks.check_call("ampere", "x", eight_bits, H200)
    with pytest.raises(NotHereError, match="torch launches nothing for it"):
        _checks.check_call("torch", "x", plain, H200)
    assert kernels.forced == []


# --- long calls, and decoding ---


def one_late_row(n: int, tensors: Tensors, results: list[Tensor]) -> None:
    results[0][..., -2, :] *= 1.5


def not_finite(n: int, tensors: Tensors, results: list[Tensor]) -> None:
    results[0][0, 7, 333, 5] = torch.inf  # in none of the rows that are compared


def later(n: int, tensors: Tensors, results: list[Tensor]) -> None:
    if n == 9:
        results[0][0, 0, 0, 0] += 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "said"),
    [(None, None), (one_late_row, "heads from .*, rows from 939 on: output: WRONG"),
     (not_finite, "values that are not finite"), (later, "differ between two runs")],
)  # fmt: skip
def test_long_calls_are_compared_in_some_rows_and_finite_in_all(
    kernels: Kernels, spoil: Any, said: str | None
) -> None:
    kernels.spoil = spoil or kernels.spoil
    if said is None:
        told = _checks.long_call("ampere", "float16", (64, 64), H200)
        assert told.note == "987 rows"
        assert told.kernels
        return
    with pytest.raises(WrongError, match=said):
        _checks.long_call("ampere", "float16", (64, 64), H200)


@pytest.mark.slow
@pytest.mark.parametrize(("spoil", "said"), [
    (None, None), (later, "output: .* differ"), (everywhere, "output: WRONG"),
])  # fmt: skip
def test_steps_of_decoding_have_the_same_bits_and_are_right(
    kernels: Kernels, spoil: Any, said: str | None
) -> None:
    kernels.spoil = spoil or kernels.spoil
    if said is None:
        assert _checks.decode("ampere", "float16", 256, 1, 2, H200).note == "6007 keys"
        assert len(kernels.forced) == 1 + 20 + 4
        return
    with pytest.raises(WrongError, match=said):
        _checks.decode("ampere", "float16", 256, 1, 2, H200)


# --- gradients ---


def scaled(number: int) -> Callable[[int, Tensors, list[Tensor]], None]:
    def spoil(n: int, tensors: Tensors, results: list[Tensor]) -> None:
        results[number] *= 1.2

    return spoil


def with_sinks(make: Maker) -> tuple[Tensors, Call]:
    return make.qkv("bfloat16", (64, 64), (4, 2), 40, 40), {"causal": True, "sinks": make.rand(4)}


@pytest.mark.parametrize("make", [with_sinks, packed])
@pytest.mark.parametrize("number", range(4))
def test_each_gradient_is_compared(
    kernels: Kernels, make: Callable[[Maker], tuple[Tensors, Call]], number: int
) -> None:
    told = _checks.check_gradients("ampere", "x", make, {}, H200)
    assert told.kernels
    if number == 3 and make is packed:  # it has no sinks
        return
    kernels.spoil = scaled(number)
    name = ("dq", "dk", "dv", "dsinks")[number]
    with pytest.raises(WrongError, match=f"{name}: WRONG"):
        _checks.check_gradients("ampere", "x", make, {}, H200)


def test_deterministic_gradients_have_the_same_bits(kernels: Kernels) -> None:
    def spoil(n: int, tensors: Tensors, results: list[Tensor]) -> None:
        if n % 6 == 5:
            results[2][..., 0, 0] += 0.01

    more: Call = {"deterministic": True}
    assert _checks.check_gradients("ampere", "x", with_sinks, more, H200).kernels
    kernels.spoil = spoil
    with pytest.raises(WrongError, match=r"dv: .* differ between two runs"):
        _checks.check_gradients("ampere", "x", with_sinks, more, H200)


# --- caches ---


def beyond_the_end(n: int, tensors: Tensors, results: list[Tensor]) -> None:
    if n == -1:
        results[1].view(-1)[-1] = 3.0


@pytest.mark.parametrize("made", [
    {"lengths": [40, 3], "d": 64}, {"lengths": [40, 3], "d": 64, "n_new": 2, "nq": 2},
    {"lengths": [40, 20], "d": 64, "rows": [3, 9]},
], ids=["one row", "append", "packed"])  # fmt: skip
@pytest.mark.parametrize(("spoil", "said"), [
    (None, None), (later, "output: .* differ"), (everywhere, "output: WRONG"),
    (wrong_sums, "log-sum-exp: WRONG"), (beyond_the_end, "v_cache: .* differ"),
])  # fmt: skip
def test_calls_over_caches_are_compared_with_what_they_wrote(
    kernels: Kernels, made: dict[str, Any], spoil: Any, said: str | None
) -> None:
    def checked() -> Told:
        return _checks.check_cache("ampere", "x", "float16", made, H200)

    def in_calls(n: int, tensors: Tensors, results: list[Tensor]) -> None:
        if n >= 0 or spoil is beyond_the_end:
            spoil(n if n < 0 or spoil is not later else 9 * (n == 8), tensors, flat(results, n))

    if said is None:
        assert checked().kernels
        return
    kernels.spoil = in_calls
    with pytest.raises(WrongError, match=said):
        checked()


def flat(results: list[Tensor], n: int) -> list[Tensor]:
    """Views that have four dimensions."""
    return results if n < 0 else [x if x.ndim >= 4 or x.ndim == 2 else x[None] for x in results]


# --- the functions beside attention ---


def test_quantised_numbers_are_the_nearest(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _checks.check_quantize(H200) == Told()

    def halved(n: int, tensors: Tensors, results: list[Tensor]) -> None:
        results[0] = (results[0].float() * 0.8).to(results[0].dtype)

    kernels.spoil = halved
    with pytest.raises(WrongError, match="per tensor: numbers are not the nearest"):
        _checks.check_quantize(H200)
    monkeypatch.setattr(native, "has_quantizer", lambda capability: False)
    with pytest.raises(NotHereError, match="no code of quantize_fp8"):
        _checks.check_quantize(H200)


def test_merged_halves_are_the_whole(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _checks.check_merge(H200) == Told()
    for spoil, said in ((everywhere, "output: WRONG"), (wrong_sums, "log-sum-exp: WRONG")):
        kernels.spoil = spoil
        with pytest.raises(WrongError, match=said):
            _checks.check_merge(H200)
    monkeypatch.setattr(native, "has_merger", lambda capability: False)
    with pytest.raises(NotHereError, match="no code of merge_attention"):
        _checks.check_merge(H200)


# --- every item that a GPU is given ---


@pytest.mark.slow
def test_every_small_call_is_one_that_its_reference_knows(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_checks, "REPEATS", 1)
    given = ("ampere", "bfloat16")
    items: list[Item] = _calls.first_items(*given, (64, 64), H200)[:-1]  # but for many tiles
    for item in (*items, *_calls.odd_items(*given, H200)):
        assert item.run(H200).kernels, item.name


# --- probes, and the process of a job ---

PROBE = _probes.PROBES[0]


def test_a_probe_whose_words_differ_from_the_simulators_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = torch.arange(PROBE.words, dtype=torch.int32)
    off = right.clone()
    off[3:5] += 1
    ran = []

    def run(probe: Any, device: Any, where_to: str) -> Tensor:
        ran.append(where_to)
        return off if len(ran) == 2 else right

    monkeypatch.setattr(_probes, "run", run)
    monkeypatch.setattr(_dispatch, "query_device", lambda index: find_device("H200"))
    monkeypatch.setattr(_probes, "stored_hashes", lambda: {PROBE.name: _probes.digest(right)})
    with pytest.raises(WrongError, match=f"2 of {PROBE.words} words are not those of the sim"):
        _probes.check(PROBE, H200)
    assert len(ran) == 3  # the second run was wrong, and the simulator was asked
    assert _probes.check(PROBE, H200) == Told()
    for known in ({}, {PROBE.name: {"8.0": "x"}}):
        monkeypatch.setattr(_probes, "stored_hashes", lambda known=known: known)
        with pytest.raises(NotHereError, match="no bits are stored for this compute capability"):
            _probes.check(PROBE, H200)


def test_a_probe_is_launched_on_a_gpu_and_simulated_without_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = find_device("H200")
    launched: list[Any] = []
    monkeypatch.setattr(native, "launch", lambda plan, tensors: launched.append((plan, tensors)))
    out = _probes.run(PROBE, device, "meta")
    ((plan, tensors),) = launched
    assert tensors["out"] is out
    assert plan.kernels == [f"probe_{PROBE.name}"]
    stopped = SimpleNamespace(complete=False, errors=("it stopped",), kernel="x")
    monkeypatch.setattr(_attention, "simulate", lambda plan, tensors, settings: (stopped,))
    with pytest.raises(sim.SimulationError):
        _probes.run(PROBE, device, "cpu")
    monkeypatch.setattr(_probes, "kernels_on", lambda capability: ())
    with pytest.raises(NotHereError, match="no kernel of this build can be planned for H200"):
        _probes.run(PROBE, device, "cpu")


def test_the_process_of_a_job_tells_what_it_does_until_cuda_is_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []

    def item(name: str) -> Item:
        def run(made: Setup) -> Told:
            done.append(name)
            if name != "fine":
                raise RuntimeError("an illegal memory access was encountered")
            return Told("well")

        return Item(name, run)

    def broken(made: Setup) -> None:
        if done and done[-1] != "fine":
            raise RuntimeError("the context is lost")

    job = Job("part", "simt", "forward", "what", lambda: [item(x) for x in ("fine", "bad", "last")])
    opened: list[Any] = []
    monkeypatch.setattr(_jobs, "make_jobs", lambda made: [job])
    monkeypatch.setattr(_worker, "warm_up", lambda made: opened.append("ahead"))
    monkeypatch.setattr(torch.cuda, "set_device", opened.append)
    monkeypatch.setattr(Setup, "synchronize", broken)
    on = dict(H200.to_dict(), device="cuda:0")

    def served(*lines: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
        read, write = os.pipe()
        monkeypatch.setattr("sys.argv", ["_worker", str(write)])
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(json.dumps(x) + "\n" for x in lines)))
        status = _worker.main()  # it closes its end
        with os.fdopen(read) as answers:
            return status, [json.loads(line) for line in answers]

    wanted = {"job": job.name, "items": ["fine", "bad", "last"]}
    status, said = served({"setup": on, "ahead": True}, wanted)
    assert status == 1
    assert [(x["said"], x.get("item"), x.get("status")) for x in said] == [
        ("ready", None, None), ("begin", "fine", None), ("end", "fine", "ok"),
        ("begin", "bad", None), ("end", "bad", "failed"),
    ]  # fmt: skip
    assert said[-1]["detail"].endswith("then RuntimeError: the context is lost")
    assert opened == ["ahead", "cuda:0"]
    done.clear()
    assert served({"setup": on, "ahead": False}, dict(wanted, items=["fine"]))[0] == 0
    assert served({"setup": on, "ahead": False}) == (0, [{"said": "ready"}])  # it was not needed
    assert done == ["fine"]


# --- times ---


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A GPU whose calls take so many milliseconds, and the state that it says it has."""
    told: dict[str, Any] = {"ms": 0.5, "calls": 0, "state": {"clock_mhz": 1980.0, "power_w": 500.0}}

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.calls = told["calls"]

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: Event) -> float:
            return (end.calls - self.calls) * float(told["ms"])

    def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
        told["calls"] += 1
        told["shape"] = (*q.shape, k.shape[2])

    monkeypatch.setattr(archflash, "attention", attention)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(_times, "gpu_state", lambda index: told["state"])
    return told


@pytest.mark.parametrize("kernel", ["ampere", "torch"])
def test_times_are_per_call_and_say_the_state_of_the_gpu(
    clock: dict[str, Any], kernel: str
) -> None:
    told = _times.time(kernel, "bfloat16", (4, 2), (512, 512), 64, {"causal": False}, H200)
    assert told.numbers["p20_us"] == told.numbers["p50_us"] == told.numbers["p80_us"] == 500.0
    assert told.numbers["tflops"] == pytest.approx(4 * 4 * 512 * 512 * 64 / 500e-6 / 1e12, abs=0.01)
    assert told.note == f"500.0 us, {told.numbers['tflops']} TFLOP/s, 1980.0 MHz, 500.0 W"
    assert clock["calls"] >= _times.WARM_SECONDS * 1e3 / 0.5
    clock["state"] = {}
    assert (
        "MHz"
        not in _times.time(kernel, "bfloat16", (4, 2), (512, 512), 64, {"causal": True}, H200).note
    )


def test_timed_calls_fit_into_the_memory_of_the_gpu(clock: dict[str, Any]) -> None:
    call = {"causal": True}
    told = _times.time("ampere", "bfloat16", (4, 2), (8192, 8192), 64, call, H200)
    assert (told.numbers["rows"], told.numbers["keys"]) == (1024, 1024)
    assert clock["shape"] == (1, 4, 1024, 64, 1024)


def test_an_item_for_each_kernel_that_takes_the_dtype() -> None:
    names = [item.name for item in _times.time_items(H200)]
    assert "fp32 d64, simt" in names
    assert "e4m3 d128, torch" not in names
    assert "bf16 d64, simt" not in names
    assert "bf16 d64, torch" in names
