"""The attention backend of archflash for vLLM's models with latent attention (MLA): decoding over
the latent cache, and prefill over keys and values of all heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm import envs
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, max_decode_query_len
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

from archflash._api import attention
from archflash._errors import UnsupportedError
from archflash._kvcache import attention_with_kvcache
from archflash.integrations._paged import FP8, refuse_unserved, write_rows
from archflash.integrations.vllm_backend import why_no_cache

_LATENT, _ROPE = 512, 64  # the columns that kernels take


class ArchflashMLABackend(MLACommonBackend):  # type: ignore[misc]
    """What vLLM asks a backend before it takes it."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    # vLLM's layer reads every 8-bit cache as e4m3.
    supported_kv_cache_dtypes: ClassVar[list[str]] = [
        "auto", "float16", "bfloat16", "fp8", "fp8_e4m3",
    ]  # fmt: skip

    @staticmethod
    def get_name() -> str:
        return "ARCHFLASH_MLA"

    @staticmethod
    def get_impl_cls() -> type[ArchflashMLAImpl]:
        return ArchflashMLAImpl

    @staticmethod
    def get_builder_cls() -> type[ArchflashMLAMetadataBuilder]:
        return ArchflashMLAMetadataBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [_LATENT + _ROPE]

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability.major >= 8)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *others: Any, **kw: Any
    ) -> str | None:
        """Why what is supported alone is not together."""
        return why_no_cache(dtype, kv_cache_dtype)


@dataclass
class ArchflashMLADecodeMetadata(MLACommonDecodeMetadata):  # type: ignore[misc]
    """The requests that decode: also where their rows begin, and the most rows of one."""

    query_start_loc: Tensor
    max_query_len: int


class ArchflashMLAMetadataBuilder(MLACommonMetadataBuilder):  # type: ignore[misc]
    """Makes the metadata of a batch once for all layers."""

    # Graphs hold decoding only, of requests with up to 1 + drafts rows each, in any mixture.
    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[Any] = QueryLenSupport.VARLEN
    reorder_batch_threshold = 1

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config: Any, kv_cache_spec: Any) -> int | None:
        """The most rows of a request in a graph of decoding."""
        return int(max_decode_query_len(vllm_config))

    def _build_decode(
        self, block_table_tensor: Tensor, seq_lens_device: Tensor, max_seq_len: int,
        query_start_loc_cpu: Tensor, query_start_loc_device: Tensor, num_decode_tokens: int,
        max_query_len: int, dcp_tot_seq_lens_device: Tensor | None,
    ) -> ArchflashMLADecodeMetadata:  # fmt: skip
        return ArchflashMLADecodeMetadata(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            query_start_loc=query_start_loc_device,
            max_query_len=max_query_len,
        )


