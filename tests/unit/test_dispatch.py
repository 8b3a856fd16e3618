"""Which implementation serves a call on each compute capability, what is said, and forcing."""

from __future__ import annotations

import functools
import itertools
import math
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import archflash
from archflash import _archflash as native
from archflash import _dispatch, _fused_kernels, _measured, _overrides, _registry, _user_tables
from archflash._api import find_device, make_problem

# For each capability a known GPU whose facts are taken, and the machine code that this capability
# loads of a folder built for 7.5 and newer. None: the driver compiles the folder's PTX.
CAPABILITIES = {
    (7, 5): ("T4", "sm_75"),
    (8, 0): ("A100", "sm_80"),
    (8, 6): ("RTX 3090", "sm_80"),
    (8, 7): ("Jetson AGX Orin", "sm_80"),
    (8, 9): ("L4", "sm_80"),
    (9, 0): ("H100", "sm_90"),
    (10, 0): ("B200", "sm_100"),
    (10, 3): ("B300", "sm_100"),
    (10, 7): ("B300", "sm_100"),
    (11, 0): ("Jetson Thor", None),
    (12, 0): ("RTX 5090", "sm_120"),
    (12, 1): ("GB10", "sm_120"),
    (13, 0): ("B300", None),
}
PTX = {"simt": "compute_75", "ampere": "compute_80", "ada": "compute_89"}
FP8_FROM = (8, 9)  # the capability that ada is built for: there its 16-bit kernels come first
CONSUMER = "blackwell_consumer"
CONSUMER_CODE = {(9, 0): "sm_90a", (12, 0): "sm_120f", (12, 1): "sm_120f"}
DC = "blackwell_dc"  # for 10.x and 11.0
HOPPER = "hopper"  # for 9.0
MEASURED = (9, 0)  # the capability with rows in bench/results
TENSOR_CORES_FROM = (8, 0)  # the first capability with archflash's kernels on tensor cores
KERNELS = _registry.kernel_names()
THIS_BUILD = ", ".join(_registry.names())
# The newest capability that PyTorch's fused kernels are built for.
PYTORCH_ENDS = (12, 1)


def dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def code(name: str, capability: tuple[int, int]) -> str:
    if name == "ada" and capability == FP8_FROM:
        return "sm_89"
    if name == CONSUMER:
        return CONSUMER_CODE[capability]
    if name == HOPPER:
        return "sm_90a"
    if name == DC:
        return f"sm_{capability[0]}0f"
    return CAPABILITIES[capability][1] or f"{PTX[name]} PTX, compiled by the driver at first use"


def kernel_for_16_bits(capability: tuple[int, int]) -> str:
    """Our first kernel."""
    if capability == MEASURED:
        return HOPPER
    if capability[0] == 12:
        return CONSUMER
    if capability[0] in (10, 11):
        return DC
    return "ampere" if capability >= TENSOR_CORES_FROM else "simt"


def kernels_for_16_bits(capability: tuple[int, int]) -> tuple[str, ...]:
    """The kernels on tensor cores, in the order in which dispatch asks them."""
    if capability == MEASURED:
        return (HOPPER, CONSUMER, "ampere", "ada", DC)
    return (DC, HOPPER, CONSUMER, "ampere", "ada")


def why_not_blackwell_dc(capability: tuple[int, int]) -> list[str]:
    """The reasons of blackwell_dc against a capability other than 10.x and 11.0."""
    return [
        f"compute capability {dotted(capability)} (GPU {dotted(capability)}): {DC} is built "
        "for sm_100f, sm_110f"
    ]


def why_not_hopper(capability: tuple[int, int]) -> list[str]:
    """The reasons of hopper against a capability where nothing was measured for it."""
    if capability == MEASURED:
        return [f"compute capability 9.0: {HOPPER} serves it only when it is forced"]
    return [
        f"compute capability {dotted(capability)} (GPU {dotted(capability)}): {HOPPER} is built "
        "for sm_90a"
    ]


def why_not_the_consumer(capability: tuple[int, int]) -> list[str]:
    """The reasons of blackwell_consumer against a capability that it serves only when forced."""
    if capability == (9, 0):
        return [f"compute capability 9.0: {CONSUMER} serves it only when it is forced"]
    return [
        f"compute capability {dotted(capability)} (GPU {dotted(capability)}): {CONSUMER} is built "
        "for sm_120f, sm_90a"
    ]


@pytest.fixture(autouse=True)
def newest_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever PyTorch is installed, it asks cuDNN first on 9.x and 10.x, as from 2.11 on."""
    monkeypatch.setattr(
        _fused_kernels, "cudnn_comes_first", lambda capability: capability[0] in (9, 10)
    )
    monkeypatch.setattr(_fused_kernels, "cudnn_version", lambda: 91900)


@pytest.fixture
def everywhere_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order as it is where every kernel has run; test_proofs.py has what it is before."""
    monkeypatch.setenv("ARCHFLASH_UNPROVED", "1")


once_proved = pytest.mark.usefixtures("everywhere_proved")
every_capability = pytest.mark.parametrize("capability", CAPABILITIES, ids=dotted)
every_16_bit_dtype = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


def gpu(capability: tuple[int, int]) -> native.Device:
    facts = find_device(CAPABILITIES[capability][0]).to_dict()
    major, minor = capability
    name = f"GPU {dotted(capability)}"
    return native.Device.from_dict(facts | {"name": name, "major": major, "minor": minor})


def problem(
    dtype: torch.dtype = torch.float32,
    *,
    d: int = 64,
    nq: int = 128,
    nk: int = 128,
    grad: bool = False,
    **options: Any,
) -> native.Problem:
    """A call of 2 batches and 4 heads, as if on a GPU."""
    q = torch.empty(2, 4, nq, d, dtype=dtype, device="meta", requires_grad=grad)
    k = torch.empty(2, 4, nk, d, dtype=dtype, device="meta")
    return make_problem(q, k, k, **options).as_if_on_cuda()


def packed(dtype: torch.dtype = torch.float16) -> native.Problem:
    q = torch.empty(100, 4, 64, dtype=dtype, device="meta")
    ends = torch.empty(4, dtype=torch.int32, device="meta")
    return make_problem(q, q, q, cu_seqlens_q=ends, cu_seqlens_k=ends).as_if_on_cuda()


