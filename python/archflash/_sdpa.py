"""scaled_dot_product_attention with PyTorch's signature and meaning, on archflash's kernels."""

from __future__ import annotations

import functools
import numbers
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from archflash import _archflash as _native
from archflash import _autocast
from archflash._api import attention, make_problem
from archflash._bias import is_causal_bias
from archflash._dispatch import device_of, forced, note_fallback, pytorch_drops_faster, select
from archflash._eager import is_eager, is_tracing, overridden, unrecorded
from archflash._forward_operators import DROPPED_FASTER
from archflash._overrides import count_declined
from archflash._registry import TORCH
from archflash._sharding import has_dtensor
from archflash._torch_kernels import pytorchs_sdpa


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A drop-in for torch.nn.functional.scaled_dot_product_attention.

    Unlike archflash.attention, is_causal aligns to the top left: query i sees keys ``j <= i``,
    whatever the lengths.

    Args:
        query: ``(..., Hq, L, E)``; any number of leading dimensions, none at all included.
        key: ``(..., H, S, E)``; leading dimensions broadcast with those of query and value.
        value: ``(..., H, S, Ev)``.
        attn_mask: broadcastable to ``(..., Hq, L, S)``; bool (True is seen) or floating point
            (added); or a causal bias of torch.nn.attention.bias; none by default.
        dropout_p: probability of dropping a weight, 0.0 by default. PyTorch's own function runs
            where it has a fused kernel for the call, which is faster, or where no kernel of
            archflash serves it; `archflash.stats()` counts both. Kernels of archflash drop other
            weights than PyTorch's do.
        is_causal: query i sees keys ``j <= i``; off by default, and not together with attn_mask.
        scale: multiplies query.key, a finite number; ``1 / sqrt(E)`` by default.
        enable_gqa: whether ``H`` may be a divisor of ``Hq``; off by default.

    Returns:
        ``(..., Hq, L, Ev)``, query's dtype.

    Raises:
        RuntimeError: as PyTorch, for tensors that do not fit together (dtypes, devices, shapes,
            heads), of fewer than two dimensions or of a dtype that attention does not take, for
            attn_mask with is_causal, and for a scale that is not finite.
        ValueError: for a causal bias with is_causal or of other lengths than query and key.
        TypeError: for an argument of the wrong type, such as a tensor as dropout_p or a flag.
        UnsupportedError: for nested tensors, or dropout that no kernel serves, while
            ARCHFLASH_FALLBACK=error.
    """
    if attn_mask is None and _is_usual(query, key, value, dropout_p, is_causal, scale, enable_gqa):
        q_offset = 0 if is_causal and query.shape[2] != key.shape[2] else None
        try:
            out = attention(query, key, value, causal=is_causal, q_offset=q_offset, scale=scale)
        except (TypeError, ValueError) as error:
            raise RuntimeError(str(error)) from error
        assert isinstance(out, Tensor)
        return out
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            result = overridden(
                scaled_dot_product_attention,
                {
                    "query": query, "key": key, "value": value, "attn_mask": attn_mask,
                    "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale,
                    "enable_gqa": enable_gqa,
                },
            )  # fmt: skip
            if result is not NotImplemented:
                return result
            raise TypeError(f"{name} is {_native.given(x)}: it must be a tensor")
    _check_number("dropout_p", dropout_p)
    if attn_mask is not None and not isinstance(attn_mask, Tensor):
        raise TypeError(f"attn_mask is {_native.given(attn_mask)}: it must be a tensor or None")
    if scale is not None:
        _check_number("scale", scale)
    for name, flag in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name} is {_native.given(flag)}: it must be a bool")
    if not 0 <= dropout_p <= 1:
        raise RuntimeError(f"dropout_p is {dropout_p}: it must be at least 0 and at most 1")
    _check_layouts(query, key, value, attn_mask)
    tracing = is_tracing()
    if tracing and not unrecorded(_is_recorded, query, key, value, dropout_p, enable_gqa):
        return pytorchs_sdpa(  # which torch.jit.trace records as PyTorch's own operator
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    nested = query.is_nested or key.is_nested or value.is_nested
    if nested or (dropout_p != 0.0 and not _may_drop(query, dropout_p)):
        note_fallback(
            "nested tensors: no kernel of archflash takes them" if nested else _NOT_DROPPED,
            stacklevel=3,
        )
        if dropout_p != 0.0 and not nested and not torch.compiler.is_compiling():
            count_declined(_NOT_DROPPED)
        return pytorchs_sdpa(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if min(query.ndim, key.ndim, value.ndim) < 2:
        raise RuntimeError(
            f"query, key and value have {query.ndim}, {key.ndim} and {value.ndim} dimensions: "
            "each needs at least 2"
        )
    if not tracing and value.shape[-1] == 0:
        return pytorchs_sdpa(
            query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if not tracing and query.shape[-1] == 0 and key.shape[-1] == 0:
        # All scores are 0, as they are with columns of zeros.
        query, key, scale = F.pad(query, (0, 8)), F.pad(key, (0, 8)), 1.0
    is_bias = attn_mask is not None and is_causal_bias(attn_mask)
    if _autocast.is_on():
        query, key, value, cast = _autocast.inputs(
            query, key, value, None if is_bias else attn_mask
        )
        attn_mask = attn_mask if is_bias else cast
    if attn_mask is not None and is_causal:
        raise (ValueError if is_bias else RuntimeError)(
            "Explicit attn_mask should not be set when is_causal=True: fold the causal rule into "
            "attn_mask"  # it begins with PyTorch's words, which callers may look for
        )
    q, k, v, shape = query, key, value, None
    if not tracing:
        # The usual call keeps its tensors: a view of each is a node of autograd.
        if not (is_eager() and _fit_together(query, key, value, enable_gqa)):
            # With enable_gqa the numbers of heads may differ, so only the dimensions before them
            # broadcast.
            kept = 3 if enable_gqa and min(query.ndim, key.ndim, value.ndim) >= 3 else 2
            lead = _common_shape(query, key, value, kept)
            q, k, v = (_to_4d(x.expand(*lead, *x.shape[-kept:])) for x in (query, key, value))
            if k.shape[1] != v.shape[1]:
                k, v = (_repeated(x, q.shape[1]) for x in (k, v))
            shape = (*lead, *query.shape[-kept:-1], value.shape[-1])
        if attn_mask is not None and not is_bias:
            scores = (*(q.shape if shape is None else shape)[:-1], key.shape[-2])
            attn_mask = _mask_to_4d(attn_mask, scores)
    options: dict[str, Any] = {
        "causal": is_causal,
        # If the lengths are equal, both alignments are the same, and PyTorch needs no mask. A
        # traced call may get others where it runs.
        "q_offset": 0 if is_causal and (tracing or _may_differ(q.shape[2], k.shape[2])) else None,
        "attn_mask": attn_mask,
        "scale": scale,
    }
    try:
        if dropout_p != 0.0:
            if _dropped_by_pytorch(q, k, v, options):
                return pytorchs_sdpa(
                    query, key, value, attn_mask, dropout_p, is_causal,
                    scale=scale, enable_gqa=enable_gqa,
                )  # fmt: skip
            options["dropout_p"] = dropout_p
        out = attention(q, k, v, **options)
    except (TypeError, ValueError) as error:
        if is_bias:
            raise
        raise RuntimeError(str(error)) from error  # what callers of PyTorch's function expect
    assert isinstance(out, Tensor)  # a pair only with return_lse
    return out if shape is None else out.reshape(shape)


def _check_number(name: str, given: Any) -> None:
    """Refuses what is no number of Python, numpy or a compiler. The value of a tensor is not read,
    which would wait for a GPU.
    """
    if isinstance(given, Tensor):
        raise TypeError(f"{name} is {_native.given(given)}: it must be a number; pass its item()")
    if not isinstance(given, (numbers.Real, torch.SymFloat, torch.SymInt)):
        raise TypeError(f"{name} is {_native.given(given)}: it must be a number")


def _check_layouts(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> None:
    """Refuses tensors that neither archflash nor PyTorch's function reads."""
    nested = query.is_nested
    inputs = {"query": query, "key": key, "value": value}
    for name, x in inputs.items():
        if x.is_nested != nested:
            raise RuntimeError(
                f"{name}.is_nested is {x.is_nested} and query.is_nested {nested}: query, key and "
                "value must be nested tensors or dense ones, all three"
            )
    given = {} if nested else inputs
    if attn_mask is not None and not is_causal_bias(attn_mask):
        given = {**given, "attn_mask": attn_mask}
    for name, x in given.items():
        if x.is_nested or x.layout is not torch.strided or x.is_quantized:
            raise RuntimeError(f"{name} is a nested, sparse or quantized tensor: it must be dense")


