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
# Only GPUs of 12.x multiply numbers of four bits with scales.
ELSEWHERE = on.name == "gpu" and (
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 12
)

NVFP4: dict[str, Any] = {"approximate": "nvfp4"}
every_kernel = pytest.mark.parametrize("kernel", [] if ELSEWHERE else on.kernels("nvfp4"))
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
    call = on.with_tensors(options)
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
    assert relative_rms_error(out, expected) < 0.012
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
        ({"scale": -1.0}, "scale -1 with approximate='nvfp4'"),
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


# --- inputs that have four bits as they come ---


def stored(
    nq: int, nk: int, d: int, dv: int, per: str = "tensor", turned: bool = False
) -> tuple[list[Any], list[Tensor]]:
    """Triples for attention_nvfp4, and the numbers that they stand for."""
    q, k, v = inputs(nq, nk, d, dv, "float32")
    made, numbers = [], []
    for x, dim in ((q, -1), (k * 0.5, -1), (v, -2)):
        values, scales, unit = archflash.quantize_nvfp4(x, per=per, dim=dim)
        numbers.append(reference.dequantize_nvfp4(values, scales, unit, dim))
        if turned:  # rows before heads in memory, in a wider tensor
            wide = torch.full(
                (1, values.shape[2], values.shape[1], values.shape[3] + 8), 255, device=x.device
            ).to(torch.uint8)
            view = wide.transpose(1, 2)[..., : values.shape[3]]
            view.copy_(values)
            values = view
            scales = scales.view(torch.uint8).transpose(1, 2).contiguous().transpose(1, 2)
            scales = scales.view(torch.float8_e4m3fn)
        made.append((values, scales, unit))
    return made, numbers


# nq, nk, d, dv, per, turned, options
STORED: dict[str, tuple[int, int, int, int, str, bool, dict[str, Any]]] = {
    "d64": (70, 300, 64, 64, "tensor", False, {}),
    "causal": (150, 260, 128, 128, "head", False, {"causal": True}),
    "window": (90, 300, 64, 64, "head", True, {"window": (70, 5)}),
    "odd-dims": (33, 150, 80, 48, "tensor", False, {"sinks": [0.5, -1.0]}),
    "offset": (65, 200, 32, 112, "tensor", True, {"q_offset": [20], "causal": True}),
    "one-row": (1, 300, 128, 128, "tensor", False, {"scale": 0.02}),
    "no-keys": (5, 0, 64, 64, "tensor", False, {"sinks": [0.5, -1.0]}),
}


@every_kernel
@pytest.mark.parametrize("name", STORED)
def test_stored_numbers_are_multiplied_as_they_are(kernel: str, name: str) -> None:
    nq, nk, d, dv, per, turned, options = STORED[name]
    call = on.with_tensors(options)
    made, numbers = stored(nq, nk, d, dv, per, turned)
    out, lse = archflash.attention_nvfp4(*made, implementation=kernel, return_lse=True, **call)
    assert out.dtype == torch.bfloat16
    call["scale"] = call.get("scale", d**-0.5)
    for report in reference.check_stored_nvfp4(out, lse, *numbers, **call):
        assert report is not None
        assert report.ok, report
    half = archflash.attention_nvfp4(*made, implementation=kernel, out_dtype=torch.float16, **call)
    assert (half.double() - out.double()).abs().max() <= 2.0**-7 * out.abs().max()


@every_kernel
def test_what_is_spoiled_of_stored_numbers_stays_where_it_is_seen(kernel: str) -> None:
    made, _ = stored(40, 200, 64, 64)
    call = {"implementation": kernel, "causal": True, "q_offset": 60}
    out = archflash.attention_nvfp4(*made, **call)

    def spoiled(which: int, *place: Any) -> Tensor:
        changed = list(made)
        values, scales, unit = made[which]
        scales = scales.view(torch.uint8).clone()
        scales[place] = 0x7F
        changed[which] = (values, scales.view(torch.float8_e4m3fn), unit)
        rows = archflash.attention_nvfp4(*changed, **call)
        assert torch.equal(rows[~rows.isnan()], out[~rows.isnan()])
        return rows.isnan()

    of_q = spoiled(0, 0, 1, 7, 3)
    assert of_q[0, 1, 7].all()
    assert of_q.sum() == 64
    assert not spoiled(1, 0, 0, slice(100, None)).any()
    assert not spoiled(2, 0, 0, slice(7, None)).any()
    of_k = spoiled(1, 0, 0, 80, 2)
    assert of_k[:, :, 20:].all()
    assert not of_k[:, :, :20].any()
    of_v = spoiled(2, 0, 0, 0, 5)
    assert of_v[..., 5].all()
    assert of_v.sum() == 2 * 40


