"""Which implementation runs on this GPU, that a forced one runs, and what is said of the others."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import archflash
from archflash import _archflash as _native
from archflash import _fused_kernels, _registry, reference
from archflash.__main__ import main
from archflash.cli.replay import Inputs, run_plan

from .gpu_cases import (
    all_pairs,
    assert_close,
    cu_seqlens,
    int32,
    kernel_dtypes,
    kernels,
    qkv,
    rand,
    same_bits,
)

pytestmark = pytest.mark.gpu

each_kernel_and_dtype = pytest.mark.parametrize(("kernel", "dtype"), kernel_dtypes())


def plan_of(q: Tensor, k: Tensor, v: Tensor, **call: Any) -> dict[str, Any]:
    plan = archflash.explain(q, k, v, **call).plan
    assert plan is not None
    return dict(plan.to_dict())


def launched(call: Callable[[], object]) -> set[str]:
    """Names of the kernels that a call launches, as CUPTI records them."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        torch.ones(7, device="cuda").erfinv_()  # the profiler works if it sees this one
        call()
        torch.cuda.synchronize()
    names = {event.name for event in profile.events()}
    if not any("erfinv" in name for name in names):
        pytest.skip("the profiler records no kernels on this machine")
    return names


# --- automatic choice ---


def test_float32_runs_an_exact_kernel() -> None:
    decision = archflash.explain(*qkv(512, 512))
    assert decision.chosen == "simt"
    assert decision.plan is not None
    assert not decision.fallback


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_plain_16_bit_calls_use_tensor_cores(dtype: str) -> None:
    decision = archflash.explain(*qkv(512, 512, dtype=dtype))
    assert decision.chosen in kernels()
    assert _registry.uses_tensor_cores(decision.chosen)
    assert not decision.fallback
    assert decision.plan is not None
    assert decision.plan.code.startswith("sm_")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_calls_with_features_that_torch_lacks_run_one_of_ours(dtype: str) -> None:
    q, k, v = qkv(512, 512, dtype=dtype)
    call: dict[str, Any] = {"sinks": rand(2, seed=1), "causal": True}
    decision = archflash.explain(q, k, v, **call)
    assert decision.chosen in kernels()
    out = archflash.attention(q, k, v, **call)
    assert same_bits(out, archflash.attention(q, k, v, implementation=decision.chosen, **call))
    assert_close(out, None, q, k, v, **call)


@pytest.mark.parametrize("d", [64, 128, 192, 256])
@pytest.mark.parametrize("call", ["plain", "causal", "decode", "grouped"])
def test_pytorch_takes_the_kernel_that_dispatch_expects(call: str, d: int) -> None:
    here = torch.cuda.get_device_capability()
    if here < (8, 0):
        pytest.skip("PyTorch's flash and cuDNN kernels start at 8.0")
    nq, causal = 1 if call == "decode" else 512, call == "causal"
    gqa = call == "grouped"
    q, k, v = qkv(nq, 512, d, dtype="bfloat16", heads=(8, 2 if gqa else 8))
    taken = torch._fused_sdp_choice(q, k, v, None, 0.0, causal, enable_gqa=gqa)
    backend = torch.nn.attention.SDPBackend
    names = {
        int(backend.CUDNN_ATTENTION): "torch-cudnn",
        int(backend.FLASH_ATTENTION): "torch-flash",
        int(backend.EFFICIENT_ATTENTION): "torch-efficient",
    }
    expected = _fused_kernels.fused_kernel(
        device_type="cuda", capability=here, dtype=q.dtype, d=d, dv=d, nq=nq, nk=512,
        causal=causal, window=False, softcap=None, sinks=False, q_offset_given=False,
        varlen=False, masked=False, want_lse=False, fp8=False, gqa=gqa, with_faults=True,
    )  # fmt: skip
    assert names.get(taken) == expected


