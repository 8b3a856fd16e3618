"""The attention backend with SGLang's own pools, layers and batches, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.arg_groups import choices
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import (
    MHATokenToKVPool,
    MHATokenToKVPoolMXFP8,
    MLATokenToKVPool,
    ReqToTokenPool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import get_context
from sglang.srt.speculative.draft_utils import DraftBackendFactory
from sglang.srt.speculative.eagle_info import EagleDraftInput, EagleVerifyInput
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from torch import Tensor

import archflash
from archflash import reference

HEADS, HEADS_KV, DIM = 4, 2, 16
REQUESTS, LONGEST = 3, 48
SCALE = 0.3
# Rows that each request gets: prefill, decoding, a chunk of each, decoding.
STEPS = ((5, 2, 3), (1, 1, 1), (4, 1, 2), (1, 1, 1))


@pytest.fixture(autouse=True, scope="module")
def plugins() -> None:
    load_plugins()


@pytest.fixture
def options() -> Iterator[Any]:
    """Sets options of the server for one test."""
    installed = []

    def install(**fields: Any) -> None:
        override = get_context().override_server_args(
            device="cpu", attention_backend="archflash", **fields
        )
        override.install()
        installed.append(override)

    install()
    yield install
    for override in reversed(installed):
        override.restore()


def rand(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def layer(**more: Any) -> RadixAttention:
    attributes = {name: more.pop(name) for name in ("k_scale", "v_scale") if name in more}
    call = {"num_heads": HEADS, "head_dim": DIM, "scaling": SCALE, "num_kv_heads": HEADS_KV}
    made = RadixAttention(layer_id=more.pop("layer_id", 0), **call | more)
    vars(made).update(attributes)
    return made


class Server:
    """Requests whose rows lie in shuffled pages, with one layer."""

    def __init__(
        self,
        page: int = 1,
        dtype: torch.dtype = torch.bfloat16,
        window_pool: bool = False,
        latent: tuple[int, int] | None = None,
        chunk: int | None = None,
        **more: Any,
    ) -> None:
        per_request = -(-LONGEST // page)
        pages = 1 + torch.randperm(
            REQUESTS * per_request, generator=torch.Generator().manual_seed(1)
        ).view(REQUESTS, per_request)
        slots = pages.repeat_interleave(page, 1) * page + torch.arange(per_request * page) % page
        requests = ReqToTokenPool(REQUESTS, per_request * page, "cpu", enable_memory_saver=False)
        self.slots = requests.req_to_token
        self.slots[1:] = slots.to(torch.int32)
        size = REQUESTS * per_request * page
        common: dict[str, Any] = {"page_size": page, "dtype": dtype, "device": "cpu"}
        if latent is not None:
            pool: Any = MLATokenToKVPool(
                size, kv_lora_rank=latent[0], qk_rope_head_dim=latent[1], layer_num=1,
                enable_memory_saver=False, **common,
            )  # fmt: skip
        elif window_pool:
            pool = SWAKVPool(
                size, size, head_num=HEADS_KV, head_dim=DIM, swa_attention_layer_ids=[0],
                full_attention_layer_ids=[1], **common,
            )  # fmt: skip
            # Each page of the one pool is another page of the other; the place of -1 is the last.
            moved = 1 + torch.randperm(size // page, generator=torch.Generator().manual_seed(2))
            moved = torch.cat([torch.zeros(1, dtype=torch.int64), moved])
            places = moved.repeat_interleave(page) * page + torch.arange(size + page) % page
            pool.register_mapping(torch.cat([places, torch.tensor([-1])]))
        else:
            pool = MHATokenToKVPool(
                size, head_num=HEADS_KV, head_dim=DIM, layer_num=1, enable_memory_saver=False,
                **common,
            )  # fmt: skip
        self.pool, self.window_pool = pool, window_pool
        self.layer = layer(**more)
        self.runner = SimpleNamespace(
            req_to_token_pool=requests, token_to_kv_pool=pool, page_size=page, device="cpu",
            kv_index_translator=SimpleNamespace(is_translating=False), attention_chunk_size=chunk,
            model_config=SimpleNamespace(is_encoder_decoder=False, context_len=LONGEST),
            model=torch.nn.ModuleDict({"attn": self.layer}), is_draft_worker=False,
            draft_attention_backend="archflash",
        )  # fmt: skip
        self.lengths = torch.zeros(REQUESTS, dtype=torch.int64)

    def start(self) -> Any:
        self.backend = ATTENTION_BACKENDS["archflash"](self.runner)
        return self.backend

    def batch(self, rows: tuple[int, ...], mode: ForwardMode | None = None, **more: Any) -> Any:
        """A batch with so many new rows of each request. Verifying does not count them."""
        if mode is None:
            mode = ForwardMode.DECODE if set(rows) == {1} else ForwardMode.EXTEND
        before, after = self.lengths, self.lengths + torch.tensor(rows)
        spans = zip(self.slots[1:], before.tolist(), after.tolist(), strict=True)
        slots = torch.cat([request[a:b] for request, a, b in spans]).long()
        lengths = before if mode == ForwardMode.TARGET_VERIFY else after
        fields: dict[str, Any] = {
            "extend_seq_lens": torch.tensor(rows), "extend_seq_lens_cpu": list(rows),
            "seq_lens": lengths.clone(), "seq_lens_cpu": lengths.clone(), "out_cache_loc": slots,
        }  # fmt: skip
        batch = ForwardBatch(
            forward_mode=mode, batch_size=REQUESTS, input_ids=torch.zeros_like(slots),
            req_pool_indices=1 + torch.arange(REQUESTS), seq_lens_sum=int(lengths.sum()),
            **fields | more,
        )  # fmt: skip
        self.rows, self.lengths = rows, lengths.clone()
        return batch

    def attend(self, batch: Any, seed: int, **more: Any) -> tuple[Tensor, Any]:
        total = len(batch.input_ids)
        q = rand(total, HEADS * DIM, seed=seed)
        k, v = (rand(total, HEADS_KV, DIM, seed=seed + i) for i in (1, 2))
        out = self.backend.forward(q, k, v, self.layer, batch, **more)
        return q.view(total, HEADS, DIM), out

    def cached(self, request: int, count: int) -> list[Tensor]:
        """The first rows of a request in the cache."""
        slots = self.slots[1 + request, :count].long()
        if self.window_pool:
            slots = self.pool.translate_loc_from_full_to_swa(slots)
        scales = (self.layer.k_scale, self.layer.v_scale)
        caches = self.pool.get_kv_buffer(0)
        return [
            (cache[slots].float() * (1 if scale is None else scale)).bfloat16()
            for cache, scale in zip(caches, scales, strict=True)
        ]

    def check(
        self,
        q: Tensor,
        out: Tensor,
        masks: list[Tensor] | None = None,
        lse: Tensor | None = None,
        **call: Any,
    ) -> None:
        """The output agrees with float64 on what the cache holds."""
        out = out.view(-1, HEADS, DIM)
        ends = [0, *torch.tensor(self.rows).cumsum(0).tolist()]
        for request, (first, last) in enumerate(pairwise(ends)):
            keys = int(self.lengths[request])
            if masks is not None:
                call["attn_mask"] = masks[request]
                keys = masks[request].shape[-1]
            k, v = self.cached(request, keys)
            tensors = [x.transpose(0, 1)[None] for x in (q[first:last], k, v)]
            options = {"scale": SCALE, "causal": masks is None} | call
            expected, expected_lse = reference.attention(*tensors, **options)
            baseline = reference.baseline(*tensors, **options)
            report = reference.check(out[first:last].transpose(0, 1)[None], expected, baseline)
            assert report.ok, report
            if lse is not None:
                torch.testing.assert_close(
                    lse[first:last].T[None].double(), expected_lse, atol=1e-2, rtol=0
                )


def test_all_lists_of_names_have_ours() -> None:
    names = ("ATTENTION_BACKEND", "DRAFT_ATTENTION_BACKEND", "DETERMINISTIC_ATTENTION_BACKEND")
    lists = [getattr(choices, f"{name}_CHOICES") for name in names]
    for names_of in (*lists, choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND):
        assert "archflash" in names_of


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}, {}),
    "window": ({"sliding_window_size": 3}, {}, {"window": (3, 0)}),
    "softcap": ({"logit_cap": 2.0}, {}, {"softcap": 2.0}),
    "sinks": ({}, {"sinks": torch.arange(4.0)}, {"sinks": torch.arange(4.0)}),
}


@pytest.mark.parametrize("page", [1, 3, 16, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_prefill_and_decoding(options: Any, name: str, dtype: torch.dtype, page: int) -> None:
    attributes, more, call = CASES[name]
    if dtype.itemsize == 1:
        attributes = attributes | {"k_scale": torch.tensor(0.5), "v_scale": torch.tensor(0.25)}
    server = Server(page, dtype, **attributes)
    backend = server.start()
    for number, rows in enumerate(STEPS):
        batch = server.batch(rows)
        backend.init_forward_metadata(batch)
        server.check(*server.attend(batch, seed=10 * number, **more), **call)


@pytest.mark.parametrize("shape", [(-1, HEADS, DIM), (1, -1, HEADS, DIM)], ids=str)
@pytest.mark.parametrize("rows", [(5, 2, 3), (1, 1, 1)], ids=str)
def test_queries_may_have_heads_in_a_dimension_of_their_own(
    options: Any, rows: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    """As Gemma 3n gives them. All layers of a batch get rows, also those behind the first."""
    server = Server(16)
    with torch.no_grad(), archflash.force("ampere"):
        backend = prefilled(server)
        backend.init_forward_metadata(batch := server.batch(rows))
        q, first = server.attend(batch, seed=10)
        for _ in range(2):
            out = backend.forward(q.reshape(shape), None, None, server.layer, batch)
            assert out.equal(first)


@pytest.mark.parametrize("page", [1, 16])
def test_layers_with_a_window_have_a_pool_of_their_own(options: Any, page: int) -> None:
    server = Server(page, window_pool=True, sliding_window_size=3)
    backend = server.start()
    for number, rows in enumerate(STEPS):
        batch = server.batch(rows)
        backend.init_forward_metadata(batch)
        server.check(*server.attend(batch, seed=10 * number), window=(3, 0))


@pytest.mark.parametrize("kind", ["DECODER_BIDIRECTIONAL", "ENCODER_ONLY"])
@pytest.mark.parametrize("window", [-1, 2])
def test_encoders_see_both_sides(options: Any, kind: str, window: int) -> None:
    options(chunked_prefill_size=-1)
    server = Server(attn_type=AttentionType[kind], sliding_window_size=window)
    backend = server.start()
    backend.init_forward_metadata(batch := server.batch((5, 2, 7)))
    bounds = None if window < 0 else (window, window)
    server.check(*server.attend(batch, seed=0), causal=False, window=bounds)


@pytest.mark.parametrize("asked_by", ["layer", "batch"])
@pytest.mark.parametrize("rows", [(5, 2, 3), (1, 1, 1)])
def test_log_sum_exp(options: Any, asked_by: str, rows: tuple[int, ...]) -> None:
    server = Server()
    backend = server.start()
    backend.init_forward_metadata(batch := server.batch((3, 3, 3)))
    server.attend(batch, seed=0)
    batch = server.batch(rows)
    batch.mha_return_lse = asked_by == "batch"
    backend.init_forward_metadata(batch)
    more = {"return_lse": True} if asked_by == "layer" else {}
    q, (out, lse) = server.attend(batch, seed=9, **more)
    assert out.shape == (sum(rows), HEADS, DIM)
    assert lse.is_contiguous()
    server.check(q, out, lse=lse)


def test_deterministic_rows_do_not_depend_on_the_batch(options: Any) -> None:
    options(enable_deterministic_inference=True)
    server = Server(16)
    with archflash.force("ampere"):
        backend = prefilled(server)
        backend.init_forward_metadata(batch := server.batch((1, 1, 1)))
        q, out = server.attend(batch, seed=10)
        server.check(q, out)
        for name in ("req_pool_indices", "seq_lens", "seq_lens_cpu"):
            setattr(batch, name, getattr(batch, name)[2:])
        backend.init_forward_metadata(batch)
        alone = backend.forward(q[2:].flatten(1), None, None, server.layer, batch)
    assert alone.equal(out[2:])
    assert backend._layers[server.layer].options["batch_invariant"]


# --- speculative decoding ---

COUNT = 4  # drafts of a request
PARENTS = ((-1, 0, 0, 2), (-1, 0, 1, 2), (-1, 0, 1, 0))  # of each draft, for each request


def tree() -> Tensor:
    """Which drafts each draft sees: bool (requests, drafts, drafts)."""
    sees = torch.zeros(REQUESTS, COUNT, COUNT, dtype=torch.bool)
    for request, parents in enumerate(PARENTS):
        for draft, parent in enumerate(parents):
            if parent >= 0:
                sees[request, draft] = sees[request, parent]
            sees[request, draft, draft] = True
    return sees


def eagle(mask: Tensor, topk: int) -> EagleVerifyInput:
    verify = EagleVerifyInput.create_idle_input(topk, COUNT - 1, COUNT, "cpu")
    verify.custom_mask = mask
    return verify


def drafts_of(kind: str, lengths: Tensor) -> Any:
    if kind == "chain":
        return eagle(torch.ones(REQUESTS, COUNT, COUNT).tril().bool().flatten(), 1)
    if kind == "tree":
        return eagle(tree().flatten(), 2)
    return NgramVerifyInput(custom_mask=tree().flatten(), draft_token_num=COUNT)


def masks_of(
    kind: str, lengths: Tensor, window: int = LONGEST, chunk: int = LONGEST
) -> list[Tensor]:
    """What drafts see of what was before and of one another. Windows and chunks go by depth."""
    sees = (
        torch.ones(COUNT, COUNT).tril().bool().expand(REQUESTS, -1, -1)
        if kind == "chain"
        else tree()
    )
    masks = []
    for length, own in zip(lengths.tolist(), sees, strict=True):
        depth = own.sum(1) - 1
        at = torch.cat([torch.arange(length), length + depth])
        seen = torch.cat([torch.ones(COUNT, length, dtype=torch.bool), own], 1)
        position = length + depth[:, None]
        masks.append(seen & (position - at <= window) & (position // chunk == at // chunk))
    return masks


def prefilled(server: Server) -> Any:
    backend = server.start()
    backend.init_forward_metadata(batch := server.batch((5, 2, 3)))
    server.attend(batch, seed=0)
    return backend


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("kind", ["chain", "tree", "ngram"])
@pytest.mark.parametrize("name", [*CASES, "8 bits"])
def test_drafts_are_verified(options: Any, name: str, kind: str, page: int) -> None:
    attributes, more, call = CASES.get(name, ({}, {}, {}))
    dtype = torch.float8_e4m3fn if name == "8 bits" else torch.bfloat16
    window = attributes.get("sliding_window_size", LONGEST)
    call = {option: value for option, value in call.items() if option != "window"}
    options(
        speculative_algorithm="EAGLE", speculative_eagle_topk=1 if kind == "chain" else 2,
        speculative_num_draft_tokens=COUNT, speculative_num_steps=COUNT - 1,
    )  # fmt: skip
    server = Server(page, dtype, **attributes)
    backend = prefilled(server)
    lengths = server.lengths.clone()
    spec = drafts_of(kind, lengths)
    batch = server.batch((COUNT,) * 3, ForwardMode.TARGET_VERIFY, spec_info=spec)
    backend.init_forward_metadata(batch)
    server.check(*server.attend(batch, seed=20, **more), masks_of(kind, lengths, window), **call)


@pytest.mark.parametrize("kind", ["chain", "tree", "ngram"])
@pytest.mark.parametrize(
    "attributes",
    [
        {"chunk": 4, "use_irope": True},
        {"chunk": 7, "use_irope": True},
        {"chunk": 4, "use_irope": True, "sliding_window_size": 1},
        {"chunk": 4},  # of other layers of the model
    ],
    ids=str,
)
def test_chunks_that_begin_among_the_drafts(
    options: Any, attributes: dict[str, Any], kind: str
) -> None:
    topk = 1 if kind == "chain" else 2
    options(
        speculative_algorithm="EAGLE", speculative_eagle_topk=topk,
        speculative_num_draft_tokens=COUNT, speculative_num_steps=COUNT - 1,
    )  # fmt: skip
    server = Server(4, **attributes)
    backend = prefilled(server)
    lengths = server.lengths.clone()
    spec = drafts_of(kind, lengths)
    batch = server.batch((COUNT,) * 3, ForwardMode.TARGET_VERIFY, spec_info=spec)
    backend.init_forward_metadata(batch)
    masks = masks_of(
        kind, lengths, attributes.get("sliding_window_size", LONGEST),
        attributes["chunk"] if "use_irope" in attributes else LONGEST,
    )  # fmt: skip
    server.check(*server.attend(batch, seed=20), masks)


def test_a_tree_of_a_gpu_has_columns_for_what_was_before(options: Any) -> None:
    server = Server()
    backend = prefilled(server)
    lengths = server.lengths.clone()
    masks = masks_of("tree", lengths)
    drafts = NgramVerifyInput(
        custom_mask=torch.cat([mask.flatten() for mask in masks]), draft_token_num=COUNT
    )
    batch = server.batch((COUNT,) * 3, ForwardMode.TARGET_VERIFY, spec_info=drafts)
    backend._is_cpu = False
    backend.init_forward_metadata(batch)
    server.check(*server.attend(batch, seed=20), masks)


def test_a_draft_model_reads_what_was_accepted(options: Any) -> None:
    server = Server()
    backend = prefilled(server)
    batch = server.batch((COUNT,) * 3, ForwardMode.DRAFT_EXTEND_V2)
    backend.init_forward_metadata(batch)
    server.check(*server.attend(batch, seed=20))


@pytest.mark.parametrize("topk", [1, 2])
def test_a_draft_model_drafts(options: Any, topk: int) -> None:
    steps = 3
    options(
        speculative_algorithm="EAGLE", speculative_eagle_topk=topk,
        speculative_num_draft_tokens=COUNT, speculative_num_steps=steps,
    )  # fmt: skip
    server = Server()
    prefilled(server)
    before = server.lengths.clone()
    drafting = DraftBackendFactory(server.runner, topk, steps).create_decode_backend()
    assert len(drafting.attn_backends) == steps - 1
    # Behind the rows of each request: (branches, steps).
    of_steps = torch.stack(
        [request[n : n + topk * steps] for request, n in zip(server.slots[1:], before, strict=True)]
    ).long()
    batch = server.batch((0, 0, 0), ForwardMode.DECODE, spec_info=EagleDraftInput())
    batch.out_cache_loc = of_steps.flatten()
    drafting.init_forward_metadata(batch)
    by_step = of_steps.view(REQUESTS, topk, steps)
    for step in range(steps - 1):
        server.backend = drafting.attn_backends[step]
        batch.out_cache_loc = by_step[..., step].flatten()
        batch.input_ids = torch.zeros(REQUESTS * topk)
        masks = [torch.zeros(topk, int(n) + topk * steps, dtype=torch.bool) for n in before]
        for mask, n in zip(masks, before.tolist(), strict=True):
            mask[:, :n] = True
            for branch in range(topk):
                first = n + branch * steps
                mask[branch, first : first + step + 1] = True
        server.rows = (topk,) * REQUESTS
        server.check(*server.attend(batch, seed=30 + 10 * step), masks)


# --- CUDA graphs: what they read lies in the same memory ---


@pytest.mark.parametrize("window_pool", [False, True])
def test_a_graph_reads_what_is_written_before_its_replay(options: Any, window_pool: bool) -> None:
    bounds = {"sliding_window_size": 3} if window_pool else {}
    server = Server(4, window_pool=window_pool, **bounds)
    backend = prefilled(server)
    backend.init_cuda_graph_state(8, 8)
    backend.init_forward_metadata_out_graph(batch := server.batch((1, 1, 1)), in_capture=True)
    captured = backend._batch
    call = {"window": (3, 0)} if window_pool else {}
    server.check(*server.attend(batch, seed=10), **call)
    backend.init_forward_metadata_out_graph(batch := server.batch((1, 1, 1)))
    assert captured.lengths.tolist() == server.lengths.tolist()
    backend._batch = captured
    server.check(*server.attend(batch, seed=20), **call)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("kind", ["chain", "tree", "ngram"])
def test_a_graph_of_verification(options: Any, kind: str, dtype: torch.dtype) -> None:
    options(
        speculative_algorithm="EAGLE", speculative_eagle_topk=1 if kind == "chain" else 2,
        speculative_num_draft_tokens=COUNT, speculative_num_steps=COUNT - 1,
    )  # fmt: skip
    server = Server(dtype=dtype)
    backend = prefilled(server)
    backend.init_cuda_graph_state(8, 8 * COUNT)
    assert backend.verify_mask.fits(8)
    rows = (COUNT,) * REQUESTS
    spec = drafts_of(kind, server.lengths)
    batch = server.batch(rows, ForwardMode.TARGET_VERIFY, spec_info=spec)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    captured = backend._batch
    # The next batch: a row of each request was accepted.
    server.lengths += 1
    batch = server.batch(rows, ForwardMode.TARGET_VERIFY, spec_info=spec)
    backend.init_forward_metadata_out_graph(batch)
    if kind == "tree":  # its drafts may be made after the batch was noted
        stale = eagle(torch.zeros_like(spec.custom_mask), 2)
        batch.spec_info = stale
        backend.init_forward_metadata_out_graph(batch)
        backend.update_verify_buffers_to_fill_after_draft(spec, REQUESTS)
    backend._batch = captured
    server.check(*server.attend(batch, seed=20), masks_of(kind, server.lengths))


# --- latent attention ---


def test_latent_attention(options: Any) -> None:
    rank, rope = 32, 8
    server = Server(4, latent=(rank, rope), head_dim=rank + rope, v_head_dim=rank, num_kv_heads=1)
    backend = server.start()
    for number, rows in enumerate(STEPS):
        batch = server.batch(rows)
        backend.init_forward_metadata(batch)
        total = sum(rows)
        q = rand(total, HEADS * (rank + rope), seed=10 * number)
        k = rand(total, 1, rank + rope, seed=10 * number + 1)
        out = backend.forward(q, k, k[..., :rank], server.layer, batch)
        ends = [0, *torch.tensor(rows).cumsum(0).tolist()]
        for request in range(REQUESTS):
            new = slice(ends[request], ends[request + 1])
            keys = int(server.lengths[request])
            cache = server.pool.get_key_buffer(0)[server.slots[1 + request, :keys].long()]
            tensors = [
                x.transpose(0, 1)[None]
                for x in (q.view(total, HEADS, -1)[new], cache, cache[..., :rank])
            ]
            call = {"causal": True, "scale": SCALE}
            expected, _ = reference.attention(*tensors, **call)
            ours = out.view(total, HEADS, rank)[new].transpose(0, 1)[None]
            report = reference.check(ours, expected, reference.baseline(*tensors, **call))
            assert report.ok, report


def test_prefill_of_a_latent_model_whose_keys_are_not_those_of_the_cache(options: Any) -> None:
    server = Server(latent=(32, 8), head_dim=24, v_head_dim=16, num_kv_heads=HEADS)
    backend = server.start()
    backend.init_forward_metadata(batch := server.batch((5, 2, 3)))
    q = rand(10, HEADS * 24, seed=0)
    k, v = rand(10, HEADS, 24, seed=1), rand(10, HEADS, 16, seed=2)
    out = backend.forward(q, k, v, server.layer, batch, save_kv_cache=False)
    assert not server.pool.get_key_buffer(0).any()
    ends = torch.tensor([0, 5, 7, 10], dtype=torch.int32)
    call: dict[str, Any] = {
        "causal": True,
        "scale": SCALE,
        "cu_seqlens_q": ends,
        "cu_seqlens_k": ends,
    }
    expected, _ = reference.attention(q.view(10, HEADS, 24), k, v, **call)
    baseline = reference.baseline(q.view(10, HEADS, 24), k, v, **call)
    report = reference.check(out.view(10, HEADS, 16), expected, baseline)
    assert report.ok, report


# --- refusals, at the start ---


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"logit_cap": 2.0, "logit_capping_method": "sigmoid"}, "sigmoid"),
        ({"is_cross_attention": True}, "cross attention"),
        ({"pos_encoding_mode": "ALIBI"}, "ALIBI"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "--chunked-prefill-size -1"),
    ],
)
def test_layers_that_are_not_served_are_refused(options: Any, attributes: Any, words: str) -> None:
    with pytest.raises(archflash.UnsupportedError, match=f"layer attn: .*{words}"):
        Server(**attributes).start()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"speculative_algorithm": "DFLASH"}, "DFLASH"),
        ({"enable_deterministic_inference": True}, "8 bits"),
    ],
)
def test_options_that_are_not_served_are_refused(options: Any, fields: Any, words: str) -> None:
    options(**fields)
    with pytest.raises(archflash.UnsupportedError, match=words):
        Server(dtype=torch.float8_e4m3fn).start()


def test_other_refusals(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    server.layer.xai_temperature_len = 7
    with pytest.raises(archflash.UnsupportedError, match="temperature"):
        server.start()
    options(speculative_algorithm="NGRAM", speculative_num_draft_tokens=COUNT)
    with pytest.raises(archflash.UnsupportedError, match="window beside a tree"):
        Server(sliding_window_size=3, dtype=torch.float8_e4m3fn).start()
    with pytest.raises(archflash.UnsupportedError, match="attention chunks beside a tree"):
        Server(chunk=4, use_irope=True, dtype=torch.float8_e4m3fn).start()
    Server(chunk=4, dtype=torch.float8_e4m3fn).start()
    drafting = DraftBackendFactory(Server(chunk=4, use_irope=True).runner, 2, 3)
    options(speculative_algorithm="EAGLE", speculative_eagle_topk=2)
    with pytest.raises(archflash.UnsupportedError, match="attention chunks beside a tree"):
        drafting.create_decode_backend()
    options()
    server = Server()
    server.runner.kv_index_translator.is_translating = True
    with pytest.raises(archflash.UnsupportedError, match="unified"):
        server.start()
    server = Server()
    server.runner.model_config.is_encoder_decoder = True
    with pytest.raises(archflash.UnsupportedError, match="cross attention"):
        server.start()
    server = Server()
    server.pool.kv_cache_layout = "hnd"
    with pytest.raises(archflash.UnsupportedError, match="SGLANG_USE_HND_KVCACHE"):
        server.start()
    server = Server()
    server.pool.__class__ = MHATokenToKVPoolMXFP8
    with pytest.raises(archflash.UnsupportedError, match="MHATokenToKVPoolMXFP8"):
        server.start()


def test_an_argument_that_is_not_known_is_named(options: Any) -> None:
    server = Server()
    backend = prefilled(server)
    backend.init_forward_metadata(batch := server.batch((1, 1, 1)))
    with pytest.raises(archflash.UnsupportedError, match="score_mod"):
        server.attend(batch, seed=0, score_mod=torch.zeros(1))
