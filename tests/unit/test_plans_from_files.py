"""A plan, a problem and a device from a file are data: anything else than this version plans is
refused, and the field is named.
"""

from __future__ import annotations

import copy
import json
import math
import random
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_cases import call, dtypes_of, home_of, packed_call, plan_of, serves
from test_plan import KERNELS, LOAD_WITHOUT_TORCH, changed

import archflash
from archflash import _archflash as native
from archflash._api import find_device, make_problem
from archflash.cli import replay

KNOWN = [row.device.name for row in native.known_devices()]
ADDRESS = (0x7FFF_DEAD_BEE0).to_bytes(8, "little").hex()
HUGE = 10**400


@cache
def split_plan() -> dict[str, Any]:
    """Of two launches, with tensor maps and a workspace."""
    problem = call("float16", b=1, nq=5, nk=4096, causal=True, return_lse=True, num_splits=4)
    fields: dict[str, Any] = plan_of(problem, "B200", "blackwell_dc").to_dict()
    assert len(fields["launches"]) == 2
    assert fields["launches"][0]["tensor_maps"]
    return fields


def params_with(address_at: int) -> str:
    params: str = split_plan()["launches"][0]["params"]
    return params[: 2 * address_at] + ADDRESS + params[2 * address_at + 16 :]


def pointers_with(**changes: Any) -> list[dict[str, Any]]:
    slots: list[dict[str, Any]] = copy.deepcopy(split_plan()["launches"][0]["pointers"])
    slots[1] |= changes
    return slots


NESTED: list[Any] = []
for _ in range(200):
    NESTED = [NESTED]

