"""Calls whose plans launch every kernel that is not among the plans of tests/unit/plan_cases.py."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

import archflash
from archflash import _archflash as native
from archflash import _gradients, _nvfp4_attention, _options
from archflash._api import find_device

BOTH = (torch.float16, torch.bfloat16)


def empty(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def integers(*shape: int) -> Tensor:
    return empty(torch.int32, *shape)


def kernels(
    q: Tensor, k: Tensor, v: Tensor, device: str, name: str | None = None, **options: Any
) -> set[str]:
    """Those that a call launches: none where PyTorch serves it. A forced implementation serves it,
    or raises.
    """
    plan = archflash.explain(q, k, v, device=device, implementation=name, **options).plan
    return set(getattr(plan, "kernels", ()))


def beside_attention() -> set[str]:
    """FP8 numbers, merged results, copies, and the log-sum-exp as PyTorch has it."""
    found = set()
    for dtype, per in itertools.product((torch.float32, *BOTH), (0, 2)):
        x = empty(dtype, 2, 3, 200, 64)
        plan = native.plan_quantize("float8_e4m3fn", per, x, x, find_device("RTX 4090"))
        assert isinstance(plan, native.LaunchPlan)
        found |= set(plan.kernels)
    out, lse = empty(torch.float32, 1, 1, 1, 8), empty(torch.float32, 1, 1, 1)
    found |= set(native.plan_merge([out], [lse], out, find_device("A100")).kernels)
    odd = empty(torch.float16, 1, 1, 9, 44)
    found |= kernels(odd, odd, odd, "A100")
    packed = empty(torch.float16, 9, 2, 64)
    lengths = {"cu_seqlens_q": integers(3), "cu_seqlens_k": integers(3), "return_lse": True}
    plan = archflash.explain(packed, packed, packed, **lengths, device="A100").plan
    plan = native.with_lse_for_pytorch(plan, self_attention=False)
    assert isinstance(plan, native.LaunchPlan)
    return found | set(plan.kernels)


def every_key_seen(dtype: torch.dtype) -> set[str]:
    """ampere's kernels for that, and with sinks those that serve other calls of these sizes."""
    found = set()
    given: dict[str, Tensor]
    for given in ({}, {"sinks": empty(torch.float32, 32)}):
        for d in (32, 64, 80, 96, 128, 160, 192, 256):
            x, few = empty(dtype, 16, 32, 1024, d), empty(dtype, 16, 32, 77, d)
            for device in ("A100", "A10G", "H200"):
                found |= kernels(x, x, x, device, "ampere", **given)
                found |= kernels(x, few, few, device, "ampere", **given)
        for batch, rows, d in ((2, 950, 32), (1, 128, 80), (1, 256, 80)):
            x = empty(dtype, batch, 32, rows, d)
            found |= kernels(x, x, x, "A100", "ampere", **given)
    q, k = empty(dtype, 1, 32, 512, 128), empty(dtype, 1, 8, 8192, 128)
    found |= kernels(q, k, k, "H200", "ampere", causal=True, sinks=empty(torch.float32, 32))
    for d, device in ((160, "A100"), (192, "H200")):
        x = empty(dtype, 1, 2, 100, d)
        found |= kernels(x, x, x, device, "ampere", backward=True)
    return found


