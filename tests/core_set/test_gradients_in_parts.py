"""Gradients of calls whose workspace is so large that some heads are computed after the others, in
the same workspace. Plans are made for a GPU with one SM, so that small calls have parts.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from archflash import _gradients

from . import gradients
from .executors import executor
from .gradients import FeatureCase, differentiate_and_check, dtypes_with_gradients, feature_call

on = executor()
KERNELS = [name for name in on.kernels() if name in _gradients.FOLDERS]
each_kernel = pytest.mark.parametrize("kernel", KERNELS)

# Each row meets several features: whole sequences in a part, or some heads of one; the last part
# smaller; rows beside the sizes of blocks; every kind of tensor that a part has its share of. The
# calls have enough numbers for the error rule, which compares largest and mean errors.
CASES: dict[str, FeatureCase] = {
    "one-row": ((1, 7, 32, 32, 3, (40, 40)), {"sinks": True, "dlse": True}),
    "few-rows": ((5, 16, 8, 8, 11, (6, 6)), {"causal": True, "gradient_dtype": "float32"}),
    "odd-rows": ((17, 20, 40, 24, 3, (3, 3)), {"window": (9, 2), "softcap": 2.0, "pad": 8}),
    "heads-of-one-sequence": (
        (3, 9, 72, 96, 1, (10, 10)),
        {"sinks": True, "dlse": True, "layout": "bnhd", "window": (8, 3)},
    ),
    "shared-heads": ((3, 9, 128, 128, 1, (16, 8)), {"causal": True, "add_to": 0.5}),
    "offsets": ((7, 30, 48, 48, 5, (2, 2)), {"q_offset": (0, 3, 30, -2, 20), "causal": True}),
    "a-block-and-a-row": ((129, 3, 16, 16, 5, (2, 2)), {"sinks": True}),
}  # fmt: skip


def has_parts(plan_kernels: list[str]) -> bool:
    """Whether a kernel is launched more than once."""
    return len(plan_kernels) > len(set(plan_kernels))


def needs_no_parts(plan_kernels: list[str]) -> bool:
    """Whether a plan has no sums of dq, which would be larger than the inputs."""
    return any(name.endswith("_one") for name in plan_kernels)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The kernels of each plan that is made for gradients."""
    plans: list[list[str]] = []
    plan_of = gradients._plan

    def noted(*args: Any) -> Any:
        plan = plan_of(*args)
        plans.append(plan.kernels)
        return plan

    monkeypatch.setattr(gradients, "_plan", noted)
    return plans


@pytest.mark.parametrize("name", CASES)
@each_kernel
def test_parts_have_the_gradients_of_the_whole_call(
    kernel: str, name: str, planned: list[list[str]]
) -> None:
    number = list(CASES).index(name)
    deterministic = (number + KERNELS.index(kernel)) % 2 == 0  # of each kernel half of the calls
    dtypes = dtypes_with_gradients(on, kernel)
    tensors, options = feature_call(on, CASES[name], dtypes[number % len(dtypes)], number)
    if kernel == "blackwell_dc" and max(CASES[name][0][2:4]) > 128:
        pytest.skip("its backward pass takes head dimensions up to 128")
    differentiate_and_check(
        on, kernel, *tensors, schedules=(number,), sms=1, deterministic=deterministic, **options
    )
    assert planned
    assert all(has_parts(kernels) or needs_no_parts(kernels) for kernels in planned)


LENGTHS_Q, LENGTHS_K = (5, 0, 16, 1, 30), (9, 12, 0, 1, 20)


@each_kernel
def test_packed_sequences_in_parts_of_some_heads(kernel: str, planned: list[list[str]]) -> None:
    dtype = dtypes_with_gradients(on, kernel)[-1]
    rows = (sum(LENGTHS_Q), sum(LENGTHS_Q), sum(LENGTHS_K), sum(LENGTHS_K))
    tensors = [
        on.rand(total, heads, 40, seed=seed, dtype=dtype)
        for seed, (total, heads) in enumerate(zip(rows, (6, 6, 3, 3), strict=True))
    ]
    ends: dict[str, Any] = {
        "cu_seqlens_q": on.cu_seqlens(LENGTHS_Q),
        "cu_seqlens_k": on.cu_seqlens(LENGTHS_K),
    }
    differentiate_and_check(
        on, kernel, *tensors, schedules=(1, 2), sms=1, causal=True, sinks=on.rand(6, seed=9), **ends
    )
    assert all(has_parts(kernels) for kernels in planned)


def dropped(on_device: str) -> dict[str, Any]:
    state = torch.tensor([7, 0], dtype=torch.int64, device=on_device)
    return {"dropout_p": 0.3, "rng_state": state}


@pytest.mark.parametrize("kernel", [name for name in KERNELS if name in ("ampere", "simt")])
def test_masks_of_parts(kernel: str, planned: list[list[str]]) -> None:
    """A mask of each sequence and head, slopes, the gradient of the mask, and dropout: what is
    dropped depends on the number of the head among all of the call. Rows of 10 columns are copied,
    one part after the other.
    """
    dtype = dtypes_with_gradients(on, kernel)[-1]
    batch, heads, nq, nk = 4, 4, 9, 24
    tensors = gradients.inputs(on, nq, nk, 10, 10, dtype, batch=batch, heads=(heads, 2))
    call: dict[str, Any] = {
        "attn_mask": on.rand(batch, heads, nq, nk, seed=3, dtype=dtype),
        "alibi_slopes": on.rand(batch, heads, seed=4).abs(),
        **dropped(on.device),
    }
    differentiate_and_check(on, kernel, *tensors, schedules=(1,), sms=1, mask_gradient=True, **call)
    assert all(has_parts(kernels) for kernels in planned)


@pytest.mark.parametrize("kernel", [name for name in KERNELS if name in ("ampere", "hopper")])
@pytest.mark.parametrize(("batch", "heads"), [(5, 2), (1, 10)])
def test_dropout_of_parts(kernel: str, batch: int, heads: int, planned: list[list[str]]) -> None:
    dtype = dtypes_with_gradients(on, kernel)[0]
    tensors = gradients.inputs(on, 129, 20, 16, 16, dtype, batch=batch, heads=(heads, heads))
    differentiate_and_check(on, kernel, *tensors, schedules=(1,), sms=1, **dropped(on.device))
    assert all(has_parts(kernels) for kernels in planned)
