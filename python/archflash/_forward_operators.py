"""The forward operators of PyTorch's attention, as `_overrides` puts them in front of PyTorch's:
what the arguments of each mean, and what it returns.

An operator promises more than the output: the strides of the output, the log-sum-exp in the shape
and with the values that PyTorch's backward reads, and some tensors that only dropout needs. For a
call that PyTorch's own kernel is to serve, an operator returns the reason, a str.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from archflash import _archflash as _native
from archflash import _backward_operators, _dispatch, _options, _registry, _schemas
from archflash._errors import ForcedImplementationError
from archflash.reference.formula import FP8

Kernel = Callable[..., Any]
_LSE_BLOCK = 32  # PyTorch's memory-efficient kernel pads the rows of its log-sum-exp to this


# --- a call of the runtime ---


_DEFAULT_VALUES = list(_options.DEFAULTS.values())
_PLACE = {name: place for place, name in enumerate(_options.DEFAULTS)}


def _named_values(options: dict[str, Any]) -> tuple[Any, ...]:
    """The values of all options, in the order in which the runtime takes them."""
    values = _DEFAULT_VALUES.copy()
    for name, value in options.items():
        values[_PLACE[name]] = value
    return tuple(values)


@lru_cache(maxsize=1024)
def _values(
    causal: bool, scale: float | None, want_lse: bool, top_left: bool = False
) -> tuple[Any, ...]:
    """`_named_values` of the options that SDPA has but for the mask. This is part of every call.

    Args:
        causal, scale: as for SDPA.
        want_lse: whether the log-sum-exp is wanted.
        top_left: whether causal aligns to the top left. With as many queries as keys both
            alignments are the same, and the other one was measured.
    """
    options = {"causal": causal, "scale": scale, "return_lse": want_lse}
    return _named_values(options | ({"q_offset": 0} if top_left else {}))


def _with_mask(values: tuple[Any, ...], mask: Tensor) -> tuple[Any, ...]:
    place = _PLACE["attn_mask"]
    return (*values[:place], mask, *values[place + 1 :])


def _with_out(values: tuple[Any, ...], out: Tensor) -> tuple[Any, ...]:
    place = _PLACE["out"]
    return (*values[:place], out, *values[place + 1 :])


def decline(reason: str) -> str:
    """The reason, as an operator returns it for PyTorch's own kernel to serve the call.

    Raises:
        ForcedImplementationError: a kernel of archflash is forced.
    """
    forced = _forced()
    if forced not in (None, _registry.TORCH):
        raise ForcedImplementationError(f"{forced} is forced, but PyTorch calls for {reason}")
    return reason


_forced = _dispatch.forced
_serve_exactly = _native.serve_operator
_asked_for = _dispatch.asked_for


def _serve(q: Tensor, k: Tensor, v: Tensor, values: tuple[Any, ...], *how: Any) -> Any:
    """What the runtime serves; approximately if that is asked for and no gradients are needed. What
    it would refuse is left to PyTorch's kernel, which may know more, such as other heads of v than
    of k.
    """
    if _asked_for() is not None and not (q.requires_grad or k.requires_grad or v.requires_grad):
        values = _dispatch.with_approximate(values)
    try:
        return _serve_exactly(q, k, v, values, *how)
    except (TypeError, ValueError) as error:
        return f"arguments that archflash does not take: {error}"


# --- what several operators return ---


# Results of PyTorch's operators that nothing reads where no weights are dropped are as cheap as can
# be. A compiled graph may give the memory of such a result to another one, and a CUDA graph of
# torch.compile has to own its results: so they are new in each call that may belong to a compiled
# graph, and the same in all others: PyTorch runs compiled graphs without gradients, those too that
# keep results for a backward, and in inference mode nothing is kept.
_is_grad_enabled = torch.is_grad_enabled
_is_inference = torch.is_inference_mode_enabled


@lru_cache
def flash_shapes() -> tuple[Tensor, Tensor]:
    """Meta tensors like the state of a random generator in the flash operator, which differs
    between versions of PyTorch.
    """
    q = torch.empty(1, 1, 1, 8, device="meta")
    results = torch.ops.aten._scaled_dot_product_flash_attention(q, q, q)
    return results[6], results[7]


@lru_cache
def _scalar_shapes() -> tuple[Tensor, Tensor]:
    """As `flash_shapes` for the other operators."""
    scalar = torch.empty((), dtype=torch.int64, device="meta")
    return scalar, scalar


class _State:
    """Makes the state of a random generator, two tensors whose values nothing reads.

    Args:
        shapes: makes meta tensors like them.
    """

    def __init__(self, shapes: Callable[[], tuple[Tensor, Tensor]]) -> None:
        self._shapes = shapes
        self._like: dict[int, tuple[Tensor, Tensor]] = {}  # by the index of the device
        self._shared: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, query: Tensor) -> tuple[Tensor, Tensor]:
        index = query.get_device()
        if _is_grad_enabled() or _is_inference():
            shared = self._shared.get(index)
            if shared is not None or (shared := self._share(query, index)) is not None:
                return shared
        one, other = self._like.get(index) or self._for_empty_like(query, index)
        return _empty_like(one), _empty_like(other)

    def _share(self, query: Tensor, index: int) -> tuple[Tensor, Tensor] | None:
        if query.is_cuda and torch.cuda.is_current_stream_capturing():
            return None  # memory that is allocated now belongs to the graph
        self._shared[index] = shared = self._new(query)
        return shared

    def _for_empty_like(self, query: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """Tensors without memory: what is allocated during the capture of a CUDA graph must not
        outlive it. empty_like is faster than new_empty.
        """
        pair = self._new(query)
        for x in pair:
            x.untyped_storage().resize_(0)
        self._like[index] = pair
        return pair

    def _new(self, query: Tensor) -> tuple[Tensor, Tensor]:
        with torch.inference_mode(False):  # autograd keeps no tensors of inference mode
            one, other = (torch.empty_like(x, device=query.device) for x in self._shapes())
        return one, other


_flash_state, _two_scalars = _State(flash_shapes), _State(_scalar_shapes)
_NO_STATE = (torch.zeros((), dtype=torch.int64, device="cpu"),) * 2


@lru_cache
def _no_elements(device: torch.device, dtype: torch.dtype, *sizes: int) -> Tensor:
    return torch.empty((*sizes, 0), dtype=dtype, device=device)


_empty_like = torch.empty_like


def _flash_tail(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The last three results of the flash operator."""
    one, other = _flash_state(q)
    return one, other, _no_elements(q.device, q.dtype)