def keys_up_to_one(dtype: torch.dtype) -> set[str]:
    """ampere's kernels for causal calls and packed sequences, and with sinks those that serve other
    calls of these sizes.
    """
    found = set()
    for d in (32, 64, 96, 128, 160, 256):
        for heads, rows in ((2, 2048), (8, 128), (128, 512), (4, 2048), (6, 3000)):
            x = empty(dtype, 1, heads, rows, d)
            found |= kernels(x, x, x, "H200", "ampere", causal=True)
            sinks = empty(torch.float32, heads)
            found |= kernels(x, x, x, "H200", "ampere", causal=True, sinks=sinks)
    for d, n, sequences in itertools.product((32, 64, 80, 96, 128), (64, 200, 500), (8, 150)):
        x, ends = empty(dtype, n * sequences, 2, d), integers(sequences + 1)
        call: dict[str, Any] = {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
        call |= {"max_seqlen_q": n, "max_seqlen_k": n}
        found |= kernels(x, x, x, "H200", "ampere", **call)
    return found


def gradients(dtype: torch.dtype) -> set[str]:
    found = set()
    for d, dv in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256)):
        q, v = empty(dtype, 1, 2, 100, d), empty(dtype, 1, 2, 100, dv)
        # An H200 has hopper's kernels first.
        forced = [] if dtype == torch.float32 else [("H200", "ampere")]
        if forced and d <= 128:
            forced.append(("B200", "blackwell_dc"))
        asked = [("T4", None), ("A100", None), ("RTX 4090", None), ("H200", None), *forced]
        sinks = torch.empty(2, device="meta")
        for device, name in asked:
            found |= kernels(q, q, v, device, name, sinks=sinks, backward=True)
        found |= kernels(q, q, v, "H200", softcap=30.0, backward=True)
        found |= kernels(q, q, v, "A100", key_ranges=integers(1, 1, 100, 1, 2), backward=True)
    if dtype == torch.float32:  # query heads of few tiles are shared out
        q, k = empty(dtype, 1, 8, 1000, 64), empty(dtype, 1, 1, 1000, 64)
        found |= kernels(q, k, k, "H200", backward=True)
    return found


def few_keys_and_lists(dtype: torch.dtype) -> set[str]:
    q, k = empty(dtype, 64, 8, 1024, 64), empty(dtype, 64, 8, 77, 64)
    found = kernels(q, k, k, "A100") | kernels(q, k, k, "RTX 5090")
    for rows in (100, 1000):
        x = empty(dtype, 2, 16, rows, 160)
        found |= kernels(x, x, x, "H200")
    for d in (64, 128, 256):
        x = empty(dtype, 1, 2, 100, d)
        for device, heads in (("A100", 2), ("H200", 128), ("H200", 256)):
            q = empty(dtype, 1, heads, 100, d)
            found |= kernels(q, x, x, device, key_indices=integers(1, 1, 100, 8))
    return found


def gradients_of_lists(dtype: torch.dtype) -> set[str]:
    found = set()
    dims = ((64, 64), (128, 128), (192, 128), (256, 256))
    for (d, dv), heads in itertools.product(dims, (2, 64, 128)):
        q, k, v = (empty(dtype, 1, n, 100, x) for n, x in ((heads, d), (1, d), (1, dv)))
        for name in ("simt",) if dtype == torch.float32 else ("hopper", "ampere"):
            given = {"key_indices": integers(1, 1, 100, 8), "backward": True}
            for deterministic in (False, True):
                with _gradients.asked_for(deterministic):
                    found |= kernels(q, k, v, "H200", name, **given)
    return found


def caches(dtype: torch.dtype) -> set[str]:
    """Decoding, with a row to append and split keys."""
    found = set()
    dims = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
    kinds = (dtype,) if dtype == torch.float32 else (dtype, torch.float8_e4m3fn)
    for kind, (d, dv), rows in itertools.product(kinds, dims, (1, 17)):
        q = empty(dtype, 2, rows, 4, d)
        k_cache, k_new, v_cache, v_new = (
            empty(kind, 2, n, 2, dim) for dim in (d, dv) for n in (64, 1)
        )
        new = {
            "k_new": k_new, "v_new": v_new, "cache_seqlens": integers(2), "num_splits": 2,
        }  # fmt: skip
        masked = {"attn_mask": empty(torch.bool, 1, 1, 1, 9)}
        for more in ({}, masked) if kind == dtype else ({},):
            found |= kernels(q, k_cache, v_cache, "A100", **new, **more)
    return found


def gradients_of_mask(q: Tensor, k: Tensor, options: dict[str, Tensor]) -> set[str]:
    """hopper's kernels that compute the gradient of an added mask, too."""
    lse = empty(torch.float32, *q.shape[:3])
    given = _options.complete(options)
    request = _gradients.Request(q, q, k, k, q, lse, None, given, mask_gradient=True)
    into = _gradients.Gradients.like(request)
    plan = _gradients.decide(request, into, find_device("H200"), "hopper").plan
    return set(getattr(plan, "kernels", ()))


