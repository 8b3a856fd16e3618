"""The kernels that are mutated, and the calls that a mutant has to get right.

A target is one kernel; its calls are planned for a GPU on which that kernel is chosen for them, if
need be one with a single SM, which small problems fill. The calls are small, and together execute
nearly every instruction: ragged lengths, several blocks of keys and several CTAs, causal, windows,
sequences of different lengths, sinks, softcap, scales that cannot be folded, huge scores.
"""

from __future__ import annotations

import itertools
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from archflash import _api, reference
from archflash import _archflash as _runtime

# The benchmarks are no part of the installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from bench.switches.plans import in_pairs

from ..cards.cases import DTYPES
from ..hashed import hashed

FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
DESCALES = ("q_descale", "k_descale", "v_descale")


@dataclass(frozen=True)
class Target:
    """One kernel.

    Attributes:
        implementation: its folder.
        name: the end of its name, behind "<implementation>_attention_fwd_"; or its whole name
            behind "<implementation>_", of a kernel that combines the shares of split keys, or that
            prepares V.
        device: planned for this known GPU,
        sms: but with so many SMs; 0: as many as it has.
        rows, keys: of a CTA's tile.
        d: head dimension.
        dv: that of v; 0: the same.
        heads: (of q, of k) of the calls, where the target is for few query rows, some of which
            split the keys; None: the calls have more rows, too.
        both: whether the kernel serves calls of either kind, and gets the ones with more rows, too.
        many: (rows, heads) of one more call, without a mask, whose CTAs have several tiles each;
            None where each tile has a CTA of its own.
        blocks: of one more call of two tiles with so many blocks of keys, more than the kernel has
            stages for, and of one without keys; 0: neither.
        sample: how many mutants of any kind the everyday tests run; 0: all of synchronisation, and
            others.
        in_pairs: whether a pair of CTAs serves the calls, which are planned for one CTA.
        steady: whether there are two more calls: one with a window and scores so small that no base
            rises behind a tile's first block, since a loop that waits for its products where a base
            rises has to wait without that, too; and one with a softcap in many blocks.
        widths: whether there are calls with every dv below the largest, whose columns threads store
            one by one.
        elsewhere: calls of these names have another kernel, and are left out.
    """

    implementation: str
    name: str
    device: str
    sms: int
    rows: int
    keys: int
    d: int
    dv: int = 0
    heads: tuple[int, int] | None = None
    both: bool = False
    many: tuple[int, int] | None = None
    blocks: int = 0
    sample: int = 0
    in_pairs: bool = False
    steady: bool = False
    widths: bool = False
    elsewhere: tuple[str, ...] = ()

    @property
    def kernel(self) -> str:
        start = "" if self.name.startswith(("combine_", "transpose_")) else "attention_fwd_"
        return f"{self.implementation}_{start}{self.name}"

    @property
    def dtype(self) -> torch.dtype:
        if self.name.startswith("transpose_"):
            return FP8["e4m3"]
        return (DTYPES | FP8)[self.name.removeprefix("combine_").split("_")[0]]

    @property
    def is_fp8(self) -> bool:
        return self.dtype in FP8.values()

    @property
    def sums_13_bits(self) -> bool:
        """Whether the products keep about 13 bits of a sum."""
        return self.is_fp8 and self.implementation in ("ada", "hopper")

    @property
    def keys_by_block(self) -> bool:
        """Whether the kernel serves calls in which blocks of keys have descales of their own."""
        return self.implementation != "hopper" or not self.name.startswith("e4m3_")

    def calls(self) -> list[Call]:
        """The calls, each a bound one."""
        return [Call(self, *made) for made in self.made()]

    def made(self) -> list[tuple[str, list[Tensor], dict[str, Any]]]:
        """Name, tensors and options of each call."""
        calls = [] if self.heads is None else _few_calls(self, self.heads)
        if self.heads is None or self.both:
            calls += _calls(self)
        if self.is_fp8:
            for number, (_, inputs, options) in enumerate(calls):
                _add_descales(number, inputs, options, self.sums_13_bits, self.keys_by_block)
        if self.implementation == "ampere":
            _add_sinks(calls)
        return [made for made in calls if made[0] not in self.elsewhere]

    def plan(self, name: str, inputs: list[Tensor], options: dict[str, Any]) -> Any:
        """The plan of a call.

        Raises:
            ValueError: it is not planned on the target's kernel.
        """
        device = _api.find_device(self.device)
        if self.sms:
            device = _runtime.Device.from_dict(device.to_dict() | {"sm_count": self.sms})
        problem = _api.make_problem(*inputs, **{"return_lse": True} | options)
        plan = _runtime.plan(self.implementation, problem.as_if_on_cuda(), device)
        if isinstance(plan, list):
            raise ValueError(f"{self.kernel}, {name}: {plan}")
        if self.in_pairs:
            plan = in_pairs(plan)
        if self.kernel not in plan.kernels:
            raise ValueError(f"{name} is planned on {plan.kernels}, not on {self.kernel}")
        return plan


