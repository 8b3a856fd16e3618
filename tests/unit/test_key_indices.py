"""key_indices without kernels: the implementation `torch`, gradients, checks and refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from examples import sparse
from torch import Tensor

import archflash
from archflash import _archflash as native
from archflash import _gradients, _key_lists, masks, reference
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


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("list_rows", [1, 64])
@pytest.mark.parametrize(
    "more",
    [
        {}, {"causal": True}, {"window": (9, 20)},
        {"causal": True, "q_offset": torch.tensor([5, 70], dtype=torch.int32)},
    ],
    ids=str,
)  # fmt: skip
def test_keys_that_no_list_names_reach_no_call_with_a_mask(
    more: dict[str, Any], list_rows: int, layout: str
) -> None:
    """A mask in the place of lists serves some gradients; its kernels multiply hidden keys by 0."""
    nq, nk = 70, 150
    q, k, v = qkv(nq, nk)
    given = lists(2, 2, -(-nq // list_rows), 3, keys=nk)
    lengths = torch.tensor([[[1], [3]]], dtype=torch.int32)
    mask = masks.from_key_indices(given, nq, nk, lengths).repeat_interleave(2, 1) > -math.inf
    none, ones = torch.zeros(2, 4, nk, nk), torch.eye(nk)[None, None].expand(2, 4, nk, nk)
    seen = archflash.attention(none[:, :, :nq], none, ones, attn_mask=mask, **more) != 0
    hidden = ~seen.any(2).reshape(2, 2, 2, nk).any(2)
    assert hidden.any()
    assert not hidden.all()
    if layout == "bnhd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        hidden = hidden.transpose(1, 2)
    call = {"causal": False, "window": None, "q_offset": None, "layout": layout, **more}
    call |= {"key_indices": given, "topk_lengths": lengths}
    for x, cleaned in zip((k, v), _key_lists.without_unnamed(q, k, v, call), strict=True):
        assert torch.equal(cleaned, x.masked_fill(hidden[..., None], 0))


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


def test_lists_of_no_heads_have_gradients() -> None:
    x = torch.ones(2, 0, 5, 16, requires_grad=True)
    empty = torch.zeros(2, 0, 5, 4, dtype=torch.int32)
    archflash.attention(x, x, x, key_indices=empty).sum().backward()
    assert x.grad is not None


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
        ({"cache_seqlens": torch.ones(2, dtype=torch.int32)}, "cache_seqlens is given with"),
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


BF16, F32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("dtype", "deterministic", "said"),
    [
        (BF16, False, "key_indices"), (BF16, True, "key_indices"), (F32, False, "key_indices"),
        (F32, True, "key_indices"),
    ],
)  # fmt: skip
def test_gradients_are_explained_as_they_are_computed(
    dtype: torch.dtype, deterministic: bool, said: str
) -> None:
    """From the lists where a kernel reads them, else with a mask."""
    q = torch.empty(2, 8, 5, 64, dtype=dtype, device="meta")
    k = torch.empty(2, 2, 90, 64, dtype=dtype, device="meta")
    with _gradients.asked_for(deterministic):
        decision = archflash.explain(
            q, k, k, key_indices=INT.to("meta"), backward=True, device="A100"
        )
    assert decision.chosen == ("simt" if dtype == F32 else "ampere"), str(decision)
    assert said in str(decision).splitlines()[0]
    assert ("_lists" in str(decision)) == (said == "key_indices")


def of_lists(
    heads: tuple[int, int], rows: int, keys: int, n: int, *, list_rows: int = 1, d: int = 64,
    list_heads: int = 1, dtype: torch.dtype = BF16, device: str = "H200", **more: Any,
) -> Any:  # fmt: skip
    """The decision of a call whose gradients are needed, or with backward=True of these."""
    wanted = not more.get("backward", False)
    q = torch.empty(1, heads[0], rows, d, dtype=dtype, device="meta", requires_grad=wanted)
    k, v = (
        torch.empty(1, heads[1], keys, dim, dtype=dtype, device="meta")
        for dim in (d, 128 if d == 192 else d)
    )
    shape = (1, list_heads, -(-rows // list_rows), n)
    given = torch.empty(shape, dtype=torch.int32, device="meta")
    return archflash.explain(q, k, v, key_indices=given, device=device, **more)


@pytest.mark.parametrize(("device", "chosen"), [("A100", "ampere"), ("H200", "hopper")])
def test_the_output_of_a_call_with_gradients_is_that_of_lists(device: str, chosen: str) -> None:
    decision = of_lists((8, 2), 5, 90, 4, device=device)
    assert decision.chosen == chosen
    assert decision.plan is not None
    assert all("gather" in kernel for kernel in decision.plan.kernels)


@pytest.mark.parametrize(
    ("heads", "list_heads", "list_rows", "keys", "n", "by_lists"),
    [
        # On an H200 lists of 112 took 4.2 ms where each head of q has one of k, a mask 2.1.
        ((16, 16), 1, 1, 4096, 112, False), ((16, 16), 1, 1, 1024, 16, True),
        # A mask of each head takes 8.7 ms.
        ((16, 16), 16, 1, 4096, 112, True), ((16, 16), 16, 1, 4096, 512, False),
        ((32, 8), 1, 1, 8192, 2048, False), ((16, 1), 1, 1, 4096, 1888, True),
        ((16, 16), 1, 64, 4096, 2048, True), ((64, 1), 1, 1, 4096, 2048, True),
        # A mask of 16 GiB
        ((16, 16), 1, 1, 65536, 65536, True),
    ],
)  # fmt: skip
def test_a_mask_is_read_where_that_was_faster(
    heads: tuple[int, int], list_heads: int, list_rows: int, keys: int, n: int, by_lists: bool
) -> None:
    for backward in (False, True):
        decision = of_lists(
            heads, keys, keys, n, list_rows=list_rows, d=128, list_heads=list_heads,
            backward=backward,
        )  # fmt: skip
        assert ("key_indices" in str(decision).splitlines()[0]) == by_lists, str(decision)
        assert decision.plan is not None
        if backward:
            assert any(x.endswith("_lists") for x in decision.plan.kernels) == by_lists


@pytest.mark.parametrize(
    ("heads", "list_heads", "list_rows", "keys", "n", "d", "in_any_order", "in_order"),
    [
        # Both passes on an H200, in order: lists of 64 took 3.7 ms, a mask 1.4.
        ((16, 16), 1, 1, 4096, 64, 64, True, False), ((16, 1), 1, 1, 4096, 1024, 128, True, False),
        ((64, 1), 1, 1, 2048, 2040, 128, True, True), ((32, 8), 1, 1, 4096, 128, 128, True, False),
        ((16, 16), 16, 64, 2048, 512, 128, True, True),
    ],
)  # fmt: skip
def test_ordered_sums_of_lists_cost_more_than_those_of_a_mask(
    heads: tuple[int, int], list_heads: int, list_rows: int, keys: int, n: int, d: int,
    in_any_order: bool, in_order: bool,
) -> None:  # fmt: skip
    for deterministic, by_lists in ((False, in_any_order), (True, in_order)):
        with _gradients.asked_for(deterministic):
            decision = of_lists(
                heads, keys, keys, n, list_rows=list_rows, d=d, list_heads=list_heads,
                backward=True,
            )  # fmt: skip
        assert ("key_indices" in str(decision).splitlines()[0]) == by_lists, str(decision)


@pytest.mark.parametrize(
    ("heads", "list_rows", "d", "kernel", "launches", "gib"),
    [
        ((16, 8), 64, 64, "hopper_attention_bwd_bf16_d64_kept_lists", 1, 0.5),
        # 2 GiB in all, of which a launch has seven rounds of CTAs.
        ((32, 8), 64, 128, "hopper_attention_bwd_bf16_d128_kept_lists", 3, 0.96),
        ((128, 1), 1, 192, "hopper_attention_bwd_bf16_d192_kept_lists", 11, 1.05),
    ],
)  # fmt: skip
def test_what_lists_keep_in_order_comes_in_parts_of_1_gib(
    heads: tuple[int, int], list_rows: int, d: int, kernel: str, launches: int, gib: float
) -> None:
    with _gradients.asked_for(True):
        plan = of_lists(heads, 8192, 8192, 2048, list_rows=list_rows, d=d, backward=True).plan
    assert plan is not None
    assert plan.kernels[2::2] == [kernel] * launches
    assert {x.split("_bf16")[0] for x in plan.kernels[3::2]} == {kernel[:6] + "_backward_kept"}
    assert plan.workspace_bytes / 2**30 == pytest.approx(gib, rel=0.02)


@pytest.mark.parametrize(
    ("heads", "list_rows", "keys", "n", "by_lists"),
    [
        # Both passes on an H200, by lists and by a mask: 0.9 ms, 2.3; 17.7, 2.2; 1.2, 4.1.
        ((8, 8), 64, 2048, 256, True), ((8, 8), 1, 1024, 512, False), ((4, 1), 1, 1024, 256, True),
    ],
)  # fmt: skip
def test_fp32_reads_lists_where_that_was_faster(
    heads: tuple[int, int], list_rows: int, keys: int, n: int, by_lists: bool
) -> None:
    decision = of_lists(heads, keys, keys, n, list_rows=list_rows, d=128, dtype=F32)
    assert ("key_indices" in str(decision).splitlines()[0]) == by_lists, str(decision)
    assert (decision.chosen == "simt") == by_lists


@pytest.mark.parametrize("forced", [None, "ampere", "hopper"])
def test_deterministic_gradients_of_lists_too_long_to_sort_are_those_of_a_mask(
    forced: str | None,
) -> None:
    for n, said in ((16384, "key_indices"), (16385, "attn_mask")):
        with _gradients.asked_for(True):
            decision = of_lists(
                (8, 2), 64, 400000, n, list_rows=64, backward=True, implementation=forced
            )
        assert said in str(decision).splitlines()[0], str(decision)


def test_chains_of_ordered_sums_suffice_for_the_ctas_that_run() -> None:
    """More chains where lists are short or few heads have all CTAs, within the memory for sums."""
    sizes = {}
    for heads, keys, n in (((32, 8), 8192, 2048), ((128, 1), 8192, 2048), ((128, 1), 8192, 64)):
        with _gradients.asked_for(True):
            plan = of_lists(
                heads, 8192, keys, n, list_rows=64, d=128, backward=True, device="A100"
            ).plan  # fmt: skip
        assert plan is not None
        sums = heads[1] * keys * 256 * 4
        sizes[heads, n] = (plan.workspace_bytes - 8 * heads[0] * 8192) // sums  # without the terms
    assert sizes == {((32, 8), 2048): 2, ((128, 1), 2048): 11, ((128, 1), 64): 64}


def test_an_approximation_with_gradients_is_computed_as_it_is_explained() -> None:
    """Its kernels take masks and no lists."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 20, 64).to(BF16).requires_grad_() for n in (2, 1, 1))
    lists = torch.arange(0, 20, 2, dtype=torch.int32).repeat(20, 1)[None, None]
    call = {"key_indices": lists, "approximate": "int8", "implementation": "ampere"}
    plan = archflash.explain(q, k, v, device="A100", **call).plan
    assert plan is not None
    assert any("int8" in kernel for kernel in plan.kernels)
    out = archflash.attention(q, k, v, **call)
    exact = archflash.reference.attention(q, k, v, key_indices=lists, return_lse=False)
    assert (out.double() - exact).norm() < 0.05 * exact.norm()
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.parametrize(
    ("kernel", "deterministic", "why"),
    [
        ("blackwell_dc", False, "key_indices: blackwell_dc does not"),
        ("simt", True, "key_indices in a call"), ("hopper", True, "key_indices in a call"),
        ("ampere", True, "key_indices in a call"),
    ],
)  # fmt: skip
def test_backward_passes_that_do_not_read_lists_say_so(
    kernel: str, deterministic: bool, why: str
) -> None:
    x = torch.empty(1, 2, 5, 64, dtype=F32 if kernel == "simt" else BF16, device="meta")
    n = 20000 if deterministic else 4  # too many to sort
    of_rows = torch.empty(1, 1, 5, n, dtype=torch.int32, device="meta")
    given = make_problem(x, x, x, key_indices=of_rows, return_lse=True)
    device = find_device(native.describe(kernel).home_device)
    into = (given.as_if_on_cuda(), device, x, x, x, x)
    reasons = native.plan_backward(kernel, *into, False, False, False, deterministic)
    assert isinstance(reasons, list)
    assert any(reason.startswith(why) for reason in reasons), reasons


