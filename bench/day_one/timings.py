"""Switches in their other states, walks and peers: what a day checks and times, in turns."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from bench import on_the_spot, timing
from bench.candidates import Candidate, flash_attention_candidates, our_candidates, torch_candidates
from bench.cases import Case
from bench.correctness import Checker
from bench.day_one import record
from bench.day_one.setup import TINY, WITH_SWITCHES, Setup, WrongError
from bench.results import Row
from bench.run import MIN_ROUNDS, WARM_SECONDS, run_case
from bench.switches import variants

if TYPE_CHECKING:
    import torch

# --- switches ---


def _nvcc() -> str:
    nvcc = on_the_spot.find_nvcc()
    if nvcc is None:
        raise WrongError("nvcc is not found: it compiles the switches' other states")
    return nvcc


def bind_setting(setting: variants.Setting, setup: Setup, case: Case) -> Callable[..., Any]:
    """The function of q, k and v that a setting's kernel computes."""
    nvcc = _nvcc() if setting.assignment else ""  # the wheel's kernel has another plan
    if not setup.simulate:
        return variants.bind(setting, nvcc, case.causal, pairs=setup.pairs)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        made = variants.simulate(setting, q, k, v, nvcc=nvcc, causal=case.causal)
        return made.out

    return call


def check_setting(part: str, setting: variants.Setting, setup: Setup) -> Iterator[Row]:
    """Compares the kernel with a switch in its other state with float64."""
    for case in TINY:
        q, k, v = timing.make_sets(case, setup.device, 1)[0]
        if not variants.applies(setting, _plan_of(case, setup)):
            continue
        out = bind_setting(setting, setup, case)(q, k, v)
        verdict = Checker(case)(q, k, v, out, ours=True)
        if verdict.problem:
            raise WrongError(f"{case.name}: {verdict.problem}")
        said = f"{case.name}: right, largest error {verdict.max_err:.1e}"
        if setup.simulate and case is TINY[0]:
            nvcc = _nvcc() if setting.assignment else ""
            counted = variants.simulate(
                setting, q, k, v, nvcc=nvcc, causal=case.causal, mode="lazy", race_check=False,
                traced_ctas=1,
            )  # fmt: skip
            roles = variants.counts(counted).roles
            said += "; warp-instructions of CTA 0: " + ", ".join(
                f"{name} {count:.0f}" for name, count in roles.items()
            )
        yield record.make_row(part, setting.name, "note", f"{setting.meaning}; {said}")


def check_gradients_setting(setup: Setup) -> Iterator[Row]:
    """Compares gradients with the switch of the backward pass in its other state with float64."""
    import torch

    from bench.switches import gradients

    for d in gradients.DIMS:
        case = Case(f"bf16 1x2/1 300x260 d{d} c", "bf16", 1, 2, 1, 300, 260, d, d, True)
        q, k, v = timing.make_sets(case, setup.device, 1)[0]
        request = gradients.request_of(torch.randn_like(q), q, k, v, causal=True)
        into, _ = gradients.compute(request, _nvcc())
        if problem := gradients.problem_of(request, into, causal=True):
            raise WrongError(f"{case.name}: {problem}")
        yield record.make_row("switches", variants.GRADIENTS, "note", f"{case.name}: right")


def time_settings(
    part: str, settings: Iterable[variants.Setting], case: Case, setup: Setup
) -> Iterator[Row]:
    """Times the wheel's kernel and other states of switches, interleaved."""
    planned = _plan_of(case, setup)
    chosen = [
        setting
        for setting in settings
        if setting.name not in setup.without
        and variants.applies(setting, planned)
        and (setup.pairs or setting.name != "pairs=on")
    ]
    made = [_own_candidate(case, setup)]
    version = made[0].version
    for setting in chosen:
        made.append(
            Candidate(
                f"{setup.implementation}:{setting.name}",
                version,
                True,
                functools.partial(bind_setting, setting, setup),
                features=f"switch={setting.name}",
            )
        )
    if not setup.simulate:
        _compile_all(planned, chosen)
    yield from _measure(part, case, made, setup)


def _own_candidate(case: Case, setup: Setup) -> Candidate:
    """The implementation as the wheel has it; on CTAs alone where pairs have not worked."""
    wheel = next(item for item in our_candidates() if item.name == setup.implementation)
    if setup.pairs or setup.implementation != WITH_SWITCHES:
        return wheel
    alone = next(setting for setting in variants.SETTINGS if setting.name == "pairs=off")
    if not variants.applies(alone, _plan_of(case, setup)):
        return wheel
    bind = functools.partial(bind_setting, alone, setup)
    return dataclasses.replace(wheel, bind=bind, features=f"switch={alone.name}")


def _plan_of(case: Case, setup: Setup) -> Any:
    """The wheel's plan of a case."""
    import torch

    import archflash

    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}[case.dtype]
    q, k, v = (
        torch.empty(shape, dtype=dtype, device="meta")
        for shape in (
            (case.b, case.hq, case.nq, case.d),
            (case.b, case.hkv, case.nk, case.d),
            (case.b, case.hkv, case.nk, case.dv),
        )
    )
    device = variants.HOME if setup.simulate else torch.cuda.current_device()
    decision = archflash.explain(
        q, k, v, causal=case.causal, implementation=WITH_SWITCHES, device=device
    )
    return decision.plan


