"""What the jobs of a run share, and what a job is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from archflash import _archflash as _native
from archflash import _registry


class NotHereError(Exception):
    """This cannot be tried here, which is no failure: the message says why."""


@dataclass(frozen=True)
class Setup:
    """What all jobs of a run share. It goes to the processes of jobs as JSON.

    Attributes:
        gpu: the GPU's name.
        device: the torch device of tensors: "cuda:0", or "cpu" for the simulator.
        capability: compute capability of the GPU, real or simulated.
        memory: bytes of the GPU that may be used.
        full: whether to run what takes longer, too.
        kernels: folders with code for the GPU.
        alone: whether the GPU takes one process at a time.
    """

    gpu: str
    device: str
    capability: tuple[int, int]
    memory: int
    full: bool
    kernels: tuple[str, ...]
    alone: bool = False

    @property
    def simulate(self) -> bool:
        """Whether calls run on the simulator."""
        return self.device == "cpu"

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, told: dict[str, Any]) -> Setup:
        return cls(
            told["gpu"], told["device"], (told["capability"][0], told["capability"][1]),
            told["memory"], told["full"], tuple(told["kernels"]), told["alone"],
        )  # fmt: skip

    @property
    def planned_for(self) -> str | int:
        """The GPU as `archflash.explain` takes it: its name if it is simulated, or its index."""
        return self.gpu if self.simulate else torch.device(self.device).index or 0

    def synchronize(self) -> None:
        """Waits for the device, so that an error of a kernel is that of the item that made it."""
        if not self.simulate:
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True)
class Told:
    """What an item that went well says.

    Attributes:
        note: a remark.
        kernels: the kernels that it launched.
        numbers: what it measured, by name.
    """

    note: str = ""
    kernels: tuple[str, ...] = ()
    numbers: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Item:
    """One thing that a job tries.

    Attributes:
        name: what it is about.
        run: tries it. Raises WrongError if a result is wrong.
        limit_s: seconds that it may take.
    """

    name: str
    run: Callable[[Setup], Told]
    limit_s: float = 60


@dataclass(frozen=True)
class Job:
    """What one process tries.

    Attributes:
        part: what it is for, one of PARTS.
        kernel: the folder that it speaks for; "" for none.
        of: the pass of the folder, FORWARD or BACKWARD; "" for none.
        what: what it is about.
        make: lists what it tries.
        find: lists what it tries of these names, where `make` takes long.
    """

    part: str
    kernel: str
    of: str
    what: str
    make: Callable[[], Sequence[Item]]
    find: Callable[[Collection[str]], Sequence[Item]] | None = None

    @cached_property
    def items(self) -> tuple[Item, ...]:
        """What it tries, in this order. Plans are made to find some of it."""
        return tuple(self.make())

    def named(self, names: Collection[str]) -> list[Item]:
        """What it tries of these names."""
        found = self.items if self.find is None else self.find(names)
        return [item for item in found if item.name in names]

    @property
    def name(self) -> str:
        """The job in words, unique."""
        return " ".join(filter(None, (self.part + ":", self.kernel, self.what)))


def kernels_on(capability: tuple[int, int]) -> tuple[str, ...]:
    """The folders of this build with code for GPUs of a compute capability."""
    return tuple(x for x in _registry.kernel_names() if _native.has_code(x, capability))
