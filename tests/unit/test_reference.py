"""The float64 reference against numbers by hand and a loop over scalars; the error rule."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from archflash import reference


def rand(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# --- by hand ---

LOG2, LOG3 = math.log(2), math.log(3)


def one_head(q: list[float], k: list[float], v: list[float]) -> tuple[Tensor, Tensor, Tensor]:
    """One head with D = 1: with scale 1 a score is the product of two numbers."""
    queries, keys, values = (torch.tensor(x, dtype=torch.float64) for x in (q, k, v))
    return queries[None, None, :, None], keys[None, None, :, None], values[None, None, :, None]


@pytest.mark.parametrize(
    ("call", "out", "lse"),
    [
        # Scores (0, log 3): weights 1/4 and 3/4 of the values 4 and 8, denominator 1 + 3.
        ({}, 7.0, math.log(4)),
        # The one query is the last: it sees both keys.
        ({"causal": True}, 7.0, math.log(4)),
        # A query at position 0 sees only the first key; at -1 it sees none.
        ({"causal": True, "q_offset": 0}, 4.0, 0.0),
        ({"causal": True, "q_offset": -1}, 0.0, -math.inf),
        # A query at position 1 without a left window sees only the second key.
        ({"window": (0, None)}, 8.0, LOG3),
        ({"window": (1, 0)}, 7.0, math.log(4)),
        # A sink of log 4 doubles the denominator and adds no value.
        ({"sinks": torch.tensor([math.log(4)])}, 3.5, math.log(8)),
        ({"causal": True, "q_offset": -1, "sinks": torch.tensor([0.5])}, 0.0, 0.5),
        # Scale 2: weights 1/10 and 9/10.
        ({"scale": 2.0}, 7.6, math.log(10)),
        # Bias log 3 on the first key evens the weights out.
        ({"attn_mask": torch.tensor([[LOG3, 0.0]], dtype=torch.float64)}, 6.0, math.log(6)),
        ({"attn_mask": torch.tensor([[-math.inf, 0.0]])}, 8.0, LOG3),
        ({"attn_mask": torch.tensor([[True, False]])}, 4.0, 0.0),
        ({"attn_mask": torch.tensor([[False, False]])}, 0.0, -math.inf),
        # Values and the score are doubled: weights 1/10 and 9/10 of 8 and 16.
        ({"k_descale": torch.tensor(2.0), "v_descale": torch.tensor([2.0])}, 15.2, math.log(10)),
    ],
    ids=str,
)
def test_one_query_and_two_keys_by_hand(call: dict[str, Any], out: float, lse: float) -> None:
    q, k, v = one_head([1.0], [0.0, LOG3], [4.0, 8.0])
    result, result_lse = reference.attention(q, k, v, **{"scale": 1.0, **call})
    assert result.dtype == result_lse.dtype == torch.float64
    assert result.item() == pytest.approx(out, rel=1e-7)
    assert result_lse.item() == pytest.approx(lse, rel=1e-7)


def test_softcap_by_hand() -> None:
    # The score atanh(1/2) * 2 is capped to 2 * tanh(atanh(1/2)) = 1.
    q, k, v = one_head([1.0], [0.0, 2 * math.atanh(0.5)], [0.0, 1.0])
    out, lse = reference.attention(q, k, v, scale=1.0, softcap=2.0)
    assert out.item() == pytest.approx(math.e / (1 + math.e))
    assert lse.item() == pytest.approx(math.log(1 + math.e))


def test_causal_aligns_to_the_bottom_right() -> None:
    # Equal scores: a row is the mean of the values that it sees.
    q, k, v = one_head([0.0] * 2, [0.0] * 3, [3.0, 6.0, 12.0])
    out, _ = reference.attention(q, k, v, causal=True)
    assert out.flatten().tolist() == pytest.approx([4.5, 7.0])
    q, k, v = one_head([0.0] * 3, [0.0] * 2, [3.0, 6.0])
    out, lse = reference.attention(q, k, v, causal=True)
    assert out.flatten().tolist() == pytest.approx([0.0, 3.0, 4.5])
    assert lse.flatten().tolist() == pytest.approx([-math.inf, 0.0, LOG2])


# --- by a loop over scalars ---


def by_loops(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False,
    window: tuple[int | None, int | None] = (None, None), softcap: float | None = None,
    sinks: Tensor | None = None, scale: float | None = None, q_offset: int | Tensor | None = None,
    attn_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The definition, one Python number at a time, for layout bhnd."""
    (b, hq, nq, d), (_, hkv, nk, dv) = q.shape, v.shape
    out = torch.zeros(b, hq, nq, dv, dtype=torch.float64)
    lse = torch.zeros(b, hq, nq, dtype=torch.float64)
    for n, h, i in itertools.product(range(b), range(hq), range(nq)):
        kv = h * hkv // hq
        offset = nk - nq
        if q_offset is not None:
            offset = int(q_offset[n]) if isinstance(q_offset, Tensor) else q_offset
        total, sums = 0.0, [0.0] * dv
        for j in range(nk):
            if causal and j > i + offset:
                continue
            if window[0] is not None and j < i + offset - window[0]:
                continue
            if window[1] is not None and j > i + offset + window[1]:
                continue
            score = sum(float(q[n, h, i, c]) * float(k[n, kv, j, c]) for c in range(d))
            score *= d**-0.5 if scale is None else scale
            if softcap is not None:
                score = softcap * math.tanh(score / softcap)
            if attn_mask is not None:
                entry = attn_mask.expand(b, hq, nq, nk)[n, h, i, j]
                if entry.dtype == torch.bool:
                    if not entry:
                        continue
                else:
                    score += float(entry)
            weight = math.exp(score)
            total += weight
            for c in range(dv):
                sums[c] += weight * float(v[n, kv, j, c])
        if sinks is not None:
            total += math.exp(float(sinks[h]))
        lse[n, h, i] = math.log(total) if total else -math.inf
        out[n, h, i] = torch.tensor(
            [x / total if total else 0.0 for x in sums], dtype=torch.float64
        )
    return out, lse


