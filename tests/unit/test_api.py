"""The public face: signatures, outputs and strides, kinds of tensors, torch.compile, import."""

from __future__ import annotations

import doctest
import importlib
import inspect
import itertools
import os
import pkgutil
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import archflash
from archflash import _archflash as native
from archflash import reference
from archflash._api import make_problem

ROOT = Path(__file__).parents[2]
IMPORT_SECONDS = 0.3  # for archflash alone, without the import of torch


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ends(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


# --- what is public ---

SIGNATURES = {  # that of attention: test_options.py; with a cache: test_kvcache.py
    "attention_backward": (
        "(dout: 'Tensor', q: 'Tensor', k: 'Tensor', v: 'Tensor', out: 'Tensor', lse: 'Tensor', *, "
        "dlse: 'Tensor | None' = None, dq: 'Tensor | None' = None, dk: 'Tensor | None' = None, "
        "dv: 'Tensor | None' = None, accumulate: 'bool' = False, "
        "deterministic: 'bool | None' = None, causal: 'bool' = False, "
        "window: 'tuple[int | None, int | None] | None' = None, softcap: 'float | None' = None, "
        "sinks: 'Tensor | None' = None, scale: 'float | None' = None, "
        "q_offset: 'int | Tensor | None' = None, cu_seqlens_q: 'Tensor | None' = None, "
        "cu_seqlens_k: 'Tensor | None' = None, max_seqlen_q: 'int | None' = None, "
        "max_seqlen_k: 'int | None' = None, attn_mask: 'Tensor | None' = None, "
        "alibi_slopes: 'Tensor | None' = None, key_ranges: 'Tensor | None' = None, "
        "block_mask: 'Tensor | None' = None, key_indices: 'Tensor | None' = None, "
        "topk_lengths: 'Tensor | None' = None, dropout_p: 'float | None' = None, "
        "rng_state: 'Tensor | None' = None, mask_gradient: 'bool' = False, "
        "layout: 'str' = 'bhnd', implementation: 'str | None' = None) -> 'tuple[Tensor, ...]'"
    ),
    "disable": "() -> 'None'",
    "enable": "() -> 'None'",
    "enabled": "() -> 'Iterator[None]'",
    "explain": (
        "(q: 'Tensor', k: 'Tensor', v: 'Tensor', *, "
        "device: 'str | int | torch.device | None' = None, "
        "implementation: 'str | None' = None, "
        "backward: 'bool' = False, **options: 'Any') -> '_dispatch.Decision'"
    ),
    "force": "(name: 'str') -> 'Iterator[None]'",
    "implementations": "() -> 'list[Implementation]'",
    "scaled_dot_product_attention": (
        "(query: 'Tensor', key: 'Tensor', value: 'Tensor', attn_mask: 'Tensor | None' = None, "
        "dropout_p: 'float' = 0.0, is_causal: 'bool' = False, scale: 'float | None' = None, "
        "enable_gqa: 'bool' = False) -> 'Tensor'"
    ),
    "stats": "(*, reset: 'bool' = False) -> 'Stats'",
    "warm_up": (
        "(device: 'int | str | torch.device | None' = None, *, "
        "dtypes: 'Sequence[torch.dtype]' = (torch.float16, torch.bfloat16), "
        "head_dims: 'Sequence[int | tuple[int, int]]' = (64, 128), "
        "implementations: 'Sequence[str] | None' = None) -> 'list[str]'"
    ),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_public_signatures_stay_as_they_are(name: str) -> None:
    assert str(inspect.signature(getattr(archflash, name))) == SIGNATURES[name]


def test_the_public_names() -> None:
    assert sorted(archflash.__all__) == [
        "ArchflashError",
        "Decision",
        "ForcedImplementationError",
        "Implementation",
        "LaunchError",
        "NotCompiledError",
        "Stats",
        "UnsupportedError",
        "__version__",
        "approximate",
        "attention",
        "attention_backward",
        "attention_nvfp4",
        "attention_with_kvcache",
        "attention_with_shared_prefix",
        "disable",
        "dropout_mask",
        "dropout_state",
        "enable",
        "enabled",
        "explain",
        "force",
        "implementations",
        "masks",
        "merge_attention",
        "quantize_fp8",
        "quantize_mxfp8",
        "quantize_nvfp4",
        "reference",
        "scaled_dot_product_attention",
        "stats",
        "summarize_mask",
        "warm_up",
    ]
    assert all(hasattr(archflash, name) for name in archflash.__all__)


def test_packages_need_no_import_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("compat", "distributed", "integrations", "sim"):
        monkeypatch.delattr(archflash, name, raising=False)
        assert name in dir(archflash)
        assert getattr(archflash, name) is importlib.import_module(f"archflash.{name}")
    with pytest.raises(AttributeError, match="has no attribute 'attend'"):
        archflash.attend  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.slow
def test_a_compiled_function_may_explain_its_calls() -> None:
    """torch.compile stops there and goes on behind it. What it made of the function was wrong."""

    def model(q: Tensor) -> tuple[Any, Tensor]:
        return archflash.explain(q, q, q, device="H100"), archflash.attention(q, q, q)

    q = torch.randn(1, 2, 8, 16)
    decision, out = torch.compile(model, backend="eager")(q)
    assert str(decision) == str(archflash.explain(q, q, q, device="H100"))
    assert torch.equal(out, archflash.attention(q, q, q))


def test_a_compiled_function_may_enable_archflash() -> None:
    """torch.compile looked into it, and gave up with warnings after eight of its operators."""

    def model(q: Tensor) -> Tensor:
        with archflash.enabled():
            return torch.nn.functional.scaled_dot_product_attention(q, q, q)

    q = torch.randn(1, 2, 8, 16)
    torch._dynamo.utils.counters.clear()
    assert torch.equal(torch.compile(model, backend="eager")(q), model(q))
    breaks = " ".join(torch._dynamo.utils.counters["graph_break"])
    assert "op returned non-Tensor" not in breaks
    assert "marked as skipped" not in breaks
    assert torch._dynamo.utils.counters["frames"]["total"] < 20


def test_the_version_is_that_of_the_project() -> None:
    match = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert match is not None
    assert archflash.__version__ == match[1]


MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(archflash.__path__, "archflash.")
    if not module.name.endswith("_archflash")
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name: str) -> None:
    word = name.removeprefix("archflash.integrations.").lstrip("_")
    for library in ("comfyui", "diffusers", "sglang", "transformers", "vllm"):
        if word.startswith(library):
            pytest.importorskip(library, reason=f"{library} is not installed")
    if name.endswith("_quantize_mxfp8") and not hasattr(torch, "float8_e8m0fnu"):
        pytest.skip("torch before 2.7 has no float8_e8m0fnu")
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_the_main_functions_have_examples() -> None:
    finder = doctest.DocTestFinder()
    main = (
        archflash.attention,
        archflash.attention_backward,
        archflash.attention_with_kvcache,
        archflash.explain,
        archflash.force,
    )
    for function in main:
        assert any(test.examples for test in finder.find(function))


# --- the answer, on the CPU ---

CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": lambda: {"q": rand(2, 4, 7, 16), "k": rand(2, 4, 9, 16), "v": rand(2, 4, 9, 8)},
    "gqa-causal": lambda: {
        "q": rand(2, 4, 7, 16),
        "k": rand(2, 2, 9, 16),
        "v": rand(2, 2, 9, 16),
        "causal": True,
    },
    "bnhd-window-softcap": lambda: {
        "q": rand(2, 7, 4, 16),
        "k": rand(2, 9, 2, 16),
        "v": rand(2, 9, 2, 24),
        "layout": "bnhd",
        "window": (3, 1),
        "softcap": 5.0,
    },
    "sinks-offset": lambda: {
        "q": rand(2, 4, 7, 16),
        "k": rand(2, 4, 9, 16),
        "v": rand(2, 4, 9, 16),
        "sinks": rand(4),
        "causal": True,
        "q_offset": ends(0, 5),
        "scale": 0.3,
    },
    "varlen": lambda: {
        "q": rand(10, 4, 16),
        "k": rand(14, 2, 16),
        "v": rand(14, 2, 8),
        "cu_seqlens_q": ends(0, 4, 4, 10),
        "cu_seqlens_k": ends(0, 3, 8, 14),
        "causal": True,
    },
    "bfloat16": lambda: {
        name: rand(1, 4, 33, 32, dtype=torch.bfloat16, seed=seed)
        for seed, name in enumerate(("q", "k", "v"))
    },
    "out_dtype": lambda: {
        "q": rand(1, 2, 5, 16, dtype=torch.float16),
        "k": rand(1, 2, 6, 16, dtype=torch.float16),
        "v": rand(1, 2, 6, 16, dtype=torch.float16),
        "out_dtype": torch.float32,
    },
    "fp8": lambda: {
        "q": rand(1, 2, 5, 16).to(torch.float8_e4m3fn),
        "k": rand(1, 2, 6, 16).to(torch.float8_e4m3fn),
        "v": rand(1, 2, 6, 16).to(torch.float8_e4m3fn),
        "v_descale": torch.tensor([2.0, 0.5]),
    },
}

