"""What implementations that copy by TMA plan alike: tensor maps, what those cannot describe, the
order of heads.
"""

from __future__ import annotations

import pytest
import torch
from plan_cases import call, home_of, maps_of, packed_call, plan_of

import archflash
from archflash import _archflash as native
from archflash._api import find_device, make_problem

every_kernel = pytest.mark.parametrize("kernel", ["blackwell_consumer", "blackwell_dc"])


def views(
    dtype: torch.dtype, *shapes: tuple[tuple[int, ...], tuple[int, ...]]
) -> list[torch.Tensor]:
    """Tensors of given shapes and strides, without storage."""
    return [torch.empty_strided(*shape, dtype=dtype, device="meta") for shape in shapes]


# --- tensor maps ---


@every_kernel
def test_a_dimension_that_is_not_moved_along_has_size_one(kernel: str) -> None:
    kind = torch.float16
    q, k = views(
        kind, ((2, 4, 300, 64), (4 * 300 * 64, 300 * 64, 64, 1)), ((2, 4, 200, 64), (0, 0, 64, 1))
    )
    (v,) = views(kind, ((2, 4, 200, 64), (200 * 64, 0, 64, 1)))
    maps = maps_of(plan_of(make_problem(q, k, v).as_if_on_cuda(), home_of(kernel), kernel))
    assert maps["k"]["dims"] == [64, 200, 1, 1]
    assert maps["v"]["dims"] == [64, 200, 1, 2]
    assert all(s % 16 == 0 and s > 0 for row in maps.values() for s in row["strides"])


@every_kernel
def test_packed_sequences_are_one_tensor_of_rows(kernel: str) -> None:
    maps = maps_of(plan_of(packed_call("float16", rows=777, sequences=5), home_of(kernel), kernel))
    for operand in ("q", "k", "v"):
        assert maps[operand]["dims"] == [64, 777, 4, 1]
        assert maps[operand]["strides"][:2] == [2 * 4 * 64, 2 * 64]


@every_kernel
def test_an_empty_k_or_v_has_no_map(kernel: str) -> None:
    maps = maps_of(plan_of(call("float16", nk=0), home_of(kernel), kernel))
    assert set(maps) - {"out"} == {"q"}


# --- what TMA cannot describe ---


@every_kernel
def test_a_repeated_row_is_refused_and_another_serves_it(kernel: str) -> None:
    q, k = views(
        torch.float16,
        ((2, 4, 300, 64), (4 * 300 * 64, 300 * 64, 64, 1)),
        ((2, 4, 200, 64), (256, 64, 0, 1)),
    )
    problem = make_problem(q, k, k).as_if_on_cuda()
    reasons = native.plan(kernel, problem, find_device(home_of(kernel)))
    assert [reason.partition(":")[0] for reason in reasons] == [
        "k repeats one row (a row stride of 0)",
        "v repeats one row (a row stride of 0)",
    ]
    decision = archflash.explain(q, k, k, device=home_of(kernel))
    # On a B200 PyTorch's kernel is expected to be faster than those of mma.sync.
    assert decision.chosen == ("torch" if kernel == "blackwell_dc" else "ampere")
    assert decision.reasons[kernel] == reasons


@every_kernel
def test_a_single_row_has_no_stride_to_refuse(kernel: str) -> None:
    q, k = views(
        torch.float16,
        ((2, 4, 300, 64), (4 * 300 * 64, 300 * 64, 64, 1)),
        ((2, 4, 1, 64), (256, 64, 0, 1)),
    )
    plan = plan_of(make_problem(q, k, k).as_if_on_cuda(), home_of(kernel), kernel)
    assert maps_of(plan)["k"]["dims"] == [64, 1, 4, 2]


@every_kernel
def test_strides_of_a_terabyte_are_refused(kernel: str) -> None:
    q, k = views(
        torch.float16,
        ((2, 4, 300, 64), (4 * 300 * 64, 300 * 64, 64, 1)),
        ((2, 4, 200, 64), (2**39, 200 * 64, 64, 1)),
    )
    problem = make_problem(q, k, k).as_if_on_cuda()
    reasons = native.plan(kernel, problem, find_device(home_of(kernel)))
    assert all("stride of 1099511627776 bytes" in reason for reason in reasons)
    assert len(reasons) == 2


@pytest.mark.parametrize(
    ("repeated", "wanted"),
    [
        (0, "qv repeats one sequence (a stride of 0)"),
        (1, "qv repeats one row (a row stride of 0)"),
        (2, "qv repeats one head (a stride of 0)"),
        (None, None),
    ],
)
def test_a_latent_query_that_repeats_itself_is_refused_with_lists(
    repeated: int | None, wanted: str | None
) -> None:
    shape = [3, 2, 16, 512]
    qv = torch.empty(*(1 if i == repeated else n for i, n in enumerate(shape))).half()
    k, v = torch.empty(3, 64, 1, 64).half(), torch.empty(3, 64, 1, 512).half()
    decision = archflash.explain(
        torch.empty(3, 2, 16, 64).half(), k, v, qv=qv.expand(shape), layout="bnhd",
        cache_seqlens=torch.tensor([9, 9, 9], dtype=torch.int32), device="H200",
        key_indices=torch.zeros(3, 1, 2, 8, dtype=torch.int32),
    )  # fmt: skip
    assert decision.chosen == ("hopper" if wanted is None else "ampere")
    reasons = [reason.partition(":")[0] for reason in decision.reasons.get("hopper", [])]
    assert reasons == ([] if wanted is None else [wanted])


@pytest.mark.parametrize(
    ("kernel", "named"), [("blackwell_consumer", []), ("blackwell_dc", ["out"])]
)
def test_strides_of_out_matter_to_who_stores_by_tma(kernel: str, named: list[str]) -> None:
    shape, strides = (2, 4, 300, 64), (2**39, 300 * 64, 64, 1)
    q, k, v = views(torch.float16, *[(shape, (4 * 300 * 64, 300 * 64, 64, 1))] * 3)
    (out,) = views(torch.float16, (shape, strides))
    problem = make_problem(q, k, v, out=out).as_if_on_cuda()
    planned = native.plan(kernel, problem, find_device(home_of(kernel)))
    reasons = planned if isinstance(planned, list) else []
    assert [reason.partition(" ")[0] for reason in reasons] == named
