"""Tensor maps are encoded by the driver when a plan is bound."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import archflash
from archflash import _archflash as _native

pytestmark = pytest.mark.gpu

OFFSET = 64  # of the map in the parameters
MAP_BYTES = 128
MAP: dict[str, Any] = {
    "operand": "k", "offset": OFFSET, "addend": 256, "dtype": "bfloat16", "swizzle": 3,
    "nan_fill": False, "dims": [64, 256], "strides": [128], "box": [64, 32],
}  # fmt: skip


def plan_with(**changes: Any) -> _native.LaunchPlan:
    """A plan whose parameters hold nothing but one tensor map."""
    q = torch.empty(1, 1, 64, 64, device="meta")
    plan = archflash.explain(q, q, q, device="H200", implementation="simt").plan
    assert plan is not None
    fields = plan.to_dict()
    (launch,) = fields["launches"]
    launch["params"] = "00" * 256
    launch["pointers"] = []
    launch["tensor_maps"] = [MAP | changes]
    return _native.LaunchPlan.unchecked_from_dict(fields)


def encoded(plan: _native.LaunchPlan, address: int) -> bytes:
    block = _native.bound_parameters(plan, 0, [("k", address)])
    assert block[:OFFSET] == bytes(OFFSET)
    assert block[OFFSET + MAP_BYTES :] == bytes(256 - OFFSET - MAP_BYTES)
    return block[OFFSET : OFFSET + MAP_BYTES]


def test_a_map_says_where_and_what_its_tensor_is() -> None:
    k = torch.empty(1 << 16, dtype=torch.bfloat16, device="cuda")
    first = encoded(plan_with(), k.data_ptr())
    assert first != bytes(MAP_BYTES)
    assert encoded(plan_with(), k.data_ptr()) == first
    # The base is the operand's address plus the addend, and nothing else depends on the address.
    assert encoded(plan_with(addend=0), k.data_ptr() + 256) == first
    for change in ({"addend": 512}, {"swizzle": 0}, {"dims": [64, 128]}, {"box": [64, 64]}):
        assert encoded(plan_with(**change), k.data_ptr()) != first


@pytest.mark.parametrize(
    "wrong",
    [{"addend": 8}, {"strides": [120]}, {"box": [64, 512]}, {"box": [128, 32]}],
    ids=["base-off-16-bytes", "stride-off-16-bytes", "box-over-256", "box-wider-than-swizzle"],
)
def test_the_driver_refuses_a_wrong_map_and_says_which(wrong: dict[str, Any]) -> None:
    k = torch.empty(1 << 16, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(archflash.LaunchError, match="tensor map of k"):
        encoded(plan_with(**wrong), k.data_ptr())
    q = torch.randn(1, 1, 8, 64, device="cuda")
    assert archflash.attention(q, q, q).isfinite().all()
