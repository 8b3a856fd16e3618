"""archflash.integrations.comfyui: the interface of ComfyUI's attention functions, and the nodes of
examples/comfyui inside ComfyUI where its source is in sys.path (with einops, psutil, safetensors,
torchsde and what else it imports).
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import archflash
import archflash.compat
from archflash import reference
from archflash.integrations import comfyui


def rand(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


HEADS, D, NQ, NK = 4, 8, 9, 7


def qkv(heads_kv: int = HEADS) -> tuple[Tensor, Tensor, Tensor]:
    return rand(2, NQ, HEADS * D), rand(2, NK, heads_kv * D, seed=2), rand(2, NK, heads_kv * D)


def with_heads(x: Tensor) -> Tensor:
    """(batch, rows, heads * D) as (batch, heads, rows, D)."""
    return x.unflatten(-1, (-1, D)).transpose(1, 2)


MASKS: dict[str, Tensor | None] = {
    "none": None,
    "of-rows": rand(NQ, NK),
    "of-batches": rand(2, NQ, NK),
    "of-heads": rand(2, HEADS, NQ, NK),
    "broadcast": rand(1, 1, NQ, NK),
    "of-keys": rand(2, 1, 1, NK) > -0.5,
    "bool": rand(2, NQ, NK) > -1.0,
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("skip_output_reshape", [False, True])
@pytest.mark.parametrize("skip_reshape", [False, True])
def test_it_agrees_with_float64(skip_reshape: bool, skip_output_reshape: bool, mask: str) -> None:
    for heads_kv, options in ((HEADS, {}), (2, {"enable_gqa": True, "scale": 0.3})):
        flat = qkv(heads_kv)
        q, k, v = (with_heads(x) for x in flat)
        of_heads = MASKS[mask]
        if of_heads is not None and of_heads.ndim == 3:
            of_heads = of_heads[:, None]
        expected, _ = reference.attention(q, k, v, attn_mask=of_heads, scale=options.get("scale"))
        found = comfyui.attention(
            *((q, k, v) if skip_reshape else flat), HEADS, MASKS[mask], skip_reshape=skip_reshape,
            skip_output_reshape=skip_output_reshape, transformer_options={}, **options,
        )  # fmt: skip
        if not skip_output_reshape:
            assert found.shape == (2, NQ, HEADS * D)
            found = with_heads(found)
        torch.testing.assert_close(found, expected.float())


def test_no_tensor_is_copied_to_change_its_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Tensor] = []

    def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        out = archflash.attention(q, k, v, **options)
        given.extend((q, k, v, out))
        return out

    monkeypatch.setattr(comfyui, "_attention", attention)
    q, k, v = qkv()
    for skip, tensors in ((False, (q, k, v)), (True, tuple(map(with_heads, (q, k, v))))):
        given.clear()
        result = comfyui.attention(*tensors, HEADS, skip_reshape=skip)
        wanted = [x.data_ptr() for x in (q, k, v, result)]
        assert [x.data_ptr() for x in given] == wanted


def test_the_approximation_is_taken_only_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = approximations(monkeypatch)
    q, k, v = (x.half() for x in qkv())
    comfyui.attention(q, k, v, HEADS)
    comfyui.override()(None, q, k, v, HEADS)
    asked_for = comfyui.override("int8_qk")
    asked_for(None, q, k, v, heads=HEADS, low_precision_attention=True)
    asked_for(None, q, k, v, heads=HEADS, low_precision_attention=False)
    assert asked == [None, None, "int8_qk if served", None]
    with pytest.raises(ValueError, match="approximate is 'int3': it must be one of int8_qk, int8"):
        comfyui.attention(q, k, v, HEADS, approximate="int3")


def test_what_is_wrong_is_said() -> None:
    q, k, v = qkv()
    with pytest.raises(ValueError, match=r"q has shape \(2, 9, 32\) with 5 heads"):
        comfyui.attention(q, k, v, 5)
    with pytest.raises(ValueError, match=r"q has shape \(2, 4, 9, 8\)"):
        comfyui.attention(with_heads(q), with_heads(k), with_heads(v), HEADS)


# --- inside ComfyUI ---


@pytest.fixture(scope="module")
def functions() -> ModuleType:
    """ComfyUI's module of attention functions, which finds archflash's sageattention."""
    if importlib.util.find_spec("comfy") is None:
        pytest.skip("ComfyUI's source is not in sys.path")
    arguments = pytest.importorskip("comfy.cli_args", reason="`comfy` is not ComfyUI")
    arguments.args.cpu = not torch.cuda.is_available()
    archflash.compat.install(replace=True)
    try:
        return importlib.import_module("comfy.ldm.modules.attention")
    finally:
        archflash.compat.uninstall()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("skip_output_reshape", [False, True])
@pytest.mark.parametrize("skip_reshape", [False, True])
def test_it_means_what_comfyuis_function_means(
    functions: ModuleType, skip_reshape: bool, skip_output_reshape: bool, mask: str
) -> None:
    q, k, v = map(with_heads, qkv()) if skip_reshape else qkv()
    call = {
        "mask": MASKS[mask], "attn_precision": torch.float32, "skip_reshape": skip_reshape,
        "skip_output_reshape": skip_output_reshape,
    }  # fmt: skip
    expected = functions.attention_pytorch(q, k, v, HEADS, **call)
    torch.testing.assert_close(comfyui.attention(q, k, v, HEADS, **call), expected)
    # ComfyUI's way to SageAttention, here with that of archflash.compat. It catches errors.
    assert functions.sageattn is archflash.compat.sageattention.sageattn
    found = functions.attention_sage(q, k, v, HEADS, **call)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("skip_reshape", [False, True])
def test_groups_and_scale_mean_what_comfyuis_mean(
    functions: ModuleType, skip_reshape: bool
) -> None:
    if "enable_gqa" not in inspect.getsource(functions.attention_pytorch.__wrapped__):
        pytest.skip("this version of ComfyUI has neither")
    q, k, v = qkv(heads_kv=2 if skip_reshape else HEADS)
    tensors = map(with_heads, (q, k, v)) if skip_reshape else (q, k, v)
    q, k, v = tensors
    call = {"skip_reshape": skip_reshape, "scale": 0.2, "enable_gqa": skip_reshape}
    expected = functions.attention_pytorch(q, k, v, HEADS, **call)
    torch.testing.assert_close(comfyui.attention(q, k, v, HEADS, **call), expected)


def test_sageattention_is_reached_without_an_error(
    functions: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def sageattn(*tensors: Tensor, **options: Any) -> Any:
        calls.append(options)
        return archflash.compat.sageattention.sageattn(*tensors, **options)

    monkeypatch.setattr(functions, "sageattn", sageattn)
    functions.attention_sage(*qkv(), HEADS, MASKS["bool"])
    assert calls[0]["attn_mask"].shape == (2, 1, NQ, NK)
    assert not caplog.records


@pytest.fixture
def node(functions: ModuleType) -> Any:
    """The node, from the folder that is copied."""
    nodes = importlib.import_module("examples.comfyui")
    assert nodes.NODE_DISPLAY_NAME_MAPPINGS.keys() == nodes.NODE_CLASS_MAPPINGS.keys()
    return nodes.NODE_CLASS_MAPPINGS["ArchflashAttention"]()


def test_it_is_listed_once(
    functions: ModuleType, node: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        comfyui.register()
    assert not caplog.records
    listed = functions.get_attention_function("archflash")
    expected = functions.attention_pytorch(*qkv(), HEADS)
    torch.testing.assert_close(listed(*qkv(), HEADS), expected)

    def override(replaced: Any, *args: Any, **kwargs: Any) -> str:
        return replaced.__name__

    options = {"optimized_attention_override": override}
    assert listed(*qkv(), HEADS, transformer_options=options) == "attention"


@pytest.mark.parametrize("precision", ["exact", "int8"])
def test_a_patched_model_calls_it(
    functions: ModuleType, node: Any, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block of Stable Diffusion's kind, in ComfyUI's own ModelPatcher."""
    model_patcher = pytest.importorskip(
        "comfy.model_patcher",
        reason="a package that ComfyUI needs is missing",
        exc_type=ImportError,
    )
    network, call = block(functions)
    cpu = torch.device("cpu")
    model = model_patcher.ModelPatcher(network, load_device=cpu, offload_device=cpu)
    assert precision in node.INPUT_TYPES()["required"]["precision"][0]
    (patched,) = getattr(node, node.FUNCTION)(model, precision)
    assert patched.is_clone(model)
    calls = approximations(monkeypatch)
    results = []
    for one in (model, patched):
        options = dict(one.model_options["transformer_options"])
        results.append(one.model(**call, transformer_options=options))
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-4)
    assert calls == [None if precision == "exact" else precision] * 4  # self and cross, 2 blocks


