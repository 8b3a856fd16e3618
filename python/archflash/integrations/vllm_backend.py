"""The attention backend of archflash for vLLM: paged prefill, decoding and batches of both in one
call, and encoders. `archflash.integrations.vllm_mla` is that of latent attention (MLA).

What a model needs beyond it is refused when vLLM chooses a backend, with the reason.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm import _custom_ops, envs
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
)

from archflash._errors import UnsupportedError
from archflash.integrations._paged import FP8, PagedAttention, PagedBatch, narrowed

_MOST_HEAD_DIM, _MOST_HEAD_DIM_FP8, _MOST_HEAD_DIM_RANGES = 512, 256, 256
_16_BITS = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def _has_images_seen_by_all(vllm_config: Any) -> bool:
    """Whether rows of an image see one another: vLLM's mm_prefix."""
    return bool(getattr(vllm_config.model_config, "is_mm_prefix_lm", False))


def why_no_cache(dtype: torch.dtype, kv_cache_dtype: str | None) -> str | None:
    """Why queries of a dtype cannot read a cache of another one."""
    if _16_BITS.get(kv_cache_dtype or "auto", dtype) != dtype:
        return f"a {kv_cache_dtype} cache with {dtype} queries: set --kv-cache-dtype to auto or fp8"
    return None


class ArchflashBackend(AttentionBackend):  # type: ignore[misc]
    """What vLLM asks a backend before it takes it."""

    forward_includes_kv_cache_update = False
    supports_kv_cache_update_bypass = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", *_16_BITS, *FP8]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # vLLM looks the name up among those of its enumeration

    @staticmethod
    def get_impl_cls() -> type[ArchflashImpl]:
        return ArchflashImpl

    @staticmethod
    def get_builder_cls() -> type[ArchflashMetadataBuilder]:
        return ArchflashMetadataBuilder

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and head_size <= _MOST_HEAD_DIM

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability.major >= 8)  # kernels for 16 bits need mma.sync of bfloat16

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in tuple(AttentionType)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return True

    @classmethod
    def supports_rswa(cls) -> bool:
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *others: Any, **kw: Any
    ) -> str | None:
        """Why what is supported alone is not together."""
        if kv_cache_dtype in FP8 and (head_size > _MOST_HEAD_DIM_FP8 or head_size % 16):
            return (
                f"an FP8 cache with head_size {head_size}: it must be a multiple of 16 up to "
                f"{_MOST_HEAD_DIM_FP8}; set --kv-cache-dtype to auto"
            )
        return why_no_cache(dtype, kv_cache_dtype)

    @classmethod
    def validate_configuration(cls, *args: Any, **kw: Any) -> list[str]:
        """The reasons why not, with what to do where vLLM's own words do not say it."""
        reasons: list[str] = super().validate_configuration(*args, **kw)
        advice = {"MLA not supported": "choose --attention-backend ARCHFLASH_MLA"}
        reasons = [f"{r} ({advice[r]})" if r in advice else r for r in reasons]
        for name, words in (("use_mm_prefix", "mm_prefix"), ("use_rswa", "R-SWA")):
            if kw.get(name):
                reasons += [f"{words} with {why}" for why in cls._why_no_ranges(**kw)]
        return reasons

    @staticmethod
    def _why_no_ranges(
        *,
        head_size: int,
        kv_cache_dtype: str | None,
        use_batch_invariant: bool = False,
        use_dcp: bool = False,
        **others: Any,
    ) -> list[str]:
        """What kernels do not serve together with ranges of keys."""
        cases = {
            "an FP8 cache: set --kv-cache-dtype to auto": kv_cache_dtype in FP8,
            f"head_size {head_size}: up to {_MOST_HEAD_DIM_RANGES}": head_size
            > _MOST_HEAD_DIM_RANGES,
            "batch invariance": use_batch_invariant,
            "decode context parallelism": use_dcp,
        }
        return [words for words, is_so in cases.items() if is_so]


class ArchflashMetadataBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Makes the metadata of a batch once for all layers. Nothing is computed from lengths, but the
    lengths of a rank's share where ranks share a cache.
    """

    # Kernels read lengths and offsets on the device, so a graph serves every batch of its shapes.
    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.ALWAYS
    supports_update_block_table = True

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.ranks, self.rank = 1, 0
        if getattr(vllm_config.parallel_config, "decode_context_parallel_size", 1) > 1:
            from vllm.distributed.parallel_state import get_dcp_world_size_and_rank

            self.ranks, self.rank = get_dcp_world_size_and_rank(kv_cache_spec.dcp_sharded)
        # A request grows by so many keys while drafts are made with the metadata of the first one.
        self.drafts = getattr(vllm_config.speculative_config, "num_speculative_tokens", None) or 0
        # All is in persistent tensors of vLLM, or made of these by kernels that a graph keeps.
        self.supports_draft_decode_metadata_update = self.ranks == 1
        most_rows = vllm_config.scheduler_config.max_num_batched_tokens
        self.seen_by_all: tuple[Tensor, Tensor] | None = None  # for the host, for the device
        if _has_images_seen_by_all(vllm_config):
            on_host = torch.empty(most_rows, 2, dtype=torch.int32, pin_memory=device.type == "cuda")
            self.seen_by_all = on_host, torch.empty_like(on_host, device=device)
        self.rswa_window = getattr(vllm_config.model_config, "rswa_window", None)
        # Where a graph's replay finds what the builder makes of each request.
        most = vllm_config.scheduler_config.max_num_seqs
        if self.rswa_window is not None:
            self.prefix_lens = torch.zeros(most, dtype=torch.int32, device=device)
        if self.ranks > 1:
            self.context_lens = torch.zeros(most, dtype=torch.int32, device=device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """Batches with images that rows see as a whole are in no graph; they never decode."""
        if _has_images_seen_by_all(vllm_config):
            return AttentionCGSupport.UNIFORM_BATCH
        return cls._cudagraph_support

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> PagedBatch:
        """The metadata of a batch."""
        longest = common_attn_metadata.max_seq_len + self.drafts
        # The bits of a row must not depend on how long other requests are.
        return self._build(common_attn_metadata, None if envs.VLLM_BATCH_INVARIANT else longest)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> PagedBatch:
        """The metadata of a graph, which serves requests of any length."""
        return self._build(common_attn_metadata, None)

    def build_for_drafting(self, common_attn_metadata: Any, draft_index: int) -> PagedBatch:
        """The metadata of a draft, with which requests may grow."""
        return self._build(common_attn_metadata, None)

    def _narrowed(self, table: Tensor, longest: int | None) -> Tensor:
        return narrowed(table, self.kv_cache_spec.block_size, longest)

    def _build(self, common: Any, longest: int | None) -> PagedBatch:
        if self.ranks > 1 and isinstance(common.causal, Tensor):
            raise UnsupportedError(
                "causal for each request with decode context parallelism: choose another attention "
                "backend, or set decode_context_parallel_size to 1"
            )
        batch = PagedBatch(
            num_actual_tokens=common.num_actual_tokens, max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc, seq_lens=common.seq_lens,
            block_table=self._narrowed(common.block_table_tensor, longest),
            slot_mapping=common.slot_mapping, causal=common.causal,
            seen_by_all=self._images(common), longest=longest,
        )  # fmt: skip
        if self.rswa_window is not None and common.rswa_prefix_lens is not None:
            requests = common.seq_lens.shape[0]
            given = common.rswa_prefix_lens[:requests]
            batch.prefix_lens = self.prefix_lens[:requests].copy_(given, non_blocking=True)
            batch.prefix_window = self.rswa_window
        if self.ranks > 1:
            from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

            requests = common.seq_lens.shape[0]
            batch.context_lens = self.context_lens[:requests]
            batch.context_lens.copy_(
                get_dcp_local_seq_lens(
                    common.seq_lens - common.query_start_loc.diff(),
                    self.ranks,
                    self.rank,
                    self.vllm_config.parallel_config.cp_kv_cache_interleave_size,
                )
            )
        return batch

    def _images(self, common: Any) -> Tensor | None:
        """`PagedBatch.seen_by_all` of a batch; None where no row is in an image."""
        if self.seen_by_all is None or common.mm_req_doc_ranges is None:
            return None
        from vllm.v1.attention.backends.utils import fill_mm_prefix_query_ranges

        on_host, on_device = self.seen_by_all
        rows = fill_mm_prefix_query_ranges(
            on_host.numpy(),
            common.mm_req_doc_ranges,
            common.query_start_loc_cpu,
            common.seq_lens_cpu_upper_bound,
        )
        if rows == 0:
            return None
        on_host[rows : common.num_actual_tokens] = -1  # rows that pad the batch
        used = slice(common.num_actual_tokens)
        return on_device[used].copy_(on_host[used], non_blocking=True)

    def update_block_table(
        self, metadata: PagedBatch, blk_table: Tensor, slot_mapping: Tensor
    ) -> PagedBatch:
        """The batch in the caches of other layers."""
        other = copy.copy(metadata)
        other.use_table(self._narrowed(blk_table, metadata.longest), slot_mapping)
        return other

    def update_draft_decode_metadata(self, metadata: PagedBatch) -> None:
        """A draft changed numbers in tensors that metadata refers to."""
        metadata.lengths_changed()


class ArchflashImpl(PagedAttention, AttentionImpl):  # type: ignore[misc]
    """The attention of one layer; see `PagedAttention` for the arguments.

    Raises:
        UnsupportedError: a window or alibi with decode context parallelism.
    """

    can_return_lse_for_decode = True
    supports_dcp = True
    lse_base_on_e = True

    def __init__(self, *args: Any, **kw: Any) -> None:
        super().__init__(*args, **kw, batch_invariant=envs.VLLM_BATCH_INVARIANT)
        if self.dcp_world_size > 1:
            self.check_shared()
            self._collectives = _collectives()

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Writes the rows of a batch into the cache, before `forward`."""
        if kv_cache.numel() == 0:  # of an encoder
            return
        if not kv_cache.is_cuda:  # vLLM's operator has no code for the CPU
            self.write(layer, key, value, kv_cache, slot_mapping)
            return
        _custom_ops.reshape_and_cache_flash(
            key, value, *self.stored_caches(kv_cache), slot_mapping, self.kv_cache_dtype,
            layer._k_scale, layer._v_scale,
        )  # fmt: skip

    def forward(
        self, layer: Any, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor,
        attn_metadata: PagedBatch | None, output: Tensor, output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Writes the attention of the batch into output: see `PagedAttention.run`.

        Args:
            attn_metadata: None while vLLM measures its memory: output is 0 then.
            output_scale, output_block_scale: only None.

        Raises:
            UnsupportedError: a scale of the output.
        """
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedError("output_scale: not built yet; turn the fusion of it off")
        if attn_metadata is None:
            return output.fill_(0)
        if attn_metadata.context_lens is not None:
            assert key is not None
            assert value is not None
            return self.run_shared(
                layer, query, key, value, kv_cache, attn_metadata, output, *self._collectives
            )
        return self.run(layer, query, key, value, kv_cache, attn_metadata, output)


def _collectives() -> tuple[Any, Any]:
    """`gather` and `combine` of `PagedAttention.run_shared`, by vLLM's group of ranks."""
    from vllm.config import get_current_vllm_config_or_none
    from vllm.distributed.parallel_state import get_dcp_group
    from vllm.v1.attention.ops.dcp import cp_lse_ag_out_rs, dcp_a2a_lse_reduce

    config = get_current_vllm_config_or_none()
    by_all_to_all = config is not None and config.parallel_config.dcp_comm_backend == "a2a"
    reduce = dcp_a2a_lse_reduce if by_all_to_all else cp_lse_ag_out_rs

    def gather(queries: Tensor) -> Any:
        return get_dcp_group().all_gather(queries, dim=1)

    def combine(out: Tensor, lse: Tensor) -> Any:
        return reduce(out, lse, get_dcp_group(), return_lse=True)

    return gather, combine
