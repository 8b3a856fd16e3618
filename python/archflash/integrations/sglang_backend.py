"""The attention backend of `archflash.integrations.sglang`: imported where it is chosen."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import (
    HybridLinearKVPool,
    KVWriteLoc,
    MHATokenToKVPool,
    MLATokenToKVPool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_exec, get_parallel, get_schedule, get_spec
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from torch import Tensor

from archflash._api import attention
from archflash._errors import UnsupportedError
from archflash._kvcache import PLACES, Batch, attention_with_kvcache, kind_of, serve, values_of
from archflash._merge import merge_attention

_ALGORITHMS = ("EAGLE", "EAGLE3", "NGRAM", "NONE", "STANDALONE")
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_SINKS, _RETURN_LSE = PLACES["sinks"], PLACES["return_lse"]


class _Batch(NamedTuple):
    """A batch, as all layers see it.

    Attributes:
        lengths: int32 (requests,), keys of each request. With `branches` without those of them.
        pages: int32 (requests, pages of a request).
        window_pages: as pages, in the pool of layers with a window; None where there is one pool.
        window_slots: int64 (new rows,), where they are stored in that pool.
        rows: how many new rows each request has; None if that differs.
        ends: int32 (requests + 1,), where each request's rows begin; None if `rows` is a number.
        longest: the most new rows of a request; None if `rows` is a number.
        branches: of a tree of drafts: int32 (new rows, places), in which slots the drafts are that
            a row sees, and int32 (new rows,), how many they are.
        sees: bool (new rows, rows), which new rows of its request a row sees, for verification.
        in_common: by whether a layer is in the window's pool, `batch` of `serve`.
        prepared: that of `serve`.
    """

    lengths: Tensor
    pages: Tensor
    window_pages: Tensor | None
    window_slots: Tensor | None
    rows: int | None
    ends: Tensor | None
    longest: int | None
    branches: tuple[Tensor, Tensor] | None
    sees: Tensor | None
    in_common: dict[bool, Batch]
    prepared: dict[int, Any]


class _Layer(NamedTuple):
    """What calls of a layer have in common.

    Attributes:
        in_window_pool: whether its cache is in the pool of layers with a window.
        latent: whether its cache has latent rows, of which the first columns are V.
        bypasses_cache: whether it sees new rows only, which it does not store.
        masks_trees: whether it sees a tree of drafts under a mask of the cache, which windows and
            chunks need; two calls are faster without them.
        options: of `attention_with_kvcache`.
        values, kind: the same for `serve`; not of a latent cache.
        views: its caches in pages of a size, and the address that they were made for.
    """

    in_window_pool: bool
    latent: bool
    bypasses_cache: bool
    masks_trees: bool
    options: dict[str, Any]
    values: list[Any]
    kind: int
    views: dict[int, tuple[int, Any]]


class ArchflashBackend(AttentionBackend):  # type: ignore[misc]
    """The attention of all layers of a model, with SGLang's names.

    Args:
        runner: SGLang's ModelRunner.
        step: the number of a draft model's decoding step; None for all other work.

    Raises:
        UnsupportedError: the model, its cache or an option of the server is not served.
    """

    def __init__(self, runner: Any, step: int | None = None) -> None:
        super().__init__()
        _refuse_what_is_not_served(runner, step)
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool: Any = runner.token_to_kv_pool
        self.kv_index_translator = runner.kv_index_translator
        self.max_context_len: int = runner.model_config.context_len
        # The slot of each row of each request: int32 (requests, longest request).
        self._slots: Tensor = runner.req_to_token_pool.req_to_token
        self._page_size: int = runner.page_size
        self._window_pool: SWAKVPool | None = None
        if isinstance(self.token_to_kv_pool, SWAKVPool) and self.token_to_kv_pool.swa_layer_nums:
            self._window_pool = self.token_to_kv_pool
        self._attention_chunk: int | None = runner.attention_chunk_size
        self._batch_invariant = bool(get_exec().deterministic.enable_deterministic_inference)
        self._is_cpu = runner.device == "cpu"
        self._step = step
        self._topk: int = get_spec().speculative_eagle_topk or 1
        self._num_steps: int = get_spec().speculative_num_steps or 1
        self._drafts: int = get_spec().speculative_num_draft_tokens or 0
        self._verifies = self._drafts > 0 and not runner.is_draft_worker
        self._verify_mask: VerifyMask | None = None
        self._requests: tuple[Tensor, Tensor] | None = None  # of the last batch of drafts
        self._layers: dict[RadixAttention, _Layer] = {}
        self._batch: _Batch | None = None
        self._graph: _Batch | None = None

    # --- batches ---

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Notes a batch that runs without a graph, once for all layers."""
        self._batch = self._note(forward_batch, in_graph=False)

    def _note(self, forward_batch: Any, in_graph: bool, in_capture: bool = False) -> _Batch:
        mode, drafts = forward_batch.forward_mode, forward_batch.spec_info
        requests, lengths = forward_batch.req_pool_indices, forward_batch.seq_lens
        on_host = forward_batch.seq_lens_cpu
        longest_key = self._slots.shape[1] if on_host is None else max(on_host.tolist(), default=0)
        slots = forward_batch.out_cache_loc
        rows: int | None = 1
        ends, longest, added, branches, sees = None, None, 0, None, None
        if mode.is_target_verify():
            rows = drafts.draft_token_num
            if drafts.tree_topk == 1:
                added = rows
            else:
                branches, sees = self._tree(drafts, requests, lengths, in_capture)
        elif mode.is_decode_or_idle():
            if self._step is not None and drafts is not None:
                # (requests, branches, steps): where the drafts of all steps are stored.
                of_steps = slots.view(-1, self._topk, self._num_steps)
                slots = of_steps[..., self._step].reshape(-1)
                added = self._step + 1
                if self._topk > 1:
                    places = of_steps[..., :added].reshape(-1, added).to(torch.int32)
                    branches = (places, torch.full_like(places[:, 0], added))
                    rows, added = self._topk, 0
        elif in_graph:
            if not mode.is_draft_extend_v2():
                raise UnsupportedError(
                    "a CUDA graph of prefill as a whole: pass --cuda-graph-backend-prefill "
                    "breakable or disabled"
                )
            rows = drafts.num_tokens_per_req
        else:
            rows, new = None, forward_batch.extend_seq_lens
            on_host = forward_batch.extend_seq_lens_cpu
            ends = F.pad(new.cumsum(0, dtype=torch.int32), (1, 0))
            longest = self._slots.shape[1] if on_host is None else max(on_host, default=1)
        # The slots of a page are consecutive, so the first one of each says which page it is.
        size = self._page_size
        reach = longest_key + (added if sees is None else sees.shape[1])
        found = self._slots[requests, :reach:size]
        window_pages = window_slots = None
        if self._window_pool is not None:
            to_window = self._window_pool.translate_loc_from_full_to_swa
            window_pages = _divided(to_window(found), size).to(torch.int32)
            window_slots = None if slots is None else to_window(slots)
        lengths = (lengths + added if added else lengths).to(torch.int32)
        pages = _divided(found, size)
        return _Batch(
            lengths, pages, window_pages, window_slots, rows, ends, longest, branches, sees, {}, {}
        )

    def _tree(
        self, drafts: Any, requests: Tensor, lengths: Tensor, in_capture: bool
    ) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """The drafts that each row of a tree sees, itself among them: its branch up to the root.
        Returns `branches` and `sees` of a batch.
        """
        self._requests = (requests, lengths)
        count, batch = drafts.draft_token_num, len(requests)
        options: dict[str, Any] = {"device": lengths.device}
        own = torch.arange(count, **options)
        places = self._slots[requests[:, None], lengths[:, None] + own]  # (batch, count)
        places = places.repeat_interleave(count, 0)
        if in_capture:  # there are no drafts yet
            sees = torch.ones(batch * count, count, dtype=torch.bool, **options)
            return (places, torch.ones(batch * count, **options).int()), sees
        mask = drafts.custom_mask
        if isinstance(drafts, NgramVerifyInput) and not self._is_cpu:
            # Each request has count rows of lengths + count columns, of which the last are drafts.
            width = lengths + count
            first = (width * count).cumsum(0) - width * count
            at = first[:, None] + own * width[:, None] + lengths[:, None]
            at = at[..., None] + own
            # A graph's batch may have more requests than the mask.
            mask = mask[at.clamp(max=mask.numel() - 1)]
        sees = mask[: batch * count * count].view(batch * count, count).bool()
        # The places that a row sees come first, in their order.
        order = torch.argsort((~sees).to(torch.int8), dim=1, stable=True)
        return (places.gather(1, order), sees.sum(1, dtype=torch.int32)), sees

    @property
    def verify_mask(self) -> VerifyMask | None:
        """What the drafts of a tree see of one another, written in place by SGLang."""
        return self._verify_mask

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: Any) -> None:
        """Reads the tree again, of a batch that was noted before the drafts were made."""
        if spec_info.tree_topk == 1:
            return
        assert self._requests is not None
        assert self._batch is not None
        branches, sees = self._tree(spec_info, *self._requests, in_capture=False)
        if cuda_graph_bs is not None:
            branches, sees = self._write_tree(branches, sees)
        self._batch = self._batch._replace(branches=branches, sees=sees)

    def _write_tree(self, branches: Any, sees: Tensor | None) -> tuple[Any, Any]:
        """Writes a tree where its graph reads it."""
        graph = self._graph
        assert graph is not None
        assert graph.branches is not None
        return tuple(map(_write, graph.branches, branches)), _write(graph.sees, sees)

    # --- CUDA graphs ---

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocates what the graphs read, for at most max_bs requests."""
        width = -(-self._slots.shape[1] // self._page_size)
        options: dict[str, Any] = {"dtype": torch.int32, "device": self._slots.device}
        pages = torch.zeros(max_bs, width, **options)
        window = self._window_pool is not None
        self._graph = _Batch(
            torch.ones(max_bs, **options), pages, torch.zeros_like(pages) if window else None,
            torch.zeros(max_num_tokens, dtype=torch.int64, device=pages.device) if window else None,
            None, None, None, None, None, {}, {},
        )  # fmt: skip
        places = self._drafts if self._step is None else self._step + 1
        if places:
            branches = torch.zeros(max_num_tokens, places, **options)
            self._graph = self._graph._replace(
                branches=(branches, torch.ones_like(branches[:, 0])), sees=branches.bool()
            )
        if self._verifies:
            cells = max_bs * self._drafts**2
            buffer = torch.zeros(cells, dtype=torch.bool, device=pages.device)
            self._verify_mask = VerifyMask(buffer, TreeMaskMode.QLEN_ONLY, max_bs)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Writes a batch where its graph reads it."""
        graph = self._graph
        assert graph is not None
        batch = self._note(forward_batch, in_graph=True, in_capture=in_capture)
        if batch.branches is not None:
            branches, sees = self._write_tree(batch.branches, batch.sees)
            batch = batch._replace(branches=branches, sees=sees)
        self._batch = batch._replace(
            lengths=_write(graph.lengths, batch.lengths),
            pages=_write(graph.pages, batch.pages),
            window_pages=_write(graph.window_pages, batch.window_pages),
            window_slots=_write(graph.window_slots, batch.window_slots),
        )

    # --- layers ---

    def support_triton(self) -> bool:
        return not self._is_cpu

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        return_lse: bool = False,
        **others: Any,
    ) -> Any:
        """Writes k and v (rows, kv heads, head dim) into the cache, and computes the attention of q
        (rows, heads x head dim): of new rows of each request, behind those of its cache.

        Returns:
            (rows, heads x head dim of v); where a log-sum-exp is asked for (rows, heads, head dim
            of v), and float32 (rows, heads).

        Raises:
            UnsupportedError: an argument of a layer that is not known here; it is named.
        """
        for name, value in others.items():
            if value is not None:
                raise UnsupportedError(f"{name}: choose another attention backend")
        batch = self._batch
        assert batch is not None
        known = self._layers.get(layer)
        if known is None:
            known = self._layers[layer] = self._describe(layer)
        with_lse = return_lse or bool(forward_batch.mha_return_lse)
        if save_kv_cache and k is not None:
            place = KVWriteLoc.for_layer(forward_batch, layer, swa_loc=batch.window_slots)
            scales = () if known.latent else (layer.k_scale, layer.v_scale)
            self.token_to_kv_pool.set_kv_buffer(layer, place, k, v, *scales)
        if known.bypasses_cache:
            result = self._attend_to_new_rows(q, k, v, layer, known, batch, with_lse)
        elif batch.sees is not None and known.masks_trees:
            result = self._attend_to_tree(q, layer, known, batch, sinks)
        elif batch.branches is not None:
            result = self._attend_to_branches(q, layer, known, batch, sinks)
        else:
            heads, dim = layer.tp_q_head_num, layer.qk_head_dim
            rows = (-1, heads, dim) if batch.rows is None else (-1, batch.rows, heads, dim)
            caches = self._caches(layer, known, self._page_size)
            if known.latent:
                result = attention_with_kvcache(
                    q.reshape(rows),
                    *caches,
                    cache_seqlens=batch.lengths,
                    page_table=batch.pages,
                    cu_seqlens_q=batch.ends,
                    max_seqlen_q=batch.longest,
                    sinks=sinks,
                    return_lse=with_lse,
                    **known.options,
                )
            else:
                of_window = known.in_window_pool
                in_common = batch.in_common.get(of_window)
                if in_common is None:
                    pages = batch.window_pages if of_window else batch.pages
                    in_common = (batch.ends, batch.longest, batch.lengths, pages)
                    batch.in_common[of_window] = in_common
                known.values[_SINKS], known.values[_RETURN_LSE] = sinks, with_lse
                k_cache, v_cache = caches
                if q.ndim == 2 and not with_lse:  # models may also give heads a dimension
                    return serve(
                        q, k_cache, v_cache, known.values, known.kind, batch.prepared, in_common,
                        None, rows,
                    )  # fmt: skip
                result = serve(
                    q.reshape(rows), k_cache, v_cache, known.values, known.kind, batch.prepared,
                    in_common,
                )  # fmt: skip
        if not with_lse:
            out = result[0] if isinstance(result, tuple) else result
            return out.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)
        out, lse = result
        if lse.ndim == 3:  # (requests, heads, rows of a request)
            lse = lse.transpose(0, 1).flatten(1)
        return out.reshape(-1, layer.tp_q_head_num, layer.v_head_dim), lse.T.contiguous()

    forward_decode = forward_extend  # the batch says how many new rows a request has

    def _caches(self, layer: RadixAttention, known: _Layer, page_size: int) -> Any:
        """The caches of a layer in pages: (pages, rows of a page, kv heads, head dim)."""
        pool = self.token_to_kv_pool
        if known.latent:
            k, v = pool.get_key_buffer(layer.layer_id), None
        else:
            k, v = pool.get_kv_buffer(layer.layer_id)
        made = known.views.get(page_size)
        if made is None or made[0] != k.data_ptr():
            views = tuple(x if x is None else x.view(-1, page_size, *x.shape[1:]) for x in (k, v))
            made = known.views[page_size] = (k.data_ptr(), views)
        return made[1]

    def _attend_to_tree(
        self, q: Tensor, layer: RadixAttention, known: _Layer, batch: _Batch, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The attention of a tree of drafts whose cache kernels read under a mask of the drafts."""
        assert batch.rows is not None
        assert batch.sees is not None
        assert batch.branches is not None
        count, length = batch.rows, batch.lengths[:, None]
        window, chunk = known.options["window"], known.options["attention_chunk"]
        # A draft's position is its depth behind the length, which is not its row.
        position = length + batch.branches[1].view(-1, count) - 1
        first = position - window[0] if window is not None else torch.zeros_like(position)
        if chunk is not None:
            first = first.maximum(position // chunk * chunk)
        # The mask bounds the drafts, whose rows are in another order; ranges bound other keys.
        sees = batch.sees.view(-1, count, count)[:, None]
        sees = sees & (position[:, None, None] >= first[:, None, :, None])
        first = first.clamp(min=0).minimum(length)
        ranges = torch.stack([first, (length + count).expand_as(first)], -1)[:, None, :, None]
        options = known.options | {"causal": False, "window": None, "attention_chunk": None}
        return attention_with_kvcache(  # type: ignore[no-any-return]
            q.reshape(-1, count, layer.tp_q_head_num, layer.qk_head_dim),
            *self._caches(layer, known, self._page_size),
            cache_seqlens=batch.lengths + count,
            page_table=batch.window_pages if known.in_window_pool else batch.pages,
            attn_mask=sees,
            key_ranges=ranges,
            sinks=sinks,
            return_lse=True,
            **options,
        )

    def _attend_to_branches(
        self, q: Tensor, layer: RadixAttention, known: _Layer, batch: _Batch, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The attention of a tree of drafts: to what a request had before, which all its rows see,
        and to each row's branch, whose slots are pages of one row. Both parts are merged.
        """
        assert batch.rows is not None
        assert batch.branches is not None
        heads = layer.tp_q_head_num
        options = known.options | {"causal": False, "return_lse": True}
        places, counts = batch.branches
        before = attention_with_kvcache(
            q.reshape(-1, batch.rows, heads, layer.qk_head_dim),
            *self._caches(layer, known, self._page_size),
            cache_seqlens=batch.lengths,
            page_table=batch.window_pages if known.in_window_pool else batch.pages,
            **options,
        )
        branch, branch_lse = attention_with_kvcache(
            q.reshape(-1, 1, heads, layer.qk_head_dim),
            *self._caches(layer, known, 1),
            cache_seqlens=counts,
            page_table=places,
            sinks=sinks,
            **options,
        )
        by_request = branch_lse.view(-1, batch.rows, heads).transpose(1, 2)
        return merge_attention(
            [before[0], branch.view_as(before[0])], [before[1], by_request], layout="bnhd"
        )

    def _attend_to_new_rows(
        self,
        q: Tensor,
        k: Any,
        v: Any,
        layer: RadixAttention,
        known: _Layer,
        batch: _Batch,
        with_lse: bool,
    ) -> Any:
        """Prefill of a model with latent attention, whose K and V are not those of the cache."""
        return attention(
            q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim),
            k.view(-1, layer.tp_k_head_num, layer.qk_head_dim),
            v.view(-1, layer.tp_v_head_num, layer.v_head_dim),
            cu_seqlens_q=batch.ends,
            cu_seqlens_k=batch.ends,
            max_seqlen_q=batch.longest,
            max_seqlen_k=batch.longest,
            return_lse=with_lse,
            **known.options,
        )

    def _describe(self, layer: RadixAttention) -> _Layer:
        left = layer.sliding_window_size
        bounded = left is not None and left >= 0
        causal = layer.attn_type == AttentionType.DECODER
        pool = self.token_to_kv_pool
        # A model with latent attention has layers for its cache, and others for new rows.
        of_latent_model = isinstance(pool, MLATokenToKVPool)
        latent = of_latent_model and layer.qk_head_dim == pool.kv_cache_dim
        options: dict[str, Any] = {
            "causal": causal,
            "window": (left, 0 if causal else left) if bounded else None,
            "softcap": layer.logit_cap or None,
            "scale": layer.scaling,
            "batch_invariant": self._batch_invariant,
            "layout": "bnhd",
        }
        if latent:
            options["dv"] = layer.v_head_dim
        elif not of_latent_model:
            options["attention_chunk"] = self._attention_chunk if layer.use_irope else None
            if pool.dtype in _FP8:
                device = self._slots.device
                options["k_descale"] = _descale(layer.k_scale, device)
                options["v_descale"] = _descale(layer.v_scale, device)
        in_window_pool = (
            self._window_pool is not None and self._window_pool.layers_mapping[layer.layer_id][1]
        )
        masks_trees = (
            not of_latent_model
            and pool.dtype not in _FP8
            and (bounded or options["attention_chunk"] is not None)
        )
        bypasses_cache = of_latent_model and not latent
        values = [] if of_latent_model else values_of(**options)
        return _Layer(
            in_window_pool, latent, bypasses_cache, masks_trees, options, values, kind_of(values),
            {},
        )  # fmt: skip


