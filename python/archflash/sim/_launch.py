"""Running any PTX on the simulator: programs, buffers, launches."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from archflash import _api
from archflash import _archflash as _runtime
from archflash import _archflash_sim as _native
from archflash._errors import LaunchError
from archflash.sim._report import Report, SimulationError, make_report

MODES = ("lazy", "eager", "random", "priority", "shuffled")
MAX_INSTRUCTIONS = 1 << 32
SHARED_LIMIT = 227 * 1024


@dataclass(frozen=True)
class Program:
    """A loaded PTX module. The simulator knows every instruction of every kernel in it.

    Attributes:
        kernels: the names of its kernels.
        target: the target it was compiled for, such as "sm_80".
    """

    module: _native.Module
    kernels: tuple[str, ...]
    target: str
    _instructions: dict[str, list[dict[str, Any]]] = field(default_factory=dict, repr=False)

    def instructions(self, kernel: str) -> list[dict[str, Any]]:
        """The instructions of a kernel in order: each with its line, opcode, statement, source,
        class and calls, as in `Report.listing`.
        """
        if kernel not in self._instructions:
            self._instructions[kernel] = self.module.instructions(kernel)
        return self._instructions[kernel]


def load(text: str) -> Program:
    """Loads PTX.

    Args:
        text: a whole PTX module, as nvcc writes it.

    Raises:
        LaunchError: the text is malformed, or has an instruction or modifier that the simulator
            does not know; the message names the line.

    Example:
        >>> from archflash import sim
        >>> header = ".version 8.0 .target sm_80 .address_size 64 "
        >>> sim.load(header + ".entry nothing() { ret; }").kernels
        ('nothing',)
    """
    return _as_program(_native.load(text))


def load_when_asked(text: str) -> Program:
    """As `load`, for PTX that is known to load: each kernel is read when it is first launched."""
    return _as_program(_native.load(text, when_asked=True))


def _as_program(module: _native.Module) -> Program:
    return Program(module, tuple(module.kernels), module.target)


@dataclass(frozen=True)
class Buffer:
    """A tensor on the CPU as a kernel's argument.

    Attributes:
        tensor: any dtype and strides. Memory between its elements is out of bounds.
        writable: whether the kernel may write it.
        initialised: whether its bytes count as written; reading a byte that was never written is an
            error.
        name: for reports.
    """

    tensor: Tensor
    writable: bool = True
    initialised: bool = True
    name: str = "buffer"


_MAP_ALIGN = 64
SWIZZLES = (0, 32, 64, 128)
_MAP_TYPES = {
    torch.uint8: "u8",
    torch.int8: "u8",
    torch.float8_e4m3fn: "u8",
    torch.float8_e5m2: "u8",
    torch.int16: "u16",
    torch.int32: "s32",
    torch.int64: "s64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.float64: "f64",
}


@dataclass(frozen=True)
class TensorMap:
    """A tensor map as a kernel's argument: 128 bytes, 64-byte aligned, that TMA instructions read.

    Attributes:
        tensor: on the CPU; its last dimension is the map's first and contiguous.
        box: elements that one copy moves, in the map's order (the contiguous dimension first).
        swizzle: 0, 32, 64 or 128 bytes.
        nan_fill: elements out of bounds are NaN instead of zero (16-bit floating point only).
        element_steps: along each dimension, in the map's order, the step from one element that is
            moved to the next; () for 1.
        writable, initialised, name: as for a `Buffer`.
        dims: the map's sizes in elements, the contiguous one first; () for those of the tensor.
        type: type of the elements, "u8", "f16" and so on; "" for that of the tensor.
    """

    tensor: Tensor
    box: Sequence[int]
    swizzle: int = 0
    nan_fill: bool = False
    element_steps: Sequence[int] = ()
    writable: bool = True
    initialised: bool = True
    name: str = "tensor map"
    dims: Sequence[int] = ()
    type: str = ""

    @property
    def buffer(self) -> Buffer:
        """The tensor as a buffer."""
        return Buffer(self.tensor, self.writable, self.initialised, self.name)

    def encode(self, address: int) -> bytes:
        """The map of the tensor at a simulated address.

        Raises:
            LaunchError: the driver would refuse the map.
        """
        if self.swizzle not in SWIZZLES:
            raise LaunchError(f"a tensor map: a swizzle of {self.swizzle} bytes: 0, 32, 64 or 128")
        if self.tensor.stride(-1) != 1:
            raise LaunchError("a tensor map: the last dimension is not contiguous")
        size = self.tensor.element_size()
        return _native.encode_tensor_map(
            address, self.type or _MAP_TYPES[self.tensor.dtype],
            list(self.dims or reversed(self.tensor.shape)),
            [step * size for step in reversed(self.tensor.stride()[:-1])], list(self.box),
            list(self.element_steps or [1] * len(self.box)), SWIZZLES.index(self.swizzle),
            self.nan_fill,
        )  # fmt: skip


class Bindings:
    """Tensors registered with a simulator's memory; addresses by name.

    Tensors that overlap in memory become one buffer, so that they overlap in the simulator too.
    """

    def __init__(self, memory: _native.Memory, buffers: Sequence[Buffer]) -> None:
        self.addresses: list[int] = [0] * len(buffers)
        extents = []
        for index, buffer in enumerate(buffers):
            if buffer.tensor.device.type != "cpu":
                raise LaunchError(f"{buffer.name} is on {buffer.tensor.device}: not on the CPU")
            check_memory(buffer)
            begin = buffer.tensor.data_ptr()
            extents.append((begin, begin + extent_bytes(buffer.tensor), index))
        extents.sort()
        group: list[int] = []
        end = 0
        for begin, stop, index in extents:
            if group and begin >= end:
                self._add(memory, buffers, group, end)
                group = []
            end = max(end, stop) if group else stop
            group.append(index)
        if group:
            self._add(memory, buffers, group, end)

    def _add(
        self, memory: _native.Memory, buffers: Sequence[Buffer], group: list[int], end: int
    ) -> None:
        members = [buffers[index] for index in group]
        begin = min(member.tensor.data_ptr() for member in members)
        name = "/".join(member.name for member in members)
        writable = any(member.writable for member in members)
        whole = len(members) == 1 and extent_bytes(members[0].tensor) == (
            members[0].tensor.numel() * members[0].tensor.element_size()
        )
        base = memory.add(name, begin, end - begin, writable, not whole or members[0].initialised)
        if not whole:
            memory.forbid(base)
            # Bytes that one tensor initialises stay initialised, whatever an overlapping one says.
            for member in sorted(members, key=lambda m: m.initialised):
                starts, length = row_starts(member.tensor)
                offset = member.tensor.data_ptr() - begin
                memory.allow(base, [start + offset for start in starts], length, member.initialised)
        for index in group:
            self.addresses[index] = base + buffers[index].tensor.data_ptr() - begin


def check_memory(buffer: Buffer) -> None:
    """Refuses a tensor whose memory does not hold its values or ends before the tensor does."""
    tensor = buffer.tensor
    if tensor.is_neg() or tensor._is_zerotensor():
        raise LaunchError(f"{buffer.name}{_runtime.IS_LAZY}pass a clone() of it")
    extent = extent_bytes(tensor)
    if extent and not _has_address(tensor):
        raise LaunchError(f"{buffer.name} is a tensor without memory of its own: pass a plain one")
    end = tensor.storage_offset() * tensor.element_size() + extent
    held = tensor.untyped_storage().nbytes()
    if extent and end > held:
        raise LaunchError(
            f"{buffer.name} reaches byte {end} of a storage of {held} bytes: the storage was made "
            "smaller after the tensor; make it large enough again or pass another tensor"
        )


def _has_address(tensor: Tensor) -> bool:
    try:
        return tensor.data_ptr() != 0
    except RuntimeError:  # a fake tensor, or one inside a transform
        return False


def extent_bytes(tensor: Tensor) -> int:
    """The bytes from a tensor's first byte to its last one."""
    if tensor.numel() == 0:
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * step for size, step in steps)) * tensor.element_size()


