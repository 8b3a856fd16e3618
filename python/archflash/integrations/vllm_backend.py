"""The attention backend of archflash for vLLM: paged prefill, decoding, and batches of both in one
call of `archflash.attention_with_kvcache`.

Lengths and page tables are read on the device only, so that a CUDA graph of a batch of decoding
serves others of its size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm import _custom_ops
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

from archflash._api import attention
from archflash._errors import UnsupportedError
from archflash._kvcache import attention_with_kvcache

_FP8 = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
_TYPES = (AttentionType.DECODER, AttentionType.ENCODER_ONLY)
_MOST_HEAD_DIM = 256


class ArchflashBackend(AttentionBackend):  # type: ignore[misc]
    """What vLLM asks a backend before it takes it."""

    accept_output_buffer = True
    forward_includes_kv_cache_update = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", *_FP8]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # vLLM looks the name up among those of its enumeration

    @staticmethod
    def get_impl_cls() -> type[ArchflashImpl]:
        return ArchflashImpl

    @staticmethod
    def get_builder_cls() -> type[ArchflashMetadataBuilder]:
        return ArchflashMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        return [MultipleOf(1)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """Keys, then values: (2, pages, page size, heads, head dim)."""
        return (2, num_blocks, block_size, num_kv_heads, head_size)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and head_size <= _MOST_HEAD_DIM

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in _TYPES


@dataclass
class ArchflashMetadata(AttentionMetadata):  # type: ignore[misc]
    """A batch, as all layers see it.

    Attributes:
        num_actual_tokens: rows of the batch; rows behind them pad it.
        max_query_len: the most rows of a request.
        query_start_loc: int32 (requests + 1,), where each request's rows begin.
        seq_lens: int32 (requests,), the length of each request with the rows of this batch.
        block_table: int32 (requests, pages of a request).
        slot_mapping: int64 (rows,), where each row goes in the caches; -1 for nowhere.
        causal: whether a row sees no later one.
    """

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    causal: bool


class ArchflashMetadataBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Makes the metadata of a batch once for all layers. Nothing is computed from lengths."""

    # A graph of requests with one number of rows serves all others of that kind.
    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table = True

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> ArchflashMetadata:
        """The metadata of a batch. A prefix that all requests share is read for each of them."""
        common = common_attn_metadata
        if isinstance(common.causal, Tensor):
            raise UnsupportedError("causal for each request: not built yet; pass one for the batch")
        return ArchflashMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            causal=bool(common.causal),
        )

    def update_block_table(
        self, metadata: ArchflashMetadata, blk_table: Tensor, slot_mapping: Tensor
    ) -> ArchflashMetadata:
        """The same batch in the caches of other layers."""
        fields = {**vars(metadata), "block_table": blk_table, "slot_mapping": slot_mapping}
        return ArchflashMetadata(**fields)


class ArchflashImpl(AttentionImpl):  # type: ignore[misc]
    """The attention of one layer.

    Raises:
        UnsupportedError: a kind of attention other than that of decoders and encoders.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        if attn_type not in _TYPES:
            raise UnsupportedError(f"{attn_type}: not built yet; choose another attention backend")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.sliding_window = sliding_window
        self.softcap = logits_soft_cap or None
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self.alibi_slopes = None
        if alibi_slopes is not None:
            self.alibi_slopes = torch.tensor(alibi_slopes, dtype=torch.float32)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: ArchflashMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Writes key and value into the cache and the attention of the batch into output.

        Args:
            layer: has the scales of an FP8 cache, `_k_scale` and `_v_scale`, float32 ().
            query: (rows, heads, head dim); key and value (rows, kv heads, head dim), or None where
                another layer has written the cache.
            kv_cache: of `ArchflashBackend.get_kv_cache_shape`.
            attn_metadata: None while vLLM measures its memory: output is 0 then.
            output: (rows, heads, head dim) or (rows, heads x head dim).
            output_scale, output_block_scale: only None.

        Returns:
            output.

        Raises:
            UnsupportedError: a scale of the output.
        """
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedError("output_scale: not built yet; turn the fusion of it off")
        if self.alibi_slopes is not None:  # before a CUDA graph is captured
            self.alibi_slopes = self.alibi_slopes.to(query.device)
        if attn_metadata is None:
            return output.fill_(0)
        batch = attn_metadata
        rows = batch.num_actual_tokens
        q, out = query[:rows], output.view(-1, self.num_heads, self.head_size)[:rows]
        options: dict[str, Any] = {
            "causal": batch.causal and self.attn_type == AttentionType.DECODER,
            "softcap": self.softcap,
            "sinks": self.sinks,
            "alibi_slopes": self.alibi_slopes,
            "scale": self.scale,
            "cu_seqlens_q": batch.query_start_loc,
            "max_seqlen_q": batch.max_query_len,
            "out": out,
        }
        if self.sliding_window is not None:
            left = self.sliding_window - 1
            options["window"] = (left, 0 if options["causal"] else left)
        if self.attn_type == AttentionType.ENCODER_ONLY:
            assert key is not None
            assert value is not None
            ends, longest = batch.query_start_loc, batch.max_query_len
            attention(
                q, key[:rows], value[:rows], cu_seqlens_k=ends, max_seqlen_k=longest, **options
            )
            return output
        k_cache, v_cache = kv_cache.unbind(0)
        if self.kv_sharing_target_layer_name is None and key is not None and value is not None:
            _custom_ops.reshape_and_cache_flash(
                key, value, k_cache, v_cache, batch.slot_mapping, self.kv_cache_dtype,
                layer._k_scale, layer._v_scale,
            )  # fmt: skip
        if self.kv_cache_dtype in _FP8:
            k_cache, v_cache = (x.view(_FP8[self.kv_cache_dtype]) for x in (k_cache, v_cache))
            options.update(k_descale=layer._k_scale, v_descale=layer._v_scale)
        attention_with_kvcache(
            q,
            k_cache,
            v_cache,
            cache_seqlens=batch.seq_lens,
            page_table=batch.block_table,
            **options,
        )
        return output
