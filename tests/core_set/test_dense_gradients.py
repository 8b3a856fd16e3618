"""Gradients of calls with a dense attn_mask by hopper, which prepares the mask before its main
kernel, or has TMA bring the elements of one that is added.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import archflash

from . import gradients
from .executors import executor
from .gradients import differentiate, differentiate_and_check, note_plans
from .test_mask_data import attn_mask_of

on = executor()
NAME = "hopper"
pytestmark = pytest.mark.skipif(NAME not in on.kernels(), reason=f"{NAME} has no code for this GPU")
inputs = functools.partial(gradients.inputs, on)
NQ, NK = 150, 200

# The kind of mask, its heads, the heads of q and k, and the other options.
CALLS: dict[str, tuple[str, int, tuple[int, int], dict[str, Any]]] = {
    "bool": ("bool", 2, (2, 1), {}),
    "padding": ("keys", 1, (2, 1), {}),
    "own": ("own", 1, (2, 1), {"causal": True}),
    "float32": ("float32", 2, (2, 2), {"window": (70, 30)}),
    "odd": ("odd", 1, (2, 1), {"sinks": True}),
}


def mask_of(kind: str, dtype: str, batch: int, heads: int) -> Tensor:
    return attn_mask_of(kind, dtype, batch, heads, NQ, NK)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", CALLS)
def test_gradients_with_a_dense_mask_agree_with_float64(
    name: str, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = list(CALLS).index(name) + dim // 128
    dtype = ("float16", "bfloat16")[number % 2]
    kind, of_mask, heads, options = CALLS[name]
    options = dict(options)
    if "sinks" in options:
        options["sinks"] = on.rand(heads[0], seed=9)
    batch = 2 if kind == "keys" else 1
    tensors = inputs(NQ, NK, dim - 8, dim, dtype, batch=batch, heads=heads)
    mask = mask_of(kind, dtype, batch, of_mask)
    wanted = mask.is_floating_point() and (dim == 128 or (dim, kind) == (256, "float32"))
    plans = note_plans(monkeypatch)
    differentiate_and_check(
        on, NAME, *tensors, schedules=(number % 4, (number + 1) % 4), planned_for="H200",
        deterministic=number % 2 == 0 and dim <= 128, attn_mask=mask, mask_gradient=wanted,
        **options,
    )  # fmt: skip
    (main,) = (kernel for kernel in plans[-1].kernels if "_attention_bwd_" in kernel)
    by_tma = kind == "own" and dim == 64
    gradient = "_kept" if plans[-1].orders_mask_sums else "_bias" if wanted else ""
    assert main.endswith(f"_d{dim}_{'added' if by_tma else 'dense'}" + gradient)


# Calls whose mask heads or sequences share: its batch and heads, the heads of q and k, d, the
# mask's dtype, the other options, and the kernel that keeps the gradient of each score.
SHARED: dict[str, tuple[tuple[int, int], tuple[int, int], int, str, dict[str, Any], str]] = {
    "all": ((1, 1), (3, 3), 64, "float16", {}, "d64_rows_two_masked"),
    "added": ((2, 1), (4, 2), 64, "bfloat16", {}, "d64_added_kept"),
    "heads": ((2, 1), (4, 2), 128, "bfloat16", {"window": (100, 20)}, "d128_dense_kept"),
    "batch": ((1, 2), (2, 2), 128, "float32", {"causal": True}, "d128_dense_kept"),
    "offsets": (
        (1, 1), (2, 1), 64, "float32", {"causal": True, "q_offset": (90, 20)}, "d64_dense_kept"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHARED)
def test_the_gradient_of_a_shared_mask_is_summed_in_order(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No query sees the keys of one block."""
    of_mask, heads, dim, dtype, options, kernel = SHARED[name]
    options = dict(options)
    if "q_offset" in options:
        options["q_offset"] = on.tensor(options["q_offset"], torch.int32)
    inputs_dtype = "bfloat16" if dtype == "float32" else dtype
    tensors = inputs(NQ, NK, dim, dim, inputs_dtype, batch=2, heads=heads)
    mask = on.rand(*of_mask, NQ, NK, seed=8, dtype=dtype)
    mask[..., 64:128, 64:128] = mask[..., 100] = -math.inf
    plans = note_plans(monkeypatch)
    found = differentiate_and_check(
        on, NAME, *tensors, attn_mask=mask, mask_gradient=True, schedules=(0, 3),
        deterministic=True, planned_for="H200", **options,
    )  # fmt: skip
    assert plans[-1].orders_mask_sums
    assert any(x.endswith(kernel) for x in plans[-1].kernels)
    assert found.dmask is not None
    assert not found.dmask[..., 100].any()


