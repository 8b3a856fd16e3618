"""What ada plans: tiles of 16-bit and FP8 calls, descales as parameters, where it is chosen."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch
from plan_cases import call, packed_call, plan_of, tile_of

import archflash
from archflash import _archflash as native
from archflash import _dispatch, _measured
from archflash._api import find_device, make_problem

RTX = "RTX 4090"
FP8 = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
SIXTEEN_BITS = {"float16": "f16", "bfloat16": "bf16"}
HEAD_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
# struct Params ends with three Descales (address, three strides), heads_per_q_descale, out_dtype.
TAIL = struct.Struct("<Qqqq Qqqq Qqqq q i4x")
OUT_DTYPES = {"float16": 1, "bfloat16": 2}

every_fp8 = pytest.mark.parametrize("dtype", FP8)
every_16_bit = pytest.mark.parametrize("dtype", SIXTEEN_BITS)


def ada(problem: native.Problem, device: str = RTX) -> native.LaunchPlan:
    return plan_of(problem, device, "ada")


def launch_of(plan: native.LaunchPlan) -> dict[str, Any]:
    (launch,) = plan.to_dict()["launches"]
    return dict(launch)


def tail(plan: native.LaunchPlan) -> tuple[int, ...]:
    params = bytes.fromhex(launch_of(plan)["params"])
    return TAIL.unpack(params[-TAIL.size :])


def fp8_call(**options: Any) -> Any:
    q, k = (
        torch.empty(3, h, n, 64, dtype=torch.float8_e4m3fn, device="meta")
        for h, n in ((4, 100), (2, 300))
    )
    return make_problem(q, k, k, **options).as_if_on_cuda()


def scales(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


# --- tiles ---


@every_fp8
@pytest.mark.parametrize(
    ("dims", "name", "per_sm"),
    [
        ((64, 64), "d64", 3),
        ((128, 128), "d128", 2),
        ((192, 128), "d192", 1),
        ((256, 256), "d256", 2),
    ],
)
def test_an_fp8_call_gets_the_kernel_of_its_head_dim(
    dtype: str, dims: tuple[int, int], name: str, per_sm: int
) -> None:
    plan = ada(call(dtype, b=16, hq=32, nq=2048, d=dims[0], dv=dims[1]))
    launch = launch_of(plan)
    assert launch["kernel"] == f"ada_attention_fwd_{FP8[dtype]}_{name}"
    assert launch["image"] == f"ada/fwd_{FP8[dtype]}"
    assert tile_of(plan).ctas_per_sm == per_sm
    assert launch["grid"] == [16 * 32 * 2048 // 64, 1, 1]


@every_16_bit
@pytest.mark.parametrize(
    ("d", "causal", "nq", "name"),
    [
        (64, False, 2048, "d64"),
        (64, True, 2048, "d64"),
        (64, False, 20, "d64_few"),
        (96, True, 2048, "d96"),
        (128, False, 2048, "d128"),
        (128, True, 2048, "d128"),
        (128, False, 20, "d128"),
        (192, False, 2048, "d256"),
        (256, True, 2048, "d256"),
    ],
)
def test_a_16_bit_call_gets_a_tile_of_its_own(
    dtype: str, d: int, causal: bool, nq: int, name: str
) -> None:
    plan = ada(call(dtype, b=8, hq=32, nq=nq, d=d, causal=causal))
    assert launch_of(plan)["kernel"] == f"ada_attention_fwd_{SIXTEEN_BITS[dtype]}_{name}"


@pytest.mark.parametrize("dtype", [*FP8, *SIXTEEN_BITS])
@pytest.mark.parametrize("dims", HEAD_DIMS)
def test_every_tile_fits_a_gpu_of_8_9_as_often_as_the_plan_says(
    dtype: str, dims: tuple[int, int]
) -> None:
    limits = find_device(RTX)
    for nq in (20, 2048):
        plan = ada(call(dtype, b=8, hq=32, nq=nq, d=dims[0], dv=dims[1]))
        launch = launch_of(plan)
        assert launch["shared_bytes"] <= limits.shared_per_block
        resident = tile_of(plan).ctas_per_sm
        assert resident * (launch["shared_bytes"] + 1024) <= limits.shared_per_sm
        assert resident * launch["block"][0] <= limits.threads_per_sm


def test_at_least_one_16_bit_tile_differs_from_that_of_ampere_here() -> None:
    differ = {}
    for d in (64, 96, 128):
        problem = call("float16", b=8, hq=32, nq=2048, d=d, causal=True)
        plans = (plan_of(problem, RTX, name) for name in ("ada", "ampere"))
        tiles = {(tile_of(plan).block_q, tile_of(plan).block_k) for plan in plans}
        differ[d] = len(tiles) == 2
    assert differ == {64: True, 96: False, 128: True}


# --- parameters ---


def test_descales_become_addresses_and_strides() -> None:
    problem = fp8_call(
        q_descale=scales(3, 4, 2),
        k_descale=scales(3, 2),
        v_descale=scales(2),
        out_dtype=torch.float16,
    )
    plan = ada(problem)
    assert tail(plan) == (0, 8, 2, 1, 0, 2, 1, 0, 0, 0, 1, 0, 1, OUT_DTYPES["float16"])
    size = len(launch_of(plan)["params"]) // 2
    slots = {s["operand"]: s["offset"] for s in launch_of(plan)["pointers"]}
    first = size - TAIL.size
    assert [slots[f"{name}_descale"] for name in "qkv"] == [first, first + 32, first + 64]


def test_absent_descales_have_no_address() -> None:
    plan = ada(fp8_call())
    assert tail(plan) == (0,) * 12 + (1, OUT_DTYPES["bfloat16"])
    assert not [s for s in launch_of(plan)["pointers"] if "descale" in s["operand"]]


@pytest.mark.parametrize("given", [scales(2), scales(3, 2), scales(3, 2, 2)], ids=lambda x: x.ndim)
def test_a_descale_of_q_may_be_given_for_each_head_of_k(given: torch.Tensor) -> None:
    assert tail(ada(fp8_call(q_descale=given)))[12] == 2
    own = scales(
        *(
            4 if size == 2 and i == min(given.ndim - 1, 1) else size
            for i, size in enumerate(given.shape)
        )
    )
    assert tail(ada(fp8_call(q_descale=own)))[12] == 1


@pytest.mark.parametrize(
    "given",
    [torch.empty((), device="meta"), scales(1), scales(1, 1).expand(3, 4)],
    ids=["scalar", "one", "expanded"],
)
def test_one_descale_for_all_has_strides_of_zero(given: torch.Tensor) -> None:
    assert tail(ada(fp8_call(q_descale=given)))[1:4] == (0, 0, 0)


def test_a_descale_may_have_any_strides() -> None:
    given = scales(2, 4, 3).permute(2, 1, 0)
    assert given.stride() == (1, 3, 12)
    assert tail(ada(fp8_call(q_descale=given)))[1:4] == (1, 3, 12)


def test_problems_that_differ_in_descales_differ() -> None:
    kinds = [None, scales(1), scales(4), scales(3, 4), scales(3, 4, 2), scales(2), scales(3, 2)]
    problems = {fp8_call(q_descale=kind) for kind in kinds}
    assert len(problems) == len(kinds)
    for problem in problems:
        assert native.Problem.from_dict(problem.to_dict()) == problem


def test_strides_count_pairs_of_bytes() -> None:
    params = bytes.fromhex(launch_of(ada(fp8_call()))["params"])
    q_strides = struct.unpack_from("<qqq", params, 9 * 8)
    assert q_strides == (4 * 100 * 32, 100 * 32, 32)


# --- refusals ---


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"d": 270},
            "head_dim 272 (270 and columns of zeros): ada takes multiples of 16 up to 256",
        ),
        ({"d": 272, "dv": 64}, "head_dim 272: ada takes multiples of 16 up to 256"),
        ({"out_dtype": torch.float32}, "out_dtype float32: ada writes float16 or bfloat16"),
    ],
)
def test_what_fp8_cannot_do_is_said(options: dict[str, Any], reason: str) -> None:
    answer = native.plan("ada", call("float8_e4m3fn", **options), find_device(RTX))
    assert isinstance(answer, list)
    assert [text for text in answer if text.startswith(reason)], answer


def test_float32_is_not_for_ada() -> None:
    (reason,) = native.plan("ada", call("float32"), find_device(RTX))
    assert reason.startswith("dtype float32: ada takes float16, bfloat16, float8_e4m3fn and")


def test_packed_fp8_calls_are_planned() -> None:
    assert launch_of(ada(packed_call("float8_e5m2")))["kernel"] == "ada_attention_fwd_e5m2_d64"


# --- who is chosen ---


@every_fp8
@pytest.mark.parametrize("device", ["L4", "RTX 4090", "H200", "B200", "RTX 5090"])
def test_fp8_goes_to_ada_from_8_9_on_but_for_e4m3(dtype: str, device: str) -> None:
    of_e4m3 = {"RTX 5090": "blackwell_consumer"}  # blackwell_dc has never run on a B200
    for nq in (1, 500):
        problem = call(dtype, nq=nq)
        if device == "H200" and nq == 500:  # measured; few rows are not
            measured = _measured.find(problem, (9, 0))
            assert measured is not None
            of_e4m3[device] = measured.order[0]
            assert measured.order[0] in ("hopper", "blackwell_consumer")
        expected = of_e4m3.get(device, "ada") if dtype == "float8_e4m3fn" else "ada"
        decision = _dispatch.select(problem, find_device(device))
        assert decision.chosen == expected


@every_fp8
@pytest.mark.parametrize("device", ["A100", "RTX 3090"])
def test_fp8_goes_to_torch_before_8_9(dtype: str, device: str) -> None:
    decision = _dispatch.select(call(dtype), find_device(device))
    assert decision.chosen == "torch"
    assert decision.fallback


@every_16_bit
def test_16_bit_inputs_go_to_ada_on_8_9_only(dtype: str) -> None:
    problem = call(dtype, b=8, hq=32, nq=2048, causal=True)
    chosen = {
        device: _dispatch.select(problem, find_device(device)).chosen
        for device in ("A100", "RTX 3090", "L40S", "RTX 4090", "H200", "RTX 5090")
    }
    assert {device for device, name in chosen.items() if name == "ada"} == {"L40S", "RTX 4090"}


@pytest.mark.parametrize("device", ["B200", "RTX 5090"])
def test_exact_16_bit_kernels_have_no_machine_code_where_others_come_first(device: str) -> None:
    ptx = "compute_89 PTX, compiled by the driver at first use"
    split = call("bfloat16", b=1, hq=2, nq=1, nk=8192)  # keys are split, and combined
    for problem in (call("bfloat16"), split):
        plan = ada(problem, device)
        assert plan.code == ptx
        assert not any(launch["uses_pdl"] for launch in plan.to_dict()["launches"])
    assert ada(split, "H200").code == "sm_90"
    for problem in (call("bfloat16", approximate="int8_qk"), fp8_call()):
        assert ada(problem, device).code == ("sm_100" if device == "B200" else "sm_120")


def test_ada_says_where_it_is_made_for() -> None:
    (row,) = (i for i in archflash.implementations() if i.name == "ada")
    assert "8.9" in row.description
    assert "descales" in row.features


# --- approximate="int8_qk" ---


def int8_call(*, d: int = 128, nk: int = 300, dtype: str = "float16", **options: Any) -> Any:
    q, k = (torch.empty(2, h, n, d, dtype=getattr(torch, dtype)) for h, n in ((4, 100), (2, nk)))
    options = {"approximate": "int8_qk"} | options
    return make_problem(q, k, k, **options).as_if_on_cuda()


@every_16_bit
@pytest.mark.parametrize(
    ("d", "device", "name"),
    [
        (64, RTX, "int8_d64"),
        (128, RTX, "int8_d128"),
        (128, "H200", "int8_d128_large"),
        (96, RTX, "int8_d128"),
        (256, RTX, "int8_d256"),
    ],
)
def test_int8_is_two_kernels_that_prepare_and_one_that_computes(
    dtype: str, d: int, device: str, name: str
) -> None:
    plan = ada(int8_call(d=d, dtype=dtype), device)
    launches = plan.to_dict()["launches"]
    word = SIXTEEN_BITS[dtype]
    assert [launch["kernel"] for launch in launches] == [
        f"ada_int8_mean_{word}", f"ada_int8_values_{word}_{'d256' if d > 128 else 'd128'}",
        f"ada_attention_fwd_{word}_{name}",
    ]  # fmt: skip
    assert {launch["image"] for launch in launches} == {f"ada/int8_{word}"}
    # 2 x 2 heads of 300 keys, 2 x 4 of 100 queries: one mean each, then blocks of 64.
    assert [launch["grid"][0] for launch in launches[:2]] == [4, 4 * 5 + 8 * 2]
    assert launches[2]["shared_bytes"] <= find_device(device).shared_per_block
    assert dict(plan.notes)["approximate"].startswith("q k^T in int8")


def test_the_parts_of_the_workspace_do_not_overlap() -> None:
    plan = ada(int8_call(d=72))
    last = plan.to_dict()["launches"][-1]
    starts = sorted({s["addend"] for s in last["pointers"] if s["operand"] == "workspace"})
    columns = 80  # 72 in whole 16 bytes
    sizes = {
        "mean": 4 * 72 * 4, "q": 8 * 100 * columns, "k": 4 * 300 * columns, "q scales": 8 * 2 * 4,
        "k scales": 4 * 5 * 16, "shifts": 8 * 100 * 4,
    }  # fmt: skip
    padded = [-(-size // 256) * 256 for size in sizes.values()]
    assert starts == [sum(padded[:i]) for i in range(len(padded))]
    assert plan.workspace_bytes == sum(padded)
    operands = {s["operand"] for s in last["pointers"]}
    assert "q" not in operands
    assert "k" not in operands
    assert operands >= {"v", "out", "workspace"}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"softcap": 20.0}, "softcap with approximate='int8_qk'"),
        ({"scale": -0.5}, "scale -0.5 with approximate='int8_qk'"),
        ({"dtype": "float32"}, "dtype float32"),
        ({"dtype": "float8_e4m3fn"}, "takes float16 and bfloat16"),
    ],
)
def test_int8_says_what_it_does_not_take(options: dict[str, Any], reason: str) -> None:
    reasons = native.plan("ada", int8_call(**options), find_device(RTX))
    assert isinstance(reasons, list)
    assert any(reason in text for text in reasons), reasons
    assert all("implementation='torch'" in text for text in reasons)


def test_int8_refuses_packed_sequences() -> None:
    problem = packed_call("float16", approximate="int8_qk")
    reasons = native.plan("ada", problem, find_device(RTX))
    assert isinstance(reasons, list)
    assert "cu_seqlens with approximate" in reasons[0]


@pytest.mark.parametrize("device", ["RTX 4090", "L40S", "H200", "RTX 5090", "B200", "A100"])
@pytest.mark.parametrize("nq", [1, 2048])
def test_int8_is_chosen_where_it_is_asked_for_and_only_there(device: str, nq: int) -> None:
    q, k = (torch.empty(1, 8, n, 128, dtype=torch.float16, device="meta") for n in (nq, 2048))
    exact = archflash.explain(q, k, k, device=device)
    assert exact.plan is None or "int8" not in str(exact.plan.to_dict()["launches"])
    asked = archflash.explain(q, k, k, device=device, approximate="int8_qk")
    if device == "A100":  # no kernel of 8.0 has it
        assert asked.fallback
        assert asked.chosen == "torch"
        return
    assert asked.chosen == "ada"
    assert asked.plan is not None
    assert "int8" in str(asked.plan.to_dict()["launches"])
    for exact_one in ("ampere", "simt"):
        assert f"{exact_one} has no such kernel" in str(asked.reasons[exact_one])