def _add_sinks(calls: list[tuple[str, list[Tensor], dict[str, Any]]]) -> None:
    """Gives causal calls sinks, without which ampere has kernels of their own for them."""
    for _, inputs, options in calls:
        if options.get("causal") and "sinks" not in options and inputs[0].dim() == 4:
            heads = inputs[0].shape[2 if options.get("layout") == "bnhd" else 1]
            options["sinks"] = hashed((heads,), 4)


TARGETS = (
    Target("ada", "e4m3_d64", "RTX 4090", 0, 64, 64, 64),
    Target("ada", "e5m2_d128", "RTX 4090", 0, 64, 64, 128),
    Target("ampere", "bf16_d64_large", "A100", 1, 128, 128, 64),
    Target("ampere", "bf16_d128_medium", "A100", 1, 128, 64, 128),
    Target(
        "ampere", "bf16_d64_groups", "A100", 0, 64, 128, 64, elsewhere=("packed", "window, softcap")
    ),
    Target("ampere", "bf16_d64_medium", "RTX 4090", 1, 128, 64, 64, elsewhere=("fp32 outputs",)),
    Target("ampere", "bf16_d128_few", "A100", 0, 64, 64, 128),
    Target("ampere", "bf16_d128_large", "H200", 1, 128, 64, 128),
    Target("ampere", "bf16_d128_dense", "H200", 1, 128, 64, 128),
    Target("ampere", "f16_d64_dense_short", "H200", 1, 128, 64, 64),
    Target("ampere", "bf16_d128_small", "RTX 4090", 1, 128, 32, 128),
    Target("blackwell_consumer", "bf16_d96_few", "RTX 5090", 5, 64, 64, 96, many=(61, 11)),
    Target("blackwell_consumer", "bf16_d128_large", "RTX 5090", 1, 256, 64, 128, many=(137, 2)),
    Target("blackwell_consumer", "bf16_d128_medium", "RTX 5090", 2, 128, 64, 128, many=(137, 2)),
    # Rows of a tile and a bit, of two: tiles that end in either.
    Target("blackwell_dc", "bf16_d64", "B200", 1, 150, 128, 64, blocks=10, sample=30),
    Target("blackwell_dc", "f16_d128", "B200", 1, 150, 128, 128, blocks=10, sample=30),
    Target("blackwell_dc", "bf16_d128_pair", "B200", 1, 400, 128, 128, blocks=10, in_pairs=True),
    Target("blackwell_dc", "f16_d96", "B200", 1, 150, 128, 96, blocks=10),
    Target("blackwell_dc", "bf16_d192", "B200", 1, 150, 128, 192, dv=128, blocks=10),
    Target(
        "blackwell_dc", "f16_d192_pair", "B200", 1, 400, 128, 192, 128, blocks=10, in_pairs=True
    ),
    # One kernel for any number of rows: calls of either kind.
    Target("blackwell_dc", "bf16_d256", "B200", 1, 150, 64, 256, blocks=10),
    Target("blackwell_dc", "f16_d256", "B200", 1, 128, 64, 256, heads=(6, 2)),
    Target("blackwell_dc", "bf16_d64_few", "B200", 1, 128, 128, 64, heads=(6, 2)),
    Target("blackwell_dc", "f16_d96_few", "B200", 1, 128, 128, 96, heads=(6, 2)),
    Target("blackwell_dc", "bf16_d128_few", "B200", 1, 128, 128, 128, heads=(6, 2)),
    Target("blackwell_dc", "f16_d192_few", "B200", 1, 128, 128, 192, dv=128, heads=(6, 2)),
    Target("blackwell_dc", "combine_bf16", "B200", 1, 128, 64, 256, heads=(6, 2)),
    Target("blackwell_dc", "e4m3_d64", "B200", 1, 150, 128, 64, blocks=10),
    Target("blackwell_dc", "e4m3_d128", "B200", 1, 150, 128, 128, blocks=10),
    Target("blackwell_dc", "e4m3_d192", "B200", 1, 150, 128, 192, dv=128, blocks=10),
    Target("blackwell_dc", "e4m3_d256", "B200", 1, 150, 128, 256, blocks=10),
    Target("blackwell_dc", "f16_d64_mufu", "B300", 1, 150, 128, 64, blocks=10),
    Target("blackwell_dc", "bf16_d96_mufu", "B300", 1, 150, 128, 96, blocks=10),
    Target("blackwell_dc", "bf16_d128_mufu", "B300", 1, 150, 128, 128, blocks=10),
    Target(
        "blackwell_dc", "f16_d128_mufu_pair", "B300", 1, 400, 128, 128, blocks=10, in_pairs=True
    ),
    Target("blackwell_dc", "e4m3_d64_mufu", "B300", 1, 150, 128, 64, blocks=10),
    Target("blackwell_dc", "e4m3_d128_mufu", "B300", 1, 150, 128, 128, blocks=10),
    Target("blackwell_dc", "e4m3_d192_mufu", "B300", 1, 150, 128, 192, dv=128, blocks=10),
    Target("blackwell_dc", "e4m3_d256_mufu", "B300", 1, 150, 128, 256, blocks=10),
    Target("hopper", "bf16_d96_large", "H200", 1, 192, 96, 96, many=(300, 3), steady=True),
    Target(
        "hopper", "f16_d256_large", "H200", 1, 128, 80, 256, many=(370, 3), sample=30, steady=True
    ),
    Target(
        "hopper",
        "bf16_d64_few",
        "H200",
        0,
        64,
        128,
        64,
        heads=(6, 2),
        both=True,
        steady=True,
        widths=True,
        elsewhere=("causal, softcap", "large softcap", "small scores", "packed", "few visible"),
    ),
    Target(
        "hopper",
        "f16_d128_large",
        "H200",
        1,
        192,
        80,
        128,
        many=(300, 3),
        sample=30,
        steady=True,
        elsewhere=(
            "many tiles",
            "causal, softcap",
            "large softcap",
            "negative scale",
            "huge scores",
        ),
    ),
    # On fewer SMs than there are shares a CTA has several of them.
    Target(
        "hopper",
        "f16_d256_few",
        "H200",
        20,
        64,
        64,
        256,
        heads=(6, 2),
        both=True,
        steady=True,
        widths=True,
        elsewhere=("packed", "causal tiles"),
    ),
    Target("hopper", "e4m3_d64", "H200", 1, 256, 128, 64, many=(300, 3), steady=True),
    Target("hopper", "combine_bf16", "H200", 0, 64, 64, 256, heads=(6, 2), widths=True),
    Target("hopper", "transpose_v", "H200", 0, 128, 128, 256, many=(300, 3)),
    Target("simt", "f32_d64_large", "A100", 1, 128, 64, 64),
    Target("simt", "f32_d128_medium", "A100", 1, 64, 32, 128),
    Target("simt", "f32_d64_small", "A100", 0, 64, 64, 64),
    Target("simt", "f32_d64_medium", "RTX 4090", 1, 128, 64, 64),
    Target("simt", "f32_d128_small", "A100", 0, 32, 32, 128),
    Target("simt", "f32_d128_large", "B200", 1, 64, 64, 128),
)