def mask(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """One that serves any number of keys, and no kernel takes in float64."""
    return torch.empty(128, 1, dtype=dtype, device="meta")


def sinks() -> torch.Tensor:
    return torch.empty(4, device="meta")


# --- the choice ---

BEFORE_AMPERE = (
    "compute capability 7.5 (GPU 7.5): ampere is built for sm_80, sm_90, sm_100, sm_120, compute_80"
)


def before_ada(capability: tuple[int, int]) -> str:
    number = dotted(capability)
    return (
        f"compute capability {number} (GPU {number}): ada is built for "
        "sm_89, sm_90, sm_100, sm_120, compute_89"
    )


@every_capability
def test_float32_is_served_by_simt_with_native_code(capability: tuple[int, int]) -> None:
    # On 8.0 PyTorch computes more of them faster.
    given = problem(nq=16 if capability == (8, 0) else 128)
    decision = _dispatch.select(given, gpu(capability))
    assert decision.chosen == "simt"
    assert decision.plan is not None
    assert decision.plan.implementation == "simt"
    assert decision.plan.code == code("simt", capability)
    assert decision.plan.device.capability == capability
    assert list(decision.reasons) == [DC, HOPPER, CONSUMER, "ada", "ampere", "torch"]
    assert decision.reasons["torch"] == ["simt is expected to be faster"]
    for name, majors, elsewhere in (
        (CONSUMER, (9, 12), why_not_the_consumer),
        (DC, (10, 11), why_not_blackwell_dc),
        (HOPPER, (9,), why_not_hopper),
    ):
        if capability[0] in majors:
            assert decision.reasons[name][0].startswith(f"dtype float32: {name} takes ")
        else:
            assert decision.reasons[name] == elsewhere(capability)
    if capability < FP8_FROM:
        assert decision.reasons["ada"] == [before_ada(capability)]
    (reason,) = decision.reasons["ampere"]
    if capability >= TENSOR_CORES_FROM:
        assert reason.startswith("dtype float32: ampere takes float16 and bfloat16; convert")
    else:
        assert reason == BEFORE_AMPERE
    assert not decision.fallback


@pytest.mark.parametrize(
    ("device", "d", "rows", "options", "chosen"),
    [
        ("H200", 160, 729, {}, "torch"),
        ("H200", 136, 64, {}, "torch"),
        ("H200", 128, 729, {}, "simt"),
        ("H200", 160, 2048, {}, "simt"),
        ("H200", 160, 729, {"causal": True}, "simt"),
        ("H200", 160, 200, {"causal": True}, "torch"),
        ("H200", 160, 2048, {"grad": True}, "simt"),
        ("H200", 160, 2048, {"grad": True, "causal": True}, "simt"),
        ("H200", 160, 2047, {"grad": True}, "torch"),
        ("A100", 160, 2048, {"grad": True}, "torch"),
        ("H200", 160, 729, {"window": (100, 100)}, "simt"),
        ("H200", 160, 729, {"softcap": 20.0}, "simt"),
        ("A100", 160, 729, {}, "torch"),
        ("A100", 64, 729, {"causal": True}, "torch"),
        ("A100", 64, 16, {}, "simt"),
        ("A100", 64, 729, {"softcap": 20.0}, "simt"),
        ("A100", 64, 729, {"window": (100, 100)}, "simt"),
        ("RTX 3090", 64, 729, {}, "simt"),
        ("RTX 4090", 64, 729, {}, "simt"),
        ("A100", 320, 729, {}, "torch"),
    ],
)
def test_float32_goes_to_pytorch_where_that_is_faster(
    device: str, d: int, rows: int, options: dict[str, Any], chosen: str
) -> None:
    given = problem(d=d, nq=rows, nk=rows, **options)
    assert _dispatch.select(given, find_device(device)).chosen == chosen


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@every_capability
def test_only_thor_and_the_future_run_ptx(capability: tuple[int, int], dtype: torch.dtype) -> None:
    plan = _dispatch.select(problem(dtype, return_lse=True), gpu(capability)).plan
    assert plan is not None
    needs_driver_compiler = plan.code.startswith("compute_")
    assert needs_driver_compiler == (capability in ((11, 0), (13, 0)))


@once_proved
@pytest.mark.parametrize(
    ("capability", "codes"),
    [
        ((10, 7), {"float16": "sm_100f", "float8_e4m3fn": "sm_100f", "float8_e5m2": "sm_100"}),
        ((11, 0), {"float16": "sm_110f", "float8_e4m3fn": "sm_110f", "float8_e5m2": "compute_89"}),
    ],
    ids=str,
)
def test_explain_names_what_serves_10_7_and_11_0(
    capability: tuple[int, int], codes: dict[str, str]
) -> None:
    for dtype, built in codes.items():
        decision = _dispatch.select(problem(getattr(torch, dtype), d=128), gpu(capability))
        name = "ada" if dtype == "float8_e5m2" else DC
        lines = str(decision).splitlines()
        assert any(line.startswith(f"  chosen  {name}: ") for line in lines)
        assert any(line.strip().startswith(f"code: {built}") for line in lines)
        if name == DC:
            assert "for 10.x (B200, B300, GB200, GB300) and 11.0 (Jetson Thor)" in str(decision)
            # Only 10.3 is said to have the faster MUFU.
            assert "of 128 by polynomial" in str(decision)
            assert "exponentials: 0 of 16" not in str(decision)


# (query rows, keys) of the tile for a call that fills the GPU, by the KB of shared memory that a
# CTA can have, then by d.
ADA_TILES = {64: (128, 128), 96: (128, 64), 128: (256, 64), 192: (128, 32), 256: (128, 32)}
AMPERE_TILES = {
    99: {64: (128, 64), 96: (128, 64), 128: (128, 32), 192: (128, 32), 256: (128, 32)},
    163: {64: (128, 128), 96: (128, 64), 128: (128, 64), 192: (128, 32), 256: (128, 64)},
    227: {64: (128, 128), 96: (128, 64), 128: (128, 64), 192: (128, 64), 256: (64, 64)},
}


@once_proved
@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
@every_16_bit_dtype
@every_capability
def test_16_bits_go_to_the_tensor_cores_with_the_tile_for_the_gpu(
    capability: tuple[int, int], dtype: torch.dtype, d: int
) -> None:
    q = torch.empty(8, 32, 2048, d, dtype=dtype, device="meta")
    v = q[..., :128] if d == 192 else q
    device = gpu(capability)
    decision = _dispatch.select(make_problem(q, q, v).as_if_on_cuda(), device)
    if capability < TENSOR_CORES_FROM:
        assert decision.chosen != "ampere"
        assert decision.reasons["ampere"] == [BEFORE_AMPERE]
        return
    name = kernel_for_16_bits(capability)
    if capability == FP8_FROM and d == 192:
        name = "ada"  # whose tiles for (192, 128) may be faster
    assert decision.chosen == name
    assert decision.why.startswith(native.describe(name).summary)
    if name in (CONSUMER, DC, HOPPER):  # test_*_plans.py have their tiles
        name = "ampere"
        decision = _dispatch.select(make_problem(q, q, v).as_if_on_cuda(), device, name)
        assert decision.chosen == name
    assert decision.plan is not None
    assert decision.plan.implementation == name
    assert decision.plan.code == code(name, capability)
    assert decision.plan.device.capability == capability
    tiles = ADA_TILES if name == "ada" else AMPERE_TILES[device.shared_per_block // 1024]
    if name == "ampere" and tiles is AMPERE_TILES[99] and capability < (9, 0):
        tiles = tiles | {64: (128, 128), 256: (64, 64)}  # where every key is seen
    rows, keys = tiles[d]
    tile = decision.plan.tile
    assert tile is not None
    assert (tile.block_q, tile.block_k) == (rows, keys)
    assert (tile.head_dim, tile.head_dim_v) == (d, 128 if d == 192 else d)
    (launch,) = decision.plan.to_dict()["launches"]
    assert math.prod(launch["grid"]) == 8 * 32 * 2048 // rows


@once_proved
@every_16_bit_dtype
@pytest.mark.parametrize(
    "capability", [c for c in CAPABILITIES if c >= TENSOR_CORES_FROM], ids=dotted
)
def test_16_bits_leave_pytorch_and_the_cuda_cores_behind_from_8_0_on(
    capability: tuple[int, int], dtype: torch.dtype
) -> None:
    decision = _dispatch.select(problem(dtype), gpu(capability))
    name = kernel_for_16_bits(capability)
    assert decision.chosen == name
    faster = [f"{name} {'was measured' if capability == MEASURED else 'is expected'} to be faster"]
    reasons = {
        DC: why_not_blackwell_dc(capability),
        HOPPER: [] if name == HOPPER else why_not_hopper(capability),
        CONSUMER: [] if name == CONSUMER else why_not_the_consumer(capability),
        "ada": [before_ada(capability)] if capability < FP8_FROM else faster,
        "ampere": faster,
        "torch": faster,
        "simt": faster,
    }
    del reasons[name]
    if capability == MEASURED:  # a small problem
        reasons[CONSUMER] = faster
        reasons["torch"] = [f"{name} was measured to be faster than PyTorch's cuDNN kernel"]
    elif capability[0] == 10:  # cuDNN uses what these have beyond mma.sync
        reasons["torch"] = [
            f"{name} comes first, though PyTorch's cuDNN kernel may be faster on this GPU"
        ]
    assert decision.reasons == reasons
    assert not decision.fallback


@every_16_bit_dtype
def test_few_queries_go_to_our_kernels_on_every_gpu(dtype: torch.dtype) -> None:
    q = torch.empty(1, 8, 16, 128, dtype=dtype, device="meta")
    k = torch.empty(1, 8, 4096, 128, dtype=dtype, device="meta")
    decision = archflash.explain(q, k, k, device="H200")
    assert decision.chosen == "ampere"
    assert decision.reasons["torch"] == [
        "ampere was measured to be about as fast as PyTorch's cuDNN kernel, which makes a plan for "
        "every new shape"
    ]
    assert archflash.explain(q, k, k, device="H200", softcap=5.0).chosen == "ampere"
    for device, own in (("A100", "ampere"), ("RTX 4090", "ampere"), ("RTX 5090", CONSUMER)):
        elsewhere = archflash.explain(q, k, k, device=device)
        assert elsewhere.chosen == own
        assert "shares of the keys of each tile" in str(elsewhere)
        assert elsewhere.reasons["torch"] == [f"{own} is expected to be faster"]
    more = torch.empty(1, 8, 17, 128, dtype=dtype, device="meta")
    assert archflash.explain(more, k, k, device="A100").chosen == "ampere"


@pytest.mark.parametrize(
    ("shape", "dv", "causal", "chosen"),
    [
        ((32, 950, 32), 32, True, "ampere"),
        ((32, 950, 40), 40, True, "ada"),
        ((32, 950, 40), 40, False, "ampere"),
        ((32, 950, 96), 96, True, "ada"),
        ((8, 950, 96), 96, True, "ampere"),  # fewer tiles than SMs
        ((32, 950, 128), 128, True, "ampere"),
        ((8, 950, 192), 128, False, "ada"),
        ((8, 950, 160), 160, False, "ampere"),
        ((8, 1, 128), 128, False, "ampere"),
        ((8, 1, 192), 128, False, "ampere"),
    ],
)
def test_ada_serves_what_it_has_tiles_for(
    shape: tuple[int, int, int], dv: int, causal: bool, chosen: str
) -> None:
    heads, rows, d = shape
    q = torch.empty(1, heads, rows, d, dtype=torch.bfloat16, device="meta")
    k = torch.empty(1, heads, 2000, d, dtype=torch.bfloat16, device="meta")
    v = torch.empty(1, heads, 2000, dv, dtype=torch.bfloat16, device="meta")
    found = archflash.explain(q, k, v, device="RTX 4090", causal=causal)
    assert found.chosen == chosen
    # The size of a call must not matter where its bits are those of a row alone.
    same = archflash.explain(q, k, v, device="RTX 4090", causal=causal, batch_invariant=True)
    assert same.chosen == ("ada" if d > 32 and dv <= 128 else "ampere")


@once_proved
@pytest.mark.parametrize("device", ["B200", "B300"])
@every_16_bit_dtype
def test_few_queries_go_to_the_kernel_that_splits_the_keys(dtype: torch.dtype, device: str) -> None:
    q = torch.empty(1, 8, 1, 128, dtype=dtype, device="meta")
    k = torch.empty(1, 8, 8192, 128, dtype=dtype, device="meta")
    decision = archflash.explain(q, k, k, device=device)
    assert decision.chosen == DC
    assert "  chosen  blackwell_dc" in str(decision)
    assert "splits: 16 shares of the keys of each tile" in str(decision)
    assert "workspace: " in str(decision)
    assert list(decision.reasons)[-2:] == ["torch", "simt"]  # those that split keys come first
    h200 = archflash.explain(q, k, k, device="H200")
    assert h200.chosen == "ampere"
    assert h200.reasons[DC] == [
        "compute capability 9.0 (H200): blackwell_dc is built for sm_100f, sm_110f"
    ]


@once_proved
def test_num_splits_is_a_reason_where_a_kernel_does_not_split() -> None:
    q = torch.empty(1, 8, 1, 128, dtype=torch.float16, device="meta")
    k = torch.empty(1, 8, 8192, 128, dtype=torch.float16, device="meta")
    decision = archflash.explain(q, k, k, device="H200", num_splits=3)
    assert decision.chosen == "ampere"
    assert decision.reasons["simt"] == [
        "num_splits 3: simt does not split the keys; leave num_splits out or pass 1 or use "
        "implementation='torch'"
    ]
    assert "num_splits=3" in str(decision).splitlines()[0]
    for name in ("ampere", "ada", "hopper", CONSUMER):
        forced = archflash.explain(q, k, k, device="H200", num_splits=3, implementation=name)
        assert forced.plan is not None
        assert forced.plan.tile is not None
        assert forced.plan.tile.splits == 3
    fp8 = (x.to(torch.float8_e4m3fn) for x in (q, k, k))
    with pytest.raises(
        archflash.ForcedImplementationError,
        match="num_splits 3 with float8_e4m3fn: ada splits the keys of 16-bit inputs only",
    ):
        archflash.explain(*fp8, device="H200", num_splits=3, implementation="ada")
    # With num_splits=1 PyTorch, which may split the keys, does not come first.
    assert archflash.explain(q, k, k, device="H200", num_splits=1).chosen == "ampere"
    asked = archflash.explain(q, k, k, device="B200", num_splits=3)
    assert asked.chosen == DC
    assert "splits: 3 shares of the keys of each tile, as asked for" in str(asked)


@pytest.mark.parametrize(
    ("device", "name"),
    [("A100", "ampere"), ("RTX 4090", "ada"), ("H200", "ampere"), ("RTX 5090", CONSUMER)],
)
def test_batch_invariant_calls_of_all_sizes_go_to_one_kernel(device: str, name: str) -> None:
    kernels = set()
    for batch, nq, nk in ((1, 1, 100), (64, 1, 8192), (2, 2048, 2048), (1, 16, 70_000)):
        q = torch.empty(batch, 8, nq, 128, dtype=torch.bfloat16, device="meta")
        k = torch.empty(batch, 2, nk, 128, dtype=torch.bfloat16, device="meta")
        decision = archflash.explain(q, k, k, device=device, batch_invariant=True, causal=True)
        assert decision.chosen == name
        assert "one for every 1024 keys of a sequence, by position" in str(decision)
        assert decision.plan is not None
        kernels.add(decision.plan.kernels[0])
    assert len(kernels) == 1


@pytest.mark.parametrize("device", ["A100", "H200", "B200", "RTX 5090"])
def test_pytorch_comes_before_no_kernel_in_batch_invariant_calls(device: str) -> None:
    known = find_device(device)
    for dtype, d, rows in ((torch.float16, 64, 1024), (torch.bfloat16, 512, 100)):
        q = torch.empty(1, 2, rows, d, dtype=dtype, device="meta")
        mask = torch.empty(rows, rows, dtype=torch.bool, device="meta")
        for options in ({"attn_mask": mask}, {"causal": True}, {"softcap": 2.0}):
            decision = archflash.explain(q, q, q, device=device, batch_invariant=True, **options)
            assert decision.chosen != "torch"
            order = _dispatch.order.of(decision.problem, known.capability, known)
            assert order[-1] == "torch"


def test_batch_invariant_calls_that_no_kernel_serves_are_errors() -> None:
    q = torch.empty(1, 8, 16_384, 128, dtype=torch.bfloat16, device="meta")
    k = torch.empty(1, 8, 131_072, 128, dtype=torch.bfloat16, device="meta")
    with pytest.raises(archflash.UnsupportedError, match="would need 17 GB for partial results"):
        archflash.explain(*(x.expand(2, -1, -1, -1) for x in (q, k, k)), device="A100",
                          batch_invariant=True)  # fmt: skip
    for dtype, words in (
        (torch.float32, "simt does not serve this option"),
        (torch.float8_e4m3fn, "16-bit inputs"),
    ):
        with pytest.raises(archflash.UnsupportedError, match=words):
            archflash.explain(*(x.to(dtype) for x in (q, q, q)), device="RTX 4090",
                              batch_invariant=True)  # fmt: skip
    cpu = torch.zeros(1, 2, 3, 8, dtype=torch.bfloat16)
    with pytest.raises(archflash.UnsupportedError, match="move them to a CUDA device"):
        archflash.attention(cpu, cpu, cpu, batch_invariant=True)
    with pytest.raises(archflash.ForcedImplementationError, match="torch is forced, but batch_inv"):
        archflash.attention(cpu, cpu, cpu, batch_invariant=True, implementation="torch")
    with pytest.raises(archflash.UnsupportedError, match="computes the gradients of this call"):
        torch.func.vmap(
            lambda x: archflash.attention(x, x, x, batch_invariant=True, implementation=None)
        )(cpu[None])
    with pytest.raises(ValueError, match="num_splits is given with batch_invariant=True"):
        archflash.attention(cpu, cpu, cpu, batch_invariant=True, num_splits=2)


def test_plain_float16_goes_to_pytorchs_fused_kernel_on_7_5() -> None:
    decision = _dispatch.select(problem(torch.float16), gpu((7, 5)))
    assert decision.chosen == "torch"
    assert decision.plan is None
    assert not decision.fallback
    assert "tensor cores" in decision.why
    assert list(decision.reasons) == [DC, HOPPER, CONSUMER, "ampere", "ada", "simt"]
    assert decision.reasons["ampere"] == [BEFORE_AMPERE]
    (reason,) = decision.reasons["simt"]
    assert reason.startswith("it leaves the tensor cores unused: ")


def test_plain_bfloat16_goes_to_simt_on_7_5() -> None:
    decision = _dispatch.select(problem(torch.bfloat16), gpu((7, 5)))
    assert decision.chosen == "simt"
    assert decision.reasons == {
        DC: why_not_blackwell_dc((7, 5)),
        HOPPER: why_not_hopper((7, 5)),
        CONSUMER: why_not_the_consumer((7, 5)),
        "ampere": [BEFORE_AMPERE],
        "ada": [before_ada((7, 5))],
        "torch": ["simt is expected to be faster"],
    }
    assert not decision.fallback


@every_16_bit_dtype
@every_capability
def test_pytorch_comes_before_the_cuda_cores_where_its_fused_kernels_reach(
    capability: tuple[int, int], dtype: torch.dtype
) -> None:
    asked = _dispatch.order.of(problem(dtype), capability)
    first = (7, 5) if dtype == torch.float16 else (8, 0)
    fused = first <= capability <= PYTORCH_ENDS
    kernels = kernels_for_16_bits(capability)
    if capability == MEASURED:
        assert asked == (HOPPER, CONSUMER, "torch", "ampere", "ada", "simt", DC)
    elif capability[0] in (10, 11):  # mma.sync leaves most of these tensor cores idle
        assert asked == (DC, "torch", HOPPER, CONSUMER, "ampere", "ada", "simt")
    else:
        assert asked == (*kernels, *(("torch", "simt") if fused else ("simt", "torch")))


@once_proved
@every_16_bit_dtype
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda dtype: problem(dtype, sinks=sinks()), id="sinks"),
        pytest.param(lambda dtype: problem(dtype, softcap=30.0), id="softcap"),
        pytest.param(lambda dtype: problem(dtype, return_lse=True), id="lse"),
        pytest.param(packed, id="cu_seqlens"),
    ],
)
@every_capability
def test_what_pytorch_does_unfused_goes_to_a_kernel(
    capability: tuple[int, int], make: Callable[[torch.dtype], native.Problem], dtype: torch.dtype
) -> None:
    given, expected = make(dtype), kernel_for_16_bits(capability)
    kernels = kernels_for_16_bits(capability)
    assert _dispatch.order.of(given, capability) == (*kernels, "simt", "torch")
    decision = _dispatch.select(given, gpu(capability))
    assert decision.chosen == expected
    assert decision.plan is not None
    assert decision.plan.code == code(expected, capability)


