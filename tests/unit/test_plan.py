"""Plans are data: they fit the device, cover their operands, survive JSON and bind addresses."""

from __future__ import annotations

import copy
import json
import math
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from plan_cases import (
    DEVICES,
    KERNELS,
    OTHER_DEVICES,
    call,
    dtypes_of,
    home_of,
    packed_call,
    plan_of,
    serves,
    tile_of,
)
from tests.many_cases import one_test_for_each

import archflash
from archflash import _api
from archflash import _archflash as native
from archflash._api import find_device, make_problem

GRID_LIMITS = (2**31 - 1, 65535, 65535)
CLEARS = "hopper_clear_counter_"  # a kernel before those that count their tiles
THREADS_PER_BLOCK = 1024
PARAMETER_BYTES = 4096

# Each takes a dtype.
HEAD_DIMS: dict[str, Callable[[str], native.Problem]] = {
    f"d{d}": lambda dtype, d=d: call(dtype, d=d)  # type: ignore[misc]
    for d in (8, 16, 24, 32, 40, 64, 96, 128, 136, 192, 256)
}
FEATURES: dict[str, Callable[[str], native.Problem]] = {
    "d192-dv128": lambda dtype: call(dtype, d=192, dv=128),
    "d8-dv256": lambda dtype: call(dtype, d=8, dv=256),
    "full-gpu": lambda dtype: call(dtype, b=16, hq=32, nq=2048, d=128),
    "full-gpu-d256": lambda dtype: call(dtype, b=16, hq=32, nq=1024, d=256),
    "ragged": lambda dtype: call(dtype, b=3, hq=5, nq=1023, nk=799),
    "causal-window-softcap": lambda dtype: call(dtype, causal=True, window=(17, 3), softcap=20.0),
    "gqa-lse-sinks": lambda dtype: call(dtype, hq=8, hkv=2, return_lse=True, sinks=True),
    "decode": lambda dtype: call(dtype, b=8, hq=32, hkv=8, nq=1, nk=4096, d=128, causal=True),
    "decode-offsets": lambda dtype: call(dtype, b=8, nq=1, nk=4096, causal=True, offsets=True),
    "varlen": lambda dtype: packed_call(dtype),
    "varlen-lse-offsets": lambda dtype: packed_call(
        dtype,
        return_lse=True,
        causal=True,
        q_offset=torch.empty(5, dtype=torch.int32, device="meta"),
        max_seqlen_q=300,
    ),
    "varlen-many": lambda dtype: packed_call(dtype, sequences=70_000),
    "nk0": lambda dtype: call(dtype, nk=0),
    "nk0-lse": lambda dtype: call(dtype, nk=0, return_lse=True),
    "nq1-nk1": lambda dtype: call(dtype, nq=1),
    "b-times-h-over-65535": lambda dtype: call(dtype, b=70_000, hq=16, nq=1, d=32),
}

NOT_FOR_FP8 = {"d8", "d24", "d40", "d136", "d8-dv256"}  # which takes multiples of 16

# id: (kernel, dtype, what makes the call). Every dtype with every head dim; what does not depend
# on the dtype with the first and the last.
PROBLEMS = {
    f"{kernel}-{dtype}-{name}": (kernel, dtype, make)
    for kernel in KERNELS
    for dtype in dtypes_of(kernel)
    for name, make in (
        HEAD_DIMS | FEATURES
        if dtype in (dtypes_of(kernel)[0], dtypes_of(kernel)[-1])
        else HEAD_DIMS
    ).items()
    if not (dtype.startswith("float8") and name in NOT_FOR_FP8)
}

every_kernel = pytest.mark.parametrize("kernel", KERNELS)
# One test for each kernel: most cases cost less than a test does.
every_problem = one_test_for_each(
    {kernel: [(name,) for name in PROBLEMS if PROBLEMS[name][0] == kernel] for kernel in KERNELS}
)
every_problem_and_device = one_test_for_each(
    {
        kernel: [
            (name, device)
            for name in PROBLEMS
            if PROBLEMS[name][0] == kernel
            for device in DEVICES + OTHER_DEVICES
            if serves(kernel, device)
        ]
        for kernel in KERNELS
    }
)


