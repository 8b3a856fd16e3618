"""Attention calls on the simulator: a bound plan runs as the CUDA runtime would launch it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from archflash import _api, _dispatch, _options, _packed
from archflash import _archflash as _runtime
from archflash import _archflash_sim as _native
from archflash._errors import LaunchError, NotCompiledError
from archflash._plain_tensors import resolved
from archflash.sim._launch import Bindings, Buffer, Program, load_when_asked, run_kernel
from archflash.sim._report import Report, SimulationError

LIMIT_VARIABLE = "ARCHFLASH_SIM_LIMIT"
LIMIT_SECONDS = 60.0
# Multiplications and additions of attention that one core simulates in a second, on the slow side
# of what was seen: with CUDA cores only, and through matrix instructions.
SCALAR_FLOPS = 0.25e9
MATRIX_FLOPS = 1.5e9

_WRITTEN = ("out", "lse", "workspace", "descale")
_APPENDED_TO = ("k", "v")  # also written by a call that has new keys and values
_GRADIENTS = ("dq", "dk", "dv")
# Kernels of the backward pass compute 5 to 7 products of queries and keys, those of attention 2.
_BACKWARD_FLOPS = 3.5


@dataclass(frozen=True)
class Run:
    """What `archflash.sim.run` returns.

    Attributes:
        out: the output, as `archflash.attention` returns it.
        lse: the log-sum-exp, float32 ``(batch, heads_q, nq)``; None unless it was asked for.
        reports: one `Report` for each launch of the plan.
        plan: the plan that was run.
    """

    out: Tensor
    lse: Tensor | None
    reports: tuple[Report, ...]
    plan: _runtime.LaunchPlan

    @property
    def report(self) -> Report:
        """The report of the first launch."""
        return self.reports[0]


@dataclass(frozen=True)
class Settings:
    """How a plan is simulated; see `run`."""

    mode: str = "random"
    seed: int = 0
    race_check: bool = True
    threads: int = 0
    traced_ctas: int | Sequence[int] = 0
    stretch: int = 0
    check: bool = True
    program: Program | None = None


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    implementation: str,
    device: str | None = None,
    mode: str = "random",
    seed: int = 0,
    race_check: bool = True,
    threads: int = 0,
    traced_ctas: int | Sequence[int] = 0,
    stretch: int = 0,
    check: bool = True,
    plan: _runtime.LaunchPlan | None = None,
    program: Program | None = None,
    **options: Any,
) -> Run:
    """Runs one attention call on the simulator.

    Args:
        q, k, v: as for `archflash.attention`, on the CPU.
        implementation: the implementation whose kernel runs.
        device: the GPU to plan for, a name from the table of known GPUs such as "RTX 5090"; default
            the one that ARCHFLASH_SIM_DEVICE names, otherwise the implementation's home GPU.
        mode: "lazy", "eager", "random", "priority" or "shuffled": see `archflash.sim.launch`.
        seed: 64 bits; the same seed gives the same run.
        race_check: whether to look for data races.
        threads: host threads; 0 for one per core.
        traced_ctas: CTAs that record what they do in `Report.traces`: a number, for the first CTAs
            of the grid, or their indices (x fastest).
        stretch: the most instructions that a warp runs before another warp gets its turn; 0: as the
            mode says.
        check: whether errors of the kernel are raised.
        plan: run this plan instead of making one; `device` is then ignored.
        program: from `load`; its kernels run in place of those with the same names.
        options: the other arguments of `archflash.attention`.

    Returns:
        A `Run`: outputs, reports, plan.

    Raises:
        SimulationError: the kernel did something wrong and `check` is set.
        ValueError: an unknown mode or device; a CTA to trace that the grid does not have.
        Otherwise as `archflash.attention`; ARCHFLASH_SIM_LIMIT does not apply.

    Example:
        >>> import torch
        >>> from archflash import sim
        >>> q = torch.randn(1, 1, 16, 32)
        >>> sim.run(q, q, q, implementation="simt").report.barrier_waits > 0
        True
    """
    if plan is None:  # a given plan refuses lazy tensors, as launch() does, and so does any `out`
        q = resolved(q)
        if not _options.has_cache(options):  # caches are written in place
            k, v = (resolved(x) for x in (k, v))
        options = {n: x if n == "out" else resolved(x) for n, x in options.items()}
    values = _api.option_values(q, k, options)
    if plan is None:
        problem = _runtime.make_problem(q, k, v, values, torch.is_grad_enabled())
        gpu = None if device is None else _api.find_device(device)
        if gpu is not None:
            problem = problem.as_if_on_cuda()
        plan = _dispatch.select(problem, gpu, implementation).plan
    if plan is None:
        raise LaunchError(f"{implementation} has nothing to launch for this call")
    tensors = _runtime.operands(plan, q, k, v, values)
    settings = Settings(mode, seed, race_check, threads, traced_ctas, stretch, check, program)
    reports = simulate(plan, tensors, settings)
    return Run(tensors["out"], tensors.get("lse"), reports, plan)


def serve(plan: _runtime.LaunchPlan, tensors: dict[str, Tensor]) -> None:
    """Runs a plan on CPU tensors by operand name. The runtime calls this where it would launch on a
    GPU.

    Raises:
        LaunchError: the simulation is estimated to take more than ARCHFLASH_SIM_LIMIT seconds.
        ValueError: ARCHFLASH_SIM_LIMIT is not a number of seconds.
        SimulationError: the kernel did something wrong.
    """
    _announce(plan)
    _check_limit(plan, tensors)
    simulate(plan, tensors, Settings())


def simulate(
    plan: _runtime.LaunchPlan, tensors: dict[str, Tensor], settings: Settings
) -> tuple[Report, ...]:
    """Runs a plan on tensors by operand name.

    Returns:
        A report for each launch, up to the first that did not complete.

    Raises:
        SimulationError: the kernel did something wrong and `settings.check` is set.
    """
    memory, addresses = place_operands(plan, tensors)
    launches = plan.to_dict()["launches"]
    reports: list[Report] = []
    for index, (row, program) in enumerate(
        zip(launches, programs_of(plan, settings.program), strict=True)
    ):
        report = run_kernel(
            program, row["kernel"], bound_parameters(plan, index, row, addresses), memory,
            grid=row["grid"], block=row["block"], cluster=row["cluster"],
            shared_bytes=row["shared_bytes"], mode=settings.mode, seed=settings.seed,
            race_check=settings.race_check, threads=settings.threads,
            capability=plan.device.capability, shared_limit=plan.device.shared_per_block,
            traced_ctas=settings.traced_ctas, stretch=settings.stretch,
            resident_ctas=resident_ctas(plan), starts_early=starts_early(launches, index),
            next_starts_early=starts_early(launches, index + 1), strict=True,
        )  # fmt: skip
        reports.append(report)
        if settings.check and report.errors:
            raise SimulationError(report)
        if not report.complete:
            break
    return tuple(reports)


def starts_early(launches: list[dict[str, Any]], index: int) -> bool:
    """Whether launch `index` of a plan may start while the one before it still runs."""
    return index < len(launches) and bool(launches[index]["uses_pdl"])


def place_operands(
    plan: _runtime.LaunchPlan, tensors: dict[str, Tensor]
) -> tuple[_native.Memory, list[tuple[str, int]]]:
    """Puts the tensors of a plan, by operand name, into a new memory.

    The bytes that the plan wants zero are zeroed. What kernels write counts as not initialised.

    Returns:
        The memory, and the address of each operand that has elements.
    """
    names = [name for name, tensor in tensors.items() if tensor.numel() > 0]
    # The backward pass reads what attention writes.
    written = (*_GRADIENTS, "dsinks", "workspace") if "dout" in tensors else _WRITTEN
    kept: tuple[str, ...] = (*_GRADIENTS, "dmask") if plan.accumulates else ("dmask",)
    kept += _APPENDED_TO if "k_new" in tensors else ()
    buffers = [
        Buffer(
            tensors[name].detach(),
            name in written or name in kept,
            name not in written or name in kept,
            name,
        )
        for name in names
    ]
    if plan.zeroed_bytes:  # one more buffer, which makes these bytes of the workspace initialised
        zeroed = tensors["workspace"].view(torch.uint8)[: plan.zeroed_bytes].zero_()
        buffers.append(Buffer(zeroed, name="zeroed bytes"))
    memory = _native.Memory()
    addresses = Bindings(memory, buffers).addresses
    return memory, list(zip(names, addresses, strict=False))


def resident_ctas(plan: _runtime.LaunchPlan) -> int:
    """How many CTAs of a plan its device has room for at a time."""
    return plan.device.sm_count * (plan.tile.ctas_per_sm if plan.tile is not None else 1)


def programs_of(plan: _runtime.LaunchPlan, given: Program | None = None) -> list[Program]:
    """The program of each launch of a plan: `given` if it has the kernel, else that of the build.

    Raises:
        NotCompiledError: this build lacks the PTX of one.
    """
    return [
        given
        if given is not None and row["kernel"] in given.kernels
        else find_program(row["image"], plan.device.capability)
        for row in plan.to_dict()["launches"]
    ]


_MAP_TYPES = {
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "float64": "f64",
    "float8_e4m3fn": "u8",
    "float8_e5m2": "u8",
}


def bound_parameters(
    plan: _runtime.LaunchPlan, index: int, launch: dict[str, Any], addresses: list[tuple[str, int]]
) -> bytes:
    """The parameter bytes of launch `index` (also given as a dict) with simulated addresses, and
    the simulator's tensor maps.
    """
    block = bytearray(_runtime.bound_parameters(plan, index, addresses, False))
    address_of = dict(addresses)
    for spec in launch["tensor_maps"]:
        encoded = _native.encode_tensor_map(
            address_of[spec["operand"]] + spec["addend"], _MAP_TYPES[spec["dtype"]], spec["dims"],
            spec["strides"], spec["box"], [1] * len(spec["box"]), spec["swizzle"], spec["nan_fill"],
        )  # fmt: skip
        block[spec["offset"] : spec["offset"] + len(encoded)] = encoded
    return bytes(block)


@cache
def find_program(image: str, capability: tuple[int, int]) -> Program:
    """The PTX from which the machine code of an image for that capability was assembled.

    Raises:
        NotCompiledError: this build left it out.
    """
    return load_when_asked(ptx_text(image, capability))


@lru_cache(maxsize=1)  # those for fp16 and bf16 are in one
def _unpacked(archive: bytes) -> list[tuple[str, bytes]]:
    return list(_packed.members(archive)) if archive else []


def ptx_text(image: str, capability: tuple[int, int]) -> str:
    """The PTX of an image ("folder/stem"): the newest that a GPU of that capability can run.

    Raises:
        NotCompiledError: this build has none.
    """
    texts = dict(_packed.texts_in(_unpacked(_packed.archive_of(image)), image))
    target = _runtime.pick_target(list(texts), capability)
    if target is None:
        raise NotCompiledError(
            f"no PTX of {image} that compute capability {capability[0]}.{capability[1]} runs is in "
            "this build: build again with ARCHFLASH_ARCHS=all"
        )
    return texts[target].decode()


# --- how long it will take ---


def visible_pairs(problem: dict[str, Any], tensors: dict[str, Tensor]) -> int:
    """The pairs of a query and a key that attention computes, over all sequences and heads; half of
    them for causal calls.
    """
    if problem["key_indices"]:
        pairs = problem["batch"] * problem["nq"] * problem["key_indices"]
    elif "cache_seqlens" in tensors:
        keys = tensors["cache_seqlens"].clamp(0, problem["nk"]).to(torch.int64) + problem["n_new"]
        rows = torch.tensor(problem["nq"], device="cpu")
        if "cu_seqlens_q" in tensors:
            rows = tensors["cu_seqlens_q"].diff().clamp(min=0).to(torch.int64)
        pairs = int((rows * keys).sum())
    elif "cu_seqlens_q" in tensors:
        queries = tensors["cu_seqlens_q"].diff().clamp(min=0).to(torch.int64)
        keys = tensors["cu_seqlens_k"].diff().clamp(min=0).to(torch.int64)
        pairs = int((queries * keys).sum())
    else:
        pairs = problem["batch"] * problem["nq"] * problem["nk"]
    pairs *= problem["heads_q"]
    return int(pairs // 2 if problem["causal"] else pairs)


def estimate_seconds(plan: _runtime.LaunchPlan, tensors: dict[str, Tensor]) -> float:
    """A rough estimate of how long the simulation of a plan will take on this machine."""
    problem = plan.problem.to_dict()
    flops = 2.0 * visible_pairs(problem, tensors) * (problem["d"] + problem["dv"])
    if "dout" in tensors:
        flops *= _BACKWARD_FLOPS
    uses_matrices = any(
        "matrix" in program.module.classes(kernel)
        for program, kernel in zip(programs_of(plan), plan.kernels, strict=True)
    )
    rate = MATRIX_FLOPS if uses_matrices else SCALAR_FLOPS
    return float(flops / rate / max(os.cpu_count() or 1, 1))


def limit_seconds() -> float:
    """The seconds that a simulated call may take, as ARCHFLASH_SIM_LIMIT says; inf for no limit.

    Raises:
        ValueError: it is not a number of seconds.
    """
    given = os.environ.get(LIMIT_VARIABLE) or str(LIMIT_SECONDS)
    try:
        limit = float(given)
    except ValueError:
        limit = -1.0
    if not limit >= 0:  # so that NaN is refused
        raise ValueError(
            f"{LIMIT_VARIABLE}={given} is no number of seconds: set it to one of at least 0, to "
            f"inf for no limit, or unset it for {LIMIT_SECONDS:.0f}"
        )
    return limit


def _check_limit(plan: _runtime.LaunchPlan, tensors: dict[str, Tensor]) -> None:
    limit = limit_seconds()
    seconds = estimate_seconds(plan, tensors)
    if seconds > limit:
        raise LaunchError(
            f"{plan.implementation} on the simulator would take about {seconds:.0f} s, more than "
            f"the limit of {limit:.0f} s: set {LIMIT_VARIABLE} to more seconds, take a smaller "
            "problem, or move the tensors to a GPU"
        )


_announced: set[str] = set()


def _announce(plan: _runtime.LaunchPlan) -> None:
    key = f"{plan.implementation} {plan.device.name}"
    if key in _announced:
        return
    _announced.add(key)
    warnings.warn(
        f"archflash: tensors are on the CPU, so {plan.implementation} runs on the PTX simulator, "
        f"as on {plan.device.name}: for testing, not for speed",
        stacklevel=5,
    )
