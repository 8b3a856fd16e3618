"""Measures how fast the simulator runs one CTA of some kernels on one core, and many CTAs on all
cores: `python -m tests.sim.speed`. This says nothing about a GPU, so no results file has it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch

from archflash import sim

from . import test_third_party as third_party
from .protocols.samples.kernels import Sample, samples

ROUNDS = 5
KEYS, HEAD_DIM = 1024, 128
TILES = 60  # tiles along K in a product of the samples
# Million warp-instructions per second on one core, without the race check and with it.
# In blackwell_dc the products of tcgen05 take most of the time.
FLOORS = {
    "ampere": {False: 5.0, True: 1.5},
    "blackwell_consumer": {True: 1.5},
    "blackwell_dc": {False: 1.5, True: 1.0},
    "wgmma": {True: 1.0},
}
QUERIES = {"ampere": 64, "blackwell_consumer": 128, "blackwell_dc": 256}  # query rows of a CTA

Run = Callable[[int, bool], sim.Report]  # (threads, race check)


def attention(implementation: str, heads: int = 1) -> Run:
    """A call of a kernel in bf16 that has one CTA for each head."""

    def tensor(rows: int, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(1, heads, rows, HEAD_DIM, generator=generator).to(torch.bfloat16)

    q, k = tensor(QUERIES[implementation], 0), tensor(KEYS, 1)
    return lambda threads, race_check: (
        sim.run(
            q,
            k,
            k,
            implementation=implementation,
            mode="lazy",
            race_check=race_check,
            threads=threads,
        ).report
    )


def triton_attention(kernel: dict[str, Any]) -> Run:
    """Attention with TMA and wgmma that Triton has compiled for capability 9.0."""
    variant = third_party.VARIANTS["sm_90-tma"]
    program = sim.load(kernel["ptx"])
    tensors = third_party.inputs(variant.rows, KEYS, variant.d)
    return lambda threads, race_check: third_party.attend(
        variant, program, kernel, tensors, "lazy", race_check=race_check, threads=threads
    )[1]


def product(sample: Sample) -> Run:
    """A sample kernel that does little besides copies and products."""
    program, arguments = sim.load(sample.text), sample.arguments(TILES)
    return lambda threads, race_check: sim.launch(
        program,
        "test",
        arguments,
        grid=(sample.grid,),
        block=(sample.block,),
        shared_bytes=sample.shared_bytes,
        mode="lazy",
        race_check=race_check,
        threads=threads,
    )


def show(name: str, run: Run, threads: int, race_check: bool, floor: float | None = None) -> None:
    """Prints a row: the best of some runs. For one thread it is processor time, which other
    programs on the machine hardly change.
    """
    seconds = float("inf")
    for _ in range(ROUNDS):
        begin = time.process_time()
        report = run(threads, race_check)
        used = time.process_time() - begin
        seconds = min(seconds, used if threads == 1 else report.seconds)
    count = report.total_instructions
    row = (
        f"{name:30}  {report.ctas:4}  {threads:7}  {'on' if race_check else 'off':10}  "
        f"{count:17}  {1e3 * seconds:7.2f}  {count / seconds / 1e6:5.2f}  {floor or ''}"
    )
    print(row.rstrip())


def main() -> None:
    cores = os.cpu_count() or 1
    print(f"{KEYS} keys, D={HEAD_DIM}, bf16 (Triton: D=64, fp16); best of {ROUNDS}")
    print(f"{'kernel':30}  CTAs  threads  race check  warp-instructions       ms    M/s  at least")
    for race_check in (False, True):
        for heads, threads in ((1, 1), (2 * cores, 1), (2 * cores, cores)):
            floor = FLOORS["ampere"][race_check] if heads == 1 else None
            show("ampere", attention("ampere", heads), threads, race_check, floor)
    for name in ("blackwell_consumer", "blackwell_dc"):
        for race_check, floor in FLOORS[name].items():
            show(name, attention(name), 1, race_check, floor)
    why_not = third_party.why_not()
    if why_not:
        print(why_not)
    else:
        (kernel,) = third_party.compiled(90, [third_party.VARIANTS["sm_90-tma"].constants(True)])
        show("Triton, TMA and wgmma", triton_attention(kernel), 1, True, FLOORS["wgmma"][True])
    for sample in samples():
        floor = FLOORS["wgmma"][True] if sample.name.startswith("wgmma") else None
        show(f"a product, {sample.name}", product(sample), 1, True, floor)


if __name__ == "__main__":
    main()
