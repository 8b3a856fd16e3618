"""Right calls of every public function with one argument replaced by what nobody should pass: odd
numbers, words, devices, containers, and tensors of every layout, dtype and subclass. Each works, or
is refused by an error that names the argument.
"""

from __future__ import annotations

import decimal
import fractions
import functools
import inspect
import math
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

import archflash
from archflash import reference
from tests.properties import illegal_others, illegal_own
from tests.properties.illegal_others import Legal, int32

REFUSALS = (TypeError, ValueError, archflash.ArchflashError)


class Wrapping(Tensor):
    """A subclass that has no memory of its own."""

    wrapped: Tensor

    @staticmethod
    def __new__(cls, x: Tensor) -> Wrapping:
        made: Wrapping = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, x.shape, strides=x.stride(), dtype=x.dtype, device=x.device
        )
        made.wrapped = x
        return made

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map(
            lambda x: x.wrapped if isinstance(x, Wrapping) else x, (args, kwargs or {})
        )
        return function(*args, **kwargs)


def _sdpa(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    return archflash.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def legal_calls() -> dict[str, Legal]:
    """By name."""
    q, k = torch.randn(2, 4, 5, 64), torch.randn(2, 2, 7, 64)
    plain, mask = {"q": q, "k": k, "v": k}, torch.ones(5, 7, dtype=torch.bool)
    packed = {"q": torch.randn(5, 4, 64), **dict.fromkeys("kv", torch.randn(7, 2, 64))}
    ends = {"cu_seqlens_q": int32(0, 3, 5), "cu_seqlens_k": int32(0, 3, 7)}
    out, lse = archflash.attention(q, k, k, return_lse=True)
    of_gradients = {"dout": out, **plain, "out": out, "lse": lse}
    sdpa = dict.fromkeys(("query", "key", "value"), q)
    attention = archflash.attention
    return {
        **{f"own: {name}": x for name, x in illegal_own.legal_calls().items()},
        **{f"others: {name}": x for name, x in illegal_others.legal_calls().items()},
        "attention": Legal(attention, plain),
        "packed": Legal(attention, {**packed, **ends}),
        "mask": Legal(attention, {**plain, "attn_mask": mask}),
        "sinks": Legal(attention, {**plain, "sinks": torch.zeros(4), "q_offset": int32(1, 2)}),
        "explain": Legal(archflash.explain, {**plain, "device": "H200"}),
        "gradients": Legal(archflash.attention_backward, of_gradients),
        "SDPA": Legal(_sdpa, sdpa),
        "masked SDPA": Legal(_sdpa, {**sdpa, "attn_mask": torch.zeros(5, 5)}),
        "reference": Legal(reference.attention, plain),
        "dropout_state": Legal(archflash.dropout_state, {"device": "cpu"}),
    }


def _values() -> Iterator[tuple[str, Any]]:
    for number in (0, 1, -1, 1 << 31, -(1 << 31) - 1, 1 << 63, 1 << 70, -(1 << 70), 10**400):
        yield f"the int {number}"[:40], number
    for real in (0.0, -0.0, 1.5, math.nan, math.inf, -math.inf, 1e308):
        yield f"the float {real}", real
    for text in ("", "a", "meta", "bhnd", "\0"):
        yield f"the word {text!r}", text
    for other in (None, True, 1j, b"a", object(), int, math, ..., torch.float16, torch.int32):
        yield f"{other!r}"[:40], other
    for items in (
        [],
        [1],
        (1, 2),
        (None, None),
        (1 << 70, -(1 << 70)),
        ("a", "b"),
        {},
        {1},
        (1,) * 4,
    ):
        yield f"{type(items).__name__} {items!r}", items
    for array in (np.int64(3), np.float32(1.5), np.zeros((2, 2)), np.array(1), np.str_("bhnd")):
        yield f"numpy's {array!r}", array
    yield "a generator", (x for x in (1, 2))
    yield "a list of tensors", [torch.ones(2), torch.ones(2)]
    yield "a fraction", fractions.Fraction(1, 2)
    yield "a decimal", decimal.Decimal("0.5")
    yield "a device", torch.device("cpu")


def _tensors(like: Tensor | None) -> dict[str, Callable[[], Tensor]]:
    x = torch.ones(2, 3) if like is None else like.detach()
    wide = x.float()
    rows = list(wide if x.dtype.itemsize == 1 else x) if x.ndim > 1 else [torch.ones(2, 3)]
    made: dict[str, Callable[[], Tensor]] = {
        "an int tensor without dimensions": lambda: torch.tensor(1),
        "a tensor without dimensions": lambda: torch.tensor(0.5),
        "a meta tensor without dimensions": lambda: torch.tensor(0.5, device="meta"),
        "a tensor without elements": lambda: torch.zeros(0),
        "a tensor of many dimensions": lambda: torch.ones((1,) * 60),
        "a nested tensor": lambda: torch.nested.nested_tensor(rows),
        "a jagged tensor": lambda: torch.nested.nested_tensor(rows, layout=torch.jagged),
        "a sparse tensor": wide.to_sparse,
        "a quantized tensor": lambda: torch.quantize_per_tensor(wide, 0.1, 0, torch.qint8),
    }
    if wide.ndim == 2:
        made["a compressed tensor"] = wide.to_sparse_csr
    if like is None:
        return made
    made |= {
        "one without data": lambda: _freed(x.clone()),
        "one on meta": lambda: torch.empty_like(x, device="meta"),
        "one of a subclass": lambda: Wrapping(x),
        "one with a dimension more": lambda: x[None],
        "a flat one": lambda: x.reshape(-1),
        "an empty one": lambda: x[:0],
        "a repeated one": lambda: x[..., :1].expand(x.shape),
    }
    if x.dtype.itemsize > 1:
        made["a negated one"] = lambda: torch.complex(wide, -wide).conj().imag
        made["a conjugate one"] = lambda: torch.complex(wide, wide).conj()
    for dtype in (
        torch.bool, torch.int8, torch.int64, torch.float16, torch.float64, torch.float8_e5m2,
    ):  # fmt: skip
        made[f"one of {dtype}"] = functools.partial(torch.zeros, x.shape, dtype=dtype)
    return made


def _freed(x: Tensor) -> Tensor:
    x.untyped_storage().resize_(0)
    return x


def fault_of(legal: Legal, argument: str, value: Any) -> str | None:
    """What is wrong with how a call takes a value; None: nothing."""
    given = {name: x.clone() if isinstance(x, Tensor) else x for name, x in legal.given.items()} | {
        argument: value
    }
    names = {argument, "cu_seqlens" if argument.startswith("cu_seqlens_") else argument}
    if value is None or isinstance(value, Tensor) or argument in _FITTED:
        # The error may name the tensor that does not fit.
        names |= {name for name, x in legal.given.items() if isinstance(x, Tensor)} | {*_NAMES}
    named = re.compile(rf"\b({'|'.join(names)})\b")
    try:
        legal.function(**given)
    except REFUSALS as error:
        told = isinstance(error, archflash.ForcedImplementationError) or named.search(str(error))
        return None if told else f"names nothing: {str(error)[:200]}"
    except RuntimeError as error:  # as PyTorch's function raises
        of_sdpa = legal.function is _sdpa and named.search(str(error))
        return None if of_sdpa else f"{type(error).__name__}: {str(error)[:200]}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None


# Arguments of which a right value may not fit the shapes of the tensors.
_FITTED = ("nq", "nk", "layout", "is_fp8_kvcache")
# What a function that is made of others calls its tensors.
_NAMES = ("q", "k", "v", "k_cache", "v_cache", "latent cache", "cu_seqlens")
# What other errors are about, or what PyTorch alone can tell.
_APART = {
    "others: 2, packed qkv": ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
    "others: pad": ("hidden_states", "batch", "seqlen"),
    "own: packed rows": ("q_descale", "k_descale", "v_descale", "packed_rows", "physical_indices"),
    "own: MLA": ("physical_indices",),
    "others: 4": ("window_size",),
    "others: 4, pages": ("page_table",),
    "others: MLA, bytes": ("indices",),
}


def faults(name: str, legal: Legal, chance: random.Random, count: int) -> Iterator[str]:
    """What is wrong with calls, each with another value of an argument: `count` for each."""
    parameters = inspect.signature(legal.function).parameters
    names = {x for x, y in parameters.items() if y.kind not in (y.VAR_POSITIONAL, y.VAR_KEYWORD)}
    if legal.like is not None:
        names |= inspect.signature(legal.like).parameters.keys() - {"q", "k", "v"}
    for argument in sorted(names | legal.given.keys()):
        if argument in _APART.get(name, ()):
            continue
        like = legal.given.get(argument)
        tensors = _tensors(like if isinstance(like, Tensor) else None)
        values = dict(_values()) | tensors
        for what in chance.sample(sorted(values), min(count, len(values))):
            value = tensors[what]() if what in tensors else values[what]
            if fault := fault_of(legal, argument, value):
                yield f"{name}, {argument} is {what}: {fault}"