# (path, value or ... to take it out, what the message says)
TAMPERED: list[tuple[str, Any, str]] = [
    # what a launch does
    ("launches.0.params", params_with(0), "'launches[0].params' is from character 0 on 'e0beadde"),
    ("launches.0.params", params_with(128), "'launches[0].params' is from character 256 on"),
    ("launches.0.params", "", "'launches[0].params' is ''; planned: '0000"),
    ("launches.1.params", "00" * 4096, "'launches[1].params' is from character"),
    ("launches.0.kernel", "simt_attention_fwd_f32_d64_small", "'launches[0].kernel' is 'simt_"),
    ("launches.0.image", "simt/fwd_f32", "'launches[0].image' is 'simt/fwd_f32'; planned: 'bla"),
    ("launches.0.image", "../../etc/passwd", "'launches[0].image' is '../../etc/passwd'"),
    ("launches.0.grid", [1 << 20, 1, 1], "'launches[0].grid' is [1048576, 1, 1]; planned: ["),
    ("launches.0.grid", [16, 2, 1], "'launches[0].grid' is [16, 2, 1]; planned: [16, 1, 1]"),
    ("launches.0.grid", [16, 1], "'launches[0].grid' is [16, 1]; planned: [16, 1, 1]"),
    ("launches.0.grid", [16.0, 1, 1], "'launches[0].grid' is [16.0, 1, 1]; planned: [16, 1, 1]"),
    ("launches.0.grid", [16, True, 1], "'launches[0].grid' is [16, True, 1]; planned"),
    ("launches.1.block", [256, 1, 1], "'launches[1].block' is [256, 1, 1]; planned: [128, 1, 1]"),
    ("launches.0.cluster", [2, 1, 1], "'launches[0].cluster' is [2, 1, 1]; planned: [1, 1, 1]"),
    ("launches.0.shared_bytes", 1 << 17, "'launches[0].shared_bytes' is 131072; planned: "),
    ("launches.0.shared_bytes", 0, "'launches[0].shared_bytes' is 0; planned: "),
    ("launches.0.shared_bytes", None, "'launches[0].shared_bytes' is None; planned: "),
    ("launches.0.shared_bytes", HUGE, "'launches[0].shared_bytes' is 1000000"),
    ("launches.0.shared_bytes", 10**5000, "'launches[0].shared_bytes' is a huge int; planned: "),
    ("launches.0.pointers", pointers_with(operand="q"), "pointers[1].operand' is 'q'; planned: "),
    ("launches.0.pointers", pointers_with(offset=64), "'launches[0].pointers[1].offset' is 64; pl"),
    ("launches.0.pointers", pointers_with(addend=-(1 << 40)), "pointers[1].addend' is -1099511627"),
    ("launches.0.pointers", pointers_with() * 2, "'launches[0].pointers' has 14 items; planned: 7"),
    ("launches.0.pointers", [], "'launches[0].pointers' has 0 items; planned: 7"),
    ("launches.0.pointers", {}, "'launches[0].pointers' is {}; planned: "),
    ("launches.0.tensor_maps.0.dims.1", 999, "'launches[0].tensor_maps[0].dims' is [64, 999, "),
    ("launches.0.tensor_maps.1.strides.0", 16, "'launches[0].tensor_maps[1].strides' is [16, "),
    ("launches.0.tensor_maps.2.box.1", 256, "'launches[0].tensor_maps[2].box' is [64, 256, 1"),
    ("launches.0.tensor_maps.0.operand", "out", "'launches[0].tensor_maps[0].operand' is 'out'"),
    ("launches.0.tensor_maps.0.addend", 4096, "'launches[0].tensor_maps[0].addend' is 4096"),
    ("launches.0.tensor_maps.0.nan_fill", 0, "tensor_maps[0].nan_fill' is 0; planned: False"),
    ("launches.0.tensor_maps", [], "'launches[0].tensor_maps' has 0 items; planned: 4"),
    ("launches.1.tensor_maps", [{}], "'launches[1].tensor_maps' is [{}]; planned: []"),
    ("launches", [], "'launches' has 0 items; planned: 2"),
    ("launches", NESTED, "'launches' has 1 items; planned: 2"),
    ("launches.0", NESTED, "'launches[0]' is [[[[[["),
    ("launches.0.grid", NESTED, "'launches[0].grid' is [[[[[["),
    ("launches.0.stream", 0, "'launches[0].stream' is not known; given: 0"),
    ("launches.0.grid", ..., "'launches[0].grid' is missing; planned: [16, 1, 1]"),
    ("workspace_bytes", 0, "'workspace_bytes' is 0; planned: "),
    ("zeroed_bytes", 16, "'zeroed_bytes' is 16; planned: 0"),
    ("workspace_bytes", math.nan, "'workspace_bytes' is nan; planned: "),
    ("code", "sm_75", "'code' is 'sm_75'; planned: 'sm_100f'"),
    ("run", "rm -rf /", "'run' is not known; given: 'rm -rf /'"),
    ("workspace_bytes", ..., "'workspace_bytes' is missing; planned: "),
    # who plans what for which device
    ("version", "9.9.9", "field 'version' is '9.9.9': this is archflash "),
    ("version", ..., "field 'version' is missing"),
    ("implementation", "simt", "field 'implementation' is 'simt', which cannot serve this problem"),
    ("implementation", "torch", "field 'implementation' is 'torch': it must be the name of a"),
    ("implementation", None, "field 'implementation' is None: it must be a text"),
    ("implementation", "\ud800", "field 'implementation' is '\\ud800': it must be a text"),
    ("implementation", ..., "field 'implementation' is missing"),
    ("problem", ..., "field 'problem' is missing"),
    ("problem", NESTED, "field 'problem' is [[[[["),
    ("problem.softcap", 5.0, "'launches[0].params' is from character"),
    ("problem.num_splits", 1, "'launches' has 2 items; planned: 1"),
    ("problem.q.row", 128, "'launches[0].params' is from character"),
    ("device", [], "field 'device' is []: it must be an object with named fields"),
    ("device.major", 11, "'code' is 'sm_100f'; planned: "),
    ("device.shared_per_block", 1024, "cannot serve this problem on this device"),
]

