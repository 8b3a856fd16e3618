"""Every switch of blackwell_dc in its other state: right results, and the counts that it changes.

One kernel, d 128 in bf16; in the full run all of them. tests/core_set has the wheel's state.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from bench import on_the_spot
from bench.switches import plans, variants
from bench.switches.variants import SETTINGS, Setting
from torch import Tensor

import archflash
from archflash import reference

from ..replanned import replanned
from .explained import unexplained
from .schedules import IN_FULL, MODES

NVCC = on_the_spot.find_nvcc()
pytestmark = [
    pytest.mark.rest,
    pytest.mark.skipif(NVCC is None, reason="nvcc is not found: it compiles the variants"),
]

BY_NAME = {setting.name: setting for setting in SETTINGS}
# The dtype, d and dv that a kernel is for, query rows, and whether CTAs work in pairs. More rows
# than a tile has, unless the kernel is for few.
FULL = [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)]
KERNELS = [
    *[(torch.bfloat16, *dims, 270, False) for dims in FULL],
    (torch.bfloat16, 128, 128, 270, True),
    (torch.bfloat16, 128, 128, 100, False),
    *[(torch.float8_e4m3fn, d, dv, 270, False) for d, dv in FULL if d != 96],
]
TESTED = KERNELS if IN_FULL else [(torch.bfloat16, 128, 128, 270, False)]
# All kernels of the folder but those for fp16. By default two tiles, one tile, and a pair of CTAs.
ORDERED = [
    *KERNELS,
    (torch.bfloat16, 192, 128, 270, True),
    *[(torch.bfloat16, d, dv, 100, False) for d, dv in FULL if d not in (128, 256)],
]
if not IN_FULL:
    ORDERED = [kernel for kernel in ORDERED if kernel[:3] == (torch.bfloat16, 128, 128)]
D, ROWS, KEYS = 128, 256, 128  # of a tile where counts are compared
SOFTMAX_WARPS = 8

# None of 16 pairs, some at uneven places, and half. The kernels of the wheel have the others.
POLYNOMIAL_PAIRS = (0, 2, 4, 5, 6, 8) if IN_FULL else (0, 5, 8)
COMPILED = [
    setting
    for setting in SETTINGS
    if setting.switch != "polynomial_pairs" or int(setting.name.split("=")[1]) in POLYNOMIAL_PAIRS
]
every_setting = pytest.mark.parametrize("setting", COMPILED, ids=lambda setting: setting.name)


def rand(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def run(setting: Setting | None, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    assert NVCC is not None
    return variants.simulate(setting, q, k, v, nvcc=NVCC, **options)


def plan_on_one_sm(q: Tensor, k: Tensor, v: Tensor, **call: Any) -> Any:
    decision = archflash.explain(q, k, v, device="B200", implementation=variants.NAME, **call)
    planned = decision.plan
    assert planned is not None
    return replanned(planned, sm_count=1)


def test_every_switch_of_the_config_has_a_setting() -> None:
    text = (on_the_spot.SOURCES / variants.NAME / "config.cuh").read_text()
    (body,) = re.findall(r"^struct Switches \{\n(.*?)^\};", text, re.M | re.S)
    members = re.findall(r"^  \w+ (\w+) = ", body, re.M)
    assert len(members) >= 7
    assert set(members) | {"persistent", "pairs", "splits", "registers"} == {
        setting.switch for setting in SETTINGS
    }
    assert len(BY_NAME) == len(SETTINGS)


@pytest.mark.parametrize(("dtype", "d", "dv", "nq", "pair"), TESTED)
@every_setting
def test_a_changed_kernel_is_right(
    setting: Setting, dtype: torch.dtype, d: int, dv: int, nq: int, pair: bool
) -> None:
    # Keys that end inside a block; one CTA goes over all tiles.
    shapes = ((nq, d), (393, d), (393, dv))
    q, k, v = (rand(1, 1, *shape, seed=seed).to(dtype) for seed, shape in enumerate(shapes))
    plan = plan_on_one_sm(q, k, v, causal=True, return_lse=True)
    if not variants.applies(setting, plan):
        pytest.skip("the switch says nothing of this kernel")
    if pair:
        plan = plans.in_pairs(plan)
    expected, expected_lse = reference.attention(q, k, v, causal=True)
    first = SETTINGS.index(setting) % len(MODES)
    for mode in MODES if IN_FULL else [MODES[first]]:
        made = run(setting, q, k, v, plan=plan, mode=mode, seed=5, causal=True, return_lse=True)
        assert not unexplained(variants.NAME, made.report), made.report
        # What is explained is that products are taken to run in the order of issue.
        assert bool(made.report.findings) == (setting.name != "trust_issue_order=off")
        if dtype == torch.float8_e4m3fn:
            report = reference.check_fp8(made.out, expected, q, k, v, causal=True)
        else:
            baseline = reference.baseline(q, k, v, causal=True)
            report = reference.check(made.out, expected, baseline)
        assert report.ok, report
        lse_report = reference.check_lse(made.lse, expected_lse)
        assert lse_report.ok, lse_report


@pytest.mark.parametrize(("dtype", "d", "dv", "nq", "pair"), ORDERED)
def test_without_trust_in_the_issue_order_products_may_run_in_any_order(
    dtype: torch.dtype, d: int, dv: int, nq: int, pair: bool
) -> None:
    shapes = ((nq, d), (600, d), (600, dv))
    q, k, v = (rand(1, 1, *shape, seed=seed).to(dtype) for seed, shape in enumerate(shapes))
    plan = plan_on_one_sm(q, k, v, num_splits=1)
    if pair:
        plan = plans.in_pairs(plan)
    expected = reference.attention(q, k, v, return_lse=False)

    def is_right(setting: Setting | None, seed: int, lint: bool) -> bool:
        made = run(setting, q, k, v, plan=plan, mode="shuffled", seed=seed, num_splits=1)
        assert not unexplained(variants.NAME, made.report), made.report
        assert {f.kind for f in made.report.findings} == ({"tcgen05-order"} if lint else set())
        if dtype == torch.float8_e4m3fn:
            return reference.check_fp8(made.out, expected, q, k, v).ok
        return reference.check(made.out, expected, reference.baseline(q, k, v)).ok

    off = BY_NAME["trust_issue_order=off"]
    assert all(is_right(off, seed, lint=False) for seed in range(4))
    # The wheel's kernel trusts, and the finding says where.
    assert not all(is_right(None, seed, lint=True) for seed in range(4))


# --- counts ---


def counts_of(setting: Setting | None, blocks: int) -> variants.Counts:
    assert NVCC is not None
    return variants.counts_of(setting, blocks, NVCC, D)


def of_all(setting: Setting | None, opcode: str) -> int:
    opcodes = counts_of(setting, 2).opcodes
    return sum(count for name, count in opcodes.items() if opcode in name)


def of_a_block(setting: Setting | None, opcode: str) -> int:
    """Instructions of the CTA for one block more."""
    blocks = [counts_of(setting, blocks).opcodes for blocks in (2, 3)]
    few, more = (sum(n for name, n in x.items() if opcode in name) for x in blocks)
    return more - few


@pytest.mark.parametrize("pairs", POLYNOMIAL_PAIRS)
def test_polynomials_take_the_place_of_mufu(pairs: int) -> None:
    setting = BY_NAME[f"polynomial_pairs={pairs}"]
    polynomials = KEYS // 4 * 3 * pairs // 16  # none in the last quarter
    assert of_a_block(setting, "ex2.approx") == SOFTMAX_WARPS * (KEYS - polynomials)
    assert of_a_block(setting, "add.rm") == SOFTMAX_WARPS * polynomials // 2


def test_the_last_quarter_has_polynomials_only_if_it_is_asked_to() -> None:
    on, off = (BY_NAME[f"polynomial_in_last_quarter={state}"] for state in ("on", "off"))
    assert of_a_block(off, "ex2.approx") == of_a_block(None, "ex2.approx")
    more = of_a_block(None, "ex2.approx") - of_a_block(on, "ex2.approx")
    assert more == SOFTMAX_WARPS * KEYS // 4 * 4 // 16  # 4 of 16 pairs of that quarter


def test_o_ready_is_for_the_end_of_a_tile_where_another_barrier_says_the_same() -> None:
    off = BY_NAME["implied_o_ready=off"]
    tiles = ROWS // 128
    assert of_a_block(off, "tcgen05.commit") == of_a_block(None, "tcgen05.commit") + tiles
    assert of_a_block(off, "tcgen05.mma") == of_a_block(None, "tcgen05.mma")


def test_hints_for_l2_stand_at_every_copy_of_tma_or_at_none() -> None:
    off = BY_NAME["l2_hints=off"]
    copies = "cp.async.bulk.tensor"
    assert of_all(None, copies) == of_all(None, "L2::cache_hint") == of_all(off, copies) > 0
    assert of_all(off, "L2::cache_hint") == 0


def test_without_lazy_rescaling_o_is_rescaled_in_every_block() -> None:
    pieces = D // 16 * 4 * ROWS // 128  # of 16 columns, by each correction warp for each tile
    off = BY_NAME["lazy_rescale=off"]
    for opcode in ("tcgen05.ld", "tcgen05.st"):
        assert of_a_block(off, opcode) == of_a_block(None, opcode) + pieces


def test_without_the_split_p_is_stored_and_announced_once() -> None:
    off = BY_NAME["split_p=off"]
    assert of_a_block(off, "tcgen05.st") == of_a_block(None, "tcgen05.st")
    assert of_a_block(off, "tcgen05.wait::st") == SOFTMAX_WARPS
    assert of_a_block(None, "tcgen05.wait::st") == 2 * SOFTMAX_WARPS
    arrivals = [of_a_block(setting, "mbarrier.arrive.") for setting in (None, off)]
    assert arrivals[0] - arrivals[1] == SOFTMAX_WARPS
    assert of_a_block(off, "tcgen05.mma") == of_a_block(None, "tcgen05.mma")


def test_registers_move_only_where_they_are_asked_to() -> None:
    off = BY_NAME["move_registers=off"]
    assert of_all(None, "setmaxnreg") >= 16  # warps; those that wait for registers ask again
    assert of_all(off, "setmaxnreg") == 0


def test_without_precomputed_descriptors_mma_issues_more() -> None:
    off = BY_NAME["precomputed_descriptors=off"]
    of_mma = [
        counts_of(setting, 3).roles["mma"] - counts_of(setting, 2).roles["mma"]
        for setting in (None, off)
    ]
    # A product has one descriptor or two; to make one anew takes two instructions and more.
    assert of_mma[1] - of_mma[0] >= 2 * of_a_block(None, "tcgen05.mma")
    assert of_a_block(off, "tcgen05.mma") == of_a_block(None, "tcgen05.mma")


def test_without_tma_stores_the_store_warp_copies_rows() -> None:
    off = BY_NAME["tma_store=off"]
    store, copy = "cp.async.bulk.tensor.4d.global", "st.global"
    assert of_all(None, store) > 0
    assert of_all(off, store) == 0
    pieces = ROWS * D * 2 // 16 // 32  # 16 bytes of a lane
    assert of_all(off, copy) - of_all(None, copy) == pieces


def test_ctas_come_in_the_order_and_number_that_is_asked_for() -> None:
    q, k, v = (rand(1, 1, 2 * ROWS, D, seed=seed) for seed in range(3))

    def instructions_of_ctas(setting: Setting | None, sms: int) -> list[int]:
        plan = archflash.explain(
            q, k, v, device="B200", implementation=variants.NAME, causal=True
        ).plan
        assert plan is not None
        planned = plans.alone(replanned(plan, sm_count=sms))
        made = run(
            setting,
            q,
            k,
            v,
            plan=planned,
            mode="lazy",
            causal=True,
            traced_ctas=2,
            race_check=False,
        )
        return [
            sum(x.end - x.begin for x in trace.events if x.kind == "run")
            for _, trace in sorted(made.report.traces.items())
        ]

    # Four blocks of keys, and two.
    fixed, each = BY_NAME["dynamic_walk=off"], BY_NAME["persistent=off"]
    longest, shortest = instructions_of_ctas(fixed, 2)
    assert longest > 1.5 * shortest
    first, second = instructions_of_ctas(each, 1)
    assert first > 1.5 * second
    # In this schedule the first CTA takes the tile of the other one, which never starts.
    assert len(instructions_of_ctas(None, 2)) == 1
    assert len(instructions_of_ctas(fixed, 1)) == 1
    # A pair of CTAs has both tiles at once.
    assert len(instructions_of_ctas(BY_NAME["pairs=on"], 2)) == 2


def test_the_shortest_tile_comes_first_if_it_is_asked_for() -> None:
    q, k, v = (rand(1, 1, 2 * ROWS, D, seed=seed) for seed in range(3))
    made = run(
        BY_NAME["longest_first=off"],
        q,
        k,
        v,
        mode="eager",
        causal=True,
        traced_ctas=2,
        race_check=False,
    )
    first, second = (
        sum(x.end - x.begin for x in trace.events if x.kind == "run")
        for _, trace in sorted(made.report.traces.items())
    )
    assert second > 1.5 * first


@pytest.mark.parametrize("name", ["splits=off", "tma_store=off"])
def test_keys_that_are_split_are_a_switch_and_leave_the_others_be(name: str) -> None:
    q, k = rand(1, 2, 1, 64, seed=0), rand(1, 1, 4000, 64, seed=1)
    made = run(BY_NAME[name], q, k, k, mode="random", seed=3)
    assert len(made.reports) == (1 if name == "splits=off" else 2)
    assert not unexplained(variants.NAME, made.report), made.report
    report = reference.check(made.out, reference.attention(q, k, k)[0], reference.baseline(q, k, k))
    assert report.ok, report


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("d", [128, 192])
@pytest.mark.parametrize("packed", [False, True])
def test_plans_with_and_without_pairs_are_those_of_the_wheel(
    dtype: torch.dtype, d: int, packed: bool
) -> None:
    def empty(heads: int, dim: int) -> Tensor:
        shape = (2 * 8192, heads, dim) if packed else (2, heads, 8192, dim)
        return torch.empty(shape, dtype=dtype, device="meta")

    ends = torch.empty(3, dtype=torch.int32, device="meta")
    call: dict[str, Any] = {"cu_seqlens_q": ends, "cu_seqlens_k": ends} if packed else {}
    planned = archflash.explain(
        empty(16, d), empty(4, d), empty(4, 128), causal=True, num_splits=1, device=variants.HOME,
        implementation=variants.NAME, **call,
    ).plan  # fmt: skip
    assert planned is not None
    (launch,) = planned.to_dict()["launches"]
    assert launch["cluster"] == [2, 1, 1]  # else there is nothing to compare with
    without = variants.plan_for(BY_NAME["pairs=off"], planned)
    assert variants.plan_for(BY_NAME["pairs=on"], without).to_dict() == planned.to_dict()
    # A GPU with more SMs than tiles takes no pairs.
    expected = replanned(planned, sm_count=1 << 20)
    (made,), (same,) = without.to_dict()["launches"], expected.to_dict()["launches"]
    assert made | {"params": ""} == same | {"params": ""}
    # The order of tiles alone goes by the number of SMs: three integers.
    blocks = [bytes.fromhex(row["params"]) for row in (made, same)]
    differing = [i for i, (a, b) in enumerate(zip(*blocks, strict=True)) if a != b]
    assert not differing or max(differing) - min(differing) < 12
    (fixed,) = variants.plan_for(BY_NAME["dynamic_walk=off"], without).to_dict()["launches"]
    assert fixed["grid"] == [planned.device.sm_count, 1, 1]
    assert variants.applies(BY_NAME["pairs=on"], planned)


def test_without_setmaxnreg_softmax_does_not_fit_its_registers(tmp_path: Path) -> None:
    """What it costs, as docs/lab/blackwell_dc.md says: 128 registers, and spills."""
    assert NVCC is not None
    q = torch.empty(1, 1, 200, D, dtype=torch.bfloat16, device="meta")
    planned = archflash.explain(q, q, q, device=variants.HOME, implementation=variants.NAME).plan
    assert variants.changed_kernel(planned) == f"{variants.NAME}_attention_fwd_bf16_d{D}"
    ptxas = Path(NVCC).resolve().with_name("ptxas")
    if not ptxas.exists():
        pytest.skip("ptxas is not beside nvcc")
    (tmp_path / "x.ptx").write_bytes(
        variants.compiled(BY_NAME["move_registers=off"], planned, NVCC, "ptx")
    )
    done = subprocess.run(
        [str(ptxas), "-O3", "-v", "-arch=sm_100f", "-o", "x.cubin", "x.ptx"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert re.search(r"Used 128 registers", said), said
    (spilled,) = re.findall(r"(\d+) bytes spill stores", said)
    assert int(spilled) > 0
