"""The mask of a model: a tensor that knows what it stands for.

A model makes its mask once for all layers, and hands it to each. `Mask` says which keys a query
sees by a rule, ranges of keys and padding, so that no layer needs a number for each query and key;
and it stays a tensor for whatever computes with it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

from archflash import masks
from archflash._archflash import MOST_RANGES
from archflash.integrations._mask_functions import Rule


class Packed(NamedTuple):
    """Documents that follow one another in rows of text, all rows of a batch in one."""

    cu_seqlens: Tensor  # int32 (documents + 1,)
    longest: int | None


class Seen(NamedTuple):
    """Which keys each query sees: those that all of this allow.

    Attributes:
        rule: by position.
        offset: the position of query 0 less that of key 0.
        padding: bool (batch, keys), False for a key that no query sees; None if there is none.
        ranges: key_ranges, with what they say of padding; None for all keys.
        packed: what the ranges say, as packed sequences; None where they say something else.
        values: bool or added to the scores, what broadcasts to (batch, heads, queries, keys).
    """

    rule: Rule
    offset: int
    padding: Tensor | None = None
    ranges: Tensor | None = None
    packed: Packed | None = None
    values: Tensor | None = None

    def to(self, device: torch.device | None) -> Seen:
        def moved(x: Tensor | None) -> Tensor | None:
            return x if x is None or device is None else x.to(device)

        packed = self.packed and Packed(self.packed.cu_seqlens.to(device), self.packed.longest)
        return self._replace(padding=moved(self.padding), ranges=moved(self.ranges), packed=packed)


class _Content:
    """What a `Mask` and those that alias it share."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen
        self.written: Tensor | None = None  # the values, once somebody might change them
        self.rows_kept: tuple[Tensor, Tensor] | None = None  # of _packed, made at the first layer


class Mask(Tensor):
    """A bool mask (batch, 1, queries, keys) that knows what it stands for. Whatever computes with
    it gets a plain tensor of its values. Once a view of it has been taken, or it has been written
    to, it is such a tensor, too: an edit in place counts in every layer. A copy, also on another
    device, is a Mask; a saved one is loaded as a plain tensor.
    """

    _content: _Content

    @staticmethod
    def make(
        batch: int, nq: int, nk: int, content: _Content | Seen, device: torch.device | str
    ) -> Mask:
        mask: Mask = Tensor._make_wrapper_subclass(
            Mask, (batch, 1, nq, nk), dtype=torch.bool, device=torch.device(device)
        )
        mask._content = _Content(content) if isinstance(content, Seen) else content
        return mask

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.inplace_view in function.tags or function is torch.ops.aten.set_.source_Tensor:
            raise RuntimeError(
                f"{function}: the shape, strides and memory of a model's mask stay as they are; "
                "change a copy of its values, mask.values_().clone()"
            )
        first = args[0] if args else None
        if isinstance(first, Mask) and first._content.written is None:
            if function in _ALIASES:
                return first._with(first._content, first.device)
            as_it_is = all(kwargs.get(name) in (None, is_same) for name, is_same in _SAME)
            if function in _COPIES and as_it_is:
                device = kwargs.get("device")
                device = first.device if device is None else torch.device(device)
                return first._with(_Content(first._content.seen.to(device)), device)
        written: dict[int, Mask] = {}  # by the identity of what stands for it

        def plain(x: Any, argument: Any) -> Any:
            if not isinstance(x, Mask):
                return x
            if argument is None or argument.alias_info is None:
                return x.values_()
            values = x._written()
            if argument.alias_info.is_write:
                written[id(values)] = x
            return values

        def all_plain(value: Any, argument: Any) -> Any:
            return tree_map(lambda x: plain(x, argument), value)

        arguments = function._schema.arguments
        named = {argument.name: argument for argument in arguments}
        result = function(
            *(all_plain(x, argument) for x, argument in zip(args, arguments, strict=False)),
            **{name: all_plain(x, named.get(name)) for name, x in kwargs.items()},
        )
        return tree_map(lambda x: written.get(id(x), x), result)

    def values_(self) -> Tensor:
        """The values, as a plain tensor."""
        content = self._content
        if content.written is not None:
            return content.written
        batch, _, nq, nk = self.shape
        seen = content.seen
        visible = visible_by(seen.rule, seen.offset, nq, nk, self.device)
        if seen.padding is not None:
            visible = visible & seen.padding[:, None, None, :]
        if seen.ranges is not None:
            visible = visible & masks.to_dense(seen.ranges, nk)
        return visible.expand(batch, 1, nq, nk)

    def _written(self) -> Tensor:
        """The values from now on: a tensor that may be changed."""
        if self._content.written is None:
            # Not one of inference mode, which could not be changed outside of it.
            with torch.inference_mode(False):
                self._content.written = self.values_().clone(memory_format=torch.contiguous_format)
        return self._content.written

    def _with(self, content: _Content, device: torch.device | str) -> Mask:
        batch, _, nq, nk = self.shape
        return Mask.make(batch, nq, nk, content, device)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = self.clone()
        copy: Tensor = memo[id(self)]
        return copy

    def __copy__(self) -> Tensor:
        return self.detach()

    # What reads or changes a tensor without asking for an operator.

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, values: Tensor) -> None:
        if values.shape != self.shape:
            raise RuntimeError(
                f"the shape of a model's mask stays {tuple(self.shape)}: give it values of this "
                f"shape, not {tuple(values.shape)}"
            )
        self.copy_(values)

    def numpy(self, *, force: bool = False) -> Any:
        return self._written().numpy(force=force)

    def data_ptr(self) -> int:
        return self._written().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self._written().untyped_storage()

    def __dlpack__(self, **options: Any) -> Any:
        return self._written().__dlpack__(**options)

    def share_memory_(self) -> Mask:
        self._written().share_memory_()  # type: ignore[no-untyped-call]
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        values = self.values_()
        whole = values.clone(memory_format=torch.contiguous_format)
        return whole.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
