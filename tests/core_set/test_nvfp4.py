"""approximate="nvfp4": the rounding to four bits, the features, and how far the result is from that
of exact kernels.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import archflash
from archflash import reference

from .checks import relative_rms_error
from .executors import executor

on = executor()
pytestmark = pytest.mark.skipif(
    on.name == "gpu" and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 12,
    reason="only GPUs of 12.x multiply numbers of four bits with scales",
)

NVFP4: dict[str, Any] = {"approximate": "nvfp4"}
every_kernel = pytest.mark.parametrize("kernel", on.kernels("nvfp4"))
RANDOM = [2]  # one of the simulator's schedules


def inputs(
    nq: int, nk: int, d: int, dv: int, dtype: str, heads: tuple[int, int] = (2, 1)
) -> tuple[Tensor, Tensor, Tensor]:
    """Two heads over one; the keys have a mean that is large beside what tells them apart."""
    kind = getattr(torch, dtype)
    k = on.rand(1, heads[1], nk, d, seed=2) + 3 * on.rand(1, heads[1], 1, d, seed=4)
    q, v = on.rand(1, heads[0], nq, d, seed=1), on.rand(1, heads[1], nk, dv, seed=3)
    return q.to(kind), k.to(kind), v.to(kind)


# nq, nk, d, dv, dtype, options
CALLS: dict[str, tuple[int, int, int, int, str, dict[str, Any]]] = {
    "d64": (70, 300, 64, 64, "float16", {"layout": "bnhd"}),
    "causal": (150, 260, 128, 128, "bfloat16", {"causal": True}),
    "window": (90, 300, 64, 64, "bfloat16", {"window": (70, 5), "out_pad": 24}),
    "odd-dims": (33, 140, 72, 40, "bfloat16", {"sinks": [0.5, -1.0]}),
    "offset": (65, 200, 24, 120, "float16", {"q_offset": [20], "causal": True}),
    "one-row": (1, 300, 128, 128, "float16", {"sinks": [20.0, 1.0]}),
    "scale": (40, 130, 64, 64, "bfloat16", {"scale": 0.02}),
}


@every_kernel
@pytest.mark.parametrize("name", CALLS)
def test_a_call_agrees_with_float64_on_the_rounded_inputs(kernel: str, name: str) -> None:
    nq, nk, d, dv, dtype, options = CALLS[name]
    call = dict(options)
    if "sinks" in call:
        call["sinks"] = on.tensor(call["sinks"])
    if "q_offset" in call:
        call["q_offset"] = on.int32(*call["q_offset"])
    q, k, v = inputs(nq, nk, d, dv, dtype)
    if call.get("layout") == "bnhd":
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    on.attend_and_check(kernel, q, k, v, schedules=RANDOM, **NVFP4, **call)


@every_kernel
def test_without_keys_the_output_is_zero(kernel: str) -> None:
    sinks = on.tensor([0.5, -1.0])
    out, lse = on.attend(
        kernel, *inputs(5, 0, 64, 64, "bfloat16"), schedules=RANDOM, sinks=sinks, **NVFP4
    )
    assert not out.any()
    assert torch.equal(lse, sinks[None, :, None].expand(1, 2, 5))


@every_kernel
def test_p_of_one_block_is_rounded_in_groups_of_16_keys(kernel: str) -> None:
    q, k, v = inputs(40, 128, 64, 64, "float16")
    out, _ = on.attend(kernel, q, k, v, schedules=RANDOM, **NVFP4)
    wide_q, wide_k, stored_v = reference.nvfp4(q, k, v)
    scores = wide_q @ wide_k.transpose(2, 3) * (64**-0.5 * math.log2(math.e))
    p = torch.exp2(scores - scores.amax(-1, keepdim=True) + 10.5)
    # P is rounded as numbers of V in units of 1, which a column with the largest of them makes.
    largest = torch.zeros(1, 2, 128, 1)
    largest[:, :, 0] = 6 * 448
    columns = torch.cat([p.transpose(2, 3).float(), largest.to(p.device)], -1)
    stored = reference.nvfp4(q, k.expand(1, 2, -1, -1), columns)[2][..., :-1].transpose(2, 3)
    expected = stored @ stored_v / p.sum(-1, keepdim=True)
    assert relative_rms_error(out, expected) < 0.01
    assert relative_rms_error(out, p @ stored_v / p.sum(-1, keepdim=True)) > 0.05


@every_kernel
def test_the_error_is_what_explain_says(kernel: str) -> None:
    q, k, v = on.qkv(128, on.pick(simulator=256, gpu=1024), 128, dtype="float16", heads=(1, 1))
    out, _ = on.attend(kernel, q, k, v, schedules=RANDOM, **NVFP4)
    expected, _ = reference.attention(q, k, v)
    assert 0.14 < relative_rms_error(out, expected) < 0.28
    cosine = torch.nn.functional.cosine_similarity(out.double().flatten(), expected.flatten(), 0)
    assert 0.96 < cosine < 0.99


@every_kernel
def test_what_is_not_finite_stays_where_it_is_seen(kernel: str) -> None:
    q, k, v = inputs(40, 200, 64, 64, "bfloat16")
    out, lse = on.attend(kernel, q, k, v, schedules=RANDOM, causal=True, q_offset=60, **NVFP4)
    spoiled = q.clone()
    spoiled[0, 1, 7, 3] = math.nan
    spoiled[0, 0, 9, 5] = math.inf
    rows, _ = on.attend(kernel, spoiled, k, v, schedules=RANDOM, causal=True, q_offset=60, **NVFP4)
    hit = torch.zeros(1, 2, 40, dtype=torch.bool, device=q.device)
    hit[0, 1, 7] = hit[0, 0, 9] = True
    assert rows[hit].isnan().all()
    assert not rows[~hit].isnan().any()
    # Queries see keys 0 to 99, and the others may hold anything.
    far_k, far_v = k.clone(), v.clone()
    far_k[:, :, 100:] = math.nan
    far_v[:, :, 100:] = math.inf
    far, far_lse = on.attend(
        kernel, q, far_k, far_v, schedules=RANDOM, causal=True, q_offset=60, **NVFP4
    )
    assert torch.equal(far, out)
    assert torch.equal(far_lse, lse)
    # A key that some rows see spoils those.
    near = k.clone()
    near[0, 0, 80, 4] = math.inf
    seen, _ = on.attend(kernel, q, near, v, schedules=RANDOM, causal=True, q_offset=60, **NVFP4)
    assert seen[:, :, 20:].isnan().all()
    assert not seen[:, :, :20].isnan().any()


@every_kernel
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-4, 1e4, 1e30])
def test_numbers_of_any_size_give_no_nan(kernel: str, size: float) -> None:
    q, k, v = (x * size for x in inputs(20, 140, 64, 64, "bfloat16"))
    out, lse = on.attend(kernel, q, k, v, schedules=RANDOM, **NVFP4)
    assert out.isfinite().all()
    assert not lse.isnan().any()
    assert out.abs().max() <= v.abs().max()


@every_kernel
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_values_at_the_end_of_the_type_do_not_overflow(kernel: str, dtype: str) -> None:
    q, k, v = inputs(33, 140, 64, 64, dtype)
    most = torch.finfo(v.dtype).max
    out, _ = on.attend(kernel, q, k, torch.full_like(v, most), schedules=RANDOM, **NVFP4)
    assert out.isfinite().all()
    assert out.min() > 0.9 * most


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "H200"}, "compute capability 9.0 with approximate='nvfp4': blackwell_consumer "
         "multiplies numbers of four bits on 12.x only; leave approximate out"),
        ({"softcap": 5.0}, "softcap with approximate='nvfp4'"),
        ({"scale": -1.0}, "scale -1.000000 with approximate='nvfp4'"),
        ({"out_dtype": torch.float32}, "out_dtype float32 with approximate='nvfp4'"),
        ({"d": 136}, "d 136 and dv 136 with approximate='nvfp4': blackwell_consumer takes at most"),
        ({"num_splits": 2}, "num_splits"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused(options: dict[str, Any], words: str) -> None:
    call = {"device": "RTX 5090"} | options
    q = torch.empty(1, 2, 64, call.pop("d", 64), dtype=torch.float16, device="meta")
    with pytest.raises(archflash.ForcedImplementationError, match=words):
        archflash.explain(q, q, q, implementation="blackwell_consumer", **NVFP4, **call)
