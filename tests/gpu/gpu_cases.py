"""What the GPU tests share: inputs, guarded outputs, the check of a call, pairs of features."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

import archflash
from archflash import _dispatch, reference

DEVICE = "cuda"
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
LENGTHS = (0, 1, 7, 59, 63, 64, 65, 113, 127, 129, 239, 799, 1023, 2048)
NAN = math.nan


def no_gpu() -> str | None:
    """Why these tests cannot run here; None where they can."""
    if problem := _dispatch.driver_problem():
        return problem
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device"
    return None


# --- which kernels ---


def kernels() -> list[str]:
    """The implementations with code for this GPU; without a GPU all, to be skipped."""
    every = [i for i in archflash.implementations() if i.name != "torch"]
    if no_gpu() is not None:
        return [i.name for i in every]
    here = torch.cuda.get_device_capability()
    return [i.name for i in every if serves(i.name, here)]


def serves(kernel: str, capability: tuple[int, int]) -> bool:
    """Whether an implementation has code for GPUs of a compute capability."""
    implementation = next(i for i in archflash.implementations() if i.name == kernel)
    return any(
        _numbers(first) <= capability and (last is None or capability <= _numbers(last))
        for first, last, _ in implementation.capabilities
    )


def _numbers(capability: str) -> tuple[int, int]:
    major, minor = capability.split(".")
    return int(major), int(minor)


def kernel_dtypes(only: Iterable[str] = DTYPES) -> list[tuple[str, str]]:
    """(kernel, dtype) for each dtype of `only` that the kernel takes."""
    served = {i.name: i.dtypes for i in archflash.implementations()}
    return [(name, dtype) for name in kernels() for dtype in only if dtype in served[name]]


# --- inputs ---


def rand(*shape: int, seed: int, dtype: str | torch.dtype = "float32") -> Tensor:
    """Standard normal numbers on the GPU."""
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    kind = DTYPES[dtype] if isinstance(dtype, str) else dtype
    return torch.randn(shape, generator=generator, device=DEVICE).to(kind)


def qkv(
    nq: int,
    nk: int,
    d: int = 64,
    dv: int | None = None,
    *,
    dtype: str = "float32",
    batch: int = 1,
    heads: tuple[int, int] = (2, 2),
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Contiguous q, k, v in the layout bhnd; heads are those of q and of k."""
    return (
        rand(batch, heads[0], nq, d, seed=3 * seed, dtype=dtype),
        rand(batch, heads[1], nk, d, seed=3 * seed + 1, dtype=dtype),
        rand(batch, heads[1], nk, dv or d, seed=3 * seed + 2, dtype=dtype),
    )


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def cu_seqlens(lengths: Sequence[int]) -> Tensor:
    return int32(0, *itertools.accumulate(lengths))


def transposed(x: Tensor) -> Tensor:
    """The same values with rows and heads swapped in memory."""
    return x.transpose(-3, -2).contiguous().transpose(-3, -2)


def inside_nan(x: Tensor) -> Tensor:
    """The same values as a slice of a larger tensor that is NaN everywhere else."""
    around = torch.full(
        (*x.shape[:-3], x.shape[-3] + 2, x.shape[-2] + 9, x.shape[-1] + 16),
        NAN,
        dtype=x.dtype,
        device=x.device,
    )
    view = around[..., 1:-1, 2:-7, 8:-8]
    return view.copy_(x)


def one_head_for_all(x: Tensor, heads_dim: int) -> Tensor:
    """The first head (and the first batch) seen as all of them: strides of 0."""
    first = x.narrow(heads_dim, 0, 1)
    return (first[:1] if x.ndim == 4 else first).expand_as(x)


# --- outputs ---


