"""The random bits of dropout, and what dropout_p and rng_state refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import archflash


def philox(counter: tuple[int, ...], key: tuple[int, int], rounds: int = 7) -> tuple[int, ...]:
    """Philox 4x32 in Python's integers."""
    word = 0xFFFFFFFF
    for _ in range(rounds):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = (
            (b >> 32) ^ counter[1] ^ key[0],
            b & word,
            (a >> 32) ^ counter[3] ^ key[1],
            a & word,
        )
        key = ((key[0] + 0x9E3779B9) & word, (key[1] + 0xBB67AE85) & word)
    return counter


def test_philox_of_ten_rounds_gives_the_published_numbers() -> None:
    """The known answers of Random123 (kat_vectors, philox4x32, 10 rounds)."""
    zeros = philox((0, 0, 0, 0), (0, 0), 10)
    assert zeros == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = philox((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, 10)
    assert ones == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)


def test_the_mask_is_made_of_philox_bits_of_each_weight() -> None:
    seed, offset, p = 0x0123456789ABCDEF, (3 << 32) + 9, 0.4
    shape = (2, 3, 37, 70)
    keep = archflash.dropout_mask(shape, p, torch.tensor([seed, offset]))
    key = (seed & 0xFFFFFFFF, seed >> 32 ^ 3)
    for batch, head, query, at in ((0, 0, 0, 0), (1, 2, 36, 69), (1, 0, 8, 17), (0, 2, 25, 40)):
        counter = (query // 16 * 8 + query % 8, at // 32 * 8 + at % 8, batch * 3 + head, 9)
        word = philox(counter, key)[query // 8 % 2 * 2 + at // 16 % 2]
        bits = word >> (16 * (at // 8 % 2)) & 0xFFFF
        assert bool(keep[batch, head, query, at]) == (bits >= round(p * 65536))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_as_many_weights_are_dropped_as_asked_for(p: float) -> None:
    torch.manual_seed(0)
    keep = archflash.dropout_mask((4, 4, 256, 256), p, archflash.dropout_state("cpu"))
    assert float(keep.float().mean()) == pytest.approx(1 - p, abs=0.005)
    for dim in range(4):  # no row, column, head or batch is kept or dropped as a whole
        spread = keep.float().mean([i for i in range(4) if i != dim]).std()
        assert float(spread) < 0.05


def test_p_of_0_drops_nothing_and_makes_no_state() -> None:
    q = torch.randn(1, 1, 4, 8)
    before = torch.get_rng_state()
    out = archflash.attention(q, q, q, dropout_p=0.0)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(out, archflash.attention(q, q, q))


STATE = torch.tensor([1, 2])


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"dropout_p": 1.0}, ValueError, "dropout_p is 1: it must be at least 0 and less than 1"),
        ({"dropout_p": -0.1}, ValueError, "dropout_p is -0.1"),
        ({"dropout_p": "a"}, TypeError, "dropout_p is 'a'"),
        ({"dropout_p": 0.1, "rng_state": STATE.int()}, TypeError, "rng_state has dtype"),
        ({"dropout_p": 0.1, "rng_state": STATE[:1]}, ValueError, "rng_state has shape"),
        ({"dropout_p": 0.1, "rng_state": 5}, TypeError, "rng_state is 5"),
        ({"dropout_p": 0.1, "batch_invariant": True}, ValueError, "batch_invariant=True"),
    ],
)
def test_wrong_calls_are_refused(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(error, match=text):
        archflash.attention(q, q, q, **options)


def test_the_backward_pass_needs_the_state_of_the_call() -> None:
    q = torch.randn(1, 1, 4, 8)
    out, lse = archflash.attention(q, q, q, return_lse=True)
    with pytest.raises(ValueError, match="rng_state is None"):
        archflash.attention_backward(out, q, q, q, out, lse, dropout_p=0.5)


@pytest.mark.parametrize("name", ["ada", "blackwell_consumer", "blackwell_dc"])
def test_folders_without_dropout_say_so(name: str) -> None:
    q = torch.empty(1, 2, 64, 64, dtype=torch.bfloat16, device="meta")
    gpu = {"ada": "RTX 4090", "blackwell_dc": "B200"}.get(name, "RTX 5090")
    decision = archflash.explain(q, q, q, dropout_p=0.1, device=gpu)
    assert decision.chosen == "ampere"
    assert any("drops no weights" in reason for reason in decision.reasons[name])
