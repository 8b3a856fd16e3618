"""The implementation `torch` against the float64 reference: every feature and pair, odd shapes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.core_set.odd_strides import READABLE, UNREADABLE, laid_out
from torch import Tensor
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode

import archflash
from archflash import _archflash as native
from archflash import _fused_kernels, _torch, _torch_kernels, reference

HALF = (torch.float16, torch.bfloat16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
LENGTHS = [(0, 7), (7, 0), (1, 1), (1, 65), (2, 9), (7, 59), (59, 7), (65, 113), (113, 65)]
SEED = 1234


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = SEED) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(
    nq: int, nk: int, *, b: int = 2, hq: int = 4, hkv: int = 4, d: int = 16, dv: int = 16,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return (
        rand(b, hq, nq, d, dtype=dtype, seed=1),
        rand(b, hkv, nk, d, dtype=dtype, seed=2),
        rand(b, hkv, nk, dv, dtype=dtype, seed=3),
    )


def assert_matches_reference(q: Tensor, k: Tensor, v: Tensor, **call: Any) -> Tensor:
    """Checks the output with and without LSE (two paths inside) and the LSE; returns the output."""
    expected, expected_lse = reference.attention(q, k, v, **call)
    base = reference.baseline(q, k, v, **call)
    out = _torch.attention(q, k, v, **call)
    with_lse, lse = _torch.attention(q, k, v, return_lse=True, **call)
    for result in (out, with_lse):
        report = reference.check(result, expected, base)
        assert report.ok, f"{report} (seed {SEED}, {call})"
        assert result.dtype == base.dtype
    report = reference.check_lse(lse, expected_lse)
    assert report.ok, f"LSE {report}"
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()
    return out


def feature_arguments(name: str, nq: int, nk: int) -> dict[str, Any]:
    """The options of a feature for b=2, hq=4. "gqa" and "dv" have none: they shape the tensors."""
    mask = rand(2, 1, nq, nk, seed=7)
    return {
        "causal": {"causal": True},
        "window": {"window": (9, 3)},
        "left-window": {"window": (5, None)},
        "softcap": {"softcap": 1.5},
        "sinks": {"sinks": rand(4, seed=5)},
        "scale": {"scale": 0.31},
        "q-offset": {"q_offset": -4},
        "q-offset-tensor": {"q_offset": torch.tensor([3, -6], dtype=torch.int32)},
        "bool-mask": {"attn_mask": mask > 0},
        "key-padding": {"attn_mask": torch.arange(nk) < max(nk - 3, 1)},
        "bias": {"attn_mask": mask.masked_fill(mask > 1, -math.inf)},
        "head-bias": {"attn_mask": rand(4, 1, nk, seed=8)},
        "alibi": {"alibi_slopes": rand(2, 4, seed=3)},
        "head-alibi": {"alibi_slopes": rand(4, seed=3)},
        "ranges": {"key_ranges": torch.tensor([[2, 9], [4, 5]]).int().repeat(1, 1, nq, 1, 1)},
        "blocks": {"block_mask": rand(1, 4, -(-nq // 64), -(-nk // 64), seed=2) > -0.5},
        "gqa": {},
        "dv": {},
        "bnhd": {"layout": "bnhd"},
    }[name]


FEATURES = [
    "causal", "window", "left-window", "softcap", "sinks", "scale", "q-offset", "q-offset-tensor",
    "bool-mask", "key-padding", "bias", "head-bias", "alibi", "head-alibi", "ranges", "blocks",
    "gqa", "dv", "bnhd",
]  # fmt: skip


def run_features(names: tuple[str, ...], nq: int, nk: int, dtype: torch.dtype) -> None:
    call: dict[str, Any] = {}
    for name in names:
        arguments = feature_arguments(name, nq, nk)
        # An offset has no effect without one of these.
        offset_counts = {"window", "alibi", "head-alibi"} & set(names)
        call |= {"causal": True} if name.startswith("q-offset") and not offset_counts else {}
        call |= arguments
    q, k, v = qkv(
        nq, nk, hkv=2 if "gqa" in names else 4, dv=24 if "dv" in names else 16, dtype=dtype
    )
    if "bnhd" in names:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    assert_matches_reference(q, k, v, **call)


@pytest.mark.parametrize(("nq", "nk"), LENGTHS, ids=lambda n: str(n))
@pytest.mark.parametrize("name", FEATURES)
def test_each_feature_matches_the_reference(name: str, nq: int, nk: int) -> None:
    run_features((name,), nq, nk, torch.float32)


SAME_KEYWORD = [
    {"window", "left-window"},
    {"q-offset", "q-offset-tensor"},
    {"bool-mask", "key-padding", "bias", "head-bias"},
    {"alibi", "head-alibi"},
]
PAIRS = [
    pair
    for pair in itertools.combinations(FEATURES, 2)
    if not any(set(pair) <= names for names in SAME_KEYWORD)
]


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids="-and-".join)
def test_each_pair_of_features_matches_the_reference(pair: tuple[str, ...]) -> None:
    for (nq, nk), dtype in zip([(7, 59), (59, 7), (65, 65)], (torch.float32, *HALF), strict=True):
        run_features(pair, nq, nk, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALF], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_each_dtype_matches_the_reference(dtype: torch.dtype, causal: bool) -> None:
    for nq, nk in [*LENGTHS, (59, 59)]:
        assert_matches_reference(*qkv(nq, nk, dtype=dtype), causal=causal)


@pytest.mark.parametrize("d", [1, 5, 8, 72, 264])
def test_any_head_dimension_is_taken(d: int) -> None:
    assert_matches_reference(*qkv(7, 9, d=d, dv=d + 3), causal=True)


def test_softcap_zero_is_no_cap() -> None:
    q, k, v = qkv(7, 9)
    assert torch.equal(_torch.attention(q, k, v, softcap=0.0), _torch.attention(q, k, v))
    assert_matches_reference(q, k, v, softcap=0.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_a_bias_of_another_dtype_is_taken(dtype: torch.dtype) -> None:
    # PyTorch's own function refuses a 16-bit or float64 bias with float32 inputs.
    assert_matches_reference(*qkv(7, 9), attn_mask=rand(7, 9, dtype=dtype, seed=7))


@pytest.mark.parametrize("far", [1 << 40, (1 << 63) - 1], ids=str)
def test_far_offsets_and_limits_do_not_overflow(far: int) -> None:
    (q, k, v), ends = packed()
    for tensors, shape in ((qkv(7, 9), {}), ((q, k, v), ends)):
        plain = _torch.attention(*tensors, **shape)
        for call in (
            {"window": (far, far)},
            {"causal": True, "q_offset": far},
            {"window": (far, None), "q_offset": -5},
        ):
            torch.testing.assert_close(_torch.attention(*tensors, **shape, **call), plain)
        nothing = _torch.attention(*tensors, **shape, causal=True, q_offset=-far)
        assert (nothing == 0).all()


@pytest.mark.parametrize("far", [(1 << 60) - 1, 1 - (1 << 60)], ids=["plus", "minus"])
def test_windows_count_from_the_farthest_offsets_exactly(far: int) -> None:
    # The window reaches back from the far position to keys in the middle.
    inputs, ends = packed()
    for tensors, shape in ((qkv(7, 9), {}), (inputs, ends)):
        for side in (abs(far) - 3, abs(far) - 1, abs(far)):
            window = (side, None) if far > 0 else (None, side)
            out = assert_matches_reference(*tensors, window=window, q_offset=far, **shape)
            # With this near offset each query sees the keys that it sees with the far one.
            near = far - side if far > 0 else far + side
            same = {"window": (0, None) if far > 0 else (None, 0), "q_offset": near}
            torch.testing.assert_close(out, _torch.attention(*tensors, **same, **shape))


def test_no_batch_gives_an_empty_output() -> None:
    out, lse = _torch.attention(*qkv(3, 5, b=0), return_lse=True)
    assert out.shape == (0, 4, 3, 16)
    assert lse.shape == (0, 4, 3)


def test_out_dtype_float32_keeps_what_16_bits_would_round() -> None:
    q, k, v = qkv(7, 59, dtype=torch.bfloat16)
    expected = reference.attention(q, k, v, return_lse=False)
    out = _torch.attention(q, k, v, out_dtype=torch.float32)
    # The baseline in float32 sets a bound that no output rounded to 16 bits can meet.
    base = reference.baseline(q.float(), k.float(), v.float())
    assert reference.check(out, expected, base).ok
    assert not reference.check(_torch.attention(q, k, v).float(), expected, base).ok


@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("shape", ["scalar", "one", "head", "batch-head", "kv-head", "block"])
def test_fp8_inputs_are_dequantised_by_their_descales(dtype: torch.dtype, shape: str) -> None:
    nq, nk = (70, 130) if shape == "block" else (7, 59)
    q, k, v = (x.to(dtype) for x in qkv(nq, nk, hkv=2))

    def descale(heads: int, rows: int, seed: int) -> Tensor:
        heads = 2 if shape == "kv-head" else heads
        sizes = {
            "scalar": (),
            "one": (1,),
            "head": (heads,),
            "batch-head": (2, heads),
            "kv-head": (2, heads),
            "block": (2, heads, math.ceil(rows / 64)),
        }[shape]
        return rand(*sizes, seed=seed).abs() + 0.5

    call = {
        "q_descale": descale(4, nq, 1),
        "k_descale": descale(2, nk, 2),
        "v_descale": descale(2, nk, 3),
    }
    out = assert_matches_reference(q, k, v, causal=True, **call)
    assert out.dtype == torch.bfloat16
    assert_matches_reference(q, k, v, out_dtype=torch.float16, **call)


# --- cu_seqlens ---

LENGTHS_Q = [5, 0, 7, 1, 13]
LENGTHS_K = [9, 4, 0, 1, 6]


def packed(
    tail: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """Sequences of unequal lengths, some of them empty, and `tail` rows that belong to none."""
    q = rand(sum(LENGTHS_Q) + tail, 4, 16, dtype=dtype, seed=1)
    k = rand(sum(LENGTHS_K) + tail, 2, 16, dtype=dtype, seed=2)
    v = rand(sum(LENGTHS_K) + tail, 2, 24, dtype=dtype, seed=3)
    ends = [
        torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32)
        for n in (LENGTHS_Q, LENGTHS_K)
    ]
    return (q, k, v), {"cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1]}


@pytest.mark.parametrize(
    "features",
    [
        {},
        {"causal": True},
        {"window": (2, 1)},
        {"causal": True, "window": (2, None), "softcap": 2.0},
        {"causal": True, "q_offset": 2},
        {"window": (3, 0), "q_offset": torch.tensor([4, 0, 1, -1, 2], dtype=torch.int32)},
        {"causal": True, "sinks": rand(4, seed=5)},
        {"k_descale": rand(5, 2, seed=6).abs()},
    ],
    ids=[
        "full",
        "causal",
        "window",
        "causal-window-softcap",
        "offset",
        "offsets",
        "sinks",
        "descale",
    ],
)
@pytest.mark.parametrize("tail", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_sequences_match_the_reference(
    features: dict[str, Any], tail: int, dtype: torch.dtype
) -> None:
    inputs, ends = packed(tail, dtype)
    assert_matches_reference(*inputs, **ends, **features)


def test_packed_sequences_equal_one_call_each() -> None:
    (q, k, v), ends = packed()
    out, lse = _torch.attention(q, k, v, causal=True, return_lse=True, **ends)
    for i in range(len(LENGTHS_Q)):
        rows = slice(ends["cu_seqlens_q"][i], ends["cu_seqlens_q"][i + 1])
        keys = slice(ends["cu_seqlens_k"][i], ends["cu_seqlens_k"][i + 1])
        one, one_lse = _torch.attention(
            q[None, rows], k[None, keys], v[None, keys], causal=True, layout="bnhd", return_lse=True
        )
        torch.testing.assert_close(out[rows], one[0])
        torch.testing.assert_close(lse[:, rows], one_lse[0])


def test_a_packed_call_without_sequences_gives_zeros() -> None:
    (q, k, v), _ = packed()
    none = torch.zeros(1, dtype=torch.int32)
    out, lse = _torch.attention(
        q, k, v, cu_seqlens_q=none, cu_seqlens_k=none, causal=True, return_lse=True
    )
    assert (out == 0).all()
    assert (lse == -math.inf).all()


# --- rows that see nothing, values that nobody sees ---


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("want_lse", [False, True], ids=["sdpa", "plain"])
def test_a_row_without_keys_gives_exactly_zero(dtype: torch.dtype, want_lse: bool) -> None:
    q, k, v = qkv(9, 5, dtype=dtype)
    bias = torch.zeros(9, 5, dtype=dtype)
    bias[3] = -math.inf
    for call, rows in (
        ({"causal": True}, slice(0, 4)),
        ({"attn_mask": bias == 0}, slice(3, 4)),
        ({"attn_mask": bias}, slice(3, 4)),
        ({"window": (0, 0), "q_offset": 5}, slice(0, 9)),
    ):
        result = _torch.attention(q, k, v, return_lse=want_lse, **call)
        out = result[0] if want_lse else result
        assert (out[:, :, rows] == 0).all()
        assert out.isfinite().all()
        if want_lse:
            assert (result[1][:, :, rows] == -math.inf).all()


def test_a_row_without_keys_has_the_sink_as_its_lse() -> None:
    sinks = rand(4)
    out, lse = _torch.attention(*qkv(9, 5), causal=True, sinks=sinks, return_lse=True)
    assert (out[:, :, :4] == 0).all()
    assert torch.equal(lse[0, :, 0], sinks)


@pytest.mark.parametrize("sink", [math.inf, -math.inf, math.nan], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_non_finite_sink_gives_the_limit_of_the_formula(sink: float, dtype: torch.dtype) -> None:
    sinks = torch.tensor([0.5, sink, -1.0, 2.0])
    for nk, blind, call in (  # `blind` rows see no key
        (9, 0, {}),
        (9, 3, {"causal": True, "q_offset": -3}),
        (9, 0, {"softcap": 2.0}),
        (0, 7, {}),
    ):
        q, k, v = qkv(7, nk, dtype=dtype)
        out = assert_matches_reference(q, k, v, sinks=sinks, **call)
        _, lse = _torch.attention(q, k, v, sinks=sinks, return_lse=True, **call)
        assert (out[:, :, :blind] == 0).all()
        if sink == math.inf:
            assert (out[:, 1] == 0).all()
            assert (lse[:, 1] == math.inf).all()
        elif sink == -math.inf:
            without, lse_without = _torch.attention(q, k, v, return_lse=True, **call)
            torch.testing.assert_close(out[:, 1], without[:, 1])
            torch.testing.assert_close(lse[:, 1], lse_without[:, 1])
        else:
            assert out[:, 1, blind:].isnan().all()
            assert lse[:, 1].isnan().all()


def test_a_bias_of_the_lowest_finite_number_gives_the_mean_of_v() -> None:
    q, k, v = qkv(3, 7)
    bias = torch.full((3, 7), torch.finfo(torch.float32).min)
    for out in (
        _torch.attention(q, k, v, attn_mask=bias),
        _torch.attention(q, k, v, attn_mask=bias, return_lse=True)[0],
    ):
        torch.testing.assert_close(out, v.mean(2, keepdim=True).expand_as(out))


@pytest.mark.parametrize("value", [-1.7e308, -1e39, 1e39, 1.7e308])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_what_float32_does_not_hold_gives_no_nan(value: float, dtype: torch.dtype) -> None:
    q, k, v = qkv(3, 7, dtype=dtype)
    bias = torch.zeros(3, 7, dtype=torch.float64)
    bias[1], bias[2, 3] = value, value
    for options in ({"return_lse": True}, {"return_lse": False}):
        out = _torch.attention(q, k, v, attn_mask=bias.expand(1, 1, 3, 7), **options)
        out = out[0] if options["return_lse"] else out
        torch.testing.assert_close(out[:, 0, 1], v.mean(2)[:, 0], atol=2e-3, rtol=1e-3)
        others = torch.zeros(3, 7).index_fill(1, torch.tensor(3), -math.inf)
        expected = v[:, 0, 3] if value > 0 else _torch.attention(q, k, v, attn_mask=others)[:, 0, 2]
        torch.testing.assert_close(out[:, 0, 2], expected)
    capped = _torch.attention(q, k, v, softcap=abs(value))
    torch.testing.assert_close(capped, _torch.attention(q, k, v), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("want_lse", [False, True], ids=["sdpa", "plain"])
def test_the_tail_of_a_cache_never_matters(poison: float, want_lse: bool) -> None:
    q, k, v = qkv(4, 32)
    call: dict[str, Any] = {"causal": True, "return_lse": want_lse}
    call["q_offset"] = torch.tensor([10, 20], dtype=torch.int32)
    clean = _torch.attention(q, k, v, **call)
    k[0, :, 14:], v[0, :, 14:] = poison, poison
    k[1, :, 24:], v[1, :, 24:] = poison, poison
    assert_same(_torch.attention(q, k, v, **call), clean)


@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("want_lse", [False, True], ids=["sdpa", "plain"])
def test_a_neighbouring_sequence_never_matters(which: str, want_lse: bool) -> None:
    (q, k, v), ends = packed(tail=2)
    clean = _torch.attention(q, k, v, return_lse=want_lse, **ends)
    (k if which == "k" else v)[13] = math.nan  # the only key of sequence 3, whose only query is 12
    result = _torch.attention(q, k, v, return_lse=want_lse, **ends)
    out, clean_out = (result[0], clean[0]) if want_lse else (result, clean)
    others = torch.arange(len(q)) != 12
    assert torch.equal(out[others], clean_out[others])
    assert out[12].isnan().all()
    if want_lse:
        assert torch.equal(result[1][:, others], clean[1][:, others])
        assert result[1][:, 12].isnan().all() == (which == "k")


@pytest.mark.parametrize("want_lse", [False, True], ids=["sdpa", "plain"])
def test_a_non_finite_key_spoils_only_rows_that_see_it(want_lse: bool) -> None:
    q, k, v = qkv(9, 9)
    clean = _torch.attention(q, k, v, causal=True, return_lse=want_lse)
    k[:, :, 6] = math.nan
    result = _torch.attention(q, k, v, causal=True, return_lse=want_lse)
    for x, y in zip(*((r,) if isinstance(r, Tensor) else r for r in (result, clean)), strict=True):
        assert torch.equal(x[:, :, :6], y[:, :, :6])
        assert x[:, :, 6:].isnan().all()


def test_a_non_finite_query_spoils_its_own_row_only() -> None:
    q, k, v = qkv(7, 9)
    clean = _torch.attention(q, k, v, causal=True)
    q[0, 1, 4] = math.nan
    out = _torch.attention(q, k, v, causal=True)
    assert out[0, 1, 4].isnan().all()
    out[0, 1, 4] = clean[0, 1, 4]
    assert torch.equal(out, clean)


def assert_same(one: Any, other: Any) -> None:
    for x, y in zip(*((r,) if isinstance(r, Tensor) else r for r in (one, other)), strict=True):
        assert torch.equal(x, y)


# --- strides, out= ---


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_the_output_has_the_stride_order_of_q(order: tuple[int, ...], causal: bool) -> None:
    q, k, v = qkv(7, 9, dv=24)
    inverse = [order.index(i) for i in range(3)]
    q = q.permute(*order, 3).contiguous().permute(*inverse, 3)
    out = assert_matches_reference(q, k, v, causal=causal)
    expected = torch.empty(2, 4, 7, 24).permute(*order, 3).contiguous().permute(*inverse, 3)
    assert out.stride() == expected.stride()


def test_views_of_one_packed_buffer_match_the_reference() -> None:
    buffer = rand(2, 59, 3, 4, 16)
    q, k, v = buffer.unbind(2)
    out = assert_matches_reference(q, k, v, causal=True, layout="bnhd")
    assert out.is_contiguous()
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = assert_matches_reference(q, k, v, window=(3, 3))
    assert out.transpose(1, 2).is_contiguous()


def test_expanded_and_strided_inputs_match_the_reference() -> None:
    q, k, v = qkv(33, 33, b=1)
    for call in ({}, {"causal": True}, {"window": (4, 4)}):
        assert_matches_reference(
            q.expand(3, -1, -1, -1), k.expand(3, -1, -1, -1), v.expand(3, -1, -1, -1), **call
        )
        assert_matches_reference(
            q, k[:, :1].expand(-1, 4, -1, -1), v[:, :1].expand(-1, 4, -1, -1), **call
        )
        assert_matches_reference(q[..., ::2], k[..., ::2], v[..., ::2], **call)


@pytest.mark.parametrize("call", [{}, {"causal": True}, {"softcap": 2.0}], ids=str)
def test_out_is_written_in_place_and_returned(call: dict[str, Any]) -> None:
    q, k, v = qkv(7, 9)
    frame = torch.full((2, 7, 4, 20), math.nan)
    out = frame.transpose(1, 2)[..., 2:18]
    assert _torch.attention(q, k, v, out=out, **call) is out
    assert torch.equal(out, _torch.attention(q, k, v, **call))
    assert frame[..., :2].isnan().all()
    assert frame[..., 18:].isnan().all()


def test_autocast_leaves_the_dtypes_alone() -> None:
    q, k, v = qkv(7, 9)
    expected = _torch.attention(q, k, v, causal=True, return_lse=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(_torch.attention(q, k, v, causal=True, return_lse=True), expected)
        torch.testing.assert_close(_torch.attention(q, k, v, causal=True), expected[0])


# --- calls that are one of PyTorch's own ---


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Who serves eager calls by name that `torch` serves: its general code, or PyTorch at once."""
    names: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            names.append(name)
            return function(*given, **named)

        return call

    monkeypatch.setattr(_torch, "attention", noted("general", _torch.attention))
    monkeypatch.setattr(
        _torch_kernels, "PYTORCHS_SDPA", noted("pytorch", _torch_kernels.PYTORCHS_SDPA)
    )
    native.clear_cache()
    yield names
    native.clear_cache()