def test_grouped_heads_leave_the_only_fused_kernel_of_a_t4() -> None:
    """On 7.5 PyTorch has only the memory-efficient kernel, which takes no grouped heads."""
    q = torch.empty(2, 8, 128, 64, dtype=torch.float16, device="meta")
    k = torch.empty(2, 2, 128, 64, dtype=torch.float16, device="meta")
    grouped = make_problem(q, k, k).as_if_on_cuda()
    assert _dispatch.select(grouped, gpu((7, 5))).chosen == "simt"
    kernels = (DC, HOPPER, CONSUMER, "ampere", "ada")
    assert _dispatch.order.of(grouped, (7, 5)) == (*kernels, "simt", "torch")
    assert _dispatch.order.of(grouped, (8, 0)) == (*kernels, "torch", "simt")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        pytest.param(
            lambda: problem(torch.float8_e4m3fn, out_dtype=torch.float32),
            "dtype float8_e4m3fn: simt takes float32, float16 and bfloat16",
            id="fp8",
        ),
        pytest.param(
            lambda: problem(torch.float64),
            "dtype float64: simt takes float32, float16 and bfloat16",
            id="float64",
        ),
        pytest.param(
            lambda: problem(attn_mask=mask()),
            "attn_mask of dtype float64 with float32 inputs: simt takes bool, float32",
            id="mask",
        ),
        pytest.param(
            lambda: problem(out_dtype=torch.float16),
            "out_dtype float16 with float32 inputs",
            id="out_dtype",
        ),
    ],
)
@every_capability
def test_what_no_kernel_serves_falls_back_to_torch_with_the_reason(
    capability: tuple[int, int], make: Callable[[], native.Problem], reason: str
) -> None:
    decision = _dispatch.select(make(), gpu(capability))
    assert decision.chosen == "torch"
    assert decision.fallback
    assert decision.plan is None
    assert decision.why == "no kernel of archflash serves this call"
    assert any(reason in said for said in decision.reasons["simt"])
    assert all("torch" in said for said in decision.reasons["simt"])  # what to do
    if capability >= TENSOR_CORES_FROM:
        assert all("torch" in said for said in decision.reasons["ampere"])