_PLAIN = (Tensor, torch.nn.Parameter)


def _is_usual(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: object,
    is_causal: object,
    scale: object,
    enable_gqa: object,
) -> bool:
    """Whether a call without a mask is one of plain tensors as `archflash.attention` takes them,
    which needs none of the checks below: most calls come this way.
    """
    return (
        is_eager()
        and type(query) in _PLAIN
        and type(key) in _PLAIN
        and type(value) in _PLAIN
        and type(dropout_p) in (float, int)
        and dropout_p == 0
        and type(is_causal) is bool
        and type(enable_gqa) is bool
        and (scale is None or type(scale) is float)
        and not (query.is_nested or key.is_nested or value.is_nested)
        and _fit_together(query, key, value, enable_gqa)
        and query.shape[3] > 0
        and value.shape[3] > 0
    )


def _is_recorded(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float, enable_gqa: bool
) -> bool:
    """Whether torch.jit.trace records a call as archflash's operator: one without dropout, whose
    tensors need neither be expanded nor reshaped.
    """
    if dropout_p != 0.0 or query.is_nested or key.is_nested or value.is_nested:
        return False
    if not query.ndim == key.ndim == value.ndim == 4:
        return False
    batch, heads, _, d = query.shape
    same = batch == key.shape[0] == value.shape[0] and key.shape[1] == value.shape[1]
    return same and min(d, value.shape[3]) > 0 and (enable_gqa or heads == key.shape[1])


