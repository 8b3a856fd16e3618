"""The PTX simulator: runs the PTX that nvcc made of our kernels on a machine with no GPU, and says
what is wrong with it.

`run` runs one attention call of a kernel implementation; `load` and `launch` run any PTX.
"""

from archflash.sim._attention import Run, run
from archflash.sim._launch import Buffer, Program, TensorMap, launch, load
from archflash.sim._report import Finding, Report, SimulationError

__all__ = [
    "Buffer",
    "Finding",
    "Program",
    "Report",
    "Run",
    "SimulationError",
    "TensorMap",
    "launch",
    "load",
    "run",
]
