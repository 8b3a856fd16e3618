"""What calls with block scales refuse: tensors on two devices, and units that are no scales."""

from __future__ import annotations

import pytest
import torch

import archflash
from archflash import _key_lists

X = torch.randn(1, 2, 64, 64)
TRIPLES = {x: archflash.quantize_nvfp4(X, dim=-2 if x == "v" else -1) for x in "qkv"}


@pytest.mark.parametrize("kernel", [None, "torch", "blackwell_consumer"])
def test_nvfp4_tensors_on_two_devices_are_named(kernel: str | None) -> None:
    for name in "kv":
        moved = {name: tuple(x.to("meta") for x in TRIPLES[name])}
        words = f"{name} is on meta but q is on cpu: move them to one device"
        with pytest.raises(TypeError, match=words):
            archflash.attention_nvfp4(**TRIPLES | moved, implementation=kernel)
    others = {"sinks": torch.zeros(2), "q_offset": torch.zeros(1, dtype=torch.int32)}
    for name, x in others.items():
        words = f"{name} is on meta but q is on cpu: move them to one device"
        with pytest.raises(TypeError, match=words):
            archflash.attention_nvfp4(**TRIPLES, implementation=kernel, **{name: x.to("meta")})


@pytest.mark.skipif(not hasattr(torch, "float8_e8m0fnu"), reason="torch before 2.7 lacks it")
def test_block_scales_on_two_devices_are_named() -> None:
    made = {x: archflash.quantize_mxfp8(X, dim=-2 if x == "v" else -1) for x in "qkv"}
    given = {x: y for x, (y, _) in made.items()} | {f"{x}_descale": y for x, (_, y) in made.items()}
    for name in (x for x in given if x != "q"):
        with pytest.raises(TypeError, match=f"{name} is on .* but q is on cpu: move them to one"):
            archflash.attention(**given | {name: given[name].to("meta")})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 0.0])
@pytest.mark.parametrize("name", "qkv")
def test_units_that_are_not_positive_and_finite_are_refused_where_that_is_asked_for(
    name: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, scales, _ = TRIPLES[name]
    of_heads = torch.ones(1, 2, 1, 1)
    of_heads[0, 1] = value
    spoiled = [(values, scales, torch.full(shape, value)) for shape in ((), (1,))]
    archflash.attention_nvfp4(**TRIPLES | {name: spoiled[0]})  # reads no values
    monkeypatch.setattr(_key_lists, "ALWAYS_CHECK", True)
    archflash.attention_nvfp4(**TRIPLES)
    for one in spoiled:
        with pytest.raises(ValueError, match=f"the unit of {name} is {value}: it must be positive"):
            archflash.attention_nvfp4(**TRIPLES | {name: one})
    words = rf"the unit of {name} is {value} for 0, 1 \(batch, head\): it must be positive"
    with pytest.raises(ValueError, match=words):
        archflash.attention_nvfp4(**TRIPLES | {name: (values, scales, of_heads)})
