"""As much of FlashInfer's interface as its tests of paged caches use, on archflash's public calls:
what docs/migrating.md says of it, as code. FlashInfer's tests compare a batch with calls of one
sequence, which here are float32 in plain PyTorch.
"""

from __future__ import annotations

import itertools
import math
import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import archflash


def _refuse(what: str, given: Any, *taken: Any) -> None:
    if given not in taken:
        raise archflash.UnsupportedError(f"{what}={given!r} has no counterpart in archflash")


def single_prefill_with_kv_cache(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE", sm_scale: float | None = None, window_left: int = -1,
    logits_soft_cap: float | None = None, custom_mask: Tensor | None = None,
    return_lse: bool = False, **_: Any,
) -> Any:  # fmt: skip
    _refuse("pos_encoding_mode", pos_encoding_mode, "NONE")
    if kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    heads, kv_heads = q.shape[1], k.shape[1]
    wide_q, wide_k, wide_v = (x.float().transpose(0, 1) for x in (q, k, v))
    wide_k, wide_v = (x.repeat_interleave(heads // kv_heads, 0) for x in (wide_k, wide_v))
    scores = wide_q @ wide_k.mT * (1 / math.sqrt(q.shape[-1]) if sm_scale is None else sm_scale)
    if logits_soft_cap:
        scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
    place = torch.arange(len(q), device=q.device)[:, None] + len(k) - len(q)
    key = torch.arange(len(k), device=q.device)
    seen = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device)
    if custom_mask is not None:
        seen = custom_mask
    elif causal:
        seen = key <= place
    if window_left >= 0:
        seen = seen & (key >= place - window_left)
    scores = scores.masked_fill(~seen, -math.inf)
    out = (torch.softmax(scores, -1) @ wide_v).transpose(0, 1).to(q.dtype)
    lse = torch.logsumexp(scores, -1).T * math.log2(math.e)
    return (out, lse) if return_lse else out


def single_decode_with_kv_cache(q: Tensor, k: Tensor, v: Tensor, **call: Any) -> Tensor:
    call.pop("use_tensor_cores", None)
    out: Tensor = single_prefill_with_kv_cache(q[None], k, v, **call)[0]
    return out


class _Paged:
    """A wrapper of batches over a paged cache: `plan` keeps the lengths, `run` is one call."""

    def __init__(self, workspace: Tensor, kv_layout: str = "NHD", *_: Any, **__: Any) -> None:
        self._layout = "bhnd" if kv_layout == "HND" else "bnhd"

    def _plan(
        self, q_ends: Tensor | None, indptr: Tensor, indices: Tensor, last_page: Tensor, size: int,
        *, causal: bool = False, pos_encoding_mode: str = "NONE", window_left: int = -1,
        logits_soft_cap: float | None = None, sm_scale: float | None = None,
        custom_mask: Any = None, packed_custom_mask: Any = None, **_: Any,
    ) -> None:  # fmt: skip
        _refuse("pos_encoding_mode", pos_encoding_mode, "NONE")
        _refuse("custom_mask", custom_mask if packed_custom_mask is None else 1, None)
        ends, last_page = indptr.tolist(), last_page.tolist()
        batch, device = len(last_page), "cuda" if torch.cuda.is_available() else "cpu"
        most = max((y - x for x, y in itertools.pairwise(ends)), default=0)
        table = torch.zeros(batch, max(most, 1), dtype=torch.int32, device=device)
        lengths = []
        for i, (begin, end) in enumerate(itertools.pairwise(ends)):
            table[i, : end - begin] = indices[begin:end]
            lengths.append((end - begin - 1) * size + last_page[i] if end > begin else 0)
        self._call: dict[str, Any] = {
            "page_table": table, "causal": causal, "scale": sm_scale,
            "cache_seqlens": torch.tensor(lengths, dtype=torch.int32, device=device),
            "softcap": logits_soft_cap or None,
            "window": None if window_left < 0 else (window_left, None),
        }  # fmt: skip
        if q_ends is not None:
            self._call["cu_seqlens_q"] = q_ends.to(device, torch.int32)
            self._call["max_seqlen_q"] = int(q_ends.diff().max())

    def run(
        self, q: Tensor, cache: Any, *, out: Tensor | None = None, lse: Tensor | None = None,
        return_lse: bool = False, k_scale: float | None = None, v_scale: float | None = None,
        q_scale: float | None = None, **_: Any,
    ) -> Any:  # fmt: skip
        k, v = cache.unbind(1) if isinstance(cache, Tensor) else cache
        call = dict(self._call)
        rows_alone = "cu_seqlens_q" not in call  # q is (batch, heads, d)
        scale = (1.0 if k_scale is None else k_scale) * (1.0 if q_scale is None else q_scale)
        if scale != 1.0:
            call["scale"] = scale * (call["scale"] or 1 / math.sqrt(q.shape[-1]))
        layout = {} if "cu_seqlens_q" in call else {"layout": self._layout}
        if self._layout == "bhnd" and not layout:
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        rows = q
        if rows_alone:
            rows = q[:, None] if self._layout == "bnhd" else q[:, :, None]
        found, of_lse = archflash.attention_with_kvcache(
            rows, k, v, return_lse=True, **layout, **call
        )
        if rows_alone:
            found, of_lse = found.reshape(q.shape[0], q.shape[1], -1), of_lse[:, :, 0]
        else:
            of_lse = of_lse.T
        found = found if v_scale is None else found * v_scale
        of_lse = of_lse * math.log2(math.e)
        for given, x in ((out, found), (lse, of_lse)):
            if given is not None:
                given.copy_(x)
        found = found if out is None else out
        return (found, of_lse if lse is None else lse) if return_lse else found

    forward = run


class BatchDecodeWithPagedKVCacheWrapper(_Paged):
    def plan(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, num_qo_heads: int,
        num_kv_heads: int, head_dim: int, page_size: int, **call: Any,
    ) -> None:  # fmt: skip
        self._plan(None, indptr, indices, last_page_len, page_size, **call)


class BatchPrefillWithPagedKVCacheWrapper(_Paged):
    def plan(
        self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int,
        page_size: int, **call: Any,
    ) -> None:  # fmt: skip
        self._plan(
            qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size, **call
        )


class BatchPrefillWithRaggedKVCacheWrapper:
    """Packed sequences."""

    def __init__(self, workspace: Tensor, kv_layout: str = "NHD", **_: Any) -> None:
        _refuse("kv_layout", kv_layout, "NHD")

    def plan(
        self, qo_indptr: Tensor, kv_indptr: Tensor, num_qo_heads: int, num_kv_heads: int,
        head_dim_qk: int, *_: Any, causal: bool = False, pos_encoding_mode: str = "NONE",
        window_left: int = -1, logits_soft_cap: float | None = None, custom_mask: Any = None,
        sm_scale: float | None = None, **__: Any,
    ) -> None:  # fmt: skip
        _refuse("pos_encoding_mode", pos_encoding_mode, "NONE")
        _refuse("custom_mask", custom_mask, None)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._call = {
            "cu_seqlens_q": qo_indptr.to(device, torch.int32), "causal": causal,
            "cu_seqlens_k": kv_indptr.to(device, torch.int32), "scale": sm_scale,
            "softcap": logits_soft_cap or None,
            "window": None if window_left < 0 else (window_left, None),
        }  # fmt: skip

    def run(self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, **_: Any) -> Any:
        out, lse = archflash.attention(q, k, v, return_lse=True, **self._call)
        return (out, lse.T * math.log2(math.e)) if return_lse else out


def get_seq_lens(indptr: Tensor, last_page_len: Tensor, page_size: int) -> Tensor:
    return (indptr.diff() - 1) * page_size + last_page_len


def get_batch_indices_positions(ends: Tensor, lengths: Tensor, count: int) -> tuple[Tensor, Tensor]:
    row = torch.arange(count, device=ends.device)
    batch = torch.searchsorted(ends[1:].contiguous(), row, right=True)
    position = lengths[batch] - ends[batch + 1] + row
    return batch.int(), position.int()


def append_paged_kv_cache(
    k: Tensor, v: Tensor, batch: Tensor, position: Tensor, cache: Any, indices: Tensor,
    indptr: Tensor, last_page_len: Tensor, kv_layout: str = "NHD", **_: Any,
) -> None:  # fmt: skip
    """The new rows of each sequence, by a call with no query that counts."""
    k_cache, v_cache = cache.unbind(1) if isinstance(cache, Tensor) else cache
    if kv_layout == "HND":
        k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    size = k_cache.shape[1]
    for i in range(len(last_page_len)):
        mine = batch == i
        pages = indices[indptr[i] : indptr[i + 1]][None]
        lengths = position[mine][:1].int()
        if not len(lengths):
            continue
        archflash.attention_with_kvcache(
            k[mine][None, :1].repeat(1, 1, 1, 1), k_cache, v_cache, page_table=pages.int(),
            cache_seqlens=lengths, k_new=k[mine][None], v_new=v[mine][None],
        )  # fmt: skip
    assert size


def install() -> None:
    """Makes `import flashinfer` find this module's functions."""
    package = ModuleType("flashinfer")
    package.__path__ = []
    sys.modules["flashinfer"] = package
    for name in ("decode", "prefill", "utils", "jit", "page"):
        module = ModuleType(f"flashinfer.{name}")
        sys.modules[module.__name__] = module
        setattr(package, name, module)
        for x, value in globals().items():
            if not x.startswith("_") and (callable(value) and x != "install"):
                setattr(module, x, value)
                setattr(package, x, value)
    utils: Any = sys.modules["flashinfer.utils"]
    utils.has_flashinfer_jit_cache = lambda: True
    utils.get_compute_capability = torch.cuda.get_device_capability
    utils.is_sm90a_supported = lambda device: True
    utils.GPUArchitectureError = archflash.UnsupportedError
    jit: Any = sys.modules["flashinfer.jit"]
    jit.build_jit_specs = lambda *_, **__: None
