"""attention_with_kvcache: what it means by the implementation `torch`, wrong calls, explain, check,
torch.compile. Kernels: tests/core_set/test_kvcache.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests import kvcache_cases
from tests.kvcache_cases import CacheCall, make, random_mask, random_ranges
from torch import Tensor

import archflash
from archflash import _archflash as native
from archflash import _kvcache, _options
from archflash._api import make_problem

BF16 = torch.bfloat16


def by_torch(call: CacheCall, **more: Any) -> tuple[Tensor, Tensor]:
    answer: tuple[Tensor, Tensor] = archflash.attention_with_kvcache(
        call.q, call.k_cache, call.v_cache, **call.options, return_lse=True, **more
    )
    return answer


CALLS: dict[str, Callable[[], CacheCall]] = {
    "contiguous": lambda: make([5, 0, 96], dtype=torch.float64),
    "causal-many-rows": lambda: make([5, 30], nq=7, causal=True, d=24, dv=40, softcap=3.0),
    "window-sinks-bhnd": lambda: make(
        [5, 60], nq=3, window=(11, 1), sinks=torch.tensor([0.5, -1, 2, 0]), layout="bhnd"
    ),
    "page-1": lambda: make([5, 20], page_size=1, capacity=24, shared_pages=3),
    "page-16-append": lambda: make([15, 17], page_size=16, n_new=2, nq=2, causal=True, dtype=BF16),
    "append-over-the-end": lambda: make([94, 96], n_new=3, nq=3, causal=True),
    "rotary-half": lambda: make([3, 70], n_new=4, nq=4, causal=True, rotary=32, dtype=BF16),
    "rotary-interleaved-leftpad": lambda: make(
        [9, 50], n_new=1, rotary=64, rotary_interleaved=True, leftpad=[2, 33], layout="bhnd"
    ),
    "leftpad-page-7": lambda: make([30, 9], page_size=7, leftpad=[8, 9], nq=2, window=(4, 4)),
    "rows-of-a-larger-cache": lambda: make([4, 8, 0], rows_of=[3, 0, 1], n_new=2, nq=2),
    "packed-queries": lambda: make(
        [40, 7, 0, 12], q_lengths=[3, 0, 1, 20], page_size=16, causal=True, n_new=1,
        sinks=torch.tensor([0.5, -1, 2, 0]),
    ),
    "packed-queries-rotary": lambda: make(
        [40, 7], q_lengths=[3, 5], window=(9, 0), n_new=5, rotary=16
    ),
    "fp8-cache": lambda: make(
        [40, 7], q_lengths=[3, 5], dtype=BF16, cache_dtype=torch.float8_e4m3fn, page_size=8,
        k_descale=torch.tensor([[0.5, 2.0], [1.0, 0.25]]), v_descale=torch.tensor([2.0, 0.5]),
    ),
    "fp8-cache-append": lambda: make(
        [40, 7], dtype=BF16, cache_dtype=torch.float8_e5m2, n_new=2, k_descale=torch.tensor(0.5)
    ),
    "fp8-cache-append-rotated": lambda: make(
        [40, 7], dtype=BF16, cache_dtype=torch.float8_e4m3fn, n_new=2, rotary=64, causal=True
    ),
    "fp8-cache-append-rotated-in-part": lambda: make(
        [40, 7], dtype=BF16, cache_dtype=torch.float8_e5m2, n_new=2, rotary=32, page_size=16
    ),
    "fp8-packed-queries-descales": lambda: make(
        [40, 7], q_lengths=[3, 5], dtype=torch.float8_e4m3fn,
        q_descale=torch.tensor([[0.5, 2.0, 1.0, 4.0], [1.0, 0.25, 3.0, 0.5]]),
    ),
    "fp8-packed-queries-descales-of-heads": lambda: make(
        [40, 7], q_lengths=[3, 5], dtype=torch.float8_e4m3fn, q_descale=torch.tensor([0.5, 2.0]),
    ),
    "qv-rotary-append": lambda: make(
        [30, 9], d=16, dv=40, qv=True, n_new=2, nq=2, rotary=16, causal=True, page_size=8
    ),
    "qv-packed-queries-bhnd": lambda: make(
        [40, 7], d=16, dv=8, qv=True, q_lengths=[3, 5], layout="bhnd", scale=0.1
    ),
    "qv-fp8-cache-append-descales": lambda: make(
        [30, 9], d=16, dv=40, qv=True, n_new=2, dtype=BF16, cache_dtype=torch.float8_e4m3fn,
        k_descale=torch.tensor([[0.5, 3.0], [1.0, 0.25]]), v_descale=torch.tensor([2.0, 0.5]),
    ),
    "alibi-leftpad-append": lambda: make(
        [30, 9], leftpad=[8, 9], nq=3, n_new=1, alibi_slopes=torch.tensor([0.5, 0.0, 2.0, -0.25])
    ),
    "alibi-packed-queries-softcap": lambda: make(
        [40, 7], q_lengths=[3, 9], page_size=8, causal=True, softcap=3.0,
        alibi_slopes=torch.rand(2, 4, generator=torch.Generator().manual_seed(1)),
    ),
    "mask-of-a-tree-page-16": lambda: make(
        [15, 40, 97], page_size=16, capacity=112, nq=6, attn_mask=random_mask(3, 1, 6, 6)
    ),
    "mask-of-more-keys-than-there-are-packed-queries": lambda: make(
        [0, 5, 60], q_lengths=[3, 1, 9], n_new=2, attn_mask=random_mask(1, 4, 15, 20)
    ),
    "ranges-mask-leftpad-causal": lambda: make(
        [60, 9], leftpad=[8, 9], nq=12, causal=True, layout="bhnd",
        key_ranges=random_ranges(1, 4, 12, 4), attn_mask=random_mask(2, 1, 1, 7),
    ),
    "ranges-packed-queries-alibi": lambda: make(
        [80, 7], q_lengths=[3, 9], page_size=8, key_ranges=random_ranges(1, 1, 14, 3),
        alibi_slopes=torch.tensor([0.5, 0.0, 2.0, -0.25]),
    ),
    "chunks-leftpad-window": lambda: make(
        [30, 9], leftpad=[8, 9], nq=12, attention_chunk=5, window=(3, 1)
    ),
    "chunks-rotary-packed-queries": lambda: make(
        [40, 7], q_lengths=[3, 9], attention_chunk=4, n_new=1, rotary=16
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_torch_serves_a_call_as_the_reference_does(name: str) -> None:
    kvcache_cases.check(CALLS[name](), by_torch)


@pytest.mark.parametrize("paged", [True, False])
def test_a_pool_without_rows_has_nothing_to_see(paged: bool) -> None:
    cache, int32 = torch.zeros(0, 16, 2, 64), {"dtype": torch.int32}
    table, rows = torch.zeros(2, 3, **int32), torch.zeros(2, **int32)
    where = {"page_table": table} if paged else {"cache_batch_idx": rows}
    out, lse = archflash.attention_with_kvcache(
        torch.ones(2, 1, 4, 64), cache, cache, cache_seqlens=torch.zeros(2, **int32),
        return_lse=True, **where,
    )  # fmt: skip
    assert torch.equal(out, torch.zeros(2, 1, 4, 64))
    assert torch.equal(lse, torch.full((2, 4, 1), -torch.inf))


def test_qv_adds_its_product_with_v_to_the_scores() -> None:
    call = make([20, 20], nq=3, heads=(4, 1), d=16, dv=24, qv=True, dtype=torch.float64)
    keys, values = call.k_cache[:, :20], call.v_cache[:, :20]
    want = archflash.attention(
        torch.cat([call.q, call.options["qv"]], -1), torch.cat([keys, values], -1), values,
        layout="bnhd", return_lse=True,
    )  # fmt: skip
    for one, other in zip(by_torch(call), want, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("layout", ["bnhd", "bhnd"])
def test_a_latent_cache_is_k_and_v_in_one(layout: str) -> None:
    call = make(
        [20, 7], nq=2, n_new=2, heads=(4, 1), d=40, page_size=8, rotary=16, causal=True,
        layout=layout, dtype=torch.float64,
    )  # fmt: skip
    options = {name: x for name, x in call.options.items() if name != "v_new"}
    cache, new = call.k_cache.clone(), options["k_new"]
    mine = archflash.attention_with_kvcache(call.q, cache, **options, dv=24, return_lse=True)
    parts = CacheCall(
        call.q[..., 24:], call.k_cache[..., 24:], call.k_cache[..., :24],
        {**options, "k_new": new[..., 24:], "v_new": new[..., :24], "qv": call.q[..., :24]},
    )  # fmt: skip
    other = parts.copied()
    for one, want in zip(mine, by_torch(other), strict=True):
        torch.testing.assert_close(one, want)
    both = torch.cat([other.v_cache, other.k_cache], -1)
    torch.testing.assert_close(cache, both, equal_nan=True)
    assert not torch.equal(cache.nan_to_num(), call.k_cache.nan_to_num())


def test_a_query_sees_keys_of_its_own_chunk() -> None:
    call = make([13, 16], nq=1, attention_chunk=8, dtype=torch.float64, n_new=1)
    out, _ = by_torch(call)
    for number, (first, end) in enumerate([(8, 14), (16, 17)]):  # of the positions 13 and 16
        k, v = (x[number : number + 1, first:end] for x in (call.k_cache, call.v_cache))
        want = archflash.attention(call.q[number : number + 1], k, v, layout="bnhd")
        torch.testing.assert_close(out[number : number + 1], want)


def test_what_is_out_of_range_is_neither_read_nor_written() -> None:
    call = make([5, 20], n_new=2, nq=2, capacity=32, page_size=8)
    for wrong in ([-3, 20], [31, 1 << 30], [5, 32]):
        lengths = torch.tensor(wrong, dtype=torch.int32)
        mine = call.with_options(cache_seqlens=lengths).copied()
        out, _ = by_torch(mine)
        changed = (mine.k_cache != call.k_cache) & ~mine.k_cache.isnan()
        rows = sum(min(max(n + 2, 0), 32) - min(max(n, 0), 32) for n in wrong)
        assert int(changed.any(-1).any(-1).sum()) <= rows
        assert out.shape == call.q.shape
    table = call.options["page_table"].clone()
    table[0, 0], table[1, 2] = -1, 1000
    mine = call.with_options(page_table=table).copied()
    by_torch(mine)
    others = [int(page) for page in range(len(call.k_cache)) if page not in table]
    for page in others:
        assert bool(mine.k_cache[page].isnan().all()) == bool(call.k_cache[page].isnan().all())


def test_out_and_dtype_and_stride_order() -> None:
    call = make([5, 20], nq=3, dtype=BF16)
    out = torch.empty_like(call.q)
    assert by_torch(call, out=out)[0] is out
    assert torch.equal(out, by_torch(call)[0])
    turned = call.q.transpose(1, 2).contiguous().transpose(1, 2)
    got = archflash.attention_with_kvcache(turned, call.k_cache, call.v_cache, **call.options)
    assert got.stride() == turned.stride()
    wide = by_torch(call, out_dtype=torch.float32)[0]
    assert wide.dtype == torch.float32


# --- wrong calls ---

PAGED = {"page_size": 16, "n_new": 2, "rotary": 32}
# A latent cache in packed rows, and a list of its rows.
LATENT: dict[str, Any] = {
    "q": torch.zeros(2, 1, 4, 576, dtype=BF16), "v_cache": None, "dv": 512,
    "k_cache": torch.zeros(3, 8, 1, 656, dtype=torch.float8_e4m3fn), "packed_rows": "fp8_656",
}  # fmt: skip
LIST = torch.zeros(2, 1, 16, dtype=torch.int32)
WRONG: dict[str, tuple[dict[str, Any], Callable[[CacheCall], dict[str, Any]], type, str]] = {
    "lengths-shape": (
        {}, lambda c: {"cache_seqlens": torch.zeros(3, dtype=torch.int32)}, ValueError,
        r"cache_seqlens has shape \(3,\): it must be \(2,\), one number for each sequence",
    ),
    "lengths-dtype": (
        {}, lambda c: {"cache_seqlens": torch.zeros(2)}, TypeError,
        "cache_seqlens has dtype torch.float32: it must be torch.int32",
    ),
    "no-lengths": ({}, lambda c: {"cache_seqlens": None}, TypeError, "cache_seqlens is None"),
    "table-shape": (
        PAGED, lambda c: {"page_table": torch.zeros(3, 4, dtype=torch.int32)}, ValueError,
        r"page_table has shape \(3, 4\): it must be \(2, pages of a sequence\)",
    ),
    "table-and-rows": (
        PAGED, lambda c: {"cache_batch_idx": torch.zeros(2, dtype=torch.int32)}, ValueError,
        "cache_batch_idx is given with page_table: the page table says where each sequence is",
    ),
    "v-missing": (PAGED, lambda c: {"v_new": None}, ValueError, "v_new is missing: k_new and"),
    "new-shape": (
        PAGED, lambda c: {"v_new": c.options["v_new"][:, :1]}, ValueError,
        r"v_new has shape \(2, 1, 2, 64\): it must be \(2, 2, 2, 64\)",
    ),
    "new-dtype": (
        PAGED, lambda c: {"k_new": c.options["k_new"].double()}, TypeError,
        "k_new has dtype torch.float64: it must be torch.float32 as the cache is",
    ),
    "sin-missing": (PAGED, lambda c: {"rotary_sin": None}, ValueError, "rotary_sin is missing"),
    "rotary-too-wide": (
        PAGED, lambda c: dict.fromkeys(("rotary_cos", "rotary_sin"), torch.zeros(9, 40)),
        ValueError,
        r"rotary_cos has shape \(9, 40\): .* rotary_dim at most the head dim 64",
    ),
    "rotary-alone": (
        PAGED, lambda c: {"k_new": None, "v_new": None}, ValueError,
        "rotary_cos is given without k_new",
    ),
    "interleaved-alone": (
        {}, lambda c: {"rotary_interleaved": True}, ValueError,
        "rotary_interleaved is True without rotary_cos",
    ),
    "other-batch": (
        {}, lambda c: {"cache_batch_idx": None, "q": torch.zeros(1, 1, 4, 64),
                       "cache_seqlens": torch.zeros(1, dtype=torch.int32)}, ValueError,
        r"k_cache has 2 sequences and cache_seqlens is for 1: pass k_cache\[:1\]",
    ),
    "qv-shape": (
        {"dv": 32}, lambda c: {"qv": c.q}, ValueError,
        r"qv has shape \(2, 1, 4, 64\): it must be \(2, 1, 4, 32\), as q with the head dim of v",
    ),
    "qv-dtype": (
        {}, lambda c: {"qv": c.q.half()}, TypeError, "qv has dtype torch.float16: it must be torch",
    ),
    "qv-fp8": (
        {"dtype": torch.float8_e5m2}, lambda c: {"qv": c.q}, archflash.UnsupportedError,
        "qv with float8 q: not built yet",
    ),
    "mask-added": (
        {}, lambda c: {"attn_mask": torch.zeros(1, 1, 1, 9)}, TypeError,
        r"attn_mask has dtype torch.float32: with a cache it must be torch.bool \(True keeps\)",
    ),
    "mask-of-too-many-keys": (
        {}, lambda c: {"attn_mask": torch.ones(1, 1, 1, 97, dtype=torch.bool)}, ValueError,
        r"attn_mask has shape \(1, 1, 1, 97\): .* it must be \(2 or 1, 4 or 1, 1 or 1, n\)",
    ),
    "mask-rank": (
        {}, lambda c: {"attn_mask": torch.ones(1, 9, dtype=torch.bool)}, ValueError,
        "for the last n keys of each sequence, n from 1 to 96",
    ),
    "mask-packed": (
        {"q_lengths": [3, 4]}, lambda c: {"attn_mask": torch.ones(2, 1, 9, 9, dtype=torch.bool)},
        ValueError, r"attn_mask has shape \(2, 1, 9, 9\): .* \(1 or 1, 4 or 1, 9 or 1, n\)",
    ),
    "ranges-shape": (
        {"nq": 3}, lambda c: {"key_ranges": torch.zeros(2, 1, 2, 1, 2, dtype=torch.int32)},
        ValueError, r"key_ranges has shape \(2, 1, 2, 1, 2\): .* \(2 or 1, 4 or 1, 3 or 1, n",
    ),
    "chunk": (
        {}, lambda c: {"attention_chunk": 0}, ValueError,
        "attention_chunk is 0: it must be at least 1, or None for no chunks",
    ),
    "dv": ({}, lambda c: {"dv": 8}, ValueError, "dv is 8 with v_cache: .* leave dv out"),
    "latent-no-dv": ({}, lambda c: {"v_cache": None}, ValueError, "dv is missing"),
    "latent-dv": (
        {}, lambda c: {"v_cache": None, "dv": 64}, ValueError,
        "dv is 64 for a latent cache of 64 columns: it must be 1 to 63",
    ),
    "latent-v-new": (
        PAGED, lambda c: {"v_cache": None, "dv": 32}, ValueError, "v_new is given with v_cache=Non",
    ),
    "latent-dv-float": (
        {}, lambda c: {"v_cache": None, "dv": 32.0}, TypeError, "dv is 32.0: it must be an int",
    ),
    "latent-list": (
        {}, lambda c: {"v_cache": None, "dv": 32, "q": [1.0]}, TypeError,
        r"q is \[1.0\]: it must be a torch.Tensor",
    ),
    "latent-columns": (
        {}, lambda c: {"v_cache": None, "dv": 32, "q": c.q[..., :48]}, ValueError,
        r"q has shape \(2, 1, 4, 48\): its last dimension must be 64 as in k_cache",
    ),
    "latent-new-columns": (
        PAGED, lambda c: {"v_cache": None, "dv": 32, "v_new": None, "k_new": torch.tensor(1.0)},
        ValueError, r"k_new has shape \(\): its last dimension must be 64 as in k_cache",
    ),
    "packed-rows-format": (
        {}, lambda c: {"v_cache": None, "packed_rows": "fp8_600"}, ValueError,
        "packed_rows is 'fp8_600': it must be 'fp8_656' or 'fp8_584'",
    ),
    "packed-rows-columns": (
        {}, lambda c: {"v_cache": None, "packed_rows": "fp8_656"}, ValueError,
        "q has 64 columns and dv is None with packed_rows='fp8_656': they must be 576 and 512",
    ),
    "packed-rows-dv": (
        {}, lambda c: {"v_cache": None, "packed_rows": "fp8_584", "dv": 64,
                       "q": torch.zeros(2, 1, 4, 512)}, ValueError,
        "q has 512 columns and dv is 64 with packed_rows='fp8_584': they must be 512 and 512",
    ),
    "new-strided": (
        PAGED, lambda c: {"k_new": torch.zeros(2, 2, 2, 128)[..., ::2]}, ValueError,
        "k_new has a strided last dimension: call .contiguous",
    ),
    "table-dtype": (
        PAGED, lambda c: {"page_table": c.options["page_table"].long()}, TypeError,
        "page_table has dtype torch.int64: it must be torch.int32",
    ),
    "table-strided": (
        PAGED, lambda c: {"page_table": torch.zeros(2, 12, dtype=torch.int32)[:, ::2]}, ValueError,
        "page_table has a strided last dimension: call .contiguous",
    ),
    "pages-of-no-rows": (
        PAGED, lambda c: {"k_cache": c.k_cache[:, :0], "v_cache": c.v_cache[:, :0]}, ValueError,
        "k_cache has shape .* pages of no rows: a page must have at least one",
    ),
    "rotary-dtype": (
        PAGED, lambda c: dict.fromkeys(("rotary_cos", "rotary_sin"), torch.zeros(9, 16).half()),
        TypeError, "rotary_cos has dtype torch.float16: .* must both be float32 or of q's dtype",
    ),
    "rotary-strided": (
        PAGED, lambda c: dict.fromkeys(("rotary_cos", "rotary_sin"), torch.zeros(9, 32)[:, ::2]),
        ValueError, "rotary_cos is not contiguous: call .contiguous",
    ),
    "packed-rows-without-list": (
        {}, lambda c: LATENT, ValueError, "packed_rows is given without key_indices: pass the rows",
    ),
    "packed-rows-bhnd": (
        {}, lambda c: {**LATENT, "key_indices": LIST, "layout": "bhnd",
                       **{x: LATENT[x].transpose(1, 2) for x in ("q", "k_cache")}},
        ValueError, "packed_rows is given with k_new or layout=bhnd: .* nothing is appended",
    ),
    "packed-rows-descale": (
        {}, lambda c: {**LATENT, "key_indices": LIST, "k_descale": torch.tensor(1.0)}, ValueError,
        "a descale is given with packed_rows: each row has its own scales",
    ),
    "packed-rows-cache": (
        {}, lambda c: {**LATENT, "key_indices": LIST, "k_cache": LATENT["k_cache"][..., :640]},
        ValueError, r"k_cache is float8_e4m3fn \(3, 8, 1, 640\) .* must be float8_e4m3fn \(pages",
    ),
    "gradient": (
        {}, lambda c: {"q": c.q.requires_grad_()}, archflash.UnsupportedError,
        "attention_with_kvcache has no backward .* call it under torch.no_grad",
    ),
    "descale": (
        {}, lambda c: {"k_descale": torch.tensor(1.0)}, ValueError,
        "k_descale is given but the cache is float32: descales belong to float8 inputs",
    ),
    "mixed": (
        {}, lambda c: {"q": c.q.half()}, TypeError,
        "q, k_cache and v_cache have dtypes torch.float16, torch.float32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_refused_with_a_sentence(name: str) -> None:
    how, change, error, message = WRONG[name]
    call = make([5, 20], **how)
    caches = {"k_cache": call.k_cache, "v_cache": call.v_cache}
    arguments = {"q": call.q, **caches, **call.options, **change(call)}
    with pytest.raises(error, match=message):
        archflash.attention_with_kvcache(**arguments)


def test_options_of_a_cache_and_of_attention_do_not_mix() -> None:
    call = make([5, 20])
    tensors = (call.q, call.k_cache, call.v_cache)
    with pytest.raises(ValueError, match="q_offset is given with cache_seqlens"):
        archflash.explain(*tensors, **call.options, q_offset=3)
    q = torch.zeros(1, 2, 3, 8)
    with pytest.raises(ValueError, match="leftpad_k is given without cache_seqlens"):
        archflash.explain(q, q, q, leftpad_k=torch.zeros(1, dtype=torch.int32))


def test_the_signature_is_the_table_and_its_docstring_begins_as_the_table_does() -> None:
    parameters = inspect.signature(archflash.attention_with_kvcache).parameters
    of_table = {row.name: row for row in _options.ROWS if row.of_cache}
    others = {"q", "k_cache", "v_cache", "dv", "implementation", "check"}
    assert set(parameters) == set(of_table) | others
    text = " ".join(str(inspect.getdoc(archflash.attention_with_kvcache)).split())
    for name, row in of_table.items():
        if name not in ("layout", "cache_seqlens"):
            assert parameters[name].default == row.default
        if not row.of_attention:
            assert f" {name}: {row.doc}" in text, name


# --- explain, plans ---


def test_explain_describes_the_cache() -> None:
    call = make([5, 20], page_size=16, n_new=2, rotary=32, leftpad=[0, 1], dtype=BF16)
    decision = archflash.explain(
        call.q, call.k_cache, call.v_cache, **call.options, device="RTX 5090"
    )
    assert "a cache of up to 96 keys each in pages of 16" in str(decision)
    assert "2 new keys, 32 rotated columns" in str(decision)
    assert "leftpad_k" in str(decision).splitlines()[0]
    for name in ("hopper", "blackwell_consumer", "blackwell_dc", "simt"):
        problem = decision.problem
        home = native.describe(name).home_device
        device = native.find_known_device(home)
        assert device is not None
        reasons = native.plan(name, problem, device.device)
        assert isinstance(reasons, list)
        given = {
            "simt": "a KV cache with q of dtype bfloat16: ",
            "hopper": "1 query row of 2 heads for a head of a KV cache: ",
        }.get(name, "a KV cache: ")
        assert any(reason.startswith(given) for reason in reasons), (name, reasons)


def test_latent_caches_have_a_kernel_on_every_gpu_from_8_0_on() -> None:
    for d, dv in ((64, 512), (32, 512), (64, 256)):
        call = make([5, 20], page_size=64, heads=(128, 1), d=d, dv=dv, qv=True, dtype=BF16)
        tensors = (call.q, call.k_cache, call.v_cache)
        for name in ("A100", "RTX 3090", "RTX 4090", "H200", "B200", "RTX 5090"):
            decision = archflash.explain(*tensors, **call.options, device=name)
            if (d, dv) == (64, 512):
                assert decision.plan is not None, (name, decision)
                folder = "hopper" if name == "H200" else "ampere"
                assert decision.plan.kernels[0] == f"{folder}_attention_fwd_bf16_mla"
                assert ", qv" in str(decision)
            else:
                assert decision.plan is None
                words = f"qv with head_dim {d} and value head_dim {dv}: ampere takes qv where they"
                assert any(words in reason for reason in decision.reasons["ampere"]), decision


def test_latent_caches_of_8_bits_have_a_kernel_on_every_gpu_from_8_0_on() -> None:
    call = make(
        [5, 20], page_size=64, heads=(128, 1), d=64, dv=512, qv=True, dtype=BF16,
        cache_dtype=torch.float8_e4m3fn, v_descale=torch.tensor(0.5),
    )  # fmt: skip
    for name in ("A100", "RTX 3090", "RTX 4090", "H200", "B200", "RTX 5090"):
        decision = archflash.explain(
            call.q, call.k_cache, call.v_cache, **call.options, device=name
        )
        assert decision.plan is not None, (name, decision)
        assert decision.plan.kernels[0] == "ampere_attention_fwd_bf16_mla"
        if name == "H200":
            words = "a cache of dtype float8_e4m3fn for q of dtype bfloat16: hopper takes a cache"
            assert any(words in reason for reason in decision.reasons["hopper"]), decision


def test_a_problem_depends_on_no_length_and_comes_back_from_its_fields() -> None:
    for how in (
        {},
        PAGED,
        {"rows_of": [1, 0]},
        {"q_lengths": [2, 3]},
        {"qv": True, "attention_chunk": 7},
    ):
        problems = []
        for lengths in ([5, 20], [6, 21]):
            call = make(lengths, **how)  # type: ignore[arg-type]
            problems.append(make_problem(call.q, call.k_cache, call.v_cache, **call.options))
        assert problems[0] == problems[1]
        assert native.Problem.from_dict(problems[0].to_dict()) == problems[0]
    for field, value in {
        "page_size": -1,
        "cache_batch": 5,
        "kv_dtype": "float16",
        "attention_chunk": -1,
        "qv_align": 3,
    }.items():
        with pytest.raises(ValueError, match=f"field '{field}' is"):
            native.Problem.from_dict({**problems[1].to_dict(), field: value})


# --- check ---


def test_check_says_which_value_is_out_of_range(monkeypatch: pytest.MonkeyPatch) -> None:
    call = make([5, 20], page_size=16, n_new=2, leftpad=[0, 1], q_lengths=[1, 2], rotary=8)
    by_torch(call.copied(), check=True)

    def changed(name: str, index: tuple[int, ...], value: int) -> CacheCall:
        x = call.options[name].clone()
        x[index] = value
        return call.with_options(**{name: x}).copied()

    for name, index, value, message in (
        ("cache_seqlens", (1,), 95, r"cache_seqlens\[1\] is 95: it must be from 0 to 94"),
        ("cache_seqlens", (0,), -1, r"cache_seqlens\[0\] is -1: it must be from 0"),
        ("page_table", (1, 1), 99, r"page_table\[1, 1\] is 99: it must be from 0 to 14"),
        ("leftpad_k", (1,), 21, r"leftpad_k\[1\] is 21: it must be from 0 to the sequence's"),
        ("cu_seqlens_q", (1,), 4, r"cu_seqlens_q\[2\] is 3: it must be .* in ascending order"),
    ):
        with pytest.raises(ValueError, match=message):
            by_torch(changed(name, index, value), check=True)
    by_torch(changed("page_table", (1, 5), 99), check=True)  # behind the length
    with pytest.raises(ValueError, match=r"q's sequence\[1\] is 2: .* at most max_seqlen_q = 1"):
        by_torch(call.with_options(max_seqlen_q=1).copied(), check=True)
    monkeypatch.setattr("archflash._kvcache._always_check", True)  # as ARCHFLASH_CHECK=1 does
    with pytest.raises(ValueError, match="cache_seqlens"):
        by_torch(changed("cache_seqlens", (1,), 95))
    by_torch(changed("cache_seqlens", (1,), 95), check=False)
    short = dict.fromkeys(("rotary_cos", "rotary_sin"), torch.ones(20, 4))
    with pytest.raises(ValueError, match=r"the last position to rotate\[1\] is 20: .* below 20"):
        by_torch(call.with_options(**short).copied())
    twice = make([4, 8], rows_of=[3, 3], n_new=1)
    with pytest.raises(ValueError, match=r"cache_batch_idx\[0\] is 3: .* each once"):
        by_torch(twice)
    beyond = make([4, 8], rows_of=[3, 3])
    by_torch(beyond)  # nothing is written, so that both may read the same
    beyond.options["cache_batch_idx"][1] = len(beyond.k_cache)
    with pytest.raises(ValueError, match=r"cache_batch_idx\[1\] is \d+: it must be from 0 to \d+$"):
        by_torch(beyond)
    with pytest.raises(ValueError, match="k_new has 97 rows, but a sequence has room for 96"):
        by_torch(make([0, 0], n_new=97))


@pytest.mark.parametrize(("q_lengths", "causal", "last"), [
    (None, True, 27), (None, False, 23), ([2, 9], True, 28), ([2, 9], False, 23),
])  # fmt: skip
def test_check_knows_how_many_positions_are_rotated(
    q_lengths: list[int] | None, causal: bool, last: int
) -> None:
    """Where queries have an order, each has a position of its own, beside those of new rows."""
    call = make([5, 20], nq=8, q_lengths=q_lengths, n_new=4, causal=causal, rotary=8)

    def with_tables(rows: int) -> CacheCall:
        return call.with_options(**dict.fromkeys(("rotary_cos", "rotary_sin"), torch.ones(rows, 4)))

    by_torch(with_tables(last + 1).copied(), check=True)
    with pytest.raises(ValueError, match=rf"to rotate\[1\] is {last}: it must be below {last}"):
        by_torch(with_tables(last).copied(), check=True)


def test_scales_of_no_heads_scale_nothing() -> None:
    q, cache = (torch.empty(2, n, 0, 16).to(torch.float8_e4m3fn) for n in (1, 4))
    one = {f"{x}_descale": torch.ones(2, 0) for x in "qkv"}
    seqlens = torch.ones(2, dtype=torch.int32)
    out = archflash.attention_with_kvcache(q, cache, cache, cache_seqlens=seqlens, **one)
    assert out.shape == q.shape


def test_check_of_no_sequences_has_nothing_to_say() -> None:
    q, cache = torch.zeros(0, 1, 4, 64), torch.zeros(3, 16, 2, 64)
    lengths, table = torch.zeros(0, dtype=torch.int32), torch.zeros(0, 2, dtype=torch.int32)
    out = archflash.attention_with_kvcache(
        q, cache, cache, cache_seqlens=lengths, page_table=table, check=True
    )
    assert out.shape == (0, 1, 4, 64)


def test_a_servers_call_is_checked_where_every_call_is(monkeypatch: pytest.MonkeyPatch) -> None:
    call = make([5, 20], causal=True)
    values = _kvcache.values_of(causal=True)
    batch = (None, None, call.options["cache_seqlens"], None)

    def served() -> Tensor:
        prepared: dict[int, Any] = {}
        kind = _kvcache.kind_of(values)
        tensors = (call.q, call.k_cache, call.v_cache)
        out: Tensor = _kvcache.serve(*tensors, values, kind, prepared, batch)
        return out

    tensors = (call.q, call.k_cache, call.v_cache)
    expected = archflash.attention_with_kvcache(*tensors, **call.options)
    assert torch.equal(served(), expected)
    monkeypatch.setattr("archflash._kvcache._always_check", True)
    assert torch.equal(served(), expected)
    call.options["cache_seqlens"][1] = 97
    with pytest.raises(ValueError, match=r"cache_seqlens\[1\] is 97: it must be from 0 to 96"):
        served()


# --- torch.compile ---


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])  # it says at which positions queries are rotated
def test_a_compiled_call_writes_the_caches_and_gives_the_same_bits(causal: bool) -> None:
    call = make([15, 17], page_size=16, n_new=2, nq=2, causal=causal, rotary=16, dtype=BF16)
    names = tuple(call.options)

    def step(q: Tensor, k: Tensor, v: Tensor, *values: Any) -> Any:
        options = dict(zip(names, values, strict=True))
        return archflash.attention_with_kvcache(q, k, v, **options, return_lse=True)

    eager, compiled = call.copied(), call.copied()
    want = step(eager.q, eager.k_cache, eager.v_cache, *call.options.values())
    got = torch.compile(step, backend="aot_eager", fullgraph=True)(
        compiled.q, compiled.k_cache, compiled.v_cache, *call.options.values()
    )
    for one, other in zip(want, got, strict=True):
        assert torch.equal(one, other)
    kvcache_cases.assert_written_like(compiled.k_cache, eager.k_cache)
    kvcache_cases.assert_written_like(compiled.v_cache, eager.v_cache)
    assert not torch.equal(compiled.k_cache.nan_to_num(), call.k_cache.nan_to_num())


@pytest.mark.slow
def test_a_compiled_call_writes_a_latent_cache() -> None:
    call = make(
        [15, 17],
        page_size=16,
        n_new=2,
        nq=2,
        causal=True,
        heads=(4, 1),
        d=40,
        rotary=16,
        dtype=BF16,
    )
    options = {name: x for name, x in call.options.items() if name != "v_new"}

    def step(q: Tensor, cache: Tensor) -> Any:
        return archflash.attention_with_kvcache(q, cache, **options, dv=24)

    eager, compiled = call.k_cache.clone(), call.k_cache.clone()
    want = step(call.q, eager)
    assert torch.equal(
        torch.compile(step, backend="aot_eager", fullgraph=True)(call.q, compiled), want
    )
    kvcache_cases.assert_written_like(compiled, eager)
    assert not torch.equal(compiled.nan_to_num(), call.k_cache.nan_to_num())


def test_an_append_counts_as_a_write_for_autograd() -> None:
    call = make([5, 20], n_new=1)
    before = call.k_cache._version, call.v_cache._version
    by_torch(call)
    assert call.k_cache._version > before[0]
    assert call.v_cache._version > before[1]


def test_a_negated_cache_is_refused_by_name() -> None:
    q, cache = torch.randn(1, 1, 2, 16), torch.randn(1, 8, 2, 16)
    lengths = torch.tensor([3], dtype=torch.int32)
    with pytest.raises(ValueError, match="v_cache holds the negative of its values, which no ker"):
        archflash.attention_with_kvcache(q, cache, torch._neg_view(cache), cache_seqlens=lengths)
