"""Runs a case on the simulator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from archflash import sim

from .cases import Case


def raw_bytes(tensor: Tensor) -> bytes:
    """A tensor's elements in order, as bytes."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def launch(case: Case, program: sim.Program, **options: Any) -> tuple[sim.Report, Tensor]:
    """Launches a program of a case and returns the report and the output."""
    arguments = case.arguments()
    report = sim.launch(
        program,
        "test",
        arguments,
        grid=(case.grid,),
        cluster=(case.cluster,),
        block=(case.block,),
        shared_bytes=case.shared_bytes,
        **options,
    )
    output = arguments[case.output]
    tensor = output.tensor if isinstance(output, sim.TensorMap) else output
    assert isinstance(tensor, Tensor)
    return report, tensor


def run(case: Case, mode: str = "random") -> tuple[sim.Report, bytes]:
    """Runs a case and returns the report and the bytes of the output.

    Raises:
        SimulationError: the simulator finds an error in the case.
    """
    report, output = launch(case, sim.load(case.text), mode=mode)
    return report, raw_bytes(output)


def simulate(case: Case, mode: str = "random") -> bytes:
    """Runs a case and returns the bytes of the output."""
    return run(case, mode)[1]