def _fit_together(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool:
    """Whether tensors have the four dimensions of `archflash.attention`, and nothing broadcasts."""
    if not query.ndim == key.ndim == value.ndim == 4:
        return False
    of_q, of_k, of_v = query.shape, key.shape, value.shape
    same_heads = of_k[1] == of_v[1] and (enable_gqa or of_q[1] == of_k[1])
    return same_heads and of_q[0] == of_k[0] == of_v[0]


def _common_shape(query: Tensor, key: Tensor, value: Tensor, kept: int) -> tuple[int, ...]:
    """What the dimensions before the last `kept` broadcast to."""
    try:
        lead: tuple[int, ...] = torch.broadcast_shapes(  # type: ignore[no-untyped-call]
            *(x.shape[:-kept] for x in (query, key, value))
        )
    except RuntimeError as error:
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        groups = "; enable_gqa=True lets heads of query share those of key" if kept == 2 else ""
        raise RuntimeError(
            f"query, key and value have shapes {shapes}: the dimensions before the last {kept} "
            f"must broadcast{groups}"
        ) from error
    return lead


def _repeated(x: Tensor, heads: int) -> Tensor:
    """Keys or values with a head for each of q, of which with enable_gqa either may have others."""
    return x.repeat_interleave(heads // x.shape[1], 1) if x.shape[1] else x


def _may_differ(nq: int, nk: int) -> bool:
    """Whether two lengths differ; True where a traced call does not know it."""
    if torch.compiler.is_compiling() or not (isinstance(nq, int) and isinstance(nk, int)):
        from torch.fx.experimental import symbolic_shapes

        if hasattr(symbolic_shapes, "guard_or_true"):  # from torch 2.8 on
            return symbolic_shapes.guard_or_true(nq != nk)
    return nq != nk


_NOT_DROPPED = "dropout: no kernel of archflash drops the weights of this call"


def _may_drop(query: Tensor, dropout_p: float) -> bool:
    """Whether a kernel of archflash might serve a call with dropout."""
    if torch.compiler.is_compiling() or not 0.0 < dropout_p < 1.0 or has_dtensor(query):
        return False
    return query.device.type == "cuda" or forced() not in (None, TORCH)


def _dropped_by_pytorch(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> bool:
    """Whether PyTorch's own function serves a call with dropout. It is counted then."""
    problem = make_problem(q, k, v, **options)
    device, obstacle = device_of(problem, q.device.index)
    if forced() is None and pytorch_drops_faster(problem, device):
        count_declined(DROPPED_FASTER)
        return True
    if _chosen(problem, device, obstacle, forced()) != TORCH:
        return False
    note_fallback(_NOT_DROPPED, stacklevel=4)
    count_declined(_NOT_DROPPED)
    return True


def who_drops(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> str:
    """The implementation that serves a call of `archflash.attention` with these options, and with
    dropout.
    """
    problem = make_problem(q, k, v, **options)
    return _chosen(problem, *device_of(problem, q.device.index), forced())


@functools.lru_cache(maxsize=256)
def _chosen(
    problem: _native.Problem, device: _native.Device | None, obstacle: str | None, name: str | None
) -> str:
    """Who serves a problem with dropout. Which share is dropped does not decide that."""
    dropped = _native.Problem.from_dict(problem.to_dict() | {"dropout_p": 0.5})
    return select(dropped, device, name, obstacle).chosen


def _to_4d(x: Tensor) -> Tensor:
    """x as ``(B, H, N, D)``; missing dimensions are 1, those before the heads become one batch."""
    if x.ndim < 4:
        return x[(None,) * (4 - x.ndim)]
    return x if x.ndim == 4 else x.flatten(0, -4)


def _mask_to_4d(mask: Tensor, full: tuple[int, ...]) -> Tensor:
    """The mask for 4-D inputs. `full` is the shape that it broadcasts to."""
    if mask.ndim > len(full):
        raise RuntimeError(
            f"attn_mask {tuple(mask.shape)} has more dimensions than the scores {full}"
        )
    if len(full) <= 4 or mask.ndim <= 3:
        return mask
    return mask.expand(full).flatten(0, -4)