@once_proved
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@every_capability
def test_fp8_goes_to_the_kernel_for_the_gpu_from_8_9_on_and_to_torch_before(
    capability: tuple[int, int], dtype: torch.dtype
) -> None:
    decision = _dispatch.select(problem(dtype), gpu(capability))
    if capability[0] in (10, 11) and dtype == torch.float8_e4m3fn:
        assert decision.chosen == DC
        assert decision.plan is not None
        assert decision.plan.code == code(DC, capability)
        assert decision.reasons["ada"] == [f"{DC} is expected to be faster"]
    elif capability[0] == 12 and dtype == torch.float8_e4m3fn:
        assert decision.chosen == CONSUMER
        assert decision.plan is not None
        assert decision.plan.code == code(CONSUMER, capability)
        assert decision.reasons["ada"] == [f"{CONSUMER} is expected to be faster"]
        assert "its speed is unmeasured" in str(decision)
    elif capability == MEASURED and dtype == torch.float8_e4m3fn:
        assert decision.chosen == HOPPER
        assert decision.reasons["ada"] == [f"{HOPPER} was measured to be faster"]
    elif capability >= FP8_FROM:
        assert decision.chosen == "ada"
        assert decision.plan is not None
        assert decision.plan.code == code("ada", capability)
        assert decision.reasons["torch"] == ["ada is expected to be faster"]
        assert decision.reasons["ampere"][0].startswith(f"dtype {str(dtype)[6:]}: ampere takes")
    else:
        assert decision.chosen == "torch"
        assert decision.fallback
        assert decision.reasons["ada"] == [before_ada(capability)]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        pytest.param({"d": 520}, "head_dim 520: ampere takes multiples of 8", id="large d"),
        pytest.param({"out_dtype": torch.float64}, "out_dtype float64 with ", id="out_dtype"),
    ],
)
@every_16_bit_dtype
@every_capability
def test_16_bits_that_no_kernel_serves_fall_back_to_torch_with_the_reasons(
    capability: tuple[int, int], dtype: torch.dtype, options: dict[str, Any], reason: str
) -> None:
    decision = _dispatch.select(problem(dtype, **options), gpu(capability))
    assert decision.chosen == "torch"
    assert decision.fallback
    if capability < TENSOR_CORES_FROM:
        assert decision.reasons["ampere"] == [BEFORE_AMPERE]
        return
    assert decision.reasons["ampere"][0].startswith(reason)
    # The core set has the same limits everywhere, but for the largest heads.
    others = ("simt", *{10: (DC,), 12: (CONSUMER,)}.get(capability[0], ()))
    for other in others:
        largest = native.describe(other).largest_head_dim
        own_words = [
            said.replace("ampere", other).replace("up to 512", f"up to {largest}")
            for said in decision.reasons["ampere"]
        ]
        assert decision.reasons[other] == own_words


@every_16_bit_dtype
@every_capability
def test_fp32_outputs_of_16_bits_come_from_a_kernel(
    capability: tuple[int, int], dtype: torch.dtype
) -> None:
    """PyTorch would compute them by plain operations."""
    decision = _dispatch.select(problem(dtype, out_dtype=torch.float32), gpu(capability))
    assert decision.chosen != "torch"
    assert "out_dtype" in str(decision)


MASKS: dict[str, torch.Tensor] = {
    "attn_mask": torch.empty(128, 1, dtype=torch.bool, device="meta"),
    "key_ranges": torch.empty(1, 1, 128, 2, 2, dtype=torch.int32, device="meta"),
    "alibi_slopes": torch.empty(4, device="meta"),
    "block_mask": torch.empty(1, 1, 2, 2, dtype=torch.int8, device="meta"),
}


@pytest.mark.parametrize("name", MASKS)
@every_capability
def test_masks_as_data_go_to_ampere_for_16_bits_and_to_simt_for_fp32(
    capability: tuple[int, int], name: str
) -> None:
    of_32 = _dispatch.select(problem(**{name: MASKS[name]}), gpu(capability))
    assert of_32.chosen == "simt"
    assert of_32.plan is not None
    assert of_32.plan.tile.name == "d64_masked"
    of_16 = _dispatch.select(problem(torch.float16, **{name: MASKS[name]}), gpu(capability))
    says = f"{name} with float16 inputs: simt takes masks as data with float32 inputs only"
    assert of_16.reasons["simt"][0].startswith(says)
    if capability < TENSOR_CORES_FROM:
        assert of_16.chosen == "torch"
        return
    if name == "block_mask" and capability == (9, 0):
        assert of_16.chosen == HOPPER
        return
    assert "fastest measured" not in str(of_16)  # dense kernels were
    if name == "attn_mask" and capability <= PYTORCH_ENDS:
        many = torch.empty(129, 1, dtype=torch.bool, device="meta")
        of_many = _dispatch.select(problem(torch.float16, nq=129, attn_mask=many), gpu(capability))
        assert of_many.chosen == (HOPPER if capability == (9, 0) else "torch")
        assert not of_many.fallback
        faster = "PyTorch's fused kernels read a dense mask faster, where that was measured"
        if capability != (9, 0):
            assert (of_many.why, of_many.reasons["ampere"]) == (faster, [faster])
        table = _dispatch.select(
            problem(torch.float16, **{each: MASKS[each] for each in ("attn_mask", "block_mask")}),
            gpu(capability),
        )
        assert table.chosen == (HOPPER if capability == (9, 0) else "ampere")
    if name == "attn_mask" and capability == (9, 0):
        assert of_16.chosen == HOPPER
        return
    own_table = name == "block_mask" and capability[0] == 12
    assert of_16.chosen == (CONSUMER if own_table else "ampere")
    assert of_16.plan is not None
    assert of_16.plan.tile.name == ("d64_table" if own_table else "d64_masked")
    if capability == (9, 0):
        forced = "compute capability 9.0: hopper serves it only when it is forced"
        assert of_16.reasons[HOPPER] == [forced]
    for other in (DC, "ada") if name == "block_mask" else (DC, CONSUMER, "ada"):
        own = [said for said in of_16.reasons[other] if said.startswith(name)]
        built = native.has_code(other, capability)
        if built:
            says = f"{name}: {other} has causal and window masks only; drop {name}"
            assert own[0].startswith(says)


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16], ids=str)
def test_masks_too_large_for_copies_are_read_in_place(heads: int, dtype: torch.dtype) -> None:
    n = 100000 if heads == 1 else 60000
    mask = torch.empty(1, heads, n, n, dtype=dtype, device="meta")
    call = problem(torch.bfloat16, nq=n, nk=n, attn_mask=mask)
    assert _dispatch.select(call, find_device("H200")).chosen == HOPPER


@pytest.mark.parametrize("name", ["key_ranges", "block_mask", "alibi_slopes"])
def test_masks_as_data_go_to_hopper_where_it_was_measured(name: str) -> None:
    def chosen(**options: Any) -> str:
        return _dispatch.select(
            problem(torch.bfloat16, **{name: MASKS[name], **options}), find_device("H200")
        ).chosen

    assert chosen(d=128) == HOPPER
    assert chosen(d=64) == (HOPPER if name == "block_mask" else "ampere")
    assert chosen(d=256) == "ampere"
    if name != "alibi_slopes":  # with slopes alone a dense mask goes to PyTorch
        kernel = HOPPER if name == "block_mask" else "ampere"
        assert chosen(d=128, attn_mask=MASKS["attn_mask"]) == kernel


@pytest.mark.parametrize("rows", [1, 300])
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16], ids=str)
def test_a_mask_with_a_table_goes_to_hopper_without_gradients(
    dtype: torch.dtype, rows: int
) -> None:
    table = torch.empty(1, 1, 5, 8, dtype=torch.int8, device="meta")
    mask = torch.empty(1, 1, rows, 512, dtype=dtype, device="meta")
    call = {"nq": 300, "nk": 512, "d": 128, "attn_mask": mask, "block_mask": table}
    for grad in (False, True):
        given = problem(torch.bfloat16, grad=grad, **call)
        chosen = _dispatch.select(given, find_device("H200")).chosen
        assert chosen == ("ampere" if grad else HOPPER)


def test_a_dense_mask_goes_to_hopper_where_it_was_measured() -> None:
    def select(mask: torch.Tensor, nq: int = 4096, **options: Any) -> _dispatch.Decision:
        given = {"nq": nq, "nk": 4096, "d": 128, "attn_mask": mask, **options}
        return _dispatch.select(problem(torch.bfloat16, **given), find_device("H200"))

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    keep, of_heads = empty(4096, 4096, dtype=torch.bool), empty(4, 4096, 4096)
    for mask in (keep, empty(4096, 4096), of_heads > 0, of_heads):
        for d in (64, 128):
            decision = select(mask, d=d)
            assert decision.chosen == HOPPER
            (reason,) = decision.reasons["torch"]
            assert reason.startswith("hopper was measured to be faster with such a mask than")
    # Few tiles, and elements that TMA cannot copy.
    for few in (keep[:200], empty(200, 4097)[:, 1:]):
        assert select(few, nq=200).chosen == HOPPER
    assert select(empty(4096, 4097)[:, 1:]).chosen == HOPPER
    assert select(keep, d=256).chosen == HOPPER


def test_under_enable_the_kernel_that_was_measured_to_read_a_mask_faster_serves_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PyTorch's operators do not have what archflash promises around them. So PyTorch's own kernel
    keeps a call with a mask if it was faster by itself, whatever was measured without a mask.
    """
    monkeypatch.setattr(_overrides, "_device_of", lambda *call: (find_device("H200"), None))
    kept = _measured._table()

    def served(mask: torch.Tensor | None) -> native.LaunchPlan | str:
        rows = 4096 if mask is None else len(mask)
        call = problem(torch.bfloat16, nq=rows, nk=4096, d=64, attn_mask=mask)
        return _overrides._decide(call, 0, None)

    def measure(kind_of_mask: str, *order: str) -> None:
        changed = {
            key: replace(found, order=order) if key[1].mask == kind_of_mask else found
            for key, found in kept.items()
        }
        monkeypatch.setattr(_measured, "_table", lambda: changed)

    added = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    keep = added > 0
    assert served(added) == _dispatch.MASK_READ_FASTER
    assert not isinstance(served(keep), str)
    assert served(keep[:200]) == _dispatch.MASK_READ_FASTER  # without a summary
    measure("added", "torch-cudnn", HOPPER)
    assert served(added) == _dispatch.MASK_READ_FASTER
    assert not isinstance(served(keep), str)
    assert not isinstance(served(None), str)
    measure("added", HOPPER, "torch-cudnn")
    assert not isinstance(served(added), str)
    measure("bool", "torch-cudnn", HOPPER)
    assert served(keep) == _dispatch.MASK_READ_FASTER
    measure("bool", "torch-cudnn")  # and hopper never with such a mask
    assert served(keep) == _dispatch.MASK_READ_FASTER
    row = problem(torch.bfloat16, nq=1, nk=4096, d=64, attn_mask=keep[:1])
    assert _overrides._decide(row, 0, None) == _dispatch.MASK_READ_FASTER


@pytest.mark.parametrize("device", ["RTX 3090", "H200", "B200"])
def test_few_rows_with_masks_are_split_by_ampere(device: str) -> None:
    ranges = torch.empty(1, 1, 1, 2, 2, dtype=torch.int32, device="meta")
    given = problem(torch.bfloat16, nq=1, nk=65536, key_ranges=ranges)
    decision = _dispatch.select(given, find_device(device))
    assert decision.chosen == "ampere"
    assert decision.plan is not None
    assert decision.plan.tile.splits > 1


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_who_computes_gradients_of_a_call_with_masks(dtype: torch.dtype, name: str) -> None:
    """Kernels compute all of them. PyTorch's fused kernels come first where they read the mask.
    In 16 bits ranges and blocks would become a mask of all scores.
    """
    mask = MASKS[name]
    dense = name == "attn_mask"
    given = problem(
        dtype, grad=True, nq=256 if dense else 128, **{name: mask.repeat(2, 1) if dense else mask}
    )
    decision = _dispatch.select(given, find_device("A100"))
    kernel = "simt" if dtype == torch.float32 else "ampere"
    assert not isinstance(native.plan(kernel, given, find_device("A100")), list)
    skips = dtype == torch.float16 and name in ("key_ranges", "block_mask")
    pytorchs = name != "alibi_slopes" and not skips
    assert decision.chosen == ("torch" if pytorchs else kernel)
    if pytorchs:
        assert "gradients faster" in decision.reasons[kernel][0]


@pytest.mark.parametrize("device", ["A100", "H200"])
def test_gradients_of_few_rows_of_a_dense_mask_go_to_tensor_cores_of_ours(device: str) -> None:
    """`torch` would do more around PyTorch's kernel than that takes."""
    few, more = (torch.empty(rows, 1, dtype=torch.bool, device="meta") for rows in (128, 129))
    is_h200 = device == "H200"
    for dtype, rows, mask, chosen in (
        (torch.bfloat16, 128, few, "hopper" if is_h200 else "ampere"),
        (torch.bfloat16, 129, more, "hopper" if is_h200 else "torch"),
        (torch.float32, 128, few, "torch"),
    ):
        given = problem(dtype, grad=True, nq=rows, attn_mask=mask)
        decision = _dispatch.select(given, find_device(device))
        assert decision.chosen == chosen
        if chosen == "ampere":
            assert "over keys and values once" in decision.reasons["torch"][0]