def test_a_model_with_the_override_calls_it(
    functions: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, call = block(functions)
    expected = network(**call, transformer_options={})
    calls = approximations(monkeypatch)
    options = {"optimized_attention_override": comfyui.override()}
    found = network(**call, transformer_options=options)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert len(calls) == 4


def block(functions: ModuleType) -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    network = functions.SpatialTransformer(
        32, n_heads=HEADS, d_head=D, depth=2, context_dim=24, operations=functions.ops
    ).requires_grad_(False)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return network, {"x": rand(2, 32, 4, 3), "context": rand(2, 5, 24)}


def approximations(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """What the calls of archflash.attention from here on ask for."""
    asked: list[str | None] = []

    def attention(*tensors: Tensor, **options: Any) -> Tensor:
        asked.append(options["approximate"])
        return archflash.attention(*tensors, **options)

    monkeypatch.setattr(comfyui, "_attention", attention)
    return asked


def test_rows_that_hold_no_whole_heads_are_refused() -> None:
    q, k, v = qkv(2)
    for wrong in (k[..., : D + 1], k[..., : D - 1]):
        with pytest.raises(ValueError, match=f"rows must be multiples of q's head dimension {D}"):
            comfyui.attention(q, wrong, v, HEADS, enable_gqa=True)


def test_it_is_listed_where_there_is_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("comfy", "comfy.ldm", "comfy.ldm.modules"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module: Any = ModuleType("comfy.ldm.modules.attention")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    sys.modules["comfy.ldm.modules"].attention = module  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match=r"keeps no list of attention functions.* 0\.3\.64"):
        comfyui.register()
    module.REGISTERED_ATTENTION_FUNCTIONS = {}
    module.wrap_attn = lambda function: ("wrapped", function)
    module.register_attention_function = module.REGISTERED_ATTENTION_FUNCTIONS.__setitem__
    comfyui.register()
    listed = dict(module.REGISTERED_ATTENTION_FUNCTIONS)
    assert listed == {comfyui.NAME: ("wrapped", comfyui.attention)}
    module.wrap_attn = None
    comfyui.register()  # it is there
    assert listed == module.REGISTERED_ATTENTION_FUNCTIONS