def _compile_all(planned: Any, settings: list[variants.Setting]) -> None:
    """Compiles all kernels that a case needs, on all cores. One that fails raises when called."""
    changed = [setting for setting in settings if setting.assignment]
    if not changed:
        return
    nvcc = _nvcc()

    def compile_one(setting: variants.Setting) -> None:
        with contextlib.suppress(RuntimeError):
            variants.compiled(setting, planned, nvcc, "cubin")

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, changed))


# --- peers ---


def time_peers(case: Case, setup: Setup) -> Iterator[Row]:
    """Times the implementation, our kernel for every GPU, and all peers, interleaved."""
    names = dict.fromkeys((setup.implementation, *(() if setup.simulate else ("ampere",))))
    ours = [
        _own_candidate(case, setup) if item.name == setup.implementation else item
        for item in our_candidates()
        if item.name in names
    ]
    peers = [*torch_candidates(), *flash_attention_candidates()]
    yield from _measure("peers", case, [*ours, *peers], setup)


class Lab(timing.CudaLab):
    """Prints what it is doing, for the record of a job that hangs.

    Args:
        host: whether calls are timed on the host too. Switches are not: their plans are not kept
            in the cache of plans, and tiny cases would need other kernels, which are not compiled.
    """

    def __init__(self, host: bool) -> None:
        super().__init__()
        self._host = host

    def try_call(self, candidate: Candidate, case: Case, sets: Any) -> None:
        """Makes one eager call."""
        print(f"{candidate.name}: first call", flush=True)
        super().try_call(candidate, case, sets)

    def prepare(self, candidate: Candidate, case: Case, sets: Any) -> tuple[timing.CudaCalls, str]:
        """The candidate ready for timing."""
        prepared = super().prepare(candidate, case, sets)
        print(f"{candidate.name}: ready", flush=True)
        return prepared

    def host_us(self, candidate: Candidate, case: Case) -> float:
        """Microseconds on the host; NaN if the host is not timed."""
        if not self._host:
            return float("nan")
        print(f"{candidate.name}: host time", flush=True)
        return super().host_us(candidate, case)


class SimulatedLab:
    """Replaces timing.CudaLab: every call runs once, and nothing is timed."""

    class Calls:
        calls = 1
        captured = True

        def __init__(self, inputs: Any, out: Any) -> None:
            self._last = (inputs, out)

        def enqueue(self) -> SimulatedLab.Calls:
            return self

        def wait(self) -> None:
            """Returns at once, because nothing runs asynchronously."""

        def elapsed_us(self) -> float:
            return float("nan")

        def last_output(self) -> Any:
            return self._last

    def inputs(self, case: Case) -> Any:
        return timing.make_sets(case, "cpu", 1)

    def try_call(self, candidate: Candidate, case: Case, sets: Any) -> None:
        """Does nothing, because prepare() makes the call."""

    def prepare(self, candidate: Candidate, case: Case, sets: Any) -> tuple[Any, str]:
        print(f"{candidate.name}: first call", flush=True)
        with candidate.context():
            return self.Calls(sets[0], candidate.bind(case)(*sets[0])), ""

    def host_us(self, candidate: Candidate, case: Case) -> float:
        return float("nan")

    def clock_mhz(self) -> int | None:
        return None

    def release(self) -> None:
        """Does nothing, because no memory is held."""


def _measure(part: str, case: Case, candidates: list[Candidate], setup: Setup) -> Iterator[Row]:
    import torch

    lab: Any = SimulatedLab() if setup.simulate else Lab(host=part == "peers")
    with torch.no_grad():
        result = run_case(
            lab, case, candidates, setup.facts, rounds=MIN_ROUNDS,
            warm_seconds=0.0 if setup.simulate else WARM_SECONDS,
        )  # fmt: skip
    for row in result.rows:
        status = "timed"
        if setup.simulate:
            status = "simulated"
            row = {name: "" if value == "nan" else value for name, value in row.items()}
        note = result.notes.get(row["implementation"], "")
        yield record.make_row(part, case.name, status, note, measured=row)
    for name, reason in result.refused.items():
        yield record.make_row(part, case.name, "refused", f"{name}: {reason}")
    for name, problem in result.wrong.items():
        yield record.make_row(part, case.name, "note", f"wrong: {name}: {problem}")
    served = {row["implementation"] for row in result.rows}
    ours = [item.name for item in candidates if item.ours]
    missing = [name for name in ours if name not in served]
    wrong_peers = [name for name in result.wrong if name not in ours]
    if any(name in result.wrong for name in ours) or setup.implementation in missing:
        raise WrongError(f"not measured: {', '.join(missing)}")
    if part != "peers" and missing:
        raise WrongError(f"not measured: {', '.join(missing)}")
    if wrong_peers:
        yield record.make_row(part, case.name, "note", f"peers left out: {', '.join(wrong_peers)}")
