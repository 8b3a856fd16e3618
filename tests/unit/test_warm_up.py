"""warm_up: which kernels it loads, planned for known GPUs, and what it refuses."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
from plan_cases import call, kernels_built, packed_call

import archflash
from archflash import ForcedImplementationError, LaunchError, _dispatch, _registry, _warm_up
from archflash import _archflash as native
from archflash._api import find_device
from archflash._warm_up import plans_by_kernel

HALF, E4M3 = torch.float16, torch.float8_e4m3fn
SIZES = ("large", "medium", "few")
BOTH_HALVES = {torch.float16: "f16", torch.bfloat16: "bf16"}


def loaded(device: str, *arguments: Any) -> set[str]:
    return set(plans_by_kernel(find_device(device), *arguments))


# --- which kernels ---


@pytest.mark.parametrize("dtype", BOTH_HALVES, ids=str)
def test_an_rtx_5090_gets_its_own_kernels_and_those_for_repeated_rows(dtype: torch.dtype) -> None:
    word = BOTH_HALVES[dtype]
    expected = {f"blackwell_consumer_attention_fwd_{word}_d128_{n}" for n in SIZES}
    expected |= {f"ampere_attention_fwd_{word}_d128_{n}" for n in ("small", "few")}
    expected |= {f"ada_attention_fwd_{word}_int8_d128", f"ada_int8_mean_{word}"}
    expected |= {f"ada_int8_values_{word}_d128", f"blackwell_consumer_combine_{word}"}
    expected |= {f"ampere_combine_{word}", f"ampere_combine_{word}_decode"}
    of_caches = ("cache", "cache_fp8", "decode", "decode_plain")
    expected |= {f"ampere_attention_fwd_{word}_d128_{name}" for name in of_caches}
    of_options = ("masked", "decode_masked", "dropout", "gather")
    expected |= {f"ampere_attention_fwd_{word}_d128_{name}" for name in of_options}
    expected.add(f"blackwell_consumer_attention_fwd_{word}_d128_table")
    expected |= {f"ampere_append_{word}{of}" for of in ("", "_fp8")}
    expected |= {f"ampere_approximate_{name}" for name in ("stats", "convert")}
    for name in ("int8", "int8_pv", f"{word}_fp16"):
        expected |= {f"ampere_approximate_{name}_d128{of}" for of in ("", "_masked")}
    assert loaded("RTX 5090", [dtype], [(128, 128)]) == expected


@pytest.mark.slow
def test_an_h200_gets_the_large_and_the_few_row_kernels() -> None:
    names = loaded("H200", [HALF], [(64, 64)]) | loaded("H200", [torch.bfloat16], [(128, 128)])
    sizes = ("f16_d64_large", "f16_d64_medium", "f16_d64_few", "bf16_d128_large", "bf16_d128_few")
    assert {f"ampere_attention_fwd_{size}" for size in sizes} <= names


def test_an_h200_gets_the_tiles_of_hopper_and_what_combines_shares() -> None:
    own = {f"hopper_attention_fwd_f16_d64_{size}" for size in (*SIZES, "turns", "short")}
    own |= {f"hopper_attention_fwd_f16_d64_{size}_tail" for size in ("short", "medium", "turns")}
    assert own <= loaded("H200", [HALF], [(64, 64)])
    names = loaded("H200", [HALF], [(64, 64)], ["hopper"])
    with_masks = ("masked", "dense", "dense_short", "shared", "table", "wide")
    of_options = ("dropout", "f32_out", "gather", "gather_large")
    others = {f"d64_{tile}" for tile in (*with_masks, *of_options, "cache", "few_cache", "mixed")}
    helpers = {
        "clear_counter", "combine", "order_tiles", "order_mixed", "order_packed", "summarize_mask",
        "summarize_ranges", "summarize_wide_mask",
    }  # fmt: skip
    assert names == (
        own
        | {f"hopper_attention_fwd_f16_{tile}" for tile in others}
        | {f"hopper_{helper}_f16" for helper in helpers}
    )


def test_a_b200_gets_pairs_of_ctas_few_rows_and_what_combines_shares(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ARCHFLASH_UNPROVED", "blackwell_dc")
    names = loaded("B200", [HALF], [(128, 128)])
    own = {name for name in names if name.startswith("blackwell_dc_")}
    forward = "blackwell_dc_attention_fwd_f16_d128"
    assert own == {forward, f"{forward}_few", f"{forward}_pair", "blackwell_dc_combine_f16"}


def test_fp8_brings_every_kernel_of_the_quantiser_along() -> None:
    names = loaded("H200", [E4M3], [(128, 128)])
    tiles = {f"hopper_attention_fwd_e4m3_{tile}" for tile in ("d128", "d128_small")}
    hopper = tiles | {"hopper_transpose_v"}
    assert names == {"ada_attention_fwd_e4m3_d128"} | hopper | kernels_built("quantize/quantize")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "name"), [(E4M3, "attention_fwd_e4m3_mx"), (HALF, "attention_fwd_nvfp4")], ids=str
)
def test_kernels_of_block_scales_come_along_where_they_are_proved(
    dtype: torch.dtype, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dtype == E4M3 and not hasattr(torch, "float8_e8m0fnu"):
        pytest.skip("torch before 2.7 lacks the dtype of the scales")
    kernel = f"blackwell_consumer_{name}_d128"
    assert kernel not in loaded("RTX 5090", [dtype], [(128, 96)])
    monkeypatch.setenv("ARCHFLASH_UNPROVED", "blackwell_consumer")
    assert kernel in loaded("RTX 5090", [dtype], [(128, 96)])


@pytest.mark.slow
def test_nothing_is_loaded_where_pytorch_serves_every_call() -> None:
    assert loaded("H200", [torch.float64], [(64, 64)]) == set()
    assert loaded("H200", [HALF], [(999, 999)]) == set()
    assert loaded("T4", [E4M3], [(64, 64)]) == set()
    assert loaded("H200", [HALF], [(64, 64)], ["torch"]) == set()


def test_head_dimensions_that_need_copies_bring_their_kernels_along() -> None:
    names = loaded("H200", [HALF], [(100, 100)])
    assert {"copy_gather", "copy_scatter", "hopper_attention_fwd_f16_d128_large"} <= names


def test_named_implementations_are_loaded_as_if_they_were_forced() -> None:
    names = loaded("H200", [HALF], [(64, 64)], ["simt", "blackwell_consumer"])
    own = {name for name in names if name.startswith("blackwell_consumer_")}
    assert names - own == {"simt_attention_fwd_f16_d64"}
    sizes = ("large", "small", "few")
    assert {f"blackwell_consumer_attention_fwd_f16_d64_{size}" for size in sizes} <= own
    with archflash.force("simt"):
        assert loaded("H200", [HALF], [(64, 64)]) == {"simt_attention_fwd_f16_d64"}


# --- every call finds its kernels loaded ---

DEVICES = ("T4", "A100", "RTX 3090", "RTX 4090", "H200", "B200", "RTX 5090", "GB10")
DIMS = ((64, 64), (128, 128), (40, 64), (96, 96), (192, 128), (128, 48), (256, 256), (160, 160))


def some_call(rng: random.Random, dtype: torch.dtype, dims: tuple[int, int]) -> native.Problem:
    name = str(dtype).removeprefix("torch.")

    def size(most: int) -> int:
        return round(2 ** rng.uniform(0, most))

    options: dict[str, Any] = {}
    for chance, option in (
        (0.4, {"causal": True}),
        (0.2, {"window": (size(12), size(6))}),
        (0.2, {"softcap": 30.0}),
        (0.2, {"return_lse": True}),
        (0.1, {"num_splits": rng.randint(1, 9)}),
        (0.1, {"approximate": rng.choice(("int8_qk", "int8", "int8_pv", "fp16_accumulate"))}),
        (0.1, {"q_offset": size(14)}),
        (0.1, {"key_ranges": torch.zeros(1, 1, 1, 1, 2, dtype=torch.int32, device="meta")}),
        (0.1, {"dropout_p": 0.1}),
        (0.05, {"out_dtype": torch.float32}),
    ):
        if rng.random() < chance:
            options |= option
    if options.get("approximate") and name not in ("float16", "bfloat16"):
        del options["approximate"]
    if rng.random() < 0.25:
        options.pop("approximate", None)
        options.pop("key_ranges", None)
        rows, sequences = size(16), size(7)
        if rng.random() < 0.7:
            longest = rng.randint(-(-rows // sequences), rows)
            options |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
        return packed_call(name, rows=rows, sequences=sequences, d=dims[0], **options)
    hkv = rng.choice((1, 2, 8))
    group = rng.choice((1, 1, 4))
    nq = size(14)
    if dtype.itemsize > 1 and rng.random() < 0.15:
        with_lists = ("causal", "window", "softcap", "return_lse", "num_splits", "q_offset")
        options = {x: value for x, value in options.items() if x in with_lists}
        rows = rng.choice((nq, -(-nq // 64)))
        options["key_indices"] = torch.empty(1, 1, rows, 64, dtype=torch.int32, device="meta")
        hkv, group = rng.choice(((hkv, group), (1, 16), (1, 64), (1, 128)))
    return call(
        name, b=size(8), hq=hkv * group, hkv=hkv, nq=nq, nk=size(17), d=dims[0], dv=dims[1],
        sinks=rng.random() < 0.3, offsets="q_offset" not in options and rng.random() < 0.1,
        **options,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_no_call_launches_a_kernel_that_was_not_loaded(device: str) -> None:
    """Each dtype has each of the head dimensions on one of the GPUs, FP8 in turns."""
    rng = random.Random(device)
    gpu = find_device(device)
    turn = DEVICES.index(device)
    dtypes = (torch.float32, HALF, (E4M3, torch.float8_e5m2)[turn // 2 % 2])
    for number, dtype in enumerate(dtypes):
        dims = DIMS[(turn + 2 * number) % len(DIMS)]
        problems = [some_call(rng, dtype, dims) for _ in range(100)]
        names = set(plans_by_kernel(gpu, [dtype], [dims, (dims[0], dims[0])]))
        for problem in problems:
            plan = _dispatch.select(problem, gpu).plan
            missing = set(plan.kernels if plan else ()) - names
            assert not missing, f"{missing} for {problem.to_dict()}"


@pytest.mark.slow
@pytest.mark.parametrize("kernel", _registry.kernel_names())
def test_no_forced_call_launches_a_kernel_that_was_not_loaded(kernel: str) -> None:
    rng = random.Random(kernel)
    gpu = find_device("B200" if kernel == "blackwell_dc" else "H200")
    dtype = torch.float32 if kernel == "simt" else HALF
    for dims in rng.sample(DIMS, 2):
        names = set(plans_by_kernel(gpu, [dtype], [dims, (dims[0], dims[0])], [kernel]))
        for _ in range(100):
            problem = some_call(rng, dtype, dims)
            plan = native.plan(kernel, problem, gpu)
            missing = set() if isinstance(plan, list) else set(plan.kernels) - names
            assert not missing, f"{missing} for {problem.to_dict()}"


# --- loading ---


@functools.cache
def plans_for_fp8() -> dict[str, native.LaunchPlan]:
    return plans_by_kernel(find_device("H200"), [E4M3], [(64, 64), (192, 128)])


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> list[tuple[native.LaunchPlan, int]]:
    """Makes an H200 the second of two GPUs. Returns the (plan, GPU) pairs that are loaded."""
    plans: list[tuple[native.LaunchPlan, int]] = []
    monkeypatch.setattr(_dispatch, "driver_problem", lambda: None)
    monkeypatch.setattr(_dispatch, "query_device", lambda index: find_device("H200"))
    monkeypatch.setattr(native, "load_kernels", lambda plan, index: plans.append((plan, index)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    return plans


@pytest.mark.parametrize("device", [None, 1, "cuda", "cuda:1", torch.device("cuda", 1)], ids=str)
def test_it_loads_what_it_names_on_the_device_it_is_given(
    h200: list[tuple[native.LaunchPlan, int]], device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def planned(gpu: native.Device, *given: Any) -> dict[str, native.LaunchPlan]:
        asked.append((gpu.name, *given))
        return plans_for_fp8()

    monkeypatch.setattr(_warm_up, "plans_by_kernel", planned)
    names = archflash.warm_up(device, dtypes=[E4M3], head_dims=[64, (192, 128)])
    assert asked == [(find_device("H200").name, [E4M3], [(64, 64), (192, 128)], None)]
    assert names == sorted(plans_for_fp8())
    assert {index for _, index in h200} == {1}
    assert {kernel for plan, _ in h200 for kernel in plan.kernels} == set(names)


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "one-dtype": ({"dtypes": HALF}, TypeError, "dtypes is torch.float16: it must be a sequence"),
    "dtype": ({"dtypes": [torch.int8]}, TypeError, "dtypes holds torch.int8"),
    "one-dim": ({"head_dims": 64}, TypeError, "head_dims is 64: it must be a sequence"),
    "dim-text": ({"head_dims": ["64"]}, TypeError, "head_dims holds '64'"),
    "three": ({"head_dims": [(64, 64, 64)]}, TypeError, "head_dims holds (64, 64, 64)"),
    "dim-zero": ({"head_dims": [0]}, ValueError, "head_dims holds 0"),
    "one-name": ({"implementations": "simt"}, TypeError, "implementations is 'simt'"),
    "name": ({"implementations": ["typo"]}, ForcedImplementationError, "'typo'"),
    "elsewhere": (
        {"implementations": ["blackwell_dc"]},
        ForcedImplementationError,
        "blackwell_dc serves no call of these dtypes and head dims on H200",
    ),
    "cpu": ({"device": "cpu"}, ValueError, "device is cpu"),
    "gpu's name": ({"device": "H100"}, ValueError, "device is 'H100': it must be a CUDA"),
}


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("name", REFUSED)
def test_wrong_arguments_are_refused_with_what_was_given(name: str) -> None:
    options, error, text = REFUSED[name]
    with pytest.raises(error) as caught:
        archflash.warm_up(**options)
    assert text in str(caught.value)


def test_without_a_gpu_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_dispatch, "driver_problem", lambda: "no NVIDIA driver on this machine")
    with pytest.raises(LaunchError, match="no GPU to load kernels onto: no NVIDIA driver"):
        archflash.warm_up()
    monkeypatch.setattr(_dispatch, "driver_problem", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(LaunchError, match="finds no CUDA device"):
        archflash.warm_up()
