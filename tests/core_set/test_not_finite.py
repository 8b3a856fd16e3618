"""NaN and infinity in q, k and v spoil what sees them, and nothing else."""

from __future__ import annotations

import math

import pytest
import torch

from .checks import assert_rows_close
from .executors import executor

NAN = math.nan
on = executor()
each_kernel_and_dtype = pytest.mark.parametrize(("kernel", "dtype"), on.kernels_and_dtypes())


@each_kernel_and_dtype
@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
def test_a_non_finite_query_spoils_its_own_row_only(kernel: str, dtype: str, value: float) -> None:
    q, k, v = on.qkv(on.pick(simulator=70, gpu=130), 129, dtype=dtype)
    spoiled = q.clone()
    spoiled[0, 1, 40, 3] = value
    out, lse = on.attend(kernel, spoiled, k, v)
    others = torch.ones(q.shape[:-1], dtype=torch.bool, device=on.device)
    others[0, 1, 40] = False
    assert_rows_close(others, out, q, k, v)
    assert bool(out[0, 1, 40].isnan().all())
    assert not lse[0, 1, 40].isfinite()


@each_kernel_and_dtype
@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
def test_a_non_finite_key_spoils_only_rows_that_see_it(
    kernel: str, dtype: str, value: float
) -> None:
    q, k, v = on.qkv(130, 130, dtype=dtype)
    spoiled = k.clone()
    spoiled[0, 0, 70] = value
    out, _ = on.attend(kernel, q, spoiled, v, causal=True)
    blind = torch.ones(1, 2, 130, dtype=torch.bool, device=on.device)
    blind[0, 0, 70:] = False
    assert_rows_close(blind, out, q, k, v, causal=True)
    assert bool(out[0, 0, 70:].isnan().all())


@each_kernel_and_dtype
@pytest.mark.parametrize("value", [NAN, math.inf])
def test_a_non_finite_value_spoils_what_sees_it_only(kernel: str, dtype: str, value: float) -> None:
    q, k, v = on.qkv(40, 200, dtype=dtype)
    spoiled = v.clone()
    spoiled[0, 0, 150, 5] = value
    out, _ = on.attend(kernel, q, k, spoiled)
    clean, _ = on.attend(kernel, q, k, v)
    assert not out[0, 0, :, 5].isfinite().any()
    out[0, 0, :, 5] = clean[0, 0, :, 5]
    assert torch.equal(out, clean)
    # No query sees keys 40 to 199.
    on.attend_and_check(kernel, q, k, spoiled, window=(None, 0), q_offset=0)


@each_kernel_and_dtype
def test_a_window_hides_a_nan_key(kernel: str, dtype: str) -> None:
    q, k, v = on.qkv(130, 130, dtype=dtype)
    k[0, 0, 70] = NAN
    on.attend_and_check(kernel, q, k, v, window=(9, 4))
