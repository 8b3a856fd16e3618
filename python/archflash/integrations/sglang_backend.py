"""The attention backend of `archflash.integrations.sglang`: imported where it is chosen."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MLATokenToKVPool
from sglang.srt.runtime_context import get_exec
from torch import Tensor

from archflash._api import attention
from archflash._errors import UnsupportedError
from archflash._kvcache import PLACES, attention_with_kvcache, kind_of, serve, serve_flat, values_of
from archflash._merge import merge_attention
from archflash.integrations._sglang_batch import Batch, ReadsBatches
from archflash.integrations._sglang_refusals import FP8, refuse_what_is_not_served

_SINKS, _RETURN_LSE = PLACES["sinks"], PLACES["return_lse"]


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


class ArchflashBackend(ReadsBatches):
    """The attention of all layers of a model, with SGLang's names.

    Args:
        runner: SGLang's ModelRunner.
        step: the number of a draft model's decoding step; None for all other work.

    Raises:
        UnsupportedError: the model, its cache or an option of the server is not served.
    """

    def __init__(self, runner: Any, step: int | None = None) -> None:
        refuse_what_is_not_served(runner, step)
        super().__init__(runner, step)
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool: Any = runner.token_to_kv_pool
        self.kv_index_translator = runner.kv_index_translator
        self.max_context_len: int = runner.model_config.context_len
        self._attention_chunk: int | None = runner.attention_chunk_size
        self._batch_invariant = bool(get_exec().deterministic.enable_deterministic_inference)
        self._layers: dict[RadixAttention, _Layer] = {}

    def support_triton(self) -> bool:
        return not self._is_cpu

    def forward_extend(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: RadixAttention,
        forward_batch: Any, save_kv_cache: bool = True, sinks: Tensor | None = None,
        return_lse: bool = False, **others: Any,
    ) -> Any:  # fmt: skip
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
                    q.reshape(rows), *caches, cache_seqlens=batch.lengths, page_table=batch.pages,
                    cu_seqlens_q=batch.ends, max_seqlen_q=batch.longest, sinks=sinks,
                    return_lse=with_lse, **known.options,
                )  # fmt: skip
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
                    return serve_flat(
                        q, rows, k_cache, v_cache, known.values, known.kind, batch.prepared,
                        in_common,
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
        self, q: Tensor, layer: RadixAttention, known: _Layer, batch: Batch, sinks: Tensor | None
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
        self, q: Tensor, layer: RadixAttention, known: _Layer, batch: Batch, sinks: Tensor | None
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
            q.reshape(-1, 1, heads, layer.qk_head_dim), *self._caches(layer, known, 1),
            cache_seqlens=counts, page_table=places, sinks=sinks, **options,
        )  # fmt: skip
        by_request = branch_lse.view(-1, batch.rows, heads).transpose(1, 2)
        return merge_attention(
            [before[0], branch.view_as(before[0])], [before[1], by_request], layout="bnhd"
        )

    def _attend_to_new_rows(
        self, q: Tensor, k: Any, v: Any, layer: RadixAttention, known: _Layer, batch: Batch,
        with_lse: bool,
    ) -> Any:  # fmt: skip
        """Prefill of a model with latent attention, whose K and V are not those of the cache."""
        return attention(
            q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim),
            k.view(-1, layer.tp_k_head_num, layer.qk_head_dim),
            v.view(-1, layer.tp_v_head_num, layer.v_head_dim), cu_seqlens_q=batch.ends,
            cu_seqlens_k=batch.ends, max_seqlen_q=batch.longest, max_seqlen_k=batch.longest,
            return_lse=with_lse, **known.options,
        )  # fmt: skip

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
            if pool.dtype in FP8:
                device = self._slots.device
                options["k_descale"] = _descale(layer.k_scale, device)
                options["v_descale"] = _descale(layer.v_scale, device)
        in_window_pool = (
            self._window_pool is not None and self._window_pool.layers_mapping[layer.layer_id][1]
        )
        masks_trees = (
            not of_latent_model
            and pool.dtype not in FP8
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


def _descale(scale: Any, device: torch.device) -> Tensor | None:
    """A scale of a cache as float32 () on the device."""
    if scale is None:
        return None
    if isinstance(scale, Tensor):
        return scale.detach().to(device, torch.float32).reshape(())
    return torch.full((), float(scale), dtype=torch.float32, device=device)
