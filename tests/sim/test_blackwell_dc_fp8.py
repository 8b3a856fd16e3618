"""e4m3 in blackwell_dc on the simulator: every feature with every kind of descale, schedules, what
a block costs. Kernels by kernels and descales of any size: test_fp8_by_tma.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_cases import all_pairs
from torch import Tensor

from archflash import sim

from .test_ada import rand
from .test_blackwell_dc import MODES, one_after_another
from .test_fp8_by_tma import check

NAME = "blackwell_dc"
E4M3 = torch.float8_e4m3fn
NAN = math.nan

FACTORS: dict[str, list[Any]] = {
    "descale": ["none", "tensor", "head", "batch", "block", "kv_head"],
    "out_dtype": [None, torch.float16, torch.bfloat16],
    "layout": ["bhnd", "bnhd", "packed"],
    "lengths": [(33, 70), (70, 33), (9, 270), (260, 64)],
    "dims": [(64, 64), (128, 128), (48, 80), (96, 96), (192, 128), (256, 256)],
    "heads": [(2, 2), (4, 2), (3, 1)],
    "causal": [False, True],
    "window": [None, (17, None), (None, 5), (16, 9), (0, 0)],
    "q_offset": [None, 0, -5, 50, "tensor"],
    "softcap": [None, 5.0],
    "sinks": [None, "float32", "bfloat16"],
    "scale": [None, 0.05, -0.3, 0.0],
    "transposed": [False, True],
    "out_pad": [0, 24],
}
MORE_Q, MORE_K = (0, 1), (9, 0)  # of packed sequences: no query, no key


def stored(*shape: int, seed: int) -> Tensor:
    return (rand(*shape, seed=seed) * 60).to(E4M3)


def descale(kind: str, batch: int, heads: int, kv_heads: int, rows: int) -> Tensor:
    """With which `stored` are of size 1 or so, different from head to head and block to block."""
    shape = {
        "tensor": (1,),
        "head": (heads,),
        "batch": (batch, heads),
        "block": (batch, heads, -(-rows // 64)),
        "kv_head": (kv_heads,),
    }[kind]
    sizes = 0.5 + torch.arange(math.prod(shape)) * 3 % 7
    return (sizes / 200).view(shape)


@pytest.mark.parametrize(
    ("number", "row"),
    [
        pytest.param(number, row, id="-".join(str(x).replace("torch.", "") for x in row.values()))
        for number, row in enumerate(all_pairs(FACTORS))
    ],
)
def test_every_pair_of_features_agrees_with_float64(number: int, row: dict[str, Any]) -> None:
    (nq, nk), (d, dv), (hq, hkv) = row["lengths"], row["dims"], row["heads"]
    names = ("causal", "window", "softcap", "scale", "q_offset", "out_dtype")
    call: dict[str, Any] = {name: row[name] for name in names}
    kind, batch = row["descale"], 2
    packed = row["layout"] == "packed"
    if packed:
        lengths = (nq, *MORE_Q), (nk, *MORE_K)
        batch, nq, nk = len(lengths[0]), sum(lengths[0]), sum(lengths[1])
        for name, of in zip(("cu_seqlens_q", "cu_seqlens_k"), lengths, strict=True):
            call[name] = torch.tensor([0, *itertools.accumulate(of)], dtype=torch.int32)
        kind = "batch" if kind == "block" else kind
    else:
        call["layout"] = row["layout"]
    tensors = []
    for seed, (name, heads, rows, dim) in enumerate(
        (("q", hq, nq, d), ("k", hkv, nk, d), ("v", hkv, nk, dv))
    ):
        dense = () if packed else (batch,)
        order = (heads, rows) if row["layout"] == "bhnd" else (rows, heads)
        x = stored(*dense, *order, dim, seed=seed)
        if row["transposed"]:
            x = x.transpose(-3, -2).contiguous().transpose(-3, -2)
        tensors.append(x)
        if kind != "none":
            of = "head" if kind == "kv_head" and name != "q" else kind
            call[f"{name}_descale"] = descale(of, batch, heads, hkv, rows)
    if row["q_offset"] == "tensor":
        call["q_offset"] = torch.tensor([3 * b - 2 for b in range(batch)], dtype=torch.int32)
    if row["sinks"] is not None:
        call["sinks"] = rand(hq, seed=4).to(getattr(torch, row["sinks"]))
    q, k, v = tensors
    if kind == "none":
        call["scale"] = (1 if call["scale"] is None else call["scale"]) / 3600
    out_dtype = row["out_dtype"] or torch.bfloat16
    room = torch.full((*q.shape[:-1], dv + row["out_pad"]), NAN, dtype=out_dtype)
    run = sim.run(
        q, k, v, implementation=NAME, mode=MODES[number % 4], seed=number, return_lse=True,
        out=room[..., :dv], **call
    )  # fmt: skip
    check(NAME, run, [q, k, v], call)
    assert room[..., dv:].isnan().all()


# --- one CTA, tile after tile ---

# (d, dv), rows and keys of a tile, how many 2^x of a row's block are MUFU's.
CONFIGS = {
    "d64": ((64, 64), 256, 88),
    "d128": ((128, 128), 256, 88),
    "d192": ((192, 128), 256, 88),
    "d256": ((256, 256), 128, 112),
}
KEYS = 128
every_config = pytest.mark.parametrize("config", CONFIGS)


@every_config
def test_packed_sequences_have_the_same_bits_under_every_schedule(config: str) -> None:
    (d, dv), rows, _ = CONFIGS[config]
    lengths = (5, rows, 0, 130, 1), (KEYS + 3, 0, 7, 2 * KEYS - 1, 1)
    ends = [torch.tensor([0, *itertools.accumulate(x)], dtype=torch.int32) for x in lengths]
    q = stored(sum(lengths[0]), 2, d, seed=0)
    k, v = (stored(sum(lengths[1]) + 5, 1, dim, seed=dim) for dim in (d, dv))
    for x in (k, v):
        x.view(torch.uint8)[-5:] = 0x7F  # NaN in rows that no sequence has
    call: dict[str, Any] = {"causal": True, "cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1]}
    for name, heads in (("q", 2), ("k", 1), ("v", 1)):
        call[f"{name}_descale"] = descale("batch", 5, heads, 1, 1)
    first = None
    plan = one_after_another(config, q, k, v, return_lse=True, **call)
    for mode in MODES:
        run = sim.run(
            q, k, v, implementation=NAME, mode=mode, seed=7, plan=plan, return_lse=True, **call
        )
        if first is None:
            check(NAME, run, [q, k, v], call)
            assert run.lse is not None
            first = (run.out.clone(), run.lse.clone())
        assert torch.equal(run.out, first[0]), mode
        assert run.lse is not None
        assert torch.equal(run.lse, first[1]), mode


# --- what a block costs, in instructions ---


def more_per_block(config: str, counts: Callable[[str], bool], rising: bool = False) -> float:
    """Instructions that each warp of softmax issues for one block more."""
    (d, dv), rows, _ = CONFIGS[config]
    found = []
    for blocks in (2, 3):
        q, k = torch.zeros(1, 1, rows, d), torch.zeros(1, 1, blocks * KEYS, d)
        q[..., 0] = 8.0
        if rising:  # by more than 2^8.75 from block to block
            k[..., 0] = -torch.arange(blocks * KEYS).div(KEYS, rounding_mode="floor") * d**0.5
        v = stored(1, 1, blocks * KEYS, dv, seed=2)
        run = sim.run(q.to(E4M3), k.to(E4M3), v, implementation=NAME, race_check=False)
        found.append(sum(n for name, n in run.report.opcodes.items() if counts(name)))
    return (found[1] - found[0]) / (4 * rows // 128)


@every_config
def test_what_a_block_costs(config: str) -> None:
    (d, dv), _, mufu = CONFIGS[config]

    def more(opcode: str, rising: bool = False) -> float:
        return more_per_block(config, lambda name: opcode in name, rising)

    assert more("ex2.approx") == mufu
    assert more("add.rm") == (KEYS - mufu) / 2  # two numbers an instruction
    assert more("e4m3x2") == KEYS / 2
    assert more("kind::f8f6f4") == (d / 32 + KEYS / 32) / 4  # of four warps
    quarters = 4  # of P: nothing of O
    assert more("tcgen05.st") == quarters
    assert more("tcgen05.st", rising=True) == quarters + dv / 16
    assert more("ex2.approx", rising=True) == mufu + 1  # the factor