@pytest.mark.parametrize(
    ("shape", "kernel"),
    [((2048, 2048, 64), "hopper"), ((2048, 2048, 256), "hopper"), ((4096, 77, 64), "hopper"),
     ((1, 2048, 128), "ampere")],
    ids=str,
)  # fmt: skip
def test_what_was_measured_to_be_the_fastest_runs(shape: tuple[int, int, int], kernel: str) -> None:
    here = torch.cuda.get_device_capability()
    if here != (9, 0) or not _fused_kernels.cudnn_comes_first(here):
        pytest.skip("measured on 9.0, with a PyTorch that asks cuDNN first")
    case = qkv(*shape, dtype="bfloat16", batch=2, heads=(8, 8))
    decision = archflash.explain(*case)
    assert decision.chosen == kernel
    assert not decision.fallback
    assert_close(archflash.attention(*case), None, *case)
    names = launched(lambda: archflash.attention(*case))
    ours = {name.split("_")[0] for name in names if name.split("_")[0] in kernels()}
    assert ours == {kernel}
    assert not any("cudnn" in name for name in names)


# --- what runs ---


@each_kernel_and_dtype
def test_a_forced_kernel_is_what_runs(kernel: str, dtype: str) -> None:
    case = qkv(129, 239, dtype=dtype)
    launches = plan_of(*case, implementation=kernel)["launches"]
    names = launched(lambda: archflash.attention(*case, implementation=kernel))
    assert {launch["kernel"] for launch in launches} <= names


def test_a_forced_torch_launches_no_kernel_of_ours() -> None:
    case = qkv(129, 239)
    names = launched(lambda: archflash.attention(*case, implementation="torch"))
    assert not [name for name in names for kernel in kernels() if name.startswith(f"{kernel}_")]


def test_the_automatic_choice_is_what_runs() -> None:
    case = qkv(129, 239)
    chosen = archflash.explain(*case).chosen
    names = launched(lambda: archflash.attention(*case))
    assert any(name.startswith(f"{chosen}_attention_fwd") for name in names)


# --- forcing: the argument beats force(), which beats the environment ---


def runs_a_kernel(**call: Any) -> bool:
    """Whether a kernel is forced: one refuses a head dim of 999, and `torch` takes it."""
    q, k, v = qkv(5, 5, 999)
    try:
        archflash.attention(q, k, v, **call)
    except archflash.ForcedImplementationError:
        return True
    return False


def test_force_holds_inside_its_block_and_thread(fresh_dispatch: None) -> None:
    kernel = kernels()[-1]
    with archflash.force("torch"), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not runs_a_kernel()
        assert runs_a_kernel(implementation=kernel)
        with archflash.force(kernel):
            assert runs_a_kernel()
            assert not runs_a_kernel(implementation="torch")
            elsewhere: list[str] = []
            other = threading.Thread(
                target=lambda: elsewhere.append(archflash.explain(*qkv(5, 5)).why)
            )
            other.start()
            other.join()
            assert elsewhere[0] != "it is forced"
        assert not runs_a_kernel()


FORCED_BY_ENVIRONMENT = """
import sys, torch, archflash
kernel = sys.argv[1]
q = torch.randn(1, 2, 5, 999, device="cuda")
def runs_a_kernel(**call):
    try:
        archflash.attention(q, q, q, **call)
    except archflash.ForcedImplementationError:
        return True
    return False
assert runs_a_kernel()
assert not runs_a_kernel(implementation="torch")
with archflash.force("torch"):
    assert not runs_a_kernel()
    assert runs_a_kernel(implementation=kernel)
assert archflash.explain(q[..., :40], q[..., :40], q[..., :40]).why == "it is forced"
print("forced")
"""


def test_the_environment_variable_forces(tmp_path: Path) -> None:
    kernel = kernels()[-1]
    environment = {**os.environ, "ARCHFLASH_FORCE_IMPLEMENTATION": kernel}
    command = [sys.executable, "-c", FORCED_BY_ENVIRONMENT, kernel]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.stdout.strip() == "forced", done.stderr


