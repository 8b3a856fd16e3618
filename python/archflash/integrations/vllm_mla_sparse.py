"""The attention backend of archflash for vLLM's models with sparse latent attention (DeepSeek V3.2,
GLM-5), whose indexer chooses the rows of the cache that each query reads.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.sparse_mla_attention import (
    SparseMLACommonImpl,
    SparseMLACommonMetadata,
    SparseMLACommonMetadataBuilder,
)
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, MultipleOf
from vllm.v1.attention.backends.mla.sparse_utils import align_blocks_to_rows, flat_kv_row_view

from archflash._kvcache import attention_with_kvcache
from archflash.integrations._paged import refuse_unserved

_PACKED = "fp8_ds_mla"  # how vLLM calls rows of 656 bytes


class ArchflashMLASparseBackend(AttentionBackend):  # type: ignore[misc]
    """What vLLM asks a backend before it takes it."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", _PACKED]

    @staticmethod
    def get_name() -> str:
        return "ARCHFLASH_MLA_SPARSE"

    @staticmethod
    def get_impl_cls() -> type[ArchflashMLASparseImpl]:
        return ArchflashMLASparseImpl

    @staticmethod
    def get_builder_cls() -> type[ArchflashMLASparseMetadataBuilder]:
        return ArchflashMLASparseMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(1)]

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return align_blocks_to_rows(spec)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [576]

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability.major >= 8)

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *others: Any, **kw: Any
    ) -> str | None:
        """Why what is supported alone is not together."""
        if kv_cache_dtype == _PACKED and dtype != torch.bfloat16:
            return f"{_PACKED} with {dtype}: its rows hold bfloat16 beside float8"
        if kv_cache_dtype in ("float16", "bfloat16") and str(dtype) != f"torch.{kv_cache_dtype}":
            return f"a cache of {kv_cache_dtype} for {dtype}: they must be the same"
        return None


class ArchflashMLASparseMetadataBuilder(SparseMLACommonMetadataBuilder):  # type: ignore[misc]
    """Makes the metadata of a batch once for all layers."""

    metadata_cls = SparseMLACommonMetadata
    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)


class ArchflashMLASparseImpl(SparseMLACommonImpl):  # type: ignore[misc]
    """The attention of one layer. vLLM turns what the indexer wrote into places in the cache.

    Raises:
        UnsupportedError: what latent attention is not served with.
    """

    group_conversion_decode_only: ClassVar[bool] = True

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int,
        alibi_slopes: list[float] | None, sliding_window: int | None, kv_cache_dtype: str,
        logits_soft_cap: float | None, *others: Any, **latent: Any,
    ) -> None:  # fmt: skip
        refuse_unserved(
            alibi_slopes=alibi_slopes,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
        )
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype,
            logits_soft_cap, *others, **latent,
        )  # fmt: skip
        self.supports_quant_query_input = False  # queries stay in 16 bits

    def _forward_mqa_kernel(
        self, q: Tensor | tuple[Tensor, Tensor], kv_cache: Tensor, topk_indices: Tensor,
        valid_counts: Tensor, *, layer: Any, block_size: int, is_decode: bool,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """Attention of each row to the rows of the cache that its list names.

        Args:
            q: (rows, heads, latent + rope columns), or these two apart.
            kv_cache: (pages, page size, columns of a row, or 656 bytes).
            topk_indices: int32 (rows, n), rows of the cache seen as one page.
            valid_counts: int32 (rows,): how many of them count.

        Returns:
            The output (rows, heads, latent columns).
        """
        latent = self.kv_lora_rank
        rows, _ = flat_kv_row_view(kv_cache, block_size)
        cache = rows[None, :, None]
        options: dict[str, Any] = {
            "key_indices": topk_indices[None, None],
            "topk_lengths": valid_counts[None, None],
            "physical_indices": True,
            "scale": self.scale,
        }
        if self.kv_cache_dtype == _PACKED:
            whole = torch.cat(q, -1) if isinstance(q, tuple) else q
            packed = cache.view(torch.uint8)
            out = attention_with_kvcache(whole[None], packed, packed_rows="fp8_656", **options)
            return out[0], None
        qv, q_rope = q if isinstance(q, tuple) else (q[..., :latent], q[..., latent:])
        out = attention_with_kvcache(
            q_rope[None], cache[..., latent:], cache[..., :latent], qv=qv[None], **options
        )
        return out[0], None
