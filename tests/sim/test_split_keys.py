"""Keys split over CTAs, and the kernels for few query rows, on the simulator."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from gpu_cases import same_bits
from torch import Tensor

import archflash
from archflash import _archflash as native
from archflash import reference

from .explained import unexplained

sim = pytest.importorskip("archflash.sim")

NAME = "blackwell_dc"
MODES = ("lazy", "eager", "random", "priority")
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
# Of each kernel for few query rows: (d, dv) and the keys of a block.
KERNELS = {
    "d64_few": ((64, 64), 128),
    "d96_few": ((96, 96), 128),
    "d128_few": ((128, 128), 128),
    "d192_few": ((192, 128), 128),
    "d256": ((256, 256), 64),
}
BLOCKS = 6
SPLITS = (1, 2, 5, 100)  # the last is more than there are blocks

every_kernel = pytest.mark.parametrize("kernel", KERNELS)


def rand(*shape: int, seed: int, dtype: str = "bfloat16") -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DTYPES[dtype])


def qkv(
    kernel: str, nq: int, nk: int, dtype: str = "bfloat16", heads: tuple[int, int] = (2, 2)
) -> tuple[Tensor, Tensor, Tensor]:
    d, dv = KERNELS[kernel][0]
    return (
        rand(1, heads[0], nq, d, seed=0, dtype=dtype),
        rand(1, heads[1], nk, d, seed=1, dtype=dtype),
        rand(1, heads[1], nk, dv, seed=2, dtype=dtype),
    )


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, mode: str = "random", seed: int = 3, **call: Any
) -> sim.Run:
    """A run in which nothing was found wrong."""
    run = sim.run(q, k, v, implementation=NAME, mode=mode, seed=seed, return_lse=True, **call)
    for report in run.reports:
        assert not unexplained(NAME, report), report
    return run


def check(run: sim.Run, q: Tensor, k: Tensor, v: Tensor, **call: Any) -> None:
    call.pop("num_splits", None)
    expected, expected_lse = reference.attention(q, k, v, **call)
    report = reference.check(run.out, expected, reference.baseline(q, k, v, **call))
    assert report.ok, report
    lse_report = reference.check_lse(run.lse, expected_lse)
    assert lse_report.ok, lse_report


def kernels_of(run: sim.Run) -> list[str]:
    return [launch["kernel"] for launch in run.plan.to_dict()["launches"]]


def shares_of(run: sim.Run) -> int:
    """CTAs of the first launch of a call of two heads, each of one tile."""
    grid: list[int] = run.plan.to_dict()["launches"][0]["grid"]
    return grid[0] // 2


# --- what is computed ---


@pytest.mark.parametrize("splits", SPLITS)
@every_kernel
def test_shares_together_give_what_one_gives(kernel: str, splits: int) -> None:
    dtype = "float16" if splits % 2 else "bfloat16"
    q, k, v = qkv(kernel, 3, (BLOCKS - 1) * KERNELS[kernel][1] + 9, dtype)
    run = attend(q, k, v, num_splits=splits, mode=MODES[splits % 4], causal=True)
    word = "f16" if dtype == "float16" else "bf16"
    expected = [f"{NAME}_attention_fwd_{word}_{kernel}", f"{NAME}_combine_{word}"]
    assert kernels_of(run) == (expected if splits > 1 else expected[:1])
    assert shares_of(run) == min(splits, BLOCKS)
    check(run, q, k, v, causal=True)


# Each leaves some shares with few keys or none; each has rows that end in different blocks.
CALLS: dict[str, dict[str, Any]] = {
    "causal-from-the-start": {"causal": True, "q_offset": 250},
    "window": {"window": (150, 20)},
    "window-in-one-block": {"window": (3, 0), "q_offset": 130},
    "q_offset-tensor": {"causal": True, "q_offset": torch.tensor([300], dtype=torch.int32)},
    "rows-that-see-no-key": {"causal": True, "q_offset": -20},
    "rows-that-see-no-key-but-a-sink": {"causal": True, "q_offset": -20, "sinks": True},
    "no-row-sees-a-key": {"window": (2, 2), "q_offset": 5000, "sinks": True},
    "sinks": {"sinks": True},
    "softcap": {"softcap": 3.0, "causal": True},
    "negative-scale": {"scale": -0.3},
}


def with_sinks(call: dict[str, Any], heads: int) -> dict[str, Any]:
    values = torch.tensor([0.7, -30.0, 40.0, -math.inf])
    return call | ({"sinks": values[:heads].clone()} if call.get("sinks") else {})


@pytest.mark.parametrize("name", CALLS)
def test_every_share_sees_what_its_rows_see(name: str) -> None:
    number = list(CALLS).index(name)
    kernel = list(KERNELS)[number % len(KERNELS)]
    heads = (4, 2) if number % 2 else (2, 2)
    call = with_sinks(CALLS[name], heads[0])
    q, k, v = qkv(kernel, 40, 5 * KERNELS[kernel][1] - 11, heads=heads)
    run = attend(q, k, v, num_splits=3, mode=MODES[number % 4], **call)
    assert len(kernels_of(run)) == 2
    check(run, q, k, v, **call)
    if "no-key" in name or "no-row" in name:
        blind = slice(0, 20 if "rows" in name else None)
        assert torch.equal(run.out[:, :, blind], torch.zeros_like(run.out[:, :, blind]))
        of_no_key = torch.full((heads[0],), -math.inf) if "sinks" not in call else call["sinks"]
        assert run.lse is not None
        assert torch.equal(run.lse[0, :, 0], of_no_key)


@pytest.mark.parametrize("kernel", ["d64_few", "d256"])
def test_packed_sequences_of_all_lengths(kernel: str) -> None:
    (d, dv), keys = KERNELS[kernel]
    q_lengths = (1, 0, 5, 1, 130, 2)
    k_lengths = (4 * keys + 3, 70, 0, 7, 3 * keys, 2 * keys)
    ends = [
        torch.tensor([2, *(2 + end for end in itertools.accumulate(lengths))], dtype=torch.int32)
        for lengths in (q_lengths, k_lengths)
    ]
    # Rows before and behind all sequences.
    total_q, total_k = sum(q_lengths) + 6, sum(k_lengths) + 6
    q, k = rand(total_q, 2, d, seed=0), rand(total_k, 1, d, seed=1)
    v = rand(total_k, 1, dv, seed=2)
    for x in (k, v):
        x[:2], x[-4:] = math.nan, math.nan
    call: dict[str, Any] = {"causal": True, "cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1]}
    call["sinks"] = torch.tensor([0.5, 3.0])
    out = torch.full((total_q, 2, dv), math.nan, dtype=torch.bfloat16)
    run = attend(q, k, v, num_splits=3, out=out, max_seqlen_q=1, **call)  # a hint, and wrong
    assert kernels_of(run)[0].endswith(kernel)
    assert torch.equal(out[:2], torch.zeros_like(out[:2]))
    assert torch.equal(out[-4:], torch.zeros_like(out[-4:]))
    expected, expected_lse = reference.attention(q, k, v, **call)
    inside = slice(2, total_q - 4)
    baseline = reference.baseline(q, k, v, **call)
    report = reference.check(out[inside], expected[inside], baseline[inside])
    assert report.ok, report
    assert run.lse is not None
    lse_report = reference.check_lse(run.lse[:, inside], expected_lse[:, inside])
    assert lse_report.ok, lse_report


def test_strides_of_the_output_are_followed() -> None:
    q, k, v = qkv("d64_few", 5, 300)
    q, k, v = (x.expand(2, -1, -1, -1).transpose(1, 2).contiguous() for x in (q, k, v))
    room = torch.full((2, 5, 2, 64 + 24), math.nan, dtype=torch.bfloat16)
    call: dict[str, Any] = {"layout": "bnhd", "causal": True}
    run = attend(q, k, v, num_splits=2, out=room[..., :64], **call)
    check(run, q, k, v, **call)
    assert bool(room[..., 64:].isnan().all())


def test_head_dims_between_those_of_the_kernels() -> None:
    q, k, v = rand(2, 1, 9, 40, seed=0), rand(2, 1, 300, 40, seed=1), rand(2, 1, 300, 72, seed=2)
    run = attend(q, k, v, num_splits=2)
    assert kernels_of(run)[0].endswith("d96_few")
    check(run, q, k, v)


def test_more_shares_than_a_warp_has_lanes() -> None:
    q, k, v = qkv("d256", 1, 35 * 64 - 7, heads=(1, 1))
    k[:, :, 64:128] *= 8  # one share has most of the weight
    run = attend(q, k, v, num_splits=34)
    assert run.plan.to_dict()["launches"][0]["grid"] == [34, 1, 1]
    check(run, q, k, v)


def test_rows_of_more_than_one_tile_are_split_where_that_is_asked_for() -> None:
    q, k, v = qkv("d128_few", 300, 310)
    run = attend(q, k, v, num_splits=2, causal=True)
    assert kernels_of(run)[0].endswith("d128_few")
    check(run, q, k, v, causal=True)


def test_huge_scores_are_weighed_as_without_a_split() -> None:
    q, k, v = qkv("d64_few", 20, 500)
    q, k = q * 1e3, k * 1e3  # a log-sum-exp in fp32 has no digit left behind the point
    one = attend(q, k, v, num_splits=1)
    three = attend(q, k, v, num_splits=3)
    assert bool(one.out.isfinite().all())
    assert torch.equal(one.out, three.out)
    assert torch.equal(one.lse, three.lse)


# --- what is not finite ---


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_spoils_only_what_sees_it(value: float) -> None:
    q, k, v = qkv("d64_few", 20, 400)
    clean = attend(q, k, v, num_splits=3, causal=True, q_offset=130)
    spoiled_q, spoiled_k, spoiled_v = q.clone(), k.clone(), v.clone()
    spoiled_q[0, 0, 7, 3] = value
    spoiled_k[0, 1, 140] = value  # of rows 10 on, in the second share
    spoiled_k[0, :, 300] = value  # of no row
    spoiled_v[0, 0, 140, 5] = value
    run = attend(spoiled_q, spoiled_k, spoiled_v, num_splits=3, causal=True, q_offset=130)
    assert run.lse is not None
    assert clean.lse is not None
    assert bool(run.out[0, 0, 7].isnan().all())
    assert bool(run.out[0, 1, 10:].isnan().all())
    assert not bool(run.lse[0, 0, 7].isfinite())
    assert not bool(run.lse[0, 1, 10:].isfinite().any())
    assert not bool(run.out[0, 0, :, 5].isfinite().any())
    others = torch.ones(2, 20, 64, dtype=torch.bool)
    others[0, 7], others[1, 10:], others[0, :, 5] = False, False, False
    assert torch.equal(run.out[0][others], clean.out[0][others])
    assert torch.equal(run.lse[0, 1, :10], clean.lse[0, 1, :10])


# --- the same bits ---


@every_kernel
def test_shares_in_turn_in_one_cta_and_side_by_side_give_the_same_bits(kernel: str) -> None:
    q, k, v = qkv(kernel, 9, 3 * KERNELS[kernel][1] + 1)
    call: dict[str, Any] = {"causal": True, "num_splits": 3}
    planned = archflash.explain(
        q, k, v, device="B200", implementation=NAME, return_lse=True, **call
    ).plan
    assert planned is not None
    one_sm = native.Device.from_dict(planned.device.to_dict() | {"sm_count": 1})
    plan = native.plan(NAME, planned.problem, one_sm)
    assert isinstance(plan, native.LaunchPlan)
    assert plan.to_dict()["launches"][0]["grid"] == [1, 1, 1]
    first = attend(q, k, v, **call)
    check(first, q, k, v, **call)
    for mode in MODES:
        run = attend(q, k, v, mode=mode, plan=plan, **call)
        assert same_bits(run.out, first.out), mode
        assert same_bits(run.lse, first.lse), mode


@pytest.mark.parametrize("kernel", [name for name in KERNELS if name != "d256"])
def test_few_rows_get_the_bits_that_they_get_among_many(kernel: str) -> None:
    q, k, v = qkv(kernel, 256, 290, heads=(1, 1))
    many = attend(q, k, v)
    assert kernels_of(many)[0].endswith(kernel.removesuffix("_few"))
    few = attend(q[:, :, 128:], k, v)
    assert kernels_of(few)[0].endswith(kernel)
    assert torch.equal(few.out, many.out[:, :, 128:])
    assert few.lse is not None
    assert many.lse is not None
    assert torch.equal(few.lse, many.lse[:, :, 128:])


# --- other ways in ---


def test_the_operator_takes_num_splits() -> None:
    q, k, v = qkv("d64_few", 4, 300)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return archflash.attention(
            q, k, v, num_splits=2, implementation=NAME, causal=True, return_lse=True
        )

    eager = call(q, k, v)
    assert torch.equal(eager[0], attend(q, k, v, num_splits=2, causal=True).out)
    compiled = torch.compile(call, backend="eager", fullgraph=True)(q, k, v)
    for mine, other in zip(compiled, eager, strict=True):
        assert torch.equal(mine, other)
    with pytest.raises(Exception, match="num_splits is 0"):
        torch.compile(
            lambda q: archflash.attention(q, k, v, num_splits=0), backend="eager", fullgraph=True
        )(q)