class DraftSteps:
    """A draft model's decoding steps, each of which has a backend: step i sees the drafts of the
    steps before it.

    Args:
        runner: SGLang's ModelRunner of the draft model.
        topk: branches of the tree.
        num_steps: decoding steps, of which the last one drafts nothing.
    """

    needs_cpu_seq_lens = True

    def __init__(self, runner: Any, topk: int, num_steps: int) -> None:
        self.topk = topk
        self.speculative_num_steps = num_steps
        self.attn_backends = [ArchflashBackend(runner, step) for step in range(num_steps - 1)]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        for backend in self.attn_backends:
            backend.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata_out_graph(forward_batch, in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Nothing of it is in the graph."""


def _divided(slots: Tensor, size: int) -> Tensor:
    """The pages of slots."""
    return slots if size == 1 else slots // size


def _write(buffer: Tensor | None, x: Tensor | None) -> Any:
    """Copies x to the start of a buffer, and returns the rows that it is in, with all columns of
    the buffer: a graph reads them whatever the next x has.
    """
    if buffer is None or x is None:
        return None
    part = buffer[: x.shape[0]]
    (part if x.ndim == 1 else part[:, : x.shape[1]]).copy_(x)
    return part


def _descale(scale: Any, device: torch.device) -> Tensor | None:
    """A scale of a cache as float32 () on the device."""
    if scale is None:
        return None
    if isinstance(scale, Tensor):
        return scale.detach().to(device, torch.float32).reshape(())
    return torch.full((), float(scale), dtype=torch.float32, device=device)


def _refuse_what_is_not_served(runner: Any, step: int | None) -> None:
    """Raises UnsupportedError for what would fail, or be wrong, in a batch."""
    pool = runner.token_to_kv_pool
    deterministic = get_exec().deterministic.enable_deterministic_inference
    algorithm = get_spec().speculative_algorithm or "NONE"
    tree = algorithm == "NGRAM" or (get_spec().speculative_eagle_topk or 1) > 1
    other = "choose another attention backend"
    if runner.model_config.is_encoder_decoder:
        raise UnsupportedError(f"cross attention: {other}")
    if get_parallel().attn_dcp_size > 1:
        raise UnsupportedError(f"decode context parallelism: leave out --dcp-size, or {other}")
    if algorithm not in _ALGORITHMS:
        raise UnsupportedError(
            f"--speculative-algorithm {algorithm}: archflash serves {', '.join(_ALGORITHMS)}"
        )
    if runner.kv_index_translator.is_translating:
        raise UnsupportedError("a unified memory pool: leave out --enable-unified-memory")
    _refuse_pool(pool)
    latent = isinstance(pool, MLATokenToKVPool)
    if deterministic and (pool.dtype in _FP8 or latent):
        what = "a latent cache (MLA)" if latent else "a cache of 8 bits"
        raise UnsupportedError(
            f"{what} with --enable-deterministic-inference: archflash is batch-invariant with "
            f"caches of 16 bits; {other}"
        )
    for name, layer in runner.model.named_modules():
        if isinstance(layer, RadixAttention):
            by_branches = tree and (step is not None or pool.dtype in _FP8)
            reason = _why_not(layer, by_branches, runner.attention_chunk_size)
            if reason is not None:
                raise UnsupportedError(f"layer {name}: {reason}, or {other}")


def _refuse_pool(pool: Any) -> None:
    """Only pools whose rows are known to be contiguous vectors of numbers are served."""
    parts = [pool]
    if type(pool) is SWAKVPool:
        parts = [pool.full_kv_pool, pool.swa_kv_pool]
    elif type(pool) is HybridLinearKVPool:
        parts = [pool.full_kv_pool]
    for part in parts:
        if type(part) is MHATokenToKVPool and not part.is_quantized_kv_cache:
            if part.kv_cache_layout != "nhd":
                raise UnsupportedError(
                    f"a cache with the layout {part.kv_cache_layout}: archflash reads nhd; unset "
                    "SGLANG_USE_HND_KVCACHE and SGLANG_AITER_KV_CACHE_LAYOUT"
                )
        elif type(part) is not MLATokenToKVPool or part is not pool:
            raise UnsupportedError(
                f"the cache {type(part).__name__}: archflash reads caches of 16 and of 8 bits "
                "(--kv-cache-dtype auto, fp8_e4m3 or fp8_e5m2); choose another attention backend"
            )


def _why_not(layer: RadixAttention, by_branches: bool, chunk: int | None) -> str | None:
    """Why a layer is not served, and what to do; None if it is.

    Args:
        by_branches: whether it sees a tree of drafts by branches, whose rows have no positions.
        chunk: keys of an attention chunk of the model's layers that have them.
    """
    if layer.is_cross_attention:
        return "cross attention is not served: leave the model"
    if layer.logit_cap > 0 and layer.logit_capping_method != "tanh":
        return f"logits are capped by {layer.logit_capping_method}, not by tanh: leave the model"
    if (layer.xai_temperature_len or 0) > 0:
        return "logits have a temperature that depends on the position: leave the model"
    if layer.pos_encoding_mode != "NONE":
        return f"attention encodes positions ({layer.pos_encoding_mode}): leave the model"
    if layer.attn_type != AttentionType.DECODER and get_schedule().chunked_prefill_size != -1:
        return "rows see later rows, which may be in a later chunk: pass --chunked-prefill-size -1"
    window = layer.sliding_window_size is not None and layer.sliding_window_size >= 0
    if by_branches and (window or (chunk is not None and layer.use_irope)):
        return (
            f"{'a window' if window else 'attention chunks'} beside a tree of drafts, in a draft "
            "model or a cache of 8 bits: pass --speculative-eagle-topk 1, not NGRAM"
        )
    return None