def test_exact_kernels_serve_stored_numbers_elsewhere() -> None:
    made, numbers = stored(40, 75, 48, 80, "head")
    expected, expected_lse = reference.attention(*numbers, causal=True)
    for name in ("torch", None):
        out, lse = archflash.attention_nvfp4(
            *made, causal=True, return_lse=True, implementation=name
        )
        assert relative_rms_error(out, expected) < 0.01
        assert (lse - expected_lse).abs().max() < 0.05


def test_gradients_are_exact_or_refused() -> None:
    (q, k, v), _ = stored(24, 40, 32, 48)
    sinks, unit = on.tensor([0.5, -1.0]).requires_grad_(), q[2].clone().requires_grad_()
    for made, call in (((q, k, v), {"sinks": sinks}), (((*q[:2], unit), k, v), {})):
        with pytest.raises(archflash.ForcedImplementationError, match="no backward"):
            archflash.attention_nvfp4(*made, implementation="blackwell_consumer", **call)
        (x,) = (x for x in (*made[0], *call.values()) if x.requires_grad)
        (gradient,) = torch.autograd.grad(archflash.attention_nvfp4(*made, **call).sum(), x)
        assert gradient.isfinite().all()
        assert gradient.any()


def test_it_is_chosen_where_a_run_has_shown_it_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of the kernels for other inputs, on other GPUs, says nothing about it."""
    q = torch.empty(1, 2, 64, 64, dtype=torch.bfloat16, device="meta")
    found = archflash.explain(q, q, q, device="RTX 5090", **NVFP4)
    assert (found.chosen, found.unproved) == ("torch", ("blackwell_consumer",))
    with archflash.approximate("nvfp4"):
        exact = archflash.explain(q, q, q, device="RTX 5090")
    assert (exact.chosen, exact.problem.approximate) == ("blackwell_consumer", None)
    monkeypatch.setenv("ARCHFLASH_UNPROVED", "blackwell_consumer")
    assert archflash.explain(q, q, q, device="RTX 5090", **NVFP4).chosen == "blackwell_consumer"


def test_a_traced_call_computes_exactly() -> None:
    made, _ = stored(24, 40, 32, 48)
    compiled = torch.compile(archflash.attention_nvfp4, backend="aot_eager", fullgraph=True)
    expected = archflash.attention_nvfp4(*made, causal=True, implementation="torch")
    assert torch.equal(compiled(*made, causal=True, implementation="torch"), expected)


GOOD = [
    archflash.quantize_nvfp4(torch.ones(1, heads, rows, 64), dim=dim)
    for heads, rows, dim in ((2, 32, -1), (1, 48, -1), (1, 48, -2))
]
VALUES, SCALES, UNIT = GOOD[0]
NOT_TRIPLES: dict[str, tuple[int, Any, type[Exception], str]] = {
    "a tensor": (0, VALUES, TypeError, "q is a torch.Tensor .*: it must be the triple"),
    "dtype": (1, (VALUES.float(), SCALES, UNIT), TypeError, "values of k have dtype torch.float32"),
    "scales": (0, (VALUES, SCALES.float(), UNIT), TypeError, "scales of q have dtype torch.float"),
    "scales of v": (
        2, archflash.quantize_nvfp4(torch.ones(1, 1, 48, 64)), ValueError,
        r"scales of v have shape \(1, 1, 48, 4\): it must be \(1, 1, 3, 64\), as quantize_nvfp4 "
        "makes them with dim=-2",
    ),
    "shape": (0, (VALUES[..., :12], SCALES, UNIT), ValueError, "with d a multiple of 16"),
    "unit": (0, (VALUES, SCALES, UNIT.expand(3)), ValueError, r"it must be \(\), \(1,\) or"),
    "strided": (
        0, (VALUES.transpose(2, 3).contiguous().transpose(2, 3), SCALES, UNIT), ValueError,
        "values of q have strided rows",
    ),
    "heads": (
        1, archflash.quantize_nvfp4(torch.ones(1, 3, 48, 64)), ValueError, "it must be 3 as in k"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_TRIPLES)
def test_what_is_no_nvfp4_is_refused(name: str) -> None:
    place, given, kind, words = NOT_TRIPLES[name]
    made = list(GOOD)
    made[place] = given
    with pytest.raises(kind, match=words):
        archflash.attention_nvfp4(*made, implementation="blackwell_consumer")


def test_numbers_at_odd_addresses_are_refused_by_the_kernel() -> None:
    values = torch.zeros(1, 1, 48, 36, dtype=torch.uint8)[..., 4:]
    made = [GOOD[0], (values, *GOOD[1][1:]), GOOD[2]]
    with pytest.raises(archflash.ForcedImplementationError, match=r"k .*16"):
        archflash.attention_nvfp4(*made, implementation="blackwell_consumer")
    assert archflash.attention_nvfp4(*made).isfinite().all()