# Calls of few query rows: the kind of mask and its heads, (rows, keys, d, dv), the options, whether
# the gradient of the mask is wanted, and the tile that has all rows.
FEW_ROWS: dict[str, tuple[str, int, tuple[int, ...], dict[str, Any], bool, str]] = {
    "bool": ("bool", 3, (100, 140, 64, 64), {}, False, "d64_rows_masked"),
    "padding": ("keys", 1, (200, 180, 64, 56), {}, False, "d64_rows_two_masked"),
    "own": ("own", 1, (128, 130, 48, 64), {"causal": True}, True, "d64_rows_masked"),
    "own-heads": ("own", 3, (210, 150, 24, 32), {}, True, "d64_rows_two_masked"),
    "float32": ("float32", 3, (99, 49, 32, 32), {}, True, "d64_rows_masked"),
    "window": ("own", 3, (49, 49, 32, 32), {}, True, "d32_rows_short_masked"),
    "window-float32": ("float32", 3, (60, 130, 24, 32), {}, True, "d32_rows_short_masked"),
    "short": ("bool", 1, (64, 200, 64, 40), {"causal": True}, False, "d64_rows_short_masked"),
    "odd": ("odd", 1, (90, 77, 64, 64), {"sinks": True}, False, "d64_rows_masked"),
}