def masks_and_dropout(dtype: torch.dtype) -> set[str]:
    found = set()
    dense = {"attn_mask": empty(torch.bool, 1024, 200)}
    for d in (64, 128):  # a dense mask or ranges of many rows
        q, k = empty(dtype, 2, 64, 1024, d), empty(dtype, 2, 64, 200, d)
        for given in (dense, {"key_ranges": integers(1, 1, 1024, 1, 2)}):
            found |= kernels(q, k, k, "H200", "hopper", **given)
        added = {"attn_mask": empty(dtype, 1024, 200)}
        for given in (dense, added):
            found |= kernels(q, k, k, "H200", "hopper", backward=True, **given)
        of_all_rows, wide = empty(dtype, 1, 200), empty(torch.float32, 1024, 200)
        for mask in (added["attn_mask"], of_all_rows, wide):
            found |= gradients_of_mask(q, k, {"attn_mask": mask})
    q, k = empty(dtype, 2, 64, 1024, 256), empty(dtype, 2, 64, 200, 256)
    found |= kernels(q, k, k, "H200", "hopper", backward=True, **dense)
    found |= kernels(q, k, k, "H200", "hopper", **dense)
    found |= gradients_of_mask(q, k, {"attn_mask": empty(dtype, 1024, 200)})
    for d in (64, 128, 256):  # of few rows
        q, k = empty(dtype, 2, 8, 1, d), empty(dtype, 2, 2, 4096, d)
        for splits in (2, 16):  # a cluster, and a launch that combines
            mask = empty(dtype, 4096)
            found |= kernels(q, k, k, "H200", "ampere", num_splits=splits, attn_mask=mask)
            found |= kernels(q, k, k, "H200", "ampere", num_splits=splits)
    for d, kind in itertools.product((64, 128, 256), (dtype, torch.float32)):  # added for all heads
        q, k = empty(dtype, 4, 16, 1024, d), empty(dtype, 4, 16, 1024, d)
        found |= kernels(q, k, k, "H200", "hopper", attn_mask=empty(kind, 1024, 1024))
    for batch, rows in ((2, 1024), (1, 197)):  # of each head: many tiles; few, of a copy
        q = empty(dtype, batch, 16, rows, 64)
        found |= kernels(q, q, q, "H200", "hopper", attn_mask=empty(dtype, 1, 16, rows, rows))
    for d in (64, 80):  # of each head and sequence, as TMA reads none
        q, mask = empty(dtype, 25, 12, 196, d), empty(dtype, 25, 12, 196, 196)
        found |= kernels(q, q, q, "H200", "hopper", attn_mask=mask)
    for rows, d in ((50, 32), (50, 64), (100, 64), (200, 64)):  # few of them
        q = empty(dtype, 16, 12, rows, d)
        mask = empty(torch.bool, rows, rows)
        found |= kernels(q, q, q, "H200", "hopper", backward=True, attn_mask=mask)
        found |= kernels(q, q, q, "H200", "hopper", attn_mask=mask)
    for d, backward in itertools.product((64, 96, 128, 256), (False, True)):
        q = empty(dtype, 2, 16, 2048, d)
        for device, name in (
            ("H200", "hopper"), ("H200", "ampere"), ("A100", "ampere"), ("RTX 4090", "ampere"),
        ):  # fmt: skip
            if name != "hopper" or d <= 128:
                found |= kernels(q, q, q, device, name, dropout_p=0.1, backward=backward)
    q = empty(dtype, 16, 12, 512, 64)  # ampere has kernels of its own where every key is seen
    for device in ("A100", "RTX 4090"):
        found |= kernels(q, q, q, device, "ampere", dropout_p=0.1, causal=True)
    few = empty(dtype, 1, 8, 512, 64)
    found |= kernels(few, few, few, "A100", "ampere", dropout_p=0.1)
    q, table = empty(dtype, 2, 16, 2048, 128), empty(torch.bool, 2, 16, 32, 32)
    found |= kernels(q, q, q, "H200", "hopper", block_mask=table)  # tiles in the order of work
    blocks = empty(torch.bool, 1, 1, 64, 64)
    for d in (64, 128):
        x = empty(dtype, 2, 16, 4096, d)
        for more in ({}, {"softcap": 5.0}, {"backward": True}):
            found |= kernels(x, x, x, "H200", "hopper", block_mask=blocks, **more)
        keys = {"attn_mask": empty(torch.bool, 1, 1, 1, 4096), "block_mask": blocks}
        found |= kernels(x, x, x, "H200", "hopper", **keys)
        found |= kernels(x, x, x, "RTX 5090", "blackwell_consumer", block_mask=blocks)
    return found


