"""Gradients of rows that see the lowest numbers only, as transformers makes them of padding: each
key of such a row weighs the same.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import archflash
from archflash import reference

from .executors import executor
from .gradients import NAMES, dtypes_with_gradients, inputs, kernels_with_gradients

on = executor()
pytestmark = pytest.mark.filterwarnings("ignore:archflash. tensors are on the CPU")
NQ, NK = 70, 96
KEYS_OF_SHARES = 260  # more than one block of each kernel that splits keys
# Whether the mask is of float32 and of each head, the heads of q and k, the head dimension. By
# these hopper reads elements by TMA or prepares them, or its CTAs have all rows.
CALLS: dict[str, tuple[bool, bool, tuple[int, int], int, dict[str, Any]]] = {
    "own": (False, False, (2, 2), 64, {}),
    "float32": (True, True, (2, 2), 64, {"causal": True}),
    "own-shared": (False, True, (2, 1), 64, {"causal": True}),
    "float32-shared": (True, False, (2, 1), 64, {}),
    "own-128": (False, False, (2, 2), 128, {}),
    "shares": (False, False, (1, 1), 64, {"num_splits": 2}),
}


def kernels() -> list[tuple[str, str]]:
    names = kernels_with_gradients(on) + [name for name in ("hopper",) if name in on.kernels()]
    return [(name, dtype) for name in names for dtype in dtypes_with_gradients(on, name)]


@pytest.mark.parametrize(("kernel", "dtype"), kernels())
@pytest.mark.parametrize("name", CALLS)
def test_each_key_of_a_row_of_the_lowest_numbers_weighs_the_same(
    kernel: str, dtype: str, name: str
) -> None:
    is_f32, of_heads, heads, dim, options = CALLS[name]
    if kernel == "simt" and "num_splits" in options:
        pytest.skip("simt does not split keys")
    nk = KEYS_OF_SHARES if "num_splits" in options else NK
    dout, q, k, v = inputs(on, NQ, nk, dim, dim, dtype, heads=heads)
    kind = torch.float32 if is_f32 else q.dtype
    mask = on.rand(1, heads[0] if of_heads else 1, NQ, nk, seed=7).to(kind)
    lowest = torch.finfo(kind).min
    mask[:, :, 5:9] = lowest
    mask[:, :, 6, ::3] = -math.inf
    mask[:, :, 8, 1:] = -math.inf  # it sees one key
    mask[:, :, 10, :50] = lowest  # it sees others, too
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = archflash.attention(*leaves, attn_mask=mask, implementation=kernel, **options)
    found = torch.autograd.grad(out, leaves, dout)
    call = {"attn_mask": mask, "causal": options.get("causal", False)}
    q, k, v = (x.detach() for x in leaves)
    exact = reference.attention_backward(dout, q, k, v, **call)
    rounded = reference.baseline_backward(dout, q, k, v, **call)
    for gradient, of in zip(found, NAMES, strict=True):
        report = reference.check(gradient, getattr(exact, of), getattr(rounded, of).double())
        assert report.ok, f"{of}: {report}"