def row_starts(tensor: Tensor) -> tuple[list[int], int]:
    """A tensor's bytes as pieces of equal length: the start of each piece, and the length."""
    if tensor.numel() == 0:
        return [], 0
    size = tensor.element_size()
    dims = sorted(
        (step, count) for count, step in zip(tensor.shape, tensor.stride(), strict=True) if step
    )
    length = 1
    while dims and dims[0][0] == length:
        length *= dims.pop(0)[1]
    starts = torch.zeros(1, dtype=torch.int64, device="cpu")
    for step, count in dims:
        if count > 1:
            starts = (starts[:, None] + torch.arange(count, device="cpu") * step).flatten()
    return (starts * size).tolist(), length * size


def launch(
    program: Program,
    kernel: str,
    arguments: Sequence[Tensor | Buffer | TensorMap | int | float | bytes],
    *,
    grid: Sequence[int] = (1, 1, 1),
    block: Sequence[int] = (32, 1, 1),
    cluster: Sequence[int] = (1, 1, 1),
    shared_bytes: int = 0,
    mode: str = "random",
    seed: int = 0,
    race_check: bool = True,
    threads: int = 0,
    max_instructions: int = MAX_INSTRUCTIONS,
    shared_limit: int = SHARED_LIMIT,
    traced_ctas: int | Sequence[int] = 0,
    stretch: int = 0,
    resident_ctas: int = 0,
    starts_early: bool = False,
    device: str | None = None,
    strict: bool = False,
    check: bool = True,
) -> Report:
    """Runs a kernel to its end.

    Args:
        program: from `load`.
        kernel: the name of one of its kernels.
        arguments: one for each parameter: a tensor on the CPU (or a `Buffer`) for a pointer, an int
            for a 32-bit integer, a float for an .f32, a `TensorMap`, bytes for anything else, laid
            out as the parameters are.
        grid: CTAs along x, y, z.
        block: threads along x, y, z.
        cluster: CTAs of a cluster along x, y, z.
        shared_bytes: dynamic shared memory.
        mode: "lazy" (asynchronous copies land when they are waited for), "eager" (at once),
            "random", "priority" (random priorities of warps that change at random points), or
            "shuffled" (as "random", and products of tcgen05 run in any order that the ISA allows).
        seed: 64 bits; the same seed gives the same run.
        race_check: whether to look for data races.
        threads: host threads; 0 for one per core. The report does not depend on it.
        max_instructions: warp-instructions that a CTA may run before it counts as an endless loop.
        shared_limit: shared memory that a CTA may have, in bytes.
        traced_ctas: CTAs that record what they do in `Report.traces`: a number, for the first CTAs
            of the grid, or their indices (x fastest).
        stretch: the most instructions that a warp runs before another warp gets its turn; 0: as the
            mode says.
        resident_ctas: how many CTAs the GPU has room for at a time; 0: any number. It counts for
            kernels with clusterlaunchcontrol, whose clusters take the work of those that have not
            started, and for those whose CTAs run interleaved (docs/simulator.md).
        starts_early: whether it is launched so that it may start while the launch before it still
            runs (programmatic dependent launch). That launch may use any byte: before
            griddepcontrol.wait an access to global memory is an error.
        device: the GPU whose tensor cores add up, a name from the table of known GPUs; default one
            of the capability that is the PTX's target.
        strict: whether missing waits and fences around tensor memory, ldmatrix and stmatrix, and
            before bulk loads, too small scopes in a cluster, and tensor memory whose permit is kept
            are errors, as they are in this library's kernels, although compilers leave them out,
            mostly without harm on a card (kinds "tcgen05-fence", "tcgen05-wait", "lane-order",
            "lane-release", "proxy-read", "scope" and "tmem-permit").
        check: whether errors raise `SimulationError`.

    Returns:
        A `Report`. Tensors have been written in place.

    Raises:
        SimulationError: the kernel did something wrong and `check` is set.
        LaunchError: no such kernel, parameters of the wrong size, a block or grid beyond the
            limits, a device below the PTX's target.
        ValueError: an unknown mode or device; a CTA to trace that the grid does not have.
        KeyboardInterrupt: Ctrl-C; tensors hold what had been written by then.
    """
    memory = _native.Memory()
    buffers = [
        argument.buffer
        if isinstance(argument, TensorMap)
        else argument
        if isinstance(argument, Buffer)
        else Buffer(argument, name=f"argument {index}")
        for index, argument in enumerate(arguments)
        if isinstance(argument, (Tensor, Buffer, TensorMap))
    ]
    addresses = iter(Bindings(memory, buffers).addresses)
    parameters = b""
    for argument in arguments:
        if isinstance(argument, (Tensor, Buffer)):
            piece = struct.pack("<Q", next(addresses))
        elif isinstance(argument, TensorMap):
            piece = argument.encode(next(addresses))
        elif isinstance(argument, bytes):
            piece = argument
        elif isinstance(argument, float):
            piece = struct.pack("<f", argument)
        else:
            piece = struct.pack("<i" if argument < 0 else "<I", argument)
        align = len(piece) if not isinstance(argument, (bytes, TensorMap)) else 1
        align = _MAP_ALIGN if isinstance(argument, TensorMap) else align
        parameters += b"\0" * (-len(parameters) % align) + piece
    report = run_kernel(
        program, kernel, parameters, memory, grid=grid, block=block, cluster=cluster,
        shared_bytes=shared_bytes, mode=mode, seed=seed, race_check=race_check, threads=threads,
        max_instructions=max_instructions, shared_limit=shared_limit, traced_ctas=traced_ctas,
        stretch=stretch, resident_ctas=resident_ctas, starts_early=starts_early,
        capability=None if device is None else _api.find_device(device).capability, strict=strict,
    )  # fmt: skip
    if check and report.errors:
        raise SimulationError(report)
    return report


