"""archflash.integrations.sglang against the shape of SGLang's interface.

SGLang has no build for the CPU that could be installed beside another PyTorch. So these tests run
against stand-ins with the names and arguments of its interface, as they stood on its main branch:
they show that the backend means what it should, not that a version of SGLang takes it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import archflash
from archflash import reference

HEADS, HEADS_KV, DIM = 4, 2, 16


class Mode:
    def __init__(self, decode: bool) -> None:
        self._decode = decode

    def is_decode_or_idle(self) -> bool:
        return self._decode


class Pool:
    """One layer's cache: (slots, heads, head dim)."""

    def __init__(self, slots: int, dtype: torch.dtype) -> None:
        empty = torch.full((slots, HEADS_KV, DIM), torch.nan).to(dtype)
        self.caches = (empty, empty.clone())

    def set_kv_buffer(
        self, layer: Any, slots: Tensor, k: Tensor, v: Tensor, k_scale: Any, v_scale: Any
    ) -> None:
        for cache, new, scale in zip(self.caches, (k, v), (k_scale, v_scale), strict=True):
            cache[slots] = (new if scale is None else new / scale).to(cache.dtype)

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        return self.caches


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What is registered, and the names that the command line takes."""
    registry: dict[str, Any] = {"choices": []}

    def register_attention_backend(name: str) -> Any:
        return lambda function: registry.setdefault(name, function)

    contents: dict[str, dict[str, Any]] = {
        "sglang": {},
        "sglang.srt": {},
        "sglang.srt.layers": {},
        "sglang.srt.layers.attention": {},
        "sglang.srt.layers.attention.attention_registry": {
            "register_attention_backend": register_attention_backend
        },
        "sglang.srt.layers.attention.base_attn_backend": {"AttentionBackend": object},
        "sglang.srt.server_args": {"add_attention_backend_choices": registry["choices"].extend},
    }
    for name, names in contents.items():
        module = ModuleType(name)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            monkeypatch.setattr(sys.modules[parent], child, module, raising=False)
    importlib.import_module("archflash.integrations.sglang")
    yield registry
    del sys.modules["archflash.integrations.sglang"]


def rand(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


class Server:
    """Three requests, whose rows lie in shuffled pages."""

    def __init__(self, made: dict[str, Any], page: int, dtype: torch.dtype, **layer: Any) -> None:
        pages = torch.randperm(36, generator=torch.Generator().manual_seed(1)).view(3, 12)
        slots = pages.repeat_interleave(page, 1) * page + torch.arange(12 * page) % page
        self.slots = slots.to(torch.int32)
        self.runner = SimpleNamespace(
            use_mla_backend=False, model_config=SimpleNamespace(is_encoder_decoder=False),
            req_to_token_pool=SimpleNamespace(req_to_token=self.slots), page_size=page,
        )  # fmt: skip
        self.backend = made["archflash"](self.runner)
        self.pool = Pool(36 * page, dtype)
        one = torch.tensor(0.5) if dtype.itemsize == 1 else None
        self.layer = SimpleNamespace(
            tp_q_head_num=HEADS, qk_head_dim=DIM, v_head_dim=DIM, scaling=0.3, logit_cap=0.0,
            sliding_window_size=-1, layer_id=0, k_scale=one, v_scale=one,
        )  # fmt: skip
        vars(self.layer).update(layer)
        self.lengths = torch.zeros(3, dtype=torch.int64)

    def batch(self, rows: tuple[int, ...]) -> Any:
        """A batch with so many new rows of each request."""
        before = self.lengths.clone()
        self.lengths += torch.tensor(rows)
        spans = zip(self.slots, before.tolist(), self.lengths.tolist(), strict=True)
        return SimpleNamespace(
            forward_mode=Mode(rows == (1, 1, 1)), spec_info=None, seq_lens=self.lengths.clone(),
            seq_lens_cpu=self.lengths.clone(), extend_seq_lens=torch.tensor(rows),
            extend_seq_lens_cpu=list(rows), req_pool_indices=torch.arange(3),
            token_to_kv_pool=self.pool,
            out_cache_loc=torch.cat([request[a:b] for request, a, b in spans]).long(),
        )  # fmt: skip

    def attend(self, batch: Any, seed: int, **more: Any) -> tuple[Tensor, Tensor]:
        total = len(batch.out_cache_loc)
        q = rand(total, HEADS * DIM, seed=seed)
        k, v = (rand(total, HEADS_KV, DIM, seed=seed + i) for i in (1, 2))
        decode = batch.forward_mode.is_decode_or_idle()
        forward = self.backend.forward_decode if decode else self.backend.forward_extend
        out = forward(q, k, v, self.layer, batch, **more)
        return q.view(total, HEADS, DIM), out.view(total, HEADS, DIM)

    def check(self, q: Tensor, out: Tensor, batch: Any, **call: Any) -> None:
        """The output agrees with float64 on what the cache holds."""
        used = [request[:n].long() for request, n in zip(self.slots, self.lengths, strict=True)]
        scale = 1.0 if self.layer.k_scale is None else self.layer.k_scale
        k, v = ((cache[torch.cat(used)].float() * scale).bfloat16() for cache in self.pool.caches)
        call = {
            "causal": True, "scale": 0.3,
            "cu_seqlens_q": ends(batch.extend_seq_lens), "cu_seqlens_k": ends(self.lengths),
        } | call  # fmt: skip
        expected, _ = reference.attention(q, k, v, **call)
        report = reference.check(out, expected, reference.baseline(q, k, v, **call))
        assert report.ok, report


def ends(lengths: Tensor) -> Tensor:
    return torch.tensor([0, *lengths.cumsum(0).tolist()], dtype=torch.int32)


STEPS = ((5, 2, 3), (1, 1, 1), (4, 1, 2), (1, 1, 1))  # prefill, decoding, a chunk, decoding
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}, {}),
    "window": ({"sliding_window_size": 3}, {}, {"window": (3, 0)}),
    "softcap": ({"logit_cap": 2.0}, {}, {"softcap": 2.0}),
    "sinks": ({}, {"sinks": torch.arange(4.0)}, {"sinks": torch.arange(4.0)}),
}


@pytest.mark.parametrize("page", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_prefill_and_decoding(
    made: dict[str, Any], name: str, dtype: torch.dtype, page: int
) -> None:
    layer, more, call = CASES[name]
    server = Server(made, page, dtype, **layer)
    for number, rows in enumerate(STEPS):
        batch = server.batch(rows)
        server.backend.init_forward_metadata(batch)
        q, out = server.attend(batch, seed=10 * number, **more)
        server.check(q, out, batch, **call)


def test_a_graph_reads_what_is_written_before_its_replay(made: dict[str, Any]) -> None:
    server = Server(made, 3, torch.bfloat16)
    server.backend.init_forward_metadata(batch := server.batch((5, 2, 3)))
    server.attend(batch, seed=0)
    server.backend.init_cuda_graph_state(8, 8)
    batch = server.batch((1, 1, 1))
    common = (batch.req_pool_indices, batch.seq_lens)
    server.backend.init_forward_metadata_capture_cuda_graph(
        3, 3, *common, None, batch.forward_mode, None
    )
    captured = server.backend._batch
    server.check(*server.attend(batch, seed=10), batch)
    batch = server.batch((1, 1, 1))
    server.backend.init_forward_metadata_replay_cuda_graph(
        3, batch.req_pool_indices, batch.seq_lens, 0, None, batch.forward_mode, None, None
    )
    assert captured.lengths.tolist() == server.lengths.tolist()
    server.backend._batch = captured
    server.check(*server.attend(batch, seed=20), batch)


def test_what_is_not_served_is_refused(made: dict[str, Any]) -> None:
    assert made["choices"] == ["archflash"]
    server = Server(made, 1, torch.bfloat16)
    batch = server.batch((1, 1, 1))
    batch.spec_info = object()
    with pytest.raises(archflash.UnsupportedError, match="speculative"):
        server.backend.init_forward_metadata(batch)
    batch.spec_info = None
    server.backend.init_forward_metadata(batch)
    with pytest.raises(archflash.UnsupportedError, match="k_rope"):
        server.attend(batch, seed=0, k_rope=torch.zeros(1))
    server.runner.use_mla_backend = True
    with pytest.raises(archflash.UnsupportedError, match="MLA"):
        made["archflash"](server.runner)
