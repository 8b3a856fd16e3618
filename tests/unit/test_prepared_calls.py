"""Calls of a server's layers: what a batch has in common is read once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import archflash
from archflash import _archflash as native
from archflash._kvcache import PLACES, kind_of, serve, values_of

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

    def expected(self) -> Tensor:
        options = {name: x for name, x in self.options.items() if name != "out"}
        result: Tensor = archflash.attention_with_kvcache(
            self.q, self.k, self.v, implementation=KERNEL, **options
        )
        return result


def prepared(layer: Layer) -> Any:
    with torch.no_grad(), archflash.force(KERNEL):
        serve(layer.q, layer.k, layer.v, layer.values, {}, 0)
        return native.prepare_call(layer.q, layer.k, layer.v, layer.values, KERNEL)


def test_a_call_with_other_tensors_of_the_same_shapes_is_served() -> None:
    first, other = Layer(0), Layer(1)
    call = prepared(first)
    other.options["cache_seqlens"] = torch.tensor([16, 0], dtype=torch.int32)
    other.values = values_of(**other.options)
    result = call(other.q, other.k, other.v, other.values, KERNEL)
    assert result is other.options["out"]
    assert torch.equal(result, other.expected())
    assert torch.equal(call(first.q, first.k, first.v, first.values, KERNEL), first.expected())


def test_outputs_are_allocated_where_none_is_given() -> None:
    first, other = Layer(0, out=None, return_lse=True), Layer(1, out=None, return_lse=True)
    for result in zip(
        prepared(first)(other.q, other.k, other.v, other.values, KERNEL),
        other.expected(),
        strict=True,
    ):
        assert torch.equal(*result)


def _shifted(x: Tensor) -> Tensor:
    """The same numbers 8 bytes further on."""
    longer = torch.empty(x.numel() + 4, dtype=x.dtype)
    return longer[4:].view(x.shape).copy_(x)


def change(name: str, to: Any) -> Callable[[Layer], None]:
    def apply(layer: Layer) -> None:
        layer.values[PLACES[name]] = to

    return apply


OTHER: dict[str, Callable[[Layer], None]] = {
    "an option": change("causal", False),
    "an option that is given": change("softcap", 2.0),
    "a tensor that is given": change("alibi_slopes", torch.ones(2)),
    "a tensor that is missing": change("sinks", None),
    "a tensor for a number": change("scale", torch.ones(())),
    "the dtype of a tensor": change("sinks", torch.ones(2, dtype=torch.bfloat16)),
    "the shape of a tensor": change("page_table", torch.zeros(2, 3, dtype=torch.int32)),
    "no output": change("out", None),
    "the strides of q": lambda x: setattr(x, "q", x.q.expand(2, 1, 2, 64)[:, :, :1].expand_as(x.q)),
    "the alignment of a cache": lambda x: setattr(x, "v", _shifted(x.v)),
    "the pages of a cache": lambda x: setattr(x, "k", x.k[:3]),
    "a subclass": lambda x: setattr(x, "q", x.q.as_subclass(type("Other", (Tensor,), {}))),
}


@pytest.mark.parametrize("name", OTHER)
def test_a_call_that_differs_is_read_as_a_whole(name: str) -> None:
    call, layer = prepared(Layer()), Layer(1)
    assert call(layer.q, layer.k, layer.v, layer.values, KERNEL) is not NotImplemented
    OTHER[name](layer)
    assert call(layer.q, layer.k, layer.v, layer.values, KERNEL) is NotImplemented


def test_what_is_forced_is_part_of_a_call() -> None:
    layer = Layer()
    assert prepared(layer)(layer.q, layer.k, layer.v, layer.values, None) is NotImplemented


def test_a_batch_is_prepared_once_for_layers_of_a_kind() -> None:
    layers = [Layer(0), Layer(1), Layer(2, softcap=3.0)]
    kinds = [kind_of(layer.values) for layer in layers]
    assert kinds[0] == kinds[1] != kinds[2]
    batch: dict[int, Any] = {}
    with torch.no_grad(), archflash.force(KERNEL):
        for layer, kind in zip(layers, kinds, strict=True):
            serve(layer.q, layer.k, layer.v, layer.values, batch, kind)
            assert torch.equal(layer.options["out"], layer.expected())
        assert {kind: type(x) for kind, x in batch.items()} == dict.fromkeys(
            kinds, native.PreparedCall
        )
        misses = native.cache_info()[:2]
        serve(layers[1].q, layers[1].k, layers[1].v, layers[1].values, batch, kinds[1])
    assert native.cache_info()[:2] == misses  # nothing was looked up


def test_without_a_kernel_pytorch_serves_each_layer() -> None:
    layer, batch = Layer(), dict[int, Any]()
    with torch.no_grad(), archflash.force("torch"):
        for _ in range(2):
            out = serve(layer.q, layer.k, layer.v, layer.values, batch, 0)
            torch.testing.assert_close(out, layer.expected(), atol=0.02, rtol=0.02)
    assert batch == {0: False}


def test_gradients_are_refused_as_in_other_calls() -> None:
    layer = Layer()
    layer.q.requires_grad_()
    with pytest.raises(archflash.UnsupportedError, match="has no backward"):
        serve(layer.q, layer.k, layer.v, layer.values, {}, 0)