@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "gradients"])
@pytest.mark.parametrize("heads", [4, 2], ids=["mha", "gqa"])
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"scale": 0.3}, {"causal": True, "q_offset": 0}], ids=str
)
def test_a_call_that_pytorch_has_is_one_call_of_its_function(
    served: list[str], options: dict[str, Any], layout: str, heads: int, gradients: bool
) -> None:
    for again in range(3):
        given = [x + again for x in qkv(9, 9, hkv=heads)]
        if layout == "bnhd":
            given = [x.transpose(1, 2).contiguous() for x in given]
        given = [x.requires_grad_(gradients) for x in given]
        out = archflash.attention(*given, layout=layout, **options)
        general = [] if "q_offset" not in options else ["general"]
        assert served == [*general, "pytorch"]
        expected = _torch.attention(*given, layout=layout, **options)
        served.clear()
        torch.testing.assert_close(out, expected)
        assert out.stride() == expected.stride()
        if gradients:
            grads = (torch.autograd.grad(x.sin().sum(), given) for x in (out, expected))
            for x, y in zip(*grads, strict=True):
                torch.testing.assert_close(x, y)


@pytest.mark.parametrize(
    ("nq", "nk", "options"),
    [
        (7, 9, {"causal": True}),
        (9, 7, {"causal": True}),
        (7, 9, {"causal": True, "q_offset": 0}),
        (7, 9, {"scale": -0.5}),
        (7, 9, {"window": (2, 1)}),
        (0, 9, {}),
        (9, 9, {"return_lse": True}),
        (9, 9, {"softcap": 3.0}),
        (9, 9, {"attn_mask": torch.ones(9, 9, dtype=torch.bool).tril(2)}),
        (9, 9, {"implementation": "torch"}),
        (9, 9, {"out_dtype": torch.float64}),
    ],
    ids=str,
)
def test_a_call_that_pytorch_lacks_is_served_by_the_general_code(
    served: list[str], nq: int, nk: int, options: dict[str, Any]
) -> None:
    q, k, v = qkv(nq, nk)
    for _ in range(2):
        out = archflash.attention(q, k, v, **options)
        assert served[0] == "general"
        served.clear()
    named = {name: x for name, x in options.items() if name != "implementation"}
    assert_same(out, _torch.attention(q, k, v, **named))


