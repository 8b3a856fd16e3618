"""archflash.scaled_dot_product_attention against PyTorch's, on what that takes and refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import archflash
from archflash import _dispatch, _sdpa
from archflash._sdpa import scaled_dot_product_attention

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # a CPU call names its fallback once


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_same_as_torch(q: Tensor, k: Tensor, v: Tensor, **call: Any) -> None:
    expected = F.scaled_dot_product_attention(q, k, v, **call)
    out = scaled_dot_product_attention(q, k, v, **call)
    assert out.shape == expected.shape
    assert out.dtype == expected.dtype
    torch.testing.assert_close(out, expected)


def inputs(lead: tuple[int, ...], nq: int, nk: int, dv: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    return (rand(*lead, nq, 8, seed=1), rand(*lead, nk, 8, seed=2), rand(*lead, nk, dv, seed=3))


LEADS = [(), (3,), (2, 4), (2, 3, 4), (2, 1, 3, 4), (0, 2)]


@pytest.mark.parametrize("lead", LEADS, ids=str)
@pytest.mark.parametrize(("nq", "nk"), [(1, 1), (7, 7), (5, 9), (9, 5)])
def test_any_number_of_leading_dimensions(lead: tuple[int, ...], nq: int, nk: int) -> None:
    q, k, v = inputs(lead, nq, nk, dv=12)
    assert_same_as_torch(q, k, v)
    assert_same_as_torch(q, k, v, is_causal=True)
    assert_same_as_torch(q, k, v, scale=0.3)
    for mask_lead in {(), lead, lead[-1:], (*(1 for _ in lead),)}:
        mask = rand(*mask_lead, nq, nk, seed=4)
        assert_same_as_torch(q, k, v, attn_mask=mask)
        assert_same_as_torch(q, k, v, attn_mask=mask > -1)


def test_leading_dimensions_broadcast() -> None:
    q, k, v = rand(2, 4, 5, 8), rand(1, 4, 7, 8), rand(2, 1, 7, 8)
    assert_same_as_torch(q, k, v)
    assert_same_as_torch(q, k[0], v[0], is_causal=True)
    assert_same_as_torch(q[0, 0], k, v)
    assert_same_as_torch(q, k[0, 0], v[0, 0], attn_mask=rand(5, 7) > 0)
    assert_same_as_torch(rand(3, 1, 4, 5, 8), k, v)


def test_is_causal_aligns_to_the_top_left() -> None:
    q = torch.zeros(1, 1, 2, 1)
    v = torch.tensor([3.0, 6.0, 12.0]).reshape(1, 1, 3, 1)
    out = scaled_dot_product_attention(q, v, v, is_causal=True)
    assert out.flatten().tolist() == [3.0, 4.5]


def test_leading_dimensions_that_do_not_broadcast_are_named() -> None:
    q, k = rand(2, 4, 5, 8), rand(2, 2, 7, 8)
    with pytest.raises(RuntimeError, match=r"\(2, 4, 5, 8\), \(2, 2, 7, 8\).*enable_gqa=True"):
        scaled_dot_product_attention(q, k, k)
    with pytest.raises(RuntimeError, match=r"before the last 3 must broadcast$"):
        scaled_dot_product_attention(q, k[:, None].expand(2, 3, 2, 7, 8), k, enable_gqa=True)


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)], ids=str)
@pytest.mark.parametrize("hkv", [1, 2, 4])
def test_enable_gqa_shares_key_heads(lead: tuple[int, ...], hkv: int) -> None:
    q, k, v = rand(*lead, 4, 5, 8), rand(*lead, hkv, 7, 8, seed=2), rand(*lead, hkv, 7, 8, seed=3)
    assert_same_as_torch(q, k, v, enable_gqa=True)
    assert_same_as_torch(q, k, v, enable_gqa=True, is_causal=True)
    assert_same_as_torch(q, k, v, enable_gqa=True, attn_mask=rand(5, 7) > 0)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [(2, 1), (1, 4), (4, 6), (12, 3)])
def test_enable_gqa_takes_other_heads_of_v_than_of_k(heads: tuple[int, int]) -> None:
    q, k, v = rand(2, 12, 5, 8), rand(2, heads[0], 7, 8), rand(2, heads[1], 7, 8)
    assert_same_as_torch(q, k, v, enable_gqa=True, is_causal=True)
    if heads not in ((1, 4), (12, 3)):
        return
    compiled = torch.compile(
        lambda *x: scaled_dot_product_attention(*x, enable_gqa=True),
        backend="eager", dynamic=True, fullgraph=True,
    )  # fmt: skip
    torch._dynamo.reset()
    torch.testing.assert_close(
        compiled(q, k, v), F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    )


def test_a_row_without_keys_is_zero() -> None:
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[2] = False
    q, k, v = inputs((2, 3), 5, 7)
    assert_same_as_torch(q, k, v, attn_mask=mask)
    assert (scaled_dot_product_attention(q, k, v, attn_mask=mask)[:, :, 2] == 0).all()
    assert_same_as_torch(q, k, v, attn_mask=torch.where(mask, 0.0, -math.inf))


def test_gradients_are_those_of_torch() -> None:
    grads = []
    for function in (scaled_dot_product_attention, F.scaled_dot_product_attention):
        q, k, v = (x.requires_grad_() for x in inputs((2, 3), 5, 7))
        bias = rand(3, 5, 7).requires_grad_()
        function(q, k, v, attn_mask=bias).square().sum().backward()
        grads.append([x.grad for x in (q, k, v, bias)])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_dtypes(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in inputs((2, 3), 5, 7))
    assert_same_as_torch(q, k, v, is_causal=True)


def test_positions_of_the_arguments_are_those_of_torch() -> None:
    q, k, v = inputs((2, 3), 5, 7)
    mask = rand(5, 7) > 0
    assert torch.equal(
        scaled_dot_product_attention(q, k, v, mask, 0.0, False),
        scaled_dot_product_attention(q, k, v, attn_mask=mask),
    )
    assert torch.equal(
        scaled_dot_product_attention(q, k, v, None, 0.0, True),
        scaled_dot_product_attention(query=q, key=k, value=v, is_causal=True),
    )


def test_what_torch_refuses_is_refused() -> None:
    q, k, v = inputs((2, 4), 5, 7)
    for tensors, call in (
        ((q, k[:, :2], v[:, :2]), {}),
        ((q[0, 0, 0], k, v), {}),
        ((q, k, v), {"attn_mask": rand(1, 1, 1, 5, 7)}),
        ((q, k, v), {"dropout_p": 1.5}),
        ((q, k.half(), v), {}),
        ((q, k, v.double()), {}),
        ((q.to("meta"), k, v), {}),
        ((q.int(), k.int(), v.int()), {}),
        ((q, k[..., :6], v), {}),
        ((q, k[:, :3], v[:, :3]), {"enable_gqa": True}),
        ((q, k, v), {"attn_mask": torch.zeros(5, 7, dtype=torch.int32)}),
        ((q, k, v), {"attn_mask": rand(4, 7)}),
        ((q, k, v), {"attn_mask": rand(3, 4, 5, 7)}),
    ):
        with pytest.raises(RuntimeError):
            F.scaled_dot_product_attention(*tensors, **call)
        with pytest.raises(RuntimeError):
            scaled_dot_product_attention(*tensors, **call)


def test_tensors_of_no_dimensions_are_refused() -> None:
    q, k, v = inputs((2, 4), 5, 7)
    for i in range(3):
        tensors = [torch.ones(()) if i == j else x for j, x in enumerate((q, k, v))]
        with pytest.raises(RuntimeError, match="each needs at least 2"):
            scaled_dot_product_attention(*tensors)


def test_arguments_of_the_wrong_type_are_type_errors() -> None:
    q, k, v = inputs((2, 4), 5, 7)
    for tensors, call in (
        ((q, k, None), {}),
        ((q, 3, v), {}),
        ((q, k, v), {"scale": "1"}),
        ((q, k, v), {"is_causal": 1}),
        ((q, k, v), {"attn_mask": [[1.0]]}),
    ):
        for attend in (F.scaled_dot_product_attention, scaled_dot_product_attention):
            with pytest.raises(TypeError):
                attend(*tensors, **call)


@pytest.mark.parametrize("sizes", [(0, 8), (8, 0), (0, 0)], ids=str)
def test_head_dims_of_no_size(sizes: tuple[int, int]) -> None:
    d, dv = sizes
    q, k, v = rand(2, 4, 5, d), rand(2, 4, 7, d), rand(2, 4, 7, dv)
    expected = (q @ k.mT).softmax(-1) @ v  # torch 2.12 gives other numbers for d = 0
    out = scaled_dot_product_attention(q, k, v, scale=1.0)
    torch.testing.assert_close(out, expected)


def test_tensors_of_no_size() -> None:
    of_four = (((0, 4), 5, 7), ((2, 4), 0, 7), ((2, 4), 5, 0))
    of_five = (((2, 3, 4), 0, 7), ((2, 3, 4), 5, 0), ((0, 3, 4), 5, 7))
    for lead, nq, nk in of_four + of_five:
        q, k, v = inputs(lead, nq, nk)
        assert_same_as_torch(q, k, v)
        assert_same_as_torch(q, k, v, is_causal=True)
        assert_same_as_torch(q, k, v, attn_mask=rand(*lead, nq, nk))
    q, k, v = inputs((2, 0), 5, 7)  # PyTorch 2.11 divides by the number of heads here
    assert scaled_dot_product_attention(q, k, v).shape == (2, 0, 5, 8)


def test_masks_of_five_dimensions() -> None:
    q, k, v = inputs((2, 3, 4), 5, 7)
    for lead in ((2, 3, 4), (1, 3, 1), (2, 1, 4), (3, 4)):
        assert_same_as_torch(q, k, v, attn_mask=rand(*lead, 5, 7))
        assert_same_as_torch(q, k, v, attn_mask=rand(*lead, 5, 7) > -1)


def test_a_mask_together_with_is_causal_is_refused() -> None:
    # PyTorch's documentation calls this an error, but some of its CPU kernels accept it.
    q, k, v = inputs((2, 4), 5, 7)
    with pytest.raises(RuntimeError, match="attn_mask should not be set when is_causal=True"):
        scaled_dot_product_attention(q, k, v, attn_mask=rand(5, 7) > 0, is_causal=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("needs_grad", "autocast"),
    [
        pytest.param(False, False, id="no-grad-plain"),
        pytest.param(False, True, id="no-grad-autocast", marks=pytest.mark.rest),
        pytest.param(True, False, id="grad-plain", marks=pytest.mark.rest),
        pytest.param(True, True, id="grad-autocast"),
    ],
)
def test_torch_compile_takes_it_whole(autocast: bool, needs_grad: bool) -> None:
    q, k, v = inputs((2, 4), 5, 7)
    q.requires_grad_(needs_grad)
    torch._dynamo.reset()
    compiled = torch.compile(scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    for call in ({}, {"is_causal": True}, {"attn_mask": rand(5, 7)}):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            expected = scaled_dot_product_attention(q, k, v, **call)
            out = compiled(q, k, v, **call)
        assert out.dtype == expected.dtype
        torch.testing.assert_close(out, expected)


@pytest.mark.slow
def test_torch_compile_takes_lengths_that_depend_on_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._dynamo.config, "capture_dynamic_output_shape_ops", True)
    torch._dynamo.reset()

    def attend(q: Tensor, k: Tensor, kept: Tensor) -> Tensor:
        k = k[:, :, kept.nonzero().flatten()]
        return scaled_dot_product_attention(q, k, k)

    q, k, _ = inputs((2, 4), 5, 7)
    kept = torch.tensor([1, 1, 0, 1, 0, 1, 1])
    found = torch.compile(attend, fullgraph=True, backend="aot_eager")(q, k, kept)
    torch.testing.assert_close(found, attend(q, k, kept))


@pytest.mark.slow
def test_torch_compile_is_asked_nothing_that_old_versions_cannot_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @torch.compiler.disable
    def untraceable(device: str) -> bool:
        return True

    monkeypatch.setattr(torch.amp, "is_autocast_available", untraceable)
    test_torch_compile_takes_it_whole(True, False)


def test_dropout_runs_torch_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons: list[str] = []
    monkeypatch.setattr(_sdpa, "note_fallback", lambda reason, stacklevel: reasons.append(reason))
    q, k, v = inputs((2, 4), 5, 7)
    torch.manual_seed(0)
    expected = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(0)
    assert torch.equal(scaled_dot_product_attention(q, k, v, dropout_p=0.5), expected)
    assert len(reasons) == 1
    assert "dropout" in reasons[0]
    scaled_dot_product_attention(q, k, v)
    assert len(reasons) == 1


@pytest.mark.parametrize(
    ("dtype", "heads", "gpu", "faster"),
    [
        (torch.bfloat16, (4, 4), "A100", True),
        (torch.bfloat16, (4, 4), "H200", True),  # of so few rows
        (torch.bfloat16, (4, 2), "H200", True),
        (torch.float32, (4, 4), "H200", True),
        (torch.float32, (4, 2), "H200", False),  # PyTorch's fp32 kernel shares no keys
        (torch.float16, (4, 4), "T4", True),
        (torch.bfloat16, (4, 4), None, False),
    ],
)
def test_dropout_goes_to_pytorchs_fused_kernels_where_there_are_any(
    dtype: torch.dtype,
    heads: tuple[int, int],
    gpu: str | None,
    faster: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, k, v = (torch.empty(1, n, 64, 64, dtype=dtype, device="meta") for n in (*heads, heads[1]))
    decision = archflash.explain(q, k, v, device=gpu or "cpu")
    assert _dispatch.pytorch_drops_faster(decision.problem, decision.device) == faster
    monkeypatch.setattr(_sdpa, "_may_drop", lambda query, dropout_p: True)
    monkeypatch.setattr(_sdpa, "device_of", lambda problem, index: (decision.device, None))
    noted: list[str] = []
    monkeypatch.setattr(_sdpa, "note_fallback", lambda reason, stacklevel: noted.append(reason))
    q, k, v = (torch.randn(x.shape).to(dtype) for x in (q, k, v))
    archflash.stats(reset=True)
    out = scaled_dot_product_attention(q, k, v, dropout_p=0.5, enable_gqa=heads[0] != heads[1])
    assert out.shape == q.shape
    declined = archflash.stats(reset=True).declined
    if not faster and gpu is not None:  # a kernel of archflash drops them
        assert (declined, noted) == ({}, [])
        return
    (reason,) = declined
    assert ("faster" in reason) == faster
    assert bool(noted) != faster  # what PyTorch does better is nothing to warn of


@pytest.mark.parametrize(
    ("gpu", "rows", "d", "options", "faster"),
    [
        ("H200", 128, 64, {}, False),
        ("H200", 2048, 128, {"causal": True}, False),
        ("H200", 100, 64, {}, True),
        ("H200", 2048, 32, {}, True),
        ("H200", 2048, 192, {}, True),
        ("H200", 2048, 64, {"attn_mask": torch.ones(1, 1, 1, 1, device="meta")}, True),
        ("A100", 2048, 64, {}, True),
    ],
)
def test_dropout_stays_here_where_hopper_drops_faster(
    gpu: str, rows: int, d: int, options: dict[str, Any], faster: bool
) -> None:
    q = torch.empty(2, 4, rows, d, dtype=torch.bfloat16, device="meta")
    decision = archflash.explain(q, q, q, device=gpu, **options)
    assert _dispatch.pytorch_drops_faster(decision.problem, decision.device) == faster


def test_dropout_reaches_the_kernel_that_is_forced() -> None:
    q, k, v = (x.half() for x in inputs((1, 2), 20, 20, 16))
    archflash.stats(reset=True)
    with archflash.force("ampere"):
        out = scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    assert out.shape == v.shape
    assert archflash.stats().declined == {}


def test_it_may_take_the_place_of_pytorchs_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """As programs do that cannot be edited. What is left to PyTorch must not come back here."""
    pytorchs = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", scaled_dot_product_attention)
    q, k, v = inputs((2, 4), 7, 7)
    mask = torch.ones(7, 7, dtype=torch.bool).tril()
    calls: list[dict[str, Any]] = [{}, {"is_causal": True}, {"attn_mask": mask}]
    for given in calls:
        got = F.scaled_dot_product_attention(q, k, v, **given)
        torch.testing.assert_close(got, pytorchs(q, k, v, **given))
    assert F.scaled_dot_product_attention(q, k, v, dropout_p=0.5).shape == q.shape
    assert F.scaled_dot_product_attention(q[..., :0], k[..., :0], v).shape == q.shape
