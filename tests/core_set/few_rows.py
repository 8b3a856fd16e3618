"""The kernels for few query rows, which can split the keys of a tile and pack heads into it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import archflash
from archflash import _archflash as native

from .executors import executor

on = executor()


@dataclass(frozen=True)
class FewRows:
    """The kernels of one implementation.

    Attributes:
        rows: of a tile.
        kernels: the end of each one's name, its head dimensions (d, dv) and the keys of a block.
        only_if_it_pays: those that serve a call only if its keys are split or its heads packed;
            other calls of few rows go to the kernels for many rows.
        by_tensor_map: whether Q comes by a tensor map, which cannot repeat a head.
        decoding: those of `kernels` that have tiles of DECODING_ROWS rows and serve every call
            whose rows that share a head of K fit one; the others then serve the calls of more rows.
    """

    rows: int
    kernels: dict[str, tuple[tuple[int, int], int]]
    only_if_it_pays: tuple[str, ...] = ()
    by_tensor_map: bool = True
    decoding: tuple[str, ...] = ()


D64_FEW = {"d64_few": ((64, 64), 128)}
D96_FEW = {"d96_few": ((96, 96), 64)}
D128_FEW = {"d128_few": ((128, 128), 64)}
WIDE_FEW = {"d192_few": ((192, 128), 32), "d256_few": ((256, 256), 32)}
FEW_ROWS = {
    "ada": FewRows(
        64,
        {"d64_few": ((64, 64), 64), **D96_FEW, "d128": ((128, 128), 64), **WIDE_FEW},
        only_if_it_pays=("d96_few", "d192_few", "d256_few"),
        by_tensor_map=False,
    ),
    "ampere": FewRows(
        64,
        {
            **(D64_FEW | D96_FEW | D128_FEW | WIDE_FEW),
            "d64_decode_plain": ((64, 64), 128),
            "d128_decode_plain": ((128, 128), 64),
            "d256_decode_plain": ((256, 256), 32),
        },
        only_if_it_pays=("d64_few", "d96_few", "d192_few", "d256_few"),
        by_tensor_map=False,
        decoding=("d64_decode_plain", "d128_decode_plain", "d256_decode_plain"),
    ),
    "blackwell_consumer": FewRows(
        64, D64_FEW | D96_FEW | D128_FEW | WIDE_FEW, only_if_it_pays=("d64_few",)
    ),
    "blackwell_dc": FewRows(
        128,
        {
            **D64_FEW,
            "d96_few": ((96, 96), 128),
            "d128_few": ((128, 128), 128),
            "d192_few": ((192, 128), 128),
            "d256": ((256, 256), 64),
        },
    ),
    "hopper": FewRows(
        64,
        {
            **(D64_FEW | D96_FEW | D128_FEW),
            "d192_few": ((192, 128), 64),
            "d256_few": ((256, 256), 64),
        },
    ),
}
if on.name == "gpu" and torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
    # With 227 KB of shared memory two CTAs of blackwell_consumer's larger tile share an SM at 256.
    FEW_ROWS["blackwell_consumer"] = replace(
        FEW_ROWS["blackwell_consumer"], only_if_it_pays=("d64_few", "d256_few")
    )
# Those with code for this executor, and each with its kernels.
NAMES = [name for name in FEW_ROWS if name in on.kernels("num_splits")]
KERNELS = [(name, kernel) for name in NAMES for kernel in FEW_ROWS[name].kernels]


def of_head_dim(name: str, d: int) -> str:
    """The kernel of an implementation for this head dimension, and for the fewest rows."""
    kernels = FEW_ROWS[name].kernels
    return next(k for k in reversed(kernels) if kernels[k][0][0] == d)


DECODING_ROWS = 16


def rows_for(name: str, kernel: str, rows: int, group: int = 1) -> int:
    """The number of rows nearest to `rows` that goes to a kernel, where `group` heads share one of
    K.
    """
    most = DECODING_ROWS >> (group - 1).bit_length()
    if kernel in FEW_ROWS[name].decoding:
        return min(rows, most)
    return max(rows, most + 1) if FEW_ROWS[name].decoding else rows


def kernel_for(name: str, kernel: str, rows: int, group: int) -> str:
    """The kernel that serves a call of so many rows in the place of `kernel`, which serves calls of
    more rows.
    """
    decoding, ((d, _), _) = FEW_ROWS[name].decoding, FEW_ROWS[name].kernels[kernel]
    if not decoding or rows << (group - 1).bit_length() > DECODING_ROWS:
        return kernel
    return next(k for k in decoding if FEW_ROWS[name].kernels[k][0][0] >= d)


def of_shares(name: str, kernel: str, splits: int) -> str:
    """The kernel in the place of `kernel` where keys are split. On GPUs of 9.0 up to eight shares
    of decoding kernels are a cluster.
    """
    on_9 = on.name == "gpu" and torch.cuda.get_device_capability()[0] == 9
    joins = on_9 and kernel in FEW_ROWS[name].decoding and 1 < splits <= 8
    return kernel.replace("_plain", "_joined") if joins else kernel


def launched(name: str, kernel: str, word: str, splits: int) -> list[str]:
    """The kernels of a call whose keys are split."""
    first = of_shares(name, kernel, splits)
    end = "_decode" if kernel in FEW_ROWS[name].decoding else ""
    second = [f"{name}_combine_{word}{end}"] if first == kernel else []
    return [f"{name}_attention_fwd_{word}_{first}", *second]


def plan_of(name: str, q: Tensor, k: Tensor, v: Tensor, **call: Any) -> native.LaunchPlan:
    """The plan of a call for this GPU, or for the implementation's home GPU."""
    plan = archflash.explain(q, k, v, implementation=name, return_lse=True, **call).plan
    assert plan is not None
    return plan


def tile_of(name: str, q: Tensor, k: Tensor, v: Tensor, **call: Any) -> native.TileChoice:
    tile = plan_of(name, q, k, v, **call).tile
    assert tile is not None
    return tile


def kernels_of(plan: native.LaunchPlan) -> list[str]:
    return [launch["kernel"] for launch in plan.to_dict()["launches"]]