@pytest.mark.parametrize("first", ["plain", "out", "bnhd"])
def test_calls_that_differ_in_nothing_but_layout_or_out_are_told_apart(
    served: list[str], first: str
) -> None:
    q, k, v = (rand(2, 4, 4, 16, seed=seed) for seed in (1, 2, 3))
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    if first == "out":
        archflash.attention(q, k, v, out=torch.empty_like(q))
    elif first == "bnhd":
        archflash.attention(*turned, layout="bnhd")
    served.clear()
    expected = archflash.attention(q, k, v)
    assert served == ["pytorch"]
    for _ in range(2):
        out = torch.full_like(q, math.nan)
        assert archflash.attention(q, k, v, out=out) is out
        assert torch.equal(out, expected)
        # The same memory, heads and rows, described by the other layout.
        by_rows = archflash.attention(*turned, layout="bnhd")
        assert torch.equal(by_rows.transpose(1, 2), expected)
        assert by_rows.transpose(1, 2).is_contiguous()
        assert torch.equal(archflash.attention(q, k, v), expected)
    assert "pytorch" in served


def test_a_kept_call_is_not_taken_inside_autocast_nor_transforms(served: list[str]) -> None:
    q, k, v = qkv(9, 9)
    expected = archflash.attention(q, k, v, causal=True)
    served.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        given = [x.clone() for x in (q, k, v)]
        out = archflash.attention(*given, causal=True, out=torch.empty_like(q))
    torch.testing.assert_close(out, expected)
    assert served[0] == "general"
    served.clear()
    grads = torch.func.grad(lambda q: archflash.attention(q, k, v, causal=True).sin().sum())(q)
    assert served[0] == "general"
    leaf = q.clone().requires_grad_()
    archflash.attention(leaf, k, v, causal=True).sin().sum().backward()
    torch.testing.assert_close(grads, leaf.grad)