class ArchflashMLAImpl(MLACommonImpl):  # type: ignore[misc]
    """The attention of one layer.

    Raises:
        UnsupportedError: what latent attention is not served with.
    """

    can_return_lse_for_decode = True
    supports_dcp = True
    supports_pcp = False
    lse_base_on_e = True

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int,
        alibi_slopes: list[float] | None, sliding_window: int | None, kv_cache_dtype: str,
        logits_soft_cap: float | None, attn_type: str, kv_sharing_target_layer_name: str | None,
        **latent: Any,
    ) -> None:  # fmt: skip
        if attn_type != AttentionType.DECODER:
            raise UnsupportedError(f"{attn_type} with a latent cache: not built yet")
        refuse_unserved(
            alibi_slopes=alibi_slopes,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
        )
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype,
            logits_soft_cap, attn_type, kv_sharing_target_layer_name, **latent,
        )  # fmt: skip
        self.supports_quant_query_input = False  # queries stay in 16 bits
        self._batch_invariant = bool(envs.VLLM_BATCH_INVARIANT)

    def do_kv_cache_update(
        self, kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor,
        kv_cache_dtype: str, k_scale: Tensor, skip_scale: bool = False,
    ) -> None:  # fmt: skip
        """Writes the rows of a batch into the cache (pages, page size, latent + rope columns)."""
        if kv_cache.is_cuda:
            super().do_kv_cache_update(
                kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale, skip_scale
            )
        elif kv_cache.numel():
            cache = kv_cache.view(FP8.get(kv_cache_dtype, kv_cache.dtype))
            rows = torch.cat([kv_c_normed, k_pe.squeeze(1)], -1)
            write_rows(cache, rows, slot_mapping.flatten(), k_scale)

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: MLACommonMetadata,
        layer: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of the requests that decode to rows of the latent cache.

        Args:
            q: (rows, heads, latent + rope columns), or these two apart.
            kv_c_and_k_pe_cache: (pages, page size, latent + rope columns).

        Returns:
            The output (rows, heads, latent columns), and where ranks share the cache the
            log-sum-exp (rows, heads).
        """
        latent = self.kv_lora_rank
        qv, q_rope = q if isinstance(q, tuple) else (q[..., :latent], q[..., latent:])
        cache = kv_c_and_k_pe_cache[:, :, None]
        batch = attn_metadata.decode
        options: dict[str, Any] = {}
        if self.kv_cache_dtype in FP8:
            options.update(k_descale=layer._k_scale, v_descale=layer._k_scale)
        result = attention_with_kvcache(
            q_rope, cache[..., latent:], cache[..., :latent], qv=qv, cache_seqlens=batch.seq_lens,
            page_table=batch.block_table, cu_seqlens_q=batch.query_start_loc,
            max_seqlen_q=batch.max_query_len, causal=attn_metadata.causal, scale=self.scale,
            batch_invariant=self._batch_invariant, return_lse=self.need_to_return_lse_for_decode,
            **options,
        )  # fmt: skip
        if self.need_to_return_lse_for_decode:
            out, lse = result
            return out, lse.transpose(0, 1).contiguous()
        return result, None


class ArchflashMLAPrefillBackend(MLAPrefillBackend):  # type: ignore[misc]
    """Attention of new rows to one another, and to chunks of rows that the cache had before."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @classmethod
    def supports_compute_capability(cls, device_capability: Any) -> bool:
        return device_capability is not None and device_capability.major >= 8

    def supports_out(self) -> bool:
        return True

    def run_prefill_new_tokens(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        return_softmax_lse: bool,
        out: Tensor | None = None,
        output_scale: Tensor | None = None,
    ) -> Any:
        """Attention of the rows of each request to its earlier ones: output, or output and
        log-sum-exp (heads, rows).
        """
        if output_scale is not None:
            raise UnsupportedError("output_scale: not built yet; turn the fusion of it off")
        batch = self._prefill_metadata
        ends, longest = batch.query_start_loc, batch.max_query_len
        return self._attention(
            q, k, v, (ends, longest), (ends, longest), True, return_lse=return_softmax_lse, out=out
        )

    def run_prefill_context_chunk(
        self, chunk: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None
    ) -> Any:
        """Attention of the rows of some requests to rows of the cache: output and log-sum-exp."""
        return self._attention(
            q, k, v, (chunk.query_start_loc, chunk.max_query_len),
            (chunk.cu_seq_lens, chunk.max_seq_len), False, return_lse=True, out=out,
        )  # fmt: skip

    def _attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        queries: tuple[Tensor, int],
        keys: tuple[Tensor, int],
        causal: bool,
        **options: Any,
    ) -> Any:
        if q.dtype in FP8.values():
            options["out_dtype"] = self._prefill_metadata.output_dtype
        return attention(
            q, k, v, cu_seqlens_q=queries[0], max_seqlen_q=queries[1], cu_seqlens_k=keys[0],
            max_seqlen_k=keys[1], causal=causal, scale=self.scale,
            batch_invariant=bool(envs.VLLM_BATCH_INVARIANT), **options,
        )  # fmt: skip
