"""archflash.integrations.diffusers: small models with random weights give what they give with
diffusers' own backend.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import archflash
from archflash import _dispatch

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
from archflash.integrations import diffusers as integration  # noqa: E402

pytestmark = pytest.mark.slow


def rand(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def transformer() -> tuple[Any, dict[str, Any]]:
    """A diffusion transformer with text and image tokens in one attention."""
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )  # fmt: skip
    call = {
        "hidden_states": rand(1, 16, 4), "encoder_hidden_states": rand(1, 6, 32, seed=2),
        "pooled_projections": rand(1, 32, seed=3), "timestep": torch.tensor([1.0]),
        "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(6, 3),
    }  # fmt: skip
    return model, call


def video_transformer() -> tuple[Any, dict[str, Any]]:
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4,
        out_channels=4, text_dim=16, freq_dim=32, ffn_dim=32, num_layers=1, rope_max_seq_len=32,
    )  # fmt: skip
    call = {
        "hidden_states": rand(1, 4, 2, 8, 8), "timestep": torch.tensor([1]),
        "encoder_hidden_states": rand(1, 6, 16, seed=2),
    }  # fmt: skip
    return model, call


@pytest.fixture(autouse=True)
def backend_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's backend is also that of the process."""
    registry = diffusers.models.attention_dispatch._AttentionBackendRegistry
    monkeypatch.setattr(registry, "_active_backend", registry._active_backend)


@pytest.mark.parametrize("make", [transformer, video_transformer])
def test_models(make: Callable[[], tuple[Any, dict[str, Any]]], monkeypatch: Any) -> None:
    torch.manual_seed(0)
    model, call = make()
    calls: list[dict[str, Any]] = []

    def attention(*tensors: Tensor, **options: Any) -> Any:
        calls.append(options)
        return archflash.attention(*tensors, **options)

    monkeypatch.setattr(integration, "attention", attention)
    with torch.no_grad():
        expected = model.eval()(**call).sample
        assert not calls
        model.set_attention_backend("archflash")
        found = model(**call).sample
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert calls


@pytest.mark.parametrize(
    "call",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3, "attn_mask": torch.rand(2, 7) > 0.3},
        {"attn_mask": rand(2, 1, 5, 7)},
        {"enable_gqa": True},
    ],
    ids=str,
)
def test_the_backend_means_what_the_native_one_means(call: dict[str, Any]) -> None:
    heads = 2 if "enable_gqa" in call else 4
    q, k, v = rand(2, 5, 4, 8), rand(2, 7, heads, 8, seed=2), rand(2, 7, heads, 8, seed=3)
    attend = diffusers.models.attention_dispatch.dispatch_attention_fn
    expected = attend(q, k, v, **call, backend="native")
    torch.testing.assert_close(attend(q, k, v, **call, backend="archflash"), expected)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype: torch.dtype, dropout: float) -> None:
    """A rotary embedding in float32 leaves v in the dtype of autocast."""
    attend = diffusers.models.attention_dispatch.dispatch_attention_fn
    results = []
    for backend in ("native", "archflash"):
        q, k, v = (rand(2, 5, 4, 8, seed=seed).requires_grad_() for seed in (1, 2, 3))
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype):
            mask = rand(2, 1, 5, 5)
            out = attend(q, k, v.to(dtype), mask, dropout_p=dropout, backend=backend)
        out.float().sum().backward()
        results.append([out, q.grad, k.grad, v.grad])
    for expected, found in zip(*results, strict=True):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


def test_the_log_sum_exp_and_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        _dispatch.explain, "_noted", set()
    )  # of what was warned once in this process
    q = rand(2, 5, 4, 8)
    out, lse = integration.forward(q, q, q, return_lse=True)
    assert (out.shape, lse.shape) == ((2, 5, 4, 8), (2, 5, 4))
    with pytest.raises(archflash.UnsupportedError, match="context parallelism"):
        integration._forward_op(None, q, q, q, dropout_p=0.5)
    with pytest.raises(archflash.UnsupportedError, match="return_lse"):
        integration.forward(q, q, q, dropout_p=0.5, return_lse=True)
    with pytest.warns(UserWarning, match="dropout"):
        assert integration.forward(q, q, q, dropout_p=0.5).shape == q.shape


