"""The lists of tiles that hopper makes of packed sequences of unequal lengths, before its attention
kernels run.
"""

from __future__ import annotations

import pytest
import torch

from archflash import _archflash as native
from archflash.sim._attention import Settings, simulate

from ..replanned import plan_with

Tile = tuple[int, int, int, int]  # sequence, first row, rows and keys of the sequence
NONE = (0, -1, 0, 0)


def lists_of(q_ends: list[int], k_ends: list[int], d: int = 128) -> list[list[Tile]]:
    """The list of each attention kernel. The longest sequence is said to have 640 rows and keys."""
    q, k = (torch.zeros(ends[-1], 8, d, dtype=torch.float16) for ends in (q_ends, k_ends))
    ends = {"q": torch.tensor(q_ends).int(), "k": torch.tensor(k_ends).int()}
    call = {f"cu_seqlens_{name}": x for name, x in ends.items()}
    most = {"max_seqlen_q": 640, "max_seqlen_k": 640}
    facts = {"sm_count": 1}
    plan = plan_with(facts, q, k, k, device="H200", implementation="hopper", **call, **most)
    fields = plan.to_dict()
    order = fields["launches"][0]
    assert order["kernel"] == "hopper_order_packed_f16"
    workspace = torch.full((fields["workspace_bytes"] // 4,), 77, dtype=torch.int32)
    alone = native.LaunchPlan.unchecked_from_dict(fields | {"launches": [order]})
    simulate(alone, call | {"workspace": workspace}, Settings())
    lists = []
    starts = [x["addend"] // 4 for x in order["pointers"] if x["operand"] == "workspace"]
    for start, end in zip(starts, [*starts[1:], None], strict=True):
        assert workspace[start] == 0  # tiles that were taken
        rows = [tuple(row) for row in workspace[start + 4 : end].unflatten(0, (-1, 4)).tolist()]
        unwritten = (77, 77, 77, 77)  # the next list starts behind it
        lists.append([row for row in rows if row != unwritten])
    return lists


def ends_of(*lengths: int) -> list[int]:
    return [0, *torch.tensor(lengths).cumsum(0).tolist()]


def test_sequences_with_more_keys_come_first_and_few_rows_have_a_list_of_their_own() -> None:
    ends = ends_of(5, 640, 60, 0, 9, 60, *[1] * 20)
    many, few = lists_of(ends, ends)
    rows, tile_rows = many[0][1], many[0][1] - many[1][1]
    assert rows + tile_rows >= 640 > rows
    assert [tile for tile in many if tile != NONE] == [
        (1, row, 640, 640) for row in range(rows, -1, -tile_rows)
    ]
    assert [tile for tile in few if tile != NONE] == [
        (2, 0, 60, 60), (5, 0, 60, 60), (4, 0, 9, 9), (0, 0, 5, 5),
        *[(i, 0, 1, 1) for i in range(6, 26)],
    ]  # fmt: skip
    for tiles in (many, few):  # those behind the last one say so
        assert tiles.index(NONE) + tiles.count(NONE) == len(tiles)


def test_keys_decide_where_a_sequence_has_fewer_rows() -> None:
    many, few = lists_of(ends_of(5, 640, 60, 9, *[1] * 20), ends_of(600, 640, 0, 20, *[1] * 20))
    assert {tile[0] for tile in many if tile != NONE} == {1}
    assert [tile[0] for tile in few if tile != NONE] == [0, 3, *range(4, 24), 2]


@pytest.mark.parametrize("ends", [[0, 640, 0, 640], [-5, 2**31 - 1, 7, 640]], ids=str)
def test_overlapping_sequences_find_no_room_behind_the_list(ends: list[int]) -> None:
    """Writes outside the workspace are errors of the simulator."""
    assert NONE not in lists_of(ends, ends)[0]
