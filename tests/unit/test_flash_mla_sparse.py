"""FlashMLA's sparse functions, by PyTorch's operations: against the formula over the rows that each
query names, which is written here once more.
"""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor

from archflash import attention_with_kvcache, merge_attention
from archflash.compat import flash_mla

LATENT = 512


def rand(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def formula(
    q: Tensor, rows: Tensor, scale: float, sink: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, largest score and log-sum-exp of q (heads, d) on rows (n, d), in float64."""
    scores = q.double() @ rows.double().T * scale
    lse = scores.logsumexp(-1)
    of_output = lse if sink is None else torch.logaddexp(lse, sink.double())
    weights = (scores - of_output.masked_fill(of_output == -math.inf, 0.0)[:, None]).exp()
    largest = scores.amax(-1) if len(rows) else torch.full_like(lse, -math.inf)
    return weights @ rows.double()[:, :LATENT], largest, lse.masked_fill(lse == -math.inf, math.inf)


def packed(pages: int, size: int, d: int, seed: int) -> tuple[Tensor, Tensor]:
    """A packed cache (pages, size, 1, bytes) and the rows (pages * size, d) that it holds."""
    generator = torch.Generator().manual_seed(seed)
    group, numbers = (128, 512) if d == 576 else (64, 448)
    stored = torch.randn(pages, size, numbers, generator=generator).to(torch.float8_e4m3fn)
    exponents = torch.randint(-3, 2, (pages, size, numbers // group), generator=generator)
    scales = exponents.float().exp2()
    rest = torch.randn(pages, size, 64, generator=generator).bfloat16()
    held = (stored.float() * scales.repeat_interleave(group, -1)).bfloat16()
    rows = torch.cat([held, rest], -1).flatten(0, 1)
    if d == 576:
        parts = [x.view(torch.uint8) for x in (stored, scales, rest)]
        return torch.cat(parts, -1)[:, :, None].view(torch.float8_e4m3fn), rows
    # The pages lie further apart than they are long, as FlashMLA pads them.
    length = size * 584
    memory = torch.full((pages, -(-length // 576) * 576), 255, dtype=torch.uint8)
    data = torch.cat([stored.view(torch.uint8), rest.view(torch.uint8)], -1)
    memory[:, : size * 576] = data.flatten(1)
    bytes_of_scales = torch.cat([(exponents + 127).byte(), torch.zeros(pages, size, 1)], -1).byte()
    memory[:, size * 576 : length] = bytes_of_scales.flatten(1)
    return memory[:, :length].unflatten(1, (size, 1, 584)), rows


def seen(rows: Tensor, indices: Tensor, length: int | None) -> Tensor:
    named = indices[:length]
    return rows[named[(named >= 0) & (named < len(rows))].long()]


@pytest.mark.parametrize("d", [576, 512])
def test_prefill_reads_the_rows_that_each_query_names(d: int) -> None:
    q, kv = rand(4, 3, d, seed=1), rand(20, 1, d, seed=2)
    indices = torch.randint(-2, 24, (4, 1, 9), generator=torch.Generator().manual_seed(3)).int()
    indices[2] = 1 << 30
    lengths = torch.tensor([9, 0, 9, 4], dtype=torch.int32)
    sink = torch.tensor([0.5, math.inf, -math.inf])
    out, largest, lse = flash_mla.flash_mla_sparse_fwd(
        q, kv, indices, 0.05, attn_sink=sink, topk_length=lengths
    )
    for row in range(4):
        rows = seen(kv[:, 0], indices[row, 0], int(lengths[row]))
        want, want_largest, want_lse = formula(q[row], rows, 0.05, sink)
        torch.testing.assert_close(out[row].double(), want, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(largest[row].double(), want_largest, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(lse[row].double(), want_lse, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("more", [False, True], ids=["one", "two"])
@pytest.mark.parametrize("d", [576, 512])
def test_decoding_reads_packed_rows_of_one_cache_or_two(d: int, more: bool) -> None:
    q = rand(2, 2, 3, d, seed=4)
    generator = torch.Generator().manual_seed(5)
    caches = [packed(3, 5, d, seed=6), packed(2, 7, d, seed=7)]
    lists = [torch.randint(-2, 16, (2, 2, n), generator=generator).int() for n in (8, 5)]
    lengths = [torch.tensor([8, 0], dtype=torch.int32), torch.tensor([3, 5], dtype=torch.int32)]
    sink = torch.tensor([0.5, 4.0, -math.inf])
    extra = {}
    if more:
        extra = {
            "extra_k_cache": caches[1][0], "extra_indices_in_kvcache": lists[1],
            "extra_topk_length": lengths[1],
        }  # fmt: skip
    metadata, _ = flash_mla.get_mla_metadata()
    out, lse = flash_mla.flash_mla_with_kvcache(
        q, caches[0][0], None, None, LATENT, metadata, None, 0.05, False, True, lists[0], sink,
        topk_length=lengths[0], **extra,
    )  # fmt: skip
    scopes = range(2 if more else 1)
    for batch in range(2):
        for row in range(2):
            rows = torch.cat([
                seen(caches[i][1], lists[i][batch, row], int(lengths[i][batch])) for i in scopes
            ])  # fmt: skip
            want, _, want_lse = formula(q[batch, row], rows, 0.05, sink)
            torch.testing.assert_close(out[batch, row].double(), want, atol=2e-2, rtol=2e-2)
            torch.testing.assert_close(lse[batch, :, row].double(), want_lse, atol=1e-4, rtol=1e-4)


def test_what_two_caches_give_is_rounded_once() -> None:
    q = rand(2, 2, 3, 576, seed=4)
    caches = [rand(3, 5, 1, 576, seed=6), rand(2, 7, 1, 576, seed=7)]
    generator = torch.Generator().manual_seed(5)
    lists = [torch.randint(0, 14, (2, 2, n), generator=generator).int() for n in (8, 5)]
    out, _ = flash_mla.flash_mla_with_kvcache(
        q, caches[0], None, None, LATENT, softmax_scale=0.05, indices=lists[0],
        extra_k_cache=caches[1], extra_indices_in_kvcache=lists[1],
    )  # fmt: skip
    parts = [
        attention_with_kvcache(
            q, cache, dv=LATENT, key_indices=some[:, None], physical_indices=True, scale=0.05,
            return_lse=True, out_dtype=torch.float32,
        )
        for cache, some in zip(caches, lists, strict=True)
    ]  # fmt: skip
    merged, _ = merge_attention(*zip(*parts, strict=True), layout="bnhd")
    assert merged.dtype == torch.float32
    assert torch.equal(out, merged.bfloat16())


def test_what_does_not_fit_is_refused() -> None:
    q, indices = rand(1, 1, 2, 576, seed=1), torch.zeros(1, 1, 4, dtype=torch.int32)
    cache, _ = packed(2, 4, 512, seed=2)
    given = (None, None, LATENT, None, None, 0.1)
    with pytest.raises(ValueError, match="rows of 584 bytes for q of 576 columns"):
        flash_mla.flash_mla_with_kvcache(q, cache, *given, False, True, indices)
    with pytest.raises(ValueError, match="causal is True with indices"):
        flash_mla.flash_mla_with_kvcache(q, cache, *given, True, True, indices)
    other = (None, None, 256, None, None, 0.1)
    with pytest.raises(ValueError, match="head_dim_v is 256 with indices"):
        flash_mla.flash_mla_with_kvcache(q, cache, *other, False, True, indices)
    for alone in ({"extra_k_cache": cache}, {"extra_topk_length": indices[:, 0, 0]}):
        with pytest.raises(ValueError, match="given alone"):
            flash_mla.flash_mla_with_kvcache(q, cache, *given, False, True, indices, **alone)
    with pytest.raises(ValueError, match="q has 300 columns"):
        flash_mla.flash_mla_sparse_fwd(q[0, :, :, :300], rand(9, 1, 300, seed=3), indices, 0.1)
    with pytest.raises(ValueError, match=r"they must have 576$"):  # it takes no packed rows
        flash_mla.flash_mla_sparse_fwd(q[0], rand(9, 1, 656, seed=3), indices, 0.1)


def test_each_wrong_tensor_is_named_as_it_was_given() -> None:
    q, rows = rand(2, 3, 4, 576, seed=1), rand(5, 6, 1, 576, seed=2)
    lists = torch.zeros(2, 3, 7, dtype=torch.int32)
    call = {"q": q, "k_cache": rows, "head_dim_v": LATENT, "softmax_scale": 0.1, "indices": lists}
    bytes_of_rows = packed(2, 6, 576, seed=3)[0]
    extra = {"extra_k_cache": rows, "extra_indices_in_kvcache": lists}
    counts = torch.ones(2, dtype=torch.int32)
    for wrong, words in (
        ({"q": q[0]}, "q has shape (3, 4, 576): it must have 4 dimensions"),
        ({"k_cache": rows[:, :, 0]}, "k_cache has shape (5, 6, 576): it must have 4"),
        ({"k_cache": rows[..., :512]}, "k_cache has rows of 512 columns for q of 576"),
        ({"k_cache": bytes_of_rows}, "or 656 bytes with is_fp8_kvcache=True"),
        ({"is_fp8_kvcache": True}, "k_cache has rows of 576 bytes"),
        (
            {"is_fp8_kvcache": True, "k_cache": bytes_of_rows.view(torch.int8)},
            "k_cache has dtype torch.int8: packed rows must be torch.uint8",
        ),
        ({"indices": lists.long()}, "indices has dtype torch.int64"),
        ({"indices": lists[:, :1]}, "indices has shape (2, 1, 7) for q of 2 x 3 rows"),
        ({"topk_length": counts[:1]}, "topk_length has shape (1,) for q of 2 x 3 rows"),
        (extra | {"extra_k_cache": bytes_of_rows}, "extra_k_cache has rows of 656 columns"),
        (
            extra | {"extra_indices_in_kvcache": lists[:1]},
            "extra_indices_in_kvcache has shape (1, 3, 7)",
        ),
        (extra | {"extra_topk_length": counts.float()}, "extra_topk_length has dtype"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            flash_mla.flash_mla_with_kvcache(
                **{"block_table": None, "cache_seqlens": None} | call | wrong
            )
    kv = rows.flatten(0, 1)
    for prefill, words in (
        ((q[0], kv[:, 0], lists[0][:, None]), "kv has shape (30, 576): it must have 3 dimensions"),
        ((q[0], kv[..., :512], lists[0][:, None]), "kv has rows of 512 columns for q of 576"),
        ((q[0], kv, lists[0][:1, None]), "indices has shape (1, 1, 7) for q of 3 rows"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            flash_mla.flash_mla_sparse_fwd(*prefill, 0.1)


def test_packed_rows_in_compiled_calls_and_beside_descales() -> None:
    q, qv = rand(2, 1, 4, 64, seed=1), rand(2, 1, 4, LATENT, seed=2)
    cache, _ = packed(3, 4, 576, seed=2)
    rows = cache.view(torch.float8_e4m3fn)
    call = {
        "qv": qv, "packed_rows": "fp8_656", "physical_indices": True,
        "key_indices": torch.tensor([[[[0, 9, 5]]]], dtype=torch.int32), "scale": 0.1,
    }  # fmt: skip
    expected = attention_with_kvcache(q, rows, rows, **call)
    assert expected.shape == (2, 1, 4, LATENT)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: attention_with_kvcache(x, rows, rows, **call) * 1.0, backend="aot_eager"
    )
    assert torch.equal(compiled(q), expected)
    with pytest.raises(ValueError, match=r"v_cache is .* with packed_rows"):
        attention_with_kvcache(q, rows, rows[..., :16], **call)
    with pytest.raises(ValueError, match="descale is given with packed_rows"):
        attention_with_kvcache(q, rows, rows, v_descale=torch.ones(2, 1), **call)