@pytest.mark.parametrize("grad", [False, True])
def test_calls_of_16_bits_with_a_float32_mask_go_to_tensor_cores_of_ours(grad: bool) -> None:
    """Lists of keys become such masks; `torch` has plain operations for them."""
    wide = torch.empty(2048, 2048, device="meta")
    for gpu, dtype, d, chosen in (
        ("H200", torch.bfloat16, 64, "hopper"),
        ("H200", torch.float16, 128, "hopper"),
        ("A100", torch.bfloat16, 64, "ampere"),
        ("H200", torch.float32, 64, "torch" if grad else "simt"),
    ):
        call = problem(dtype, grad=grad, nq=2048, nk=2048, d=d, attn_mask=wide)
        decision = _dispatch.select(call, find_device(gpu))
        assert decision.chosen == chosen, (gpu, dtype)
        if dtype != torch.float32:
            assert "float32 attn_mask" in decision.reasons["torch"][0]


def test_gradients_of_dense_masks_go_to_hopper_where_it_has_them() -> None:
    keep = torch.empty(2048, 2048, dtype=torch.bool, device="meta")
    for gpu, d, mask, chosen in (
        ("H200", 64, keep, "hopper"),
        ("H200", 128, keep[:1], "hopper"),
        ("H200", 128, keep.bfloat16(), "hopper"),
        ("H200", 128, keep.bfloat16()[:, :1], "hopper"),  # TMA cannot read it
        ("H200", 192, keep, "hopper"),
        ("A100", 64, keep, "torch"),
    ):
        call = problem(torch.bfloat16, grad=True, nq=2048, nk=2048, d=d, attn_mask=mask)
        decision = _dispatch.select(call, find_device(gpu))
        assert decision.chosen == chosen, (gpu, d, mask.dtype)
        if chosen == "hopper":
            assert "measured to be faster with such a mask" in decision.reasons["torch"][0]


@pytest.mark.parametrize(
    ("device", "rows", "d", "kernel", "reason"),
    [
        ("H200", 1024, 64, "hopper", ""),
        ("H200", 128, 128, "hopper", ""),
        ("H200", 127, 128, "ampere", "only when it is forced"),
        ("H200", 1024, 192, "ampere", "head dimensions above 128"),
        ("A100", 1024, 64, "ampere", ""),
        ("B200", 1024, 64, "ampere", ""),
    ],
)
@pytest.mark.parametrize("grad", [False, True])
def test_dropout_goes_to_kernels_that_drop_weights(
    grad: bool, device: str, rows: int, d: int, kernel: str, reason: str
) -> None:
    state = torch.empty(2, dtype=torch.int64, device="meta")
    given = problem(torch.float16, grad=grad, nq=rows, nk=rows, d=d, dropout_p=0.1, rng_state=state)
    decision = _dispatch.select(given, find_device(device))
    assert decision.chosen == kernel
    assert decision.plan is not None
    assert "dropout_p" in str(decision)
    assert "the fastest measured" not in str(decision)  # no run has dropout
    if reason:
        assert reason in decision.reasons["hopper"][0]


@pytest.mark.parametrize(
    ("rows", "keys", "d", "kernel"),
    [
        (1024, 128, 64, "ampere"),
        (256, 256, 40, "ampere"),
        (257, 256, 64, "hopper"),
        (128, 128, 72, "hopper"),
    ],
)
def test_dropped_gradients_of_few_keys_and_columns_go_to_ampere(
    rows: int, keys: int, d: int, kernel: str
) -> None:
    state = torch.empty(2, dtype=torch.int64, device="meta")
    given = {"nq": rows, "nk": keys, "d": d, "dropout_p": 0.1, "rng_state": state}
    for grad, chosen in ((True, kernel), (False, "hopper")):
        call = problem(torch.bfloat16, grad=grad, **given)
        assert _dispatch.select(call, find_device("H200")).chosen == chosen


@pytest.mark.parametrize(
    ("dtype", "allowed"),
    [
        (torch.float32, "float16 and bfloat16"),
        (torch.float64, "float16 and bfloat16"),
        (torch.float8_e4m3fn, "float16 and bfloat16"),
    ],
    ids=str,
)
def test_ampere_names_the_dtypes_that_it_takes(dtype: torch.dtype, allowed: str) -> None:
    reasons = native.plan("ampere", problem(dtype), find_device("A100"))
    name = str(dtype).removeprefix("torch.")
    assert reasons[0].startswith(f"dtype {name}: ampere takes {allowed}; convert q, k and v")


@every_capability
def test_no_decision_ever_says_no_kernel_image(capability: tuple[int, int]) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2):
        assert "no kernel image" not in str(_dispatch.select(problem(dtype), gpu(capability)))