def test_an_unknown_name_is_refused() -> None:
    q, k, v = qkv(5, 5)
    with pytest.raises(archflash.ForcedImplementationError, match="simt"):
        archflash.attention(q, k, v, implementation="fastest")
    with (
        pytest.raises(archflash.ForcedImplementationError, match="fastest"),
        archflash.force("fastest"),
    ):
        pytest.fail("the block must not be entered")


# --- what no kernel serves ---


def unserved(why: str, dtype: str) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    q, k, v = qkv(65, 113, {"d999": 999}.get(why, 64), dtype=dtype)
    mask = rand(65, 113, seed=5).double()  # a dtype that no kernel takes
    return (q, k, v), ({"attn_mask": mask} if why == "mask" else {"causal": True})


UNSERVED = {"d999": "999", "mask": "attn_mask"}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("why", UNSERVED)
def test_what_no_kernel_serves_goes_to_torch_with_its_reason_once(
    why: str, dtype: str, fresh_dispatch: None
) -> None:
    tensors, call = unserved(why, dtype)
    decision = archflash.explain(*tensors, **call)
    assert decision.chosen == "torch"
    assert decision.fallback
    for kernel in kernels():
        reasons = " ".join(decision.reasons[kernel])
        assert UNSERVED[why] in reasons or "only when it is forced" in reasons
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = archflash.attention(*tensors, **call)
        shorter = tensors[0][:, :, :7], *tensors[1:]
        archflash.attention(*shorter, **({} if why == "mask" else call))
    texts = [str(warning.message) for warning in caught]
    assert any(UNSERVED[why] in text for text in texts)
    assert len(texts) == len(set(texts)), "a reason was given twice"
    assert same_bits(out, archflash.attention(*tensors, implementation="torch", **call))


@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize("why", UNSERVED)
def test_a_forced_kernel_raises_with_the_reason(kernel: str, why: str) -> None:
    dtype = next(dtype for name, dtype in kernel_dtypes() if name == kernel)
    tensors, call = unserved(why, dtype)
    with pytest.raises(archflash.ForcedImplementationError, match=UNSERVED[why]):
        archflash.attention(*tensors, implementation=kernel, **call)
    with archflash.force(kernel), pytest.raises(archflash.ForcedImplementationError, match=kernel):
        archflash.attention(*tensors, **call)