def more_gradients(dtype: torch.dtype) -> set[str]:
    found = set()
    # Rounds with all rows of the tile, and with fewer; other head dimensions.
    for rows, d, dv in ((1024, 64, 64), (40, 128, 128), (1024, 96, 96), (1024, 192, 128)):
        q, v = empty(dtype, 2, 16, rows, d), empty(dtype, 2, 16, rows, dv)
        found |= kernels(q, q, v, "H200", "hopper", backward=True)
    q = empty(dtype, 2, 16, 1024, 32)
    found |= kernels(q, q, q, "A100", backward=True)
    q, k = empty(dtype, 1, 2, 4096, 64), empty(dtype, 1, 2, 77, 64)
    found |= kernels(q, k, k, "H200", backward=True)  # query rows are shared out
    q, k = empty(dtype, 2, 16, 100, 64), empty(dtype, 2, 16, 1000, 64)
    found |= kernels(q, k, k, "H200", backward=True)  # tiles of 64 keys would compute as much
    for d in (64, 128):  # parts of few tiles
        x = empty(dtype, 1, 8, 1024, d)
        found |= kernels(x, x, x, "H200", "hopper", backward=True)
    for b, n, d in ((64, 50, 32), (8, 100, 32), (8, 1000, 32), (64, 50, 64), (16, 200, 64)):
        x = empty(dtype, b, 12, n, d)
        found |= kernels(x, x, x, "H200", "hopper", backward=True)
    for d, nk in ((96, 200), (128, 200), (128, 4096)):  # two tiles of keys, and many
        q, k = empty(dtype, 16, 12, 200, d), empty(dtype, 16, 12, nk, d)
        found |= kernels(q, k, k, "H200", "hopper", backward=True)
    for d, rows in ((32, (100, 200, 500)), (64, (100, 200, 300)), (96, (100,)), (128, (100,))):
        for nq in rows:  # CTAs that have all of them
            q, k = empty(dtype, 2, 12, nq, d), empty(dtype, 2, 12, 3000, d)
            found |= kernels(q, k, k, "H200", "hopper", backward=True)
    for n, nk, d in ((400, 256, 64), (60, 130, 64), (60, 190, 32)):  # heads that share one of k
        q, k = empty(dtype, 16, 12, n, d), empty(dtype, 16, 12 if n == 400 else 6, nk, d)
        found |= kernels(q, k, k, "H200", "hopper", backward=True)
    x = empty(dtype, 16, 12, 200, 128)
    found |= kernels(x, x, x, "H200", "hopper", causal=True, backward=True)
    ends = integers(65)
    # Whole blocks, and tails of a few keys, by each tile.
    for batch, heads, rows, d in (
        (2, 16, 4096, 72), (4, 16, 2304, 72), (4, 16, 2048, 80), (16, 16, 577, 64),
        (8, 16, 1025, 64), (16, 25, 257, 128), (32, 16, 257, 64),
    ):  # fmt: skip
        x = empty(dtype, batch, heads, rows, d)
        found |= kernels(x, x, x, "H200", "hopper")
    for heads, n, nk in ((2, 64, 77), (8, 4096, 129)):  # few keys of few rows and of many
        q, k = empty(dtype, 1, heads, n, 64), empty(dtype, 1, heads, nk, 64)
        found |= kernels(q, k, k, "H200", "hopper")
    for d in (96, 128, 256):  # short packed sequences
        x = empty(dtype, 64 * (100 if d < 256 else 40), 12, d)
        found |= kernels(x, x, x, "H200", "hopper", cu_seqlens_q=ends, cu_seqlens_k=ends)
    for d, dv in ((80, 80), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)):
        q, k, v = empty(dtype, 6400, 28, d), empty(dtype, 6400, 4, d), empty(dtype, 6400, 4, dv)
        found |= kernels(q, k, v, "H200", "hopper", cu_seqlens_q=ends, cu_seqlens_k=ends)
    x = empty(dtype, 64 * 700, 12, 128)  # long ones are listed
    found |= kernels(x, x, x, "H200", "hopper", cu_seqlens_q=ends, cu_seqlens_k=ends)
    for d in (64, 128):  # query heads that share a head of k are shared out
        q, k = empty(dtype, 2, 16, 1024, d), empty(dtype, 2, 2, 1024, d)
        found |= kernels(q, k, k, "A100", "ampere", causal=True, backward=True)
    for device, d, dv in (("A10G", 160, 160), ("A100", 192, 128)):
        q, v = empty(dtype, 2, 8, 2048, d), empty(dtype, 2, 8, 2048, dv)
        found |= kernels(q, q, v, device, "ampere", backward=True)
    with _gradients.asked_for(deterministic=True):
        x = empty(dtype, 2, 8, 2048, 192)
        found |= kernels(x, x, x, "H200", "ampere", backward=True)
        for d in (40, 104):  # sums of dQ of their own size
            x = empty(dtype, 8, 16, 577, d)
            found |= kernels(x, x, x, "H200", "hopper", causal=True, backward=True)
        for d in (32, 64):  # short tiles with many sums
            q, k = empty(dtype, 1, 2, 100, d), empty(dtype, 1, 2, 300, d)
            found |= kernels(q, k, k, "H200", "hopper", window=(200, 200), backward=True)
    return found