# What neither Problem.from_dict nor a plan's problem may be.
HOSTILE_PROBLEMS: list[tuple[str, Any, str]] = [
    ("nq", -1, "'nq' is -1: it must be an integer from 0 to "),
    ("nk", 1 << 62, "'nk' is 4611686018427387904: it must be an integer from 0 to "),
    ("batch", 1 << 50, "'batch', 'heads_q', 'heads_kv', 'nq', 'nk', 'd' and 'dv' are 112589990684"),
    ("batch", HUGE, "'batch' is 100000"),
    ("batch", 2.0, "'batch' is 2.0: it must be an integer that fits 64 bits"),
    ("batch", True, "'batch' is True: it must be an integer"),
    ("batch", None, "'batch' is None: it must be an integer from 0"),
    ("batch", "2", "'batch' is '2': it must be an integer"),
    ("heads_q", 5, "'heads_kv' is 4: it must be a divisor of heads_q = 5"),
    ("heads_kv", 0, "'heads_kv' is 0: it must be a divisor of heads_q = 4"),
    ("d", 0, "'d' is 0: it must be an integer from 1"),
    ("dv", -64, "'dv' is -64: it must be an integer from 1"),
    ("dtype", "float4", "'dtype' is 'float4': it must be one of float32, float16"),
    ("dtype", 1, "'dtype' is 1: it must be a text"),
    ("out_dtype", "float8_e5m2", "'out_dtype' is float8_e5m2: it must be float32, float16"),
    ("scale", math.nan, "'scale' is nan: it must be a finite number"),
    ("scale", math.inf, "'scale' is inf: it must be a finite number"),
    ("scale", HUGE, "'scale' is 100000"),
    ("scale", True, "'scale' is True: it must be a finite number"),
    ("softcap", -1.0, "'softcap' is -1: it must be at least 0"),
    ("softcap", -math.inf, "'softcap' is -inf: it must be a finite number"),
    ("approximate", 99, "'approximate' is 99: it must be an integer from 0 to "),
    ("approximate_if_served", 1, "'approximate_if_served' is 1: it must be 0, as approximate is 0"),
    ("num_splits", -1, "'num_splits' is -1: it must be an integer from 0"),
    ("window_left", -1, "'window_left' is -1: it must be an integer from 0"),
    ("window_right", 5, "'window_right' is 5: it must be 0, as causal is 1"),
    ("q_offset", 1, "'q_offset' is 1: it must be 0, as it was not given as a number"),
    ("q_offset", -(1 << 62), "'q_offset' is -4611686018427387904: it must be an integer from -"),
    ("q_offset_tensor", 1, "'q_offset_tensor' is 1: it must be 0, as q_offset_default is 1"),
    ("max_seqlen_q", 5, "'max_seqlen_q' is 5: it must be an integer from -1 to -1"),
    ("varlen", 1, "'q.batch' is 32768: it must be 0, as the dimension has size 1"),
    ("causal", 2, "'causal' is 2: it must be an integer from 0 to 1"),
    ("sinks", 7, "'sinks' is 7: it must be an integer from 0 to 6"),
    ("sinks", 4, "'sinks' is 4: it must be 1 plus the code of float32"),
    ("mask", 8, "'mask' is 8: it must be an integer from 0 to 7"),
    ("mask", 1, "'mask_align' is 0: it must be 1, 2, 4, 8 or 16"),
    ("mask_key", 1, "'mask_key' is 1: it must be an integer from 0 to 0"),
    ("key_ranges", 5, "'key_ranges' is 5: it must be an integer from 0 to 4"),
    ("range_strides.head", 2, "'range_strides' has strides: they must be 0, as the tensor is not"),
    ("descale", 1, "'descale' is 1: it must be without bit 0, as q is float16"),
    ("descale", 2, "'descale' is 2: it must be without bits 1 and 2, as k and v are float16"),
    ("descale", 16, "'descale' is 16: it must be 23 where bit 4 is set"),
    ("descale", 32, "'descale' is 32: it must be without bit 5, which belongs to approximate="),
    ("descale", 48, "'descale' is 48: it must be an integer from 0 to 39"),
    ("kv_dtype", "float8_e4m3fn", "'kv_dtype' is float8_e4m3fn: it must be float16 as dtype is"),
    ("page_size", 16, "'page_size' is 16: it must be an integer from 0 to 0"),
    ("k_descale.head", 1, "'k_descale' has strides: they must be 0, as the tensor is not given"),
    ("q_align", 32, "'q_align' is 32: it must be 1, 2, 4, 8 or 16"),
    ("out_align", 0, "'out_align' is 0: it must be 1, 2, 4, 8 or 16"),
    ("q_column", -1, "'q_column' is -1: it must be an integer from 0"),
    ("k_column", 1 << 55, "'k' has strides (32768, 8192, 64), whose last element lies beyond"),
    ("q.row", -64, "'q.row' is -64: it must be an integer from 0"),
    ("k.batch", 1 << 59, "'k' has strides (576460752303423488, 8192, 64), whose last element"),
    ("v.head", (1 << 63) - 1, "'v.head' is None: it must be an integer from 0"),
    ("v.head", 1 << 63, "'v.head' is 9223372036854775808: it must be an integer that fits 64"),
    ("out.row", 0, "'out' has strides (32768, 8192, 0): its elements must not overlap"),
    ("out.head", 63, "'out' has strides (32768, 63, 64): its elements must not overlap"),
    ("q", [1, 2, 3], "'q' is [1, 2, 3]: it must be an object with named fields"),
    ("dropout", 0.5, "'dropout' is not known"),
    ("nk", ..., "'nk' is missing"),
    ("q.row", ..., "'q.row' is missing"),
]

