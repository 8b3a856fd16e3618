"""archflash.attention as a torch operator on a GPU: torch.compile, opcheck, dispatch modes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import archflash
from archflash import _options, reference

from .gpu_cases import assert_close, cu_seqlens, int32, kernel_dtypes, kernels, qkv, rand, same_bits

pytestmark = pytest.mark.gpu

each_kernel = pytest.mark.parametrize("kernel", kernels())


def case_of(kernel: str, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    dtype = next(dtype for name, dtype in kernel_dtypes() if name == kernel)
    return qkv(65, 129, dtype=dtype, batch=2, heads=(4, 2), **options)


def calls() -> dict[str, dict[str, Any]]:
    """Keywords that reach each kind of argument of the operator; some are tensors on the GPU."""
    return {
        "plain": {},
        "causal-lse": {"causal": True, "return_lse": True},
        "window": {"window": (9, None), "q_offset": 5, "scale": 0.3},
        "tensors": {"sinks": rand(4, seed=1), "q_offset": int32(3, 70), "causal": True},
        "softcap": {"softcap": 5.0},
        "bnhd": {"layout": "bnhd"},
        "packed": {"return_lse": True},
    }


def packed(q: Tensor, k: Tensor, v: Tensor) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    return (q, k, v), {"cu_seqlens_q": cu_seqlens((60, 70)), "cu_seqlens_k": cu_seqlens((0, 258))}


NAMES = ("plain", "causal-lse", "window", "tensors", "softcap", "bnhd", "packed")


def prepared(kernel: str, name: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    tensors: tuple[Tensor, ...] = case_of(kernel)
    call = calls()[name]
    if name == "bnhd":
        tensors = tuple(x.transpose(1, 2) for x in tensors)
    if name == "packed":
        tensors, ends = packed(*tensors)
        call |= ends
    return tensors, call


def parts(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


@each_kernel
@pytest.mark.parametrize("name", NAMES)
def test_compiled_calls_give_the_bits_and_strides_of_eager_ones(kernel: str, name: str) -> None:
    tensors, call = prepared(kernel, name)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return archflash.attention(q, k, v, implementation=kernel, **call)

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for got, expected in zip(parts(compiled(*tensors)), parts(attend(*tensors)), strict=True):
        assert same_bits(got, expected)
        assert got.stride() == expected.stride()
        assert got.dtype == expected.dtype


@each_kernel
def test_inductor_gives_the_bits_of_eager(kernel: str) -> None:
    q, k, v = case_of(kernel)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return archflash.attention(q, k, v, implementation=kernel, causal=True, return_lse=True)

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True)
    for got, expected in zip(compiled(q, k, v), attend(q, k, v), strict=True):
        assert same_bits(got, expected)


@each_kernel
def test_compiled_calls_take_new_lengths(kernel: str) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return archflash.attention(q, k, v, implementation=kernel, causal=True)

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=True)
    q, k, v = case_of(kernel)
    for nk in (129, 128, 65, 7):
        keys, values = k[:, :, :nk], v[:, :, :nk]
        assert same_bits(compiled(q, keys, values), attend(q, keys, values))


@each_kernel
def test_force_holds_in_compiled_calls(kernel: str) -> None:
    q, k, v = (x[..., :1].expand(-1, -1, -1, 999) for x in case_of(kernel))  # kernels refuse it
    torch._dynamo.reset()
    compiled = torch.compile(archflash.attention, backend="aot_eager", fullgraph=True)
    with archflash.force("torch"):
        expected = archflash.attention(q, k, v)
        assert same_bits(compiled(q, k, v), expected)
    with archflash.force(kernel), pytest.raises(archflash.ForcedImplementationError, match="999"):
        compiled(q, k, v)


def test_compiled_gradients_are_right() -> None:
    tensors = qkv(65, 113, heads=(4, 2))
    weight = rand(1, 4, 65, 64, seed=7)

    def gradients(attend: Callable[..., Tensor], kind: torch.dtype) -> list[Tensor]:
        leaves = [x.detach().to(kind).requires_grad_() for x in tensors]
        (attend(*leaves) * weight.to(kind)).sum().backward()
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = archflash.attention(q, k, v, causal=True, softcap=8.0)
        assert isinstance(out, Tensor)
        return out

    call: dict[str, Any] = {"causal": True, "softcap": 8.0, "return_lse": False}
    torch._dynamo.reset()
    got = gradients(torch.compile(ours, backend="aot_eager", fullgraph=True), torch.float32)
    expected = gradients(lambda *x: reference.attention(*x, **call), torch.float64)
    plain = gradients(lambda *x: reference.baseline(*x, **call), torch.float32)
    for mine, right, base in zip(got, expected, plain, strict=True):
        report = reference.check(mine, right, base)
        assert report.ok, report


@each_kernel
@pytest.mark.parametrize("name", NAMES)
def test_opcheck(kernel: str, name: str) -> None:
    tensors, call = prepared(kernel, name)
    arguments = _options.to_operator(_options.complete(call))
    torch.library.opcheck(
        torch.ops.archflash.attention,
        tensors,
        {**arguments, "implementation": kernel, "needs_grad": False},
    )


@pytest.mark.parametrize("name", ["packed", "dropout"])
def test_inductor_compiles_what_pytorch_differentiates(name: str) -> None:
    tensors: tuple[Tensor, ...] = qkv(65, 129, batch=2)
    call: dict[str, Any] = {"dropout_p": 0.3, "rng_state": torch.tensor([5, 6], device="cuda")}
    if name == "packed":
        tensors, call = packed(*tensors)

    def gradients(function: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in tensors]
        out = function(*leaves)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return archflash.attention(q, k, v, **call)

    torch._dynamo.reset()
    found = gradients(torch.compile(attend, fullgraph=True))
    for got, expected in zip(found, gradients(attend), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "gradients"])
def test_cuda_graphs_of_torch_compile_hold_calls_of_pytorchs_attention(gradients: bool) -> None:
    """With mode="reduce-overhead" the first call warms up, the second is captured, and the others
    are replayed. A graph owns all results of the operators in it.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True) * 2

    def results(function: Callable[..., Tensor], seed: int) -> list[Tensor]:
        leaves = [x.requires_grad_(gradients) for x in qkv(129, 129, dtype="bfloat16", seed=seed)]
        torch.compiler.cudagraph_mark_step_begin()
        out = function(*leaves)
        if not gradients:
            return [out.clone()]
        grads = torch.autograd.grad(out.float().square().sum(), leaves)
        return [x.detach().clone() for x in (out, *grads)]

    torch._dynamo.reset()
    compiled = torch.compile(attend, mode="reduce-overhead", fullgraph=True)
    with archflash.enabled():
        archflash.stats(reset=True)
        for seed in range(5):
            found, expected = results(compiled, seed), results(attend, seed)
            assert same_bits(found[0], expected[0])
            for one, other in zip(found[1:], expected[1:], strict=True):
                torch.testing.assert_close(one, other, atol=0.05, rtol=0.05)
        counted = archflash.stats()
    passes = 2 if gradients else 1
    calls = sum(counted.served.values()) + sum(counted.declined.values())
    assert calls >= (5 + 2) * passes, counted
    assert calls < (5 + 5) * passes, counted  # replays do not count