def test_fallback_error_turns_the_warning_into_an_error(
    fresh_dispatch: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARCHFLASH_FALLBACK", "error")
    tensors, call = unserved("d999", "float32")
    for _ in range(2):
        with pytest.raises(archflash.UnsupportedError, match="ARCHFLASH_FALLBACK"):
            archflash.attention(*tensors, **call)
    archflash.attention(*tensors, implementation="torch", **call)  # asked for by name: no fallback
    archflash.attention(*qkv(65, 113), **call)


@pytest.mark.parametrize(("dtype", "call"), [("float32", {"softcap": 8.0}), ("bfloat16", {})])
def test_gradients_are_right(dtype: str, call: dict[str, Any], fresh_dispatch: None) -> None:
    tensors = qkv(65, 113, dtype=dtype, heads=(4, 2))
    weight = rand(1, 4, 65, 64, seed=7)

    def gradients(attend: Callable[..., Tensor], kind: torch.dtype) -> list[Tensor]:
        leaves = [x.detach().to(kind).requires_grad_() for x in tensors]
        attend(*leaves, causal=True, **call).backward(weight.to(kind))
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    def exact(*leaves: Tensor, **options: Any) -> Tensor:
        return reference.attention(*leaves, return_lse=False, **options)

    kind = tensors[0].dtype
    leaves = [x.detach().requires_grad_() for x in tensors]
    # Our kernels compute what PyTorch has no fused kernel for, or where they were measured first.
    on_hopper = torch.cuda.get_device_capability() == (9, 0)
    served = "simt" if call else "hopper" if on_hopper else "torch"
    assert archflash.explain(*leaves, causal=True, **call).chosen == served
    ours = gradients(archflash.attention, kind)
    expected, plain = gradients(exact, torch.float64), gradients(reference.baseline, kind)
    assert len(ours) == len(expected) == len(plain) == 3
    for got, right, base in zip(ours, expected, plain, strict=True):
        report = reference.check(got, right, base)
        assert report.ok, report
    with torch.no_grad():
        leaves = [x.detach().requires_grad_() for x in tensors]
        assert archflash.explain(*leaves, causal=True, softcap=8.0).chosen in kernels()


# --- explain and replay ---

REPLAYED = all_pairs(
    {
        "d": [64, 128, 40],
        "causal": [False, True],
        "window": [None, (17, 4)],
        "softcap": [None, 5.0],
        "sinks": [None, "float32", "bfloat16"],
        "q_offset": [None, 3, "tensor"],
        "layout": ["bhnd", "bnhd", "packed"],
        "return_lse": [False, True],
    }
)


@each_kernel_and_dtype
def test_saved_plans_replay(kernel: str, dtype: str, tmp_path: Path) -> None:
    for number, row in enumerate(REPLAYED):
        call = {name: row[name] for name in ("causal", "window", "softcap", "return_lse")}
        q, k, v = qkv(65, 129, row["d"], dtype=dtype, batch=2, heads=(4, 2))
        if row["layout"] == "packed":
            q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
            call |= {"cu_seqlens_q": cu_seqlens((60, 70)), "cu_seqlens_k": cu_seqlens((129, 129))}
        elif row["layout"] == "bnhd":
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            call["layout"] = "bnhd"
        if row["sinks"]:
            call["sinks"] = rand(4, seed=1, dtype=row["sinks"])
        if row["q_offset"] is not None:
            call["q_offset"] = int32(3, -4) if row["q_offset"] == "tensor" else row["q_offset"]
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(plan_of(q, k, v, implementation=kernel, **call)))
        assert main(["replay", str(path)]) == 0, row


@each_kernel_and_dtype
def test_a_tampered_plan_is_refused_before_it_runs(
    kernel: str, dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    q, k, v = qkv(65, 129, dtype=dtype)
    fields = plan_of(q, k, v, implementation=kernel)
    params = fields["launches"][0]["params"]
    fields["launches"][0]["params"] = "f0" * 8 + params[16:]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(fields))
    assert main(["replay", str(path)]) == 2
    assert "'launches[0].params' is from character 0 on 'f0f0" in capsys.readouterr().err


def test_replay_on_a_device_that_is_not_here_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    q, k, v = qkv(65, 129, dtype="float32")
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan_of(q, k, v, implementation="simt")))
    for name in ("99", "cuda:99"):
        assert main(["replay", str(path), "--device", name]) == 2
        assert "there is no device cuda:99 here" in capsys.readouterr().err


@each_kernel_and_dtype
def test_executing_a_plan_gives_the_bits_of_the_call(kernel: str, dtype: str) -> None:
    q, k, v = qkv(65, 129, dtype=dtype)
    plan = _native.LaunchPlan.from_dict(plan_of(q, k, v, implementation=kernel, return_lse=True))
    out, lse = run_plan(plan, Inputs(q, k, v, {"causal": False, "return_lse": True}))
    expected, expected_lse = archflash.attention(q, k, v, implementation=kernel, return_lse=True)
    assert same_bits(out, expected)
    assert same_bits(lse, expected_lse)


