"""A scale of 0 or less: hidden keys stay hidden, because a mask is a choice and no number that the
scale multiplies.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import archflash
from archflash import _gradients

from .executors import executor
from .gradients import differentiate_and_check, inputs

on = executor()
SCALES = [0.0, -0.125, -0.3]
NQ, NK = on.pick(simulator=(33, 70), gpu=(200, 333))
CALLS = ("plain", "causal", "window", "bool mask", "added mask", "key_ranges")


def dtype_of(kernel: str) -> str:
    dtypes = on.dtypes_of(kernel)
    return "float32" if "float32" in dtypes else dtypes[-1]


def options_of(name: str, q: Tensor) -> dict[str, Any]:
    seen = on.rand(NQ, NK, seed=7) > 0
    added = torch.where(seen, 0.5, -torch.inf).to(q.dtype)
    ranges = on.int32(3, 40, 41, 60).reshape(1, 1, 1, 2, 2)
    calls: dict[str, dict[str, Any]] = {
        "plain": {},
        "causal": {"causal": True},
        "window": {"window": (5, 3)},
        "bool mask": {"attn_mask": seen},
        "added mask": {"attn_mask": added},
        "key_ranges": {"key_ranges": ranges},
    }
    return calls[name]


def serves(kernel: str, options: dict[str, Any], q: Tensor, k: Tensor, backward: bool) -> bool:
    try:
        archflash.explain(q, k, k, **options, implementation=kernel, backward=backward)
    except archflash.ForcedImplementationError:
        return False
    return True


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kernel", on.kernels())
def test_outputs(kernel: str, name: str) -> None:
    q, k, v = on.qkv(NQ, NK, dtype=dtype_of(kernel))
    options = options_of(name, q)
    if not serves(kernel, options, q, k, backward=False):
        pytest.skip(f"{kernel} serves no such call")
    for scale in SCALES:
        on.attend_and_check(kernel, q, k, v, scale=scale, schedules=(0,), **options)


@pytest.mark.parametrize("kernel", on.kernels("num_splits"))
def test_few_rows_whose_keys_are_split(kernel: str) -> None:
    q, k, v = on.qkv(3, 300, dtype=dtype_of(kernel))
    for scale in SCALES:
        on.attend_and_check(kernel, q, k, v, scale=scale, causal=True, num_splits=2, schedules=(0,))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kernel", [name for name in on.kernels() if name in _gradients.FOLDERS])
def test_gradients(kernel: str, name: str) -> None:
    dout, q, k, v = inputs(on, NQ, NK, 64, 64, dtype_of(kernel))
    options = options_of(name, q)
    if not serves(kernel, options, q, k, backward=True):
        pytest.skip(f"{kernel} computes no gradients of such a call")
    for scale in SCALES:
        differentiate_and_check(
            on, kernel, dout, q, k, v, scale=scale, schedules=(0,),
            deterministic="attn_mask" not in options, **options,
        )  # fmt: skip