HOSTILE_DEVICES: list[tuple[str, Any, str]] = [
    ("name", 7, "'name' is 7: it must be a text"),
    ("name", "A100\x1b[2J", "'name' is a text of 8 bytes: it must be printable"),
    ("name", "x" * 1000, "'name' is a text of 1000 bytes: it must be printable and at most 256"),
    ("major", 0, "'major' is 0: it must be an integer from 1 to 99"),
    ("major", 1 << 31, "'major' is 2147483648: it must be an integer that fits 32 bits"),
    ("major", None, "'major' is None: it must be an integer that fits 32 bits"),
    ("minor", 10, "'minor' is 10: it must be an integer from 0 to 9"),
    ("sm_count", 0, "'sm_count' is 0: it must be an integer from 1 to 1048576"),
    ("sm_count", -132, "'sm_count' is -132: it must be an integer from 1"),
    ("shared_per_block", -1, "'shared_per_block' is -1: it must be an integer from 0"),
    ("shared_per_sm", 1 << 62, "'shared_per_sm' is 4611686018427387904: it must be an integer"),
    ("l2_bytes", (1 << 63) - 1, "'l2_bytes' is None: it must be an integer from 0"),
    ("l2_bytes", math.nan, "'l2_bytes' is nan: it must be an integer that fits 64 bits"),
    ("registers_per_sm", -1, "'registers_per_sm' is -1: it must be an integer from 0"),
    ("threads_per_sm", 1 << 40, "'threads_per_sm' is 1099511627776: it must be an integer"),
    ("clock", 1, "'clock' is not known"),
    ("sm_count", ..., "'sm_count' is missing"),
]


def named(table: list[tuple[str, Any, str]]) -> Any:
    ids = [f"{number}-{path}" for number, (path, _, _) in enumerate(table)]
    return pytest.mark.parametrize(("path", "value", "said"), table, ids=ids)


# --- plans ---


