"""archflash.integrations.diffusers: small models with random weights give what they give with
diffusers' own backend.
"""

from __future__ import annotations

from collections.abc import Callable
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
        integration.forward(q, q, q, _parallel_config=object())
    with pytest.raises(archflash.UnsupportedError, match="return_lse"):
        integration.forward(q, q, q, dropout_p=0.5, return_lse=True)
    with pytest.warns(UserWarning, match="dropout"):
        assert integration.forward(q, q, q, dropout_p=0.5).shape == q.shape
