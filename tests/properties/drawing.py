"""What random problems are, as plain values that a repr shows in full."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.core_set.odd_strides import READABLE, UNREADABLE

Given = dict[str, Any]

FLOATS = ("float32", "float16", "bfloat16")
FP8 = ("float8_e4m3fn", "float8_e5m2")
APPROXIMATE = ("fp16_accumulate", "int8", "int8_pv", "int8_qk", "nvfp4")
SIZES = (0, 1, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33)  # half of them; the others are up to 300
EDGES = (63, 64, 65, 100, 127, 128, 129, 191, 200, 256, 257, 300)
DIMS = (1, 3, 8, 16, 32, 40, 64, 64, 72, 96, 100, 128, 128, 192, 256, 300)
MOST_SCORES = 1 << 18  # of all heads of a problem
LATENT_HEADS = (1, 3, 8, 16, 20, 40, 64, 72, 96, 128)  # of queries that share a head of the cache
MOST_LATENT_ROWS = 256  # of queries, of all heads of a problem
BLOCK_SIZES = (16, 48, 64, 64, 64, 100, 128, 128, 192, 256)  # queries or keys of a listed block


@dataclass(frozen=True)
class Problem:
    """One call.

    Attributes:
        entry: the function that is called, one of ENTRIES.
        seed: of the numbers in its tensors.
        given: sizes, dtypes, strides and options.
    """

    entry: str
    seed: int
    given: Given


class Dice:
    """Draws of random.Random, or of hypothesis in its place."""

    def __init__(self, chance: random.Random, most: int) -> None:
        self.chance, self.most = chance, most

    def maybe(self, share: float = 0.25) -> bool:
        return self.chance.random() < share

    def one_of(self, values: Any) -> Any:
        return values[self.chance.randrange(len(values))]

    def between(self, least: int, most: int) -> int:
        return self.chance.randint(least, most)

    def size(self, least: int = 0) -> int:
        kind = self.between(0, 9)
        if kind < 6:
            drawn = self.one_of(SIZES)
        else:
            drawn = self.one_of(EDGES) if kind < 9 else self.between(0, 300)
        return max(least, min(drawn, self.most))

    def dims(self, multiple: int = 1) -> tuple[int, int]:
        allowed = [n for n in DIMS if n <= self.most and n % multiple == 0] or [self.most]
        d = self.one_of(allowed)
        return d, (self.one_of(allowed) if self.maybe(0.3) else d)

    def heads(self) -> tuple[int, int]:
        of_keys = self.one_of((1, 1, 2, 3))
        return of_keys * self.one_of((1, 1, 2, 4, 5)), of_keys

    def strides(self) -> str:
        return "dense" if self.maybe(0.5) else str(self.one_of(READABLE + UNREADABLE))

    def lengths(self, count: int, least: int = 0) -> tuple[int, ...]:
        return tuple(self.size(least) for _ in range(count))

    def sometimes(self, options: Given, share: float = 0.25, **draws: Callable[[], Any]) -> None:
        """Adds each option with this probability."""
        for name, drawn in draws.items():
            if self.maybe(share):
                options[name] = drawn()


def draw(entry: str, chance: random.Random, most: int = 300) -> Problem:
    """A problem whose sizes are at most `most`."""
    dice = Dice(chance, most)
    return Problem(entry, dice.between(0, 999), ENTRIES[entry](dice))


def options_of(problem: Problem) -> set[str]:
    """What of a problem differs from the plainest call: options that are given, strides, FP8."""
    made = problem.given.get("made", problem.given)
    plain = ("dtype", "dims", "d", "dv", "heads", "batch", "nq", "nk", "capacity", "pad",
             "options", "strides", "layout")  # fmt: skip
    found = {x for x, value in made.items() if x not in plain and value}
    found |= set(problem.given["options"])
    if any(x != "dense" for x in made.get("strides", ())):
        found.add("strides")
    if made.get("layout") not in (None, "bnhd"):  # of a cache
        found.add("layout")
    return found | ({"fp8"} if made["dtype"] in FP8 else set())


def draw_approximate(name: str, chance: random.Random, most: int = 300) -> Problem:
    """A call of 16-bit inputs that asks for an approximation."""
    problem = draw("attention", chance, most)
    refused = ("q_descale", "k_descale", "v_descale", "out_dtype", "num_splits", "batch_invariant",
               "key_indices", "topk_lengths")  # fmt: skip
    options = {x: y for x, y in problem.given["options"].items() if x not in refused}
    dtype = chance.choice(("float16", "bfloat16"))
    given = problem.given | {"dtype": dtype, "options": options | {"approximate": name}}
    return Problem(problem.entry, problem.seed, given)


def draw_block_scaled(chance: random.Random, most: int = 300) -> Problem:
    """A call of MXFP8."""
    problem = draw("attention", chance, most)
    while "packed" in problem.given:
        problem = draw("attention", chance, most)
    refused = ("q_descale", "k_descale", "v_descale", "out_dtype", "num_splits", "batch_invariant",
               "key_indices", "topk_lengths", "approximate", "dropout_p", "alibi_slopes",
               "attn_mask", "key_ranges", "block_mask")  # fmt: skip
    options = {x: y for x, y in problem.given["options"].items() if x not in refused}
    given = problem.given | {"dtype": chance.choice(FP8), "options": options, "block_scales": True}
    return Problem(problem.entry, problem.seed, given)


def _side(dice: Dice) -> int | None:
    return dice.one_of((None, -1, 0, 1, 3, 17, 64, 100))  # type: ignore[no-any-return]


def _scores(dice: Dice, options: Given, cached: bool = False) -> None:
    """Options that calls of every kind have."""
    dice.sometimes(
        options,
        causal=lambda: True,
        window=lambda: (_side(dice), _side(dice)),
        softcap=lambda: dice.one_of((0.0, 1.0, 7.5, 50.0)),
        sinks=lambda: dice.one_of(("normal", "normal", "infinite")),
        scale=lambda: dice.one_of((0.0, 0.03, 0.5, -0.2, 1)),
        alibi_slopes=lambda: dice.one_of(("heads", "batch")),
    )
    dice.sometimes(options, 0.1, num_splits=lambda: dice.one_of((1, 2, 3, 7)))
    if "num_splits" not in options:
        dice.sometimes(options, 0.05, batch_invariant=lambda: True)
    if not cached:
        dice.sometimes(options, q_offset=lambda: dice.one_of((-3, 0, 1, 40, 300, "tensor")))


def _masks(dice: Dice, options: Given, cached: bool = False) -> None:
    """Masks as data. Their shapes: whether they have size 1 there."""
    ones = lambda count: tuple(dice.maybe(0.4) for _ in range(count))  # noqa: E731
    kinds = ("bool",) if cached else ("bool", "bool", "float32", "same")
    dice.sometimes(
        options,
        attn_mask=lambda: {
            "kind": dice.one_of(kinds),
            "ones": ones(4),
            "hidden": dice.one_of((0.0, 0.3, 0.3, 0.95, 1.0)),
            "expanded": dice.maybe(),
        },
    )
    dice.sometimes(options, 0.15, key_ranges=lambda: {"ones": ones(3), "count": dice.between(1, 4)})
    if not cached:
        kinds = ("bool", "int8", "summary") if "attn_mask" in options else ("bool", "int8")
        dice.sometimes(
            options, 0.15, block_mask=lambda: {"kind": dice.one_of(kinds), "ones": ones(2)}
        )


def _lists(dice: Dice, options: Given) -> None:
    """Lists of keys, in place of what does not go with them."""
    for name in (
        "attn_mask", "key_ranges", "block_mask", "alibi_slopes", "dropout_p", "batch_invariant",
        "attention_chunk",
    ):  # fmt: skip
        options.pop(name, None)
    options["key_indices"] = {
        "ones": (dice.maybe(0.4), dice.maybe(0.4)), "blocks": dice.maybe(0.3),
        "count": dice.size(1), "lengths": dice.maybe(0.5), "twice": dice.maybe(0.3),
    }  # fmt: skip


def _attention(dice: Dice, backward: bool = False, lists: bool = False) -> Given:
    fp8 = not backward and not lists and dice.maybe(0.12)
    dtype = dice.one_of(FP8 if fp8 else (*FLOATS, *FLOATS, *FLOATS, "float64"))
    (d, dv), heads, options = dice.dims(), dice.heads(), {}
    given: Given = {"dtype": dtype, "dims": (d, dv), "heads": heads, "options": options}
    _scores(dice, options)
    if not lists and dice.maybe(0.2):
        count = dice.between(0, 4)
        given["packed"] = {
            "q": dice.lengths(count),
            "k": dice.lengths(count),
            "gaps": (dice.between(0, 3), dice.between(0, 3)),  # rows behind the last sequence
            "hints": dice.maybe(),
        }
    else:
        batch, nq, nk = dice.one_of((0, 1, 1, 1, 2, 3)), dice.size(), dice.size()
        while batch * heads[0] * nq * nk > MOST_SCORES:
            nq, nk, batch = nq // 2, nk // 2 + 1, 1
        given |= {"batch": batch, "nq": nq, "nk": nk}
        _masks(dice, options)
    given["strides"] = tuple(dice.strides() for _ in "qkv")
    dice.sometimes(options, 0.3, layout=lambda: "bnhd")
    if not options.get("batch_invariant"):
        dice.sometimes(options, 0.1, dropout_p=lambda: dice.one_of((0.0, 0.1, 0.5, 0.8)))
    if fp8:
        shapes = ("one", "()", "heads", "batch") + (() if "packed" in given else ("blocks",))
        dice.sometimes(options, 0.4, **{f"{x}_descale": lambda: dice.one_of(shapes) for x in "qkv"})
    if lists or (not backward and not fp8 and "packed" not in given and dice.maybe(0.1)):
        _lists(dice, options)
    if backward:
        for name in ("num_splits", "batch_invariant"):
            options.pop(name, None)
        mask = options.get("attn_mask")
        added = mask is not None and mask["kind"] != "bool"
        given["mask_gradient"] = added and not mask["expanded"] and dice.maybe(0.5)
        given["dlse"] = dice.maybe(0.3)
        return given
    dice.sometimes(options, 0.08, approximate=lambda: dice.one_of(APPROXIMATE))
    dice.sometimes(
        options, 0.1, out_dtype=lambda: dice.one_of(("float16", "bfloat16") if fp8 else (dtype,))
    )
    given["pad"] = dice.one_of((0, 0, 1, 8))  # of the output's rows
    return given


def _backward(dice: Dice) -> Given:
    given = _attention(dice, backward=True)
    # The log-sum-exp that is passed is exact: sums of so many equal numbers would be too far off.
    given["strides"] = tuple("dense" if x == "one value" else x for x in given["strides"])
    dice.sometimes(
        given, accumulate=lambda: dice.one_of((0.0, 1.5)), deterministic=lambda: True
    )  # fmt: skip
    if given["dtype"] != "float64":
        dice.sometimes(given, gradient_dtype=lambda: "float32")
    return given


def _cache(dice: Dice, lists: bool = False) -> Given:
    # Kernels copy no cache, and take rows of whole 16 bytes.
    batch, (d, dv), heads = dice.between(1, 3), dice.dims(1 if dice.maybe(0.1) else 8), dice.heads()
    n_new = dice.between(1, 5) if dice.maybe(0.4) else 0
    capacity = max(1, n_new, dice.size())
    lengths = tuple(dice.between(0, capacity - n_new) for _ in range(batch))
    rotary = not lists and d >= 16 and n_new > 0 and dice.maybe(0.4)
    rows = 8 if rotary else 40  # there are 8 positions more than the caches have rows
    nq, options = min(dice.size(), rows), {}
    made: Given = {
        "nq": nq, "heads": heads, "d": d, "dv": dv, "capacity": capacity,
        "dtype": dice.one_of(FLOATS), "layout": dice.one_of(("bnhd", "bnhd", "bhnd")),
        "n_new": n_new,
    }  # fmt: skip
    dice.sometimes(made, 0.4, page_size=lambda: dice.one_of((1, 3, 7, 16, 64, 256)))
    if not lists:
        dice.sometimes(made, 0.2, q_lengths=lambda: tuple(min(dice.size(), rows) for _ in lengths))
    dice.sometimes(made, 0.2, leftpad=lambda: tuple(dice.between(0, n) for n in lengths))
    if "page_size" not in made and dice.maybe(0.2):
        made["rows_of"] = tuple((2 * i + 1) % (batch + 1 + batch % 2) for i in range(batch))
    if not lists and made["dtype"] != "float32" and dice.maybe(0.2):
        made["cache_dtype"] = dice.one_of(FP8)
        shapes = ("one", "()", "heads", "batch")
        dice.sometimes(options, 0.4, **{f"{x}_descale": lambda: dice.one_of(shapes) for x in "kv"})
    if rotary:
        made["rotary"] = dice.one_of([x for x in (16, 32, 64, d // 16 * 16) if x <= d])
        dice.sometimes(options, 0.5, rotary_interleaved=lambda: True)
    if not lists:
        dice.sometimes(made, 0.05, qv=lambda: True)
    dice.sometimes(options, 0.1, attention_chunk=lambda: dice.one_of((1, 5, 64)))
    _scores(dice, options, cached=True)
    _masks(dice, options, cached=True)
    alone = "q_lengths" not in made and "cache_dtype" not in made and not rotary
    if lists or (alone and dice.maybe(0.15)):
        _lists(dice, options)
    given = {"lengths": lengths, "made": made, "options": options}
    if lists and n_new == 0 and "page_size" in made and "leftpad" not in made:
        given["physical"] = _physical(dice, options)
    return given


def _physical(dice: Dice, options: Given) -> bool:
    """Whether entries are places in the cache, which causal and window do not go with."""
    return not {"causal", "window"} & options.keys() and dice.maybe(0.5)


def _latent_rows(dice: Dice) -> Given:
    """A cache of latent rows, of 16 bits or packed, and lists of them."""
    form = dice.one_of((None, None, "fp8_656", "fp8_584"))
    heads_kv = 1 if form else dice.one_of((1, 1, 1, 2))
    batch, capacity = dice.between(1, 2), max(1, dice.size())
    made: Given = {
        "nq": min(dice.size(), 70), "heads": (heads_kv * dice.one_of(LATENT_HEADS), heads_kv),
        "d": 64, "dv": 512, "qv": True, "capacity": capacity,
        "dtype": "bfloat16" if form else dice.one_of(("float16", "bfloat16")),
    }  # fmt: skip
    while batch * made["heads"][0] * made["nq"] > MOST_LATENT_ROWS:
        batch, made["nq"] = 1, made["nq"] // 2
    lengths = tuple(dice.between(0, capacity) for _ in range(batch))
    if form or dice.maybe(0.7):
        made["page_size"] = dice.one_of((1, 3, 7, 16, 64))
    options: Given = {}
    _scores(dice, options, cached=True)
    _lists(dice, options)
    given: Given = {"lengths": lengths, "made": made, "options": options, "packed_rows": form}
    given["physical"] = "page_size" in made and _physical(dice, options)
    return given


def _key_lists(dice: Dice) -> Given:
    """Calls with lists of keys, of every kind."""
    kind = dice.one_of(("attention", "autograd", "caches", "latent rows", "latent rows"))
    if kind == "latent rows":
        return {"kind": kind, **_latent_rows(dice)}
    if kind == "caches":
        return {"kind": kind, **_cache(dice, lists=True)}
    return {"kind": kind, **_attention(dice, backward=kind == "autograd", lists=True)}


def _block_lists(dice: Dice) -> Given:
    """Lists of blocks, with the masks that they stand for."""
    heads, batch = dice.heads(), dice.between(1, 2)
    options: Given = {}
    dice.sometimes(
        options, causal=lambda: True, softcap=lambda: 7.5, sinks=lambda: "normal",
        scale=lambda: dice.one_of((0.03, -0.2)), layout=lambda: "bnhd",
    )  # fmt: skip
    nq, nk = dice.size(1), dice.size(1)
    while batch * heads[0] * nq * nk > MOST_SCORES:
        nq, batch = nq // 2, 1
    return {
        "form": dice.one_of(("lists", "lists", "lists", "bsr", "ragged", "chunks", "table")),
        "block": (dice.one_of(BLOCK_SIZES), dice.one_of(BLOCK_SIZES)),
        "seen": dice.one_of((0.0, 0.1, 0.25, 0.6, 1.0)), "ones": (dice.maybe(0.4), dice.maybe(0.4)),
        "key_sizes": dice.maybe(0.3), "backward": dice.maybe(0.4),
        "dtype": dice.one_of(("float16", "bfloat16", "bfloat16", "float32")),
        "dims": dice.dims(8), "heads": heads, "batch": batch, "nq": nq, "nk": nk,
        "strides": ("dense", "dense", "dense"), "options": options, "pad": 0, "dlse": False,
        "mask_gradient": False,
    }  # fmt: skip


def _merge(dice: Dice) -> Given:
    return {
        "parts": dice.between(1, 9),
        "shape": (dice.between(0, 2), dice.between(1, 4), min(dice.size(), 70), dice.dims()[0]),
        "dtype": dice.one_of(FLOATS),
        "layout": dice.one_of(("bhnd", "bnhd")),
        "packed": dice.maybe(),
        "stacked": dice.maybe(),
        "strides": dice.strides(),
        "unseen": dice.one_of((0.0, 0.3, 1.0)),
    }


def _quantise(dice: Dice) -> Given:
    packed = dice.maybe()
    return {
        "shape": (dice.between(0, 2), dice.between(1, 3), dice.size(), dice.dims()[0]),
        "packed": packed,
        "dtype": dice.one_of(FLOATS),
        "fp8": dice.one_of(FP8),
        "per": dice.one_of(("tensor", "head") if packed else ("tensor", "head", "block")),
        "layout": dice.one_of(("bhnd", "bnhd")),
        "strides": dice.one_of(("dense", "bnhd", "row", "offset", "transposed")),
        "size": dice.one_of((0.0, 1e-4, 1.0, 300.0)),
        "odd": dice.one_of((None, math.inf, -math.inf, "nan")),
    }


def _mask_functions(dice: Dice) -> Given:
    name = dice.one_of(
        ("documents", "prefix_lm", "bidirectional_spans", "sliding_window_with_global", "tree",
         "from_query_ranges", "from_flashmask", "summarize_mask")
    )  # fmt: skip
    nk = min(dice.size(1), 140)
    return {
        "name": name, "nq": min(dice.size(), nk), "nk": nk, "batch": dice.between(1, 3),
        "number": dice.between(0, 9), "causal": dice.maybe(0.5),
    }  # fmt: skip


def _sdpa(dice: Dice) -> Given:
    options: Given = {}
    dice.sometimes(
        options, scale=lambda: dice.one_of((0.03, 0.5, -0.2)),
        attn_mask=lambda: {
            "kind": dice.one_of(("bool", "float32", "same")), "hidden": 0.3, "expanded": False,
            "ones": tuple(dice.maybe(0.4) for _ in range(4)),
        },
    )  # fmt: skip
    if "attn_mask" not in options:
        dice.sometimes(options, is_causal=lambda: True)
    nq, nk = dice.size(), dice.size()
    return {
        "dtype": dice.one_of((*FLOATS, "float64")), "dims": dice.dims(), "heads": dice.heads(),
        "batch": dice.between(0, 2), "nq": min(nq, 130), "nk": min(nk, 130),
        "strides": tuple(dice.strides() for _ in "qkv"), "options": options,
    }  # fmt: skip


ENTRIES: dict[str, Callable[[Dice], Given]] = {
    "attention": _attention,
    "attention_backward": _backward,
    "autograd": lambda dice: _attention(dice, backward=True),
    "attention_with_kvcache": _cache,
    "key_lists": _key_lists,
    "block_lists": _block_lists,
    "merge_attention": _merge,
    "quantize_fp8": _quantise,
    "masks": _mask_functions,
    "scaled_dot_product_attention": _sdpa,
}