@pytest.mark.parametrize("kernel", ["ampere", "hopper", "simt"])
def test_gradients_may_become_deterministic_behind_the_forward_pass(kernel: str) -> None:
    dtype = F32 if kernel == "simt" else BF16
    q, k, v = (x.to(dtype).requires_grad_() for x in qkv(2, 20, batch=1))
    given = lists(1, 2, 2, 9, keys=20)
    out = archflash.attention(q, k, v, key_indices=given, implementation=kernel)
    dout = torch.randn_like(out)
    with _gradients.asked_for(True):
        found = torch.autograd.grad(out, (q, k, v), dout)
    plain = [x.detach() for x in (q, k, v)]
    exact = reference.attention_backward(dout, *plain, key_indices=given)
    for x, want in zip(found, (exact.dq, exact.dk, exact.dv), strict=True):
        torch.testing.assert_close(x.double(), want, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize(
    ("heads", "rows", "d", "kernel"),
    [
        ((4, 1), 1, 128, "ampere d128_few"), ((64, 1), 1, 128, "ampere d128"),
        ((65, 1), 1, 128, "hopper d128"), ((1, 1), 64, 64, "ampere d64"),
        ((8, 2), 64, 64, "hopper d64"), ((8, 2), 64, 192, "hopper d192"),
        ((72, 1), 1, 256, "ampere d256_few"), ((4, 1), 1, 128, "simt d128"),
        ((8, 2), 64, 64, "simt d64"), ((1, 1), 64, 192, "simt d256"),
    ],
)  # fmt: skip
def test_tiles_of_gradients_have_as_many_rows_as_share_a_list(
    heads: tuple[int, int], rows: int, d: int, kernel: str
) -> None:
    folder, tile = kernel.split()
    dtype, word = (F32, "f32") if folder == "simt" else (BF16, "bf16")
    plan = of_lists(heads, 640, 900, 300, list_rows=rows, d=d, dtype=dtype, backward=True).plan
    assert plan is not None
    assert f"{folder}_attention_bwd_{word}_{tile}_lists" in plan.kernels


def test_the_example_gives_what_a_mask_gives() -> None:
    assert sparse.main(["--check"])
