"""key_indices without kernels: the implementation `torch`, gradients, checks and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from examples import sparse
from torch import Tensor

import archflash
from archflash import _archflash as native
from archflash import _key_lists, masks, reference
from archflash._api import find_device, make_problem


def lists(*shape: int, keys: int, seed: int = 0) -> Tensor:
    """Lists of distinct keys, some entries -1 or beyond the keys."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(*shape[:3], max(keys, shape[3]), generator=generator).argsort(-1)
    chosen = order[..., : shape[3]].int()
    return torch.where(torch.rand(shape, generator=generator) < 0.2, -1, chosen)


def qkv(nq: int, nk: int, heads: tuple[int, int] = (4, 2), batch: int = 2) -> list[Tensor]:
    torch.manual_seed(3)
    return [
        torch.randn(batch, h, n, 16) for h, n in ((heads[0], nq), (heads[1], nk), (heads[1], nk))
    ]


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal-sinks": {"causal": True, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "window-softcap": {"window": (9, 3), "softcap": 2.0},
    "short-lists": {"topk_lengths": torch.tensor([[[4]], [[0]]], dtype=torch.int32)},
}


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("name", CALLS)
def test_torch_attends_to_listed_keys(name: str, layout: str) -> None:
    q, k, v = qkv(5, 30)
    call = {**CALLS[name], "key_indices": lists(2, 2, 5, 12, keys=30), "layout": layout}
    if layout == "bnhd":
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    out, lse = archflash.attention(q, k, v, **call, return_lse=True)
    expected, expected_lse = reference.attention(q, k, v, **call)
    assert reference.check(out, expected, reference.baseline(q, k, v, **call)).ok
    assert reference.check_lse(lse, expected_lse).ok


def test_a_list_for_64_rows_is_that_of_each_of_them() -> None:
    q, k, v = qkv(70, 30)
    shared = lists(2, 1, 2, 12, keys=30)
    each = shared.repeat_interleave(64, 2)[:, :, :70]
    results = [archflash.attention(q, k, v, key_indices=x) for x in (shared, each)]
    assert torch.equal(*results)
    expected = [reference.attention(q, k, v, key_indices=x)[0] for x in (shared, each)]
    assert torch.equal(*expected)
    torch.testing.assert_close(results[0].double(), expected[0], atol=1e-5, rtol=1e-5)


def test_a_dropout_of_0_is_none() -> None:
    q, k, v = qkv(5, 30)
    call = {"key_indices": lists(2, 2, 5, 12, keys=30)}
    expected = archflash.attention(q, k, v, **call)
    assert torch.equal(archflash.attention(q, k, v, dropout_p=0.0, **call), expected)
    with pytest.raises(ValueError, match="dropout_p is given with key_indices"):
        archflash.attention(q, k, v, dropout_p=0.1, **call)


def test_a_key_named_twice_counts_twice_and_the_check_refuses_it() -> None:
    q, k, v = qkv(1, 8, (1, 1), batch=1)
    twice = torch.tensor([[[[2, 5, 2, -1, -1]]]], dtype=torch.int32)
    out = archflash.attention(q, k, v, key_indices=twice)
    rows = torch.tensor([2, 5, 2])
    expected = archflash.attention(q, k[:, :, rows], v[:, :, rows])
    torch.testing.assert_close(out, expected)
    with pytest.raises(ValueError, match=r"key_indices\[0, 0, 0\] names key 2 twice"):
        _key_lists.check(twice, None, 8)
    _key_lists.check(twice, torch.tensor([[[2]]]), 8)  # the second one does not count
    _key_lists.check(twice, None, 2)  # neither names a key


