"""What a row sees: rows that see no key, sinks, offsets as far as they go, scores of any size."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from .executors import DTYPES, executor

on = executor()
each_kernel_and_dtype = pytest.mark.parametrize(("kernel", "dtype"), on.kernels_and_dtypes())


@each_kernel_and_dtype
@pytest.mark.parametrize("sinks", on.pick(simulator=[None, "float32"], gpu=[None, *DTYPES]))
@pytest.mark.parametrize(
    "blind",
    [
        {"nk": 0},
        {"causal": True, "q_offset": -(1 << 33)},
        {"window": (3, None), "q_offset": 5000},
        {"window": (3, 3), "q_offset": -200},
    ],
    ids=["no-keys", "causal-far-left", "window-far-right", "window-far-left"],
)
def test_rows_that_see_no_key_are_zero_with_lse_of_the_sink(
    kernel: str, dtype: str, blind: dict[str, Any], sinks: str | None
) -> None:
    call = dict(blind)
    nq = on.pick(simulator=35, gpu=70)
    q, k, v = on.qkv(nq, call.pop("nk", 65), dtype=dtype, heads=(4, 2))
    if sinks:
        call["sinks"] = on.rand(4, seed=1, dtype=sinks)
    out, lse = on.attend_and_check(kernel, q, k, v, **call)
    assert torch.equal(out, torch.zeros_like(out))
    if sinks is None:  # with one, the rule has compared the log-sum-exp with the sink
        assert torch.equal(lse, torch.full_like(lse, -math.inf))


@each_kernel_and_dtype
def test_only_the_rows_that_see_no_key_are_zero(kernel: str, dtype: str) -> None:
    nq = on.pick(simulator=150, gpu=200)
    blind = nq - 70  # these queries come before key 0
    out, lse = on.attend_and_check(kernel, *on.qkv(nq, 70, dtype=dtype), causal=True)
    assert torch.equal(out[:, :, :blind], torch.zeros_like(out[:, :, :blind]))
    assert bool((lse[:, :, :blind] == -math.inf).all())
    assert bool(lse[:, :, blind:].isfinite().all())


@each_kernel_and_dtype
def test_sinks_far_above_and_far_below_the_scores(kernel: str, dtype: str) -> None:
    q, k, v = on.qkv(on.pick(simulator=40, gpu=65), 129, dtype=dtype, heads=(4, 2))
    sinks = on.tensor([60.0, -60.0, 0.0, -math.inf])
    out, _ = on.attend_and_check(kernel, q, k, v, sinks=sinks)
    plain, _ = on.attend(kernel, q, k, v)
    if kernel == "ampere":  # calls without sinks have kernels of their own
        torch.testing.assert_close(out[:, 3], plain[:, 3], atol=4e-3, rtol=1e-2)
    else:
        assert torch.equal(out[:, 3], plain[:, 3])  # a sink of -inf is none


@each_kernel_and_dtype
def test_an_infinite_sink_takes_the_whole_weight(kernel: str, dtype: str) -> None:
    q, k, v = on.qkv(40, 129, dtype=dtype, heads=(4, 2))
    sinks = on.tensor([math.inf, 0.0, math.inf, 1.0])
    out, lse = on.attend_and_check(kernel, q, k, v, sinks=sinks)
    assert torch.equal(out[:, ::2], torch.zeros_like(out[:, ::2]))
    assert bool((lse[:, ::2] == math.inf).all())


@each_kernel_and_dtype
@pytest.mark.parametrize("window", [(3, None), (None, 3), (None, None)], ids=str)
def test_the_farthest_offsets_hide_no_key_of_an_unbounded_side(
    kernel: str, dtype: str, window: tuple[int | None, int | None]
) -> None:
    q, k, v = on.qkv(35, 65, dtype=dtype)
    far = 2**60 - 1 if window[0] is None else 1 - 2**60
    out, _ = on.attend_and_check(kernel, q, k, v, window=window, q_offset=far)
    assert out.abs().amax() > 0


@each_kernel_and_dtype
@pytest.mark.parametrize("causal", on.pick(simulator=[True], gpu=[False, True]))
def test_huge_finite_scores_give_finite_outputs(kernel: str, dtype: str, causal: bool) -> None:
    # Scores of 1e9 and more: every softmax is one-hot, and rounding decides between close keys.
    size = 5e3 if dtype == "float16" else 1e5
    q, k, v = on.qkv(on.pick(simulator=40, gpu=113), 129, dtype=dtype)
    out, lse = on.attend(kernel, q * size, k * size, v, causal=causal)
    assert out.isfinite().all()
    assert lse.isfinite().all()
    assert out.abs().max() <= v.abs().max() * 1.001
