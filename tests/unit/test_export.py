"""Exported programs: torch.export of calls, its decompositions, files, and new sizes."""

from __future__ import annotations

import io
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.torch_version import TorchVersion

import archflash
from archflash._eager import is_exporting

pytestmark = pytest.mark.slow  # torch.export takes two seconds to import


tells_of_exports = pytest.mark.skipif(
    not hasattr(torch.compiler, "_is_exporting_flag"), reason="this torch does not tell of exports"
)


class Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return archflash.attention(q, k, v, causal=True, window=(9, None), softcap=5.0) * 2


class AttentionAndLse(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        out, lse = archflash.attention(q, k, v, causal=True, return_lse=True)
        return out + lse[..., None]


class WithTensors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.tensor([0.5, -1.0, 2.0, 0.0]), requires_grad=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        offsets = torch.full((q.shape[0],), 3, dtype=torch.int32)
        return archflash.attention(q, k, v, causal=True, sinks=self.sinks, q_offset=offsets)


class Sdpa(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return archflash.scaled_dot_product_attention(q, k, v, is_causal=True)


class PyTorchsSdpa(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def qkv(batch: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    q, k, v = (torch.randn(batch, 4, rows, 16, generator=generator) for _ in range(3))
    return q, k, v


MODULES = {
    "attention": (Attention, "archflash.attention.default"),
    "log-sum-exp": (AttentionAndLse, "archflash.attention.default"),
    "tensors": (WithTensors, "archflash.attention.default"),
    "sdpa": (Sdpa, "archflash.attention.default"),
    "PyTorch's sdpa": (PyTorchsSdpa, "aten.scaled_dot_product_attention.default"),
}


def saved_and_loaded(program: Any) -> Any:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


@pytest.mark.parametrize("name", MODULES)
def test_an_exported_program_takes_other_sizes(name: str) -> None:
    module, operator = MODULES[name]
    batch, rows = torch.export.Dim("batch", min=2, max=64), torch.export.Dim("rows", min=2, max=512)
    sizes = {0: batch, 2: rows}
    with archflash.enabled():
        program = torch.export.export(
            module(), qkv(2, 33), dynamic_shapes=dict.fromkeys("qkv", sizes), strict=False
        )
        called = {str(node.target) for node in program.graph.nodes}
        assert operator in called
        for one in (program, program.run_decompositions(), saved_and_loaded(program)):
            for given in (qkv(2, 33), qkv(3, 20)):
                torch.testing.assert_close(one.module()(*given), module()(*given))


class WithCache(nn.Module):
    def forward(self, q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, new: Tensor) -> Any:
        return archflash.attention_with_kvcache(
            q, keys, values, cache_seqlens=lengths, k_new=new, v_new=new, causal=True
        )


def test_an_exported_program_writes_its_cache() -> None:
    q, new = torch.randn(2, 2, 1, 4, 16).unbind(0)
    keys, values = torch.randn(2, 2, 32, 4, 16).unbind(0)
    lengths = torch.tensor([5, 31], dtype=torch.int32)
    given = (q, keys, values, lengths, new)
    program = torch.export.export(WithCache(), given, strict=False)
    expected_cache = [keys.clone(), values.clone()]
    expected = WithCache()(q, *expected_cache, lengths, new)
    for one in (program, program.run_decompositions(), saved_and_loaded(program)):
        cache = [keys.clone(), values.clone()]
        torch.testing.assert_close(one.module()(q, *cache, lengths, new), expected)
        for written, right in zip(cache, expected_cache, strict=True):
            assert torch.equal(written, right)
            assert not torch.equal(written, keys)


def test_an_exported_program_holds_what_was_forced() -> None:
    class Forced(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
            return archflash.attention(q, k, v, implementation="simt")

    program = torch.export.export(Forced(), qkv(1, 5), strict=False)
    operator = torch.ops.archflash.attention.default
    (called,) = (node for node in program.graph.nodes if node.target == operator)
    assert "simt" in [*called.args, *called.kwargs.values()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that the simulator runs
        torch.testing.assert_close(program.module()(*qkv(1, 5)), archflash.attention(*qkv(1, 5)))


class NarrowedByAValue(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, count: Tensor) -> Any:
        keys: Any = count.item()
        torch._check(keys >= 2)  # type: ignore[no-untyped-call]
        torch._check(keys <= k.shape[2])  # type: ignore[no-untyped-call]
        k, v = (x.narrow(2, 0, keys) for x in (k, v))
        out = archflash.attention(q, k, v, softcap=5.0)
        return out + archflash.scaled_dot_product_attention(q, k, v)


@pytest.mark.skipif(
    TorchVersion(torch.__version__) < (2, 7), reason="torch 2.6 cannot trace such a narrow"
)
def test_sizes_that_the_values_of_a_tensor_decide() -> None:
    """torch.export and torch.compile know no number for such a size."""
    q, k, v = (torch.randn(1, 2, n, 16) for n in (5, 64, 64))
    model, count = NarrowedByAValue(), torch.tensor(33)
    expected = archflash.attention(q, k[:, :, :33], v[:, :, :33], softcap=5.0)
    expected += F.scaled_dot_product_attention(q, k[:, :, :33], v[:, :, :33])
    program = torch.export.export(model, (q, k, v, torch.tensor(7)))
    torch.testing.assert_close(program.module()(q, k, v, count), expected)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(q, k, v, count), expected)


class Trained(nn.Module):
    """A model as it comes from its training: its parameters require gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 16)
        self.sinks = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Any:
        q, k, v = (self.project(x) for _ in range(3))
        return archflash.attention(q, k, v, causal=True, sinks=self.sinks)


@pytest.mark.skipif(
    TorchVersion(torch.__version__) < (2, 7), reason="torch 2.6 does not tell of an export"
)
@pytest.mark.parametrize("strict", [False, True])
def test_a_trained_model_is_exported_with_one_operator(strict: bool) -> None:
    """Neither are PyTorch's operations exported in its place, nor beside it."""
    module, (x, *_) = Trained(), qkv(2, 9)
    program = torch.export.export(module, (x,), strict=strict)
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count("archflash.attention.default") == 1
    assert not any("wrap_with" in name or "scaled_dot_product" in name for name in targets)
    loaded = saved_and_loaded(program).module()
    torch.testing.assert_close(loaded(x), module(x))
    for one in (module, loaded):
        one(x).square().sum().backward()
    expected = {name: p.grad for name, p in module.named_parameters()}
    torch.testing.assert_close({n: p.grad for n, p in loaded.named_parameters()}, expected)


def test_compiled_functions_are_not_exported_ones() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x + is_exporting(), fullgraph=True, backend="eager")
    assert compiled(torch.zeros(1)).item() == 0


@tells_of_exports
def test_programs_for_onnx_are_made_of_pytorchs_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.onnx.export knows these, and needs a package that the tests have not."""
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    sizes = {2: torch.export.Dim("rows", min=2, max=64)}
    module = Attention().eval()
    program = torch.export.export(module, qkv(2, 9), dynamic_shapes=(sizes,) * 3, strict=False)
    program.graph.eliminate_dead_code()
    assert not [node for node in program.graph.nodes if "archflash" in str(node.target)]
    for given in (qkv(2, 9), qkv(2, 33)):
        torch.testing.assert_close(program.module()(*given), module(*given), atol=1e-5, rtol=1e-5)


@tells_of_exports
def test_onnx_promises_no_batch_invariance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)

    class Invariant(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
            return archflash.attention(q, k, v, batch_invariant=True)

    given = tuple(x.half() for x in qkv(2, 9))
    with pytest.raises(archflash.UnsupportedError, match="no operators of ONNX"):
        torch.export.export(Invariant(), given, strict=False)