def caches_of_many_rows(dtype: torch.dtype) -> set[str]:
    """Contiguous or in pages of 16 or 64 rows, few row tiles or many; 8 bits; mixed lengths."""
    found = set()
    for d, page, batch in itertools.product((64, 128, 256), (None, 16, 64), (1, 64)):
        q, cache = empty(dtype, batch, 1024, 4, d), empty(dtype, batch, 1024, 2, d)
        given = {"cache_seqlens": integers(batch)}
        if page is not None:
            cache = empty(dtype, batch * (1024 // page), page, 2, d)
            given["page_table"] = integers(batch, 1024 // page)
        found |= kernels(q, cache, cache, "H200", "hopper", **given)
    q = empty(dtype, 2, 1024, 4, 128)
    of_8_bits, row = (empty(torch.float8_e4m3fn, 2, n, 2, 128) for n in (2048, 1))
    new = {"k_new": row, "v_new": row, "cache_seqlens": integers(2)}
    found |= kernels(q, of_8_bits, of_8_bits, "H200", "hopper", **new)
    for d in (64, 128):  # prompts and decoding
        steps, pages = empty(dtype, 1024, 16, d), empty(dtype, 512, 16, 2, d)
        found |= kernels(
            steps, pages, pages, "H200", causal=True, max_seqlen_q=512,
            page_table=integers(32, 16), cache_seqlens=integers(32), cu_seqlens_q=integers(33),
        )  # fmt: skip
    return found


def latent_caches(dtype: torch.dtype) -> set[str]:
    q, qv, k_cache, v_cache = (
        empty(dtype, 2, rows, heads, dim) for rows, heads in ((1, 4), (1024, 1))
        for dim in (64, 512)
    )  # fmt: skip
    new = {f"{name}_new": empty(dtype, 2, 1, 1, dim) for name, dim in (("k", 64), ("v", 512))}
    whole = new | {"cache_seqlens": integers(2), "qv": qv, "num_splits": 2}
    found = kernels(q, k_cache, v_cache, "A100", "ampere", **whole)
    found |= kernels(q, k_cache, v_cache, "H200", "hopper", **whole)
    listed = {"qv": qv, "physical_indices": True, "key_indices": integers(2, 1, 1, 64)}
    for device in ("A100", "H200"):
        for more in ({}, {"out_dtype": torch.float32}, {"softcap": 9.0}):
            found |= kernels(q, k_cache, v_cache, device, **more, **listed)
    if dtype == torch.bfloat16:
        rows = empty(torch.float8_e4m3fn, 9, 8, 1, 656)
        for device, heads in (("A100", 4), ("H200", 4), ("H200", 128)):
            of_heads = listed | {"qv": empty(dtype, 2, 1, heads, 512)}
            wide = empty(dtype, 2, 1, heads, 64)
            for more in ({}, {"softcap": 9.0}):
                of_rows = of_heads | more | {"packed_rows": "fp8_656"}
                found |= kernels(wide, rows, rows, device, **of_rows)
    return found


def other_numbers(dtype: torch.dtype) -> set[str]:
    """fp32 outputs, and four bits on request."""
    found = set()
    for d in (64, 128):
        q, k = empty(dtype, 2, 16, 1024, d), empty(dtype, 2, 2, 1024, d)
        found |= kernels(q, k, k, "H200", "hopper", out_dtype=torch.float32)
        found |= kernels(q, k, k, "RTX 5090", "blackwell_consumer", approximate="nvfp4")
    return found


def in_turns(dtype: torch.dtype) -> set[str]:
    """Deterministic gradients of few rows beside more and more keys."""
    found = set()
    device = find_device("H200")
    # Heads with all columns of the tile, and with fewer.
    dims = (32, 32), (64, 64), (56, 56), (96, 96), (128, 128), (120, 120), (192, 128), (256, 256)
    for (d, dv), rows, keys in itertools.product(
        dims, (40, 64, 128, 300, 600), (50, 200, 950, 8192)
    ):
        q, out = empty(dtype, 1, 4, rows, d), empty(dtype, 1, 4, rows, dv)
        k, v = empty(dtype, 1, 4, keys, d), empty(dtype, 1, 4, keys, dv)
        lse = empty(torch.float32, 1, 4, rows)
        request = _gradients.Request(out, q, k, v, out, lse, None, _options.complete({}))
        into = _gradients.Gradients.like(request)
        decision = _gradients.decide(request, into, device, "hopper", deterministic=True)
        assert decision.plan is not None
        found |= set(decision.plan.kernels)
    return found


def gradients_of_many_heads(dtype: torch.dtype) -> set[str]:
    """ampere's, whose tiles fill every SM."""
    found = set()
    for d, (heads, n) in itertools.product((32, 64, 96, 128, 192, 256), ((800, 160), (200, 1024))):
        x = empty(dtype, 1, heads, n, d)
        found |= kernels(x, x, x, "H200", "ampere", backward=True)
    return found


def block_scales() -> set[str]:
    """MXFP8 and NVFP4 inputs."""
    found = set()
    for dtype, d in itertools.product((torch.float8_e4m3fn, torch.float8_e5m2), (64, 128, 256)):
        q = empty(dtype, 1, 2, 64, d)
        scales = empty(torch.float8_e8m0fnu, 1, 2, 64, d // 32)
        of_v = empty(torch.float8_e8m0fnu, 1, 2, 2, d)
        found |= kernels(
            q, q, q, "RTX 5090", "blackwell_consumer",
            q_descale=scales, k_descale=scales, v_descale=of_v,
        )  # fmt: skip
    for d in (64, 128):
        x = torch.ones(1, 2, 64, d)
        made = {of: archflash.quantize_nvfp4(x, dim=-2 if of == "v" else -1) for of in "qkv"}
        plan = _nvfp4_attention._plan(made, {}, torch.bfloat16, "blackwell_consumer", False)
        assert plan is not None
        found |= set(plan.kernels)
    return found


def all_kernels() -> set[str]:
    found = beside_attention() | block_scales()
    for dtype in (torch.float32, *BOTH):
        found |= gradients(dtype) | few_keys_and_lists(dtype) | caches(dtype)
        found |= gradients_of_lists(dtype)
    for dtype in BOTH:
        found |= masks_and_dropout(dtype) | more_gradients(dtype) | caches_of_many_rows(dtype)
        found |= latent_caches(dtype) | other_numbers(dtype) | in_turns(dtype)
        found |= gradients_of_many_heads(dtype)
        found |= every_key_seen(dtype) | keys_up_to_one(dtype)
    return found
