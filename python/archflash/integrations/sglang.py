"""archflash in SGLang: the attention backend "archflash".

Import this module at the top of the program that starts SGLang, because SGLang's processes import
that again; then pass ``attention_backend="archflash"``. It serves prefill (whole and in chunks),
decoding and CUDA graphs of decoding, with pages of any size, windows, softcap, sinks and caches in
8 bits, by `archflash.attention_with_kvcache`. It refuses models with latent attention (MLA) or with
an encoder beside the decoder, and speculative decoding.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from torch import Tensor

from archflash._errors import UnsupportedError
from archflash._kvcache import attention_with_kvcache

NAME = "archflash"


class _Batch(NamedTuple):
    """A batch, as all layers see it.

    Attributes:
        lengths: int32 (requests,), of each request, with the rows of this batch.
        pages: int32 (requests, pages of a request).
        ends: int32 (requests + 1,), where each request's rows begin; None for one row of each.
        longest: the most rows of a request.
    """

    lengths: Tensor
    pages: Tensor
    ends: Tensor | None
    longest: int


class ArchflashBackend(AttentionBackend):  # type: ignore[misc]
    """The attention of all layers of a model, with SGLang's names.

    Args:
        runner: SGLang's ModelRunner.

    Raises:
        UnsupportedError: a kind of model that is not served.
    """

    def __init__(self, runner: Any) -> None:
        if getattr(runner, "use_mla_backend", False):
            raise UnsupportedError("latent attention (MLA): choose another attention backend")
        if getattr(runner.model_config, "is_encoder_decoder", False):
            raise UnsupportedError("cross attention: choose another attention backend")
        # The slot of each row of each request: int32 (requests, longest request).
        self._slots: Tensor = runner.req_to_token_pool.req_to_token
        self._page_size: int = runner.page_size
        self._batch: _Batch | None = None
        self._graph_lengths: Tensor | None = None
        self._graph_pages: Tensor | None = None

    def _pages_of(self, requests: Tensor, longest: int) -> Tensor:
        """The pages of requests: their slots are consecutive within a page."""
        return self._slots[requests, : longest : self._page_size] // self._page_size

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Notes a batch, once for all layers."""
        mode = forward_batch.forward_mode
        if forward_batch.spec_info is not None:
            raise UnsupportedError("speculative decoding: choose another attention backend")
        longest_key = int(forward_batch.seq_lens_cpu.max()) if len(forward_batch.seq_lens) else 0
        ends, longest = None, 1
        if not mode.is_decode_or_idle():
            rows = forward_batch.extend_seq_lens
            ends = F.pad(rows.cumsum(0, dtype=torch.int32), (1, 0))
            longest = max(forward_batch.extend_seq_lens_cpu, default=1)
        lengths = forward_batch.seq_lens.to(torch.int32)
        pages = self._pages_of(forward_batch.req_pool_indices, longest_key)
        self._batch = _Batch(lengths, pages.to(torch.int32), ends, longest)

    # --- CUDA graphs of decoding ---

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocates what the graphs read, for at most max_bs requests."""
        width = -(-self._slots.shape[1] // self._page_size)
        options: dict[str, Any] = {"dtype": torch.int32, "device": self._slots.device}
        self._graph_lengths = torch.ones(max_bs, **options)
        self._graph_pages = torch.zeros(max_bs, width, **options)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata_capture_cuda_graph(
        self,
        bs: int,
        num_tokens: int,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        encoder_lens: Tensor | None,
        forward_mode: Any,
        spec_info: Any,
    ) -> None:
        """Notes a batch whose graph is captured."""
        self._note_for_graph(bs, req_pool_indices, seq_lens, forward_mode, spec_info)

    def init_forward_metadata_replay_cuda_graph(
        self,
        bs: int,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        seq_lens_sum: int,
        encoder_lens: Tensor | None,
        forward_mode: Any,
        spec_info: Any,
        seq_lens_cpu: Tensor | None,
        **_: Any,
    ) -> None:
        """Writes a batch where the graph reads it."""
        self._note_for_graph(bs, req_pool_indices, seq_lens, forward_mode, spec_info)

    def _note_for_graph(
        self, bs: int, requests: Tensor, seq_lens: Tensor, mode: Any, spec_info: Any
    ) -> None:
        if spec_info is not None or not mode.is_decode_or_idle():
            raise UnsupportedError("a CUDA graph of anything but decoding: turn it off")
        assert self._graph_lengths is not None
        assert self._graph_pages is not None
        lengths, pages = self._graph_lengths[:bs], self._graph_pages[:bs]
        lengths.copy_(seq_lens[:bs])
        pages.copy_(self._pages_of(requests[:bs], self._slots.shape[1]))
        self._batch = _Batch(lengths, pages, None, 1)

    # --- layers ---

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **options: Any,
    ) -> Tensor:
        """The attention of one row of each request."""
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, **options)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **options: Any,
    ) -> Tensor:
        """The attention of new rows of each request, behind those of its cache."""
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, **options)

    def _attend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """Writes k and v (rows, kv heads, head dim) into the cache, and computes the attention of q
        (rows, heads x head dim): (rows, heads x head dim of v).

        Raises:
            UnsupportedError: an argument of a layer that is not known here; it is named.
        """
        for name, value in others.items():
            if value is not None:
                raise UnsupportedError(f"{name}: choose another attention backend")
        batch = self._batch
        assert batch is not None
        pool = forward_batch.token_to_kv_pool
        if save_kv_cache and k is not None:
            pool.set_kv_buffer(
                layer, forward_batch.out_cache_loc, k, v, layer.k_scale, layer.v_scale
            )
        k_cache, v_cache = (
            x.view(-1, self._page_size, *x.shape[1:]) for x in pool.get_kv_buffer(layer.layer_id)
        )
        rows = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        window = layer.sliding_window_size
        options: dict[str, Any] = {}
        if k_cache.dtype.itemsize == 1:
            options.update(k_descale=_tensor(layer.k_scale, q), v_descale=_tensor(layer.v_scale, q))
        out: Tensor = attention_with_kvcache(
            rows if batch.ends is not None else rows[:, None],
            k_cache,
            v_cache,
            cache_seqlens=batch.lengths,
            page_table=batch.pages,
            cu_seqlens_q=batch.ends,
            max_seqlen_q=None if batch.ends is None else batch.longest,
            causal=True,
            window=None if window is None or window < 0 else (window, 0),
            softcap=layer.logit_cap or None,
            scale=layer.scaling,
            sinks=sinks,
            **options,
        )
        return out.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)


def _tensor(scale: Any, like: Tensor) -> Tensor | None:
    """A scale of the cache as float32 () on the device."""
    if scale is None or isinstance(scale, Tensor):
        return scale
    return torch.full((), float(scale), dtype=torch.float32, device=like.device)


def _allow_the_name() -> None:
    """The command line takes only names of a list. Versions without the function take any."""
    from sglang.srt import server_args

    add = getattr(server_args, "add_attention_backend_choices", None)
    if add is not None:
        add([NAME])


register_attention_backend(NAME)(ArchflashBackend)
_allow_the_name()
