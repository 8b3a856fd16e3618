"""Runs a case on the simulator."""

from __future__ import annotations

import torch
from torch import Tensor

from archflash import sim

from .cases import Case


def raw_bytes(tensor: Tensor) -> bytes:
    """A tensor's elements in order, as bytes."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def run(case: Case, mode: str = "random") -> tuple[sim.Report, bytes]:
    """Runs a case and returns the report and the bytes of the output.

    Raises:
        SimulationError: the simulator finds an error in the case.
    """
    arguments = case.arguments()
    report = sim.launch(
        sim.load(case.text),
        "test",
        arguments,
        grid=(case.grid,),
        cluster=(case.cluster,),
        block=(case.block,),
        shared_bytes=case.shared_bytes,
        mode=mode,
    )
    output = arguments[case.output]
    tensor = output.tensor if isinstance(output, sim.TensorMap) else output
    assert isinstance(tensor, Tensor)
    return report, raw_bytes(tensor)


def simulate(case: Case, mode: str = "random") -> bytes:
    """Runs a case and returns the bytes of the output."""
    return run(case, mode)[1]
