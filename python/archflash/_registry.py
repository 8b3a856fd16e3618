"""The implementations of this build, as dispatch and people see them.

Every fact about a kernel is stated in its folder: by `describe()` in plan.cpp, and by the line of
CMakeLists.txt that says what it is compiled for. This module knows no folder by name.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import cache

from archflash import _archflash as _native

TORCH = "torch"


@dataclass(frozen=True)
class Implementation:
    """One way to serve a call.

    Attributes:
        name: what `implementation=`, `force()` and the environment variable take.
        description: one sentence.
        capabilities: compute capability ranges, first and last inclusive, with the code that serves
            each: (first, last, code). `None` as last: no upper limit.
        dtypes: input dtypes, as torch spells them.
        head_dims: the head dims served, in words.
        features: what beyond plain attention is served.
        compiled: what this build carries ("sm_80", "compute_75"); empty when the build left the
            kernels out.
    """

    name: str
    description: str
    capabilities: tuple[tuple[str, str | None, str], ...]
    dtypes: tuple[str, ...]
    head_dims: str
    features: tuple[str, ...]
    compiled: tuple[str, ...]

    def __str__(self) -> str:
        ranges = ", ".join(
            f"{first} and newer ({code})" if last is None else f"{first} to {last} ({code})"
            for first, last, code in self.capabilities
        )
        anywhere = "any device" if self.name == TORCH else "nothing in this build"
        rows = [
            f"{self.name}: {self.description}",
            f"  runs on   {ranges or anywhere}",
            f"  dtypes    {', '.join(self.dtypes)}",
            f"  head dim  {self.head_dims}",
            f"  serves    {', '.join(self.features)}",
            f"  compiled  {', '.join(self.compiled) or 'no: left out by ARCHFLASH_ARCHS'}",
        ]
        return "\n".join(rows)


def _text(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


@cache
def kernel_names() -> tuple[str, ...]:
    """The architecture folders of this build. Dispatch asks them in this order where nothing was
    measured: those with the newer instructions first.
    """
    return tuple(_native.folder_names())


@cache
def names() -> tuple[str, ...]:
    """Every name that can be forced."""
    return (*kernel_names(), TORCH)


@cache
def description(name: str) -> _native.Description:
    """What a kernel's folder says of itself."""
    return _native.describe(name)


@cache
def takes(name: str, dtype: str) -> bool:
    """Whether a kernel takes inputs of a dtype, as torch spells it."""
    return dtype in description(name).dtypes


@cache
def splits_keys(name: str) -> bool:
    """Whether a kernel splits the keys of few query rows over the GPU."""
    return "num_splits" in description(name).features


@cache
def uses_tensor_cores(name: str) -> bool:
    """Whether a kernel multiplies on tensor cores. One that does not serves 16-bit inputs only
    where PyTorch's fused kernels do not.
    """
    return bool(description(name).uses_tensor_cores)


@cache
def made_for(name: str, dtype: str, capability: tuple[int, int] | None) -> bool:
    """Whether a kernel's tiles for a dtype suit GPUs of a compute capability as well as any."""
    home = description(name).sixteen_bits_made_for
    return dtype not in ("float16", "bfloat16") or home is None or home == capability


@cache
def uses_own_instructions(name: str, capability: tuple[int, int]) -> bool:
    """Whether a kernel has code for GPUs of a compute capability that runs on no other generation,
    such as sm_100f: it uses instructions that only they have.
    """
    return any(
        target.name[-1] in "af" and target.first <= capability <= target.last
        for target in _native.targets(name)
        if target.last is not None
    )


@cache
def only_forced(name: str, capability: tuple[int, int]) -> bool:
    """Whether a kernel serves a GPU of a compute capability only where it is forced or was measured
    there.
    """
    return capability[0] in description(name).only_forced_on_majors


@cache
def reads_masks_faster(name: str, capability: tuple[int, int] | None) -> bool:
    """Whether a kernel was measured to read a dense attn_mask faster than PyTorch's fused ones on
    GPUs of a compute capability.
    """
    return capability is not None and description(name).masks_faster_on == capability


def drops_faster_than_pytorch(name: str, capability: tuple[int, int], head_dim: int) -> bool:
    """Whether a kernel was measured to be faster with dropout than PyTorch's fused ones."""
    said = description(name)
    return said.dropout_faster_on == capability and head_dim >= said.dropout_head_dim


@cache
def _kernel(name: str) -> Implementation:
    said = description(name)
    targets = _native.targets(name)
    return Implementation(
        name=name,
        description=said.summary,
        capabilities=tuple(
            (_text(t.first), None if t.last is None else _text(t.last), t.name) for t in targets
        ),
        dtypes=tuple(said.dtypes),
        head_dims=said.head_dims,
        features=tuple(said.features),
        compiled=tuple(t.name for t in targets),
    )


def implementations() -> list[Implementation]:
    """The implementations of this build; dispatch asks those that take the dtype in this order.

    Returns:
        A list of `Implementation`; the last is `torch`, which serves every call, on any device.
    """
    import torch

    fallback = Implementation(
        name=TORCH,
        description="PyTorch: its fused attention where that fits, plain operations elsewhere",
        capabilities=(),
        dtypes=tuple(_native.dtypes()),
        head_dims="any",
        features=("everything", "CPU tensors", "attn_mask", "descales", "gradients"),
        compiled=(f"torch {torch.__version__} on {platform.machine()}",),
    )
    return [*(_kernel(name) for name in kernel_names()), fallback]


def compiled_by_driver(name: str, capability: tuple[int, int]) -> bool:
    """Whether the driver has to compile the kernels of a folder for GPUs of a compute capability,
    at their first use.
    """
    code = _native.pick_target([target.name for target in _native.targets(name)], capability)
    return code is not None and code.startswith("compute_")
