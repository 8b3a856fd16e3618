"""The implementations, in the order in which dispatch asks them.

What an implementation can do is said once, by its folder's plan.cpp and by what the build compiled;
this module orders and shows it.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import cache

from archflash import _archflash as _native

# By expected speed where more than one serves a problem and nothing was measured: made for the GPU
# first, then the ones that run everywhere.
ORDER = ("blackwell_dc", "hopper", "blackwell_consumer", "ada", "ampere", "simt")
# For 16-bit inputs ada's tiles are made for 8.9; elsewhere ampere's come before them.
SIXTEEN_BITS_ON = {"ada": (8, 9)}
# Kernels that leave the tensor cores unused: for 16-bit inputs they come after PyTorch's fused
# kernels.
WITHOUT_TENSOR_CORES = frozenset({"simt"})
# Kernels built for GPUs of another generation too, so that they can be run there: on these
# capabilities (major numbers) they serve the calls that force them, and kinds of problems that they
# were measured for (_measured.json).
FORCED_ONLY = {"blackwell_consumer": frozenset({9})}
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


def _capability(number: int) -> str:
    return f"{number // 10}.{number % 10}"


@cache
def kernel_names() -> tuple[str, ...]:
    """The architecture folders of this build, best first."""
    return tuple(sorted(_native.folder_names(), key=ORDER.index))


@cache
def names() -> tuple[str, ...]:
    """Every name that can be forced."""
    return (*kernel_names(), TORCH)


@cache
def takes(name: str, dtype: str) -> bool:
    """Whether a kernel takes inputs of a dtype, as torch spells it."""
    return dtype in _native.describe(name).dtypes


@cache
def splits_keys(name: str) -> bool:
    """Whether a kernel splits the keys of few query rows over the GPU."""
    return "num_splits" in _native.describe(name).features


@cache
def has_code(name: str, capability: tuple[int, int]) -> bool:
    """Whether this build has code of a kernel for GPUs of a compute capability."""
    number = 10 * capability[0] + capability[1]
    return any(target.first <= number <= target.last for target in _native.targets(name))


def only_forced(name: str, capability: tuple[int, int]) -> bool:
    """Whether a kernel serves a GPU of a compute capability only where it is forced or was measured
    there.
    """
    return capability[0] in FORCED_ONLY.get(name, ())


@cache
def _kernel(name: str) -> Implementation:
    description = _native.describe(name)
    targets = _native.targets(name)
    return Implementation(
        name=name,
        description=description.summary,
        capabilities=tuple(
            (
                _capability(t.first),
                None if t.name.startswith("compute_") and t.last > 999 else _capability(t.last),
                t.name,
            )
            for t in targets
        ),
        dtypes=tuple(description.dtypes),
        head_dims=description.head_dims,
        features=tuple(description.features),
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
        dtypes=("float32", "float16", "bfloat16", "float64", "float8_e4m3fn", "float8_e5m2"),
        head_dims="any",
        features=("everything", "CPU tensors", "attn_mask", "descales", "gradients"),
        compiled=(f"torch {torch.__version__} on {platform.machine()}",),
    )
    return [*(_kernel(name) for name in kernel_names()), fallback]
