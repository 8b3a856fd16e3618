"""Calls that checks of arguments let through: what other libraries take, and what makers of masks
can read, though it is not of the type that a signature names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import archflash
from archflash import masks
from archflash.compat import flash_attn as fa2
from archflash.compat import flash_attn_interface as fa3
from archflash.compat import flash_mla, sageattention, sageattn3
from archflash.compat.flash_attn import bert_padding, cute

Q = torch.randn(2, 5, 4, 16)
CACHES = {"k_cache": torch.randn(2, 8, 4, 16), "v_cache": torch.randn(2, 8, 4, 16)}
ENDS = torch.tensor([0, 3, 5], dtype=torch.int32)
LISTS = torch.zeros(2, 1, 2, dtype=torch.int32)


def int32(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


# --- FlashAttention's masks of padded batches ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32, torch.uint8])
def test_masks_of_padded_batches_have_any_real_dtype(dtype: torch.dtype) -> None:
    x = torch.randn(2, 4, 3)
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]]).bool()
    unused = torch.tensor([[0, 0, 0, 1], [0, 1, 0, 0]]).bool()
    for given in ((mask,), (mask, unused)):
        wanted = bert_padding.unpad_input(x, *given)
        same(bert_padding.unpad_input(x, *(y.to(dtype) for y in given)), wanted)
    lengths = torch.tensor([[2, 1, 0, 0], [3, 0, 0, 0]])
    pack = bert_padding.unpad_input_for_concatenated_sequences
    same(pack(x, lengths.to(dtype)), pack(x, lengths))


def test_masks_of_padded_batches_are_not_complex() -> None:
    x, mask = torch.randn(2, 4, 3), torch.ones(2, 4, dtype=torch.complex64)
    with pytest.raises(ValueError, match=r"attention_mask has dtype torch.complex64"):
        bert_padding.unpad_input(x, mask)
    with pytest.raises(ValueError, match=r"attention_mask_in_length has dtype torch.complex64"):
        bert_padding.unpad_input_for_concatenated_sequences(x, mask)


# --- bools ---


def _of(function: Callable[..., Any], *flags: str, **given: Any) -> tuple[Any, ...]:
    return function, given, flags


PACKED = {
    **dict.fromkeys("qkv", Q[0]), "cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS, "max_seqlen_q": 3,
    "max_seqlen_k": 3,
}  # fmt: skip
PLAIN = dict.fromkeys("qkv", Q)
OF_FLASH = ("causal", "deterministic", "return_attn_probs")
OF_CACHE = ("causal", "rotary_interleaved", "return_softmax_lse")
TURNED = {"rotary_cos": torch.ones(16, 8), "rotary_sin": torch.zeros(16, 8)}
CACHED = {"q": Q, **CACHES, "k": Q, "v": Q, "cache_seqlens": int32(1, 2), **TURNED}
LATENT = {"q": torch.randn(2, 1, 2, 576), "k_cache": torch.randn(3, 8, 1, 576), "head_dim_v": 512}
WITH_BOOLS = {
    "2": _of(fa2.flash_attn_func, *OF_FLASH, **PLAIN),
    "2, qkv": _of(fa2.flash_attn_qkvpacked_func, *OF_FLASH, qkv=torch.stack([Q, Q, Q], 2)),
    "2, packed": _of(fa2.flash_attn_varlen_func, *OF_FLASH, **PACKED),
    "2, pages": _of(
        fa2.flash_attn_varlen_func,
        *OF_FLASH,
        **PACKED | {"k": torch.randn(4, 8, 4, 16), "v": torch.randn(4, 8, 4, 16)},
        block_table=int32([0, 1], [2, 3]),
    ),
    "2, cache": _of(fa2.flash_attn_with_kvcache, *OF_CACHE, **CACHED),
    "3": _of(fa3.flash_attn_func, *OF_FLASH, **PLAIN),
    "3, packed": _of(fa3.flash_attn_varlen_func, *OF_FLASH, **PACKED),
    "3, cache": _of(fa3.flash_attn_with_kvcache, *OF_CACHE, **CACHED),
    "4": _of(cute.flash_attn_func, "causal", "deterministic", "return_lse", **PLAIN),
    "4, packed": _of(
        cute.flash_attn_varlen_func, "causal", "deterministic", "return_lse", **PACKED
    ),
    "MLA": _of(
        flash_mla.flash_mla_with_kvcache, "causal", "is_fp8_kvcache", **LATENT,
        block_table=int32([0], [1]), cache_seqlens=int32(5, 3),
    ),
    "MLA, lists": _of(
        flash_mla.flash_mla_with_kvcache, "causal", "is_fp8_kvcache", **LATENT, block_table=None,
        cache_seqlens=None, indices=LISTS,
    ),
    "sage": _of(sageattention.sageattn, "is_causal", "return_lse", **PLAIN),
    "sage, packed": _of(sageattention.sageattn_varlen, "is_causal", **PACKED),
    "sage 3": _of(sageattn3.sageattn3_blackwell, "is_causal", **PLAIN),
}  # fmt: skip
ONLY_FALSE = {("MLA", "is_fp8_kvcache"), *(("MLA, lists", x) for x in ("causal", "is_fp8_kvcache"))}


@pytest.mark.parametrize("name", WITH_BOOLS)
def test_other_libraries_bools_may_be_none_numbers_or_numpys(name: str) -> None:
    function, given, flags = WITH_BOOLS[name]

    def call(**flag: Any) -> Any:
        return function(**{x: y.clone() if x in CACHES else y for x, y in given.items()} | flag)

    for flag in flags:
        wanted = call(**{flag: False})
        for value in (None, 0, np.bool_(False), torch.tensor(False)):
            same(call(**{flag: value}), wanted)
        if (name, flag) in ONLY_FALSE:
            continue
        wanted = call(**{flag: True})
        for value in (1, np.bool_(True), torch.tensor(True)):
            same(call(**{flag: value}), wanted)


def test_an_error_does_not_blame_a_bool_that_is_none() -> None:
    with pytest.raises(TypeError, match=r"k is 3: it must be a torch.Tensor"):
        fa2.flash_attn_func(Q, 3, Q, causal=None, deterministic=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [1, np.bool_(True)])
def test_makers_of_masks_take_bools_of_numpy(value: Any) -> None:
    rows = torch.full((1, 1, 7, 1), 5, dtype=torch.int32)
    same(masks.from_flashmask(rows, 5, causal=value), masks.from_flashmask(rows, 5, causal=True))


# --- makers of masks ---

PARENTS: dict[str, Callable[[], Iterable[int]]] = {
    "iterator": lambda: iter([-1, 0, 0]),
    "generator": lambda: (x for x in (-1, 0, 0)),
    "keys of a dict": lambda: {-1: "a", 0: "b", 1: "c"},
    "map": lambda: map(int, ("-1", "0", "0")),
    "numpy": lambda: np.array([-1, 0, 0]),
    "tensor": lambda: torch.tensor([-1, 0, 0]),
}


@pytest.mark.parametrize("name", PARENTS)
def test_a_tree_is_any_iterable_of_ints(name: str) -> None:
    chosen = [int(x) for x in PARENTS[name]()]
    same(masks.tree(PARENTS[name](), 3), masks.tree(chosen, 3))


@pytest.mark.parametrize("parents", [iter([-1, 0.5]), iter("ab"), "ab", 3, None])
def test_a_tree_of_anything_else_is_refused(parents: Any) -> None:
    with pytest.raises(TypeError, match=r"parents is .*: it must be ints in their order"):
        masks.tree(parents, 3)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64])
def test_tables_of_blocks_may_be_of_integers(dtype: torch.dtype) -> None:
    table = torch.tensor([[[[1, 0, 1], [0, 1, 1]]]]).bool()
    whole = masks.from_blocks(table, (64, 64), 100, 150)
    same(masks.from_blocks(table.to(dtype), (64, 64), 100, 150), whole)
    same(masks.from_blocks(table.to(dtype), np.array([64, 64]), 100, 150), whole)  # type: ignore[arg-type]
    sizes = int32([40, 60]), int32([50, 50, 50])
    wanted = masks.from_ragged_blocks(table[0], *sizes, 100, 150)
    same(masks.from_ragged_blocks(table[0].to(dtype), *sizes, 100, 150), wanted)


def test_tables_of_blocks_are_not_floating() -> None:
    table = torch.ones(1, 1, 2, 3)
    with pytest.raises(
        TypeError, match=r"table has dtype torch.float32: it must be bool or of int"
    ):
        masks.from_blocks(table, (64, 64), 100, 150)
    with pytest.raises(
        TypeError, match=r"table has dtype torch.float32: it must be bool or of int"
    ):
        masks.from_ragged_blocks(table[0], int32([50, 50]), int32([50, 50, 50]), 100, 150)


def test_ends_and_sizes_of_lists_of_blocks_are_moved_to_the_lists_device() -> None:
    ends, numbers = int32(0, 1, 2), int32(0, 1)
    for of_ends in ("cpu", "meta"):
        made = masks.from_bsr(ends.to(of_ends), numbers.to("meta"), (64, 64), 100, 150)
        assert made["block_mask"].is_meta
    lists = torch.zeros(1, 2, 2, 3, dtype=torch.int32, device="meta")
    made = masks.from_block_lists(
        lists, lists[..., 0], (64, 64), 100, 150, key_sizes=int32(60, 60, 20)
    )
    assert made["attn_mask"].is_meta
    with pytest.raises(TypeError, match="indptr is on meta but indices is on cpu: move one"):
        masks.from_bsr(ends.to("meta"), numbers, (64, 64), 100, 150)


# --- integers of numpy, and what PyTorch takes for a device or a shape ---


def test_integers_of_numpy_are_ints() -> None:
    lengths, x = torch.tensor([2, 3]), torch.randn(3, 32, 64)
    for nq in (np.int64(4), np.array(4)):
        same(masks.prefix_lm(lengths, nq), masks.prefix_lm(lengths, 4))  # type: ignore[arg-type]
    for dim in (-1, -2):
        for quantise in (archflash.quantize_nvfp4, archflash.quantize_mxfp8):
            values = quantise(x, dim=np.int64(dim))[0]  # type: ignore[arg-type]
            same(values.float(), quantise(x, dim=dim)[0].float())
    q, cache = torch.randn(1, 1, 2, 24), torch.randn(1, 5, 1, 24)
    outs = [
        archflash.attention_with_kvcache(q, cache, cache_seqlens=int32(3), dv=dv)
        for dv in (np.int64(8), 8)
    ]
    same(*outs)
    for wrong in (np.array(4.0), np.array([4]), np.array(True), True):
        with pytest.raises(TypeError, match=r"nq is .*: it must be an int"):
            masks.prefix_lm(lengths, wrong)


def test_states_and_shapes_of_dropout() -> None:
    state = archflash.dropout_state(None)
    assert state.device == torch.get_default_device()
    for shape in (np.array([1, 2, 3, 4]), torch.tensor([1, 2, 3, 4]), torch.Size([1, 2, 3, 4])):
        kept = archflash.dropout_mask(shape, 0.5, state)  # type: ignore[arg-type]
        same(kept, archflash.dropout_mask((1, 2, 3, 4), 0.5, state))
    for wrong in (np.ones(4), torch.ones(4), torch.tensor(4), {1, 2, 3, 4}):
        with pytest.raises(ValueError, match=r"shape is .*: it must be four ints"):
            archflash.dropout_mask(wrong, 0.5, state)  # type: ignore[arg-type]
