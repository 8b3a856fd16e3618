"""The settings that can be changed, and the kernels, plans and calls with one of them changed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import on_the_spot

if TYPE_CHECKING:
    import torch

    from archflash import sim

NAME = "blackwell_dc"
HOME = "B200"  # the GPU whose plans are simulated
SOURCE = Path(__file__).with_name("variant.cu")
KERNELS = on_the_spot.SOURCES / NAME / "kernels"


@dataclass(frozen=True)
class Setting:
    """One difference from the wheel.

    Attributes:
        name: the switch and its state, such as "split_p=off".
        meaning: what the kernel does in that state.
        assignment: an assignment to a member of Settings in variant.cu; "" if only the plan
            changes.
    """

    name: str
    meaning: str
    assignment: str = ""

    @property
    def switch(self) -> str:
        """The name of the switch."""
        return self.name.partition("=")[0]


def _off(name: str, meaning: str) -> Setting:
    return Setting(f"{name}=off", meaning, f"switches.{name} = false")


def _registers(softmax: int, correction: int) -> Setting:
    numbers = (softmax, correction, other := 48)
    return Setting(
        "registers=" + "/".join(map(str, numbers)),
        f"{softmax} registers for a thread of softmax, {correction} in correction, {other} else",
        "registers = {" + ", ".join(map(str, numbers)) + "}",
    )


# The only one of the backward pass (gradients.py).
GRADIENTS = "gradients: trust_issue_order=off"
SETTINGS = (
    *[
        Setting(
            f"polynomial_pairs={pairs}",
            f"{pairs} of 16 pairs of exponentials by polynomial"
            if pairs
            else "all exponentials by MUFU",
            f"switches.polynomial_pairs = {pairs}",
        )
        for pairs in (0, 2, 4, 5, 6, 8)
    ],
    Setting(
        "polynomial_in_last_quarter=on",
        "the last quarter of a block has polynomials too",
        "switches.polynomial_in_last_quarter = true",
    ),
    Setting(
        "polynomial_in_last_quarter=off",
        "the last quarter of a block has no polynomials",
        "switches.polynomial_in_last_quarter = false",
    ),
    _off("lazy_rescale", "O is rescaled in every block"),
    _off("split_p", "all of P is handed over at once"),
    _off("move_registers", "no setmaxnreg: every thread has 128 registers"),
    _off("precomputed_descriptors", "each product's descriptors are made anew"),
    _off("trust_issue_order", "S that overwrites P waits until the product that reads P is done"),
    _off("implied_o_ready", "correction waits for the product of every block"),
    _off("release_each_tile", "the next row tile's first products wait for both tiles' O"),
    _off("l2_hints", "TMA does not tell L2 what to keep"),
    _off("tma_store", "the epilogue warp copies output rows, 16 bytes a lane"),
    _off("longest_first", "the first row tiles of causal calls, the shortest, come first"),
    _off("dynamic_walk", "the tiles of as many CTAs as there is room for are fixed"),
    Setting(
        "persistent=off",
        "a CTA for each row tile, which ends with it",
        "switches.dynamic_walk = false",
    ),
    Setting("pairs=on", "pairs of CTAs multiply together, whatever the call (d 128 and 192)"),
    Setting("pairs=off", "CTAs work alone, whatever the call (d 128 and 192)"),
    Setting("splits=off", "keys are not split over CTAs (calls whose keys the plan splits only)"),
    _registers(200, 64),
    _registers(184, 96),
)


@cache
def configs() -> Mapping[str, str]:
    """The Config of each kernel of the wheel, by the kernel's name: "D128"."""
    text = "".join(
        on_the_spot.text_for(file, image)
        for file in sorted(KERNELS.glob("*.cu"))
        for image in on_the_spot.images_of(file)
    )
    found = re.findall(
        r"^ARCHFLASH_KERNEL\(\s*(\w+),\s*attention_fwd,\s*(.+?)\)$", text, re.M | re.S
    )
    return dict(found)