@pytest.mark.parametrize("how", ["contiguous", "pages", "physical"])
def test_attention_with_kvcache_checks_and_serves_lists(how: str) -> None:
    torch.manual_seed(5)
    lengths = torch.tensor([13, 24], dtype=torch.int32)
    pages = torch.tensor([[5, 1, 0], [2, 4, 6]], dtype=torch.int32)
    caches = [
        torch.randn(2, 24, 2, 16) if how == "contiguous" else torch.randn(7, 8, 2, 16) for _ in "kv"
    ]
    q = torch.randn(2, 3, 4, 16)
    call: dict[str, Any] = {"key_indices": lists(2, 2, 3, 10, keys=24)}
    if how == "physical":
        call |= {"key_indices": lists(2, 2, 3, 10, keys=56), "physical_indices": True}
    else:
        call |= {"cache_seqlens": lengths, "causal": True}
        call |= {"page_table": pages} if how == "pages" else {}
    out, lse = archflash.attention_with_kvcache(q, *caches, **call, check=True, return_lse=True)
    expected, expected_lse = reference.attention_with_kvcache(q, *caches, **call)
    baseline = reference.baseline_with_kvcache(q, *caches, **call)
    assert reference.check(out, expected, baseline).ok
    assert reference.check_lse(lse, expected_lse).ok
    call["key_indices"] = call["key_indices"].clone()
    call["key_indices"][1, 0, 2, :2] = 7
    with pytest.raises(ValueError, match=r"key_indices\[1, 0, 2\] names key 7 twice"):
        archflash.attention_with_kvcache(q, *caches, **call, check=True)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_gradients_are_those_of_the_formula(compiled: bool) -> None:
    q, k, v = (x.requires_grad_() for x in qkv(4, 20))
    sinks = torch.randn(4, requires_grad=True)
    given = lists(2, 2, 4, 9, keys=20)
    attention = archflash.attention
    if compiled:
        attention = torch.compile(attention, backend="aot_eager")
    out = attention(q, k, v, key_indices=given, sinks=sinks, causal=True)
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v, sinks), dout)
    mask = masks.from_key_indices(given, 4, 20).repeat_interleave(2, 1)
    plain = [x.detach() for x in (q, k, v)]
    expected = reference.attention_backward(
        dout, *plain, attn_mask=mask, sinks=sinks.detach(), causal=True
    )
    wanted = (expected.dq, expected.dk, expected.dv, expected.dsinks)
    for x, want in zip(found, wanted, strict=True):
        assert want is not None
        torch.testing.assert_close(x.double(), want, atol=1e-5, rtol=1e-5)


INT = torch.zeros(2, 1, 5, 4, dtype=torch.int32)
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "dtype": ({"key_indices": INT.long()}, TypeError, r"torch\.int64: it must be torch\.int32"),
    "shape": (
        {"key_indices": INT[:, :, :3]}, ValueError,
        r"shape \(2, 1, 3, 4\): it must be \(2 or 1, 2 or 1, 5 or 1, n\)",
    ),
    "empty": ({"key_indices": INT[..., :0]}, ValueError, "n at least 1: a list of keys"),
    "strided": ({"key_indices": INT.mT.contiguous().mT}, ValueError, r"call \.contiguous\(\)"),
    "lengths-alone": ({"topk_lengths": INT[..., 0]}, ValueError, "without key_indices"),
    "lengths-shape": (
        {"key_indices": INT, "topk_lengths": INT}, ValueError, r"\(2 or 1, 2 or 1, 5 or 1\)"
    ),
    "mask": (
        {"key_indices": INT, "attn_mask": torch.ones(5, 30, dtype=torch.bool)}, ValueError,
        "attn_mask is given with key_indices",
    ),
    "dropout": ({"key_indices": INT, "dropout_p": 0.1}, ValueError, "dropout_p is given"),
    "invariant": ({"key_indices": INT, "batch_invariant": True}, ValueError, "batch_invariant is"),
}  # fmt: skip


@pytest.mark.parametrize("name", ["attn_mask", "alibi_slopes", "key_ranges", "dropout_p"])
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_gradients_refuse_what_may_not_stand_beside_lists(name: str, backend: str | None) -> None:
    q, k, v = (x.requires_grad_() for x in qkv(5, 30))
    values = {
        "attn_mask": torch.zeros(5, 30, dtype=torch.bool),
        "alibi_slopes": torch.ones(4),
        "key_ranges": torch.zeros(1, 1, 5, 1, 2, dtype=torch.int32),
        "dropout_p": 0.5,
    }
    call: dict[str, Any] = {"key_indices": lists(2, 2, 5, 12, keys=30), name: values[name]}
    attend: Any = archflash.attention
    if backend is not None:
        torch._dynamo.reset()
        attend = torch.compile(attend, backend=backend)
    with pytest.raises(Exception, match=f"{name} is given with key_indices"):
        attend(q, k, v, **call)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_lists_are_refused(name: str) -> None:
    call, error, words = WRONG[name]
    with pytest.raises(error, match=words):
        archflash.attention(*qkv(5, 30), **call)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            {"cache_seqlens": torch.ones(2, dtype=torch.int32)},
            "cache_seqlens is given with",
        ),
        ({"causal": True}, "causal is True with physical_indices=True"),
        ({"window": (1, 1)}, "window is given with physical_indices=True"),
        ({"key_indices": None}, "physical_indices is True without key_indices"),
    ],
)
def test_places_in_a_cache_stand_alone(more: dict[str, Any], words: str) -> None:
    q, cache = torch.randn(2, 5, 4, 16), torch.randn(3, 8, 2, 16)
    call = {"key_indices": INT, "physical_indices": True, **more}
    with pytest.raises(ValueError, match=words):
        archflash.attention_with_kvcache(q, cache, cache, **call)