@named(TAMPERED)
def test_a_plan_that_says_anything_else_is_refused_with_the_field(
    path: str, value: Any, said: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        native.LaunchPlan.from_dict(changed(split_plan(), path, value))
    assert native.LaunchPlan.from_dict(split_plan()).to_dict() == split_plan()


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_difference_says_what_is_given_and_what_is_planned(kernel: str) -> None:
    fields = plan_of(call(dtypes_of(kernel)[0]), home_of(kernel), kernel).to_dict()
    wrong = changed(changed(fields, "launches.0.grid", [9, 9, 9]), "workspace_bytes", 77)
    with pytest.raises(ValueError, match="this is not what") as caught:
        native.LaunchPlan.from_dict(wrong)
    first, *rest = str(caught.value).splitlines()
    assert first == f"this is not what {kernel} plans for this problem and device:"
    assert rest == [
        f"  'launches[0].grid' is [9, 9, 9]; planned: {fields['launches'][0]['grid']}",
        "  'workspace_bytes' is 77; planned: 0",
    ]


def test_many_differences_are_counted() -> None:
    fields = split_plan() | {f"x{i}": i for i in range(100)}
    with pytest.raises(ValueError, match="and 88 more"):
        native.LaunchPlan.from_dict(fields)


@pytest.mark.parametrize("wrong", [[], None, 7, "plan", NESTED], ids=lambda x: type(x).__name__)
def test_what_is_no_object_is_no_plan_problem_or_device(wrong: Any) -> None:
    for kind in (native.LaunchPlan, native.Problem, native.Device):
        with pytest.raises(ValueError, match="no object with named fields"):
            kind.from_dict(wrong)


@pytest.mark.parametrize("device", KNOWN)
def test_an_untouched_plan_of_every_implementation_and_device_loads(
    device: str, tmp_path: Path
) -> None:
    for kernel in (name for name in KERNELS if serves(name, device)):
        for dtype in dtypes_of(kernel):
            plan = plan_of(call(dtype, hkv=2, causal=True, return_lse=True), device, kernel)
            file = tmp_path / "plan.json"
            file.write_text(json.dumps(plan.to_dict()))
            assert replay.load_plan(file).to_dict() == plan.to_dict()


def test_a_plan_to_quantize_is_of_no_attention_call() -> None:
    x = torch.empty(1, 2, 64, 64)
    out = torch.empty(1, 2, 64, 64, dtype=torch.uint8)
    plan = native.plan_quantize("float8_e4m3fn", 0, x, out, find_device("RTX 4090"))
    assert isinstance(plan, native.LaunchPlan)
    with pytest.raises(ValueError, match=r"field 'problem.d' is 0"):
        native.LaunchPlan.from_dict(plan.to_dict())


def test_a_hand_made_plan_needs_the_unsafe_door_which_no_command_opens() -> None:
    fields = changed(split_plan(), "launches.0.kernel", "anything")
    assert native.LaunchPlan.unchecked_from_dict(fields).to_dict() == fields
    assert "Unsafe" in str(native.LaunchPlan.unchecked_from_dict.__doc__)
    package = Path(archflash.__file__).parent
    users = [file for file in package.rglob("*.py") if "unchecked" in file.read_text()]
    # The probes of `archflash verify` are kernels that nothing plans, and lie in the wheel.
    assert [file.name for file in users] == ["_probes.py"]


# --- problems and devices ---


@named(HOSTILE_PROBLEMS)
def test_a_problem_that_no_call_makes_is_refused_with_the_field(
    path: str, value: Any, said: str
) -> None:
    good = call("float16", causal=True).to_dict()
    assert native.Problem.from_dict(good).to_dict() == good
    with pytest.raises(ValueError, match=re.escape(said)):
        native.Problem.from_dict(changed(good, path, value))
    plan = plan_of(call("float16", causal=True), "A100", "ampere").to_dict()
    with pytest.raises(ValueError, match=re.escape(said.replace("'", "'problem.", 1))):
        native.LaunchPlan.from_dict(changed(plan, f"problem.{path}", value))


@named(HOSTILE_DEVICES)
def test_a_device_that_cannot_be_is_refused_with_the_field(
    path: str, value: Any, said: str
) -> None:
    good = find_device("A100").to_dict()
    with pytest.raises(ValueError, match=re.escape(said)):
        native.Device.from_dict(changed(good, path, value))
    with pytest.raises(ValueError, match=re.escape(said.replace("'", "'device.", 1))):
        native.LaunchPlan.from_dict(changed(split_plan(), f"device.{path}", value))


def test_every_problem_of_a_call_is_taken_back() -> None:
    meta: dict[str, Any] = {"device": "meta", "dtype": torch.float16}
    fp8: dict[str, Any] = {"device": "meta", "dtype": torch.float8_e4m3fn}
    scales: dict[str, Any] = {"device": "meta"}
    expanded = torch.empty(1, 1, 64, **meta).expand(3, 8, 9, 64)
    double = torch.empty(2, 4, 3, 5, dtype=torch.float64)
    q8, k8 = torch.empty(2, 8, 130, 64, **fp8), torch.empty(2, 2, 70, 64, **fp8)
    problems = [
        make_problem(expanded, expanded, expanded, window=(0, None), q_offset=-(2**40)),
        make_problem(double, double, double, sinks=torch.empty(4, dtype=torch.float64)),
        make_problem(double[:0], double[:0], double[:0], attn_mask=torch.empty(3, 3)),
        make_problem(double[:, :0], double[:, :0], double[:, :0], approximate="int8_qk"),
        make_problem(double.mT, double.mT, double.mT, softcap=3, scale=-0.5),
        make_problem(double.requires_grad_(), double, double),
        make_problem(q8, k8, k8, q_descale=torch.empty(2, 2, **scales), out_dtype=torch.float32),
        make_problem(q8, k8, k8, q_descale=torch.empty(2, 8, 3, **scales)),
        make_problem(q8, k8, k8, v_descale=torch.empty((), **scales)),
        make_problem(q8[:, :, :0], k8[:, :, :0], k8[:, :, :0], k_descale=torch.empty(2, **scales)),
        packed_call(q_offset=torch.empty(5, dtype=torch.int32, device="meta"), max_seqlen_k=2**50),
        packed_call(rows=0, sequences=0),
        call(nq=1, nk=1, b=1, hq=1, d=1),
        call("bfloat16", num_splits=2**59, causal=True),
        make_problem(
            double,
            double,
            double,
            attn_mask=torch.empty(4, 1, 3, dtype=torch.bool),
            alibi_slopes=torch.empty(2, 4),
            key_ranges=torch.empty(2, 1, 3, 4, 2, dtype=torch.int32),
            block_mask=torch.empty(1, 4, 1, 1, dtype=torch.int8),
        ),
        packed_call(alibi_slopes=torch.empty(5, 4, device="meta")),
    ]
    if e8m0 := getattr(torch, "float8_e8m0fnu", None):
        sizes = {"q": (2, 8, 130, 2), "k": (2, 2, 70, 2), "v": (2, 2, 3, 64)}
        block_scales = {
            f"{x}_descale": torch.empty(size, dtype=e8m0, device="meta")
            for x, size in sizes.items()
        }
        problems.append(make_problem(q8, k8, k8, **block_scales))
    for problem in problems:
        assert native.Problem.from_dict(json.loads(json.dumps(problem.to_dict()))) == problem


def test_a_gpu_that_could_not_be_asked_is_taken_back_and_serves_nothing() -> None:
    from archflash import _dispatch

    unasked = _dispatch.device._unasked_device()
    device = native.Device.from_dict(unasked.to_dict())
    for kernel in KERNELS:
        assert isinstance(native.plan(kernel, call(dtypes_of(kernel)[0]), device), list)


def test_a_call_without_heads_that_is_refused_does_not_end_the_process() -> None:
    """It has something to refuse, so it is looked at, and heads per head of k are 0 / 0."""
    fields = call("float16", hq=0, hkv=None, approximate="int8_qk").to_dict() | {"needs_grad": 1}
    code = LOAD_WITHOUT_TORCH + (
        f"problem = module.Problem.from_dict(json.loads({json.dumps(fields)!r}))\n"
        "device = module.find_known_device('RTX 4090').device\n"
        "print(module.plan('ada', problem, device)[0])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert done.stdout.startswith("no backward: ada computes the forward only")


EDGES = [
    0, 1, 2, 3, 7, 8, 16, 63, 64, 65, 96, 128, 129, 192, 255, 256, 257, 1 << 15, (1 << 30) - 1,
    1 << 30, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 40, 1 << 58, 1 << 59, (1 << 60) - 1, 1 << 60,
    (1 << 63) - 1, 1 << 63, -1, -2, -(1 << 31), -(1 << 60), -(1 << 63), None, 0.5, math.nan, "x",
]  # fmt: skip


def fuzzed_problem(numbers: random.Random, good: dict[str, Any]) -> dict[str, Any]:
    fields = copy.deepcopy(good)
    for _ in range(numbers.choice((1, 2, 3, 6))):
        name = numbers.choice(list(fields))
        if isinstance(fields[name], dict):
            fields[name][numbers.choice(("batch", "head", "row"))] = numbers.choice(EDGES)
        elif name in ("dtype", "out_dtype"):
            fields[name] = numbers.choice(("float32", "float16", "float8_e4m3fn", "float64"))
        else:
            fields[name] = numbers.choice(EDGES)
    return fields


@pytest.mark.slow
def test_planning_a_hostile_problem_is_a_refusal_or_a_plan() -> None:
    """In a process of its own: a division by zero would end it."""
    numbers = random.Random(1)
    goods = [
        call("float16", causal=True).to_dict(),
        call("bfloat16", nq=1, nk=4096, num_splits=3, return_lse=True).to_dict(),
        call("float16", d=128, approximate="int8_qk").to_dict(),
        call("float32", window=(3, None)).to_dict(),
        call("float8_e4m3fn", nq=700).to_dict(),
        packed_call("float16", max_seqlen_q=300).to_dict(),
    ]
    problems = [fuzzed_problem(numbers, numbers.choice(goods)) for _ in range(4000)]
    code = LOAD_WITHOUT_TORCH + (
        "counts = [0, 0, 0]\n"
        "for fields in json.load(sys.stdin):\n"
        "    try:\n"
        "        problem = module.Problem.from_dict(fields)\n"
        "    except ValueError:\n"
        "        counts[0] += 1\n"
        "        continue\n"
        "    for name in module.folder_names():\n"
        "        home = module.find_known_device(module.describe(name).home_device).device\n"
        "        answer = module.plan(name, problem, home)\n"
        "        counts[1 + isinstance(answer, list)] += 1\n"
        "        if isinstance(answer, list):\n"
        "            continue\n"
        "        rows = answer.to_dict()['launches']\n"
        "        assert all(0 < size < 2**31 for row in rows for size in row['grid']), fields\n"
        "        assert answer.workspace_bytes >= 0, fields\n"
        "print(json.dumps(counts))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(problems),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert min(json.loads(done.stdout)) > 200  # refused as problems, planned, refused by a folder