# --- what PyTorch's fused kernels could not read ---


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("name", UNREADABLE)
def test_what_fused_kernels_could_not_read_is_copied_to_aligned_memory(
    name: str, dtype: torch.dtype
) -> None:
    x = laid_out(name, (2, 3, 5, 16), dtype)
    copy = _torch_kernels.readable_by_fused_kernels(x)
    assert copy is not x
    assert torch.equal(copy, x)
    assert copy.is_contiguous()
    assert copy.data_ptr() % 16 == 0
    assert _torch_kernels.readable_by_fused_kernels(copy) is copy


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALF], ids=str)
@pytest.mark.parametrize("name", READABLE)
def test_what_fused_kernels_read_is_not_copied(name: str, dtype: torch.dtype) -> None:
    x = laid_out(name, (2, 3, 5, 16), dtype)
    for view in (x, x[1:], x[:, 1:2], x[:, :, 1:], x[..., 8:]):
        assert _torch_kernels.readable_by_fused_kernels(view) is view


def test_gradients_that_fused_kernels_could_not_read_are_copied_to_aligned_memory() -> None:
    more = torch.ones(3)
    for name in (*READABLE, *UNREADABLE):
        dout = laid_out(name, (2, 3, 5, 16), torch.float16)
        found = _torch_kernels._readable((dout, more, None))
        # PyTorch itself makes rows dense whose numbers are not neighbours.
        if name in READABLE or dout.stride(-1) != 1:
            assert found is None, name
        else:
            assert found is not None, name
            copy, *others = found
            assert copy is not None
            assert torch.equal(copy, dout)
            assert copy.is_contiguous()
            assert copy.data_ptr() % 16 == 0
            assert others == [more, None]
    assert _torch_kernels._readable((None, more)) is None


