"""The mask that archflash.integrations.transformers gives to a model is a tensor for whatever
reads, changes, copies or saves it.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from archflash import masks
from archflash.integrations import _model_mask
from archflash.integrations._mask_functions import Rule
from archflash.integrations._model_mask import Mask, Padding, Seen

N = 8
PADDING = torch.tensor([[True] * 8, [False] * 3 + [True] * 5])
STARTS = torch.zeros(2, N, dtype=torch.bool)
STARTS[0, 3] = STARTS[1, 6] = True
HOLES = PADDING.clone()
HOLES[0, 4] = False
KINDS = {
    "padding": Seen(Rule(True), 0, *(Padding.of(PADDING) or ())),
    "holes": Seen(Rule(True), 0, *(Padding.of(HOLES) or ())),
    "window": Seen(Rule(True, 2), 0),
    "window both ways": Seen(Rule(False, 1, 2), 0),
    "documents": Seen(Rule(True), 0, None, *_model_mask.documents(STARTS)),
}


@pytest.fixture(params=KINDS)
def mask(request: pytest.FixtureRequest) -> Mask:
    return Mask.make(2, N, N, KINDS[request.param], "cpu")


def test_values_are_those_of_what_it_stands_for() -> None:
    query, key = torch.arange(N)[:, None], torch.arange(N)
    numbers = STARTS.cumsum(1)
    same = (numbers[:, :, None] == numbers[:, None, :])[:, None]
    expected = {
        "padding": (key <= query) & PADDING[:, None, None],
        "holes": (key <= query) & HOLES[:, None, None],
        "window": ((key <= query) & (key >= query - 2)).expand(2, 1, N, N),
        "window both ways": ((key <= query + 2) & (key >= query - 1)).expand(2, 1, N, N),
        "documents": (key <= query) & same,
    }
    for name, seen in KINDS.items():
        mask = Mask.make(2, N, N, seen, "cpu")
        assert torch.equal(mask.values_(), expected[name]), name
        assert mask._content.written is None


def _set(x: Tensor) -> None:
    x[:, :, 5, 2] = ~x[:, :, 5, 2]


def _set_a_view(x: Tensor) -> None:
    x[1][0, 3].logical_not_()


def _and(x: Tensor) -> None:
    x &= torch.arange(N) % 3 != 0


def _set_data(x: Tensor) -> None:
    x.data = torch.eye(N, dtype=torch.bool).expand(2, 1, N, N).clone()


EDITS: dict[str, Callable[[Tensor], Any]] = {
    "index": _set,
    "a view": _set_a_view,
    "and": _and,
    "fill_": lambda x: x.fill_(True),
    "copy_": lambda x: x.copy_(torch.ones(N, N).triu()),
    "masked_fill_": lambda x: x.masked_fill_(torch.ones(N, N).tril(-3).bool(), True),
    "index_put_": lambda x: x.index_put_((torch.tensor([1]),), torch.tensor(False)),
    "out=": lambda x: torch.logical_not(x, out=x),
    "a detached one": lambda x: x.detach()[:, :, 4].fill_(True),
    "data": lambda x: x.data[:, :, 4].fill_(False),
    "another data": _set_data,
    "copy.copy": lambda x: copy.copy(x)[..., 0].logical_not_(),
    "flat": lambda x: x.view(-1)[3:9].fill_(True),
    "numpy": lambda x: x.numpy().fill(True),
    "dlpack": lambda x: torch.from_dlpack(x).fill_(True),
    "storage": lambda x: x.untyped_storage().fill_(1),
    "inference mode": torch.inference_mode()(lambda x: x[0].fill_(False)),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_in_place_counts(edit: str, mask: Mask) -> None:
    plain = mask.values_().clone()
    alias = mask.detach()
    for x in (mask, plain):
        EDITS[edit](x)
    assert torch.equal(mask.values_(), plain)
    assert torch.equal(torch.where(mask, 1, 0), plain.long())
    assert torch.equal(alias.logical_not(), ~plain)
    assert mask._content.written is not None  # so that a layer takes these values


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.resize_(2, 1, N, N + 1),
        lambda x: x.squeeze_(1),
        lambda x: x.transpose_(2, 3),
        lambda x: x.set_(torch.ones(2, 1, N, N, dtype=torch.bool)),
        lambda x: setattr(x, "data", torch.ones(N, dtype=torch.bool)),
    ],
)
def test_another_shape_or_memory_is_refused(change: Callable[[Tensor], Any], mask: Mask) -> None:
    plain = mask.values_().clone()
    with pytest.raises(RuntimeError, match="of a model's mask stay"):
        change(mask)
    assert torch.equal(mask.values_(), plain)


@pytest.mark.parametrize("edited", [False, True])
def test_copies_and_what_is_saved(edited: bool, mask: Mask) -> None:
    if edited:
        _set(mask)
    plain = mask.values_().clone()
    file = io.BytesIO()
    torch.save({"mask": mask}, file)
    file.seek(0)
    copies = [
        mask.clone(),
        copy.deepcopy(mask),
        copy.deepcopy([mask, mask])[1],
        pickle.loads(pickle.dumps(mask)),
        torch.load(file, weights_only=True)["mask"],
        mask.to(torch.float32).to(torch.bool),
    ]
    for other in copies:
        assert torch.equal(torch.where(other, 1, 0), plain.long())
        other.fill_(True)
    assert torch.equal(mask.values_(), plain)
    assert isinstance(mask.clone(), Mask) != edited
    assert isinstance(mask.to("meta"), Mask) != edited
    assert mask.to("cpu") is mask
    twice = [mask, mask]
    assert len({id(x) for x in copy.deepcopy(twice)}) == 1


def test_reading_gives_plain_tensors_and_leaves_it_as_it_is(mask: Mask) -> None:
    plain = mask.values_().clone()
    for found, expected in (
        (mask + 1, plain + 1),
        (~mask, ~plain),
        (torch.cat([mask, mask]), torch.cat([plain, plain])),
        (mask.float(), plain.float()),
        (mask.sum(-1), plain.sum(-1)),
    ):
        assert type(found) is Tensor
        assert torch.equal(found, expected)
    assert mask._content.written is None
    assert type(mask[:, :, 2:]) is Tensor
    assert torch.equal(mask[:, :, 2:], plain[:, :, 2:])
    assert "True" in repr(mask)
    assert mask.data_ptr() != 0  # what reads memory without asking finds the values there


def test_padding_in_ranges() -> None:
    assert Padding.of(torch.ones(2, N, dtype=torch.bool)) is None
    assert Padding.of(torch.ones(2, 0, dtype=torch.bool)) is None
    nothing = PADDING.clone()
    nothing[0] = False
    every_other = torch.arange(10).expand(2, 10) % 2 == 0
    for kept, pieces in ((PADDING, 1), (HOLES, 2), (nothing, 1), (every_other, None)):
        found = Padding.of(kept)
        assert found is not None
        assert torch.equal(found.kept, kept)
        if pieces is None:
            assert found.ranges is None
            continue
        assert found.ranges is not None
        assert found.ranges.shape == (2, 1, 1, pieces, 2)
        assert torch.equal(masks.to_dense(found.ranges, N)[:, 0, 0], kept)


def test_the_intersection_of_ranges() -> None:
    some = torch.tensor([[0, 5], [6, 8]], dtype=torch.int32)[None, None, None]
    others = torch.tensor([[3, 7], [0, 1]], dtype=torch.int32)[None, None, None]
    found = _model_mask.both_ranges(some, others)
    assert found is not None
    seen = masks.to_dense(found, N)
    assert torch.equal(seen, masks.to_dense(some, N) & masks.to_dense(others, N))
    assert seen[0, 0, 0].nonzero().flatten().tolist() == [0, 3, 4, 6]
    assert _model_mask.both_ranges(some, others.repeat(1, 1, 1, 2, 1)) is None