@cache
def problem_named(name: str) -> native.Problem:
    _, dtype, make = PROBLEMS[name]
    return make(dtype)


def plan_named(name: str, device: str) -> native.LaunchPlan:
    return plan_of(problem_named(name), device, PROBLEMS[name][0])


def served_by(device: str) -> list[str]:
    return [name for name, (kernel, _, _) in PROBLEMS.items() if serves(kernel, device)]


def operands_of(problem: native.Problem) -> set[str]:
    fields = problem.to_dict()
    wanted = {"q", "k", "v", "out"}
    wanted |= {"lse"} if fields["want_lse"] else set()
    wanted |= {"sinks"} if fields["sinks"] else set()
    wanted |= {"cu_seqlens_q", "cu_seqlens_k"} if fields["varlen"] else set()
    wanted |= {"q_offset"} if fields["q_offset_tensor"] else set()
    return wanted


# --- what a plan launches ---


@every_problem_and_device
def test_a_launch_fits_its_device(name: str, device: str) -> None:
    limits = find_device(device)
    plan = plan_named(name, device)
    launches = plan.to_dict()["launches"]
    joins = "_joined" in tile_of(plan).name  # the shares of a tile are its cluster
    splits = tile_of(plan).splits
    kinds = ["attention_fwd_", "combine_"] if splits > 1 and not joins else ["attention_fwd_"]
    # Some calls with V of 8 bits turn it first (test_hopper_plans.py).
    if launches[0]["kernel"] == "hopper_transpose_v":
        kinds = ["transpose_v", *kinds]
    if launches[0]["kernel"].startswith(CLEARS):
        kinds = ["clear_counter_", *kinds]
    for launch, kind in zip(launches, kinds, strict=True):
        assert 0 <= launch["shared_bytes"] <= limits.shared_per_block
        threads = math.prod(launch["block"])
        assert 0 < threads <= THREADS_PER_BLOCK
        assert threads % 32 == 0 or launch["kernel"].startswith(CLEARS)  # one thread
        assert all(1 <= n <= most for n, most in zip(launch["grid"], GRID_LIMITS, strict=True))
        assert launch["cluster"] == [tile_of(plan).cluster, 1, splits if joins else 1]
        assert 0 < len(launch["params"]) // 2 <= PARAMETER_BYTES
        assert launch["image"] in native.image_names()
        assert launch["image"].startswith(f"{plan.implementation}/")
        assert launch["kernel"].startswith(f"{plan.implementation}_{kind}")


