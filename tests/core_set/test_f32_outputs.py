"""fp32 outputs of 16-bit inputs: rounded they are the 16-bit outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import archflash
from archflash import _archflash as native

from ..replanned import plan_with
from .executors import executor

on = executor()

SIXTEEN_BITS = ("float16", "bfloat16")
# It has kernels of its own for them, which take other tiles than those for 16-bit outputs.
OTHER_TILES = "hopper"
# Rows, keys and head dimensions. A GPU with one SM gets large tiles for all but the first.
SHAPES = {
    "few": (33, 65, 64, 64),
    "many": (137, 150, 64, 64),
    "wide": (137, 90, 128, 128),
    "two tiles": (250, 350, 64, 64),  # of hopper, as the next
    "two wide tiles": (300, 90, 128, 128),
}


def kernels(feature: str = "out_dtype") -> list[str]:
    return [name for name in on.kernels(feature) if name in on.kernels("out_dtype")]


def plan_of(kernel: str, q: Tensor, k: Tensor, v: Tensor, **call: Any) -> native.LaunchPlan:
    """A plan for a GPU with one SM."""
    home = native.describe(kernel).home_device
    return plan_with({"sm_count": 1}, q, k, v, device=home, implementation=kernel, **call)


def check(kernel: str, q: Tensor, k: Tensor, v: Tensor, *, few: bool, **call: Any) -> None:
    wide = call | {"out_dtype": torch.float32}
    plans: list[native.LaunchPlan | None] = [None, None]
    if not few:
        plans = [plan_of(kernel, q, k, v, **options) for options in (wide, call)]
    out, lse = on.attend_and_check(
        kernel, q, k, v, out_pad=4 * few, plan=plans[0], schedules=range(1), **wide
    )
    assert out.dtype == torch.float32
    rounded, same_lse = on.attend(kernel, q, k, v, plan=plans[1], schedules=range(1), **call)
    if kernel == OTHER_TILES:
        torch.testing.assert_close(out.to(q.dtype), rounded, atol=4e-3, rtol=1e-2)
        torch.testing.assert_close(lse, same_lse, atol=1e-5, rtol=1e-5)
        return
    assert torch.equal(out.to(q.dtype), rounded)
    assert torch.equal(lse, same_lse)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("kernel", "dtype"), [x for x in on.kernels_and_dtypes(SIXTEEN_BITS) if x[0] in kernels()]
)
def test_rounded_they_are_the_16_bit_outputs(kernel: str, dtype: str, shape: str) -> None:
    if shape.startswith("two") and kernel != OTHER_TILES:
        pytest.skip("a shape for hopper's tiles")
    nq, nk, d, dv = SHAPES[shape]
    few = shape == "few" or on.name == "gpu"
    # Without sinks ampere has kernels of their own for 16-bit outputs.
    more = {"sinks": on.tensor([0.5, -0.5])} if kernel == "ampere" else {}
    check(kernel, *on.qkv(nq, nk, d, dv, dtype=dtype, heads=(2, 2)), few=few, causal=True,
          num_splits=1 if "num_splits" in native.describe(kernel).features else None,
          **more)  # fmt: skip


@pytest.mark.parametrize("kernel", kernels())
def test_rows_of_no_sequence_are_zeros(kernel: str) -> None:
    q, k, v = (x[0].transpose(0, 1) for x in on.qkv(70, 80, 64, 64, dtype="bfloat16", heads=(2, 1)))
    call = {
        "cu_seqlens_q": on.int32(10, 40, 40, 60), "cu_seqlens_k": on.int32(0, 30, 50, 80),
        "causal": True,
    }  # fmt: skip
    out, lse = on.attend_and_check(
        kernel, q, k, v, out_dtype=torch.float32, schedules=range(1), **call
    )
    for rows in (slice(0, 10), slice(60, 70)):
        assert torch.equal(out[rows], torch.zeros_like(out[rows]))
        assert bool((lse[:, rows] == -torch.inf).all())


@pytest.mark.parametrize(
    "kernel", [x for x in kernels("key_ranges") if x not in ("simt", OTHER_TILES)]
)
def test_they_are_those_of_masks_as_data(kernel: str) -> None:
    q, k, v = on.qkv(70, 130, 64, 64, dtype="bfloat16", heads=(2, 2))
    begin = torch.arange(70)
    ranges = torch.stack([begin, begin + 20], -1).int()[None, None, :, None].to(q.device)
    check(kernel, q, k, v, few=True, key_ranges=ranges)


@pytest.mark.parametrize("call", [{"num_splits": 2}, {"batch_invariant": True}, {"dropout_p": 0.1}])
@pytest.mark.parametrize("kernel", kernels())
def test_what_they_do_not_go_with_is_refused(kernel: str, call: dict[str, Any]) -> None:
    q, k, v = on.qkv(33, 65, 64, 64, dtype="bfloat16", heads=(2, 2))
    with pytest.raises(archflash.ForcedImplementationError, match=next(iter(call))):
        archflash.attention(q, k, v, out_dtype=torch.float32, implementation=kernel, **call)


@pytest.mark.parametrize("kernel", kernels("gradients"))
def test_no_kernel_computes_their_gradients(kernel: str) -> None:
    q, k, v = on.qkv(33, 65, 64, 64, dtype="bfloat16", heads=(2, 2))
    with pytest.raises(archflash.ForcedImplementationError, match="out_dtype"):
        archflash.attention(
            q.requires_grad_(), k, v, out_dtype=torch.float32, implementation=kernel
        )
