"""Gradients of the core set: every kernel of the backward pass, and pairs of features."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch

from archflash import _archflash as native

from . import gradients
from .executors import executor
from .gradients import (
    NAMES,
    FeatureCase,
    assert_every_kernel_is_planned,
    differentiate,
    differentiate_and_check,
    dtypes_with_gradients,
    feature_call,
    kernels_with_gradients,
)

on = executor()
NAN = math.nan
KERNELS = kernels_with_gradients(on)
each_kernel = pytest.mark.parametrize("kernel", KERNELS)

# Head dimensions that take different kernels, the last ones of each less than the kernel's.
HEAD_DIMS = ((32, 32), (64, 64), (40, 24), (128, 128), (192, 128), (256, 256))
NQ, NK = on.pick(simulator=(70, 150), gpu=(333, 517))

inputs = functools.partial(gradients.inputs, on)

DTYPED = [(kernel, dtype) for kernel in KERNELS for dtype in dtypes_with_gradients(on, kernel)]


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize(("kernel", "dtype"), DTYPED)
def test_every_kernel_of_the_backward_pass(kernel: str, dtype: str, dims: tuple[int, int]) -> None:
    """Causal, with two query heads on one of keys; several blocks of either side. Plans for a GPU
    with little shared memory run everywhere: 99 KB, or for simt 64 KB.
    """
    tensors = inputs(NQ, NK, *dims, dtype)
    schedules = (HEAD_DIMS.index(dims), HEAD_DIMS.index(dims) + 1)
    planned_for = {"ampere": "RTX 4090", "simt": "T4"}.get(kernel)
    differentiate_and_check(
        on, kernel, *tensors, schedules=schedules, causal=True, planned_for=planned_for
    )


# The kernels of these head dimensions have tiles of their own for the shared memory of 9.0.
WIDE = ((40, 24), (128, 72), (96, 80), (200, 256), (160, 184), (184, 128))
WIDE_DTYPES = dtypes_with_gradients(on, "ampere") if "ampere" in KERNELS else []
PLANNED_FOR = on.pick(simulator="H200", gpu=None)


def wide_rows(dims: tuple[int, int]) -> tuple[int, int]:
    """Three tiles of keys, of 128 or 64, take turns at two blocks of queries. On a GPU there are
    more, at the same time.
    """
    return on.pick(simulator=(100, 300 if max(dims) <= 128 else 180), gpu=(1150, 2300))


@pytest.mark.parametrize("dims", WIDE, ids=str)
@pytest.mark.parametrize("dtype", WIDE_DTYPES)
def test_kernels_of_large_tiles(dtype: str, dims: tuple[int, int]) -> None:
    tensors = inputs(*wide_rows(dims), *dims, dtype)
    all_of_it = dtype == "bfloat16" or on.pick(simulator=False, gpu=True)  # types share code
    calls: list[tuple[dict[str, Any], tuple[int, ...]]] = [
        ({"causal": True}, (2, 3) if all_of_it else (3,))
    ]
    if all_of_it:
        calls += [({}, (0,)), ({"causal": True, "softcap": 2.0}, (1,))]
    for call, schedules in calls:
        differentiate_and_check(
            on, "ampere", *tensors, schedules=schedules, planned_for=PLANNED_FOR, **call
        )


@pytest.mark.parametrize("device", on.pick(simulator=("A100", "H200"), gpu=(None,)))
@pytest.mark.parametrize("dims", WIDE[:2], ids=str)
@pytest.mark.skipif("simt" not in KERNELS, reason="simt is not built")
def test_large_tiles_of_simt(dims: tuple[int, int], device: str | None) -> None:
    """Those for more than 64 KB of shared memory, on CUDA cores and on tensor cores: three tiles of
    keys take turns at three blocks of queries.
    """
    tensors = inputs(*on.pick(simulator=(130, 150), gpu=wide_rows(dims)), *dims, "float32")
    for call in ({"causal": True}, {"softcap": 2.0}):
        differentiate_and_check(on, "simt", *tensors, schedules=(1,), planned_for=device, **call)


@pytest.mark.parametrize("dims", WIDE, ids=str)
@pytest.mark.parametrize("dtype", WIDE_DTYPES[:1])
def test_gradients_that_need_not_be_deterministic(dtype: str, dims: tuple[int, int]) -> None:
    """CTAs add to dq in any order, and so the bits may differ."""
    tensors = inputs(*wide_rows(dims), *dims, dtype)
    differentiate_and_check(
        on, "ampere", *tensors, schedules=(2, 3), deterministic=False, planned_for=PLANNED_FOR
    )


@pytest.mark.parametrize("dtype", WIDE_DTYPES)
def test_head_dimensions_up_to_160_where_shared_memory_is_small(dtype: str) -> None:
    tensors = inputs(70, 150, 136, 160, dtype)
    for deterministic in (True, False):
        differentiate_and_check(
            on, "ampere", *tensors, schedules=(1,), causal=deterministic, planned_for="RTX 4090",
            deterministic=deterministic,
        )  # fmt: skip


@pytest.mark.parametrize(
    "dims", [(40, 64), (104, 128), (192, 128), (168, 192), (256, 200)], ids=str
)
@pytest.mark.parametrize("dtype", WIDE_DTYPES)
def test_tiles_for_the_shared_memory_of_8_0(dtype: str, dims: tuple[int, int]) -> None:
    tensors = inputs(*wide_rows(dims), *dims, dtype)
    for deterministic in (True, False) if dtype == "bfloat16" else (True,):  # types share code
        differentiate_and_check(
            on, "ampere", *tensors, schedules=(1, 2), causal=deterministic, planned_for="A100",
            deterministic=deterministic,
        )  # fmt: skip


@pytest.mark.parametrize(("d", "device"), [(64, "H200"), (128, "RTX 4090")])
@pytest.mark.skipif("ampere" not in KERNELS, reason="ampere is not built")
def test_tiles_of_a_group_of_heads_follow_one_another(d: int, device: str) -> None:
    """On a GPU of three SMs seven heads are groups of four and three."""
    dout, q, k, v = inputs(150, 200, d, d, "float16", heads=(7, 7))
    differentiate_and_check(
        on, "ampere", dout, q, k, v, schedules=(2,), planned_for=device, sms=3, causal=d == 64
    )


@each_kernel
def test_scores_beyond_what_their_log_sum_exp_can_say_give_finite_gradients(kernel: str) -> None:
    dtype, *_ = dtypes_with_gradients(on, kernel)
    dout, q, k, v = inputs(1, 1, 64, 64, dtype)
    found = differentiate(on, kernel, dout, q.fill_(1.6e4), k.fill_(1.6e4), v)
    assert all(bool(x.isfinite().all()) for x in (found.dq, found.dk, found.dv))


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.skipif("ampere" not in KERNELS, reason="ampere is not built")
def test_keys_behind_the_end_do_not_matter_where_delta_is_huge(d: int) -> None:
    gradients.assert_keys_behind_the_end_do_not_matter(on, "ampere", d)


# A few query heads on one of k, which CTAs share out: name -> (nq, nk, d, dv, batch, heads,
# options), and the GPU that is planned for.
SHARED_OUT: dict[str, tuple[FeatureCase, str]] = {
    "causal-sinks-lse": (
        ((130, 200, 64, 48, 2, (6, 1)), {"causal": True, "sinks": True, "dlse": True}), "H200",
    ),
    "two-heads-of-k-added-in-fp32": (
        (
            (70, 90, 40, 64, 1, (8, 2)),
            {"layout": "bnhd", "gradient_dtype": "float32", "add_to": -2.0, "pad": 4},
        ),
        "RTX 4090",
    ),
    "more-columns-of-k-than-of-v": (
        ((70, 70, 192, 128, 1, (8, 1)), {"causal": True, "add_to": 0.5}), "RTX 4090",
    ),
    "dropout": (((150, 70, 128, 128, 1, (4, 1)), {"dropout_p": 0.3}), "H200"),
    "mask": (((90, 130, 64, 64, 1, (4, 1)), {"attn_mask": True}), "RTX 4090"),
}  # fmt: skip


@pytest.mark.parametrize("name", SHARED_OUT)
@pytest.mark.parametrize(("kernel", "dtype"), [("ampere", "bfloat16"), ("simt", "float32")])
def test_query_heads_that_ctas_share_out(
    name: str, kernel: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel not in KERNELS:
        pytest.skip(f"{kernel} is not built")
    number = list(SHARED_OUT).index(name)
    case, device = SHARED_OUT[name]
    tensors, options = feature_call(on, case, dtype, number)
    if "dropout_p" in options:
        options["rng_state"] = on.tensor([7, 0], dtype=torch.int64)
    if "attn_mask" in options:
        options["attn_mask"] = on.rand(1, case[0][5][0], *case[0][:2], seed=8) > 0.3
    plans = gradients.note_plans(monkeypatch)
    differentiate_and_check(
        on, kernel, *tensors, schedules=(number, number + 1), planned_for=device, **options
    )
    assert all(any("_backward_shares_" in x for x in plan.kernels) for plan in plans)


@pytest.mark.skipif("ampere" not in KERNELS, reason="ampere is not built")
def test_query_heads_of_packed_sequences_that_ctas_share_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q_lengths, k_lengths = (130, 0, 40), (150, 20, 60)
    rows = sum(q_lengths) + 3, sum(k_lengths) + 5
    dout, q, k, v = (x[0].transpose(0, 1) for x in inputs(*rows, 64, 64, "bfloat16", heads=(4, 1)))
    plans = gradients.note_plans(monkeypatch)
    differentiate_and_check(
        on, "ampere", dout, q, k, v, planned_for="H200", causal=True,
        cu_seqlens_q=on.cu_seqlens(q_lengths), cu_seqlens_k=on.cu_seqlens(k_lengths),
    )  # fmt: skip
    assert all("ampere_backward_shares_bf16" in plan.kernels for plan in plans)


@pytest.mark.parametrize(("kernel", "dtype"), DTYPED)
def test_the_calls_above_run_every_compiled_kernel(kernel: str, dtype: str) -> None:
    devices = []
    for name in ("T4", "A100", "H200") if kernel == "simt" else ("RTX 4090", "H200"):
        known = native.find_known_device(name)
        assert known is not None
        devices.append(known.device)
    heads = ((2, 1), (7, 1))  # the second ones are shared out
    dims = (*HEAD_DIMS, *WIDE, (136, 160))
    keys = (4, 128) if kernel == "simt" else (4,)  # on tensor cores it has sums of many keys only
    assert_every_kernel_is_planned(on, kernel, dtype, dims, devices, heads=heads, keys=keys)


# Each row is one launch that meets several features at once, so that every pair of them meets
# somewhere: name -> (nq, nk, d, dv, batch, heads, options).
FEATURES: dict[str, FeatureCase] = {
    "window-softcap-sinks-lse": (
        (45, 83, 64, 64, 1, (4, 2)),
        {"window": (20, 3), "softcap": 1.5, "sinks": True, "dlse": True},
    ),
    "causal-sinks-rows-without-keys": (
        (90, 37, 64, 48, 1, (2, 2)), {"causal": True, "sinks": True, "gradient_dtype": "float32"},
    ),
    "rows-without-keys-lse": ((90, 37, 64, 64, 1, (2, 1)), {"causal": True, "dlse": True}),
    "bnhd-offsets-negative-scale-added": (
        (20, 61, 128, 64, 2, (2, 1)),
        {
            "layout": "bnhd", "q_offset": (3, 50), "causal": True, "scale": -0.2, "add_to": 0.5,
            "pad": 8,
        },
    ),
    "softcap-lse-added-in-fp32": (
        (33, 17, 96, 128, 1, (3, 1)),
        {"softcap": 4.0, "dlse": True, "gradient_dtype": "float32", "add_to": -2.0, "pad": 4},
    ),
    "no-query": ((0, 9, 64, 64, 1, (2, 2)), {"sinks": True}),
    "no-key": ((9, 0, 64, 64, 1, (2, 2)), {"sinks": True, "dlse": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", FEATURES)
@each_kernel
def test_features(kernel: str, name: str) -> None:
    number = list(FEATURES).index(name)
    dtypes = dtypes_with_gradients(on, kernel)
    tensors, options = feature_call(on, FEATURES[name], dtypes[number % len(dtypes)], number)
    differentiate_and_check(on, kernel, *tensors, schedules=(number, number + 1), **options)


Q_LENGTHS, K_LENGTHS = (5, 0, 40, 70), (9, 12, 0, on.pick(simulator=100, gpu=300))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@each_kernel
def test_packed_sequences_with_rows_of_none_behind_them(kernel: str, causal: bool) -> None:
    """Sequences without queries and without keys; rows behind the last one hold NaN."""
    spare = 3
    dtypes = dtypes_with_gradients(on, kernel)
    dtype = dtypes[causal % len(dtypes)]
    totals = (sum(Q_LENGTHS), sum(Q_LENGTHS), sum(K_LENGTHS), sum(K_LENGTHS))
    tensors = []
    for seed, (total, heads) in enumerate(zip(totals, (4, 4, 2, 2), strict=True)):
        rows = on.rand(total, heads, 64, seed=seed, dtype=dtype)
        tensors.append(torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, spare), value=NAN))
    ends = {"cu_seqlens_q": on.cu_seqlens(Q_LENGTHS), "cu_seqlens_k": on.cu_seqlens(K_LENGTHS)}
    found = differentiate(
        on, kernel, *tensors, causal=causal, sinks=on.rand(4, seed=9), schedules=(2, 3), **ends
    )
    whole = [x[: len(x) - spare] for x in tensors]
    expected = differentiate_and_check(
        on, kernel, *whole, causal=causal, sinks=on.rand(4, seed=9), schedules=(0,), **ends
    )
    for name in NAMES:
        x, without = getattr(found, name), getattr(expected, name)
        assert torch.equal(x[: len(without)], without)
        assert not x[len(without) :].any()
    assert found.dsinks is not None
    assert expected.dsinks is not None
    assert torch.equal(found.dsinks, expected.dsinks)


@each_kernel
def test_inputs_that_lie_between_others_in_memory(kernel: str) -> None:
    """q, k, v are parts of one tensor, and dout rows lie apart; their neighbours hold NaN."""
    dtype = dtypes_with_gradients(on, kernel)[-1]
    wide = torch.full((1, 50, 5, 64), NAN, dtype=getattr(torch, dtype), device=on.device)
    for head in range(4):
        wide[:, :, head] = on.rand(1, 50, 64, seed=head, dtype=dtype)
    q, k, v = (wide[:, :, first:end].transpose(1, 2) for first, end in ((0, 2), (2, 3), (3, 4)))
    dout = torch.full((1, 2, 50, 80), NAN, dtype=q.dtype, device=on.device)[..., :64]
    dout.copy_(on.rand(1, 2, 50, 64, seed=8, dtype=dtype))
    differentiate_and_check(on, kernel, dout, q, k, v, causal=True, schedules=(1,))
