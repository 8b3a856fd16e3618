"""Attention of one layer of a server's model over a paged cache: what the plug-ins for vLLM and
SGLang do at each step, without an import of them.

Lengths, offsets and page tables are read on the device only, so that a CUDA graph of a batch serves
every other batch of its shapes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from archflash import _sequences
from archflash._api import attention
from archflash._errors import UnsupportedError
from archflash._kvcache import PLACES, Batch, kind_of, serve, values_of
from archflash._merge import merge_attention

FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
_WITHOUT_CACHE = ("encoder", "encoder_only")
_K_DESCALE, _V_DESCALE = PLACES["k_descale"], PLACES["v_descale"]


@dataclass
class PagedBatch:
    """A batch of requests, as all layers see it.

    Attributes:
        num_actual_tokens: rows of the batch; rows behind them pad it.
        max_query_len: the most rows of a request.
        query_start_loc: int32 (requests + 1,), where each request's rows begin.
        seq_lens: int32 (requests,), the length of each request with the rows of this batch.
        block_table: int32 (requests, pages of a request). Kernels share keys out by how many the
            pages hold: see `narrowed`.
        slot_mapping: int64 (rows,), where each row goes in the caches; -1 for nowhere.
        causal: whether a row sees no later one: one bool, or int32 (requests,).
        seen_by_all: int32 (rows, 2): a row also sees the keys from the first of these positions to
            the second, inclusive; (-1, -1) for none. Images whose rows see one another.
        prefix_lens: int32 (requests,): all rows of a request see so many of its first keys, and of
            the others only `prefix_window` up to their own.
        context_lens: int32 (requests,): rows of each request that this rank's share of the cache
            holds, without the rows of this batch. Only where ranks share a cache.
        longest: the most keys of a request; None in a CUDA graph, which serves longer ones, too.
        in_common, prepared: `batch` and `prepared` of `serve`.
    """

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    causal: bool | Tensor = True
    context_lens: Tensor | None = None
    seen_by_all: Tensor | None = None
    prefix_lens: Tensor | None = None
    prefix_window: int = 0
    longest: int | None = None
    in_common: Batch = field(init=False, repr=False)
    prepared: dict[int, Any] = field(init=False, repr=False)
    # Both are also those of copies with other tables.
    _all_prepared: list[dict[int, Any]] = field(init=False, repr=False, default_factory=list)
    _ranges: dict[Any, Tensor] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.use_table(self.block_table, self.slot_mapping)

    def use_table(self, block_table: Tensor, slot_mapping: Tensor) -> None:
        """Takes the pages and places of other layers' caches."""
        self.block_table, self.slot_mapping = block_table, slot_mapping
        self.in_common = self.query_start_loc, self.max_query_len, self.seq_lens, block_table
        self.prepared = {}
        self._all_prepared.append(self.prepared)

    def lengths_changed(self) -> None:
        """Forgets what was computed of `seq_lens`, in which there are other numbers now. In a CUDA
        graph it is computed anew behind this, by each replay, too.
        """
        self._ranges.clear()
        for prepared in self._all_prepared:
            prepared.clear()

    def causal_rows(self) -> Tensor:
        """bool (rows, 1, 1), of `causal` given for each request; computed on the device."""
        assert isinstance(self.causal, Tensor)
        return self.causal[self._requests()[1]].bool()[:, None, None]

    def key_ranges(self, window: int | None, clamped: bool) -> Tensor:
        """int32 (1, 1, rows, 2, 2): two ranges of keys for each row, whose union it sees; computed
        on the device, once for all layers of a kind.

        Args:
            window: as `PagedAttention.sliding_window`.
            clamped: whether the window bounds `seen_by_all`, too.
        """
        # A CUDA graph must not keep what was computed before it: its replay would not compute it.
        captures = self.seq_lens.is_cuda and torch.cuda.is_current_stream_capturing()
        key = (window, clamped, captures)
        if key in self._ranges:
            return self._ranges[key]
        rows, request = self._requests()
        last = self.seq_lens - self.query_start_loc[1:]  # a row's position, less its number
        position = rows + last[request]
        end = position + 1
        if self.causal is not True:
            far = self.seq_lens[request]
            if window is not None and self.prefix_lens is None:  # that of a prefix has one side
                far = far.minimum(position + window)
            if isinstance(self.causal, Tensor):
                far = torch.where(self.causal_rows().flatten(), end, far)
            end = far
        if self.prefix_lens is not None:
            window = self.prefix_window
        first = torch.zeros_like(position)
        if window is not None:
            first = (position - window + 1).clamp(min=0)
        if self.prefix_lens is not None:
            other = torch.zeros_like(position), self.prefix_lens[request].minimum(end)
        else:
            assert self.seen_by_all is not None
            begin, last_seen = self.seen_by_all.unbind(-1)
            begin = begin.clamp(min=0)
            other = (begin.maximum(first) if clamped else begin), last_seen + 1
        pairs = [torch.stack(x, -1) for x in ((first, end), other)]
        ranges = torch.stack(pairs, -2).int()[None, None]
        self._ranges[key] = ranges
        return ranges

    def _requests(self) -> tuple[Tensor, Tensor]:
        """The numbers of the rows, and the request of each."""
        ends = self.query_start_loc
        rows = torch.arange(self.num_actual_tokens, device=ends.device, dtype=torch.int32)
        request = _sequences.of_rows(rows, ends)
        return rows, request.clamp(max=ends.shape[0] - 2)  # rows behind all requests pad the batch


