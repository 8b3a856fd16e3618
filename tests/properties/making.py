"""The tensors of random problems."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from archflash import masks, summarize_mask
from tests import kvcache_cases
from tests.core_set.odd_strides import laid_out
from tests.properties.drawing import FP8, Given, Problem

FP8_DTYPES = tuple(getattr(torch, name) for name in FP8)


class Maker:
    """Random tensors of one problem on a device."""

    def __init__(self, seed: int, device: str) -> None:
        self.device = device
        self._seed = 1000 * seed
        self._generator = torch.Generator().manual_seed(seed)

    def rand(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(self.device, dtype)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self._generator).to(self.device)

    def integers(self, low: int, high: int, shape: Sequence[int]) -> Tensor:
        drawn = torch.randint(low, high, shape, generator=self._generator, dtype=torch.int32)
        return drawn.to(self.device)

    def int32(self, values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def strided(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Numbers "bhnd" with these strides."""
        self._seed += 1
        if 0 in shape:
            return torch.empty(tuple(shape), dtype=dtype, device=self.device)
        return laid_out(name, tuple(shape), dtype, self.device, self._seed)


def call_of(problem: Problem, device: str) -> tuple[list[Tensor], dict[str, Any]]:
    """q, k, v and the options of a call of attention or of its gradients."""
    given, make = problem.given, Maker(problem.seed, device)
    dtype, (d, dv), (heads_q, heads_kv) = getattr(torch, given["dtype"]), *_two(given)
    packed = given.get("packed")
    if packed is None:
        batch, nq, nk = given["batch"], given["nq"], given["nk"]
    else:
        batch = 1
        nq, nk = (sum(packed[x]) + gap for x, gap in zip("qk", packed["gaps"], strict=True))
    shapes = ((batch, heads_q, nq, d), (batch, heads_kv, nk, d), (batch, heads_kv, nk, dv))
    tensors = [
        make.strided(name, shape, dtype)
        for name, shape in zip(given["strides"], shapes, strict=True)
    ]
    options = _options(make, given["options"], shapes[0], nk, dtype)
    if packed is not None:
        tensors = [x[0].transpose(0, 1) for x in tensors]
        for x in "qk":
            options[f"cu_seqlens_{x}"] = make.int32([0, *itertools.accumulate(packed[x])])
            if packed["hints"]:
                options[f"max_seqlen_{x}"] = max(packed[x], default=0)
        _of_batch(make, given, options, len(packed["q"]))
    else:
        if options.get("layout") == "bnhd":
            tensors = [x.transpose(1, 2) for x in tensors]
        _of_batch(make, given, options, batch)
        if words := given["options"].get("key_indices"):
            options |= lists_of(make, words, (batch, heads_kv, nq), nk)
        if given.get("block_scales"):
            sizes = {"q": (nq, -(-d // 32)), "k": (nk, -(-d // 32)), "v": (-(-nk // 32), dv)}
            for (x, (rows, columns)), shape in zip(sizes.items(), shapes, strict=True):
                powers = make.integers(124, 130, (*shape[:2], rows, columns)).to(torch.uint8)
                powers = powers.transpose(1, 2) if options.get("layout") == "bnhd" else powers
                options[f"{x}_descale"] = powers.view(torch.float8_e8m0fnu)
    return tensors, options


def _two(given: Given) -> tuple[tuple[int, int], tuple[int, int]]:
    return given["dims"], given["heads"]


def _of_batch(make: Maker, given: Given, options: dict[str, Any], batch: int) -> None:
    """Makes the options that have a number for each sequence."""
    heads = {"q": given["heads"][0], "k": given["heads"][1], "v": given["heads"][1]}
    _slopes_and_descales(make, given["options"], options, batch, heads, given)


def _slopes_and_descales(
    make: Maker, asked: Given, options: dict[str, Any], batch: int, heads: dict[str, int],
    given: Given,
) -> None:  # fmt: skip
    if "alibi_slopes" in asked:
        shape = (heads["q"],) if asked["alibi_slopes"] == "heads" else (batch, heads["q"])
        options["alibi_slopes"] = make.uniform(*shape)
    if asked.get("q_offset") == "tensor":
        options["q_offset"] = make.integers(-9, 90, (batch,))
    for x, count in heads.items():
        if kind := asked.get(f"{x}_descale"):
            rows = given.get("nq" if x == "q" else "nk", 0)
            shapes = {
                "one": (1,), "()": (), "heads": (count,), "batch": (batch, count),
                "blocks": (batch, count, -(-rows // 64)),
            }  # fmt: skip
            options[f"{x}_descale"] = make.uniform(*shapes[kind]) + 0.25


# Options whose shapes need more than that of q.
_OF_BATCH = ("alibi_slopes", "q_descale", "k_descale", "v_descale", "key_indices")


def lists_of(make: Maker, words: Given, sizes: Sequence[int], nk: int) -> dict[str, Tensor]:
    """key_indices, some of them no keys, and topk_lengths; sizes: of sequences, heads of k and
    queries.
    """
    *outer, nq = sizes
    shape = [1 if one else n for one, n in zip(words["ones"], outer, strict=True)]
    shape.append(-(-nq // 64) if words["blocks"] else nq)
    count = words["count"]
    if words.get("twice"):
        chosen = make.integers(-3, nk + 3, (*shape, count))
    else:
        order = make.uniform(*shape, max(nk + 6, count)).argsort(-1)
        chosen = (order[..., :count] - 3).int()
    lists = {"key_indices": chosen}
    if words["lengths"]:
        lengths = make.integers(-1, count + 2, shape)
        lists["topk_lengths"] = lengths
        # Behind the length, numbers of keys and numbers that would lie outside of every tensor.
        behind = make.int32(range(count)) >= lengths[..., None]
        far = make.uniform(*chosen.shape) < 0.5
        chosen.masked_fill_(behind & far, 2**31 - 1)
    return lists


def _options(
    make: Maker, asked: Given, shape: Sequence[int], nk: int, dtype: torch.dtype
) -> dict[str, Any]:
    """Options of one call whose q has this shape "bhnd"; those of a batch are left out."""
    options = {
        name: value for name, value in asked.items() if name not in _OF_BATCH and value != "tensor"
    }
    batch, heads, nq, _ = shape
    if "sinks" in asked:
        options["sinks"] = make.rand(heads)
        if asked["sinks"] == "infinite":
            options["sinks"][0] = math.inf
            options["sinks"][-1] = -math.inf
    if "attn_mask" in asked:
        options["attn_mask"] = mask_of(make, asked["attn_mask"], (batch, heads, nq, nk), dtype)
    if "key_ranges" in asked:
        options["key_ranges"] = ranges_of(make, asked["key_ranges"], (batch, heads, nq), nk)
    if "block_mask" in asked:
        words = asked["block_mask"]
        if words["kind"] == "summary":
            full = options["attn_mask"]
            options["block_mask"] = summarize_mask(full.expand(*full.shape[:2], nq, nk))
        else:
            sizes = [1 if one else n for one, n in zip(words["ones"], shape[:2], strict=True)]
            blocks = make.integers(0, 2, (*sizes, -(-nq // 64), -(-nk // 64)))
            options["block_mask"] = blocks.to(getattr(torch, words["kind"]))
    if options.get("dropout_p") is not None:
        options["rng_state"] = torch.tensor([problem_seed(nq, nk), 4], device=make.device)
    if "out_dtype" in asked:
        options["out_dtype"] = getattr(torch, asked["out_dtype"])
    return options


def problem_seed(nq: int, nk: int) -> int:
    """A seed for dropout, which differs between problems."""
    return (1 << 40) + 1000 * nq + nk


def mask_of(make: Maker, words: Given, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An attn_mask, some of whose dimensions have size 1 or stride 0."""
    sizes = [1 if one else n for one, n in zip(words["ones"], shape, strict=True)]
    kept = make.uniform(*sizes) >= words["hidden"]
    if words["kind"] == "bool":
        mask = kept
    else:
        kind = torch.float32 if words["kind"] == "float32" or dtype in FP8_DTYPES else dtype
        mask = make.rand(*sizes, dtype=kind).masked_fill(~kept, -math.inf)
    return mask.expand(*shape) if words["expanded"] else mask


def ranges_of(make: Maker, words: Given, shape: Sequence[int], nk: int) -> Tensor:
    """key_ranges, some of them empty or beyond the keys."""
    sizes = [1 if one else n for one, n in zip(words["ones"], shape, strict=True)]
    begin = make.integers(-3, nk + 2, (*sizes, words["count"]))
    return torch.stack([begin, begin + make.integers(-2, nk + 4, begin.shape)], -1)


def cache_call_of(problem: Problem, device: str) -> kvcache_cases.CacheCall:
    """The call of attention_with_kvcache."""
    given, make = problem.given, Maker(problem.seed, device)
    made, lengths = dict(given["made"]), given["lengths"]
    dtype = getattr(torch, made["dtype"])
    made |= {name: getattr(torch, made[name]) for name in ("dtype", "cache_dtype") if name in made}
    q_lengths = made.get("q_lengths")
    shape = (len(lengths), made["heads"][0], made["nq"], made["d"])
    if q_lengths is not None:
        shape = (1, made["heads"][0], sum(q_lengths) + 2, made["d"])
    options = _options(make, given["options"], shape, made["capacity"], dtype)
    heads = {"q": made["heads"][0], "k": made["heads"][1], "v": made["heads"][1]}
    _slopes_and_descales(make, given["options"], options, len(lengths), heads, {})
    if words := given["options"].get("key_indices"):
        sizes = (len(lengths), made["heads"][1], made["nq"])
        options |= lists_of(make, words, sizes, made["capacity"])
    call = kvcache_cases.make(lengths, seed=problem.seed, device=device, **made, **options)
    if made.get("qv") and made["dv"] == 512:
        call = kvcache_cases.with_latent_rows(call, given.get("packed_rows"))
    return kvcache_cases.with_places(call) if given.get("physical") else call


def block_options_of(given: Given, make: Maker) -> tuple[Tensor, dict[str, Any]]:
    """What a list of blocks lets each query see, bool ``(batch or 1, heads or 1, nq, nk)``, and the
    options of the call that are made of it.
    """
    nq, nk, (rows, keys) = given["nq"], given["nk"], given["block"]
    if given["form"] == "table":  # of blocks of multiples of 64
        rows, keys = (-(-size // 64) * 64 for size in (rows, keys))
    outer = [1 if one else n for one, n in zip(
        given["ones"], (given["batch"], given["heads"][0]), strict=True
    )]  # fmt: skip
    if given["form"] in ("bsr", "ragged"):
        outer = [1, 1 if given["form"] == "bsr" else outer[1]]
    shape = (*outer, -(-nq // rows), -(-nk // keys))
    table = make.uniform(*shape) < given["seen"]
    counts = table.sum(-1).int()
    # Numbers of blocks, those that are seen first; behind the count others.
    lists = torch.where(table, make.uniform(*shape), 2.0).argsort(-1).int()
    sizes = None
    if given["form"] == "chunks":
        chunks = make.integers(-1, shape[3] + 1, (*outer, nq, 3))
        seen = (chunks[..., None] == make.int32(range(nk)) // keys).any(-2)
        return seen, {"key_ranges": masks.from_chunks(chunks, keys, nk)}
    if given["form"] == "ragged":
        of_rows, of_keys = (_cut(make, n, count) for n, count in ((nq, shape[2]), (nk, shape[3])))
        options = masks.from_ragged_blocks(table[0], of_rows[None], of_keys[None], nq, nk)
        by_row = table.repeat_interleave(of_rows.to(table.device), 2)
        return by_row.repeat_interleave(of_keys.to(table.device), 3), options
    seen = table.repeat_interleave(rows, 2)[:, :, :nq].repeat_interleave(keys, 3)[..., :nk]
    if given["form"] == "bsr":
        ends = torch.nn.functional.pad(counts[0, 0].cumsum(0), (1, 0)).int()
        listed = lists[0, 0][make.int32(range(shape[3])) < counts[0, 0, :, None]]
        return seen, masks.from_bsr(ends, listed, (rows, keys), nq, nk)
    if given["form"] == "table":
        return seen, {"block_mask": masks.from_blocks(table, (rows, keys), nq, nk)}
    if given["key_sizes"]:
        sizes = make.integers(0, keys + 1, (shape[3],))
        place = make.int32(range(nk))
        seen = seen & (place % keys < sizes[place // keys])
    options = masks.from_block_lists(lists, counts, (rows, keys), nq, nk, key_sizes=sizes)
    return seen, options


def _cut(make: Maker, n: int, parts: int) -> Tensor:
    """Sizes of so many parts of n, some of them 0."""
    ends = make.integers(0, n + 1, (parts - 1,)).sort().values.tolist()
    return torch.tensor([0, *ends, n]).diff().to(make.device)