def test_gradients_for_cudnn_have_the_strides_of_the_first_one() -> None:
    shape = (2, 3, 5, 16)
    q = laid_out("dense", shape, torch.float16)
    kinds = [_torch_kernels.kind_for_cudnn(q, q, q, None, causal) for causal in (False, True)]
    given = [laid_out(name, shape, torch.float16) for name in (*READABLE[:2], *UNREADABLE)]
    for kind, first in zip(kinds, ("bnhd", "row"), strict=True):
        # The first one of all is copied to the strides of the output where none could read it.
        x = laid_out(first, shape, torch.float16)
        wanted = x.stride() if first == "bnhd" else q.stride()
        for dout in (x, *given, x):
            read = _torch_kernels.gradient_for_cudnn(kind, q.stride(), dout)
            assert torch.equal(read, dout)
            assert read.stride() == wanted
            assert read.data_ptr() % 16 == 0
            aligned = dout.stride() == wanted and dout.data_ptr() % 16 == 0
            assert (read is dout) == aligned


def test_the_node_of_a_fused_kernel_is_found_behind_columns_that_are_cut_off() -> None:
    x = torch.randn(1, 2, 5, 16).requires_grad_()
    out = torch.nn.functional.scaled_dot_product_attention(x, x, x)
    for result in (out, out[..., :12]):
        assert _torch_kernels.fused_node(result).name().startswith("ScaledDotProduct")
    assert _torch_kernels.fused_node(x @ x.mT) is None


