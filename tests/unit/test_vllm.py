"""archflash.integrations.vllm against the shape of vLLM's interface.

vLLM has no build for the CPU that could be installed beside another PyTorch. So these tests run
against stand-ins with the names and arguments of its interface, as they stood on its main branch
in 2026: they show that the backend means what it should, not that a version of vLLM takes it.
"""

from __future__ import annotations

import enum
import importlib
import importlib.metadata
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import archflash
from archflash import reference

HEADS, HEADS_KV, DIM, PAGE = 4, 2, 16, 3


class AttentionType(str, enum.Enum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"


class MultipleOf:
    def __init__(self, base: int) -> None:
        self.base = base


class AttentionMetadataBuilder:
    def __init__(self, kv_cache_spec: Any, layer_names: Any, config: Any, device: Any) -> None:
        self.device = device


@dataclass
class CommonAttentionMetadata:
    query_start_loc: Tensor
    seq_lens: Tensor
    num_actual_tokens: int
    max_query_len: int
    block_table_tensor: Tensor
    slot_mapping: Tensor
    causal: bool | Tensor = True


def reshape_and_cache_flash(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, dtype: str,
    k_scale: Tensor, v_scale: Tensor,
) -> None:  # fmt: skip
    """Writes rows to their slots, divided by the scale where the cache is FP8."""
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        for new, cache, scale in ((key, k_cache, k_scale), (value, v_cache, v_scale)):
            values = new[row]
            if dtype.startswith("fp8"):
                values = (values / scale).to(torch.float8_e4m3fn).view(torch.uint8)
            cache[slot // PAGE, slot % PAGE] = values


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Stand-ins for vLLM's modules; what a plug-in has registered."""
    backends: dict[str, str] = {}
    modules = {
        "vllm": {},
        "vllm._custom_ops": {"reshape_and_cache_flash": reshape_and_cache_flash},
        "vllm.v1": {},
        "vllm.v1.attention": {},
        "vllm.v1.attention.backend": {
            "AttentionBackend": object,
            "AttentionCGSupport": enum.Enum("AttentionCGSupport", "ALWAYS UNIFORM_BATCH NEVER"),
            "AttentionImpl": object,
            "AttentionMetadata": object,
            "AttentionMetadataBuilder": AttentionMetadataBuilder,
            "AttentionType": AttentionType,
            "MultipleOf": MultipleOf,
        },
        "vllm.v1.attention.backends": {},
        "vllm.v1.attention.backends.registry": {
            "AttentionBackendEnum": SimpleNamespace(CUSTOM="CUSTOM"),
            "register_backend": backends.__setitem__,
        },
    }
    for name, contents in modules.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            monkeypatch.setattr(sys.modules[parent], child, module, raising=False)
    yield backends
    sys.modules.pop("archflash.integrations.vllm_backend", None)


@pytest.fixture
def backend(registered: dict[str, str]) -> Any:
    """The class that vLLM finds by the plug-in."""
    importlib.import_module("archflash.integrations.vllm").register()
    module, _, name = registered["CUSTOM"].rpartition(".")
    return getattr(importlib.import_module(module), name)


def rand(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


class Server:
    """A paged cache with some requests: it holds the rows that each has seen."""

    def __init__(self, backend: Any, dtype: str, **impl: Any) -> None:
        self.backend = backend
        self.impl = backend.get_impl_cls()(HEADS, DIM, 0.3, HEADS_KV, kv_cache_dtype=dtype, **impl)
        self.builder = backend.get_builder_cls()(None, ["layer"], None, torch.device("cpu"))
        shape = backend.get_kv_cache_shape(12, PAGE, HEADS_KV, DIM, dtype)
        kind = torch.uint8 if dtype.startswith("fp8") else torch.bfloat16
        self.cache = torch.full(shape, 127 if kind == torch.uint8 else torch.nan).to(kind)
        self.table = torch.tensor([[7, 2, 9], [0, 11, 5], [3, 1, 8]], dtype=torch.int32)
        self.rows: list[list[tuple[Tensor, Tensor]]] = [[], [], []]
        self.layer = SimpleNamespace(_k_scale=torch.tensor(0.5), _v_scale=torch.tensor(2.0))

    def step(self, lengths: tuple[int, ...], seed: int, causal: bool = True) -> tuple[Tensor, Any]:
        """A batch with so many new rows of each request, and two rows that pad it."""
        total = sum(lengths)
        q, k, v = (
            rand(total + 2, heads, DIM, seed=seed + i)
            for i, heads in enumerate((HEADS, HEADS_KV, HEADS_KV))
        )
        slots, row = [], 0
        for request, length in enumerate(lengths):
            for _ in range(length):
                position = len(self.rows[request])
                page = int(self.table[request, position // PAGE])
                slots.append(page * PAGE + position % PAGE)
                self.rows[request].append((k[row], v[row]))
                row += 1
        ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
        common = CommonAttentionMetadata(
            query_start_loc=ends,
            seq_lens=torch.tensor([len(rows) for rows in self.rows], dtype=torch.int32),
            num_actual_tokens=total,
            max_query_len=max(lengths),
            block_table_tensor=self.table,
            slot_mapping=torch.tensor([*slots, -1, -1]),
            causal=causal,
        )
        output = torch.full((total + 2, HEADS * DIM), 7.0, dtype=torch.bfloat16)
        batch = self.builder.build(0, common)
        result = self.impl.forward(self.layer, q, k, v, self.cache, batch, output)
        assert result is output
        assert bool((output[total:] == 7.0).all())
        return q[:total], output[:total].view(total, HEADS, DIM)

    def expected(self, q: Tensor, lengths: tuple[int, ...], **call: Any) -> tuple[Tensor, Tensor]:
        """The float64 reference, and its formula in 16 bits."""
        ends_k = [0, *torch.tensor([len(rows) for rows in self.rows]).cumsum(0)]
        k, v = (torch.stack([row[i] for rows in self.rows for row in rows]) for i in range(2))
        call |= {
            "cu_seqlens_q": torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32),
            "cu_seqlens_k": torch.tensor(ends_k, dtype=torch.int32),
        }
        call = {"causal": True, "scale": 0.3} | call
        return reference.attention(q, k, v, **call)[0], reference.baseline(q, k, v, **call)


STEPS = ((5, 2, 0), (1, 1, 4), (1, 1, 1), (2, 2, 2))  # prefill, a mixed batch, decoding, drafts
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "window": ({"sliding_window": 3}, {"window": (2, 0)}),
    "softcap": ({"logits_soft_cap": 2.0}, {"softcap": 2.0}),
    "sinks": ({"sinks": torch.arange(4.0)}, {"sinks": torch.arange(4.0)}),
    "alibi": ({"alibi_slopes": [0.5, 1, 0, 2]}, {"alibi_slopes": torch.tensor([0.5, 1, 0, 2])}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_prefill_decoding_and_mixed_batches(backend: Any, name: str) -> None:
    theirs, ours = OPTIONS[name]
    server = Server(backend, "auto", **theirs)
    for number, lengths in enumerate(STEPS):
        q, out = server.step(lengths, seed=10 * number)
        report = reference.check(out, *server.expected(q, lengths, **ours))
        assert report.ok, report


def test_a_cache_in_8_bits(backend: Any) -> None:
    server = Server(backend, "fp8")
    for number, lengths in enumerate(STEPS):
        q, out = server.step(lengths, seed=10 * number)
        for rows in server.rows:  # as they are in the cache
            for i, (k, v) in enumerate(rows):
                rows[i] = tuple(
                    ((x.float() / s).to(torch.float8_e4m3fn).float() * s).bfloat16()
                    for x, s in ((k, 0.5), (v, 2.0))
                )  # type: ignore[assignment]
        report = reference.check(out, *server.expected(q, lengths))
        assert report.ok, report


def test_without_the_causal_rule_and_for_encoders(backend: Any) -> None:
    server = Server(backend, "auto")
    q, out = server.step((5, 2, 3), seed=1, causal=False)
    report = reference.check(out, *server.expected(q, (5, 2, 3), causal=False))
    assert report.ok, report
    server = Server(backend, "auto", attn_type=AttentionType.ENCODER_ONLY, sliding_window=2)
    q, out = server.step((5, 2, 3), seed=1)
    expected = server.expected(q, (5, 2, 3), causal=False, window=(1, 1))
    report = reference.check(out, *expected)
    assert report.ok, report
    assert bool(server.cache.isnan().all())  # an encoder has no cache


def test_what_the_backend_says_of_itself(backend: Any) -> None:
    assert backend.supports_head_size(72)
    assert not backend.supports_head_size(100)
    assert not backend.supports_head_size(512)
    assert backend.supports_sink()
    assert backend.supports_attn_type(AttentionType.DECODER)
    assert not backend.supports_attn_type(AttentionType.ENCODER)
    server = Server(backend, "auto")
    output = torch.full((3, HEADS * DIM), 7.0)
    args = (server.layer, *(torch.zeros(3, 1, 1) for _ in range(3)), server.cache, None, output)
    assert bool((server.impl.forward(*args) == 0).all())
    with pytest.raises(archflash.UnsupportedError, match="output_scale"):
        server.impl.forward(*args, output_scale=torch.ones(()))
    with pytest.raises(archflash.UnsupportedError, match="ENCODER: not built yet"):
        Server(backend, "auto", attn_type=AttentionType.ENCODER)


def test_the_entry_point_names_the_plug_in() -> None:
    (found,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="archflash")
    assert found.load() is importlib.import_module("archflash.integrations.vllm").register