def _scalar_state(q: Tensor, lse: bool) -> tuple[Tensor, Tensor]:
    """The state of a random generator in the other operators. Without a log-sum-exp there is no
    backward that keeps it.
    """
    return _two_scalars(q) if lse else _NO_STATE


DROPPED_FASTER = "dropout: PyTorch's fused kernels drop weights faster"
_DROPPED = "dropout: the backward pass of PyTorch's operator knows its own random bits only"


def _why_not(dropout_p: float, debug_mask: bool) -> str:
    """Why no kernel of archflash serves a call with dropout or with return_debug_mask."""
    assert dropout_p != 0.0 or debug_mask
    if dropout_p != 0.0:
        return _DROPPED
    return "return_debug_mask: no kernel of archflash returns weights"


def _like_query(query: Tensor, dv: int) -> Tensor:
    """An empty output (B, H, N, dv), dense, with its dimensions in memory in the order of query's,
    as PyTorch's meta kernels promise it.
    """
    if dv == query.shape[-1]:
        return torch.empty_like(query)
    shape = [*query.shape[:-1], dv]
    order = sorted(range(4), key=lambda i: query.stride(i), reverse=True)
    empty = query.new_empty([shape[i] for i in order])
    return empty.permute([order.index(i) for i in range(4)])


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    """aten::_scaled_dot_product_flash_attention. Causal aligns to the bottom right here: SDPA calls
    it with as many queries as keys, and causal_lower_right of torch.nn.attention.bias with any.
    """
    if dropout_p != 0.0 or return_debug_mask:
        return decline(_why_not(dropout_p, return_debug_mask))
    values = _values(is_causal, scale, True)
    forced = _forced()
    served = _serve(query, key, value, values, forced)
    if served is None:
        served = _serve(query, key, value, _with_out(values, _empty_like(query)), forced)
    if type(served) is str:
        return decline(served)
    out, lse = served
    return out, lse, None, None, query.size(2), key.size(2), *_flash_tail(query)


