"""Head dimensions above 256: every option that a call of such heads may have, by the kernels that
take them, in the tiles for GPUs with more and with less shared memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import archflash
from archflash import _archflash as native

from .. import kvcache_cases
from ..kvcache_cases import CacheCall, make
from .executors import executor

on = executor()
KERNELS = [name for name in on.kernels() if native.describe(name).largest_head_dim > 256]
# The kernels for 16-bit inputs have caches and split keys, too.
OF_16_BITS = [name for name in KERNELS if native.describe(name).uses_tensor_cores]
DEVICES = ("A100", "RTX 4090")  # with two buffers for K and V, and with one
BF16, F16 = torch.bfloat16, torch.float16

# Rows of q and k, heads of q and k, head dimensions, options.
CALLS: dict[str, tuple[tuple[int, int], tuple[int, int], tuple[int, int], dict[str, Any]]] = {
    "causal": ((70, 101), (2, 2), (512, 512), {"causal": True}),
    "causal-from-the-start-sinks": (
        (70, 101), (2, 1), (384, 384), {"causal": True, "q_offset": 0, "sinks": [0.5, -3.0]},
    ),
    "window-softcap": ((65, 97), (1, 1), (320, 320), {"window": (20, 7), "softcap": 2.0}),
    "one-block": ((3, 5), (2, 2), (264, 264), {}),
    "packed-heads-few-columns-of-v": ((5, 77), (12, 2), (512, 8), {"causal": True}),
    "few-columns-of-q": ((17, 40), (2, 2), (24, 504), {}),
    "splits-window": (
        (2, 200), (6, 2), (512, 448), {"num_splits": 3, "window": (90, 0), "sinks": [1.0] * 6},
    ),
    "splits-that-see-no-key": ((40, 100), (1, 1), (320, 264), {
        "num_splits": 2, "causal": True, "q_offset": -20,
    }),
    "batch-invariant": ((3, 70), (2, 1), (384, 512), {"batch_invariant": True, "causal": True}),
    "negative-scale": ((20, 40), (1, 1), (512, 512), {"scale": -0.1}),
    "no-key": ((5, 0), (1, 1), (512, 512), {"sinks": [2.0]}),
}  # fmt: skip


def dtypes_of(kernel: str) -> list[str]:
    return ["float16", "bfloat16"] if kernel in OF_16_BITS else ["float32"]


@pytest.mark.parametrize(
    ("kernel", "dtype"), [(kernel, dtype) for kernel in KERNELS for dtype in dtypes_of(kernel)]
)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_agrees_with_float64(kernel: str, name: str, dtype: str) -> None:
    rows, heads, dims, given = CALLS[name]
    options = dict(given)
    if kernel not in OF_16_BITS:
        options = {k: x for k, x in options.items() if k not in ("num_splits", "batch_invariant")}
    if "sinks" in options:
        options["sinks"] = on.tensor(options["sinks"])
    number = list(CALLS).index(name) + (dtype == "float16")
    tensors = on.qkv(*rows, *dims, dtype=dtype, heads=heads, seed=number)
    decision = archflash.explain(
        *tensors, implementation=kernel, device=DEVICES[number % 2], return_lse=True, **options
    )
    if kernel == "ampere" and decision.plan is not None and decision.plan.kernels:
        large = decision.plan.tile.name.endswith("_large")
        assert large == (DEVICES[number % 2] == "A100")
    on.attend_and_check(kernel, *tensors, plan=decision.plan, schedules=[number], **options)


@pytest.mark.parametrize("kernel", KERNELS)
def test_packed_sequences_read_no_neighbour(kernel: str) -> None:
    ends = [on.int32(2, 3, 3, 75, 80), on.int32(1, 41, 60, 60, 110)]
    shapes = ((84, 2, 512), (113, 1, 512), (113, 1, 384))
    dtype = dtypes_of(kernel)[-1]
    q, k, v = (on.rand(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes))
    for x in (k, v):
        x[:1], x[-3:] = math.nan, math.nan
    options = {"causal": True, "cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1]}
    out, lse = on.attend_and_check(kernel, q, k, v, schedules=[1], **options)
    for blind in (
        slice(0, 2),
        slice(3, 75),
        slice(80, 84),
    ):  # of no sequence, or of one without keys
        assert torch.equal(out[blind], torch.zeros_like(out[blind]))
        assert lse[:, blind].isneginf().all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_any_strides_serve(kernel: str) -> None:
    """q of layout bnhd in a wider tensor, k whose heads are the same memory, out with padding."""
    dtype = dtypes_of(kernel)[0]
    q = on.rand(1, 20, 2, 656, seed=1, dtype=dtype).transpose(1, 2)[..., 8:520]
    k = on.rand(1, 1, 50, 512, seed=2, dtype=dtype).expand(1, 2, 50, 512)
    v = on.rand(1, 50, 2, 512, seed=3, dtype=dtype).transpose(1, 2)
    on.attend_and_check(kernel, q, k, v, schedules=[2], out_pad=8)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_query_that_is_not_finite_spoils_its_own_row(kernel: str) -> None:
    q, k, v = on.qkv(20, 70, 512, dtype=dtypes_of(kernel)[-1], heads=(1, 1))
    expected, _ = on.attend(kernel, q, k, v, schedules=[0])
    q[0, 0, 7, 300] = math.nan
    out, _ = on.attend(kernel, q, k, v, schedules=[0])
    others = [i for i in range(20) if i != 7]
    assert out[0, 0, 7].isnan().all()
    assert torch.equal(out[0, 0, others], expected[0, 0, others])


CACHES: dict[str, Callable[[], CacheCall]] = {
    "contiguous-bhnd-append-d320": lambda: make(
        [70, 8, 0], rows_of=[3, 0, 1], n_new=2, nq=2, d=320, dv=512, layout="bhnd", dtype=BF16,
        device=on.device,
    ),
    "page-1-many-rows": lambda: make(
        [15, 90], page_size=1, nq=70, heads=(2, 1), causal=True, capacity=96, d=512, dv=512,
        dtype=F16, device=on.device,
    ),
    "page-16-splits-rotary": lambda: make(
        [15, 130], page_size=16, capacity=144, heads=(4, 2), num_splits=2, n_new=1, rotary=64,
        d=512, dv=512, dtype=BF16, device=on.device,
    ),
    "page-64-packed-queries-leftpad-chunks": lambda: make(
        [63, 100], page_size=64, capacity=128, q_lengths=[3, 20], leftpad=[2, 0], d=384, dv=384,
        attention_chunk=50, causal=True, dtype=F16, device=on.device,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("kernel", OF_16_BITS)
def test_a_cache_is_served_as_the_reference_does(kernel: str, name: str) -> None:
    kvcache_cases.check(CACHES[name](), lambda mine: on.attend_with_kvcache(kernel, mine)[:2])


@pytest.mark.parametrize("kernel", OF_16_BITS)
def test_a_row_gets_the_same_bits_whatever_else_is_in_the_call(kernel: str) -> None:
    q, k, v = on.qkv(5, 1100, 512, dtype="bfloat16", heads=(2, 1))
    options: dict[str, Any] = {"batch_invariant": True, "causal": True}
    out, lse = on.attend(kernel, q, k, v, schedules=[0], **options)
    last, lse_last = on.attend(kernel, q[:, :, -1:], k, v, schedules=[0], **options)
    assert torch.equal(last[:, :, 0], out[:, :, -1])
    assert torch.equal(lse_last[:, :, 0], lse[:, :, -1])


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "ranges": ("key_ranges", {"key_ranges": torch.zeros(1, 1, 5, 1, 2, dtype=torch.int32)}),
    "dropout": ("dropout_p", {"dropout_p": 0.1}),
    "slopes": ("alibi_slopes", {"alibi_slopes": torch.ones(2)}),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("kernel", [name for name in KERNELS if name not in OF_16_BITS])
def test_masks_as_data_in_fp32_are_refused_before_a_launch(kernel: str, name: str) -> None:
    option, options = REFUSED[name]
    options = {k: x.to(on.device) if isinstance(x, torch.Tensor) else x for k, x in options.items()}
    q, k, v = on.qkv(5, 7, 512, dtype="float32", heads=(2, 2))
    with pytest.raises(archflash.ForcedImplementationError, match=f"{option} with head dimensions"):
        archflash.attention(q, k, v, implementation=kernel, **options)


@pytest.mark.parametrize("kernel", OF_16_BITS)
def test_slopes_with_a_cache_are_refused_before_a_launch(kernel: str) -> None:
    call = make(
        [5], d=512, dv=512, dtype=BF16, device=on.device, alibi_slopes=on.tensor([1.0] * 2),
        heads=(2, 1),
    )  # fmt: skip
    with pytest.raises(archflash.ForcedImplementationError, match="alibi_slopes with a KV cache"):
        on.attend_with_kvcache(kernel, call)


@pytest.mark.parametrize("kernel", OF_16_BITS)
def test_rows_of_minus_infinity_are_zero_and_rows_of_the_lowest_number_are_the_mean(
    kernel: str,
) -> None:
    mask = torch.zeros(3, 70, device=on.device)
    mask[0], mask[1] = -math.inf, torch.finfo(torch.float32).min
    q, k, v = on.qkv(3, 70, 512, dtype="bfloat16")
    out, lse = on.attend(kernel, q, k, v, attn_mask=mask, schedules=[3])
    assert torch.equal(out[:, :, 0], torch.zeros_like(out[:, :, 0]))
    assert bool((lse[:, :, 0] == -math.inf).all())
    torch.testing.assert_close(out[:, :, 1].float(), v.float().mean(2), atol=1e-2, rtol=1e-2)
    plain, _ = on.attend(kernel, q[:, :, 2:], k, v, schedules=[3])
    torch.testing.assert_close(out[:, :, 2:], plain, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("keys", [8, 40, 48])
@pytest.mark.parametrize("kernel", OF_16_BITS)
def test_a_bool_mask_of_whole_words(kernel: str, keys: int) -> None:
    """Rows of 4 or 16 keys at a time, which other kernels load at once."""
    q, k, v = on.qkv(19, keys, 304, dtype="float16")
    mask = torch.rand(19, keys, generator=torch.Generator().manual_seed(keys)) > 0.3
    mask[3] = False
    on.attend_and_check(kernel, q, k, v, attn_mask=mask.to(on.device), schedules=[3])


@pytest.mark.parametrize("kernel", KERNELS)
def test_gradients_of_such_heads_are_refused_before_a_launch(kernel: str) -> None:
    q, k, v = on.qkv(5, 7, 512, dtype=dtypes_of(kernel)[-1], heads=(2, 2))
    with pytest.raises(archflash.ForcedImplementationError, match="gradients of head dimensions"):
        archflash.attention(q.requires_grad_(), k, v, implementation=kernel)


@pytest.mark.parametrize("kernel", KERNELS)
def test_larger_heads_are_refused_before_a_launch(kernel: str) -> None:
    q, k, v = on.qkv(5, 7, 520, dtype=dtypes_of(kernel)[-1], heads=(2, 2))
    with pytest.raises(archflash.ForcedImplementationError, match="multiples of 8 up to 512"):
        archflash.attention(q, k, v, implementation=kernel)