@pytest.mark.parametrize("name", FEW_ROWS)
def test_a_cta_with_all_query_rows_of_a_head_reads_the_mask(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One CTA, or several of them that share out the keys. The order of all sums is fixed but
    those of the gradient of the mask.
    """
    number = list(FEW_ROWS).index(name)
    kind, of_mask, (nq, nk, d, dv), options, wanted, tile = FEW_ROWS[name]
    dtype = ("float16", "bfloat16")[number % 2]
    options = dict(options)
    if "sinks" in options:
        options["sinks"] = on.rand(3, seed=9)
    tensors = inputs(nq, nk, d, dv, dtype, batch=2, heads=(3, 3), seed=number)
    mask = attn_mask_of(kind, dtype, 1 if kind == "odd" else 2, of_mask, nq, nk)
    plans = note_plans(monkeypatch)
    for sms in (1, 5 if "short" in tile else 132):
        differentiate_and_check(
            on, NAME, *tensors, sms=sms, schedules=(number, number + 1), deterministic=not wanted,
            attn_mask=mask, mask_gradient=wanted, **options,
        )  # fmt: skip
    assert any(kernel.endswith(tile) for kernel in plans[0].kernels)


@pytest.mark.parametrize("deterministic", [False, True])
def test_ctas_that_stay_take_the_elements_of_each_tile(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every head, or the same for all, whose rows are not aligned and are copied; nobody sees
    the keys of one tile.
    """
    plans = note_plans(monkeypatch)
    for heads, of_mask, batch, step in (((2, 1), 2, 1, 304), ((2, 2), 1, 2, 303)):
        tensors = inputs(260, 300, 64, 56, "float16", batch=batch, heads=heads)
        mask = on.rand(batch, of_mask, 260, step, seed=3, dtype="float16")[..., :300]
        mask[:, :, :, 128:256] = -math.inf
        mask[:, :, 70:80] = -math.inf
        differentiate_and_check(
            on, NAME, *tensors, attn_mask=mask, schedules=(1, 2), deterministic=deterministic,
            planned_for="H200", sms=2, window=(200, 150),
        )  # fmt: skip
        assert any("_d64_added" in kernel for kernel in plans[-1].kernels)
        assert any("_copy_mask_" in kernel for kernel in plans[-1].kernels) == (step == 303)


def test_the_gradient_of_a_bias_is_summed_over_what_it_is_broadcast_along() -> None:
    for dim, nk in ((64, 70), (32, 70), (32, 49)):
        tensors = inputs(40, nk, dim, dim, "bfloat16", batch=3)
        for shape in ((nk,), (3, 1, 1, nk), (1, 2, 40, nk)):
            differentiate_and_check(
                on, NAME, *tensors, attn_mask=on.rand(*shape, seed=4), mask_gradient=True,
                schedules=(0, 1), deterministic=False, sms=1,
            )  # fmt: skip


@pytest.mark.parametrize("dim", [64, 128])
def test_the_gradient_of_a_bias_of_all_rows_is_added_by_atomics(
    dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = note_plans(monkeypatch)
    differentiate_and_check(
        on, NAME, *inputs(40, 70, dim, dim, "bfloat16", heads=(2, 1)), planned_for="H200",
        attn_mask=on.rand(70, seed=4), mask_gradient=True, schedules=(0,), deterministic=False,
    )  # fmt: skip
    assert any(x.endswith(f"_d{dim}_dense_bias") for x in plans[0].kernels)


@pytest.mark.parametrize("dim", [64, 128])
def test_turns_of_rounds_that_not_all_tiles_see(dim: int) -> None:
    """The first of the heads that share a head of K sees nothing of some tiles of keys."""
    tensors = inputs(200, 460, dim, dim, "bfloat16", heads=(4, 2))
    seen = on.rand(1, 4, 4, 8, seed=5) > 0.25
    seen[:, ::2, :, 2:6] = False
    mask = seen.repeat_interleave(64, 2).repeat_interleave(64, 3)[:, :, :200, :460]
    options = {"window": (100, 150)} if dim == 64 else {}
    differentiate_and_check(
        on, NAME, *tensors, planned_for="H200", schedules=range(4), attn_mask=mask, **options
    )


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_rows_that_see_nothing_and_hidden_values_that_are_nan(dim: int) -> None:
    """No query sees the first 64 keys, which hold NaN, nor key 100, whose value does."""
    dout, q, k, v = inputs(NQ, NK, dim, dim, "bfloat16", heads=(2, 1))
    mask = mask_of("bool", "bfloat16", 1, 1)
    mask[..., :64] = mask[..., 100] = mask[:, :, 70:140] = False
    spoiled_k, spoiled_v = k.clone(), v.clone()
    spoiled_k[:, :, :64] = spoiled_v[:, :, :64] = spoiled_v[:, :, 100] = math.nan
    dense: dict[str, Any] = {"attn_mask": mask, "deterministic": False}
    found = differentiate(on, NAME, dout, q, spoiled_k, spoiled_v, schedules=(2,), **dense)
    for name in gradients.NAMES:
        assert getattr(found, name).isfinite().all(), name
    right = differentiate_and_check(on, NAME, dout, q, k, v, schedules=(3,), **dense)
    for gradients_of in (found, right):
        assert not gradients_of.dq[:, :, 70:140].any()
        assert not gradients_of.dk[:, :, :64].any()


def test_rows_of_the_lowest_number() -> None:
    mask = torch.zeros(4, 70, device=on.device)
    mask[0] = -math.inf
    mask[1] = torch.finfo(torch.float32).min
    tensors = inputs(4, 70, 64, 64, "bfloat16")
    found = differentiate(
        on, NAME, *tensors, attn_mask=mask, mask_gradient=True, schedules=[0], deterministic=False
    )
    assert found.dmask is not None
    assert not found.dq[:, :, 0].any()
    assert not found.dmask[0].any()
    assert all(bool(x.isfinite().all()) for x in (found.dq, found.dk, found.dv, found.dmask))


def test_which_gradients_of_dense_masks_it_computes() -> None:
    def why_not(d: int = 128, **call: Any) -> str:
        q = torch.empty(1, 2, 300, d, dtype=torch.bfloat16, device="meta")
        mask = torch.empty(300, 300, dtype=torch.bool, device="meta")
        try:
            archflash.explain(
                q, q, q, device="H200", implementation=NAME, backward=True,
                **{"attn_mask": mask} | call,
            )  # fmt: skip
        except archflash.ForcedImplementationError as error:
            return str(error)
        return ""

    assert why_not() == why_not(64) == why_not(causal=True) == why_not(192) == ""
    assert why_not(attn_mask=torch.empty(300, 1, device="meta")) == ""
    assert why_not(320)
    tensors = inputs(70, 70, 192, 192, "bfloat16")
    mask = torch.ones(70, 70, dtype=torch.bool, device=on.device)
    with pytest.raises(archflash.ForcedImplementationError, match="deterministic=True and head"):
        differentiate(on, NAME, *tensors, attn_mask=mask, deterministic=True)
    assert "attn_mask with a softcap" in (why := why_not(softcap=2.0))
    assert "softcap with gradients of head dimensions above 128" not in why
    table = torch.empty(1, 1, 5, 5, dtype=torch.int8, device="meta")
    assert "attn_mask with block_mask" in why_not(block_mask=table)