def definitions(setting: Setting, kernel: str) -> tuple[str, ...]:
    """The macros that make variant.cu a kernel of the wheel with one setting changed.

    Raises:
        RuntimeError: the wheel has no such kernel.
    """
    if kernel not in configs():
        raise RuntimeError(f"{kernel} has no variants: {', '.join(configs())} have")
    dtype = kernel.removeprefix(f"{NAME}_attention_fwd_").partition("_")[0]
    return (
        f"ARCHFLASH_DTYPE={dtype.upper()}",
        f"KERNEL={kernel}",
        f"WHEEL_CONFIG={configs()[kernel]}",
        f"SETTING={setting.assignment}",
    )


def changed_kernel(plan: Any) -> str:
    """The kernel of a plan that has variants. The kernel that combines split keys has none.

    Raises:
        RuntimeError: the plan has no such kernel, or more than one.
    """
    names = [row["kernel"] for row in plan.to_dict()["launches"]]
    found = [name for name in names if name in configs()]
    if len(found) != 1:
        raise RuntimeError(f"one kernel with variants is wanted: {', '.join(names)}")
    return found[0]


def compiled(setting: Setting, planned: Any, nvcc: str, kind: str) -> bytes:
    """Compiles a variant of the kernel of a plan, for the GPUs that the wheel's is for: 10.x, or
    11.0. It has the kernel's name.

    Args:
        setting: what is changed; it must have an assignment.
        planned: the plan.
        nvcc: the compiler.
        kind: "ptx" or "cubin".

    Returns:
        The file.

    Raises:
        RuntimeError: it does not compile; the message is nvcc's.
    """
    target = planned.code
    architecture = target.replace("sm_", "compute_") if kind == "ptx" else target
    macros = definitions(setting, changed_kernel(planned))
    return on_the_spot.compiled(SOURCE, nvcc, kind, architecture, macros)


def applies(setting: Setting, planned: Any) -> bool:
    """Whether a setting changes anything in a plan of blackwell_dc."""
    from bench.switches import plans

    if setting.switch == "pairs":
        return plans.serves_pairs(planned)
    if setting.switch == "splits":
        return plans.splits_keys(planned)
    return True


def plan_for(setting: Setting, planned: Any) -> Any:
    """Changes the wheel's plan as the setting asks, or returns it as it is.

    Args:
        setting: what is changed; it must apply.
        planned: the LaunchPlan of blackwell_dc for a call.

    Raises:
        RuntimeError: the call has no such plan.
    """
    from bench.switches import plans

    if setting.name == "dynamic_walk=off":
        return plans.as_many_as_fit(planned)
    if setting.name == "pairs=on":
        return plans.in_pairs(planned)
    if setting.name == "pairs=off":
        return plans.alone(planned)
    if setting.name == "splits=off":
        return plans.unsplit(planned)
    return planned


def simulate(
    setting: Setting | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    nvcc: str,
    plan: Any = None,
    **options: Any,
) -> sim.Run:
    """Runs a call on the simulator.

    Args:
        setting: what is changed; None for the wheel's kernel.
        q, k, v: as for `archflash.attention`, on the CPU.
        nvcc: the compiler.
        plan: the wheel's plan; by default the one for a B200.
        options: the other arguments of `archflash.sim.run`, and of `archflash.attention`.

    Returns:
        What `archflash.sim.run` returns.
    """
    import archflash
    from archflash import sim

    if plan is None:
        ours = ("mode", "seed", "race_check", "threads", "traced_ctas", "stretch", "check")
        call = {name: value for name, value in options.items() if name not in ours}
        plan = archflash.explain(q, k, v, device=HOME, implementation=NAME, **call).plan
    if setting is not None:
        plan = plan_for(setting, plan)
        if setting.name == "splits=off":  # a plan runs for its own call only
            options["num_splits"] = 1
    program = None
    if setting is not None and setting.assignment:
        program = sim.load(compiled(setting, plan, nvcc, "ptx").decode())
    return sim.run(q, k, v, implementation=NAME, plan=plan, program=program, **options)