_COPIES = (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)
# What an operator that copies may be asked for without changing what a mask is.
_SAME = (("dtype", torch.bool), ("layout", torch.strided), ("pin_memory", False))


def visible_by(rule: Rule, offset: int, nq: int, nk: int, device: torch.device | str) -> Tensor:
    """The keys that a rule lets each query see, bool (queries, keys)."""
    query = torch.arange(nq, device=device)[:, None] + offset
    key = torch.arange(nk, device=device)
    visible = torch.ones(nq, nk, dtype=torch.bool, device=device)
    if rule.causal:
        visible = visible & (key <= query)
    if rule.left is not None:
        visible = visible & (key >= query - rule.left)
    if rule.right is not None:
        visible = visible & (key <= query + rule.right)
    return visible


class Padding(NamedTuple):
    """What is no padding: bool (batch, keys), and key_ranges (batch, 1, 1, n, 2), which are None if
    it is in too many pieces.
    """

    kept: Tensor
    ranges: Tensor | None

    @staticmethod
    def of(kept: Tensor) -> Padding | None:
        """None where there is no padding. The host waits for the device, as a rule once."""
        batch, nk = kept.shape
        if nk == 0:
            return None
        count = kept.sum(1)
        begin = kept.int().argmax(1)
        end = torch.where(count > 0, nk - kept.flip(1).int().argmax(1), 0)
        all_kept, in_one_piece = torch.stack(
            [(count == nk).all(), (end - begin == count).all()]
        ).tolist()
        if all_kept:
            return None
        if in_one_piece:
            bounds = torch.stack([begin, end], -1).to(torch.int32)
            return Padding(kept, bounds[:, None, None, None])
        rows = masks.from_rows(lambda *_: kept[:, None, None], (batch, 1, 1, nk), kept.device)
        return Padding(kept, rows)


def is_traced(device: torch.device | str, *tensors: Tensor | None) -> bool:
    """Whether a call is recorded and not run, so that no value can be read on the host."""
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        return True
    if any(isinstance(x, FakeTensor) for x in tensors):
        return True
    on_gpu = torch.device(device).type == "cuda"
    return on_gpu and torch.cuda.is_current_stream_capturing()


def both_masks(one: Tensor, other: Tensor | None) -> Tensor:
    """One mask for two, each bool or added to the scores."""
    if other is None:
        return one
    if one.dtype == other.dtype == torch.bool:
        return one & other
    if other.dtype == torch.bool:
        return torch.where(other, one, -torch.inf)
    return torch.where(one, other, -torch.inf) if one.dtype == torch.bool else one + other


def both_ranges(some: Tensor, others: Tensor | None) -> Tensor | None:
    """The intersection of two key_ranges, None if it may be in too many pieces."""
    if others is None or some.shape[3] * others.shape[3] > MOST_RANGES:
        return None
    begin = torch.maximum(some[..., :, None, 0], others[..., None, :, 0]).flatten(3)
    end = torch.minimum(some[..., :, None, 1], others[..., None, :, 1]).flatten(3)
    return torch.stack([begin, end], -1)


def documents(starts: Tensor) -> tuple[Tensor, Packed]:
    """Documents that begin where starts (batch, n) is True, and at the first token of a row: as
    key_ranges, and as packed sequences."""
    batch, n = starts.shape
    starts = starts.clone()
    starts[:, :1] = True
    first = starts.flatten().nonzero().flatten()
    cu_seqlens = F.pad(first, (0, 1), value=batch * n).to(torch.int32)
    longest = int(cu_seqlens.diff().max()) if n and batch else 0
    return ranges_of_documents(starts), Packed(cu_seqlens, longest)


def ranges_of_documents(starts: Tensor) -> Tensor:
    return masks.documents(starts.cumsum(1))
