"""Calls with one thing wrong: each raises what the documents say, names what was given, and changes
nothing.
"""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

import archflash
from archflash import _archflash as native
from tests.core_set.checks import guarded_output
from tests.properties.drawing import Problem
from tests.properties.making import cache_call_of, call_of

Call = dict[str, Any]
NO = object()  # nothing is wrong with such a change: it does not fit the call


def refuses(problem: Problem, chance: random.Random, device: str = "cpu") -> str:
    """Spoils a legal call of attention, of its gradients or of caches in one place, and asserts
    that it is refused. Returns what was spoiled.
    """
    cached = problem.entry == "attention_with_kvcache"
    changes = OF_CACHES | OF_ALL if cached else OF_ATTENTION | OF_ALL
    if cached:
        of_caches = cache_call_of(problem, device)
        call = {"q": of_caches.q, "k_cache": of_caches.k_cache, "v_cache": of_caches.v_cache}
        call |= of_caches.options
        packed, v = "cu_seqlens_q" in call, call["v_cache"]
    else:
        tensors, options = call_of(problem, device)
        call = dict(zip("qkv", tensors, strict=True)) | options
        packed, v = "cu_seqlens_q" in call, call["v"]
    # Lists go with few other options: the error would name one that was not spoiled.
    call = {x: y for x, y in call.items() if x not in ("key_indices", "topk_lengths")}
    fitting = {name: made for name in changes if (made := changes[name](call, packed)) is not NO}
    if problem.entry == "attention_backward":  # it has not all of these options
        for name, made in list(fitting.items()):
            fitting[name] = {x: y for x, y in made.items() if x in _OF_BACKWARD}
        fitting = {name: made for name, made in fitting.items() if name.split()[0] in made}
    spoiled = list(fitting)[chance.randrange(len(fitting))]
    bad = {**call, **fitting[spoiled]}
    if problem.entry == "attention_backward":
        _refuses_gradients(call, bad, spoiled)
        return spoiled
    out = guarded_output(call["q"], v, 0, call)
    watched = [x for name, x in call.items() if name in ("k_cache", "v_cache")]
    before = [x.clone() for x in watched]
    bad.setdefault("out", out.view)
    function = archflash.attention_with_kvcache if cached else archflash.attention
    raises(lambda: function(**bad), spoiled)
    out.assert_untouched_outside()
    assert bool(out.view.isnan().all()), f"{spoiled}: the output was written"
    for x, old in zip(watched, before, strict=True):
        assert torch.equal(x.view(torch.uint8), old.view(torch.uint8)), f"{spoiled}: cache written"
    return spoiled


def _refuses_gradients(call: Call, bad: Call, spoiled: str) -> None:
    q, v = call["q"], call["v"]
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
    heads_first = call.get("layout") != "bnhd" and "cu_seqlens_q" not in call
    rows = q if heads_first else q.transpose(-2, -3)
    given = {"dout": out, "out": out, "lse": torch.zeros(rows.shape[:-1], device=q.device)}
    into = {f"d{x}": torch.full_like(call[x].contiguous(), math.nan) for x in "qkv"}
    raises(lambda: archflash.attention_backward(**given, **into, **bad), spoiled)
    for x in into.values():
        assert bool(x.isnan().all()), f"{spoiled}: a gradient was written"


def raises(run: Callable[[], object], spoiled: str, names: Iterable[str] = ()) -> None:
    """The error is one of those that the documents name, and its message says which argument: the
    first word of `spoiled`, or one of `names`. A kernel that is forced refuses the call, too,
    before anything is launched.
    """
    said, what = _error_of(run), {*names} or {spoiled.split()[0]}
    assert said, f"{spoiled}: no error"
    assert any(name in said for name in what), f"{spoiled}: the error names none of {what}: {said}"
    assert "incompatible function arguments" not in said, f"{spoiled}: {said}"
    launched = []
    native.set_simulate(lambda plan, tensors: launched.append(plan))
    try:
        for kernel in ("ampere", "simt"):  # of 16 bits, of fp32
            with archflash.force(kernel):
                assert _error_of(run), f"{spoiled}: no error where {kernel} is forced"
    finally:
        native.set_simulate(archflash._simulate)
    assert not launched, f"{spoiled}: something was launched"


def _error_of(run: Callable[[], object]) -> str:
    try:
        run()
    except (
        ValueError, TypeError, archflash.ForcedImplementationError, archflash.UnsupportedError,
    ) as error:  # fmt: skip
        return str(error)
    return ""


def _less(x: Tensor, dim: int) -> Any:
    """One element less in a dimension."""
    return x.narrow(dim, 0, x.shape[dim] - 1) if x.shape[dim] > 1 else NO