def implementations() -> list[str]:
    """Those that have targets, in order."""
    return list(dict.fromkeys(target.implementation for target in TARGETS))


class Call:
    """One attention call, planned: what a run needs, and how its outputs are judged.

    Attributes:
        name: what it exercises.
        plan: its plan, one launch of which is of the target's kernel.
        launches: of the plan.
        number: of the launch of the target's kernel.
        tensors: by operand name; those of `judged` are written by a run.
    """

    judged = ("out", "lse")
    same_bits = True

    def __init__(
        self, target: Target, name: str, inputs: list[Tensor], options: dict[str, Any]
    ) -> None:
        self.name = name
        q, k, v = inputs
        plan = self.plan = target.plan(name, inputs, options)
        want_lse = options.pop("return_lse", True)
        self.launches = plan.to_dict()["launches"]
        kernels = [launch["kernel"] for launch in self.launches]
        self.number = kernels.index(target.kernel)
        packed = q.ndim == 3
        bnhd = options.get("layout") == "bnhd"
        out_dtype = options.get("out_dtype", torch.bfloat16 if target.is_fp8 else q.dtype)
        out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=out_dtype)
        if packed:
            lse_shape: tuple[int, ...] = (q.shape[1], q.shape[0])
        else:
            lse_shape = (q.shape[0], *((q.shape[2], q.shape[1]) if bnhd else q.shape[1:3]))
        self.tensors = {"q": q, "k": k, "v": v, "out": out}
        if want_lse:
            self.tensors["lse"] = torch.empty(lse_shape, dtype=torch.float32)
        if plan.workspace_bytes:
            self.tensors["workspace"] = torch.empty(plan.workspace_bytes, dtype=torch.uint8)
        for option in ("sinks", "cu_seqlens_q", "cu_seqlens_k", "q_offset", *DESCALES):
            if isinstance(options.get(option), Tensor):
                self.tensors[option] = options[option]
        options.pop("num_splits", None)  # changes no result
        for name in ("cu_seqlens_q", "cu_seqlens_k"):  # as kernels clamp them
            if name in options:
                options[name] = options[name].clamp(min=0)
        self._reference, self._lse = reference.attention(q, k, v, **options)
        self._inputs, self._options = inputs, options
        self._baseline = None if target.is_fp8 else reference.baseline(q, k, v, **options)
        self._more_error = reference.fp8_score_error(
            target.implementation, plan.device.capability, q, k, v, **options
        )

    def verdict(self, tensors: dict[str, Tensor]) -> str:
        """What is wrong with the outputs by the project's rules; empty: nothing."""
        if self._baseline is None:
            out = reference.check_fp8(
                tensors["out"], self._reference, *self._inputs, **self._options
            )
        else:
            out = reference.check(tensors["out"], self._reference, self._baseline)
        if not out.ok:
            return f"out {out}"
        if "lse" in self.tensors:
            lse = reference.check_lse(tensors["lse"], self._lse, self._more_error)
            if not lse.ok:
                return f"lse {lse}"
        return ""