def test_rows_that_pytorch_pads_are_not_copied() -> None:
    for dtype in HALF:
        x = laid_out("offset and row", (2, 3, 5, 12), dtype)
        assert _torch_kernels.readable_by_fused_kernels(x) is x


def test_views_that_fused_kernels_could_not_read_are_copied_inside_transforms_too() -> None:
    x, odd = (laid_out(name, (2, 3, 5, 16), torch.float32) for name in ("dense", "row"))
    read = _torch_kernels.readable_by_fused_kernels
    torch.testing.assert_close(torch.vmap(read)(odd[None]), odd[None])
    torch.testing.assert_close(torch.func.grad(lambda y: read(y).square().sum())(odd), 2 * odd)
    torch._dynamo.reset()
    compiled = torch.compile(read, fullgraph=True, backend="aot_eager")
    for view in (odd, x):
        torch.testing.assert_close(compiled(view), view)


# --- gradients ---

GRADCHECK_BIAS = torch.tensor(
    [[0.0, -math.inf, 1.0], [-math.inf] * 3, [0.5, 0.0, 0.0], [1.0, 2.0, 3.0]], dtype=torch.float64
)


@pytest.mark.parametrize(
    "call",
    [
        {},
        {"causal": True},
        {"window": (1, 1), "softcap": 1.0},
        {"causal": True, "sinks": torch.tensor([0.3, -0.2], dtype=torch.float64)},
        {"attn_mask": GRADCHECK_BIAS},
        {"layout": "bnhd"},
    ],
    ids=["full", "causal", "window-softcap", "sinks", "bias", "bnhd"],
)  # fmt: skip
def test_gradients_match_finite_differences(call: dict[str, Any]) -> None:
    n = (3, 3) if call.get("layout") else (4, 3)
    q, k, v = qkv(*n, b=1, hq=2, hkv=1, d=4, dv=3, dtype=torch.float64)
    if call.get("layout"):
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    tensors = [x.requires_grad_() for x in (q, k, v)]
    if "sinks" in call:
        call = dict(call)
        sinks = call.pop("sinks").clone().requires_grad_()
        assert torch.autograd.gradcheck(
            lambda q, k, v, s: _torch.attention(q, k, v, sinks=s, **call), (*tensors, sinks)
        )
    else:
        assert torch.autograd.gradcheck(lambda q, k, v: _torch.attention(q, k, v, **call), tensors)


@pytest.mark.parametrize("want_lse", [False, True], ids=["sdpa", "plain"])
def test_gradients_of_rows_without_keys_are_zero_and_never_nan(want_lse: bool) -> None:
    q, k, v = (x.requires_grad_() for x in qkv(9, 5))
    bias = torch.zeros(9, 5)
    bias[6] = -math.inf
    bias.requires_grad_()
    result = _torch.attention(q, k, v, causal=True, attn_mask=bias, return_lse=want_lse)
    loss = result[0].sum() + result[1][:, :, 7:].sum() if want_lse else result.sum()
    loss.backward()
    for x in (q, k, v, bias):
        assert x.grad is not None
        assert x.grad.isfinite().all()
        assert x.grad.abs().sum() > 0
    assert (q.grad[:, :, [0, 1, 2, 3, 6]] == 0).all()


