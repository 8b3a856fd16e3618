"""Errors on a GPU: the right one, before any launch, and the next good call works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import archflash
from archflash import _archflash as _native
from archflash import reference
from archflash.cli.replay import Inputs, run_plan

from .gpu_cases import (
    DEVICE,
    NAN,
    Guarded,
    attend_and_check,
    cu_seqlens,
    int32,
    kernel_dtypes,
    kernels,
    qkv,
)

pytestmark = pytest.mark.gpu

each_kernel = pytest.mark.parametrize("kernel", kernels())


def case_of(kernel: str) -> tuple[Tensor, Tensor, Tensor]:
    dtype = next(dtype for name, dtype in kernel_dtypes() if name == kernel)
    return qkv(65, 129, dtype=dtype, heads=(4, 2))


def assert_all_is_well(kernel: str) -> None:
    torch.cuda.synchronize()
    attend_and_check(kernel, *case_of(kernel), causal=True)
    torch.cuda.synchronize()


def packed(*tensors: Tensor) -> tuple[Tensor, ...]:
    """(1, H, N, D) as packed rows (N, H, D)."""
    return tuple(x[0].transpose(0, 1) for x in tensors)


# What is wrong with a call of q, k, v: the changed tensors, the keywords, the error and its text.
Wrong = Callable[[Tensor, Tensor, Tensor], tuple[tuple[Tensor, ...], dict[str, Any]]]
WRONG: dict[str, tuple[Wrong, type[Exception], str]] = {
    "rank": (lambda q, k, v: ((q[0], k, v), {}), ValueError, "q has shape"),
    "dtypes": (lambda q, k, v: ((q, k, v.double()), {}), TypeError, "dtypes"),
    "k-on-cpu": (lambda q, k, v: ((q, k.cpu(), v), {}), TypeError, "k is on cpu"),
    "q-on-cpu": (lambda q, k, v: ((q.cpu(), k, v), {}), TypeError, "q is on cpu"),
    "sinks-on-cpu": (lambda q, k, v: ((q, k, v), {"sinks": torch.zeros(4)}), TypeError, "sinks"),
    "sinks-shape": (lambda q, k, v: ((q, k, v), {"sinks": q.new_zeros(3)}), ValueError, "sinks"),
    "heads": (lambda q, k, v: ((q[:, :3], k, v), {}), ValueError, "multiple"),
    "rows": (lambda q, k, v: ((q, k, v[:, :, 1:]), {}), ValueError, "rows"),
    "head-dim": (lambda q, k, v: ((q[..., :32], k, v), {}), ValueError, "head dim"),
    "batch": (lambda q, k, v: ((q.repeat(2, 1, 1, 1), k, v), {}), ValueError, "batch"),
    "scale": (lambda q, k, v: ((q, k, v), {"scale": NAN}), ValueError, "scale"),
    "softcap": (lambda q, k, v: ((q, k, v), {"softcap": -1.0}), ValueError, "softcap"),
    "layout": (lambda q, k, v: ((q, k, v), {"layout": "hbnd"}), ValueError, "layout"),
    "offset-length": (
        lambda q, k, v: ((q, k, v), {"q_offset": int32(1, 2)}),
        ValueError,
        "q_offset",
    ),
    "offset-dtype": (
        lambda q, k, v: ((q, k, v), {"q_offset": int32(1).long()}),
        TypeError,
        "q_offset",
    ),
    "one-cu-seqlens": (
        lambda q, k, v: (packed(q, k, v), {"cu_seqlens_q": cu_seqlens((4,))}),
        ValueError,
        "cu_seqlens_k",
    ),
    "cu-seqlens-dtype": (
        lambda q, k, v: (
            packed(q, k, v),
            {"cu_seqlens_q": int32(0, 4).long(), "cu_seqlens_k": int32(0, 2)},
        ),
        TypeError,
        "int32",
    ),
    "cu-seqlens-on-cpu": (
        lambda q, k, v: (
            packed(q, k, v),
            {"cu_seqlens_q": int32(0, 4), "cu_seqlens_k": int32(0, 2).cpu()},
        ),
        TypeError,
        "cu_seqlens_k is on cpu",
    ),
    "cu-seqlens-length": (
        lambda q, k, v: (
            packed(q, k, v),
            {"cu_seqlens_q": int32(0, 4), "cu_seqlens_k": int32(0, 2, 2)},
        ),
        ValueError,
        "entries",
    ),
    "out-shape": (lambda q, k, v: ((q, k, v), {"out": q[:, :, 1:]}), ValueError, "out has shape"),
    "out-dtype": (lambda q, k, v: ((q, k, v), {"out": q.double()}), TypeError, "out has dtype"),
    "out-overlaps": (
        lambda q, k, v: ((q, k, v), {"out": q[:, :1].expand(-1, 4, -1, -1)}),
        ValueError,
        "elements overlap",
    ),
    "no-split": (lambda q, k, v: ((q, k, v), {"num_splits": 0}), ValueError, "num_splits is 0"),
    "alibi": (
        lambda q, k, v: ((q, k, v), {"alibi_slopes": torch.zeros(77, device=q.device)}),
        ValueError,
        "alibi_slopes has shape",
    ),
}


@each_kernel
@pytest.mark.parametrize("what", WRONG)
def test_after_a_wrong_call_the_next_good_one_works(kernel: str, what: str) -> None:
    make, error, text = WRONG[what]
    q, k, v = case_of(kernel)
    tensors, call = make(q, k, v)
    for implementation in (kernel, None):
        with pytest.raises(error, match=text):
            archflash.attention(*tensors, implementation=implementation, **call)
    assert_all_is_well(kernel)


@each_kernel
def test_sinks_of_a_dtype_that_no_kernel_reads_are_refused(kernel: str) -> None:
    q, k, v = case_of(kernel)
    sinks = torch.zeros(4, dtype=torch.float64, device=q.device)
    with pytest.raises((TypeError, archflash.ForcedImplementationError), match="sinks"):
        archflash.attention(q, k, v, implementation=kernel, sinks=sinks)
    assert_all_is_well(kernel)


@each_kernel
def test_a_refused_call_leaves_its_output_alone(kernel: str) -> None:
    q, k, v = case_of(kernel)
    guarded = Guarded(q.shape, q.stride(), q.dtype, DEVICE)
    with pytest.raises(ValueError, match="softcap"):
        archflash.attention(q, k, v, implementation=kernel, out=guarded.view, softcap=-1.0)
    mask = torch.ones(65, 129, dtype=torch.float64, device=q.device)  # no kernel takes it
    with pytest.raises(archflash.ForcedImplementationError):
        archflash.attention(q, k, v, implementation=kernel, out=guarded.view, attn_mask=mask)
    torch.cuda.synchronize()
    assert bool(guarded.view.isnan().all())
    guarded.assert_untouched_outside()
    assert_all_is_well(kernel)


@each_kernel
def test_a_forced_kernel_with_cpu_tensors_is_simulated_and_leaves_the_gpu_alone(
    kernel: str,
) -> None:
    q, k, v = (x[:, :, :40].cpu() for x in case_of(kernel))
    out = archflash.attention(q, k, v, implementation=kernel)
    assert out.device.type == "cpu"
    expected, _ = reference.attention(q, k, v)
    report = reference.check(out, expected, reference.baseline(q, k, v))
    assert report.ok, report
    assert_all_is_well(kernel)


# --- launches that CUDA refuses ---

ABSURD: dict[str, dict[str, Any]] = {
    "shared-memory": {"shared_bytes": 10_000_000},
    "kernel-name": {"kernel": "no_such_kernel"},
    "image": {"image": "{folder}/no_such_image"},
    "block": {"block": [4096, 1, 1]},
    "grid": {"grid": [1, 1 << 20, 1]},
    "cluster": {"grid": [3, 1, 1], "cluster": [2, 1, 1]},
}


@each_kernel
@pytest.mark.parametrize("what", ABSURD)
def test_a_refused_launch_raises_launch_error_and_breaks_nothing(kernel: str, what: str) -> None:
    q, k, v = case_of(kernel)
    plan = archflash.explain(q, k, v, implementation=kernel).plan
    assert plan is not None
    fields = plan.to_dict()
    launch = fields["launches"][0]
    launch.update(ABSURD[what])
    launch["image"] = launch["image"].format(folder=kernel)
    absurd = _native.LaunchPlan.unchecked_from_dict(fields)
    inputs = Inputs(q, k, v, {"causal": False, "return_lse": False})
    for _ in range(2):
        with pytest.raises(archflash.LaunchError):
            run_plan(absurd, inputs)
    assert_all_is_well(kernel)
    assert torch.equal(run_plan(plan, inputs), archflash.attention(q, k, v, implementation=kernel))


@each_kernel
def test_a_plan_runs_on_its_own_problem_only(kernel: str) -> None:
    q, k, v = case_of(kernel)
    plan = archflash.explain(q, k, v, implementation=kernel).plan
    assert plan is not None
    options = {"causal": False, "return_lse": False}
    with pytest.raises(ValueError, match="problem"):
        run_plan(plan, Inputs(q[:, :, :64], k, v, options))
    assert_all_is_well(kernel)


@each_kernel
def test_an_error_inside_a_capture_leaves_cuda_usable(kernel: str) -> None:
    q, k, v = case_of(kernel)
    archflash.attention(q, k, v, implementation=kernel)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        with pytest.raises(ValueError, match="softcap"):
            archflash.attention(q, k, v, implementation=kernel, softcap=-1.0)
        out = archflash.attention(q, k, v, implementation=kernel)
    graph.replay()
    assert torch.equal(out, archflash.attention(q, k, v, implementation=kernel))
    assert_all_is_well(kernel)


# Calls with tensors where other values are due: what the error says must not ask for their numbers,
# which would wait for the GPU and end the capture.
FOREIGN: dict[str, Callable[[Tensor], dict[str, Any]]] = {
    "causal": lambda x: {"causal": x},
    "return_lse": lambda x: {"return_lse": x},
    "window": lambda x: {"window": x},
    "window-left": lambda x: {"window": (x, 3)},
    "window-of-3": lambda x: {"window": [x, x, x]},
    "scale": lambda x: {"scale": x},
    "softcap": lambda x: {"softcap": x},
    "q_offset": lambda x: {"q_offset": x},
    "num_splits": lambda x: {"num_splits": x},
    "layout": lambda x: {"layout": x},
    "approximate": lambda x: {"approximate": x},
    "out_dtype": lambda x: {"out_dtype": x},
    "sinks": lambda x: {"sinks": [x, x]},
    "implementation": lambda x: {"implementation": x},
}


@each_kernel
def test_tensors_as_options_are_refused_inside_a_capture_that_goes_on(kernel: str) -> None:
    q, k, v = case_of(kernel)
    number = torch.ones((), device=q.device)
    expected = archflash.attention(q, k, v, implementation=kernel)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for make in FOREIGN.values():
            with pytest.raises((TypeError, ValueError, archflash.ForcedImplementationError)):
                archflash.attention(q, k, v, **{"implementation": kernel} | make(number))
        with pytest.raises(TypeError, match="dtype"):
            archflash.quantize_fp8(q, dtype=number)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="is_causal"):
            archflash.scaled_dot_product_attention(q, k, v, is_causal=number)  # type: ignore[arg-type]
        out = archflash.attention(q, k, v, implementation=kernel)
    out.fill_(NAN)
    graph.replay()
    assert torch.equal(out, expected)
    assert_all_is_well(kernel)


# --- tensors whose memory does not hold their values ---


def test_checks_of_values_leave_captures_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv(65, 129, dtype="bfloat16", heads=(4, 2))
    rows = [x[0].transpose(0, 1) for x in (q, k, v)]
    ends = {"cu_seqlens_q": cu_seqlens((65,)), "cu_seqlens_k": cu_seqlens((129,))}
    caches = [x.transpose(1, 2) for x in (q, k, v)]
    lengths = int32(129)

    def calls() -> list[Tensor]:
        of_cache = archflash.attention_with_kvcache(*caches, cache_seqlens=lengths)
        return [archflash.attention(*rows, **ends), of_cache]

    calls()
    for place in ("_api", "_kvcache"):
        monkeypatch.setattr(f"archflash.{place}._always_check", True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = calls()
        with pytest.raises(ValueError, match="check=True waits for the device"):
            archflash.attention_with_kvcache(*caches, cache_seqlens=lengths, check=True)
    graph.replay()
    for found, expected in zip(results, calls(), strict=True):
        assert torch.equal(found, expected)
    ends["cu_seqlens_q"].fill_(66)
    with pytest.raises(ValueError, match=r"cu_seqlens_q\[0\] is 66: it must be from 0 to total_q"):
        calls()


@each_kernel
def test_lazy_tensors_are_read_as_their_values(kernel: str) -> None:
    q, k, v = case_of(kernel)
    expected = archflash.attention(q, k, v, implementation=kernel)
    for name, x in (("q", q), ("k", k), ("v", v)):
        given = {"q": q, "k": k, "v": v} | {name: torch._neg_view(-x)}
        assert torch.equal(archflash.attention(**given, implementation=kernel), expected)
        zero = torch._efficientzerotensor(x.shape, dtype=x.dtype, device=x.device)
        out = archflash.attention(**given | {name: zero}, implementation=kernel)
        of_zeros = archflash.attention(**given | {name: torch.zeros_like(x)}, implementation=kernel)
        assert torch.equal(out, of_zeros)
    assert_all_is_well(kernel)


@each_kernel
@pytest.mark.parametrize("name", ["q", "k", "v", "out", "sinks", "q_offset"])
@pytest.mark.parametrize("offset", [0, 64])
def test_a_tensor_whose_storage_was_freed_is_refused(kernel: str, name: str, offset: int) -> None:
    q, k, v = case_of(kernel)
    call = {"q": q, "k": k, "v": v, "out": torch.empty_like(q)}
    call |= {"sinks": q.new_zeros(4), "q_offset": int32(64)}
    held = torch.empty(offset + call[name].numel(), dtype=call[name].dtype, device=q.device)
    call[name] = held[offset:].view(call[name].shape)
    held.untyped_storage().resize_(0)
    for implementation in (kernel, None):
        with pytest.raises(ValueError, match=f"^{name} has shape .* but no data"):
            archflash.attention(**call, implementation=implementation)
    plan = archflash.explain(q, k, v, implementation=kernel).plan
    assert plan is not None
    with pytest.raises(ValueError, match=f"^{name} has shape .* but no data"):
        _native.launch(plan, {name: call[name]})
    assert_all_is_well(kernel)