def _starts(lengths: list[int], first: int) -> Tensor:
    """cu_seqlens of sequences of these lengths, the first of which starts in row `first`."""
    return torch.tensor(list(itertools.accumulate(lengths, initial=first)), dtype=torch.int32)


# With so many empty ones a call has 33 sequences: a warp finds the last of them in two steps.
MANY = [0] * 27


def _calls(target: Target) -> list[tuple[str, list[Tensor], dict[str, Any]]]:
    rows, keys, d, dtype = target.rows, target.keys, target.d, target.dtype
    step = 16 if target.is_fp8 else 8  # of head dims

    def make(shape: tuple[int, ...], stream: int) -> Tensor:
        return hashed(shape, stream).to(dtype)

    def qkv(nq: int, nk: int, heads: tuple[int, int], width: int, batch: int = 1) -> list[Tensor]:
        return [
            make((batch, heads[0], nq, width), 1),
            make((batch, heads[1], nk, width), 2),
            make((batch, heads[1], nk, min(width, target.dv or width)), 3),
        ]

    few = max(130, 2 * keys + keys // 2 + 5)  # enough keys for every kernel
    # hopper's kernels for many rows serve calls that fill their tiles better than smaller ones.
    full = max(few, 2 * rows - 70) if target.steady else few
    queries = [rows + 9, 0, rows, 3]
    # The last block of the third sequence lacks one row, or as many as there are behind it.
    third = 6 * keys - 9 if target.steady and target.many else 3 * keys - 1
    sequences = [keys + 3, 5, third, 0]
    hidden, behind = 0, 9  # rows of k and v that must not matter: of a sequence, behind them all
    if target.blocks:
        hidden = behind = 100
        queries[2] += 300  # two tiles, of which only the second comes to the sequence's last block
        queries += [*MANY, 0, 9]
        sequences += [*MANY, hidden, 40]
    starts = [_starts(queries, 0), _starts(sequences, 0)]
    # A start before the tensor is a caller's error, and counts as 0.
    starts[0][0] = starts[1][0] = -3
    # hopper has kernels of their own for packed sequences, but not where keys are in one share.
    in_one = {"num_splits": 1} if target.implementation == "hopper" else {}
    # Between the rows lies what no kernel may read, and behind them rows of q without a sequence.
    packed = [
        make((sum(queries) + 7, 2, d), 1),
        make((sum(sequences) + behind, 1, d), 2),
        make((sum(sequences) + behind, 1, target.dv or d), 3)[..., : (target.dv or d) - step],
    ]
    first_hidden = sum(sequences[:-2])
    for x in packed[1:]:
        x[first_hidden : first_hidden + hidden] = x[sum(sequences) :] = torch.nan
    # Rows behind rows in memory, as layers of a model make them.
    bnhd = [
        make((2, rows + rows // 2 + 21, 2, d), 1),
        make((2, few, 1, d), 2),
        make((2, few, 1, target.dv or d), 3),
    ]
    late = torch.tensor([few - rows - 5], dtype=torch.int32)
    # Heads that share one of k would be packed into the tiles for few rows here.
    narrow = qkv(full if target.steady else rows + 1, few, (2, 2 if target.blocks else 1), d)
    some = d - step - 16
    narrow = [narrow[0][..., :some], narrow[1][..., :some], narrow[2]]
    # Three CTAs of the short tile share an SM: it serves calls that fill it.
    heads = 3 if target.name.endswith("_dense_short") else 2
    huge = qkv(rows, 3 * keys, (heads, 1), d)
    if not target.is_fp8:
        huge = [huge[0] * 4096, huge[1] * 4096, huge[2]]
    elif target.sums_13_bits:
        # Scores of one product each are exact. Rounded ones would decide which key has all of P.
        huge[0].view(torch.uint8)[..., 1:] = 0
    # Keys of the first block are those of the last one: both have the largest score of some rows.
    huge[1][..., :keys, :] = huge[1][..., 2 * keys :, :]
    with_huge: dict[str, Any] = {"scale": 1e6} if target.is_fp8 else {}
    if target.implementation == "ampere":  # without sinks they have kernels of their own
        with_huge = {"sinks": hashed((2,), 4)}
    if target.implementation == "ampere" and "_dense" in target.name:  # every key is seen
        return [
            ("rows behind rows", bnhd, {"layout": "bnhd"}),
            ("few last keys", qkv(rows + 9, 2 * keys + 5, (heads, 1), d - step), {}),
            ("many last keys", qkv(rows - 1, few + 1, (heads,) * 2, d), {"return_lse": False}),
            ("one block", qkv(rows - 40, keys - 30, (heads,) * 2, d), {}),
            ("huge scores", huge, {}),
        ]
    many: list[tuple[str, list[Tensor], dict[str, Any]]] = []
    if target.many:
        n, heads = target.many
        many = [("many tiles", qkv(n, 2 * keys + 9, (heads, heads), d), {})]
    # hopper has kernels of their own for these.
    if target.implementation != "hopper" and dtype.itemsize == 2:
        f32 = {"out_dtype": torch.float32}
        many += [
            ("fp32 outputs", qkv(rows + 9, keys + 9, (2, 2), d), f32),
            ("fp32 outputs of other strides", narrow, {"layout": "bhnd", **f32}),
        ]
    if target.blocks:
        many += [
            ("many blocks", qkv(rows, target.blocks * keys + 9, (2, 1), d), {}),
            ("no key", qkv(rows, 0, (9, 9), d), {}),
        ]
    if target.both and target.sms:  # more tiles than CTAs, whose rows pass through shared memory
        many += [("causal tiles", qkv(rows, keys + 9, (28, 28), d), {"causal": True})]
    if target.steady:
        # The diagonal of a tile lies in two blocks at least.
        options = {"causal": True, "softcap": 1.5, "q_offset": 6 * keys - rows // 2}
        many += [("causal, softcap", qkv(rows, 6 * keys + rows, (3, 3), d), options)]
        # All scores are small beside this one: some kernels compute tanh as a polynomial then.
        options = {"causal": True, "softcap": 50.0}
        many += [("large softcap", qkv(rows, 3 * keys + rows, (3, 3), d), options)]
        # The diagonal does not begin with a block: some warps see a key of its last block in all
        # their rows, and others do not.
        q, k, v = qkv(rows, rows + 6 * keys - 24, (3, 1), d)
        options = {"window": (3 * keys, 0), "scale": 0.01 / math.sqrt(d)}
        many += [("small scores", [q, k, v], options)]
    return [
        *many,
        ("causal", bnhd, {"causal": True, "layout": "bnhd"}),
        # Each row sees four keys: one too many or too few is a large error.
        ("few visible", qkv(full, full, (3, 1), d), {"window": (2, 1)}),
        (
            "packed",
            packed,
            {
                "cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1], "causal": True,
                "max_seqlen_q": max(queries), "max_seqlen_k": max(sequences),
                "sinks": hashed((2,), 4), **in_one,
            },
        ),
        (
            "window, softcap",
            narrow,
            {"window": (keys + 7, 3), "softcap": 1.5, "q_offset": late},
        ),
        (
            "negative scale",
            qkv(rows - 1, few + 1, (2, 2), d),
            {"scale": -0.125, "return_lse": False, **in_one},
        ),
        ("huge scores", huge, with_huge),
    ]  # fmt: skip


def _few_calls(
    target: Target, heads: tuple[int, int]
) -> list[tuple[str, list[Tensor], dict[str, Any]]]:
    keys, d, dtype = target.keys, target.d, target.dtype
    dv = target.dv or d

    def make(shape: tuple[int, ...], stream: int) -> Tensor:
        return hashed(shape, stream).to(dtype)

    def qkv(nq: int, nk: int, d: int = d, batch: int = 1) -> list[Tensor]:
        return [
            make((batch, heads[0], nq, d), 1),
            make((batch, heads[1], nk, d), 2),
            make((batch, heads[1], nk, dv), 3),
        ]

    # More than a tile of packed heads and half a one: the rest of them is copied by threads.
    queries, sequences = [5, 0, 50, 0, *MANY, 1, 3], [keys + 3, 5, 3 * keys - 1, 0, *MANY, 0, 60]

    def packed(first: int) -> list[Tensor]:  # with rows of no sequence before and behind
        behind = 100
        inputs = [
            make((first + sum(queries) + 4, heads[0], d), 1),
            make((first + sum(sequences) + behind, heads[1], d), 2),
            make((first + sum(sequences) + behind, heads[1], dv), 3)[..., : dv - 8],
        ]
        for x in inputs[1:]:
            x[:first] = x[-behind:] = torch.nan
        return inputs

    def of_packed(first: int, sinks: torch.dtype) -> dict[str, Any]:
        starts = [_starts(queries, first), _starts(sequences, first)]
        if first == 0:  # a start before the tensor counts as 0
            starts[0][0] = starts[1][0] = -3
        return {
            "cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1], "causal": True,
            "max_seqlen_q": max(queries), "max_seqlen_k": max(sequences),
            "sinks": hashed((heads[0],), 4).to(sinks),
        }  # fmt: skip

    bnhd = [x.transpose(1, 2).contiguous() for x in qkv(9, 2 * keys + 5, batch=2)]
    calls: list[tuple[str, list[Tensor], dict[str, Any]]] = [
        (
            "shares",
            qkv(3, 5 * keys + 9),
            {"num_splits": 3, "causal": True, "sinks": hashed((heads[0],), 4).to(dtype)},
        ),
        ("shares of packed sequences", packed(2), of_packed(2, torch.float16) | {"num_splits": 2}),
        (
            "window, softcap",
            qkv(40, 3 * keys, d=d - 24),
            {"window": (keys + 7, 3), "softcap": 1.5, "num_splits": 4},
        ),
        ("many shares", qkv(1, 70 * keys), {"num_splits": 70}),
        ("one row", qkv(1, 300), {"num_splits": 2, "return_lse": False}),
    ]
    if target.name.startswith("combine_"):
        if target.widths:
            q, k, v = qkv(2, 6 * keys)
            options = {"num_splits": 6}  # a round of four, and two
            calls += [(f"dv {n}", [q, k, v[..., :n]], {**options}) for n in (8, 72, 120, 136, 200)]
        # Seven shares for each lane and an eighth for all but one. The largest base is any lane's,
        # and with a smaller one nothing is finite.
        q, k, v = qkv(3, 255 * keys)
        return [*calls, ("huge scores", [q * 4096, k * 4096, v], {"num_splits": 255})]
    huge = qkv(20, 3 * keys)
    huge[1][..., :keys, :] = huge[1][..., 2 * keys :, :]
    if target.widths:
        for width in range(8, dv, 8):
            q, k, v = qkv(13, keys + 9)  # a lane has two rows of a head
            inputs = [q, k, v[..., :width]]
            calls += [(f"dv {width} in {n}", inputs, {"num_splits": n}) for n in (1, 2)]
    # hopper's kernels for few rows alone take a number of splits; this keeps the call with them.
    in_one = {"num_splits": 1} if target.implementation == "hopper" else {}
    spare = 72 if target.name == "bf16_d64_few" else 0  # one block is another tile's there
    return [
        *calls[:3],
        *calls[5:],
        ("causal", bnhd, {"causal": True, "layout": "bnhd"}),
        ("packed", packed(0), of_packed(0, torch.float32)),
        # Each row sees four keys: one too many or too few is a large error.
        ("few visible to few", qkv(60, keys + spare), {"window": (2, 1)} | in_one),
        ("many blocks", qkv(2, 10 * keys + 9), {"num_splits": 1, "return_lse": False}),
        *([("many shares", qkv(1, 140 * keys), {"num_splits": 70})] if target.sms > 1 else []),
        ("no key", qkv(3, 0), {"sinks": hashed((heads[0],), 4)}),
        ("negative scale", qkv(7, keys + 1), {"scale": -0.125}),
        ("huge scores", [huge[0] * 4096, huge[1] * 4096, huge[2]], {}),
    ]


def _add_descales(
    number: int,
    inputs: list[Tensor],
    options: dict[str, Any],
    some_are_zero: bool,
    keys_by_block: bool,
) -> None:
    """Descales of another kind for each FP8 call, and an output of either type."""
    for letter, x in zip("qkv", inputs, strict=True):
        if x.ndim == 3:
            shape: tuple[int, ...] = (len(options["cu_seqlens_q"]) - 1, x.shape[1])
        else:
            heads_first = x.transpose(1, 2) if options.get("layout") == "bnhd" else x
            batch, heads, rows, _ = heads_first.shape
            blocks = (batch, heads, -(-rows // 64))
            shape = (blocks, (heads,), (1,), blocks, (batch, heads), (1,))[number % 6]
            if letter != "q" and shape == blocks and not keys_by_block:
                shape = (batch, heads)
        sizes = hashed(shape, 7 + ord(letter))
        # Half of the descales of v are negative in some calls.
        signs = sizes.sign() if letter == "v" and number % 6 == 3 else 1
        options[f"{letter}_descale"] = (sizes.abs() + 0.25) * signs
        if some_are_zero and letter == "v" and number % 6 == 0 and len(shape) == 3:
            options["v_descale"][..., 1::3] = 0
    if number % 2:
        options["out_dtype"] = torch.float16
