"""FlashAttention's operators of torch, by the functions of this package: `torch.ops.flash_attn` of
version 2, and `torch.ops.flash_attn_3`.

Names and types of the arguments are those of the originals, so that a call by position or by name
finds what it expects. Under torch.compile the functions behind them are traced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from archflash.compat import flash_attn_interface as fa3
from archflash.compat.flash_attn import _private as fa2

_FORWARD_2 = "Tensor q, Tensor k, Tensor v"
_PACKED_2 = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k"
_FORMULA_2 = (
    "float dropout_p, float softmax_scale, bool causal, SymInt window_size_left, "
    "SymInt window_size_right, float softcap, Tensor? alibi_slopes"
)
_BACKWARD = "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse"
_GRADIENTS_2 = "Tensor(a6!)? dq, Tensor(a7!)? dk, Tensor(a8!)? dv"
_ENDS = "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None"
_USED = "Tensor? seqused_q=None, Tensor? seqused_k=None"
_LONGEST = "int? max_seqlen_q=None, int? max_seqlen_k=None"
_WINDOW = "int window_size_left=-1, int window_size_right=-1"
_CACHE = (
    "Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, "
    "Tensor? rotary_cos=None, Tensor? rotary_sin=None, Tensor? seqlens_rotary=None"
)
_DESCALES = "Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None"
_FOUR = "(Tensor, Tensor, Tensor, Tensor)"


def _metadata(*args: Any, **kwargs: Any) -> Tensor:
    """Nothing: archflash makes its plans itself."""
    return torch.empty(0, dtype=torch.int32, device="cpu")


# For each namespace the schemas, and the functions that serve them.
OPERATORS: dict[str, dict[str, Callable[..., Any]]] = {
    "flash_attn": {
        f"_flash_attn_forward({_FORWARD_2}, {_FORMULA_2}, bool return_softmax) -> {_FOUR}": (
            fa2._flash_attn_forward
        ),
        f"_flash_attn_varlen_forward({_FORWARD_2}, {_PACKED_2}, float dropout_p, "
        "float softmax_scale, bool causal, SymInt window_size_left=-1, "
        "SymInt window_size_right=-1, float softcap=0., Tensor? alibi_slopes=None, "
        "bool return_softmax=False, Tensor? block_table=None, Tensor? leftpad_k=None, "
        f"Tensor? seqused_k=None, bool zero_tensors=False, SymInt num_splits=0) -> {_FOUR}": (
            fa2._flash_attn_varlen_forward
        ),
        f"_flash_attn_backward({_BACKWARD}, {_GRADIENTS_2}, {_FORMULA_2}, bool deterministic, "
        "Tensor? rng_state=None) -> Tensor": fa2._flash_attn_backward,
        f"_flash_attn_varlen_backward({_BACKWARD}, {_GRADIENTS_2}, {_PACKED_2}, {_FORMULA_2}, "
        "bool deterministic, Tensor? rng_state=None, bool zero_tensors=False) -> Tensor": (
            fa2._flash_attn_varlen_backward
        ),
    },
    "flash_attn_3": {
        "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, "
        "Tensor(v_new!)? v_new=None, Tensor? q_v=None, Tensor(out!)? out=None, "
        f"{_ENDS}, Tensor? cu_seqlens_k_new=None, {_USED}, {_LONGEST}, {_CACHE}, {_DESCALES}, "
        f"float? softmax_scale=None, bool is_causal=False, {_WINDOW}, int attention_chunk=0, "
        "float softcap=0.0, bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None, "
        "int num_splits=0, bool? pack_gqa=None, int sm_margin=0) "
        "-> (Tensor(out!), Tensor, Tensor, Tensor)": fa3._forward,
        f"bwd({_BACKWARD}, Tensor(dq!)? dq=None, Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, "
        f"{_ENDS}, {_USED}, {_LONGEST}, float? softmax_scale=None, bool is_causal=False, "
        f"{_WINDOW}, float softcap=0.0, bool deterministic=False, int sm_margin=0) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor)": fa3._backward,
        "fwd_combine(Tensor out_partial, Tensor lse_partial, Tensor(out!)? out=None, "
        "ScalarType? out_dtype=None) -> (Tensor(out!), Tensor)": fa3.flash_attn_combine,
        "get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, "
        "int num_heads, int num_heads_k, int headdim, int headdim_v, ScalarType qkv_dtype, "
        f"Tensor seqused_k, {_ENDS}, Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, "
        "Tensor? leftpad_k=None, int? page_size=None, int max_seqlen_k_new=0, "
        f"bool is_causal=False, {_WINDOW}, int attention_chunk=0, bool has_softcap=False, "
        "int num_splits=0, bool? pack_gqa=None, int sm_margin=0) -> Tensor": _metadata,
    },
}
_libraries: list[Any] = []


def register() -> None:
    """Registers the operators of a namespace, unless it has some: then the original is loaded. All
    or none: what was registered before an error is taken back.
    """
    if _libraries:
        return
    try:
        for namespace, operators in OPERATORS.items():
            names = [schema.partition("(")[0] for schema in operators]
            if any(hasattr(getattr(torch.ops, namespace), name) for name in names):
                continue
            library: Any = torch.library.Library(namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
            _libraries.append(library)
            for schema, function in operators.items():
                library.define(schema)
                name = schema.partition("(")[0]
                library.impl(name, function, "CompositeImplicitAutograd")
    except BaseException:
        remove()
        raise


def remove() -> None:
    """Takes back what `register` registered."""
    while _libraries:
        _libraries.pop()._destroy()
