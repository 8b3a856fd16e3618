"""The attention backend for latent caches (MLA) in vLLM's own classes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import MLACommonPrefillMetadata
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends.mla.prefill.base import MLADimensions
from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum
from vllm.v1.attention.backends.mla.prefill.selector import MLAPrefillSelectorConfig
from vllm.v1.attention.ops.dcp import _lse_weighted_combine

import archflash
from archflash import reference
from archflash.integrations.vllm import register
from archflash.integrations.vllm_mla import (
    ArchflashMLABackend,
    ArchflashMLADecodeMetadata,
    ArchflashMLAPrefillBackend,
)

from .server import rand
from .test_backend import reasons

HEADS, LATENT, ROPE, PAGE = 4, 512, 64, 4
NOPE, DIM_V, SCALE = 32, 24, 0.05
TABLE = torch.tensor([[7, 2, 9], [0, 11, 5], [3, 1, 8]], dtype=torch.int32)


def impl(dtype: str = "auto", **changes: Any) -> Any:
    given = {
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": dtype,
        "logits_soft_cap": None,
        "attn_type": AttentionType.DECODER,
        "kv_sharing_target_layer_name": None,
        "q_lora_rank": None,
        "kv_lora_rank": LATENT,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "qk_head_dim": NOPE + ROPE,
        "v_head_dim": DIM_V,
        "kv_b_proj": None,
    } | changes
    with set_current_vllm_config(VllmConfig()):
        return ArchflashMLABackend.get_impl_cls()(HEADS, LATENT + ROPE, SCALE, 1, **given)


def written(layer: Any, lengths: tuple[int, ...], dtype: str) -> tuple[Tensor, list[Tensor], Any]:
    """A cache with so many rows of each request, the rows as it holds them, and its layer."""
    of_layer = SimpleNamespace(_k_scale=torch.tensor(0.5 if dtype == "fp8" else 1.0))
    bits = torch.uint8 if dtype == "fp8" else torch.bfloat16
    cache = torch.full((12, PAGE, LATENT + ROPE), 127 if dtype == "fp8" else torch.nan).to(bits)
    held = []
    for request, length in enumerate(lengths):
        rows = rand(length, LATENT + ROPE, seed=request)
        slots = [int(TABLE[request, i // PAGE]) * PAGE + i % PAGE for i in range(length)]
        layer.do_kv_cache_update(
            rows[:, :LATENT], rows[:, None, LATENT:], cache, torch.tensor(slots), dtype,
            of_layer._k_scale,
        )  # fmt: skip
        if dtype == "fp8":
            rows = ((rows.float() / 0.5).to(torch.float8_e4m3fn).float() * 0.5).bfloat16()
        held.append(rows)
    # vLLM's layer hands the cache over as what it is.
    return cache.view(torch.float8_e4m3fn) if dtype == "fp8" else cache, held, of_layer


def decoding(rows: tuple[int, ...], lengths: tuple[int, ...]) -> Any:
    ends = torch.tensor([0, *torch.tensor(rows).cumsum(0)], dtype=torch.int32)
    decode = ArchflashMLADecodeMetadata(
        block_table=TABLE,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        dcp_tot_seq_lens=None,
        query_start_loc=ends,
        max_query_len=max(rows),
    )
    return SimpleNamespace(decode=decode, causal=True)


def check(q: Tensor, out: Tensor, rows: tuple[int, ...], held: list[Tensor]) -> None:
    """Compares with float64: the latent rows are keys, and their first columns values."""
    at = 0
    for new, latent in zip(rows, held, strict=True):
        part = slice(at, at + new)
        tensors = [x.transpose(0, 1)[None] for x in (q[part], latent[:, None], latent[:, None])]
        tensors[2] = tensors[2][..., :LATENT]
        call: dict[str, Any] = {"causal": True, "scale": SCALE}
        exact = reference.attention(*tensors, **call)[0]
        plain = reference.baseline(*tensors, **call)
        report = reference.check(out[part].transpose(0, 1)[None], exact, plain)
        assert report.ok, report
        at += new


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("dtype", ["auto", "fp8"])
@pytest.mark.parametrize("rows", [(1, 1, 1), (2, 1, 3)])
def test_decoding_and_drafts(rows: tuple[int, ...], dtype: str, apart: bool) -> None:
    layer, lengths = impl(dtype), (5, 9, 3)
    cache, held, of_layer = written(layer, lengths, dtype)
    q = rand(sum(rows), HEADS, LATENT + ROPE, seed=9)
    given = (q[..., :LATENT], q[..., LATENT:]) if apart else q
    out, lse = layer.forward_mqa(given, cache, decoding(rows, lengths), of_layer)
    assert lse is None
    check(q, out, rows, held)


def test_a_kernel_reads_the_latent_cache() -> None:
    layer, lengths, rows = impl(), (5, 9, 3), (1, 2, 1)
    cache, held, of_layer = written(layer, lengths, "auto")
    q = rand(sum(rows), HEADS, LATENT + ROPE, seed=9)
    with archflash.force("ampere"):
        out, _ = layer.forward_mqa(
            (q[..., :LATENT], q[..., LATENT:]), cache, decoding(rows, lengths), of_layer
        )
    check(q, out, rows, held)


def test_ranks_that_share_a_latent_cache() -> None:
    lengths, rows = (5, 9, 1), (1, 1, 1)
    q = rand(3, HEADS, LATENT + ROPE, seed=9)
    layer = impl()
    layer.need_to_return_lse_for_decode = True  # as where there are several ranks
    _, held, of_layer = written(layer, lengths, "auto")
    shares = []
    for rank in range(2):
        cache = torch.full((12, PAGE, LATENT + ROPE), torch.nan, dtype=torch.bfloat16)
        parts = [latent[rank::2] for latent in held]
        for request, part in enumerate(parts):
            for i, row in enumerate(part):
                cache[TABLE[request, i // PAGE], i % PAGE] = row
        local = tuple(len(part) for part in parts)
        shares.append(layer.forward_mqa(q, cache, decoding(rows, local), of_layer))
    outs, lses = (torch.stack([share[i] for share in shares]) for i in range(2))
    assert bool((lses[1, 2] == -torch.inf).all())  # the second rank has nothing of the last one
    out = _lse_weighted_combine(outs, lses, is_lse_base_on_e=True).bfloat16()
    for request, latent in enumerate(held):
        part = slice(request, request + 1)
        check(q[part], out[part], (1,), [latent])


@pytest.mark.parametrize("implementation", ["torch", "ampere"])
def test_prefill_of_new_rows_and_of_chunks_of_the_cache(implementation: str) -> None:
    backend = ArchflashMLAPrefillBackend(HEADS, SCALE, LATENT, NOPE, ROPE, DIM_V, VllmConfig())
    lengths, seen = (3, 5), (7, 2)
    ends = torch.tensor([0, 3, 8], dtype=torch.int32)
    ends_seen = torch.tensor([0, 7, 9], dtype=torch.int32)
    q = rand(8, HEADS, NOPE + ROPE, seed=1)
    backend.prepare_metadata(
        MLACommonPrefillMetadata(block_table=TABLE, query_start_loc=ends, max_query_len=5)
    )
    chunk = SimpleNamespace(
        query_start_loc=ends, max_query_len=5, cu_seq_lens=ends_seen, max_seq_len=7
    )
    for causal, rows, ends_k in ((True, sum(lengths), ends), (False, sum(seen), ends_seen)):
        k, both = (rand(rows, HEADS, n, seed=n) for n in (NOPE + ROPE, NOPE + DIM_V))
        v = both[..., NOPE:]  # as vLLM splits it
        out = torch.empty(8, HEADS, DIM_V, dtype=torch.bfloat16)
        with archflash.force(implementation):
            if causal:
                found, lse = backend.run_prefill_new_tokens(q, k, v, True, out=out)
                alone = backend.run_prefill_new_tokens(q, k, v, False)
                assert torch.equal(alone, found)
            else:
                found, lse = backend.run_prefill_context_chunk(chunk, q, k, v, out=out)
        assert found.data_ptr() == out.data_ptr()
        call = {"causal": causal, "scale": SCALE, "cu_seqlens_q": ends, "cu_seqlens_k": ends_k}
        exact, exact_lse = reference.attention(q, k, v, **call)
        report = reference.check(out, exact, reference.baseline(q, k, v, **call))
        assert report.ok, report
        torch.testing.assert_close(lse.double(), exact_lse, atol=2e-2, rtol=0)


def test_each_row_of_the_configuration() -> None:
    latent = {"use_mla": True, "head_size": LATENT + ROPE}
    for served in (
        {}, {"kv_cache_dtype": "fp8"}, {"use_batch_invariant": True}, {"use_dcp": True},
        {"block_size": 64}, {"dtype": torch.float16}, {"use_adaptive_verification": True},
    ):  # fmt: skip
        assert reasons(ArchflashMLABackend, **(latent | served)) == [], served
    for refused, words in (
        ({"use_mla": False}, "non-MLA not supported"),
        ({"use_sparse": True}, "sparse not supported"),
        ({"head_size": 320}, "head_size not supported"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype not supported"),
        ({"kv_cache_dtype": "fp8_ds_mla"}, "kv_cache_dtype not supported"),
        ({"kv_cache_dtype": "float16"}, "a float16 cache with torch.bfloat16 queries"),
        ({"has_sink": True}, "attention sinks not supported"),
        ({"has_sliding_window": True}, "sliding window not supported"),
        ({"use_non_causal": True}, "non-causal attention not supported"),
        ({"use_pcp": True}, "PCP not supported"),
    ):
        found = reasons(ArchflashMLABackend, **(latent | refused))
        assert any(words in reason for reason in found), refused
    for name, value in (("alibi_slopes", [1.0]), ("sliding_window", 4), ("logits_soft_cap", 2.0)):
        with pytest.raises(archflash.UnsupportedError, match=name):
            impl(**{name: value})


def test_graphs_hold_decoding_of_any_mixture_of_drafts() -> None:
    builder = ArchflashMLABackend.get_builder_cls()
    assert builder._cudagraph_support == AttentionCGSupport.UNIFORM_BATCH
    assert builder.get_varlen_cudagraph_max_query_len(VllmConfig(), None) == 1


def test_the_name_of_the_prefill() -> None:
    register()
    backend = MLAPrefillBackendEnum.CUSTOM.get_class()
    assert backend is ArchflashMLAPrefillBackend
    dimensions = MLADimensions(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    config = MLAPrefillSelectorConfig(torch.bfloat16, dimensions)
    assert backend.validate_configuration(DeviceCapability(9, 0), config) == []
    (reason,) = backend.validate_configuration(DeviceCapability(7, 5), config)
    assert "7.5" in reason