@every_problem_and_device
def test_the_grid_has_a_block_for_every_row_of_every_head(name: str, device: str) -> None:
    problem = problem_named(name)
    plan = plan_named(name, device)
    tile = tile_of(plan).block_q
    tiles = -(-problem.nq // tile)
    # Each packed sequence can end inside a tile, and its length is not known here.
    per_head = tiles + problem.batch if problem.varlen else tiles * problem.batch
    assert tile_of(plan).tiles == per_head * problem.heads_q // tile_of(plan).packed_heads
    (launch,) = (x for x in plan.to_dict()["launches"] if "_attention_fwd_" in x["kernel"])
    ctas = math.prod(launch["grid"])
    resident = find_device(device).sm_count * tile_of(plan).ctas_per_sm
    work = tile_of(plan).tiles * tile_of(plan).splits * tile_of(plan).v_slices
    ctas, left = divmod(ctas, tile_of(plan).cluster)
    assert left == 0
    assert ctas == work or ctas == min(work, resident)


@every_problem
def test_pointer_slots_cover_the_operands_inside_the_parameters(name: str) -> None:
    problem = problem_named(name)
    plan = plan_named(name, home_of(PROBLEMS[name][0]))
    workspace = {"workspace"} if plan.workspace_bytes else set()
    for launch in plan.to_dict()["launches"]:
        params = bytes.fromhex(launch["params"])
        slots = launch["pointers"]
        by_map = {spec["operand"] for spec in launch["tensor_maps"]} & workspace
        clears = launch["kernel"].startswith(CLEARS)
        expected = workspace if clears else operands_of(problem) | workspace
        assert {slot["operand"] for slot in slots} | by_map == expected
        offsets = sorted(slot["offset"] for slot in slots)
        assert all(offset % 8 == 0 and 0 <= offset <= len(params) - 8 for offset in offsets)
        assert len(set(offsets)) == len(slots)
        assert all(params[offset : offset + 8] == bytes(8) for offset in offsets)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_planning_twice_gives_the_same_plan(device: str) -> None:
    for name in served_by(device):
        kernel, dtype, make = PROBLEMS[name]
        again = plan_of(make(dtype), device, kernel).to_dict()
        assert again == plan_named(name, device).to_dict(), name


@pytest.mark.parametrize(
    "problem",
    [
        pytest.param(lambda dtype: call(dtype, nq=0, nk=5), id="no queries"),
        pytest.param(lambda dtype: call(dtype, b=0), id="no batch"),
        pytest.param(lambda dtype: call(dtype, nq=0, nk=0, d=44), id="no queries, odd head dim"),
    ],
)
@every_kernel
def test_with_nothing_to_write_nothing_is_launched(
    kernel: str, problem: Callable[[str], native.Problem]
) -> None:
    plan = plan_of(problem(dtypes_of(kernel)[0]), home_of(kernel), kernel)
    assert plan.to_dict()["launches"] == []
    assert dict(plan.notes)["launches"].startswith("none")


@pytest.mark.slow
@every_kernel
def test_a_grid_beyond_cudas_limit_is_refused_with_its_size(kernel: str) -> None:
    problem = call(dtypes_of(kernel)[0], b=2**20, hq=2**11, nq=1, d=8)
    reasons = native.plan(kernel, problem, find_device(home_of(kernel)))
    assert reasons == [
        "grid of 2147483648 CTAs: CUDA takes up to 2147483647; "
        "split the batch or use implementation='torch'"
    ]


def test_large_tiles_are_for_calls_that_fill_the_gpu() -> None:
    def kernel(**shape: int) -> Any:
        return plan_of(call(d=128, **shape), "B200").to_dict()["launches"][0]["kernel"]

    assert kernel(b=8, hq=16, nq=1024) == "simt_attention_fwd_f32_d128_large"
    assert not kernel(b=1, hq=2, nq=64).endswith("_large")


@every_kernel
def test_strides_of_a_packed_buffer_reach_the_parameters(kernel: str) -> None:
    dtype = getattr(torch, dtypes_of(kernel)[0])
    qkv = torch.empty(2, 100, 3, 4, 64, dtype=dtype, device="meta")
    q, k, v = (qkv[:, :, i] for i in range(3))
    problem = make_problem(q, k, v, layout="bnhd").as_if_on_cuda()
    expected = {"batch": 100 * 3 * 4 * 64, "head": 64, "row": 3 * 4 * 64}
    assert problem.to_dict()["q"] == problem.to_dict()["v"] == expected
    params = bytes.fromhex(
        plan_of(problem, home_of(kernel), kernel).to_dict()["launches"][0]["params"]
    )
    for value in expected.values():
        assert params.count(struct.pack("<q", value)) >= 3  # once each for q, k and v


# --- JSON ---


@pytest.mark.parametrize("device", DEVICES + OTHER_DEVICES)
def test_plans_survive_json(device: str) -> None:
    for name in served_by(device):
        plan = plan_named(name, device)
        again = native.LaunchPlan.from_dict(json.loads(json.dumps(plan.to_dict())))
        assert again.to_dict() == plan.to_dict()
        assert again.problem == plan.problem
        assert (again.implementation, again.code) == (plan.implementation, plan.code)
        assert again.notes == plan.notes
        assert again.device.name == plan.device.name


def test_a_problem_survives_json_with_unbounded_sides_as_null() -> None:
    problem = call(window=(5, None), causal=True)
    text = json.dumps(problem.to_dict())
    assert '"window_left": 5, "window_right": 0' in text
    assert native.Problem.from_dict(json.loads(text)) == problem
    assert '"window_left": null, "window_right": null' in json.dumps(call().to_dict())


TENSOR_MAP = {
    "operand": "k",
    "offset": 128,
    "addend": 256,
    "dtype": "bfloat16",
    "swizzle": 3,
    "nan_fill": False,
    "dims": [64, 1024, 16],
    "strides": [128, 131072],
    "box": [64, 128, 1],
}


def hand_written(**launch: Any) -> dict[str, Any]:
    """A plan as another program might write it."""
    fields = plan_of(call(), "H200").to_dict()
    fields["launches"][0] |= launch
    return fields


def test_a_hand_written_plan_with_a_tensor_map_survives_json() -> None:
    fields = hand_written(params="00" * 512, tensor_maps=[TENSOR_MAP], cluster=[2, 1, 1])
    plan = native.LaunchPlan.unchecked_from_dict(json.loads(json.dumps(fields)))
    assert plan.to_dict() == fields


@pytest.mark.skipif(native.driver_status().cuda_version != 0, reason="a driver is here")
def test_binding_a_tensor_map_needs_the_driver() -> None:
    plan = native.LaunchPlan.unchecked_from_dict(
        hand_written(params="00" * 512, tensor_maps=[TENSOR_MAP])
    )
    with pytest.raises(archflash.LaunchError, match="cuTensorMapEncodeTiled"):
        native.bound_parameters(plan, 0, [("k", 1 << 20)])


@pytest.mark.parametrize(
    "wrong",
    [{"dims": [], "strides": [], "box": []}, {"box": [64, 128]}, {"strides": [128]}],
    ids=["rank 0", "short box", "short strides"],
)
def test_a_tensor_map_of_the_wrong_rank_is_not_bound(wrong: dict[str, Any]) -> None:
    fields = hand_written(params="00" * 512, tensor_maps=[TENSOR_MAP | wrong])
    with pytest.raises(
        (archflash.LaunchError, ValueError), match=r"tensor map of k: .*1 to 5 dims"
    ):
        native.bound_parameters(native.LaunchPlan.unchecked_from_dict(fields), 0, [("k", 1 << 20)])


def test_a_tensor_map_of_six_dims_is_not_loaded() -> None:
    wrong = {"dims": [8] * 6, "strides": [16] * 5, "box": [8] * 6}
    fields = hand_written(params="00" * 512, tensor_maps=[TENSOR_MAP | wrong])
    with pytest.raises(ValueError, match=r"launches.*tensor_maps.*dims.* a list of at most 5"):
        native.LaunchPlan.unchecked_from_dict(fields)


def changed(fields: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with the entry at `path` ("launches.0.grid") set, or taken out where value is ..."""
    fields = copy.deepcopy(fields)
    *way, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    place: Any = fields
    for step in way:
        place = place[step]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return fields


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("problem", ..., "field 'problem' is missing"),
        ("launches.0.grid", ..., "field 'launches[0].grid' is missing"),
        ("problem.q.row", ..., "field 'problem.q.row' is missing"),
        ("device.sm_count", ..., "field 'device.sm_count' is missing"),
        ("launches.0.pointers.0.addend", ..., "'launches[0].pointers[0].addend' is missing"),
        ("revision", 2, "field 'revision' is not known"),
        ("zeroed_bytes", 16, "'zeroed_bytes' is 16: it must be between 0 and workspace_bytes, 0"),
        ("zeroed_bytes", -1, "'zeroed_bytes' is -1: it must be between 0 and workspace_bytes, 0"),
        ("tile.block_k", 0, "field 'tile.block_k' is 0: it must be an integer from 1 to"),
        ("tile.splits", -1, "field 'tile.splits' is -1: it must be an integer from 1 to"),
        ("tile.tiles", 1 << 40, "'tile.tiles' is 1099511627776: it must be an integer from 1 to"),
        ("tile.part_rows", 1, "'tile.part_rows' is 1: tiles of "),
        ("tile.turned_begin", -1, "'tile.turned_begin' is -1: it must be an integer from 0 to"),
        ("tile.packed_heads", 2, "is 2: 1 heads share a head of k, and it must divide them"),
        ("problem.dropout", 0.1, "field 'problem.dropout' is not known"),
        ("launches.0.stream", 0, "field 'launches[0].stream' is not known"),
        ("launches.0.shared_bytes", "many", "'launches[0].shared_bytes' is 'many': it must be an"),
        (
            "launches.0.shared_bytes",
            1.5,
            "'launches[0].shared_bytes' is 1.5: it must be an integer",
        ),
        ("launches.0.shared_bytes", True, "'launches[0].shared_bytes' is True: it must be an"),
        (
            "launches.0.shared_bytes",
            1 << 40,
            "is 1099511627776: it must be an integer that fits 32",
        ),
        ("launches.0.kernel", 7, "field 'launches[0].kernel' is 7: it must be a text"),
        ("launches.0.grid", 7, "field 'launches[0].grid' is 7: it must be a list of 3"),
        ("launches.0.block", [128, 1], "'launches[0].block' is [128, 1]: it must be a list of 3"),
        ("launches", 7, "field 'launches' is 7: it must be a list"),
        ("problem.scale", "x", "field 'problem.scale' is 'x': it must be a finite number"),
        ("problem.dtype", "float8", "'problem.dtype' is 'float8': it must be one of float32, "),
        ("launches.0.pointers.0.operand", "query", "is 'query': it must be one of q, k, v, out"),
        ("launches.0.params", "abc", "must be an even number of lower-case hexadecimal digits"),
        ("launches.0.params", "zz", "must be an even number of lower-case hexadecimal digits"),
        ("launches.0.params", "00" * 16, "pointer slot at 16 lies outside the parameters"),
        ("launches.0.pointers.0.offset", -8, "pointer slot at -8 lies outside the parameters"),
        ("launches.0.pointers.0.offset", 1 << 20, "pointer slot at 1048576 lies outside"),
        ("launches.0", 7, "field 'launches[0]' is 7: it must be an object with named fields"),
        ("problem", [], "field 'problem' is []: it must be an object with named fields"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) and len(value) < 40 else "value",
)
def test_a_malformed_hand_made_plan_is_refused_with_the_field_named(
    path: str, value: Any, said: str
) -> None:
    good = plan_of(call(), "H200").to_dict()
    with pytest.raises(ValueError, match=re.escape(said)):
        native.LaunchPlan.unchecked_from_dict(changed(good, path, value))
    assert native.LaunchPlan.unchecked_from_dict(good).to_dict() == good


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"offset": 100}, "tensor map at 100 is not 128 bytes inside"),
        ({"offset": 448}, "tensor map at 448 is not 128 bytes inside"),
        ({"offset": -64}, "tensor map at -64 is not 128 bytes inside"),
        ({"swizzle": 9}, "swizzle"),
    ],
    ids=["misaligned", "past the end", "before the start", "no such swizzle"],
)
def test_a_malformed_tensor_map_is_refused(wrong: dict[str, Any], said: str) -> None:
    fields = hand_written(params="00" * 512, tensor_maps=[TENSOR_MAP | wrong])
    with pytest.raises(ValueError, match=said):
        native.LaunchPlan.unchecked_from_dict(fields)


# --- binding ---


def bound(plan: native.LaunchPlan, addresses: dict[str, int], launch: int = 0) -> bytes:
    return native.bound_parameters(plan, launch, list(addresses.items()))


@every_problem
def test_binding_patches_exactly_the_listed_slots(name: str) -> None:
    fields = plan_named(name, native.describe(PROBLEMS[name][0]).home_device).to_dict()
    for launch in fields["launches"]:
        launch["tensor_maps"] = []  # the driver encodes them: tests/gpu
    plan = native.LaunchPlan.unchecked_from_dict(fields)
    for index, launch in enumerate(fields["launches"]):
        operands = [slot["operand"] for slot in launch["pointers"]]
        addresses = {operand: 0x7F00_0000_0000 + 4096 * i for i, operand in enumerate(operands)}
        expected = bytearray.fromhex(launch["params"])
        for slot in launch["pointers"]:
            address = addresses[slot["operand"]] + slot["addend"]
            struct.pack_into("<Q", expected, slot["offset"], address)
        # An address that no slot asks for changes nothing.
        assert bound(plan, addresses | {"attn_mask": 0xDEAD0}, index) == bytes(expected)


def test_binding_adds_the_addend_and_leaves_an_absent_operand_null() -> None:
    fields = hand_written(
        params="ff" * 64,
        pointers=[
            {"operand": "q", "offset": 8, "addend": 1 << 33},
            {"operand": "q", "offset": 24, "addend": -16},
            {"operand": "lse", "offset": 40, "addend": 4096},
        ],
    )
    expected = bytearray(b"\xff" * 64)
    struct.pack_into("<Q", expected, 8, 0x1000 + (1 << 33))
    struct.pack_into("<Q", expected, 24, 0x1000 - 16)
    struct.pack_into("<Q", expected, 40, 0)
    assert bound(native.LaunchPlan.unchecked_from_dict(fields), {"q": 0x1000}) == bytes(expected)


def test_there_is_no_launch_beyond_the_last() -> None:
    with pytest.raises(IndexError):
        native.bound_parameters(plan_of(call(), "L4"), 1, [])


def test_a_launch_wants_every_tensor_of_the_plan_in_one_place() -> None:
    plan = plan_of(call(d=16), "L4")
    x = torch.zeros(1, 2, 16, 16)
    with pytest.raises(ValueError, match="the plan has an address of k: pass that tensor"):
        native.launch(plan, {"q": x})
    with pytest.raises(TypeError, match="launch takes tensors on one CUDA device, or on the CPU"):
        native.launch(plan, dict.fromkeys("qkv", x.to("meta")))
    with pytest.raises(ValueError, match="plan_merge takes 1 to"):
        native.plan_merge([], [], x, find_device("L4"))
    options = _api.option_values(x, x, {})
    with pytest.raises(ValueError, match="are not the plan's problem"):
        native.operands(plan, x, x, x, options)


@pytest.mark.skipif(native.driver_status().usable, reason="a GPU is here")
def test_without_a_driver_kernels_are_not_loaded_and_the_error_is_cudas() -> None:
    plan = plan_of(call("float16"), "A100", "ampere")
    for ask in (lambda: native.load_kernels(plan, 0), lambda: native.query_device(0)):
        with pytest.raises(
            archflash.LaunchError, match=r"(cudaGetDevice|device 0).*: cudaError\w+ \("
        ):
            ask()


def run_isolated(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


# The extension alone, in a Python that cannot import torch.
LOAD_WITHOUT_TORCH = f"""
import importlib.machinery, importlib.util, json, sys
sys.modules["torch"] = None
loader = importlib.machinery.ExtensionFileLoader("_archflash", {native.__file__!r})
module = importlib.util.module_from_spec(importlib.util.spec_from_loader("_archflash", loader))
loader.exec_module(module)
"""


@every_kernel
def test_planning_needs_no_torch(kernel: str) -> None:
    problem = call("bfloat16", hq=8, hkv=2, causal=True)
    home = native.describe(kernel).home_device
    code = LOAD_WITHOUT_TORCH + (
        f"problem = module.Problem.from_dict(json.loads({json.dumps(problem.to_dict())!r}))\n"
        f"device = module.find_known_device({home!r}).device\n"
        f"print(json.dumps(module.plan({kernel!r}, problem, device).to_dict()))\n"
    )
    done = run_isolated(code)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == plan_of(problem, home, kernel).to_dict()


def test_a_parameter_block_larger_than_cudas_is_refused_not_overrun() -> None:
    """In a process of its own: an overrun would end it."""
    fields = hand_written(params="00" * (PARAMETER_BYTES + 8), pointers=[])
    code = LOAD_WITHOUT_TORCH + (
        "try:\n"
        f"    plan = module.LaunchPlan.unchecked_from_dict(json.loads({json.dumps(fields)!r}))\n"
        "    module.bound_parameters(plan, 0, [])\n"
        "except Exception as error:\n"
        "    print('refused:', error)\n"
    )
    done = run_isolated(code)
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert "refused:" in done.stdout
    assert str(PARAMETER_BYTES) in done.stdout


@every_kernel
def test_a_problem_that_cannot_be_is_refused_not_planned(kernel: str) -> None:
    """In a process of its own: dividing by no heads would end it."""
    fields = call(dtypes_of(kernel)[0]).to_dict() | {"heads_kv": 0}
    code = LOAD_WITHOUT_TORCH + (
        "try:\n"
        f"    problem = module.Problem.from_dict(json.loads({json.dumps(fields)!r}))\n"
        f"    print(module.plan({kernel!r}, problem, module.find_known_device('A100').device))\n"
        "except ValueError as error:\n"
        "    print('refused:', error)\n"
    )
    done = run_isolated(code)
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert "refused:" in done.stdout
    assert "heads_kv" in done.stdout


# --- problems ---


def test_equal_calls_make_equal_problems_wherever_their_tensors_lie() -> None:
    def fresh() -> native.Problem:
        q, k, v = (torch.randn(2, 4, 16, 32) for _ in range(3))
        return make_problem(q, k, v, causal=True)

    first = torch.randn(100)  # moves the next allocations
    assert fresh() == fresh()
    assert first.numel() == 100


@pytest.mark.parametrize(
    "other",
    [
        {"causal": True},
        {"scale": 0.5},
        {"window": (4, None)},
        {"softcap": 3.0},
        {"return_lse": True},
        {"q_offset": 7},
        {"sinks": torch.zeros(4)},
        {"out_dtype": torch.float64},
    ],
    ids=lambda options: next(iter(options)),
)
def test_another_option_makes_another_problem(other: dict[str, Any]) -> None:
    q = torch.randn(2, 4, 16, 32)
    assert make_problem(q, q, q, **other) == make_problem(q, q, q, **other)
    assert make_problem(q, q, q, **other) != make_problem(q, q, q)


def test_a_problem_is_not_equal_to_another_thing() -> None:
    assert (call() == 5) is False
    assert (call() == None) is False  # noqa: E711  (the operator is what is tested)


def test_dimensions_of_size_1_have_stride_0() -> None:
    q = torch.randn(1, 1, 1, 16)
    strange = q.as_strided((1, 1, 1, 16), (7, 99, 1234, 1))
    assert make_problem(strange, strange, strange) == make_problem(q, q, q)
    zero = {"batch": 0, "head": 0, "row": 0}
    fields = make_problem(strange, strange, strange).to_dict()
    assert [fields[name] for name in ("q", "k", "v", "out")] == [zero] * 4


def test_strides_and_defaults_of_a_problem() -> None:
    q = torch.randn(2, 10, 4, 16)
    k = torch.randn(2, 30, 2, 16)
    v = torch.randn(2, 30, 2, 24)
    fields = make_problem(q, k, v, layout="bnhd").to_dict()
    assert fields["q"] == {"batch": 640, "head": 16, "row": 64}
    assert fields["v"] == {"batch": 1440, "head": 24, "row": 48}
    assert fields["out"] == {"batch": 960, "head": 24, "row": 96}
    shape = [fields[name] for name in ("batch", "heads_q", "heads_kv", "nq", "nk", "d", "dv")]
    assert shape == [2, 4, 2, 10, 30, 16, 24]
    assert fields["scale"] == pytest.approx(0.25)
    assert fields["q_offset"] == 20
    assert fields["q_offset_default"] == 1
    assert (fields["dtype"], fields["out_dtype"]) == ("float32", "float32")
    assert (fields["max_seqlen_q"], fields["max_seqlen_k"]) == (-1, -1)


@pytest.mark.parametrize(("shift", "align"), [(0, 16), (1, 4), (2, 8), (3, 4), (4, 16)])
def test_alignment_is_that_of_the_address(shift: int, align: int) -> None:
    data = torch.randn(2 * 4 * 16 * 32 + 8)
    q = data[shift : shift + 2 * 4 * 16 * 32].view(2, 4, 16, 32)
    assert q.data_ptr() % align == 0
    assert make_problem(q, q, q).to_dict()["q_align"] == align