class Guarded:
    """An output full of NaN with a pattern around it and between its rows: stray writes show."""

    PATTERN = 12288.0  # exact in every dtype
    ZONE = 4096  # elements on either side

    def __init__(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> None:
        empty = 0 in shape
        extent = 0 if empty else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        total = self.ZONE + extent + self.ZONE
        self._buffer = torch.full((total,), self.PATTERN, dtype=dtype, device=DEVICE)
        self.view = self._buffer.as_strided(shape, strides, self.ZONE)
        self.view.fill_(NAN)
        inside = torch.zeros(total, dtype=torch.bool, device=DEVICE)
        inside.as_strided(shape, strides, self.ZONE).fill_(True)
        self._outside = ~inside

    def assert_untouched_outside(self) -> None:
        stray = (self._buffer != self.PATTERN) & self._outside
        assert not stray.any(), (
            f"written outside the output, first at element {int(stray.nonzero()[0]) - self.ZONE} "
            f"counted from its start: {int(stray.sum())} elements"
        )


def dense_strides(shape: Sequence[int], pad: int = 0) -> list[int]:
    """Row-major strides, each row `pad` elements longer than it is."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * max(size, 1) + (pad if len(strides) == 1 else 0))
    return strides


# --- the check of one call ---


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal values, NaN where the other has NaN."""
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def assert_close(
    out: Tensor, lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, **call: Any
) -> None:
    """Output and log-sum-exp agree with float64 by the error rule."""
    expected, expected_lse = reference.attention(q, k, v, **call)
    report = reference.check(out, expected, reference.baseline(q, k, v, **call))
    assert report.ok, report
    if lse is not None:
        lse_report = reference.check_lse(lse, expected_lse)
        assert lse_report.ok, f"log-sum-exp {lse_report}"


def attend_and_check(
    kernel: str, q: Tensor, k: Tensor, v: Tensor, *, out_pad: int = 0, **call: Any
) -> tuple[Tensor, Tensor]:
    """Runs a kernel into a guarded output and checks all that must hold of every call.

    The error rule for output and log-sum-exp, nothing written outside, and the same bits again in
    an output of the library's own.
    """
    shape = (*q.shape[:-1], v.shape[-1])
    guarded = Guarded(shape, dense_strides(shape, out_pad), q.dtype)
    out, lse = archflash.attention(
        q, k, v, implementation=kernel, out=guarded.view, return_lse=True, **call
    )
    assert out is guarded.view
    guarded.assert_untouched_outside()
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()
    assert_close(out, lse, q, k, v, **call)
    again, lse_again = archflash.attention(q, k, v, implementation=kernel, return_lse=True, **call)
    assert same_bits(again, out), "not the same bits the second time"
    assert same_bits(lse_again, lse), "not the same bits of the log-sum-exp the second time"
    return out, lse


# --- pairs of features ---


def all_pairs(factors: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Rows with a value for every factor; any two values of two factors meet in some row.

    Greedy and deterministic: a row starts from the first pair that has not met yet and takes,
    factor by factor, the value that meets most new ones.
    """
    names = list(factors)
    missing = {
        pair: None
        for a, b in itertools.combinations(names, 2)
        for pair in itertools.product(
            [(a, i) for i in range(len(factors[a]))], [(b, i) for i in range(len(factors[b]))]
        )
    }

    def new_pairs(row: dict[str, int], name: str, index: int) -> list[Any]:
        meets = [((other, i), (name, index)) for other, i in row.items() if other != name]
        return [p for x, y in meets for p in ((x, y), (y, x)) if p in missing]

    rows: list[dict[str, Any]] = []
    while missing:
        row = dict(next(iter(missing)))
        for number, name in enumerate(names):
            if name not in row:
                # Ties go to a value that moves from row to row, so that triples vary too.
                count = len(factors[name])
                order = [(i + number + len(rows)) % count for i in range(count)]
                row[name] = max(order, key=lambda i: len(new_pairs(row, name, i)))
        for name in names:
            for pair in new_pairs(row, name, row[name]):
                missing.pop(pair, None)
        rows.append({name: factors[name][row[name]] for name in names})
    return rows
