"""key_indices: lists of the keys that queries see, of K and V as they are given and of caches.

What no list names is NaN, and what lies behind topk_lengths would be read outside of the tensors.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from archflash import reference
from archflash._latent_rows import packed_parts

from .. import kvcache_cases
from ..kvcache_cases import CacheCall, make, packed_cache, with_places
from ..replanned import plan_with
from ..sim.schedules import SEEDS
from .checks import assert_close
from .executors import executor

here = executor()
GARBAGE = (-1, 2**31 - 1, -(2**31), 1 << 29)  # entries that name no key
KERNELS = [
    (kernel, dtype)
    for kernel in here.kernels("key_indices")
    for dtype in here.dtypes_of(kernel)
    if kernel != "simt" or dtype == "float32"
]
LATENT = [name for name in here.kernels("key_indices") if name in here.kernels("qv")]


def lists_of(
    shape: tuple[int, int, int, int], keys: int, *, seed: int = 0, lengths: Tensor | None = None
) -> Tensor:
    """Lists in any order that name each key once at most, one entry in five garbage; behind the
    lengths all of them are.
    """
    generator = torch.Generator().manual_seed(seed)
    rows, n = shape[0] * shape[1] * shape[2], shape[3]
    lists = torch.full((rows, n), -1)
    for row in range(rows):
        order = torch.randperm(keys, generator=generator)[:n]
        lists[row, : len(order)] = order
    garbage = torch.tensor(GARBAGE)[torch.randint(0, len(GARBAGE), (rows, n), generator=generator)]
    lists = torch.where(torch.rand(rows, n, generator=generator) < 0.2, garbage, lists)
    lists = lists.reshape(shape)
    if lengths is not None:
        lists = torch.where(torch.arange(n) < lengths.cpu()[..., None], lists, 1 << 30)
    return lists.int().to(here.device)


def poisoned(k: Tensor, v: Tensor, lists: Tensor) -> tuple[Tensor, Tensor]:
    """k and v, bhnd, whose rows that no list names are NaN."""
    named = torch.zeros(k.shape[2] + 1, dtype=torch.bool, device=k.device)
    named[torch.where((lists >= 0) & (lists < k.shape[2]), lists, k.shape[2]).long().flatten()] = (
        True
    )
    return tuple(x.masked_fill(~named[:-1, None], torch.nan) for x in (k, v))


# (batch, (heads of q, of k), nq, nk, d, dv), the lists' shape, options
CALLS: dict[str, tuple[tuple[Any, ...], tuple[int, int, int, int], dict[str, Any]]] = {
    "a-head": ((1, (1, 1), 3, 70, 64, 64), (1, 1, 3, 40), {}),
    "gqa-lists-of-heads": ((2, (6, 2), 2, 90, 64, 40), (2, 2, 2, 150), {"lengths": (2, 2, 2)}),
    "two-tiles-of-heads-splits": ((1, (72, 1), 1, 300, 40, 64), (1, 1, 1, 280), {"num_splits": 3}),
    "causal-sinks-lists-of-a-batch": (
        (2, (4, 2), 5, 40, 128, 128), (1, 1, 5, 33),
        {"causal": True, "sinks": 4, "lengths": (2, 1, 1)},
    ),
    "lists-of-64-rows-window": (
        (1, (4, 2), 70, 80, 64, 64), (1, 2, 2, 50), {"window": (30, 20), "q_offset": 4}
    ),
    "wide-softcap-bnhd": (
        (1, (20, 1), 2, 150, 256, 256), (1, 1, 2, 145), {"softcap": 3.0, "layout": "bnhd"}
    ),
    "nobody-sees-a-key": ((1, (2, 2), 2, 8, 64, 64), (1, 2, 2, 4), {"lengths": 0}),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("kernel", "dtype"), KERNELS)
def test_a_kernel_attends_to_listed_keys(kernel: str, dtype: str, name: str) -> None:
    (batch, heads, nq, nk, d, dv), shape, given = CALLS[name]
    q, k, v = here.qkv(nq, nk, d, dv, dtype=dtype, batch=batch, heads=heads)
    options = dict(given)
    lengths = options.pop("lengths", None)
    if lengths == 0:
        lengths = torch.zeros(1, 1, 1, dtype=torch.int32)
    elif lengths is not None:
        lengths = torch.randint(
            0, shape[3] + 9, lengths, generator=torch.Generator().manual_seed(1)
        )
    lists = lists_of(shape, nk, lengths=lengths)
    if lengths is not None:
        options["topk_lengths"] = lengths.int().to(here.device)
    if "sinks" in options:
        options["sinks"] = here.rand(options["sinks"], seed=9)
    with_nan = poisoned(k, v, lists)
    if options.get("layout") == "bnhd":
        q, k, v, *with_nan = (x.transpose(1, 2).contiguous() for x in (q, k, v, *with_nan))
    options["key_indices"] = lists
    out, lse = here.attend(kernel, q, *with_nan, **options)
    assert_close(out, lse, q, k, v, (kernel, here.capability(kernel, None)), **options)


# A list for 64 rows: in hopper 2 heads have tiles of 64 rows, 8 heads tiles of 128, of which one
# has no row of its list.
@pytest.mark.parametrize("heads", [2, 8])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.skipif("hopper" not in here.kernels(), reason="hopper has no code for this GPU")
def test_tiles_follow_one_another_in_a_cta(d: int, heads: int) -> None:
    q, k, v = here.qkv(70, 160, d, dtype="bfloat16", heads=(heads, 2), batch=2)
    lengths = here.int32(150, 0, 64, 9, 150, 127, 1, 150).reshape(2, 2, 2)
    call = {"key_indices": lists_of((2, 2, 2, 150), 160, lengths=lengths), "topk_lengths": lengths}
    on_hopper: dict[str, Any] = {"device": "H200", "implementation": "hopper", "causal": True}
    plan = plan_with({"sm_count": 1}, q, k, v, **on_hopper, **call)
    (launch,) = plan.to_dict()["launches"]
    assert launch["kernel"].endswith(f"d{d}_gather" + ("_large" if heads == 8 else ""))
    assert launch["grid"][0] <= 2
    out, lse = here.attend(
        "hopper", q, *poisoned(k, v, call["key_indices"]), plan=plan, schedules=range(SEEDS),
        causal=True, **call,
    )  # fmt: skip
    assert_close(out, lse, q, k, v, ("hopper", (9, 0)), causal=True, **call)


@pytest.mark.parametrize(("kernel", "dtype"), KERNELS[:1] + KERNELS[-1:])
def test_a_key_that_is_named_twice_counts_twice(kernel: str, dtype: str) -> None:
    q, k, v = here.qkv(1, 20, 64, dtype=dtype)
    lists = here.int32(3, 7, 3, 3, 11).reshape(1, 1, 1, 5)
    out, lse = here.attend_and_check(kernel, q, k, v, key_indices=lists)
    alone = here.int32(3, 7, 11).reshape(1, 1, 1, 3)
    assert (lse > reference.attention(q, k, v, key_indices=alone)[1]).all()
    assert out.isfinite().all()


@pytest.mark.parametrize("how", ["contiguous", "pages", "physical", "latent", "latent-physical"])
@pytest.mark.parametrize(("kernel", "dtype"), KERNELS)
def test_a_kernel_attends_to_listed_rows_of_a_cache(kernel: str, dtype: str, how: str) -> None:
    latent = how.startswith("latent")
    if latent and kernel not in LATENT:
        return
    head_dims = {"d": 64, "dv": 512, "qv": True} if latent else {"d": 64}
    heads = (20, 1) if latent else (6, 2)
    pages = {} if how == "contiguous" else {"page_size": 7}
    new = {"n_new": 2, "causal": True, "leftpad": [3, 0]} if how == "contiguous" else {}
    call = make(
        [60, 33], nq=2, heads=heads, dtype=getattr(torch, dtype), device=here.device, **head_dims,
        **pages, **new,
    )  # fmt: skip
    lists = lists_of((2, 1, 2, 44), 33)
    call = call.with_options(key_indices=lists)
    places = how.endswith("physical")
    call = with_places(call) if places else call.with_options(num_splits=2)
    kvcache_cases.check(call, lambda mine: here.attend_with_kvcache(kernel, mine)[:2])


# In hopper 72 heads take nine tiles; the second of two lists of 64 rows has two.
@pytest.mark.parametrize(
    ("batch", "heads", "nq", "splits"), [(2, (144, 2), 2, 2), (1, (2, 1), 66, 1)]
)
@pytest.mark.parametrize("kernel", LATENT)
def test_every_tile_of_listed_latent_rows_is_computed(
    kernel: str, batch: int, heads: tuple[int, int], nq: int, splits: int
) -> None:
    call = make(
        [90, 75][:batch], nq=nq, heads=heads, dtype=torch.bfloat16, device=here.device, d=64,
        dv=512, qv=True, page_size=7, num_splits=splits,
        key_indices=lists_of((batch, heads[1], 2, 70), 75), softcap=2.0 if batch == 1 else None,
    )  # fmt: skip
    kvcache_cases.check(call, lambda mine: here.attend_with_kvcache(kernel, mine)[:2])


@pytest.mark.parametrize("kernel", LATENT)
def test_float32_outputs_of_listed_latent_rows_are_not_rounded(kernel: str) -> None:
    call = make(
        [60, 33], nq=2, heads=(20, 1), dtype=torch.bfloat16, device=here.device, d=64, dv=512,
        qv=True, page_size=7, key_indices=lists_of((2, 1, 2, 44), 33),
    )  # fmt: skip
    for splits in (1, 2):
        wide = call.with_options(num_splits=splits, out_dtype=torch.float32)
        kvcache_cases.check(wide, lambda mine: here.attend_with_kvcache(kernel, mine)[:2])
        out = here.attend_with_kvcache(kernel, wide)[0]
        rounded = here.attend_with_kvcache(kernel, call.with_options(num_splits=splits))[0]
        assert out.dtype == torch.float32
        assert torch.equal(out.bfloat16(), rounded)
        assert not torch.equal(out, rounded.float())


# With 128 heads the two tiles of a query share the conversion of its rows in hopper: five blocks of
# lists, one alone, and none at all.
@pytest.mark.parametrize(
    ("heads", "entries", "softcap"),
    [
        (20, 40, None), (128, 290, None),
        pytest.param(128, 50, None, marks=pytest.mark.rest),  # as with a softcap
        (128, 0, None), (20, 40, 3.0), (128, 50, 3.0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("form", ["fp8_656", "fp8_584"])
@pytest.mark.parametrize("kernel", here.kernels("packed_rows"))
def test_a_kernel_reads_packed_latent_rows(
    kernel: str, form: str, heads: int, entries: int, softcap: float | None
) -> None:
    size, pages = 5, 9 if heads == 20 else 60
    cache = packed_cache(form, pages, size, seed=3, device=here.device)
    batch, nq = (2, 2) if heads == 20 else (1, 2)
    q = here.rand(batch, nq, heads, 576 if form == "fp8_656" else 512, seed=6, dtype="bfloat16")
    q, qv, rows = packed_parts(q, cache, form, 512)
    call = CacheCall(q, rows, rows, {
        "qv": qv, "packed_rows": form, "physical_indices": True, "scale": 0.05,
        "softcap": softcap, "num_splits": 2 if softcap is None else 1,
        "key_indices": lists_of((batch, 1, nq, entries or 3), size * pages),
    })  # fmt: skip
    if entries == 0:
        call = call.with_options(topk_lengths=here.int32(0, 3).reshape(1, 1, 2))
    kvcache_cases.check(call, lambda mine: here.attend_with_kvcache(kernel, mine)[:2])