CALLS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (1, 2)},
    "causal-left": {"causal": True, "window": (2, None)},
    "softcap": {"softcap": 0.7},
    "sinks": {"sinks": rand(4, seed=4)},
    "scale": {"scale": -0.8},
    "offset": {"causal": True, "q_offset": -1},
    "offsets": {"window": (2, 0), "q_offset": torch.tensor([2, -1], dtype=torch.int32)},
    "bool": {"attn_mask": rand(2, 1, 1, 1, seed=5) > -9},
    "bias": {"attn_mask": rand(4, 1, 1, seed=6)},
    "all": {
        "causal": True,
        "window": (3, 1),
        "softcap": 1.1,
        "sinks": rand(4, seed=7),
        "q_offset": 1,
        "attn_mask": torch.tensor(-math.inf).where(torch.tensor(False), rand(2, 4, 1, 1, seed=8)),
    },
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("nq", "nk"), [(0, 3), (3, 0), (1, 1), (3, 5), (5, 3)])
def test_reference_equals_a_loop_over_scalars(name: str, nq: int, nk: int) -> None:
    q, k, v = rand(2, 4, nq, 3, seed=1), rand(2, 2, nk, 3, seed=2), rand(2, 2, nk, 2, seed=3)
    call = dict(CALLS[name])
    if name in ("bool", "bias"):
        given = rand(2, 4, nq, nk, seed=9)
        call["attn_mask"] = given > 0 if name == "bool" else given.masked_fill(given > 1, -math.inf)
    expected, expected_lse = by_loops(q, k, v, **call)
    out, lse = reference.attention(q, k, v, **call)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-12)
    base = reference.baseline(q.double(), k.double(), v.double(), **call)
    torch.testing.assert_close(base, expected, rtol=1e-12, atol=1e-12)


def test_layout_bnhd_is_the_same_numbers_transposed() -> None:
    q, k, v = rand(2, 4, 7, 8, seed=1), rand(2, 2, 9, 8, seed=2), rand(2, 2, 9, 5, seed=3)
    out, lse = reference.attention(q, k, v, causal=True)
    turned = (x.transpose(1, 2) for x in (q, k, v))
    other, other_lse = reference.attention(*turned, causal=True, layout="bnhd")
    assert torch.equal(other.transpose(1, 2), out)
    assert torch.equal(other_lse, lse)