every_call = pytest.mark.parametrize("name", CALLS)


@every_call
def test_the_output_is_that_of_the_reference(name: str) -> None:
    call = CALLS[name]()
    out, lse = archflash.attention(**call, return_lse=True)
    expected, expected_lse = reference.attention(**call)
    assert reference.check(out, expected, reference.baseline(**call)).ok
    torch.testing.assert_close(lse, expected_lse.float(), atol=2e-3, rtol=1e-3)
    assert lse.is_contiguous()
    alone = archflash.attention(**call)
    assert reference.check(alone, expected, reference.baseline(**call)).ok


@every_call
def test_the_output_dtype_and_shape(name: str) -> None:
    call = CALLS[name]()
    out, lse = archflash.attention(**call, return_lse=True)
    dtype = torch.bfloat16 if name == "fp8" else call["q"].dtype
    assert out.dtype == call.get("out_dtype", dtype)
    assert out.shape == (*call["q"].shape[:-1], call["v"].shape[-1])
    if "cu_seqlens_q" in call:
        lse_shape = call["q"].shape[1::-1]
    else:
        b, first, second, _ = call["q"].shape
        lse_shape = (b, second, first) if call.get("layout") == "bnhd" else (b, first, second)
    assert (lse.shape, lse.dtype) == (lse_shape, torch.float32)