def _tensor(name: str, make: Callable[[Call], Any]) -> Callable[[Call, bool], Any]:
    return lambda call, _: {name: make(call)}


def _value(**values: Any) -> Callable[[Call, bool], Any]:
    return lambda call, _: values


def _if_given(name: str, make: Callable[[Tensor], Any]) -> Callable[[Call, bool], Any]:
    def change(call: Call, _: bool) -> Any:
        made = NO if call.get(name) is None else make(call[name])
        return made if made is NO else {name: made}

    return change


def _heads(call: Call) -> int:
    q = call["q"]
    first = "cu_seqlens_q" in call or call.get("layout", "bhnd" if "k" in call else "bnhd")
    return int(q.shape[1 if first in (True, "bhnd") else 2])


_OF_BACKWARD = set(inspect.signature(archflash.attention_backward).parameters) - {"out"}

OF_ALL: dict[str, Callable[[Call, bool], Any]] = {
    "q is no tensor": _value(q=[[1.0]]),
    "q has another rank": lambda call, _: {"q": call["q"][None, None]},
    "q has integers": lambda call, _: {"q": torch.zeros(call["q"].shape, dtype=torch.int32)},
    "q has complex numbers": lambda call, _: {
        "q": torch.zeros(call["q"].shape, dtype=torch.complex64)
    },
    "q is on meta": lambda call, _: {"q": torch.empty_like(call["q"], device="meta")},
    "causal is a number": _value(causal=1),
    "window has three sides": _value(window=(1, 2, 3)),
    "window is a number": _value(window=4),
    "window has a fraction": _value(window=(1.5, None)),
    "softcap below 0": _value(softcap=-1.0),
    "softcap is NaN": _value(softcap=math.nan),
    "softcap is text": _value(softcap="much"),
    "scale is NaN": _value(scale=math.nan),
    "scale is infinite": _value(scale=-math.inf),
    "scale is text": _value(scale="auto"),
    "sinks of too many heads": _tensor("sinks", lambda c: torch.zeros(_heads(c) + 1)),
    "sinks of another rank": _tensor("sinks", lambda c: torch.zeros(1, _heads(c))),
    "sinks has integers": _tensor("sinks", lambda c: torch.zeros(_heads(c), dtype=torch.int64)),
    "sinks is a number": _value(sinks=0.5),
    "alibi_slopes of too many heads": _tensor("alibi_slopes", lambda c: torch.ones(_heads(c) + 1)),
    "alibi_slopes has halves": _tensor(
        "alibi_slopes", lambda c: torch.ones(_heads(c), dtype=torch.float16)
    ),
    "layout is unknown": _value(layout="hbnd"),
    "num_splits is 0": _value(num_splits=0, batch_invariant=False),
    "num_splits is a fraction": _value(num_splits=1.5, batch_invariant=False),
    "batch_invariant is a number": _value(batch_invariant=1, num_splits=None),
    "out_dtype is text": _value(out_dtype="float16"),
    "out_dtype has integers": _value(out_dtype=torch.int32),
    "return_lse is a number": _value(return_lse=1),
    "implementation is unknown": _value(implementation="fastest"),
    "out has another shape": lambda call, _: {"out": torch.zeros(3, 1, 4, 1, 5)},
    "out is no tensor": _value(out=7),
    "max_seqlen_q below 0": lambda call, packed: {"max_seqlen_q": -1} if packed else NO,
    "cu_seqlens_q of 64 bits": _if_given("cu_seqlens_q", lambda x: x.long()),
    "cu_seqlens_q of another rank": _if_given("cu_seqlens_q", lambda x: x[None]),
    "attn_mask has integers": _if_given("attn_mask", lambda x: x.to(torch.int32)),
    "attn_mask of five dimensions": _if_given("attn_mask", lambda x: x[None]),
    "key_ranges of 64 bits": _if_given("key_ranges", lambda x: x.long()),
    "key_ranges of five ranges": _if_given(
        "key_ranges", lambda x: x[..., :1, :].expand(*x.shape[:3], 5, 2)
    ),
    "key_ranges of three bounds": _if_given(
        "key_ranges", lambda x: x[..., :1].expand(*x.shape[:4], 3)
    ),
}
OF_ATTENTION: dict[str, Callable[[Call, bool], Any]] = {
    "k has another dtype": lambda call, _: {
        "k": call["k"].to(torch.float64 if call["q"].dtype == torch.float32 else torch.float32)
    },
    "k has other columns": lambda call, _: (
        {"k": torch.cat([call["k"], call["k"]], -1)} if call["k"].dtype.itemsize > 1 else NO
    ),
    "k is none": _value(k=None),
    "v has another rank": lambda call, _: {
        "v": call["v"][0] if len(call["v"]) else call["v"][None]
    },
    "v has fewer rows": lambda call, packed: _v_rows(call, packed),
    "q_offset is a fraction": _value(q_offset=1.5),
    "q_offset of 64 bits": lambda call, packed: (
        NO if packed else {"q_offset": torch.zeros(len(call["q"]), dtype=torch.int64)}
    ),
    "q_offset for another batch": lambda call, packed: (
        NO if packed else {"q_offset": torch.zeros(len(call["q"]) + 1, dtype=torch.int32)}
    ),
    "cu_seqlens_k is missing": lambda call, packed: {"cu_seqlens_k": None} if packed else NO,
    "cu_seqlens_k of other sequences": _if_given("cu_seqlens_k", lambda x: torch.cat([x, x[-1:]])),
    "attn_mask of packed sequences": lambda call, packed: (
        {"attn_mask": torch.ones(1, 1, dtype=torch.bool)} if packed else NO
    ),
    "block_mask of floats": _if_given("block_mask", lambda x: x.float()),
    "block_mask of more blocks": _if_given(
        "block_mask", lambda x: torch.cat([x, x, x], -1) if x.shape[-1] else NO
    ),
    "num_splits with batch_invariant": _value(num_splits=2, batch_invariant=True, dropout_p=None),
    "dropout_p is 1": _value(dropout_p=1.0, batch_invariant=False),
    "dropout_p below 0": _value(dropout_p=-0.1),
    "dropout_p is NaN": _value(dropout_p=math.nan),
    "rng_state of 32 bits": _value(
        dropout_p=0.5, rng_state=torch.zeros(2, dtype=torch.int32), batch_invariant=False
    ),
    "rng_state of three numbers": _value(
        dropout_p=0.5, rng_state=torch.zeros(3, dtype=torch.int64), batch_invariant=False
    ),
    "approximate is unknown": _value(approximate="int4"),
    "q_descale of another dtype": _if_given("q_descale", lambda x: x.double()),
    "k_descale of too many heads": _if_given("k_descale", lambda x: torch.ones(97)),
}
OF_CACHES: dict[str, Callable[[Call, bool], Any]] = {
    "cache_seqlens of 64 bits": lambda call, _: {"cache_seqlens": call["cache_seqlens"].long()},
    "cache_seqlens is a number": _value(cache_seqlens=5),
    "cache_seqlens of another batch": lambda call, _: {
        "cache_seqlens": torch.cat([call["cache_seqlens"], call["cache_seqlens"][:1]])
    },
    "cache_seqlens too long": lambda call, _: {
        "cache_seqlens": call["cache_seqlens"] + (1 << 20),
        "check": True,
    },
    "cache_seqlens below 0": lambda call, _: {
        "cache_seqlens": call["cache_seqlens"] - (1 << 20),
        "check": True,
    },
    "page_table of 64 bits": _if_given("page_table", lambda x: x.long()),
    "page_table of one dimension": _if_given("page_table", lambda x: x[0]),
    "v_new is missing": lambda call, _: {"v_new": None} if call.get("k_new") is not None else NO,
    "k_new of other columns": _if_given("k_new", lambda x: _less(x, 3)),
    "k_new of more rows than there is room": lambda call, _: _many_new_rows(call),
    "k_cache has another dtype": lambda call, _: {"k_cache": call["k_cache"].double()},
    "v_cache of more blocks": lambda call, _: {
        "v_cache": torch.zeros(len(call["v_cache"]) + 1, *call["v_cache"].shape[1:]).to(
            call["v_cache"].dtype
        )
    },
    "leftpad_k of 64 bits": _if_given("leftpad_k", lambda x: x.long()),
    "cache_batch_idx of 64 bits": _if_given("cache_batch_idx", lambda x: x.long()),
    "rotary_sin is missing": lambda call, _: {"rotary_sin": None} if "rotary_cos" in call else NO,
    "attention_chunk is 0": _value(attention_chunk=0),
    "dv without latent cache": _value(dv=8),
}


def _v_rows(call: Call, packed: bool) -> Any:
    made = _less(call["v"], 0 if packed else 1 if call.get("layout") == "bnhd" else 2)
    return made if made is NO else {"v": made}


def _many_new_rows(call: Call) -> Any:
    if call.get("k_new") is None or "rotary_cos" in call:
        return NO
    rows = 2 if call.get("layout") == "bhnd" else 1
    many = {name: torch.cat([call[name]] * 400, rows) for name in ("k_new", "v_new")}
    return {**many, "check": True}