def test_packed_sequences_are_calls_of_their_own() -> None:
    q, k, v = rand(12, 4, 8, seed=1), rand(13, 2, 8, seed=2), rand(13, 2, 8, seed=3)
    ends_q, ends_k = [0, 3, 3, 9, 10], [0, 5, 7, 9, 9]  # two empty sequences, rows after the last
    out, lse = reference.attention(
        q, k, v, causal=True, sinks=rand(4, seed=4),
        cu_seqlens_q=torch.tensor(ends_q), cu_seqlens_k=torch.tensor(ends_k),
    )  # fmt: skip
    assert lse.shape == (4, 12)
    for i in range(4):
        rows, keys = slice(ends_q[i], ends_q[i + 1]), slice(ends_k[i], ends_k[i + 1])
        expected, expected_lse = by_loops(
            *(x.transpose(0, 1)[None] for x in (q[rows], k[keys], v[keys])),
            causal=True, sinks=rand(4, seed=4),
        )  # fmt: skip
        torch.testing.assert_close(out[rows], expected[0].transpose(0, 1), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(lse[:, rows], expected_lse[0], rtol=1e-12, atol=1e-12)
    assert (out[10:] == 0).all()
    assert torch.equal(lse[:, 10:], rand(4, seed=4).double()[:, None].expand(4, 2))


def test_queries_are_taken_in_blocks_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = rand(1, 2, 33, 8, seed=1), rand(1, 2, 17, 8, seed=2), rand(1, 2, 17, 8, seed=3)
    mask = rand(33, 17, seed=4)
    whole = reference.attention(q, k, v, causal=True, attn_mask=mask)
    monkeypatch.setattr(reference.blocks, "_BLOCK_ELEMENTS", 5 * 17)
    for one, other in zip(
        whole, reference.attention(q, k, v, causal=True, attn_mask=mask), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-14)


def test_fp8_values_are_stored_times_descale() -> None:
    q, k, v = (rand(2, 2, 5, 8, seed=i).to(torch.float8_e4m3fn) for i in range(3))
    per_head = torch.tensor([0.5, 3.0])
    per_batch = torch.tensor([[0.5, 3.0], [1.5, 0.25]])
    out, _ = reference.attention(q, k, v, q_descale=per_head, v_descale=per_batch)
    expected, _ = by_loops(
        q.float() * per_head[:, None, None], k.float(), v.float() * per_batch[:, :, None, None]
    )
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    assert reference.baseline(q, k, v, q_descale=per_head).dtype == torch.bfloat16


def test_fp8_descales_of_blocks_and_of_key_heads() -> None:
    q = rand(1, 4, 70, 8, seed=0).to(torch.float8_e4m3fn)
    k, v = (rand(1, 2, 130, 8, seed=i).to(torch.float8_e4m3fn) for i in (1, 2))
    blocks = torch.tensor([[[1.0, 2.0, 4.0], [3.0, 0.5, 0.25]]])
    by_key_head = torch.tensor([[2.0, 0.5]])
    out, _ = reference.attention(q, k, v, q_descale=by_key_head, v_descale=blocks)
    rows = blocks.repeat_interleave(64, 2)[:, :, :130, None]
    heads = by_key_head.repeat_interleave(2, 1)[..., None, None]
    expected, _ = reference.attention(q.float() * heads, k.float(), v.float() * rows)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def fp8_case() -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    tensors = tuple(rand(1, 2, 40, 16, seed=i).to(torch.float8_e4m3fn) for i in range(3))
    return tensors, {"v_descale": torch.tensor([0.5, -3.0])}


def test_weights_rounded_to_e4m3_meet_the_fp8_rule() -> None:
    (q, k, v), call = fp8_case()
    ref, _ = reference.attention(q, k, v, causal=True, **call)
    scores = (q.double() @ k.double().transpose(-1, -2)) / 4
    scores = scores.masked_fill(torch.ones(40, 40, dtype=torch.bool).triu(1), -math.inf)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True)) * 256
    stored = weights.to(torch.float8_e4m3fn).double()
    factor = call["v_descale"].double()[:, None, None]
    out = (stored @ v.double()) * factor / weights.sum(-1, keepdim=True)
    report = reference.check_fp8(out.bfloat16(), ref, q, k, v, causal=True, **call)
    assert report.ok, report
    assert report.max_error > 0
    assert report.bound > 0


@pytest.mark.parametrize("wrong", ["element", "everywhere a little", "nan", "scale"])
def test_the_fp8_rule_finds_what_is_wrong(wrong: str) -> None:
    (q, k, v), call = fp8_case()
    ref, _ = reference.attention(q, k, v, **call)
    out = ref.clone()
    assert reference.check_fp8(out.half(), ref, q, k, v, **call).ok
    if wrong == "element":
        out[0, 1, 7, 3] += 0.3
    elif wrong == "everywhere a little":
        out += 0.3 * ref.abs().mean()
    elif wrong == "nan":
        out[0, 0, 5, 5] = math.nan
    else:
        out *= 1.2
    report = reference.check_fp8(out.half(), ref, q, k, v, **call)
    assert not report.ok, report
    if wrong == "element":
        assert report.worst == (0, 1, 7, 3)
        assert report.bad_elements == 1