def test_gradients_flow_through_packed_sequences() -> None:
    (q, k, v), ends = packed(tail=2)
    tensors = [x.double().requires_grad_() for x in (q, k, v)]
    _torch.attention(*tensors, causal=True, **ends).square().sum().backward()
    packed_grads = [x.grad for x in tensors]
    again = [x.detach().clone().requires_grad_() for x in tensors]
    for i in range(len(LENGTHS_Q)):
        rows = slice(ends["cu_seqlens_q"][i], ends["cu_seqlens_q"][i + 1])
        keys = slice(ends["cu_seqlens_k"][i], ends["cu_seqlens_k"][i + 1])
        _torch.attention(
            again[0][None, rows],
            again[1][None, keys],
            again[2][None, keys],
            causal=True,
            layout="bnhd",
        ).square().sum().backward()
    for grad, x in zip(packed_grads, again, strict=True):
        torch.testing.assert_close(grad, x.grad)


@pytest.mark.parametrize("option", [{}, {"causal": True, "sinks": rand(4, seed=5)}], ids=str)
def test_nan_in_rows_of_no_sequence_reaches_no_gradient(option: dict[str, Any]) -> None:
    whole, ends = packed()
    dout = rand(*whole[0].shape[:2], 24, seed=7)
    want = archflash.attention_backward(
        dout, *whole, *archflash.attention(*whole, return_lse=True, **ends, **option),
        implementation="torch", **ends, **option,
    )  # fmt: skip
    ends = {name: x + 1 for name, x in ends.items()}
    padded = [F.pad(x, (0, 0, 0, 0, 1, 2), value=math.nan) for x in (dout, *whole)]
    leaves = [x.detach().requires_grad_() for x in padded[1:]]
    out, lse = archflash.attention(*leaves, return_lse=True, **ends, **option)
    found = torch.autograd.grad(out, leaves, padded[0])
    results = archflash.attention_backward(
        *padded, out.detach(), lse.detach(), implementation="torch", **ends, **option
    )
    for grads in (found, results[:3]):
        for x, expected in zip(grads, want, strict=False):
            torch.testing.assert_close(x, F.pad(expected, (0, 0, 0, 0, 1, 2)))
    if "sinks" in option:
        torch.testing.assert_close(results[3], want[3])
        sinks = option["sinks"].clone().requires_grad_()
        alone = archflash.attention(*padded[1:], **ends, **{**option, "sinks": sinks})
        torch.testing.assert_close(torch.autograd.grad(alone, sinks, padded[0])[0], want[3])


# --- no host synchronisation, torch.compile ---


class NoHostRead(TorchDispatchMode):
    """Fails on the operation behind .item(), .tolist(), bool(tensor) and boolean indexing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        host = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal")
        assert func.overloadpacket.__name__ not in host, f"{func} reads a tensor on the host"
        return func(*args, **(kwargs or {}))


def calls_of_every_kind() -> list[tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]]:
    inputs, ends = packed(tail=2)
    offsets = torch.tensor([3, -6], dtype=torch.int32)
    calls: list[tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]] = [
        (qkv(7, 9, hkv=2), feature_arguments(name, 7, 9)) for name in FEATURES if name != "bnhd"
    ]
    calls.append((qkv(7, 9), {"causal": True, "q_offset": offsets}))
    calls.append((inputs, ends))
    calls.append((inputs, {**ends, "causal": True, "window": (2, None), "softcap": 2.0}))
    calls.append((inputs, {**ends, "causal": True, "q_offset": torch.arange(5).int()}))
    return [(t, {**c, "return_lse": lse}) for t, c in calls for lse in (False, True)]


def test_nothing_is_read_on_the_host() -> None:
    for tensors, call in calls_of_every_kind():
        with NoHostRead():
            _torch.attention(*tensors, **call)
        # A meta tensor has no values at all, so reading any would raise.
        meta = {n: a.to("meta") if isinstance(a, Tensor) else a for n, a in call.items()}
        result = _torch.attention(*(x.to("meta") for x in tensors), **meta)
        assert (result[0] if call["return_lse"] else result).device.type == "meta"


@pytest.mark.slow
@pytest.mark.parametrize(
    "call",
    [
        {},
        {"causal": True},
        {"causal": True, "return_lse": True},
        {"window": (3, 1), "softcap": 2.0, "sinks": rand(4)},
        {"causal": True, "q_offset": torch.tensor([2, 5], dtype=torch.int32)},
        {"attn_mask": rand(7, 9)},
    ],
    ids=["full", "causal", "lse", "window-softcap-sinks", "offsets", "bias"],
)  # fmt: skip
def test_torch_compile_takes_it_whole(call: dict[str, Any]) -> None:
    q, k, v = qkv(7, 9, hkv=2)
    torch._dynamo.reset()
    compiled = torch.compile(_torch.attention, fullgraph=True, backend="aot_eager")
    compiled_result = compiled(q, k, v, **call)
    result = _torch.attention(q, k, v, **call)
    for x, y in zip(
        *((r,) if isinstance(r, Tensor) else r for r in (compiled_result, result)), strict=True
    ):
        torch.testing.assert_close(x, y)


def test_torch_compile_takes_packed_sequences_whole() -> None:
    inputs, ends = packed(tail=2)
    torch._dynamo.reset()
    compiled = torch.compile(_torch.attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        compiled(*inputs, causal=True, **ends), _torch.attention(*inputs, causal=True, **ends)
    )


def test_torch_compile_keeps_gradients() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(_torch.attention, fullgraph=True, backend="aot_eager")
    grads = []
    for function in (compiled, _torch.attention):
        q, k, v = (x.requires_grad_() for x in qkv(9, 5))
        function(q, k, v, causal=True).square().sum().backward()
        grads.append((q.grad, k.grad, v.grad))
    for x, y in zip(*grads, strict=True):
        torch.testing.assert_close(x, y)


# --- fused_kernel ---

FUSED: dict[str, Any] = {
    "device_type": "cuda", "capability": (8, 0), "dtype": torch.bfloat16,
    "d": 64, "dv": 64, "nq": 128, "nk": 128, "causal": False, "window": False, "softcap": 0.0,
    "sinks": False, "q_offset_given": False, "varlen": False, "masked": False, "want_lse": False,
    "fp8": False,
}  # fmt: skip


H200 = {"capability": (9, 0)}
WIDE = {"d": 256, "dv": 256}


@pytest.fixture
def newest_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes PyTorch look like 2.11, where cuDNN comes first on 9.x and 10.x."""
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cu130"))
    monkeypatch.setattr(_fused_kernels, "cudnn_version", lambda: 91900)
    monkeypatch.delenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", raising=False)


