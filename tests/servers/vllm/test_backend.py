"""The attention backend in vLLM's own classes: its caches, layouts, metadata and wrappers."""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention.chunked_local_attention import (
    create_chunked_local_attention_backend,
)
from vllm.model_executor.layers.attention.cross_attention import create_cross_attention_backend
from vllm.model_executor.layers.attention.encoder_only_attention import (
    create_encoder_only_attention_backend,
)
from vllm.platforms.interface import DeviceCapability
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens
from vllm.v1.attention.ops.dcp import _lse_weighted_combine
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.kv_cache_interface import KVCacheLayout

import archflash
from archflash.integrations.vllm import register
from archflash.integrations.vllm_backend import ArchflashBackend
from tests.servers import models

from .server import DIM, FP8, HEADS, HEADS_KV, PAGE, Server, check, metadata, rand

STEPS = ((5, 2, 0), (1, 1, 4), (1, 1, 1), (2, 2, 2))  # prefill, a mixed batch, decoding, drafts
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "window": ({"sliding_window": 3}, {"window": (2, 0)}),
    "softcap": ({"logits_soft_cap": 2.0}, {"softcap": 2.0}),
    "sinks": ({"sinks": torch.arange(4.0)}, {"sinks": torch.arange(4.0)}),
    "alibi": ({"alibi_slopes": [0.5, 1, 0, 2]}, {"alibi_slopes": torch.tensor([0.5, 1, 0, 2])}),
    "values of 32": ({"dim_v": 32}, {}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_prefill_decoding_mixed_batches_and_drafts(name: str) -> None:
    theirs, ours = OPTIONS[name]
    server = Server(ArchflashBackend, **theirs)
    for number, lengths in enumerate(STEPS):
        server.check(*server.step(lengths, seed=10 * number), lengths, **ours)


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
@pytest.mark.parametrize("layout", KVCacheLayout, ids=lambda x: x.name)
def test_every_layout_of_a_cache(layout: KVCacheLayout, dtype: str) -> None:
    server = Server(ArchflashBackend, dtype, layout)
    for number, lengths in enumerate(STEPS):
        server.check(*server.step(lengths, seed=10 * number), lengths)


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("per_head", [False, True])
def test_scales_of_a_cache_in_8_bits(dtype: str, per_head: bool) -> None:
    server = Server(ArchflashBackend, dtype)
    if per_head:
        server.layer._k_scale = torch.tensor([0.5, 4.0])
        server.layer._v_scale = torch.tensor([2.0, 0.25])
    for number, lengths in enumerate(STEPS):
        server.check(*server.step(lengths, seed=10 * number), lengths)


@pytest.mark.parametrize("layout", [KVCacheLayout.LBNHC, KVCacheLayout.LHBNC], ids=lambda x: x.name)
@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_a_kernel_takes_the_caches_as_they_are(dtype: str, layout: KVCacheLayout) -> None:
    """Views of a cache have a head stride of two head dims: kernels read them without a copy."""
    server = Server(ArchflashBackend, dtype, layout, sliding_window=4)
    with archflash.force("ampere"):
        for number, lengths in enumerate(STEPS[:2]):
            server.check(*server.step(lengths, seed=10 * number), lengths, window=(3, 0))


def test_without_the_causal_rule_a_window_has_two_sides() -> None:
    server = Server(ArchflashBackend, sliding_window=2)
    out = server.step((5, 2, 3), causal=False)
    server.check(*out, (5, 2, 3), causal=False, window=(1, 1))


@pytest.mark.parametrize("window", [None, 3])
def test_causal_for_each_request(window: int | None) -> None:
    server = Server(ArchflashBackend, sliding_window=window)
    server.step((2, 1, 3), seed=5)
    lengths = (3, 2, 2)
    q, out = server.step(lengths, causal=torch.tensor([1, 0, 1], dtype=torch.int32))
    left = None if window is None else window - 1
    at = 0
    for request, (length, causal) in enumerate(zip(lengths, (True, False, True), strict=True)):
        part = slice(at, at + length)
        window_of = (left, 0 if causal else left)
        rows = [server.rows[request]]
        check(q[part], out[part], rows, (length,), causal=causal, window=window_of)
        at += length


def with_images(clamped: bool) -> Server:
    server = Server(ArchflashBackend, sliding_window=4)
    config = VllmConfig()
    config.model_config = SimpleNamespace(is_mm_prefix_lm=True, rswa_window=None)
    cls = ArchflashBackend.get_builder_cls()
    assert cls.get_cudagraph_support(config, server.spec) == AttentionCGSupport.UNIFORM_BATCH
    server.builder = cls(server.spec, ["layer"], config, torch.device("cpu"))
    server.layer.mm_prefix_clamp_sliding_window = clamped
    return server


@pytest.mark.parametrize("implementation", ["torch", "ampere"])
@pytest.mark.parametrize("clamped", [False, True])
def test_images_whose_rows_see_one_another(clamped: bool, implementation: str) -> None:
    """Two chunks of a prompt with an image in each and one that both have a part of."""
    server = with_images(clamped)
    images = {0: [(1, 2), (3, 9)], 2: [(0, 4)]}
    at = [0, 0, 0]
    with archflash.force(implementation):
        for lengths in ((5, 2, 3), (4, 1, 1)):
            q, out = server.step(lengths, seed=at[0], mm_req_doc_ranges=images)
            row = 0
            for request, length in enumerate(lengths):
                rows = server.rows[request]
                for position in range(at[request], at[request] + length):
                    seen = set(range(max(0, position - 3), position + 1))
                    for first, last in images.get(request, []):
                        if first <= position <= last:
                            seen |= set(range(first, last + 1))
                    if clamped:
                        seen = {key for key in seen if key > position - 4}
                    kept = [rows[key] for key in sorted(seen) if key < len(rows)]
                    part = slice(row, row + 1)
                    check(q[part], out[part], [kept], (1,), causal=False)
                    row += 1
                at[request] += length


def with_prefixes(window: int) -> Server:
    """R-SWA."""
    server, config = Server(ArchflashBackend), VllmConfig()
    config.model_config = SimpleNamespace(is_mm_prefix_lm=False, rswa_window=window)
    cls = ArchflashBackend.get_builder_cls()
    assert cls.get_cudagraph_support(config, server.spec) == AttentionCGSupport.ALWAYS
    server.builder = cls(server.spec, ["layer"], config, torch.device("cpu"))
    return server


CAUSAL = {
    "no request": (False, (False,) * 3),
    "some requests": (torch.tensor([1, 0, 1], dtype=torch.int32), (True, False, True)),
}


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("kind", ["images", "clamped images", "a prefix"])
def test_ranges_where_rows_see_later_ones(kind: str, causal: str) -> None:
    given, by_request = CAUSAL[causal]
    lengths, prefixes = (6, 7, 3), torch.tensor([1, 2, 0], dtype=torch.int32)
    images = {0: [(2, 4)], 1: [(0, 5)]}
    window = 3 if kind == "a prefix" else 4
    server = with_prefixes(window) if kind == "a prefix" else with_images("clamped" in kind)
    common = {"rswa_prefix_lens": prefixes} if kind == "a prefix" else {"mm_req_doc_ranges": images}
    q, out = server.step(lengths, causal=given, **common)
    row = 0
    for request, length in enumerate(lengths):
        for position in range(length):
            keys = set(range(position + 1 if by_request[request] else length))
            if kind == "a prefix":
                seen = {x for x in keys if x < prefixes[request] or x > position - window}
            else:
                seen = {x for x in keys if abs(position - x) < window}
                for first, last in images.get(request, []):
                    if first <= position <= last:
                        after = position - window if kind == "clamped images" else -1
                        seen |= {x for x in range(first, last + 1) if x > after}
            kept = [server.rows[request][x] for x in sorted(seen)]
            check(q[row : row + 1], out[row : row + 1], [kept], (1,), causal=False)
            row += 1


@pytest.mark.parametrize("implementation", ["torch", "ampere"])
def test_a_prefix_that_all_rows_see_beside_their_window(implementation: str) -> None:
    window = 3
    server = with_prefixes(window)
    prefixes, at = torch.tensor([4, 0, 2], dtype=torch.int32), [0, 0, 0]
    with archflash.force(implementation):
        for lengths in ((6, 4, 1), (1, 2, 6)):
            q, out = server.step(lengths, seed=at[0], rswa_prefix_lens=prefixes)
            row = 0
            for request, length in enumerate(lengths):
                for position in range(at[request], at[request] + length):
                    kept = [
                        x
                        for key, x in enumerate(server.rows[request][: position + 1])
                        if key < prefixes[request] or key > position - window
                    ]
                    check(q[row : row + 1], out[row : row + 1], [kept], (1,), causal=False)
                    row += 1
                at[request] += length


def test_encoders_have_no_cache() -> None:
    for attn_type in (AttentionType.ENCODER_ONLY, AttentionType.ENCODER):
        backend = create_encoder_only_attention_backend(ArchflashBackend)
        server = Server(backend, attn_type=attn_type, sliding_window=2)
        server.cache = torch.tensor([])
        out = server.step((5, 2, 3))
        server.check(*out, (5, 2, 3), causal=False, window=(1, 1))


def test_cross_attention_to_an_encoder() -> None:
    backend = create_cross_attention_backend(ArchflashBackend)
    server = Server(backend, attn_type=AttentionType.ENCODER_DECODER)
    of_encoder = (4, 0, 7)  # the second request has its rows already, of a step before
    keys, values = rand(11, HEADS_KV, DIM, seed=1), rand(11, HEADS_KV, DIM, seed=2)
    common = {
        "encoder_seq_lens": torch.tensor([4, 5, 7], dtype=torch.int32),
        "encoder_seq_lens_cpu": torch.tensor([4, 5, 7]).numpy(),
    }
    before = list(zip(rand(5, HEADS_KV, DIM, seed=3), rand(5, HEADS_KV, DIM, seed=4), strict=True))
    for position, row in enumerate(before):
        page = server.table[1, position // PAGE]
        server.cache[page, :, position % PAGE] = torch.cat(row, -1)
    pairs = list(zip(keys, values, strict=True))
    server.rows = [pairs[:4], before, pairs[4:]]
    lengths, q = (2, 1, 3), rand(6, HEADS, DIM, seed=5)
    batch = server.builder.build(0, metadata(lengths, (2, 4, 3), server.table, [0] * 6, **common))
    assert len(batch.slot_mapping) == sum(of_encoder)
    output = torch.empty_like(q)
    server.impl.forward(server.layer, q, keys, values, server.cache, batch, output)
    server.check(q, output, lengths, causal=False)


def test_chunked_local_attention() -> None:
    server = Server(create_chunked_local_attention_backend(ArchflashBackend, PAGE))
    server.step((2, 1, 3), seed=5)
    lengths = (3, 2, 2)
    q, out = server.step(lengths)
    at = 0
    for request, length in enumerate(lengths):
        first = len(server.rows[request]) - length
        for row in range(length):
            seen = server.rows[request][(first + row) // PAGE * PAGE : first + row + 1]
            part = slice(at + row, at + row + 1)
            check(q[part], out[part], [seen], (1,))
        at += length


def test_the_block_table_of_other_layers() -> None:
    server, other = Server(ArchflashBackend), Server(ArchflashBackend)
    other.table = other.table.flip(0)
    server.step((3, 2, 4))
    q, out = other.step((3, 2, 4))
    slots = other.slots((3, 2, 4))
    batch = server.builder.build(0, metadata((3, 2, 4), (3, 2, 4), server.table, slots))
    updated = server.builder.update_block_table(batch, other.table, torch.tensor(slots))
    again = torch.empty(9, HEADS, DIM, dtype=torch.bfloat16)
    server.impl.forward(server.layer, q, None, None, other.cache, updated, again)
    assert torch.equal(again, out)
    assert batch.block_table.equal(server.table[:, :2])


def test_plans_get_the_pages_that_requests_may_have() -> None:
    server = Server(ArchflashBackend)
    server.builder.drafts = 1
    wide = torch.full((3, 40), -1, dtype=torch.int32)
    wide[:, :3] = server.table
    common = metadata((1, 1, 1), (4, 3, 5), wide, [0] * 3)
    batch = server.builder.build(0, common)
    assert batch.block_table.tolist() == wide[:, :2].tolist()  # for 6 keys
    common.max_seq_len = 6
    assert server.builder.build(0, common).block_table.shape == (3, 4)  # a power of two
    other = server.builder.update_block_table(batch, wide.flip(0), common.slot_mapping)
    assert other.block_table.tolist() == wide.flip(0)[:, :2].tolist()
    graph = server.builder.build_for_cudagraph_capture(common)
    assert graph.block_table.shape == server.builder.build_for_drafting(common, 0).block_table.shape
    assert graph.block_table.shape == (3, 40)


def test_a_draft_changes_numbers_in_the_tensors_of_its_metadata() -> None:
    server = Server(ArchflashBackend)
    assert server.builder.supports_draft_decode_metadata_update
    server.step((4, 3, 5), seed=5)
    common = metadata((1, 1, 1), (4, 3, 5), server.table, [0, 0, 0])
    batch = server.builder.build_for_drafting(common, 0)
    q, expected = server.step((1, 1, 1))
    common.seq_lens.add_(1)  # as a graph of the drafts' loop does
    server.builder.update_draft_decode_metadata(batch)
    out = torch.empty(3, HEADS, DIM, dtype=torch.bfloat16)
    server.impl.forward(server.layer, q, None, None, server.cache, batch, out)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("kind", ["images", "a prefix"])
def test_each_draft_of_a_loop_has_ranges_of_its_own(kind: str) -> None:
    server = with_prefixes(2) if kind == "a prefix" else with_images(clamped=False)
    server.step((4, 3, 5), seed=5)
    ranges = {
        "images": {"mm_req_doc_ranges": {0: [(0, 8)]}},
        "a prefix": {"rswa_prefix_lens": torch.tensor([1, 0, 2], dtype=torch.int32)},
    }[kind]
    common = metadata((1, 1, 1), (5, 4, 6), server.table, [0] * 3, **ranges)
    batch = server.builder.build_for_drafting(common, 0)
    shared = server.builder.update_block_table(batch, batch.block_table, batch.slot_mapping)
    for draft in range(3):
        if draft > 0:
            common.seq_lens.add_(1)
            server.builder.update_draft_decode_metadata(batch)
        q, expected = server.step((1, 1, 1), seed=20 + draft, **ranges)
        for of_layer in (batch, shared):
            out = torch.empty(3, HEADS, DIM, dtype=torch.bfloat16)
            server.impl.forward(server.layer, q, None, None, server.cache, of_layer, out)
            torch.testing.assert_close(out, expected, atol=1e-2, rtol=0)


def test_a_graph_of_any_batch_serves_others_of_its_shapes() -> None:
    """What a CUDA graph keeps is the call with its numbers on the device; here they change between
    the call that is planned and the next one of the same metadata.
    """
    assert ArchflashBackend.get_builder_cls()._cudagraph_support == AttentionCGSupport.ALWAYS
    server = Server(ArchflashBackend)
    server.step((4, 3, 5), seed=5)
    q, expected = server.step((4, 1, 1))
    common = metadata((2, 2, 2), (6, 5, 7), server.table, [0] * 6)
    batch = server.builder.build_for_cudagraph_capture(common)
    out = torch.empty(6, HEADS, DIM, dtype=torch.bfloat16)
    args = (server.layer, q, None, None, server.cache, batch, out)
    for force in (contextlib.nullcontext(), archflash.force("ampere")):
        with force:
            common.query_start_loc.copy_(torch.tensor([0, 2, 4, 6]))
            common.seq_lens.copy_(torch.tensor([6, 5, 7]))
            server.impl.forward(*args)
            common.query_start_loc.copy_(torch.tensor([0, 4, 5, 6]))
            common.seq_lens.copy_(torch.tensor([8, 4, 6]))
            server.impl.forward(*args)
        server.check(q, out, (4, 1, 1))
        torch.testing.assert_close(out, expected, atol=2e-2, rtol=0)


def test_batch_invariance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with archflash.force("ampere"):
        together = Server(ArchflashBackend)
        alone = Server(ArchflashBackend)
        _, out = together.step((6, 2, 3))
        # The third request alone: the same rows of queries, keys and values.
        q, k, v = (rand(13, h, DIM, seed=1 + i) for i, h in enumerate((HEADS, HEADS_KV, HEADS_KV)))
        slots = [int(alone.table[2, i // PAGE]) * PAGE + i % PAGE for i in range(3)]
        batch = alone.builder.build(0, metadata((3,), (3,), alone.table[2:], slots))
        part = torch.empty(3, HEADS, DIM, dtype=torch.bfloat16)
        rows = [x[8:11].contiguous() for x in (q, k, v)]
        alone.impl.do_kv_cache_update(alone.layer, *rows[1:], alone.cache, batch.slot_mapping)
        alone.impl.forward(alone.layer, *rows, alone.cache, batch, part)
        assert torch.equal(part, out[8:])


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
@pytest.mark.parametrize("sinks", [None, torch.arange(4.0)])
def test_ranks_that_share_a_cache(dtype: str, sinks: Any) -> None:
    """Two emulated ranks: vLLM deals rows of the cache out to them, and has a combination of their
    results in plain operations of PyTorch.
    """
    lengths, q = (2, 1, 2), rand(5, HEADS, DIM, seed=1)
    k, v = (rand(5, HEADS_KV, DIM, seed=i) for i in (2, 3))
    whole = Server(ArchflashBackend, dtype)
    whole.step((5, 0, 6), seed=5)
    context = torch.tensor([5, 0, 6], dtype=torch.int32)
    parts = []
    for rank in range(2):
        server = Server(ArchflashBackend, dtype, sinks=sinks)
        for request, rows in enumerate(whole.rows):
            for position, row in enumerate(rows[rank::2]):
                page = int(server.table[request, position // PAGE])
                slot = torch.tensor([page * PAGE + position % PAGE])
                server.impl.do_kv_cache_update(
                    server.layer, *(x[None] for x in row), server.cache, slot
                )
        batch = server.builder.build(0, metadata(lengths, (7, 1, 8), server.table, [0] * 5))
        batch.context_lens = get_dcp_local_seq_lens(context, 2, rank)
        parts.append((server, batch))
    shares: list[Any] = []

    def exchange(*share: Any) -> Any:
        shares.append(share)
        outs, lses = (torch.stack([x[i] for x in shares]) for i in range(2))
        return _lse_weighted_combine(outs, lses, return_lse=True, is_lse_base_on_e=True)

    out = torch.empty_like(q)
    for server, batch in parts:  # the last one has both shares
        args = (server.layer, q, k, v, server.cache, batch, out)
        server.impl.run_shared(*args, lambda queries: queries, exchange)
    ends = (0, 2, 3, 5)
    for request, rows in enumerate(whole.rows):  # rows of this batch come from no cache
        part = slice(ends[request], ends[request + 1])
        rows.extend(zip(k[part], v[part], strict=True))
    whole.check(q, out, lengths, sinks=sinks)


def test_shares_of_a_cache_do_not_show_distances() -> None:
    for impl in ({"sliding_window": 4}, {"alibi_slopes": [1.0] * HEADS}):
        server = Server(ArchflashBackend, **impl)
        with pytest.raises(archflash.UnsupportedError, match="decode context parallelism"):
            server.impl.check_shared()


CONFIGURATION = {
    "head_size": 128,
    "dtype": torch.bfloat16,
    "kv_cache_dtype": "auto",
    "block_size": 16,
    "use_mla": False,
    "has_sink": False,
    "use_sparse": False,
    "use_mm_prefix": False,
    "use_per_head_quant_scales": False,
    "attn_type": AttentionType.DECODER,
    "has_sliding_window": False,
    "use_non_causal": False,
    "use_batch_invariant": False,
    "use_kv_connector": False,
    "use_pcp": False,
    "use_adaptive_verification": False,
    "use_dcp": False,
    "use_rswa": False,
}
SERVED: dict[str, list[Any]] = {
    "head_size": [8, 64, 72, 128, 192, 256, 512],
    "dtype": [torch.float16, torch.bfloat16],
    "kv_cache_dtype": [None, "auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"],
    "block_size": [None, 1, 16, 64, 48],
    "has_sink": [True],
    "use_per_head_quant_scales": [True],
    "attn_type": list(AttentionType),
    "has_sliding_window": [True],
    "use_mm_prefix": [True],
    "use_rswa": [True],
    "use_non_causal": [True],
    "use_batch_invariant": [True],
    "use_kv_connector": [True],
    "use_adaptive_verification": [True],
    "use_dcp": [True],
}
REFUSED: dict[str, list[tuple[Any, str]]] = {
    "head_size": [(100, "head_size not supported"), (576, "head_size not supported")],
    "dtype": [(torch.float32, "dtype not supported")],
    "kv_cache_dtype": [
        ("int8_per_token_head", "kv_cache_dtype not supported"),
        ("nvfp4", "kv_cache_dtype not supported"),
        ("fp8_inc", "kv_cache_dtype not supported"),
        ("float16", "a float16 cache with torch.bfloat16 queries"),
    ],
    "use_mla": [(True, "choose --attention-backend ARCHFLASH_MLA")],
    "use_sparse": [(True, "sparse not supported")],
    "use_pcp": [(True, "PCP not supported")],
}


def reasons(backend: Any = ArchflashBackend, major: int = 9, **changes: Any) -> list[str]:
    return backend.validate_configuration(
        device_capability=DeviceCapability(major, 0), **(CONFIGURATION | changes)
    )


def test_each_row_of_the_configuration_is_served_or_refused_with_a_reason() -> None:
    rows = set(AttentionSelectorConfig._fields)
    assert rows == set(CONFIGURATION) == set(SERVED) | set(REFUSED)
    for name, values in SERVED.items():
        for value in values:
            assert reasons(**{name: value}) == [], (name, value)
    for name, refused in REFUSED.items():
        for value, words in refused:
            (reason,) = reasons(**{name: value})
            assert words in reason, (name, value)
    (reason,) = reasons(head_size=512, kv_cache_dtype="fp8")
    assert "an FP8 cache with head_size 512" in reason
    for name, words in (("use_mm_prefix", "mm_prefix"), ("use_rswa", "R-SWA")):
        for changes, what in (
            ({"kv_cache_dtype": "fp8"}, "an FP8 cache"),
            ({"head_size": 512}, "head_size 512"),
            ({"use_batch_invariant": True}, "batch invariance"),
            ({"use_dcp": True}, "decode context parallelism"),
        ):
            (reason,) = reasons(**{name: True}, **changes)
            assert reason.startswith(f"{words} with {what}")
    (reason,) = reasons(major=7)
    assert reason == "compute capability not supported"


def test_a_kernel_serves_what_is_promised() -> None:
    """On each kind of GPU a kernel serves a decoding and a prefill of every kind, not PyTorch."""

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Any:
        return torch.empty(shape, dtype=dtype, device="meta")

    for gpu, size, dtype, rows, kind in itertools.product(
        ("A100", "H200", "RTX 5090", "B200"),
        SERVED["head_size"],
        ("auto", "fp8", "fp8_e5m2"),
        (1, 300),
        ("plain", "invariant", "ranges"),
    ):
        if reasons(head_size=size, kv_cache_dtype=dtype, use_rswa=kind == "ranges"):
            continue
        options: dict[str, Any] = {
            "plain": {"causal": True, "window": (40, 0), "sinks": empty(8, dtype=torch.float32)},
            "invariant": {"causal": True, "batch_invariant": True},
            "ranges": {"key_ranges": empty(1, 1, 4 * rows, 2, 2)},
        }[kind]
        both = empty(64, 16, 2, 2 * size, dtype=FP8.get(dtype, torch.bfloat16))
        decision = archflash.explain(
            empty(4 * rows, 8, size, dtype=torch.bfloat16),
            both[..., :size],
            both[..., size:],
            device=gpu,
            cache_seqlens=empty(4),
            page_table=empty(4, 9),
            cu_seqlens_q=empty(5),
            max_seqlen_q=rows,
            **options,
        )
        assert not decision.chosen.startswith("torch"), (gpu, size, dtype, rows, kind, decision)


def test_while_vllm_measures_memory_the_output_is_zero() -> None:
    server = Server(ArchflashBackend)
    output = torch.full((3, HEADS * DIM), 7.0)
    args = (server.layer, *(torch.zeros(3, 1, 1) for _ in range(3)), server.cache, None, output)
    assert bool((server.impl.forward(*args) == 0).all())
    with pytest.raises(archflash.UnsupportedError, match="output_scale"):
        server.impl.forward(*args, output_scale=torch.ones(()))


def test_the_entry_point_registers_both_backends_and_their_names() -> None:
    (found,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="archflash")
    found.load()()
    register()  # a second time, as in a process that is forked
    assert AttentionBackendEnum.CUSTOM.get_class() is ArchflashBackend
    assert AttentionBackendEnum["ARCHFLASH"].get_class() is ArchflashBackend
    mla = AttentionBackendEnum["ARCHFLASH_MLA"].get_class()
    assert mla.is_mla()
    assert AttentionBackendEnum[mla.get_name()].get_class() is mla


def test_the_command_line_takes_the_names(tmp_path: Path) -> None:
    register()
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    names = ["--attention-backend", "ARCHFLASH_MLA"]
    names += ["--attention-config.mla_prefill_backend", "CUSTOM"]
    given = EngineArgs.from_cli_args(
        parser.parse_args(["--model", str(models.save("deepseek", tmp_path)), *names])
    )
    assert AttentionBackendEnum[given.attention_backend].get_class().is_mla()
    assert given.attention_config.mla_prefill_backend.get_class().__module__.startswith("archflash")