def test_a_value_that_is_not_finite_spoils_the_rows_that_see_it() -> None:
    q, k, v = (rand(1, 1, 5, 4, seed=i) for i in range(3))
    clean, _ = reference.attention(q, k, v, causal=True)
    v[0, 0, 3, 1] = math.nan
    out, _ = reference.attention(q, k, v, causal=True)
    spoiled = torch.zeros(1, 1, 5, 4, dtype=torch.bool)
    spoiled[0, 0, 3:, 1] = True
    assert torch.equal(out.isnan(), spoiled)
    assert torch.equal(out[~spoiled], clean[~spoiled])
    k[0, 0, 4] = math.nan
    out, lse = reference.attention(q, k, v, causal=True)
    assert out[0, 0, 4].isnan().all()
    assert lse.isnan().flatten().tolist() == [False] * 4 + [True]


def test_an_unknown_keyword_is_an_error() -> None:
    q = rand(1, 1, 1, 1, seed=1)
    with pytest.raises(TypeError, match="casual"):
        reference.attention(q, q, q, casual=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_baseline_rounds_as_plain_torch_code_does(dtype: torch.dtype) -> None:
    q, k, v = (rand(1, 1, 33, 16, seed=i, dtype=dtype) for i in range(3))
    expected = torch.softmax(q @ k.transpose(-1, -2) * 0.25, -1) @ v
    base = reference.baseline(q, k, v, return_lse=True)
    assert base.dtype == dtype
    # Both round alike, except that a product may add up in another order.
    torch.testing.assert_close(base, expected, rtol=0, atol=float(2 * torch.finfo(dtype).eps))
    ref = reference.attention(q, k, v, return_lse=False)
    error = (base - ref).abs().mean() / torch.finfo(dtype).eps
    assert 0.01 < error < 1


# --- the error rule ---


def example(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    q, k, v = (rand(2, 2, 65, 32, seed=i, dtype=dtype) for i in range(3))
    ref, _ = reference.attention(q, k, v, causal=True)
    return ref, reference.baseline(q, k, v, causal=True)


DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)


@DTYPES
def test_check_passes_the_baseline_and_the_rounded_reference(dtype: torch.dtype) -> None:
    ref, base = example(dtype)
    assert reference.check(base, ref, base).ok
    assert reference.check(ref.to(dtype), ref, base).ok


@DTYPES
def test_check_fails_a_shifted_mask(dtype: torch.dtype) -> None:
    ref, base = example(dtype)
    q, k, v = (rand(2, 2, 65, 32, seed=i, dtype=dtype) for i in range(3))
    for offset in (-1, 1):
        wrong, _ = reference.attention(q, k, v, causal=True, q_offset=offset)
        assert not reference.check(wrong.to(dtype), ref, base).ok


def test_the_baseline_of_gradients_knows_that_the_lse_is_rounded() -> None:
    """A kernel of gradients computes the weights from an LSE in float32, so they are less exact
    than those of a softmax.
    """
    base, plain = 0.0, 0.0
    for seed in range(5):
        g = torch.Generator().manual_seed(seed)
        dout, q, k, v = (torch.randn(1, 2, 100, 128, generator=g) for _ in range(4))
        exact = reference.attention_backward(dout, q, k, v).dv
        of_softmax = torch.softmax(q @ k.mT * 128**-0.5, -1).mT @ dout
        base += float((reference.baseline_backward(dout, q, k, v).dv - exact).square().sum())
        plain += float((of_softmax - exact).square().sum())
    assert base > 1.1 * plain


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_check_fails_one_percent(dtype: torch.dtype) -> None:
    ref, base = example(dtype)
    assert not reference.check((ref * 1.01).to(dtype), ref, base).ok


@DTYPES
def test_check_fails_a_drift_that_only_the_mean_shows(dtype: torch.dtype) -> None:
    ref, base = example(dtype)
    report = reference.check(base, ref, base)
    drifted = (ref + 0.9 * report.bound).to(dtype)
    verdict = reference.check(drifted, ref, base)
    assert verdict.mean_error > verdict.mean_bound
    assert not verdict.ok


def test_check_names_the_worst_element() -> None:
    ref, base = example(torch.float32)
    out = base.clone()
    out[1, 0, 7, 3] += 0.5
    out[0, 1, 2, 4] -= 0.25
    report = reference.check(out, ref, base)
    assert not report.ok
    assert report.bad_elements == 2
    assert report.worst == (1, 0, 7, 3)
    assert report.value == out[1, 0, 7, 3].item()
    assert report.expected == ref[1, 0, 7, 3].item()
    assert report.max_error == pytest.approx(0.5, rel=1e-5)
    text = str(report)
    assert "WRONG" in text
    assert "(1, 0, 7, 3)" in text
    assert f"2 of {ref.numel()}" in text


def test_check_bound_is_twice_the_baseline_plus_two_ulp() -> None:
    ref = torch.tensor([1.5, -3.0, 0.0], dtype=torch.float64)
    base = torch.tensor([1.5, -2.5, 0.0])
    report = reference.check(ref.to(torch.float16), ref, base)
    assert report.bound == 2 * 0.5 + 2 * 2**-9  # the ulp of float16 in [2, 4)
    assert report.mean_bound == 2 * 0.5 / 3 + 2 * 2**-10  # the ulp of float16 in [1, 2)
    assert report.nrmse == 0.0


def test_check_takes_zeros_and_empty_tensors() -> None:
    zeros = torch.zeros(3, 4, dtype=torch.float64)
    assert reference.check(zeros.half(), zeros, zeros.half()).ok
    tiny = torch.full((3, 4), 1e-3)
    report = reference.check(tiny, zeros, zeros.float())
    assert not report.ok
    assert report.bad_elements == 12
    assert report.nrmse == math.inf
    empty = torch.zeros(0, 4, dtype=torch.float64)
    report = reference.check(empty.half(), empty, empty.half())
    assert report.ok
    assert report.worst == ()
    assert "ok" in str(report)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_check_fails_a_value_that_is_not_finite_where_the_reference_is(wrong: float) -> None:
    ref, base = example(torch.float32)
    out = base.clone()
    out[0, 0, 1, 2] = wrong
    report = reference.check(out, ref, base)
    assert not report.ok
    assert (report.bad_elements, report.worst, report.max_error) == (1, (0, 0, 1, 2), math.inf)


def test_check_wants_nan_and_infinities_where_the_reference_has_them() -> None:
    ref = torch.tensor([math.nan, math.inf, -math.inf, 1.0], dtype=torch.float64)
    assert reference.check(ref.float(), ref, ref.float()).ok
    for at, wrong in ((0, 0.0), (1, -math.inf), (2, math.nan)):
        out = ref.float()
        out[at] = wrong
        report = reference.check(out, ref, ref.float())
        assert not report.ok
        assert report.bad_elements == 1
        assert report.worst == (at,)


def test_check_does_not_take_an_overflowed_baseline_as_leave() -> None:
    ref, base = example(torch.float32)
    overflowed = base.clone()
    overflowed[0, 0, 1] = math.inf
    overflowed[0, 0, 2] = math.nan
    assert reference.check(base, ref, overflowed).ok
    assert not reference.check(base * 1.01, ref, overflowed).ok


def test_check_refuses_other_shapes() -> None:
    ref, base = example(torch.float32)
    with pytest.raises(ValueError, match="differ in shape"):
        reference.check(base[:1], ref, base)
    with pytest.raises(ValueError, match="differ in shape"):
        reference.check_lse(ref[0].float(), ref)


def test_check_lse_wants_minus_infinity_exactly_where_it_is_due() -> None:
    ref = torch.tensor([0.5, -math.inf, 7.0], dtype=torch.float64)
    assert reference.check_lse(ref.float(), ref).ok
    assert reference.check_lse(torch.tensor([0.5, -math.inf, 7.00001]), ref).ok
    for wrong in ([0.5, -1e30, 7.0], [-math.inf, -math.inf, 7.0], [0.5, -math.inf, 7.001]):
        assert not reference.check_lse(torch.tensor(wrong), ref).ok


def test_report_is_frozen() -> None:
    ref, base = example(torch.float32)
    with pytest.raises(dataclasses.FrozenInstanceError):
        reference.check(base, ref, base).ok = False  # type: ignore[misc]


def test_fp8_scores_may_be_off_where_sums_keep_13_bits() -> None:
    q = torch.full((1, 1, 3, 16), -1.0).to(torch.float8_e4m3fn)
    k = torch.full((1, 1, 1, 16), 0.5).to(torch.float8_e4m3fn)
    call = {
        "scale": -0.5,
        "q_descale": torch.tensor([-2.0]),
    }  # a sum of |q k| is 16 * 0.5 * 0.5 * 2
    for ran_on in (("ada", (8, 9)), ("hopper", (9, 0))):
        assert reference.fp8_score_error(*ran_on, q, k, k, **call) == 8 * 2.0**-12
        halves = [x.half() for x in (q, k, k)]
        assert reference.fp8_score_error(*ran_on, *halves, scale=-0.5) == 0.0
    for ran_on in (("ada", (9, 0)), ("ada", (12, 0)), ("blackwell_consumer", (12, 0))):
        assert reference.fp8_score_error(*ran_on, q, k, k, **call) == 0.0