def narrowed(block_table: Tensor, page_size: int, longest: int | None) -> Tensor:
    """The pages of a table that keys of requests may be in, up to the next power of two, so that
    batches of many lengths have few plans.

    Args:
        longest: the most keys of a request; None for as many as the table has pages for.
    """
    if longest is None:
        return block_table
    return block_table[:, : 1 << (-(-longest // page_size) - 1).bit_length()]


class PagedAttention:
    """The attention of one layer, with the arguments and names that vLLM gives its backends.

    Args:
        num_heads, head_size, scale, num_kv_heads: of the layer; head_size is that of queries and
            keys, and values may have another one.
        alibi_slopes, logits_soft_cap, sinks: options of the softmax, or None.
        sliding_window: a row sees so many keys up to its own, and where it sees later ones, as many
            of these; None for all.
        kv_cache_dtype: a name of `FP8`, or any other for a cache of the dtype of the queries.
        attn_type: "decoder", "encoder_decoder", "encoder" or "encoder_only".
        kv_sharing_target_layer_name: not None where another layer writes the cache.
        batch_invariant: a row gets the same bits in any batch.
    """

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None, sliding_window: int | None = None,
        kv_cache_dtype: str = "auto", logits_soft_cap: float | None = None,
        attn_type: str = "decoder", kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None, *, batch_invariant: bool = False,
    ) -> None:  # fmt: skip
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sliding_window = sliding_window
        self.sinks = sinks
        self._float8 = FP8.get(kv_cache_dtype)
        self._without_cache = attn_type in _WITHOUT_CACHE
        options = {
            "softcap": logits_soft_cap or None,
            "sinks": sinks,
            "alibi_slopes": alibi_slopes and torch.tensor(alibi_slopes, dtype=torch.float32),
            "batch_invariant": batch_invariant or None,
        }
        given = {name: value for name, value in options.items() if value is not None}
        ordered: dict[str, Any] = {**given, "scale": self.scale, "causal": True}
        free: dict[str, Any] = {**given, "scale": self.scale}
        if sliding_window is not None:
            ordered["window"] = (sliding_window - 1, 0)
            free["window"] = (sliding_window - 1, sliding_window - 1)
        # Arguments of a call, by whether a row sees no later one.
        self._calls = {True: ordered, False: free}
        self._values = {causal: values_of(**call) for causal, call in self._calls.items()}
        self._kinds = {causal: kind_of(values) for causal, values in self._values.items()}
        self._views: tuple[Callable[[], Tensor | None], Any, Any]
        self._forget()

    def write(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Writes rows into the cache by plain operations of PyTorch.

        Args:
            layer: `_k_scale`, `_v_scale`: what rows are divided by, if the cache is FP8; float32 ()
                or (kv heads,).
            key, value: (rows, kv heads, head dim).
            kv_cache: as for `run`.
            slot_mapping: int64, page * page size + row of the page for each of the first rows of
                key; -1 for nowhere.
        """
        k_cache, v_cache = self.caches(kv_cache)
        write_rows(k_cache, key, slot_mapping, layer._k_scale)
        write_rows(v_cache, value, slot_mapping, layer._v_scale)

    def caches(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """The caches of keys and of values (pages, page size, kv heads, head dim), views of a cache
        (pages, kv heads, page size, head dims of both), whatever its strides are.
        """
        if self._views[0]() is not kv_cache:
            self._see(kv_cache)
        return self._views[2]  # type: ignore[no-any-return]

    def stored_caches(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """What `caches` returns, in the dtype of the cache."""
        if self._views[0]() is not kv_cache:
            self._see(kv_cache)
        return self._views[1]  # type: ignore[no-any-return]

    def _see(self, kv_cache: Tensor) -> None:
        # Views of the tensor itself would keep it alive, and it would never be forgotten.
        both = kv_cache.detach().transpose(1, 2)
        stored = views = both[..., : self.head_size], both[..., self.head_size :]
        if self._float8 is not None:
            k, v = stored
            views = k.view(self._float8), v.view(self._float8)
        self._views = (weakref.ref(kv_cache, self._forget), stored, views)

    def _forget(self, gone: object = None) -> None:
        """Frees the views of a cache that is gone: a server gives its memory to another one."""
        if gone is None or self._views[0] is gone:
            self._views = (lambda: None, None, None)

    def run(
        self, layer: Any, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor,
        batch: PagedBatch, output: Tensor,
    ) -> Tensor:  # fmt: skip
        """Writes the attention of a batch, whose keys and values are in the cache, into output.

        Args:
            layer: has the scales of an FP8 cache, `_k_scale` and `_v_scale`, float32 () or (kv
                heads,).
            query: (rows, heads, head dim).
            key, value: (rows, kv heads, head dim), read where there is no cache only.
            kv_cache: (pages, kv heads, page size, head dims of keys and values).
            batch: the requests.
            output: (rows, heads, head dim of values), or with these two in one.

        Returns:
            output.
        """
        rows = batch.num_actual_tokens
        out = output if output.dim() == 3 else output.view(output.shape[0], self.num_heads, -1)
        if query.size(0) != rows:
            query, out = query[:rows], out[:rows]
        if self._without_cache:
            assert key is not None
            assert value is not None
            self._among_rows(query, key[:rows], value[:rows], batch, False, out=out)
            return output
        causal = batch.causal
        if batch.seen_by_all is not None or batch.prefix_lens is not None:
            clamped = getattr(layer, "mm_prefix_clamp_sliding_window", False)
            ranges = batch.key_ranges(self.sliding_window, clamped)
            self._attend(layer, query, kv_cache, batch, False, out, key_ranges=ranges, window=None)
            return output
        if not isinstance(causal, Tensor):
            self._attend(layer, query, kv_cache, batch, causal, out)
            return output
        ordered, free = (
            self._attend(layer, query, kv_cache, batch, ordered) for ordered in (True, False)
        )
        torch.where(batch.causal_rows(), ordered, free, out=out)
        return output

    def _attend(
        self, layer: Any, query: Tensor, kv_cache: Tensor, batch: PagedBatch, causal: bool,
        out: Tensor | None = None, in_common: Batch | None = None, **more: Any,
    ) -> Any:  # fmt: skip
        """Attention of the rows to the cache.

        Args:
            in_common: in the place of the batch's.
            more: other options of `attention_with_kvcache`.
        """
        values = self._values[causal]
        if self._float8 is not None:
            values[_K_DESCALE], values[_V_DESCALE] = layer._k_scale, layer._v_scale
        if more:
            values = values.copy()
            for name, value in more.items():
                values[PLACES[name]] = value
        if self._views[0]() is not kv_cache:
            self._see(kv_cache)
        k_cache, v_cache = self._views[2]
        return serve(
            query, k_cache, v_cache, values, self._kinds[causal], batch.prepared,
            in_common or batch.in_common, out,
        )  # fmt: skip

    def run_shared(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor,
        batch: PagedBatch, output: Tensor, gather: Any, combine: Any,
    ) -> Tensor:  # fmt: skip
        """`run` where the ranks of a group hold a share of the cache's rows each (decode context
        parallelism): the rows before this batch are attended to by all ranks together, those of
        this batch by the rank that has their heads, and the two results are merged.

        Args:
            gather: makes queries of all ranks' heads of those of this rank.
            combine: makes output and log-sum-exp (rows, heads) of this rank's heads of those of all
                heads over this rank's share of the keys.
        """
        assert batch.context_lens is not None
        rows = batch.num_actual_tokens
        out = output.view(output.shape[0], self.num_heads, -1)[:rows]
        before, lse_before = combine(
            *_rows_first(
                self._attend(
                    layer,
                    gather(query[:rows]),
                    kv_cache,
                    batch,
                    False,
                    in_common=(*batch.in_common[:2], batch.context_lens, batch.block_table),
                    sinks=None,  # they count once, among the new rows
                    return_lse=True,
                )
            )
        )
        new, lse_new = self._among_rows(
            query[:rows], key[:rows], value[:rows], batch, batch.causal, return_lse=True
        )
        merged, _ = merge_attention(
            [before.to(new.dtype), new], [lse_before.transpose(0, 1), lse_new]
        )
        out.copy_(merged)
        return output

    def check_shared(self) -> None:
        """Raises what `run_shared` cannot serve, UnsupportedError: it needs positions of keys,
        which a share of them does not show.
        """
        for name, value in (
            ("a sliding window", self.sliding_window),
            ("alibi", self._calls[True].get("alibi_slopes")),
        ):
            if value is not None:
                raise UnsupportedError(
                    f"{name} with decode context parallelism: a rank's share of the cache does not "
                    "show how far a key is away; choose another attention backend, or set "
                    "decode_context_parallel_size to 1"
                )

    def _among_rows(
        self, q: Tensor, k: Tensor, v: Tensor, batch: PagedBatch, causal: Any, **more: Any
    ) -> Any:
        """Attention of the rows of each request to one another."""
        ends, longest = batch.query_start_loc, batch.max_query_len
        return attention(
            q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=longest,
            max_seqlen_k=longest, **self._calls[causal], **more,
        )  # fmt: skip


def write_rows(cache: Tensor, rows: Tensor, slot_mapping: Tensor, scale: Tensor) -> None:
    """Writes rows (rows, ...) into a cache (pages, page size, ...) by plain operations of PyTorch:
    servers have operators for it, but not for a CPU. See `PagedAttention.write`.
    """
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    rows = rows[: slot_mapping.shape[0]][kept]
    if cache.dtype in FP8.values():
        largest = torch.finfo(cache.dtype).max
        rows = (rows.float() / scale.view(-1, 1)).clamp(-largest, largest)
        rows, cache = rows.to(cache.dtype).view(torch.uint8), cache.view(torch.uint8)
    size = cache.shape[1]
    cache[slots // size, slots % size] = rows.to(cache.dtype)


def refuse_unserved(**options: Any) -> None:
    """Raises UnsupportedError for a layer's option that latent caches are not served with."""
    for name, value in options.items():
        if value:
            raise UnsupportedError(f"{name} with a latent cache: not built yet")


def _rows_first(result: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp (rows, heads) of a packed call."""
    out, lse = result
    return out, lse.transpose(0, 1)
