"""batch_invariant=True: a row has the same bits whatever else is in the call."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import archflash

from .checks import same_bits
from .executors import executor

on = executor()
IMPLEMENTATIONS = on.kernels("batch_invariant")
every_implementation = pytest.mark.parametrize("name", IMPLEMENTATIONS)

D = {"ampere": 128, "ada": 64, "blackwell_consumer": 96}  # a head dimension for each
HEADS = (4, 2)
KEYS = (1100, 40)  # of two sequences: more than a share, and less than a block
ROWS = (3, 1)


def sequence(number: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    """Packed q, k, v of a sequence. Scores of later keys are larger, so that bases rise."""
    nq, nk = ROWS[number], KEYS[number]
    q, k, v = (
        on.rand(n, heads, d, seed=3 * number + i, dtype="bfloat16")
        for i, (n, heads) in enumerate(((nq, HEADS[0]), (nk, HEADS[1]), (nk, HEADS[1])))
    )
    return q, (k * torch.linspace(1, 4, nk, device=on.device)[:, None, None]).to(k.dtype), v


def bhnd(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(0, 1)[None] for x in tensors]


def attend(name: str, q: Tensor, k: Tensor, v: Tensor, **call: Any) -> tuple[Tensor, Tensor]:
    return on.attend(name, q, k, v, batch_invariant=True, schedules=[1], **call)


@every_implementation
def test_rows_have_their_bits_alone_packed_padded_and_in_another_order(name: str) -> None:
    d = D[name]
    both = [sequence(number, d) for number in range(2)]
    sinks = on.rand(HEADS[0], seed=50)
    alone = [
        on.attend_and_check(
            name, *bhnd(*of_one), batch_invariant=True, causal=True, sinks=sinks, schedules=[0]
        )
        for of_one in both
    ]

    def assert_same(number: int, out: Tensor, lse: Tensor) -> None:
        """`out` (heads, rows, d) and `lse` are those of the sequence on its own."""
        assert same_bits(out.contiguous(), alone[number][0][0].contiguous())
        assert same_bits(lse.contiguous(), alone[number][1][0])

    # Row by row, one query each.
    q, k, v = both[0]
    for row in range(ROWS[0]):
        out, lse = attend(
            name, *bhnd(q[row : row + 1], k, v), causal=True, sinks=sinks,
            q_offset=KEYS[0] - ROWS[0] + row,
        )  # fmt: skip
        assert same_bits(out[0, :, 0], alone[0][0][0, :, row])
        assert same_bits(lse[0, :, 0], alone[0][1][0, :, row])

    # Packed, in either order. Other sequences lie between, and rows of none behind.
    more = on.rand(70, HEADS[0], d, seed=60, dtype="bfloat16")
    for order in ((0, 1), (1, 0)):
        first, second = order
        q = torch.cat([both[first][0], more, both[second][0], more[:5]])
        k, v = (torch.cat([both[first][i], both[0][i][:30], both[second][i]]) for i in (1, 2))
        out, lse = attend(
            name, q, k, v, causal=True, sinks=sinks,
            cu_seqlens_q=on.cu_seqlens([ROWS[first], 70, ROWS[second]]),
            cu_seqlens_k=on.cu_seqlens([KEYS[first], 30, KEYS[second]]),
            **({"max_seqlen_k": KEYS[0]} if first == 0 else {}),
        )  # fmt: skip
        start = ROWS[first] + 70
        end = start + ROWS[second]
        assert_same(first, out[: ROWS[first]].transpose(0, 1), lse[:, : ROWS[first]])
        assert_same(second, out[start:end].transpose(0, 1), lse[:, start:end])

    # Padded to the same lengths: q in front or behind, keys behind.
    nq = 20
    q = on.rand(2, HEADS[0], nq, d, seed=70, dtype="bfloat16")
    k, v = (on.rand(2, HEADS[1], KEYS[0] + 9, d, seed=i, dtype="bfloat16") for i in (71, 72))
    starts = (nq - ROWS[0], 0)
    for number, (of_q, of_k, of_v) in enumerate(both):
        rows = slice(starts[number], starts[number] + ROWS[number])
        q[number, :, rows] = of_q.transpose(0, 1)
        k[number, :, : KEYS[number]] = of_k.transpose(0, 1)
        v[number, :, : KEYS[number]] = of_v.transpose(0, 1)
    offsets = [KEYS[i] - ROWS[i] - starts[i] for i in range(2)]
    out, lse = attend(name, q, k, v, causal=True, sinks=sinks, q_offset=on.int32(*offsets))
    for number in range(2):
        rows = slice(starts[number], starts[number] + ROWS[number])
        assert_same(number, out[number, :, rows], lse[number, :, rows])


@every_implementation
def test_other_rows_of_a_warp_change_no_bit(name: str) -> None:
    """One row has huge scores, and one is not finite: their warp raises bases more often, and
    rounds scores of large bases.
    """
    d = D[name]
    q, k, v = on.qkv(9, 150, d, dtype="bfloat16", heads=HEADS)
    k = (k * torch.linspace(1, 6, 150, device=on.device)[:, None]).to(k.dtype)
    clean, clean_lse = attend(name, q, k, v)
    q[0, 0, 4] *= 1e8
    q[0, 1, 2, 5] = math.inf
    q[0, 3, 6] *= 40
    out, lse = attend(name, q, k, v)
    others = torch.ones(HEADS[0], 9, dtype=torch.bool, device=on.device)
    others[0, 4] = others[1, 2] = others[3, 6] = False
    assert not same_bits(out[0], clean[0])
    assert same_bits(out[0][others], clean[0][others])
    assert same_bits(lse[0][others], clean_lse[0][others])


@every_implementation
def test_windows_and_softcap_begin_shares_anywhere(name: str) -> None:
    q, k, v = on.qkv(5, 1300, D[name], dtype="float16", heads=HEADS)
    call: dict[str, Any] = {"window": (310, 0), "softcap": 5.0}
    out, lse = on.attend_and_check(name, q, k, v, batch_invariant=True, schedules=[2], **call)
    last, last_lse = attend(name, q[:, :, 4:], k, v, **call)
    assert same_bits(last[0, :, 0], out[0, :, 4])
    assert same_bits(last_lse[0, :, 0], lse[0, :, 4])


def test_a_call_without_keys_or_with_one_share_is_combined_too() -> None:
    for keys in (0, 30):
        q, k, v = on.qkv(2, keys, 64, dtype="bfloat16", heads=(1, 1))
        plan = archflash.explain(q, k, v, implementation="ampere", batch_invariant=True).plan
        assert plan is not None
        assert [launch["kernel"] for launch in plan.to_dict()["launches"]] == [
            "ampere_attention_fwd_bf16_d64_few", "ampere_combine_bf16",
        ]  # fmt: skip
        on.attend_and_check("ampere", q, k, v, batch_invariant=True, schedules=[3])
