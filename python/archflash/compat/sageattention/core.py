"""The functions of `sageattention`, each with the order of arguments of its original."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from archflash import _archflash as _native
from archflash._api import attention
from archflash._dispatch import where_served
from archflash._errors import UnsupportedError
from archflash.compat._arguments import flag, in_its_words, plain

APPROXIMATE_VARIABLE = "ARCHFLASH_SAGE_APPROXIMATE"
_asked_of_all = where_served(
    os.environ.get(APPROXIMATE_VARIABLE) or None, f"{APPROXIMATE_VARIABLE} is"
)
_LAYOUTS = {"HND": "bhnd", "NHD": "bnhd"}
# Arguments of the originals that say how they quantise.
_OF_QUANTISING = (
    "per_block_mean",
    "pv_accum_dtype",
    "qk_quant_gran",
    "quantization_backend",
    "smooth_k",
    "smooth_v",
)
# Further arguments of PyTorch's scaled_dot_product_attention. Groups of heads need no flag here.
_OF_PYTORCH = ("dropout_p", "enable_gqa", "scale")


@in_its_words(causal="is_causal", scale="sm_scale", layout="tensor_layout")
def sageattn(
    q: Tensor, k: Tensor, v: Tensor, tensor_layout: str = "HND", is_causal: bool = False,
    sm_scale: float | None = None, return_lse: bool = False, attn_mask: Tensor | None = None,
    **kwargs: Any,
) -> Any:  # fmt: skip
    """Attention of q on k and v.

    Args:
        q: (batch, heads, rows, d), or with tensor_layout="NHD" (batch, rows, heads, d).
        k, v: the same, with heads that those of q are a multiple of.
        tensor_layout: "HND" (heads before rows) or "NHD".
        is_causal: query i sees keys up to i, also where there are other numbers of keys.
        sm_scale: multiplies q k^T; 1 / sqrt(d) by default.
        return_lse: also return the log-sum-exp.
        attn_mask: bool (True keeps) or added to the scores, broadcastable to (batch, heads,
            queries, keys).
        kwargs: `approximate`, as for `archflash.attention`, by default what the environment's
            ARCHFLASH_SAGE_APPROXIMATE said at import, where a kernel serves that; `scale`,
            `dropout_p` and `enable_gqa`, as PyTorch's scaled_dot_product_attention has them; and
            the originals' arguments on quantising, which have no effect.

    Returns:
        The output in q's layout; with return_lse the pair of it and the log-sum-exp, float32
        (batch, heads, queries), a natural logarithm, -inf for a row that sees no key.

    Raises:
        ValueError: another tensor_layout; sm_scale and scale both given.
        TypeError: an argument that is unknown.

    Example:
        >>> import torch
        >>> from archflash.compat.sageattention import sageattn
        >>> q, k, v = (torch.randn(2, 9, 4, 16) for _ in range(3))
        >>> out, lse = sageattn(q, k, v, tensor_layout="NHD", return_lse=True)
        >>> out.shape, lse.shape
        (torch.Size([2, 9, 4, 16]), torch.Size([2, 4, 9]))
    """
    if not isinstance(tensor_layout, str) or tensor_layout not in _LAYOUTS:
        raise ValueError(
            f"tensor_layout is {_native.given(tensor_layout)}: it must be 'HND' or 'NHD'. A mask "
            "is passed by its name, attn_mask="
        )
    _refuse_unknown("sageattn", kwargs, ("approximate", *_OF_PYTORCH))
    scale = plain(kwargs.get("scale"))
    if scale is not None and sm_scale is not None:
        raise ValueError(f"sm_scale={sm_scale} and scale={scale} are one number: pass one of them")
    causal = flag(is_causal)
    return attention(
        q, k, v, causal=causal, q_offset=0 if causal else None,
        scale=plain(sm_scale) if scale is None else scale, attn_mask=attn_mask,
        dropout_p=plain(kwargs.get("dropout_p")),
        approximate=_asked_of_all if kwargs.get("approximate") is None else kwargs["approximate"],
        layout=_LAYOUTS[tensor_layout], return_lse=flag(return_lse),
    )  # fmt: skip


def sageattn_qk_int8_pv_fp16_triton(
    q: Tensor, k: Tensor, v: Tensor, tensor_layout: str = "HND",
    quantization_backend: str = "triton", is_causal: bool = False, attn_mask: Tensor | None = None,
    sm_scale: float | None = None, smooth_k: bool = True, return_lse: bool = False, **kwargs: Any,
) -> Any:  # fmt: skip
    """`sageattn`. The original adds a floating mask to scores to the base 2; here it is added to
    the scores, as in PyTorch.
    """
    return sageattn(q, k, v, tensor_layout, is_causal, sm_scale, return_lse, attn_mask, **kwargs)


def sageattn_qk_int8_pv_fp16_cuda(
    q: Tensor, k: Tensor, v: Tensor, tensor_layout: str = "HND", is_causal: bool = False,
    qk_quant_gran: str = "per_thread", sm_scale: float | None = None, pv_accum_dtype: str = "fp32",
    smooth_k: bool = True, smooth_v: bool = False, return_lse: bool = False, **kwargs: Any,
) -> Any:  # fmt: skip
    """`sageattn`."""
    return sageattn(q, k, v, tensor_layout, is_causal, sm_scale, return_lse, **kwargs)


def sageattn_qk_int8_pv_fp8_cuda(
    q: Tensor, k: Tensor, v: Tensor, tensor_layout: str = "HND", is_causal: bool = False,
    qk_quant_gran: str = "per_thread", sm_scale: float | None = None,
    pv_accum_dtype: str = "fp32+fp16", smooth_k: bool = True, smooth_v: bool = False,
    return_lse: bool = False, **kwargs: Any,
) -> Any:  # fmt: skip
    """`sageattn`."""
    return sageattn(q, k, v, tensor_layout, is_causal, sm_scale, return_lse, **kwargs)


def sageattn_qk_int8_pv_fp8_cuda_sm90(
    q: Tensor, k: Tensor, v: Tensor, tensor_layout: str = "HND", is_causal: bool = False,
    qk_quant_gran: str = "per_thread", sm_scale: float | None = None,
    pv_accum_dtype: str = "fp32+fp32", smooth_k: bool = True, return_lse: bool = False,
    **kwargs: Any,
) -> Any:  # fmt: skip
    """`sageattn`."""
    return sageattn(q, k, v, tensor_layout, is_causal, sm_scale, return_lse, **kwargs)


def _as_int32(starts: Any) -> Any:
    """What is no tensor of integers, `attention` refuses."""
    is_wide = isinstance(starts, Tensor) and starts.dtype == torch.int64
    return starts.to(torch.int32) if is_wide else starts


@in_its_words(causal="is_causal", scale="sm_scale")
def sageattn_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, is_causal: bool = False, sm_scale: float | None = None,
    smooth_k: bool = True, **kwargs: Any,
) -> Tensor:  # fmt: skip
    """Attention of packed sequences.

    Args:
        q, k, v: (rows of all sequences, heads, d).
        cu_seqlens_q, cu_seqlens_k: where sequences start and end, int32 or int64.
        max_seqlen_q, max_seqlen_k: the longest sequences, hints.
        is_causal, sm_scale, smooth_k: as for `sageattn`.
        kwargs: `approximate` and the originals' arguments on quantising, as for `sageattn`.

    Returns:
        (rows of all sequences, heads, dv).

    Raises:
        UnsupportedError: attn_mask is given; the original drops it.
        TypeError: an argument that is unknown.
    """
    if kwargs.pop("attn_mask", None) is not None:
        raise UnsupportedError(
            "attn_mask in sageattn_varlen: packed sequences take none; leave the rows out that it "
            "hides, or call sageattn"
        )
    _refuse_unknown("sageattn_varlen", kwargs, ("approximate",))
    causal = flag(is_causal)
    return attention(  # type: ignore[no-any-return]
        q,
        k,
        v,
        causal=causal,
        q_offset=0 if causal else None,
        scale=plain(sm_scale),
        cu_seqlens_q=_as_int32(cu_seqlens_q),
        cu_seqlens_k=_as_int32(cu_seqlens_k),
        max_seqlen_q=plain(max_seqlen_q),
        max_seqlen_k=plain(max_seqlen_k),
        approximate=_asked_of_all if kwargs.get("approximate") is None else kwargs["approximate"],
    )


def _refuse_unknown(name: str, given: dict[str, Any], taken: tuple[str, ...]) -> None:
    """Refuses arguments beyond those of the signature that nothing here reads. The originals drop
    them.
    """
    taken = (*taken, *_OF_QUANTISING)
    if unknown := [argument for argument in given if argument not in taken]:
        raise TypeError(
            f"{name} got {', '.join(unknown)}: beside the arguments of its signature it takes "
            f"{', '.join(taken)}"
        )