@pytest.mark.usefixtures("newest_cudnn")
@pytest.mark.parametrize(
    ("change", "kernel"),
    [
        ({}, "flash"),
        ({"causal": True}, "flash"),
        ({"causal": True, "nq": 1}, "flash"),
        ({"causal": True, "nq": 64}, "efficient"),
        ({"masked": True}, "efficient"),
        ({"window": True}, "efficient"),
        ({"causal": True, "q_offset_given": True}, "efficient"),
        ({"capability": (7, 5), "dtype": "float16"}, "efficient"),
        ({"d": 192, "dv": 128}, "efficient"),
        ({"d": 72, "dv": 72}, "flash"),
        ({"d": 60, "dv": 60}, "flash"),
        ({"gqa": True, "causal": True}, "flash"),
        ({"gqa": True, "masked": True}, "cudnn"),
        ({"capability": (12, 1)}, "flash"),
        (H200, "cudnn"),
        (H200 | {"causal": True, "gqa": True}, "cudnn"),
        (H200 | {"nq": 1, "causal": True}, "cudnn"),
        (H200 | {"masked": True}, "cudnn"),
        (H200 | {"d": 192, "dv": 128}, "cudnn"),
        (H200 | WIDE, "cudnn"),
        (H200 | {"d": 60, "dv": 60}, "flash"),
        (H200 | {"nk": 1}, "flash"),
        ({"capability": (10, 0)}, "cudnn"),
        ({"capability": (10, 0)} | WIDE, "flash"),
    ],
    ids=str,
)
def test_fused_kernel_is_the_one_that_pytorch_takes(change: dict[str, Any], kernel: str) -> None:
    assert _fused_kernels.fused_kernel(**{**FUSED, **change}) == f"torch-{kernel}"


@pytest.mark.usefixtures("newest_cudnn")
def test_pytorch_takes_flash_where_its_cudnn_is_old_or_put_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = [_fused_kernels.fused_kernel(**{**FUSED, **H200})]
    with monkeypatch.context() as patch:
        patch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
        taken.append(_fused_kernels.fused_kernel(**{**FUSED, **H200}))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", TorchVersion("2.9.1+cu128"))
        taken.append(_fused_kernels.fused_kernel(**{**FUSED, **H200}))
    monkeypatch.setattr(_fused_kernels, "cudnn_version", lambda: 91002)
    taken.append(_fused_kernels.fused_kernel(**{**FUSED, **H200}))
    assert taken == ["torch-cudnn", "torch-flash", "torch-flash", "torch-flash"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"device_type": "cpu", "capability": None}, "CUDA device"),
        ({"varlen": True}, "Tq x Tk mask"),
        ({"softcap": 30.0}, "softcap"),
        ({"sinks": True}, "sinks"),
        ({"want_lse": True}, "log-sum-exp"),
        ({"fp8": True, "dtype": torch.float8_e4m3fn}, "FP8"),
        ({"capability": (7, 5)}, "bfloat16 needs compute capability 8.0, this is 7.5"),
        ({"capability": (13, 0)}, "end at compute capability 12.1"),
        ({"dtype": torch.float32}, "float32 is not a 16-bit dtype"),
        ({"dtype": "float64"}, "float64 is not a 16-bit dtype"),
        ({"nq": 0}, "empty"),
        ({"d": 60, "dv": 60, "masked": True}, "multiples of 8"),
        ({"d": 256, "dv": 256, "window": True, "gqa": True}, "takes no mask"),
    ],
    ids=str,
)
def test_fused_kernel_says_why_there_is_none(change: dict[str, Any], words: str) -> None:
    reasons = _fused_kernels.fused_kernel(**{**FUSED, **change})
    assert isinstance(reasons, list)
    assert words in "; ".join(reasons)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("want_lse", [True, False])
def test_keys_that_no_query_sees_may_hold_anything(causal: bool, want_lse: bool) -> None:
    q, k, v = (torch.randn(1, 2, n, 16) for n in (5, 30, 30))
    bands: list[tuple[int, int, dict[str, Any]]] = [
        (0, 5, {"causal": causal, "window": (None, 0), "q_offset": 0}),
        (6, 16, {"causal": causal, "window": (3, 0 if causal else 2), "q_offset": 9}),
    ]
    for begin, end, call in bands:
        other = []
        for x in (k, v):
            spoiled = torch.full_like(x, math.nan)
            spoiled[:, :, begin:end] = x[:, :, begin:end]
            other.append(spoiled)
        results = [
            _torch.attention(q, *keys, **call, return_lse=want_lse) for keys in ((k, v), other)
        ]
        torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-6)