def test_a_plan_with_clusters_is_launched_in_clusters() -> None:
    """ampere gives the same bits in clusters, and a grid that ends inside a cluster is refused."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("clusters are for 9.0 and newer")
    q, k, v = qkv(65, 129, dtype="bfloat16")
    fields = plan_of(q, k, v, implementation="ampere")
    (launch,) = fields["launches"]
    assert launch["grid"][0] % 2 == 0
    launch["cluster"] = [2, 1, 1]
    inputs = Inputs(q, k, v, {"causal": False, "return_lse": False})
    out = run_plan(_native.LaunchPlan.unchecked_from_dict(fields), inputs)
    assert same_bits(out, archflash.attention(q, k, v, implementation="ampere"))
    launch["grid"][0] += 1
    with pytest.raises(archflash.LaunchError):
        run_plan(_native.LaunchPlan.unchecked_from_dict(fields), inputs)


# --- scaled_dot_product_attention ---


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("nq", "nk"), [(65, 129), (129, 65), (1, 63)])
def test_sdpa_keeps_the_top_left_rule_of_torch(dtype: str, nq: int, nk: int) -> None:
    q, k, v = qkv(nq, nk, dtype=dtype, batch=2)
    out = archflash.scaled_dot_product_attention(q, k, v, is_causal=True)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=True
    )
    base = reference.baseline(q, k, v, causal=True, q_offset=0)
    report = reference.check(out, expected, base)
    assert report.ok, report


@pytest.mark.parametrize("kernel", kernels())
def test_sdpa_runs_a_forced_kernel_with_leading_dimensions_and_gqa(kernel: str) -> None:
    dtype = next(dtype for name, dtype in kernel_dtypes() if name == kernel)
    q, k, v = qkv(65, 129, dtype=dtype, batch=6, heads=(4, 2))
    with archflash.force(kernel):
        q5, k5, v5 = (x.view(2, 3, *x.shape[1:]) for x in (q, k, v))
        out = archflash.scaled_dot_product_attention(q5, k5, v5, enable_gqa=True, scale=0.2)
    assert out.shape == (2, 3, 4, 65, 64)
    assert_close(out.flatten(0, 1), None, q, k, v, scale=0.2)


MASKS: dict[str, Callable[[], dict[str, Any]]] = {
    "bool": lambda: {"attn_mask": rand(2, 1, 200, 200, seed=4) > -0.5},
    "added": lambda: {"attn_mask": rand(2, 4, 200, 200, seed=4).bfloat16()},
    "float32": lambda: {"attn_mask": rand(2, 1, 200, 200, seed=4)},
    "bias": lambda: {"attn_mask": rand(1, 4, 200, 200, seed=4).bfloat16().requires_grad_()},
    "blocks": lambda: {"block_mask": rand(1, 1, 4, 4, seed=4) > -0.5},
    "lists": lambda: {"key_indices": int32(*range(0, 200, 3)).expand(1, 1, 200, -1)},
}


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("turned_on", ["before", "between"])
@pytest.mark.parametrize("name", MASKS)
def test_deterministic_gradients_need_no_forced_kernel(
    name: str, turned_on: str, watched: bool
) -> None:
    """The kernel that serves a call may have no gradients of it in a fixed order: others do."""
    call = MASKS[name]()
    leaves = [rand(2, 4, 200, 64, seed=i).bfloat16().requires_grad_() for i in range(3)]
    wanted = [*leaves, *(x for x in call.values() if x.requires_grad)]
    found = []
    try:
        for _ in range(2):
            torch.use_deterministic_algorithms(turned_on == "before")
            mode = FlopCounterMode(display=False)
            with mode if watched else contextlib.nullcontext():
                out = archflash.attention(*leaves, **call)
            torch.use_deterministic_algorithms(True)
            found.append(torch.autograd.grad(out, wanted, torch.ones_like(out)))
    finally:
        torch.use_deterministic_algorithms(False)
    for x, y in zip(*found, strict=True):
        assert torch.equal(x, y)
    plain = {x: y.detach() for x, y in call.items()}
    exact = reference.attention_backward(
        torch.ones_like(out), *(x.detach() for x in leaves), **plain
    )
    for x, of in zip(found[0], ("dq", "dk", "dv"), strict=False):
        torch.testing.assert_close(x.double(), getattr(exact, of), atol=5e-2, rtol=5e-2)