def bind(
    setting: Setting, nvcc: str, causal: bool, *, pairs: bool = True
) -> Callable[..., torch.Tensor]:
    """Makes the function that computes attention of CUDA tensors with one setting changed.

    Args:
        setting: what is changed.
        nvcc: the compiler, on the machine with the GPU.
        causal: as for `archflash.attention`.
        pairs: whether calls whose plans take pairs of CTAs run so; if not, CTAs work alone.

    Returns:
        The function of q, k and v (batch, heads, n, d). It raises RuntimeError if the kernel does
        not compile, and archflash.LaunchError if it does not start.
    """
    import torch

    import archflash
    from archflash import _archflash as native
    from bench.switches.plans import alone

    plans: dict[torch.Size, native.LaunchPlan] = {}

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if q.shape not in plans:
            decision = archflash.explain(q, k, v, causal=causal, implementation=NAME)
            planned = decision.plan
            if not pairs and planned.tile.cluster == 2:
                planned = alone(planned)
            plan = plan_for(setting, planned)
            if setting.assignment:
                code = compiled(setting, plan, nvcc, "cubin")
                plan = on_the_spot.with_kernel(plan, changed_kernel(plan), code)
            plans[q.shape] = plan
        dtype = torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype
        out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=dtype)
        plan = plans[q.shape]
        tensors = {"q": q, "k": k, "v": v, "out": out}
        if plan.workspace_bytes:
            tensors["workspace"] = q.new_empty(plan.workspace_bytes, dtype=torch.uint8)
        native.launch(plan, tensors)
        return out

    return call


# --- counts ---

# The warps of each role (src/blackwell_dc/config.cuh).
ROLES = {
    "softmax": range(0, 4),
    "correction": range(8, 12),
    "mma": range(12, 13),
    "store": range(13, 14),
    "load": range(14, 15),
}


@dataclass(frozen=True)
class Counts:
    """Warp-instructions of a simulated CTA.

    Attributes:
        roles: for each role, instructions of an average warp (softmax: of tile 0).
        opcodes: for each opcode, instructions of the whole CTA.
    """

    roles: Mapping[str, float]
    opcodes: Mapping[str, int]


def counts(run: sim.Run) -> Counts:
    """Counts what the first CTA of a run with `traced_ctas=1` executed."""
    of_warp: Counter[int] = Counter()
    for event in run.report.traces[0].events:
        if event.kind == "run":
            of_warp[event.track] += event.end - event.begin
    roles = {
        name: sum(of_warp[warp] for warp in warps) / len(warps) for name, warps in ROLES.items()
    }
    return Counts(roles, dict(run.report.opcodes))


# For each head dimension the query rows of a CTA, and the keys of a block.
ROWS = {64: 256, 96: 256, 128: 256, 192: 256, 256: 128}
BLOCK = {64: 128, 96: 128, 128: 128, 192: 128, 256: 64}
DV = {192: 128}


@cache
def counts_of(setting: Setting | None, blocks: int, nvcc: str, d: int = 128) -> Counts:
    """Counts what a CTA executes for one full tile over full blocks in which no base rises.

    Args:
        setting: what is changed; None for the wheel's kernel.
        blocks: number of blocks of keys.
        nvcc: the compiler.
        d: head dimension of q and k, one that a kernel is made for; bf16.
    """
    import torch

    q = torch.zeros(1, 1, ROWS[d], d, dtype=torch.bfloat16)
    k = torch.zeros(1, 1, blocks * BLOCK[d], d, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(2)
    v = torch.randn(1, 1, blocks * BLOCK[d], DV.get(d, d), generator=generator).bfloat16()
    return counts(
        simulate(
            setting, q, k, v, nvcc=nvcc, mode="lazy", race_check=False, traced_ctas=1, num_splits=1
        )
    )