TWO_PROCESSES = """
import sys

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from diffusers.models._modeling_parallel import ParallelConfig

from archflash.integrations import diffusers as integration

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
generator = torch.Generator().manual_seed(0)
tensors = [torch.randn(2, 12, 4, 16, generator=generator) for _ in range(4)]
leaves = [x.clone().requires_grad_() for x in tensors[:3]]
whole = integration.forward(*leaves)
wanted = (whole, *torch.autograd.grad(whole, leaves, tensors[3]))
for degrees in ({"ring_degree": 2}, {"ulysses_degree": 2}):
    config = ContextParallelConfig(**degrees)
    names = config.mesh_dim_names
    mesh = dist.device_mesh.init_device_mesh("cpu", config.mesh_shape, mesh_dim_names=names)
    config.setup(rank, 2, torch.device("cpu"), mesh)
    parallel = ParallelConfig(context_parallel_config=config)
    mine = [x.chunk(2, 1)[rank].clone() for x in tensors]
    local = [x.requires_grad_() for x in mine[:3]]
    out = integration.forward(*local, _parallel_config=parallel)
    given = (out, *torch.autograd.grad(out, local, mine[3]))
    for x, y in zip(given, wanted, strict=True):
        torch.testing.assert_close(x, y.chunk(2, 1)[rank], msg=lambda m: f"{degrees}: {m}")
print("done")
dist.destroy_process_group()
"""


def test_a_ring_and_an_exchange_of_heads_give_what_one_process_gives(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", TWO_PROCESSES, str(rank), str(tmp_path / "s")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    for process in ranks:
        text, _ = process.communicate(timeout=120)
        assert process.returncode == 0, text
        assert "done" in text


SAGE = """
import archflash.compat

archflash.compat.install()
import torch
from diffusers.models import attention_dispatch

from archflash.compat import sageattention

assert attention_dispatch.sageattn is sageattention.sageattn
calls = []
for name in sageattention.__all__:
    def counted(*args, _function=getattr(sageattention, name), **kwargs):
        calls.append(_function.__name__)
        return _function(*args, **kwargs)
    setattr(attention_dispatch, name, counted)
generator = torch.Generator().manual_seed(0)
q, k, v = (torch.randn(2, 9, 4, 8, generator=generator) for _ in range(3))
attend = attention_dispatch.dispatch_attention_fn
kept = torch.arange(9) < torch.tensor([[9], [5]])
backends = {
    "sage": "sageattn",
    "sage_varlen": "sageattn_varlen",
    "_sage_qk_int8_pv_fp8_cuda": "sageattn_qk_int8_pv_fp8_cuda",
    "_sage_qk_int8_pv_fp8_cuda_sm90": "sageattn_qk_int8_pv_fp8_cuda_sm90",
    "_sage_qk_int8_pv_fp16_cuda": "sageattn_qk_int8_pv_fp16_cuda",
    "_sage_qk_int8_pv_fp16_triton": "sageattn_qk_int8_pv_fp16_triton",
}
for backend, function in backends.items():
    for call in ({}, {"is_causal": True, "scale": 0.4}, {"attn_mask": kept}):
        if "attn_mask" in call and backend != "sage_varlen":
            continue  # diffusers refuses it
        expected = attend(q, k, v, **call, backend="native")
        with attention_dispatch.attention_backend(backend):
            found = attend(q, k, v, **call)
        torch.testing.assert_close(found, expected, msg=lambda m: f"{backend}, {call}: {m}")
        assert calls.pop() == function and not calls
with attention_dispatch.attention_backend("sage"):
    out, lse = attend(q, k, v, attention_kwargs={"return_lse": True})
assert lse.shape == (2, 4, 9)
print("done")
"""


FLASH = """
import archflash.compat

archflash.compat.install()
import torch
from diffusers.models import attention_dispatch

from archflash.compat import flash_attn, flash_attn_interface

assert attention_dispatch._CAN_USE_FLASH_ATTN and attention_dispatch._CAN_USE_FLASH_ATTN_3
assert attention_dispatch.flash_attn_func is flash_attn.flash_attn_func
assert attention_dispatch.flash_attn_3_func is flash_attn_interface.flash_attn_func
generator = torch.Generator().manual_seed(0)
q, k, v = (torch.randn(2, 9, 4, 8, generator=generator) for _ in range(3))
attend = attention_dispatch.dispatch_attention_fn
kept = torch.arange(9) < torch.tensor([[9], [5]])
# "_flash_3" is an operator of diffusers for CUDA alone.
for backend in ("flash", "flash_varlen", "_flash_varlen_3", "xformers"):
    for call in ({}, {"is_causal": True, "scale": 0.4}, {"attn_mask": kept}):
        if "attn_mask" in call and backend == "flash":
            continue  # diffusers refuses it
        expected = attend(q, k, v, **call, backend="native")
        with attention_dispatch.attention_backend(backend):
            found = attend(q, k, v, **call)
        torch.testing.assert_close(found, expected, msg=lambda m: f"{backend}, {call}: {m}")
print("done")
"""


@pytest.mark.parametrize("program", [SAGE, FLASH], ids=["sageattention", "flash_attn"])
def test_the_backends_of_other_libraries_are_served_after_install(program: str) -> None:
    """In a process of its own: diffusers looks for the libraries when it is imported."""
    if any(importlib.util.find_spec(name) for name in ("sageattention", "flash_attn", "xformers")):
        pytest.skip("an original is installed, whose version diffusers would find")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "done" in done.stdout