@pytest.mark.parametrize(
    ("device", "dtype", "chosen"),
    [
        ("A100", torch.bfloat16, "ampere"), ("RTX 3090", torch.float16, "ampere"),
        ("RTX 5090", torch.bfloat16, "ampere"), ("A100", torch.float32, "simt"),
        ("T4", torch.float32, "simt"), ("H200", torch.bfloat16, "hopper"),
        ("H200", torch.float32, "simt"),
    ],
)  # fmt: skip
def test_every_gpu_has_a_kernel_for_lists(device: str, dtype: torch.dtype, chosen: str) -> None:
    q = torch.empty(2, 8, 5, 64, dtype=dtype, device="meta")
    k = torch.empty(2, 2, 900, 64, dtype=dtype, device="meta")
    decision = archflash.explain(q, k, k, key_indices=INT.to("meta"), device=device)
    assert decision.chosen == chosen, str(decision)


def test_pytorch_comes_before_no_kernel_for_lists() -> None:
    """Its kernels have none, also where they are faster than those of mma.sync."""
    x = torch.empty(2, 8, 300, 64, dtype=torch.bfloat16, device="meta")
    lists = torch.empty(2, 8, 300, 64, dtype=torch.int32, device="meta")
    decision = archflash.explain(x, x, x, key_indices=lists, device="B200")
    assert decision.chosen == "ampere", str(decision)
    assert "cuDNN" not in str(decision)


@pytest.mark.parametrize(
    ("heads", "rows", "tile"),
    [
        (64, 1, "d128_gather"), (65, 1, "d128_gather_large"), (1, 64, "d128_gather"),
        (2, 64, "d128_gather_large"),
    ],
)  # fmt: skip
def test_hopper_has_larger_tiles_where_more_rows_share_a_list(
    heads: int, rows: int, tile: str
) -> None:
    q = torch.empty(1, heads, 640, 128, dtype=torch.bfloat16, device="meta")
    k = torch.empty(1, 1, 900, 128, dtype=torch.bfloat16, device="meta")
    lists = torch.empty(1, 1, 640 // rows, 500, dtype=torch.int32, device="meta")
    plan = archflash.explain(q, k, k, key_indices=lists, device="H200").plan
    assert plan is not None
    assert plan.tile.name == tile


@pytest.mark.parametrize("backward", [False, True])
def test_gradients_are_explained_as_those_of_a_mask(backward: bool) -> None:
    q = torch.empty(2, 8, 5, 64, dtype=torch.bfloat16, device="meta", requires_grad=not backward)
    k = torch.empty(2, 2, 90, 64, dtype=torch.bfloat16, device="meta")
    call = {"key_indices": INT.to("meta"), "backward": backward, "device": "A100"}
    decision = archflash.explain(q, k, k, **call)
    assert decision.chosen == "ampere"
    assert "attn_mask" in str(decision).splitlines()[0]
    assert "key_indices" not in str(decision)


@pytest.mark.parametrize("kernel", ["ampere", "hopper", "blackwell_dc"])
def test_no_backward_pass_takes_lists(kernel: str) -> None:
    x = torch.empty(1, 2, 5, 64, dtype=torch.bfloat16, device="meta")
    given = make_problem(x, x, x, key_indices=INT[:1].to("meta"), return_lse=True)
    device = find_device(native.describe(kernel).home_device)
    into = (given.as_if_on_cuda(), device, x, x, x, x)
    reasons = native.plan_backward(kernel, *into, False, False, False, False)
    assert any(reason.startswith("key_indices in a call whose") for reason in reasons), reasons


def test_the_example_gives_what_a_mask_gives() -> None:
    assert sparse.main(["--check"])