def test_a_gpu_older_than_every_target_is_told_what_the_build_serves() -> None:
    facts = find_device("T4").to_dict() | {"name": "V100", "major": 7, "minor": 0}
    decision = _dispatch.select(problem(), native.Device.from_dict(facts))
    assert decision.chosen == "torch"
    assert decision.fallback
    assert decision.reasons == {
        DC: [f"compute capability 7.0 (V100): {DC} is built for sm_100f, sm_110f"],
        HOPPER: [f"compute capability 7.0 (V100): {HOPPER} is built for sm_90a"],
        CONSUMER: [f"compute capability 7.0 (V100): {CONSUMER} is built for sm_120f, sm_90a"],
        "ada": [
            "compute capability 7.0 (V100): ada is built for "
            "sm_89, sm_90, sm_100, sm_120, compute_89"
        ],
        "ampere": [
            "compute capability 7.0 (V100): ampere is built for "
            "sm_80, sm_90, sm_100, sm_120, compute_80"
        ],
        "simt": [
            "compute capability 7.0 (V100): simt is built for "
            "sm_75, sm_80, sm_90, sm_100, sm_120, compute_75"
        ],
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_tensors_on_the_cpu_go_to_torch_and_say_what_to_do(dtype: torch.dtype) -> None:
    decision = archflash.explain(*[torch.randn(1, 2, 3, 8, dtype=dtype)] * 3)
    assert decision.chosen == "torch"
    assert decision.device is None
    assert not decision.fallback
    sentence = "q, k and v are on the CPU: move them to a CUDA device"
    assert decision.reasons == {name: [sentence] for name in KERNELS}


# --- what was measured comes first (bench/results: an H200) ---


def h200_call(
    d: int = 128, *, batch: int = 4, heads: int = 16, nq: int = 2048, nk: int = 2048, **options: Any
) -> _dispatch.Decision:
    """A call that fills the GPU, unless sizes say otherwise."""
    q = torch.empty(batch, heads, nq, d, dtype=torch.bfloat16, device="meta")
    k = torch.empty(batch, heads, nk, d, dtype=torch.bfloat16, device="meta")
    return archflash.explain(q, k, k, device="H200", **options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
def test_on_9_0_hopper_comes_before_pytorchs_cudnn_kernel(d: int, causal: bool) -> None:
    decision = h200_call(d, causal=causal)
    assert decision.chosen == HOPPER
    assert not decision.fallback
    assert "; the fastest measured of those that serve this call (run " in decision.why
    for name in (CONSUMER, "ampere", "ada", "simt"):
        assert decision.reasons[name] == [f"{HOPPER} was measured to be faster"]
    assert decision.reasons["torch"] == [
        f"{HOPPER} was measured to be faster than PyTorch's cuDNN kernel"
    ]


@pytest.mark.usefixtures("cudnn_is_fastest")
def test_a_call_stays_with_the_kernel_of_pytorch_that_was_measured_to_be_faster() -> None:
    decision = h200_call(64, nq=4096, nk=77)
    assert decision.chosen == "torch"
    assert decision.why.startswith("PyTorch's cuDNN kernel; the fastest measured of those that ")
    for name in (HOPPER, CONSUMER, "ampere", "ada", "simt"):
        assert decision.reasons[name] == ["PyTorch's cuDNN kernel was measured to be faster"]
    # hopper gets the calls that cuDNN does not serve.
    assert h200_call(64, nq=4096, nk=77, return_lse=True).chosen == HOPPER


def test_on_9_0_hopper_serves_few_keys_too() -> None:
    """Cross-attention to a short text, a kind of its own in what was measured."""
    decision = h200_call(64, nq=4096, nk=77)
    assert decision.chosen == HOPPER
    assert "bf16 2x16 4096x77 d64" in decision.why
    assert decision.reasons["torch"] == [
        f"{HOPPER} was measured to be faster than PyTorch's cuDNN kernel"
    ]
    assert h200_call(64, nq=4096, nk=77, return_lse=True).chosen == HOPPER
    assert h200_call(64, nq=4096, nk=129).chosen == HOPPER
    assert h200_call(64, batch=1, heads=2, nq=128, nk=128).chosen == HOPPER


@pytest.mark.parametrize(
    "options",
    [
        {"return_lse": True},
        {"softcap": 5.0},
        {"window": (100, 0)},
        {"causal": True, "nk": 4096},
        {"causal": True, "q_offset": 7},
        {"sinks": torch.empty(16, device="meta")},
        {"num_splits": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_on_9_0_hopper_serves_what_pytorch_has_no_plain_kernel_for(
    d: int, options: dict[str, Any]
) -> None:
    decision = h200_call(d, **options)
    assert decision.chosen == HOPPER
    assert decision.plan is not None
    assert decision.plan.code == "sm_90a"
    assert decision.reasons["ampere"] == [f"{HOPPER} was measured to be faster"]


def test_on_9_0_packed_sequences_go_to_hopper_and_packed_decoding_to_ampere() -> None:
    q = torch.empty(4000, 8, 128, dtype=torch.float16, device="meta")
    ends = torch.empty(5, dtype=torch.int32, device="meta")
    many = archflash.explain(q, q, q, cu_seqlens_q=ends, cu_seqlens_k=ends, device="H200")
    assert many.chosen == HOPPER
    rows = archflash.explain(q[:64], q, q, cu_seqlens_q=ends, cu_seqlens_k=ends, device="H200")
    assert rows.chosen == "ampere"  # 16 rows of each sequence


def test_on_9_0_few_queries_go_to_ampere() -> None:
    assert h200_call(nq=1, nk=8192, causal=True).chosen == "ampere"
    assert h200_call(64, nq=16, nk=8192).chosen == "ampere"
    assert h200_call(nq=1, nk=8192, return_lse=True).chosen == "ampere"
    assert h200_call(nq=1, nk=8192, window=(4095, 0)).chosen == "ampere"


def test_on_9_0_small_problems_go_by_what_was_measured_for_them() -> None:
    decision = h200_call(64, batch=1, heads=12, nq=2048, causal=True)
    assert decision.chosen == HOPPER
    assert "1x12 2048 d64 c: hopper " in decision.why
    assert h200_call(128, batch=1, heads=12, nq=2048, causal=True).chosen == HOPPER


def test_on_9_0_a_pytorch_without_cudnn_first_comes_after_hopper(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_fused_kernels, "cudnn_comes_first", lambda capability: False)
    for d in (64, 128, 256):
        decision = h200_call(d)
        assert decision.chosen == HOPPER
        assert decision.reasons["torch"] == [
            f"{HOPPER} was measured to be faster than PyTorch's flash kernel"
        ]
    assert h200_call(nq=1, nk=8192).chosen == "ampere"


def test_on_9_0_ampere_serves_where_tensor_maps_cannot_repeat_a_row() -> None:
    q = torch.empty(4, 16, 2048, 128, dtype=torch.float16, device="meta")
    k = torch.empty(4, 16, 1, 128, dtype=torch.float16, device="meta").expand(q.shape)
    decision = archflash.explain(q, k, k, device="H200", return_lse=True)
    assert decision.chosen == "ampere"
    assert "row stride" in decision.reasons[CONSUMER][0]


def test_sdpa_with_equal_lengths_asks_for_no_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an offset a causal call can get PyTorch's kernel where that is the fastest."""
    given: list[int | None] = []

    def attention(*tensors: torch.Tensor, q_offset: int | None, **options: Any) -> torch.Tensor:
        given.append(q_offset)
        return tensors[0]

    monkeypatch.setattr("archflash._sdpa.attention", attention)
    q, k = torch.ones(1, 2, 5, 8), torch.ones(1, 2, 7, 8)
    archflash.scaled_dot_product_attention(q, q, q, is_causal=True)
    archflash.scaled_dot_product_attention(q, k, k, is_causal=True)
    assert given == [None, 0]


def test_explain_names_the_run_behind_a_measured_order() -> None:
    summary = re.escape(native.describe(HOPPER).summary)
    assert re.search(
        rf"chosen  {HOPPER}: {summary}; the fastest measured of those that serve this "
        r"call \(run \S+-h200-\S+, NVIDIA H200, bf16 2x16 4096x77 d64: hopper \d+, "
        r"torch-cudnn \d+, ampere \d+, torch-flash \d+ TFLOP/s\)",
        str(h200_call(64, nq=4096, nk=77)),
    )


@pytest.mark.parametrize("capability", [c for c in CAPABILITIES if c != MEASURED], ids=dotted)
def test_a_capability_without_measurements_keeps_its_order(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [problem(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn)]
    given += [packed(), problem(torch.float16, nq=1, nk=4096), problem(torch.float16, d=256)]
    asked = [_dispatch.order.of(each, capability) for each in given]
    assert all(_measured.find(each, capability) is None for each in given)
    monkeypatch.setattr(_measured, "find", lambda problem, capability: None)
    assert [_dispatch.order.of(each, capability) for each in given] == asked


def test_every_measured_kernel_is_one_of_ours_or_of_pytorch() -> None:
    known = {*_registry.kernel_names(), "torch-cudnn", "torch-flash", "torch-efficient"}
    assert {capability for capability, _ in _measured._table()} == {MEASURED}
    for measurement in _measured._table().values():
        assert known >= set(measurement.order) >= set(measurement.speeds)


# --- what is printed ---


def test_a_decision_reads_like_a_report() -> None:
    text = str(_dispatch.select(problem(causal=True), find_device("H200")))
    lines = text.splitlines()
    assert lines[0] == (
        "float32, batch 2, heads 4, 128 queries, 128 keys, head dim 64, causal "
        "on H200 (compute capability 9.0, 132 SMs)"
    )
    assert lines[1].startswith("  chosen  simt: fp32 attention on CUDA cores")
    assert "          code: sm_90" in lines
    (launch,) = [line for line in lines if line.startswith("          launch: ")]
    plan = _dispatch.select(problem(causal=True), find_device("H200")).plan
    assert plan is not None
    (step,) = plan.to_dict()["launches"]
    assert f"{step['kernel']}, grid {step['grid'][0]}, block {step['block'][0]}" in launch
    assert f"{step['shared_bytes']} bytes of shared memory" in launch
    assert lines[-2].startswith("  not     ampere: dtype float32: ampere takes float16 and ")
    assert lines[-1] == "  not     torch: simt is expected to be faster"


def test_a_decision_for_16_bits_shows_tile_order_and_who_would_be_next() -> None:
    given = problem(torch.float16, nq=4096, nk=4096, causal=True)
    decision = _dispatch.select(given, find_device("RTX 4090"))
    assert str(decision).splitlines() == [
        "float16, batch 2, heads 4, 4096 queries, 4096 keys, head dim 64, causal "
        "on RTX 4090 (compute capability 8.9, 128 SMs)",
        f"  chosen  ada: {native.describe('ada').summary}",
        "          code: sm_89",
        "          tile: 128 query rows x 128 keys, head_dim up to 64",
        "          variant: two CTAs per SM with 128 keys in 99 KB",
        "          warps: 4 of 32 rows",
        "          stages: 1",
        "          CTAs: 256, 2 per SM on 128 SMs",
        "          order: last row tiles first, 8 heads at a time",
        "          balance: 100% of the best that these tiles allow (a model)",
        "          launch: ada_attention_fwd_f16_d64, grid 256, block 128, "
        "49216 bytes of shared memory",
        "  not     blackwell_dc: compute capability 8.9 (RTX 4090): blackwell_dc is built for "
        "sm_100f, sm_110f",
        "  not     hopper: compute capability 8.9 (RTX 4090): hopper is built for sm_90a",
        "  not     blackwell_consumer: compute capability 8.9 (RTX 4090): blackwell_consumer is "
        "built for sm_120f, sm_90a",
        "  not     ampere: ada is expected to be faster",
        "  not     torch: ada is expected to be faster",
        "  not     simt: ada is expected to be faster",
    ]


def test_a_problem_is_described_with_all_its_features() -> None:
    given = problem(
        torch.bfloat16, causal=True, window=(3, None), softcap=2.0, sinks=sinks(), return_lse=True
    )
    assert _dispatch.describe_problem(given) == (
        "bfloat16, batch 2, heads 4, 128 queries, 128 keys, head dim 64, "
        "causal, window, softcap, sinks, LSE"
    )
    assert _dispatch.describe_problem(packed()) == (
        "float16, 3 sequences packed into q (100, 4, 64) k (100, 4, 64) v (100, 4, 64)"
    )


# --- forcing ---


@pytest.mark.parametrize("name", KERNELS)
@every_capability
def test_a_forced_kernel_is_what_is_planned(capability: tuple[int, int], name: str) -> None:
    given = problem(torch.float16)
    refused = {
        "ampere": [BEFORE_AMPERE] if capability < TENSOR_CORES_FROM else [],
        "ada": [before_ada(capability)] if capability < FP8_FROM else [],
        CONSUMER: [] if capability in CONSUMER_CODE else why_not_the_consumer(capability),
        DC: [] if capability[0] in (10, 11) else why_not_blackwell_dc(capability),
        HOPPER: [] if capability == MEASURED else why_not_hopper(capability),
    }
    if reasons := refused.get(name):
        with pytest.raises(archflash.ForcedImplementationError) as caught:
            _dispatch.select(given, gpu(capability), name)
        assert str(caught.value).splitlines()[1:] == [f"  {reason}" for reason in reasons]
        return
    decision = _dispatch.select(given, gpu(capability), name)
    assert decision.chosen == name
    assert decision.why == "it is forced"
    assert decision.reasons == {
        other: [f"{name} is forced"] for other in _registry.names() if other != name
    }
    assert decision.plan is not None
    assert decision.plan.implementation == name
    if name == "ada" and capability >= (10, 0):  # dispatch never chooses its 16-bit kernels there
        assert decision.plan.code == "compute_89 PTX, compiled by the driver at first use"
        return
    assert decision.plan.code == code(name, capability)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_torch_can_be_forced_where_a_kernel_would_serve(dtype: torch.dtype) -> None:
    decision = _dispatch.select(problem(dtype), find_device("H200"), "torch")
    assert (decision.chosen, decision.plan, decision.fallback) == ("torch", None, False)


def test_a_forced_kernel_that_cannot_serve_raises_with_every_reason() -> None:
    given = problem(d=999, attn_mask=mask(), out_dtype=torch.float16)
    with pytest.raises(archflash.ForcedImplementationError) as caught:
        _dispatch.select(given, find_device("H200"), "simt")
    message = str(caught.value)
    assert message.startswith("simt is forced, but cannot serve float32, batch 2, heads 4")
    for reason in (
        "head_dim 1000 (999 and columns of zeros): ",
        "value head_dim 1000 (999 and columns of zeros): ",
        "attn_mask of ",
        "out_dtype ",
    ):
        assert f"\n  {reason}" in message
    automatic = _dispatch.select(given, find_device("H200")).reasons["simt"]
    assert message.splitlines()[1:] == [f"  {reason}" for reason in automatic]


@pytest.mark.parametrize("name", KERNELS)
def test_a_forced_kernel_never_substitutes_on_the_cpu(name: str) -> None:
    q = torch.randn(1, 2, 3, 999, dtype=torch.float16)  # the simulator runs what a kernel can serve
    with pytest.raises(archflash.ForcedImplementationError, match=f"{name} is forced, but cannot"):
        archflash.attention(q, q, q, implementation=name)
    with (
        archflash.force(name),
        pytest.raises(archflash.ForcedImplementationError, match=f"{name} is forced, but cannot"),
    ):
        archflash.attention(q, q, q)


@pytest.mark.parametrize("name", ["blackwell", "SIMT", "", 7, None], ids=repr)
def test_force_refuses_an_unknown_name_and_lists_the_known_ones(name: Any) -> None:
    with pytest.raises(archflash.ForcedImplementationError) as caught, archflash.force(name):
        pass
    assert str(caught.value) == f"no implementation is called {name!r}: this build has {THIS_BUILD}"


def test_an_unknown_name_as_argument_is_refused() -> None:
    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(archflash.ForcedImplementationError, match=f"'fermi'.* has {THIS_BUILD}"):
        archflash.attention(q, q, q, implementation="fermi")
    with pytest.raises(archflash.ForcedImplementationError, match="'fermi'"):
        archflash.explain(q, q, q, implementation="fermi", device="H200")


@pytest.mark.parametrize("name", KERNELS)
def test_a_forced_folder_without_kernels_was_not_compiled(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "targets", lambda name: [])
    with pytest.raises(archflash.NotCompiledError) as caught:
        _dispatch.select(problem(torch.float16), find_device("H200"), name)
    assert str(caught.value) == (
        f"{name} is forced, but this build left it out: build again with ARCHFLASH_ARCHS=all"
    )


def test_force_nests_and_is_undone_after_an_error() -> None:
    assert _dispatch.forced() is None
    with archflash.force("simt"):
        with archflash.force("torch"):
            assert _dispatch.forced() == "torch"
        assert _dispatch.forced() == "simt"
        with pytest.raises(RuntimeError, match="inside"), archflash.force("torch"):
            raise RuntimeError("inside")
        assert _dispatch.forced() == "simt"
    assert _dispatch.forced() is None


def test_force_in_one_thread_leaves_the_others_alone() -> None:
    inside: list[object] = []
    outside: list[object] = []
    entered, seen = threading.Barrier(2, timeout=10), threading.Barrier(2, timeout=10)

    def forcing() -> None:
        with archflash.force("simt"):
            entered.wait()
            seen.wait()
            inside.append(_dispatch.forced())

    def free() -> None:
        entered.wait()
        outside.append(_dispatch.forced())
        q = torch.ones(1, 1, 2, 8)
        outside.append(bool((archflash.attention(q, q, q) == 1).all()))
        seen.wait()

    threads = [threading.Thread(target=work) for work in (forcing, free)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert inside == ["simt"]
    assert outside == [None, True]


def test_the_argument_beats_force() -> None:
    q = torch.ones(1, 1, 2, 8)
    with archflash.force("simt"):
        assert archflash.explain(q, q, q, implementation="torch", device="H200").chosen == "torch"
        assert torch.equal(archflash.attention(q, q, q, implementation="torch"), q)
    with archflash.force("torch"):
        assert archflash.explain(q, q, q, implementation="simt", device="H200").chosen == "simt"
        assert archflash.explain(q, q, q, device="H200").chosen == "torch"


@pytest.mark.slow
def test_the_environment_forces_and_what_it_cannot_force_refuses_calls_not_the_import() -> None:
    # Two processes that have imported torch.
    code = """
import os, sys, torch
q = torch.ones(1, 1, 2, 8)

def beaten_by_force_and_the_argument():
    chosen = lambda **options: archflash.explain(q, q, q, device="H200", **options).chosen
    print(chosen(), chosen(implementation="simt"))
    with archflash.force("simt"):
        print(chosen(), chosen(implementation="torch"))

def unknown():
    try:
        archflash.attention(q, q, q)
    except archflash.ForcedImplementationError as error:
        print(error)

for name, run in (("torch", beaten_by_force_and_the_argument), ("fermi", unknown)):
    os.environ["ARCHFLASH_FORCE_IMPLEMENTATION"] = name
    if os.fork() == 0:
        import archflash
        run()
        sys.stdout.flush()
        os._exit(0)
    os.wait()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    first, second, refused = done.stdout.splitlines()
    assert (first, second) == ("torch simt", "simt torch"), done.stderr
    assert refused == f"no implementation is called 'fermi': this build has {THIS_BUILD}"


# --- falling back aloud ---


@pytest.fixture
def on_an_a100(monkeypatch: pytest.MonkeyPatch) -> None:
    """decide() sees an A100, and nothing has been said yet."""
    monkeypatch.setattr(_dispatch.device, "driver_problem", lambda: None)
    monkeypatch.setattr(_dispatch.device, "query_device", lambda index: find_device("A100"))
    monkeypatch.setattr(_dispatch.explain, "_noted", set())
    monkeypatch.delenv("ARCHFLASH_FALLBACK", raising=False)


def warned(work: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
    return [str(warning.message) for warning in caught]


# Each dtype and the kernel that takes it on an A100. Messages name no other kernel.
every_dtype_and_kernel = pytest.mark.parametrize(
    ("dtype", "kernel"),
    [(torch.float32, "simt"), (torch.float16, "ampere"), (torch.bfloat16, "ampere")],
    ids=str,
)


@pytest.mark.usefixtures("on_an_a100")
@every_dtype_and_kernel
def test_a_fallback_warns_once_per_reason(dtype: torch.dtype, kernel: str) -> None:
    start = "archflash: PyTorch serves this call. "
    first = warned(lambda: _dispatch.decide(problem(dtype, attn_mask=mask()), 0, None))
    assert len(first) == 1
    assert first[0].startswith(f"{start}{kernel}: attn_mask of dtype float64")
    longer = problem(dtype, attn_mask=mask(), nk=129)
    assert warned(lambda: _dispatch.decide(longer, 0, None)) == []
    second = warned(lambda: _dispatch.decide(problem(torch.float64), 0, None))
    assert len(second) == 1
    assert re.match(rf"{start}\w+: dtype float64: \w+ takes", second[0])
    both = warned(lambda: _dispatch.decide(problem(dtype, d=520, attn_mask=mask()), 0, None))
    # The head dims of q and v are new reasons; the mask was named before.
    assert [text.partition(" 520: ")[0] for text in both] == [
        f"{start}{kernel}: head_dim",
        f"{start}{kernel}: value head_dim",
    ]


@pytest.mark.usefixtures("on_an_a100")
@every_16_bit_dtype
def test_a_fallback_names_no_kernel_that_the_gpu_cannot_run(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_dispatch.device, "query_device", lambda index: find_device("T4"))
    (said,) = warned(lambda: _dispatch.decide(problem(dtype, attn_mask=mask()), 0, None))
    assert said.startswith("archflash: PyTorch serves this call. simt: attn_mask with ")


@pytest.mark.usefixtures("on_an_a100")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_choice_that_is_no_fallback_is_silent(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARCHFLASH_FALLBACK", "error")
    given = problem(dtype, nq=16)
    assert warned(lambda: _dispatch.decide(given, 0, None)) == []
    plan = _dispatch.decide(given, 0, None)
    assert plan is not None
    assert plan.implementation == ("simt" if dtype == torch.float32 else "ampere")


@pytest.mark.usefixtures("on_an_a100")
def test_pytorch_being_faster_is_no_fallback_and_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_dispatch.device, "query_device", lambda index: find_device("T4"))
    monkeypatch.setenv("ARCHFLASH_FALLBACK", "error")
    given = problem(torch.float16)
    assert warned(lambda: _dispatch.decide(given, 0, None)) == []
    assert _dispatch.decide(given, 0, None) is None


@pytest.mark.usefixtures("on_an_a100")
@pytest.mark.usefixtures("cudnn_is_fastest")
def test_a_new_problem_that_pytorch_serves_faster_makes_one_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_dispatch.device, "query_device", lambda index: find_device("H200"))
    planned: list[str] = []
    plan = native.plan
    monkeypatch.setattr(native, "plan", lambda name, *of: planned.append(name) or plan(name, *of))
    assert _dispatch.decide(problem(torch.float16, nq=4096, nk=77), 0, None) is None
    assert planned == [DC, HOPPER]  # hopper could serve it, so PyTorch is no fallback


@pytest.mark.usefixtures("on_an_a100")
@pytest.mark.parametrize("device", ["A100", "H200", "B200", "RTX 5090", "T4"])
def test_deciding_plans_with_each_kernel_once_at_most(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_dispatch.device, "query_device", lambda index: find_device(device))
    planned: list[str] = []
    plan = native.plan
    monkeypatch.setattr(native, "plan", lambda name, *of: planned.append(name) or plan(name, *of))
    calls = [
        problem(torch.float16),
        problem(torch.float16, nq=1, nk=4096),
        problem(torch.float16, attn_mask=mask()),  # no kernel serves it: the reasons are told
        problem(torch.float16, grad=True),
        problem(torch.float32),
        packed(),
    ]
    ways: list[Callable[[native.Problem], object]] = [
        lambda given: _dispatch.decide(given, 0, None),
        lambda given: _dispatch.select(given, find_device(device)),
    ]
    for given, way in itertools.product(calls, ways):
        planned.clear()
        warned(functools.partial(way, given))
        assert planned
        assert len(planned) == len(set(planned))


@pytest.mark.usefixtures("on_an_a100")
@every_dtype_and_kernel
def test_fallback_error_raises_with_the_reason(
    dtype: torch.dtype, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARCHFLASH_FALLBACK", "error")
    for _ in range(2):  # every time, not only the first
        with pytest.raises(archflash.UnsupportedError) as caught:
            _dispatch.decide(problem(dtype, attn_mask=mask()), 0, None)
        assert f"ARCHFLASH_FALLBACK=error: {kernel}: attn_mask" in str(caught.value)
    monkeypatch.delenv("ARCHFLASH_FALLBACK")
    assert len(warned(lambda: _dispatch.decide(problem(dtype, attn_mask=mask()), 0, None))) == 1


def test_tensors_on_the_cpu_are_served_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_dispatch.explain, "_noted", set())
    monkeypatch.setenv("ARCHFLASH_FALLBACK", "error")
    q = torch.randn(1, 2, 3, 8, requires_grad=True)
    native.clear_cache()
    assert warned(lambda: archflash.attention(q, q, q)) == []


# --- the driver ---


class FakeDriver:
    """Stands in for the driver: what the runtime reports, and the version file in /proc."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.monkeypatch, self.version_file = monkeypatch, folder / "version"
        monkeypatch.setattr(_user_tables, "Path", lambda name: self.version_file)

    def says(self, problem: str, cuda_version: int, version_text: str = "") -> None:
        status = SimpleNamespace(
            usable=not problem, problem=problem, cuda_version=cuda_version, device_count=0
        )
        if version_text:
            self.version_file.write_text(version_text)
        self.monkeypatch.setattr(native, "driver_status", lambda: status)
        _dispatch.driver_problem.cache_clear()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeDriver]:
    yield FakeDriver(monkeypatch, tmp_path)
    monkeypatch.undo()
    _dispatch.driver_problem.cache_clear()


VERSION_TEXT = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.90.07  Release Build\n"
    "GCC version:  gcc version 12.2.0\n"
)


def test_an_old_driver_is_named_with_its_version_and_the_fix(driver: FakeDriver) -> None:
    driver.says("the NVIDIA driver is too old", 12040, VERSION_TEXT)
    sentence = "driver 550.90.07 is older than 580: update it"
    assert _dispatch.driver_problem() == sentence
    device, obstacle = _dispatch.device_of(problem(), 0)
    assert obstacle == sentence
    decision = _dispatch.select(problem(), device, None, obstacle)
    assert decision.chosen == "torch"
    assert decision.fallback
    assert decision.reasons == {name: [sentence] for name in KERNELS}
    for name in KERNELS:
        with pytest.raises(archflash.ForcedImplementationError) as caught:
            _dispatch.select(problem(), device, name, obstacle)
        assert str(caught.value) == f"{name} is forced, but {sentence}"


def test_an_old_driver_without_a_version_file_is_named_by_its_cuda(driver: FakeDriver) -> None:
    driver.says("the NVIDIA driver is too old", 12040)
    assert _dispatch.driver_problem() == "driver for CUDA 12.4 is older than 580: update it"


def test_another_driver_problem_is_passed_on_as_it_is(driver: FakeDriver) -> None:
    driver.says("no NVIDIA GPU on this machine", 13000)
    assert _dispatch.driver_problem() == "no NVIDIA GPU on this machine"
    driver.says("", 13000)
    assert _dispatch.driver_problem() is None


def test_asking_for_a_cuda_device_without_a_driver_names_the_way_out(driver: FakeDriver) -> None:
    driver.says("no NVIDIA driver on this machine", 0)
    q = torch.empty(1, 2, 3, 8, device="meta")
    for device in ("cuda:0", 0, torch.device("cuda", 1)):
        with pytest.raises(ValueError, match="no NVIDIA driver on this machine; name a GPU from"):
            archflash.explain(q, q, q, device=device)


def test_an_unknown_gpu_name_lists_the_known_ones() -> None:
    q = torch.empty(1, 2, 3, 8, device="meta")
    with pytest.raises(
        ValueError, match=r"'RTX 9090' in the table of known ones: T4, A100, .*GB10"
    ):
        archflash.explain(q, q, q, device="RTX 9090")


@pytest.mark.parametrize("gpu", ["A100", "RTX 4090", "H200", "RTX 5090"])
@pytest.mark.parametrize(
    "options", [{"causal": True, "window": (512, None)}, {"window": (9, 9)}], ids=str
)
def test_gradients_of_windows_need_no_mask_of_all_scores(gpu: str, options: dict[str, Any]) -> None:
    """PyTorch's kernels would read one, and skip nothing of what it hides."""
    q = torch.empty(2, 16, 4096, 128, dtype=torch.bfloat16, device="meta", requires_grad=True)
    assert archflash.explain(q, q, q, device=gpu, **options).chosen != "torch"


@pytest.mark.parametrize(("nq", "nk"), [(512, 8192), (2048, 4096), (700, 300)])
def test_causal_gradients_of_other_numbers_of_queries_and_keys(nq: int, nk: int) -> None:
    """PyTorch's kernel reads a mask for them: so a kernel that is faster without it stays first."""
    q, k = (
        torch.empty(1, heads, n, 128, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for heads, n in ((32, nq), (8, nk))
    )
    as_many = archflash.explain(q, q[:, :8], q[:, :8], device="H200", causal=True).chosen
    assert archflash.explain(q, k, k, device="H200", causal=True).chosen == as_many != "torch"


@pytest.mark.parametrize("gpu", ["A100", "RTX 4090", "H200", "B200", "RTX 5090"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16], ids=str)
def test_few_rows_of_a_dense_mask_are_read_by_our_kernels(gpu: str, dtype: torch.dtype) -> None:
    """As a cache of fixed size asks for them in decoding. `torch` copies all keys and values."""
    for rows, ours in ((1, True), (100, True), (128, True), (129, gpu == "H200")):
        q, k = (
            torch.empty(2, 16, n, 192, dtype=torch.bfloat16, device="meta") for n in (rows, 4096)
        )
        mask = torch.empty(2, 1, rows, 4096, dtype=dtype, device="meta")
        chosen = archflash.explain(q, k, k, device=gpu, attn_mask=mask).chosen
        assert (chosen != "torch") == ours


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32], ids=str)
def test_who_reads_few_rows_of_a_mask_on_hopper_and_in_how_many_shares(dtype: torch.dtype) -> None:
    """As was measured: as many as fill the GPU once, and none where rows of tiles do."""
    for batch, heads, rows, nk, d, tile, least, most in (
        (1, 12, 32, 1000, 64, "d64_masked", 8, 16),
        (1, 4, 20, 4096, 128, "d128_masked", 16, 64),
        (4, 8, 64, 512, 64, "", 1 if dtype == torch.bool else 4, 8),
    ):
        q, k = (
            torch.empty(batch, heads, n, d, dtype=torch.bfloat16, device="meta") for n in (rows, nk)
        )
        mask = torch.empty(batch, 1, rows, nk, dtype=dtype, device="meta")
        decision = archflash.explain(q, k, k, device="H200", attn_mask=mask)
        assert decision.chosen == "hopper"
        assert decision.plan is not None
        assert decision.plan.tile.name == (tile or decision.plan.tile.name)
        assert least <= decision.plan.tile.splits <= most


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32], ids=str)
def test_rows_of_a_mask_that_fit_a_tile_of_16_decode(dtype: torch.dtype) -> None:
    """Those of heads that share a head of k together, beside keys for each warp."""

    def chosen(rows: int, heads: int, nk: int, d: int = 64, gpu: str = "H200") -> tuple[str, str]:
        q = torch.empty(2, heads, rows, d, dtype=torch.bfloat16, device="meta")
        k = torch.empty(2, 2, nk, d, dtype=torch.bfloat16, device="meta")
        mask = torch.empty(2, 1, rows, nk, dtype=dtype, device="meta")
        decision = archflash.explain(q, k, k, device=gpu, attn_mask=mask)
        assert decision.plan is not None
        return decision.chosen, decision.plan.tile.name.replace("_joined", "")

    for d, size in ((64, 64), (96, 128)):
        assert chosen(1, 8, 4096, d) == chosen(3, 6, 300, d) == ("ampere", f"d{size}_decode_masked")
    assert chosen(1, 2, 17) == chosen(1, 2, 301, gpu="A100") == ("ampere", "d64_decode_masked")
    assert chosen(16, 2, 4096)[1] == "d64_decode_masked"
    assert chosen(17, 2, 4096)[0] == chosen(3, 12, 4096)[0] == chosen(2, 2, 100)[0] == "hopper"


@pytest.mark.parametrize(("gpu", "measured"), [("A100", False), ("H200", True)])
def test_explain_says_measured_only_where_it_was(gpu: str, measured: bool) -> None:
    q = torch.empty(2, 16, 4096, 128, dtype=torch.bfloat16, device="meta")
    mask = torch.empty(4096, 4096, dtype=torch.bool, device="meta")
    options: dict[str, Any] = {} if measured else {"softcap": 20.0}
    decision = archflash.explain(q, q, q, device=gpu, attn_mask=mask, **options)
    assert decision.chosen == ("hopper" if measured else "ampere")
    said = " ".join(decision.reasons["torch"])
    assert ("was measured to be faster with such a mask" in said) == measured


@pytest.mark.parametrize("dim", [64, 128])
def test_tables_of_blocks_go_to_hopper_with_gradients_too(dim: int) -> None:
    def chosen(d: int = dim, **call: Any) -> str:
        q = torch.empty(1, 16, 2048, d, dtype=torch.bfloat16, device="meta", requires_grad=True)
        table = torch.empty(1, 16, 32, 32, dtype=torch.int8, device="meta")
        return archflash.explain(q, q, q, block_mask=table, device="H200", **call).chosen

    assert chosen() == chosen(causal=True) == HOPPER
    # It computes no gradients of these.
    assert chosen(softcap=3.0) == chosen(192) == "ampere"
