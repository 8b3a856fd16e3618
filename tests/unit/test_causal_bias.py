"""A torch.nn.attention.bias as attn_mask means causal, in every entry point."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import archflash
from archflash import reference

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns of rows without keys

LENGTHS = [(5, 9), (9, 5), (7, 7), (1, 6)]
VARIANTS = [causal_lower_right, causal_upper_left]
ENTRIES = [archflash.attention, archflash.scaled_dot_product_attention]


def qkv(nq: int, nk: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(2, 4, n, 8, generator=generator) for n in (nq, nk, nk))


each_variant = pytest.mark.parametrize("make", VARIANTS)
each_length = pytest.mark.parametrize(("nq", "nk"), LENGTHS)


@each_variant
@pytest.mark.parametrize(
    ("nq", "nk", "way"),
    [(*lengths, "eager") for lengths in LENGTHS]
    + [(5, 9, way) for way in ("compile", "gradient", "autocast", "simulator", "bnhd")],
)
def test_a_causal_bias_means_what_it_means_to_torch(
    make: Callable[..., Any], nq: int, nk: int, way: str
) -> None:
    q, k, v = qkv(nq, nk)
    bias = make(nq, nk)
    expected = F.scaled_dot_product_attention(q, k, v, bias)
    for attend in ENTRIES:
        if way == "bnhd":
            swapped = (x.transpose(1, 2) for x in (q, k, v))
            out = archflash.attention(*swapped, attn_mask=bias, layout="bnhd").transpose(1, 2)
        elif way == "compile":
            torch._dynamo.reset()
            compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
            out = compiled(q, k, v, attn_mask=bias)
        elif way == "gradient":
            out = attend(q.clone().requires_grad_(), k, v, attn_mask=bias).detach()
        elif way == "simulator":
            with archflash.force("simt"):
                out = attend(q, k, v, attn_mask=bias)
        else:
            with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
                out = attend(q, k, v, attn_mask=bias)
        exact = out.dtype == torch.float32
        torch.testing.assert_close(out.float(), expected, **({} if exact else COARSE))
    torch.testing.assert_close(
        reference.attention(q, k, v, attn_mask=bias, return_lse=False).float(), expected
    )


COARSE = {"rtol": 0.05, "atol": 0.05}


@each_length
@each_variant
def test_explain_sees_the_causal_rule_and_no_mask(
    make: Callable[..., Any], nq: int, nk: int
) -> None:
    q, k, v = qkv(nq, nk)
    decision = archflash.explain(q, k, v, attn_mask=make(nq, nk), device="H200")
    offset = 0 if make is causal_upper_left and nq != nk else None
    same = archflash.explain(q, k, v, causal=True, q_offset=offset, device="H200")
    assert decision.chosen == "simt"
    assert decision.problem == same.problem


@each_variant
@pytest.mark.parametrize("options", [{"window": (2, 1)}, {"q_offset": 1}], ids=str)
def test_a_causal_bias_goes_with_windows_and_offsets(
    make: Callable[..., Any], options: dict[str, Any]
) -> None:
    q, k, v = qkv(5, 9)
    mask = torch.ones(5, 9, dtype=torch.bool).tril(4 if make is causal_lower_right else 0)
    torch.testing.assert_close(
        archflash.attention(q, k, v, attn_mask=make(5, 9), **options),
        archflash.attention(q, k, v, attn_mask=mask, **options),
    )


def test_sdpa_takes_a_causal_bias_with_any_leading_dimensions() -> None:
    q, k, v = qkv(5, 9)
    bias = causal_lower_right(5, 9)
    expected = F.scaled_dot_product_attention(q, k, v, bias)
    for lead in ((), (4,), (1, 2, 4)):
        index = () if len(lead) == 3 else (0,) * (2 - len(lead))
        one = [x[index] if index else x[None] for x in (q, k, v)]
        out = archflash.scaled_dot_product_attention(*one, bias)
        torch.testing.assert_close(out, expected[index] if index else expected[None])


@each_variant
@pytest.mark.parametrize("attend", [*ENTRIES, archflash.explain])
def test_a_causal_bias_of_other_lengths_is_refused(
    make: Callable[..., Any], attend: Callable[..., Any]
) -> None:
    q, k, v = qkv(5, 9)
    for lengths in ((5, 8), (4, 9), (9, 5)):
        with pytest.raises(ValueError, match="5 queries and 9 keys"):
            attend(q, k, v, attn_mask=make(*lengths))


@each_variant
def test_a_causal_bias_with_causal_or_packed_sequences_is_refused(make: Callable[..., Any]) -> None:
    q, k, v = qkv(5, 9)
    bias = make(5, 9)
    for attend in (F.scaled_dot_product_attention, archflash.scaled_dot_product_attention):
        with pytest.raises(ValueError, match="causal"):
            attend(q, k, v, bias, is_causal=True)
    for entry in (archflash.attention, archflash.explain):
        with pytest.raises(ValueError, match="leave causal at False"):
            entry(q, k, v, attn_mask=bias, causal=True)
        ends = torch.tensor([0, 5], dtype=torch.int32)
        with pytest.raises(ValueError, match="packed sequences take no mask"):
            entry(q, k, v, attn_mask=bias, cu_seqlens_q=ends, cu_seqlens_k=ends)


def test_a_causal_bias_does_not_hide_a_wrong_call() -> None:
    q, k, v = qkv(5, 9)
    bias = causal_lower_right(5, 9)
    with pytest.raises(ValueError, match="4 dimensions"):
        archflash.attention(q[0], k[0], v[0], attn_mask=bias)
    with pytest.raises(TypeError, match=r"must be a torch\.Tensor"):
        archflash.attention(None, k, v, attn_mask=bias)  # type: ignore[arg-type]