def run_kernel(
    program: Program,
    kernel: str,
    parameters: bytes,
    memory: _native.Memory,
    *,
    grid: Sequence[int],
    block: Sequence[int],
    cluster: Sequence[int] = (1, 1, 1),
    shared_bytes: int,
    mode: str,
    seed: int,
    race_check: bool,
    threads: int,
    max_instructions: int = MAX_INSTRUCTIONS,
    shared_limit: int = SHARED_LIMIT,
    traced_ctas: int | Sequence[int] = 0,
    stretch: int = 0,
    resident_ctas: int = 0,
    starts_early: bool = False,
    next_starts_early: bool = False,
    capability: tuple[int, int] | None = None,
    strict: bool = False,
) -> Report:
    """Runs a kernel on parameter bytes whose addresses are those of `memory`.

    With `starts_early` it may start while the launch before it in this memory still runs, which was
    run with `next_starts_early`.
    """
    major, minor = capability or (0, 0)
    result = program.module.run(
        kernel, _three(grid), _three(cluster), _three(block), shared_bytes, parameters, memory,
        mode, seed % (1 << 64), race_check, threads, max_instructions, 10 * major + minor,
        shared_limit, _indices(traced_ctas, grid), stretch, resident_ctas, starts_early,
        next_starts_early,
    )  # fmt: skip
    return make_report(kernel, partial(program.instructions, kernel), result, strict=strict)


def _indices(traced_ctas: int | Sequence[int], grid: Sequence[int]) -> list[int]:
    count = math.prod(grid)
    if isinstance(traced_ctas, int):
        return list(range(min(traced_ctas, count)))
    for index in traced_ctas:
        if not 0 <= index < count:
            raise ValueError(f"traced_ctas: there is no CTA {index} in a grid of {count}")
    return list(traced_ctas)


def _three(sizes: Sequence[int]) -> list[int]:
    return [*sizes, 1, 1, 1][:3]
