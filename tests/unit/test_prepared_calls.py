"""Calls of a server's layers: what a batch has in common is read once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import archflash
from archflash import _archflash as native
from archflash._kvcache import PLACES, kind_of, serve, serve_flat, values_of

KERNEL = "ampere"


class Layer:
    """q, caches and a list of options of a call; another seed makes those of another layer."""

    def __init__(self, seed: int = 0, **options: Any) -> None:
        torch.manual_seed(seed)
        half = torch.bfloat16
        self.q = torch.randn(2, 1, 2, 64).to(half)
        self.k, self.v = (torch.randn(4, 8, 1, 64).to(half) for _ in "kv")
        given: dict[str, Any] = {
            "cache_seqlens": torch.tensor([13, 5], dtype=torch.int32),
            "page_table": torch.tensor([[2, 0], [3, 1]], dtype=torch.int32),
            "causal": True,
            "scale": float("0.125"),  # each layer of a model has objects of its own
            "window": (int("7"), 0),
            "sinks": torch.randn(2),
            "out": torch.empty_like(self.q),
        }
        self.options = given | options
        self.values = values_of(**self.options)
        self.out: Tensor | None = self.options["out"]
        self.batch = (None, None, self.options["cache_seqlens"], self.options["page_table"])

    def expected(self) -> Tensor:
        options = {name: x for name, x in self.options.items() if name != "out"}
        result: Tensor = archflash.attention_with_kvcache(
            self.q, self.k, self.v, implementation=KERNEL, **options
        )
        return result

    def served_by(self, call: Any, kernel: str | None = KERNEL) -> Any:
        return call(self.q, self.k, self.v, self.values, self.out, self.batch, kernel)

    def serve(self, known: dict[int, Any], kind: int = 0) -> Any:
        return serve(self.q, self.k, self.v, self.values, kind, known, self.batch, self.out)


def prepared(layer: Layer) -> Any:
    with torch.no_grad(), archflash.force(KERNEL):
        known: dict[int, Any] = {}
        layer.serve(known)
        return known[0]


def test_a_call_with_other_tensors_of_the_same_shapes_is_served() -> None:
    first, other = Layer(0), Layer(1)
    call = prepared(first)
    other.options["cache_seqlens"] = torch.tensor([16, 0], dtype=torch.int32)
    other.batch = (None, None, other.options["cache_seqlens"], other.options["page_table"])
    result = other.served_by(call)
    assert result is other.out
    assert torch.equal(result, other.expected())
    assert torch.equal(first.served_by(call), first.expected())


def test_numbers_of_a_batch_are_read_by_each_call() -> None:
    layer = Layer()
    call = prepared(layer)
    layer.options["cache_seqlens"].copy_(torch.tensor([16, 2]))
    assert torch.equal(layer.served_by(call), layer.expected())


def test_outputs_are_allocated_where_none_is_given() -> None:
    first, other = Layer(0, out=None, return_lse=True), Layer(1, out=None, return_lse=True)
    for result in zip(other.served_by(prepared(first)), other.expected(), strict=True):
        assert torch.equal(*result)


@pytest.mark.parametrize("apart", [0, 64])
def test_queries_may_have_heads_and_columns_in_one_dimension(apart: int) -> None:
    """Also where rows lie apart, as in a tensor that has keys behind them."""
    first, other = Layer(0, out=None), Layer(1, out=None)
    for layer in (first, other):
        wide = torch.randn(2, 2 * 64 + apart).to(torch.bfloat16)
        layer.q = wide[:, :128].view(2, 1, 2, 64)
    call = prepared(first)
    flat = other.q.as_strided((2, 128), (128 + apart, 1))
    result = call(flat, other.k, other.v, other.values, None, other.batch, KERNEL)
    assert torch.equal(result, other.expected().view(2, 128))
    for wrong in (flat[:1], flat[:, :64], flat.T, flat.clone()[:, :127]):
        given = (wrong, other.k, other.v, other.values, None, other.batch, KERNEL)
        assert call(*given) is NotImplemented
    known: dict[int, Any] = {}
    with torch.no_grad(), archflash.force(KERNEL):
        for _ in range(2):  # the first call is read as a whole
            out = serve_flat(
                flat, (2, 1, 2, 64), other.k, other.v, other.values, 0, known, other.batch
            )
            assert torch.equal(out, result)


def test_queries_with_a_dimension_more_have_the_result_of_rows() -> None:
    layer = Layer(out=None)
    known: dict[int, Any] = {}
    with torch.no_grad(), archflash.force(KERNEL):
        for _ in range(2):
            out = serve_flat(
                layer.q[None].flatten(1, 2), (2, 1, 2, 64), layer.k, layer.v, layer.values, 0,
                known, layer.batch,
            )  # fmt: skip
            assert torch.equal(out, layer.expected().view(2, 128))


def _shifted(x: Tensor) -> Tensor:
    """The same numbers 8 bytes further on."""
    longer = torch.empty(x.numel() + 4, dtype=x.dtype)
    return longer[4:].view(x.shape).copy_(x)


def change(name: str, to: Any) -> Callable[[Layer], None]:
    def apply(layer: Layer) -> None:
        layer.values[PLACES[name]] = to

    return apply


def change_batch(place: int, to: Any) -> Callable[[Layer], None]:
    def apply(layer: Layer) -> None:
        layer.batch = (*layer.batch[:place], to, *layer.batch[place + 1 :])  # type: ignore[assignment]

    return apply


OTHER: dict[str, Callable[[Layer], None]] = {
    "an option": change("causal", False),
    "an option that is given": change("softcap", 2.0),
    "a tensor that is given": change("alibi_slopes", torch.ones(2)),
    "a tensor that is missing": change("sinks", None),
    "a tensor for a number": change("scale", torch.ones(())),
    "the dtype of a tensor": change("sinks", torch.ones(2, dtype=torch.bfloat16)),
    "the shape of the pages": change_batch(3, torch.zeros(2, 3, dtype=torch.int32)),
    "the dtype of the lengths": change_batch(2, torch.zeros(2, dtype=torch.int64)),
    "packed queries": change_batch(0, torch.tensor([0, 1, 2], dtype=torch.int32)),
    "a hint": change_batch(1, 3),
    "no output": lambda x: setattr(x, "out", None),
    "the strides of q": lambda x: setattr(x, "q", x.q.expand(2, 1, 2, 64)[:, :, :1].expand_as(x.q)),
    "the alignment of a cache": lambda x: setattr(x, "v", _shifted(x.v)),
    "the pages of a cache": lambda x: setattr(x, "k", x.k[:3]),
    "a subclass": lambda x: setattr(x, "q", x.q.as_subclass(type("Other", (Tensor,), {}))),
}


@pytest.mark.parametrize("name", OTHER)
def test_a_call_that_differs_is_read_as_a_whole(name: str) -> None:
    call, layer = prepared(Layer()), Layer(1)
    assert layer.served_by(call) is not NotImplemented
    OTHER[name](layer)
    assert layer.served_by(call) is NotImplemented


def test_what_is_forced_is_part_of_a_call() -> None:
    layer = Layer()
    assert layer.served_by(prepared(layer), None) is NotImplemented


def test_a_batch_is_prepared_once_for_layers_of_a_kind() -> None:
    layers = [Layer(0), Layer(1), Layer(2, softcap=3.0)]
    kinds = [kind_of(layer.values) for layer in layers]
    assert kinds[0] == kinds[1] != kinds[2]
    batch: dict[int, Any] = {}
    with torch.no_grad(), archflash.force(KERNEL):
        for layer, kind in zip(layers, kinds, strict=True):
            layer.serve(batch, kind)
            assert torch.equal(layer.options["out"], layer.expected())
        assert {kind: type(x) for kind, x in batch.items()} == dict.fromkeys(
            kinds, native.PreparedCall
        )
        misses = native.cache_info()[:2]
        layers[1].serve(batch, kinds[1])
    assert native.cache_info()[:2] == misses  # nothing was looked up


def test_without_a_kernel_pytorch_serves_each_layer() -> None:
    layer, batch = Layer(), dict[int, Any]()
    with torch.no_grad(), archflash.force("torch"):
        for _ in range(2):
            out = layer.serve(batch)
            torch.testing.assert_close(out, layer.expected(), atol=0.02, rtol=0.02)
    assert batch == {0: False}


def test_gradients_are_refused_as_in_other_calls() -> None:
    layer = Layer()
    layer.q.requires_grad_()
    with pytest.raises(archflash.UnsupportedError, match="has no backward"):
        layer.serve({})