def _flash_quantized(
    query: Tensor, key: Tensor, value: Tensor, q_descale: Tensor | None, k_descale: Tensor | None,
    v_descale: Tensor | None, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> Any:  # fmt: skip
    """aten::_scaled_dot_product_flash_attention.quantized: FP8, with descales (batch, heads_kv),
    and the output in bfloat16.
    """
    if dropout_p != 0.0 or return_debug_mask:
        return decline(_why_not(dropout_p, return_debug_mask))
    options: dict[str, Any] = {"causal": is_causal, "scale": scale, "return_lse": True}
    options |= {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    options["out"] = _new_output(query)
    served = _serve(query, key, value, _named_values(options), _forced())
    if type(served) is str:
        return decline(served)
    out, lse = served
    return out, lse, None, None, query.size(2), key.size(2), *_flash_tail(out)


def _new_output(query: Tensor) -> Tensor:
    """An output in query's layout; FP8 attention gives bfloat16."""
    return _empty_like(query, dtype=torch.bfloat16) if query.dtype in FP8 else _empty_like(query)


def _cudnn(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None, compute_log_sumexp: bool,
    dropout_p: float = 0.0, is_causal: bool = False, return_debug_mask: bool = False, *,
    scale: float | None = None,
) -> Any:  # fmt: skip
    """aten::_scaled_dot_product_cudnn_attention."""
    if dropout_p != 0.0 or return_debug_mask:
        return decline(_why_not(dropout_p, return_debug_mask))
    if attn_bias is not None and compute_log_sumexp:
        return decline(_MASK_AND_GRADIENTS)
    nq, nk = query.size(2), key.size(2)
    values = _values(is_causal, scale, compute_log_sumexp, is_causal and nq != nk)
    if attn_bias is not None:
        values = _with_mask(values, attn_bias)
    forced = _forced()
    served = _serve(query, key, value, values, forced, False, True)  # the log-sum-exp as a column
    if served is None:
        out = _like_query(query, value.size(3))
        served = _serve(query, key, value, _with_out(values, out), forced, False, True)
    if type(served) is str:
        return decline(served)
    if compute_log_sumexp:
        out, lse = served
    else:
        out, lse = served, None  # as PyTorch's kernel
    return out, lse, None, None, nq, nk, *_scalar_state(query, compute_log_sumexp), None


def _efficient(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None, compute_log_sumexp: bool,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
) -> Any:  # fmt: skip
    """aten::_scaled_dot_product_efficient_attention."""
    if dropout_p != 0.0:
        return decline(_why_not(dropout_p, False))
    if attn_bias is not None and compute_log_sumexp:
        return decline(_MASK_AND_GRADIENTS)
    top_left = is_causal and query.size(2) != key.size(2)
    values = _values(is_causal, scale, compute_log_sumexp, top_left)
    if attn_bias is not None:
        values = _with_mask(values, attn_bias)
    served = _serve(query, key, value, values, _forced(), True)
    if type(served) is str:
        return decline(served)
    if compute_log_sumexp:
        out, lse = served
        if beyond := query.size(2) % _LSE_BLOCK:  # a row of infinity has no weights
            lse = F.pad(lse, (0, _LSE_BLOCK - beyond), value=math.inf)
    else:
        out, lse = served, _no_elements(query.device, torch.float32, query.size(0), query.size(1))
    return out, lse, *_scalar_state(query, compute_log_sumexp)


# Rows that see no key have another log-sum-exp in each of PyTorch's kernels, and its backward reads
# it.
_MASK_AND_GRADIENTS = "a mask, and gradients may be needed"


def _flash_forward(query: Tensor, *args: Any, **options: Any) -> Any:
    """aten::_flash_attention_forward, which torch.nn.attention.varlen and nested tensors call."""
    served = _flash_into(None, query, *args, **options)
    return served if isinstance(served, str) else (*served, *_flash_tail(query))


def _flash_forward_into(out: Tensor, *args: Any, **options: Any) -> Any:
    """aten::_flash_attention_forward_no_dropout_inplace."""
    served = _flash_into(out, *args, **options)
    return served if isinstance(served, str) else served[1]


def _flash_forward_quantized(*args: Any, **options: Any) -> Any:
    """aten::_flash_attention_forward.quantized, whose last positional arguments are descales."""
    *of_flash, q_descale, k_descale, v_descale = args
    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    served = _flash_into(None, *of_flash, **options, descales=descales)
    return served if isinstance(served, str) else (*served, *_flash_tail(served[0]))


def _cudnn_packed(operator: str) -> Kernel:
    """aten::_cudnn_attention_forward, which torch.nn.attention.varlen calls from torch 2.15 on, or
    its variant that writes into `out`: as `_flash_forward`, but causal aligns to the top left of
    packed keys.
    """
    schema = _schemas.find(operator)

    def kernel(*args: Any, **options: Any) -> Any:
        given = _schemas.by_name(schema, *args, **options)
        if given.pop("attn_bias", None) is not None:
            return decline("attn_bias of packed sequences")
        given.pop("compute_log_sumexp", None)  # packed sequences always get it
        out, top_left = given.pop("out", None), given.get("seqused_k") is None
        served = _flash_into(out, **given, top_left=top_left)
        if isinstance(served, str):
            return served
        if out is not None:
            return served[1]
        lengths = (given[name] for name in ("cum_seq_q", "cum_seq_k", "max_q", "max_k"))
        return *served, *lengths, *_two_scalars(given["query"]), None

    return kernel


def _flash_into(
    out: Tensor | None, query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float = 0.0,
    is_causal: bool = False, return_debug_mask: bool = False, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None,
    seqused_k: Tensor | None = None, alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None, num_splits: int | None = None, top_left: bool = False,
    descales: dict[str, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor] | str:  # fmt: skip
    """The output, in `out` if that is given, and the log-sum-exp. Rows come before heads here,
    packed sequences have three dimensions, and causal aligns to the bottom right, or to the top
    left. (Of equally long queries and keys both are the same, and the former was measured.)
    """
    paged = block_table is not None and seqused_k is not None and cum_seq_q is not None
    if dropout_p != 0.0 or return_debug_mask:
        return decline(_why_not(dropout_p, return_debug_mask))
    if alibi_slopes is not None:
        return decline("alibi_slopes: no kernel of archflash takes it here")
    if not paged and (block_table is not None or seqused_k is not None):
        return decline("seqused_k or block_table, but not both with cum_seq_q")
    if not paged and (cum_seq_q is None) != (cum_seq_k is None):
        return decline("cum_seq_q without cum_seq_k")
    options: dict[str, Any] = {"layout": "bnhd", "causal": is_causal, "scale": scale}
    options["return_lse"] = True
    options |= _backward_operators.window_option(window_size_left, window_size_right)
    options |= descales or {}
    if top_left:
        options |= _backward_operators.top_left_of_packed(is_causal, cum_seq_q, cum_seq_k)
    if num_splits:
        options["num_splits"] = num_splits
    if paged:  # key and value are pages
        options.update(cu_seqlens_q=cum_seq_q, max_seqlen_q=max_q)
        options.update(cache_seqlens=seqused_k, page_table=block_table)
    else:
        options |= _backward_operators.lengths_option(cum_seq_q, cum_seq_k, max_q, max_k)
    options["out"] = _new_output(query) if out is None else out
    served: Any = _serve(query, key, value, _named_values(options), _forced())
    if isinstance(served, str):
        return decline(served)
    result: tuple[Tensor, Tensor] = served
    return result


OPERATORS: dict[str, Kernel] = {
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_cudnn_attention": _cudnn,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_flash_attention_forward": _flash_forward,
    "_flash_attention_forward_no_dropout_inplace": _flash_forward_into,
    "_scaled_dot_product_flash_attention.quantized": _flash_quantized,
    "_flash_attention_forward.quantized": _flash_forward_quantized,
}
if _backward_operators.HAS_PACKED_CUDNN:
    for _name in ("_cudnn_attention_forward", "_cudnn_attention_forward_no_dropout_inplace"):
        OPERATORS[_name] = _cudnn_packed(_name)
