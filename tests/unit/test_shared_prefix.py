"""attention_with_shared_prefix: a prefix and own rows are one sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests import kvcache_cases
from tests.kvcache_cases import CacheCall, make
from torch import Tensor

import archflash
from archflash import _shared_prefix

F32 = torch.float32
PREFIX = 19  # rows
CALLS: dict[str, dict[str, Any]] = {
    "sinks-append": {"n_new": 2, "nq": 2, "sinks": torch.tensor([0.5, -1, 2, 0], dtype=F32)},
    "causal-bhnd": {"nq": 5, "causal": True, "layout": "bhnd", "softcap": 3.0},
    "packed": {"q_lengths": [3, 0, 4], "causal": True},
    "packed-bhnd": {"q_lengths": [3, 0, 4], "layout": "bhnd"},
    "qv": {"qv": True, "dv": 24, "nq": 2, "scale": 0.2},
    "one-head": {"heads": (1, 1), "rows_of": [2, 0, 1]},
}


def concatenated(call: CacheCall, k_prefix: Tensor, v_prefix: Tensor) -> CacheCall:
    """The call whose sequences begin with the prefix."""
    rows = 1 if call.options.get("layout", "bnhd") == "bnhd" else 2

    def both(prefix: Tensor, cache: Tensor) -> Tensor:
        return torch.cat([prefix.expand(len(cache), -1, -1, -1), cache], rows)

    caches = both(k_prefix, call.k_cache), both(v_prefix, call.v_cache)
    lengths = call.options["cache_seqlens"] + PREFIX
    return CacheCall(call.q, *caches, {**call.options, "cache_seqlens": lengths})


@pytest.mark.parametrize("name", CALLS)
def test_it_is_attention_over_prefix_and_own_rows(name: str) -> None:
    how = {"d": 16, "dtype": F32, **CALLS[name]}
    call = make([20, 9, 6], **how)
    prefix = make([PREFIX], seed=1, **{**how, "capacity": 32, "n_new": 0, "q_lengths": None,
                                       "rows_of": None})  # fmt: skip
    rows = 1 if "layout" not in how else 2
    dense = [x[:1].narrow(rows, 0, PREFIX) for x in (prefix.k_cache, prefix.v_cache)]
    length = prefix.options["cache_seqlens"]
    want = concatenated(call, *dense).copied()
    tensors = (want.q, want.k_cache, want.v_cache)
    expected = archflash.attention_with_kvcache(*tensors, **want.options, return_lse=True)
    for k_prefix, v_prefix, options in (
        (*dense, {}),
        (prefix.k_cache, prefix.v_cache, {"prefix_seqlens": length}),
    ):
        mine = call.copied()
        got = archflash.attention_with_shared_prefix(
            mine.q, k_prefix[:1], v_prefix[:1], mine.k_cache, mine.v_cache, **mine.options,
            **options, return_lse=True,
        )  # fmt: skip
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
        own = want.k_cache.narrow(rows, PREFIX, call.k_cache.shape[rows])
        kvcache_cases.assert_written_like(mine.k_cache, own)


def test_a_latent_prefix() -> None:
    cache, prefix = make([20, 9], heads=(4, 1), d=40, dtype=F32), make([19], heads=(4, 1), d=40,
                                                                      dtype=F32)  # fmt: skip
    lengths = {"cache_seqlens": cache.options["cache_seqlens"], "dv": 24}
    latent = prefix.k_cache[:, :PREFIX]
    out = archflash.attention_with_shared_prefix(
        cache.q, latent, None, cache.k_cache, **lengths
    )  # fmt: skip
    for number, length in enumerate((20, 9)):
        rows = torch.cat([latent[0], cache.k_cache[number, :length]])[None]
        want = archflash.attention(cache.q[number][None], rows, rows[..., :24], layout="bnhd")
        torch.testing.assert_close(out[number], want[0], atol=1e-5, rtol=1e-5)


def test_wrong_calls_on_a_latent_cache_are_refused_before_a_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = make([20, 9], heads=(4, 1), d=40, dtype=F32)
    options = {"cache_seqlens": call.options["cache_seqlens"], "dv": 24}
    launched = []
    monkeypatch.setattr(
        _shared_prefix, "attention_with_kvcache", lambda *_, **__: launched.append(1)
    )
    rows, prefix = call.k_cache[:, :1], call.k_cache[:1]
    for wrong, message in (
        ({"k_new": rows, "v_new": rows}, "v_new is given with v_cache=None"),
        ({"qv": call.q}, "qv is given with v_cache=None"),
        ({"cache_seqlens": None}, "cache_seqlens is None: it must be an int32 tensor"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            archflash.attention_with_shared_prefix(
                call.q, prefix, None, call.k_cache, **{**options, **wrong}
            )
    assert not launched


def test_wrong_calls_are_refused() -> None:
    call = make([5, 20])
    tensors = (call.k_cache, call.v_cache)
    for prefix, options, message in (
        ((call.k_cache[:1], None), {}, "v_prefix is None and the other is not"),
        ((call.k_cache[:1], call.v_cache[:1]), {"layout": "nhd"}, "layout is 'nhd': it must be"),
        ((call.k_cache, call.v_cache), {}, "k_prefix has 2 sequences and prefix_seqlens is for 1"),
        (tensors, {"cache_seqlens": call.options["cache_seqlens"][:1]}, "cache_seqlens has shape"),
        ((call.k_cache[0], call.v_cache[0]), {}, "k_prefix must be a tensor of 4 dimensions"),
    ):
        with pytest.raises(ValueError, match=message):
            archflash.attention_with_shared_prefix(
                call.q, *prefix, *tensors, **{**call.options, **options}
            )
    with pytest.raises(ValueError, match=r"q has shape .*: it must be 4-dimensional"):
        archflash.attention_with_shared_prefix(call.q[0], *tensors, *tensors, **call.options)


@pytest.mark.slow
def test_a_compiled_call_where_a_default_device_is_set() -> None:
    """torch.compile traces fewer of a tensor's methods there."""
    q, k, v = torch.randn(3, 1, 4, 16), torch.randn(3, 9, 2, 16), torch.randn(3, 9, 2, 16)
    lengths = torch.tensor([3, 9, 1], dtype=torch.int32)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return archflash.attention_with_shared_prefix(
            q, k[:1], v[:1], k, v, cache_seqlens=lengths, return_lse=True
        )

    torch._dynamo.reset()
    with torch.device("cpu"):
        found = torch.compile(call, backend="eager", fullgraph=True)(q, k, v)
    torch.testing.assert_close(found, call(q, k, v))