PACKAGED = """
import sys, torch, archflash
from torch._inductor import cpu_vec_isa
cpu_vec_isa.VecISA.check_build = lambda *_: True  # the checks of the CPU take half a minute
package, tensors = torch._inductor.aoti_load_package(sys.argv[1]), torch.load(sys.argv[2])
for q, k, v, expected in tensors:
    assert torch.equal(package(q, k, v), expected)
print("same bits")
"""


def test_a_package_of_aotinductor_runs_in_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's compiler links the package. One that $CXX names may link its own C++ library
    statically, and PyTorch cannot load what it links (docs/dispatch.md).
    """
    from torch._inductor import config, cpu_vec_isa

    monkeypatch.setattr(config.cpp, "cxx", (None, "/usr/bin/g++"))
    # Without these, PyTorch compiles checks of the CPU and headers first, for a minute, and starts
    # processes that compile.
    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", lambda *_: True)
    monkeypatch.setattr(config, "compile_threads", 1)
    monkeypatch.setattr(config.aot_inductor, "precompile_headers", False)
    monkeypatch.setattr(config.aot_inductor, "compile_wrapper_opt_level", "O0")

    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = archflash.attention(q, k, v, causal=True, implementation="ampere")
            assert isinstance(out, Tensor)
            return out * 2

    rows = torch.export.Dim("rows", min=2, max=512)
    cases = [qkv(n, n, dtype="bfloat16", seed=n) for n in (65, 129)]
    program = torch.export.export(Model(), cases[0], dynamic_shapes=({2: rows},) * 3, strict=False)
    package, file = str(tmp_path / "model.pt2"), tmp_path / "tensors.pt"
    torch._inductor.aoti_compile_and_package(program, package_path=package)
    torch.save([(*case, Model()(*case)) for case in cases], file)
    command = [sys.executable, "-c", PACKAGED, package, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout == "same bits\n", done.stderr


@each_kernel
def test_subclasses_and_modes_reach_the_kernel(kernel: str) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, op: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            seen.append(str(op))
            return op(*args, **(kwargs or {}))

    q, k, v = case_of(kernel)
    expected = archflash.attention(q, k, v, implementation=kernel)
    with Watch():
        out = archflash.attention(q, k, v, implementation=kernel)
    assert any("archflash.attention" in name for name in seen)
    assert same_bits(out, expected)
    parameters = [torch.nn.Parameter(x, requires_grad=False) for x in (q, k, v)]
    assert same_bits(archflash.attention(*parameters, implementation=kernel), expected)
    assert_close(out, None, q, k, v)
