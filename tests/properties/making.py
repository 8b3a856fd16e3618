"""The tensors of random problems."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from archflash import summarize_mask
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
    queries. A list names no key twice, which calls with a cache check.
    """
    *outer, nq = sizes
    shape = [1 if one else n for one, n in zip(words["ones"], outer, strict=True)]
    shape.append(-(-nq // 64) if words["blocks"] else nq)
    order = make.uniform(*shape, max(nk + 6, words["count"])).argsort(-1)
    lists = {"key_indices": (order[..., : words["count"]] - 3).int()}
    if words["lengths"]:
        lists["topk_lengths"] = make.integers(-1, words["count"] + 2, shape)
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
    return kvcache_cases.make(lengths, seed=problem.seed, device=device, **made, **options)