@every_call
def test_out_is_written_and_returned(name: str) -> None:
    call = CALLS[name]()
    expected = archflash.attention(**call)
    whole = torch.full((2, *expected.shape), torch.nan, dtype=expected.dtype)
    out = whole[1]
    assert archflash.attention(**call, out=out) is out
    assert torch.equal(out, expected)
    assert whole[0].isnan().all()


def test_an_out_of_any_strides_is_written() -> None:
    q, k, v = rand(2, 4, 7, 16), rand(2, 4, 9, 16), rand(2, 4, 9, 8)
    out = torch.empty(8, 7, 4, 4).permute(3, 2, 1, 0)[::2]
    assert archflash.attention(q, k, v, out=out) is out
    torch.testing.assert_close(out, archflash.attention(q, k, v))


# --- the output nests as q does ---


def nested(order: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """A dense tensor whose dimensions lie in memory in `order`, the first one outermost."""
    dense = rand(*(shape[i] for i in order))
    return dense.permute([order.index(i) for i in range(len(order))])


def expected_strides(order: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [0] * len(shape), 1
    for dimension in reversed(order):
        strides[dimension] = step
        step *= shape[dimension]
    return tuple(strides)


ORDERS = [(*order, 3) for order in itertools.permutations(range(3))]


def out_strides_of_problem(q: Tensor, k: Tensor, layout: str) -> tuple[int, ...]:
    """The strides that the planner gives the output, in the order of the tensor's dimensions."""
    fields = make_problem(q, k, k, layout=layout).to_dict()["out"]
    names = ("batch", "head", "row") if layout == "bhnd" else ("batch", "row", "head")
    return (*(fields[name] for name in names), 1)


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("dv", [16, 8])
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_the_output_is_dense_in_the_order_of_q(
    order: tuple[int, ...], dv: int, layout: str
) -> None:
    q, k = nested(order, (2, 3, 5, 16)), rand(2, 3, 5, 16)
    v = rand(2, 3, 5, dv)
    out = archflash.attention(q, k, v, layout=layout)
    wanted = expected_strides(order, (2, 3, 5, dv))
    assert out.stride() == wanted
    if dv == 16:
        assert out.stride() == q.stride()
        assert out_strides_of_problem(q, k, layout) == wanted
    torch.testing.assert_close(out, archflash.attention(q.contiguous(), k, v, layout=layout))


def test_the_output_of_a_packed_buffer_has_no_gaps() -> None:
    qkv = rand(2, 5, 3, 4, 16)
    q, k, v = qkv.unbind(2)
    assert archflash.attention(q, k, v, layout="bnhd").stride() == (320, 64, 16, 1)
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    out = archflash.attention(*heads_first)
    assert out.shape == (2, 4, 5, 16)
    assert out.stride() == (320, 16, 64, 1)
    packed = rand(9, 3, 4, 16)
    q, k, v = packed.unbind(1)
    options = {"cu_seqlens_q": ends(0, 9), "cu_seqlens_k": ends(0, 9)}
    assert archflash.attention(q, k, v, **options).stride() == (64, 16, 1)


@pytest.mark.parametrize(
    ("expanded", "strides"),
    [
        pytest.param((0,), (240, 80, 16, 1), id="batch"),
        pytest.param((1,), (80, 160, 16, 1), id="heads"),
        pytest.param((0, 1), (240, 80, 16, 1), id="batch and heads"),
    ],
)
def test_an_expanded_dimension_goes_outermost(
    expanded: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    shape = [1 if i in expanded else size for i, size in enumerate((2, 3, 5, 16))]
    q = rand(*shape).expand(2, 3, 5, 16)
    out = archflash.attention(q, q, q)
    assert out.stride() == strides
    assert out_strides_of_problem(q, q, "bhnd") == strides
    torch.testing.assert_close(out, archflash.attention(*[q.contiguous()] * 3))


# --- reading tensors ---

VIEWS: dict[str, Callable[[], Tensor]] = {
    "dense": lambda: rand(2, 4, 6, 16),
    "transposed": lambda: rand(2, 6, 4, 16).transpose(1, 2),
    "packed": lambda: rand(2, 6, 3, 4, 16)[:, :, 1].transpose(1, 2),
    "every-second-row": lambda: rand(2, 4, 12, 16)[:, :, ::2],
    "offset-by-one": lambda: rand(769)[1:].view(2, 4, 6, 16),
    "offset-by-two": lambda: rand(770)[2:].view(2, 4, 6, 16),
    "offset-in-rows": lambda: rand(2, 4, 9, 16)[:, :, 3:],
    "strided-columns": lambda: rand(2, 4, 6, 32)[..., ::2],
    "expanded": lambda: rand(1, 1, 6, 16).expand(2, 4, 6, 16),
    "size-1": lambda: rand(1, 1, 1, 16).as_strided((1, 1, 1, 16), (5, 6, 7, 1)),
    "no-batch": lambda: rand(0, 4, 6, 16),
    "no-rows": lambda: rand(2, 4, 0, 16),
    "parameter": lambda: torch.nn.Parameter(rand(2, 4, 6, 16)),
    "requires-grad": lambda: rand(2, 4, 6, 16).requires_grad_(),
    "float16": lambda: rand(2, 4, 6, 16, dtype=torch.float16),
    "bfloat16-offset": lambda: rand(772, dtype=torch.bfloat16)[4:].view(2, 4, 6, 16),
    "float64": lambda: rand(2, 4, 6, 16, dtype=torch.float64),
    "e4m3": lambda: rand(2, 4, 6, 16).to(torch.float8_e4m3fn),
    "e5m2": lambda: rand(2, 4, 6, 16).to(torch.float8_e5m2),
    "meta": lambda: torch.empty(2, 4, 6, 16, device="meta"),
}


@pytest.fixture
def reading() -> Iterator[Callable[[bool], None]]:
    yield native.use_exchange_table
    native.use_exchange_table(True)


@pytest.mark.skipif(not native.has_exchange_table(), reason="this torch has no exchange table")
@pytest.mark.parametrize("name", VIEWS)
def test_both_ways_of_reading_a_tensor_agree(name: str, reading: Callable[[bool], None]) -> None:
    x = VIEWS[name]()
    options: dict[str, Any] = {
        "attn_mask": torch.ones(x.shape[2], x.shape[2], dtype=torch.bool, device=x.device),
        "sinks": torch.zeros(x.shape[1], device=x.device),
        "q_offset": torch.zeros(x.shape[0], dtype=torch.int32, device=x.device),
    }
    reading(True)
    through_table = make_problem(x, x, x, **options)
    reading(False)
    through_attributes = make_problem(x, x, x, **options)
    assert through_table == through_attributes
    assert through_table.to_dict() == through_attributes.to_dict()
    shape = [through_table.batch, through_table.heads_q, through_table.nq, through_table.d]
    assert shape == list(x.shape)


def test_meta_tensors_are_read_quickly_and_others_behind_them_rightly() -> None:
    real, meta = rand(2, 4, 6, 16), torch.empty(2, 4, 6, 16, device="meta")
    seconds = []
    for _ in range(5):
        expected = make_problem(real, real, real)
        assert make_problem(meta, meta, meta).as_if_on_cuda() == expected.as_if_on_cuda()
        assert make_problem(real, real, real) == expected
        make_problem(meta, meta, meta)
        begin = time.perf_counter()
        make_problem(meta, meta, meta)
        seconds.append(time.perf_counter() - begin)
    assert min(seconds) < 0.002  # the exchange table takes 10 ms to refuse one


@pytest.mark.parametrize("enabled", [True, False], ids=["exchange table", "attributes"])
def test_either_way_of_reading_serves_calls(enabled: bool, reading: Callable[[bool], None]) -> None:
    reading(enabled)
    q, k, v = rand(2, 4, 7, 16), rand(2, 2, 9, 16), rand(2, 2, 9, 8)
    out = archflash.attention(q, k, v, causal=True)
    expected, _ = reference.attention(q, k, v, causal=True)
    assert reference.check(out, expected, reference.baseline(q, k, v, causal=True)).ok
    with pytest.raises(ValueError, match=r"k has shape \(2, 2, 9, 16\)"):
        archflash.attention(q[..., :8], k, v)


# --- other kinds of tensors ---


class Tagged(Tensor):
    """A subclass that changes nothing."""


def test_a_tensor_subclass_is_served_and_kept() -> None:
    call = CALLS["gqa-causal"]()
    expected = archflash.attention(**call)
    tagged = {
        name: value.as_subclass(Tagged) if isinstance(value, Tensor) else value
        for name, value in call.items()
    }
    out = archflash.attention(**tagged)
    assert type(out) is Tagged
    assert torch.equal(out.as_subclass(Tensor), expected)


def metadata(result: Tensor) -> tuple[Any, ...]:
    return tuple(result.shape), tuple(result.stride()), result.dtype, result.device.type


@every_call
def test_fake_tensors_foretell_shape_strides_and_dtype(name: str) -> None:
    call = CALLS[name]()
    real = archflash.attention(**call, return_lse=True)
    with FakeTensorMode() as mode:
        fakes = {
            key: mode.from_tensor(value) if isinstance(value, Tensor) else value
            for key, value in call.items()
        }
        fake = archflash.attention(**fakes, return_lse=True)
        alone = archflash.attention(**fakes)
    assert [metadata(x) for x in fake] == [metadata(x) for x in real]
    assert metadata(alone) == metadata(real[0])


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_fake_tensors_foretell_the_order_of_q(order: tuple[int, ...]) -> None:
    q = nested(order, (2, 3, 5, 16))
    v = rand(2, 3, 5, 8)
    with FakeTensorMode() as mode:
        fake = archflash.attention(*map(mode.from_tensor, (q, q, v)))
    assert metadata(fake) == metadata(archflash.attention(q, q, v))


def test_meta_tensors_give_meta_outputs() -> None:
    q = torch.empty(2, 7, 4, 16, device="meta")
    out, lse = archflash.attention(q, q, q, layout="bnhd", return_lse=True)
    assert metadata(out) == ((2, 7, 4, 16), (448, 64, 16, 1), torch.float32, "meta")
    assert lse.shape == (2, 4, 7)


# --- torch's machinery ---

COMPILED: dict[str, Callable[[], dict[str, Any]]] = {
    name: CALLS[name] for name in ("gqa-causal", "bnhd-window-softcap", "sinks-offset", "varlen")
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_in_one_graph_it_gives_the_same(name: str) -> None:
    call = COMPILED[name]()
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(scale_by: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
        out, lse = archflash.attention(**arguments, return_lse=True)
        return out * scale_by, lse

    out, lse = step(torch.tensor(2.0), **call)
    expected, expected_lse = archflash.attention(**call, return_lse=True)
    torch.testing.assert_close(out, expected * 2.0)
    torch.testing.assert_close(lse, expected_lse)
    assert out.stride() == expected.stride()


@pytest.mark.slow
def test_compiled_gradients_are_those_of_autograd() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(archflash.attention, backend="aot_eager", fullgraph=True)
    gradients = []
    for function in (archflash.attention, compiled):
        q, k, v = (rand(1, 2, 5, 8, seed=seed).requires_grad_() for seed in range(3))
        function(q, k, v, causal=True).square().sum().backward()
        gradients.append([x.grad for x in (q, k, v)])
    for eager, traced in zip(*gradients, strict=True):
        assert eager is not None
        torch.testing.assert_close(traced, eager)


def operator_arguments(
    q: Tensor, k: Tensor, v: Tensor, **options: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    schema = torch.ops.archflash.attention.default._schema
    defaults = dict.fromkeys((argument.name for argument in schema.arguments), None)
    given = {"q": q, "k": k, "v": v, "causal": False, "layout": "bhnd", "return_lse": False}
    return (), defaults | given | options


OPERATOR_CALLS: dict[str, Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "plain": lambda: operator_arguments(*[rand(2, 3, 5, 16)] * 3),
    "lse": lambda: operator_arguments(*[rand(2, 3, 5, 16)] * 3, return_lse=True),
    "bnhd-lse": lambda: operator_arguments(
        *[rand(2, 5, 3, 16)] * 3, layout="bnhd", return_lse=True, causal=True
    ),
    "out_dtype": lambda: operator_arguments(*[rand(2, 3, 5, 16)] * 3, out_dtype=torch.bfloat16),
    "varlen": lambda: operator_arguments(
        *[rand(10, 3, 16)] * 3,
        cu_seqlens_q=ends(0, 4, 10),
        cu_seqlens_k=ends(0, 4, 10),
        return_lse=True,
    ),
    "offset-tensor": lambda: operator_arguments(
        *[rand(2, 3, 5, 16)] * 3, causal=True, q_offset_tensor=ends(0, 2)
    ),
}


@pytest.mark.parametrize("name", OPERATOR_CALLS)
def test_the_operator_passes_torchs_own_checks(name: str) -> None:
    args, kwargs = OPERATOR_CALLS[name]()
    results = torch.library.opcheck(torch.ops.archflash.attention.default, args, kwargs)
    assert set(results.values()) == {"SUCCESS"}


class Logged(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_dispatch_modes_see_one_operator() -> None:
    call = CALLS["gqa-causal"]()
    with Logged() as log:
        out = archflash.attention(**call)
    assert log.seen.count("archflash.attention.default") == 1
    torch.testing.assert_close(out, archflash.attention(**call))


def test_the_flop_counter_sees_the_call() -> None:
    q = rand(1, 2, 8, 16)
    with FlopCounterMode(display=False) as counter:
        out = archflash.attention(q, q, q)
    assert counter.get_total_flops() >= 0
    torch.testing.assert_close(out, archflash.attention(q, q, q))


def test_plain_calls_skip_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("an eager call went through torch's dispatcher")

    monkeypatch.setattr(archflash._ops, "attention", refuse)
    q = rand(1, 2, 8, 16)
    assert archflash.attention(q, q, q).shape == q.shape


def test_calls_from_many_threads_give_the_answers_of_one() -> None:
    calls = [
        {"q": rand(1, 4, n, 16, seed=n), "k": rand(1, 2, n + 3, 16), "v": rand(1, 2, n + 3, 16)}
        for n in range(1, 33)
    ]
    expected = [archflash.attention(**call, causal=True) for call in calls]
    native.clear_cache()
    wrong: list[object] = []

    def work(first: int) -> None:
        try:
            for i in range(2 * len(calls)):
                j = (first + i) % len(calls)
                if not torch.equal(archflash.attention(**calls[j], causal=True), expected[j]):
                    wrong.append(j)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(4 * n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert wrong == []


def test_decisions_are_kept_by_problem_and_the_oldest_dropped() -> None:
    native.clear_cache()
    q = rand(1, 1, 3, 8)
    for _ in range(3):
        archflash.attention(q, q, q)
    hits, misses, entries, capacity = native.cache_info()
    assert (hits, misses, entries, capacity) == (2, 1, 1, 1024)
    with archflash.force("torch"):
        archflash.attention(q, q, q)
    assert native.cache_info()[:3] == (2, 2, 2)  # another entry: the forced name is part of the key
    many = rand(1, 1, 1100, 8)
    for n in range(1, 1101):
        archflash.attention(q, many[:, :, :n], many[:, :, :n])
    assert native.cache_info()[2] == 1024
    misses = native.cache_info()[1]
    archflash.attention(q, many, many)
    assert native.cache_info()[1] == misses  # the newest is still there
    archflash.attention(q, many[:, :, :2], many[:, :, :2])
    assert native.cache_info()[1] == misses + 1  # an old one is not
    native.clear_cache()
    assert native.cache_info()[:3] == (0, 0, 0)


# --- import ---


def fresh_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_import_takes_little_and_with_a_call_loads_no_driver_and_says_nothing() -> None:
    # Seven processes that have imported torch. What counts is the time that a process computes,
    # because others may be in its way.
    code = """
import os, time, torch
for _ in range(7):
    if os.fork() == 0:
        begin = time.process_time()
        import archflash
        print(time.process_time() - begin, flush=True)
        os._exit(0)
    os.wait()
import archflash
q = torch.ones(1, 1, 2, 8)
import sys, archflash.distributed
assert "torch._dynamo" not in sys.modules
print(archflash.attention(q, q, q).sum().item())
print([line.split()[-1] for line in open("/proc/self/maps") if "libcuda.so" in line])
"""
    *times, total, drivers = fresh_python(code).splitlines()
    seconds = [float(line) for line in times]
    assert len(seconds) == 7
    assert statistics.median(seconds) < IMPORT_SECONDS, seconds
    assert (total, drivers) == ("16.0", "[]")
