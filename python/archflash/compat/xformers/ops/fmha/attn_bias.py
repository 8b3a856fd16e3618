"""xformers' masks. Each says what it stands for in options of `archflash.attention`; none is made a
tensor, unless by `materialize`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from archflash._errors import UnsupportedError

_Bias = TypeVar("_Bias", bound="AttentionBias")
_Lengths = TypeVar("_Lengths", bound="_SeqLenInfo")


class AttentionBias:
    """What may be given as attn_bias in place of a tensor."""

    def options(self, nq: int, nk: int) -> dict[str, Any]:
        """What it says in options of `archflash.attention`, for nq queries and nk keys."""
        raise UnsupportedError(f"attn_bias is a {type(self).__name__}: not built yet")

    def to(self: _Bias, device: torch.device | str) -> _Bias:
        """The same on another device, where it has tensors."""
        moved = {name: x.to(device) for name, x in vars(self).items() if hasattr(x, "to")}
        copy = object.__new__(type(self))
        vars(copy).update(vars(self) | moved)
        return copy

    def materialize(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """The mask as a tensor (..., queries, keys) that is added to the scores."""
        nq, nk = shape[-2:]
        seen = self._visible(nq, nk, torch.device(device))
        return torch.zeros(shape, dtype=dtype, device=device).masked_fill(~seen, -torch.inf)

    def _visible(self, nq: int, nk: int, device: torch.device) -> Tensor:
        """The keys that each query sees, bool (queries, keys)."""
        query = torch.arange(nq, device=device)[:, None]
        key = torch.arange(nk, device=device)
        options = self.options(nq, nk)
        distance = key - query - options.get("q_offset", nk - nq)
        seen = torch.ones(nq, nk, dtype=torch.bool, device=device)
        if options.get("causal"):
            seen = seen & (distance <= 0)
        left, right = options.get("window", (None, None))
        if left is not None:
            seen = seen & (distance >= -left)
        if right is not None:
            seen = seen & (distance <= right)
        return seen


# --- by position ---


class LowerTriangularMask(AttentionBias):
    """Query i sees keys up to i."""

    def __init__(self, device: torch.device | str | None = None) -> None:
        """device has no effect."""

    def options(self, nq: int, nk: int) -> dict[str, Any]:
        return {"causal": True, "q_offset": 0}

    def add_bias(self, bias: Tensor) -> LowerTriangularMaskWithTensorBias:
        """This, and a tensor that is added to the scores."""
        return LowerTriangularMaskWithTensorBias(bias)


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    """Query i sees keys up to i, and a tensor is added to the scores."""

    def __init__(self, bias: Tensor) -> None:
        self._bias = bias

    def materialize(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        return super().materialize(shape, dtype, device) + self._bias.to(device, dtype)


class LowerTriangularFromBottomRightMask(AttentionBias):
    """The last query sees the last key, the query before it the key before that."""

    def options(self, nq: int, nk: int) -> dict[str, Any]:
        return {"causal": True}

    def make_local_attention(
        self, window_size: int
    ) -> LowerTriangularFromBottomRightLocalAttentionMask:
        """This, in a window of that many keys."""
        return LowerTriangularFromBottomRightLocalAttentionMask(window_size)


@dataclass
class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    """As its base class, in a window of that many keys, the one at the query's place included."""

    _window_size: int

    def __post_init__(self) -> None:
        _check_window(1, _window_size=self._window_size)

    def options(self, nq: int, nk: int) -> dict[str, Any]:
        return {"causal": True, "window": (self._window_size - 1, None)}


@dataclass
class LocalAttentionFromBottomRightMask(AttentionBias):
    """A window around the key at a query's place, where the last query is at the last key's."""

    window_left: int
    window_right: int

    def __post_init__(self) -> None:
        _check_window(0, window_left=self.window_left, window_right=self.window_right)

    def options(self, nq: int, nk: int) -> dict[str, Any]:
        return {"window": (self.window_left, self.window_right)}


def _check_window(least: int, **sides: int) -> None:
    for name, side in sides.items():
        if side < least:
            raise ValueError(f"{name} is {side}: it must be at least {least}")


# --- sequences of different lengths, one behind another ---


@dataclass
class _SeqLenInfo:
    """Where sequences begin."""

    seqstart: Tensor  # int32 (sequences + 1,)
    max_seqlen: int
    min_seqlen: int
    seqstart_py: list[int]

    @classmethod
    def from_seqlens(
        cls: type[_Lengths], seqlens: Iterable[int], *, device: torch.device | str | None = None
    ) -> _Lengths:
        lengths = list(seqlens)
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        seqstart = torch.tensor(starts, dtype=torch.int32, device=_device(device))
        return cls(seqstart, max(lengths, default=0), min(lengths, default=0), starts)

    def to(self: _Lengths, device: torch.device | str) -> _Lengths:
        moved: dict[str, Any] = {
            name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)
        }
        return dataclasses.replace(self, **moved)

    def intervals(self) -> Iterable[tuple[int, int]]:
        """Where each sequence begins and ends."""
        return zip(self.seqstart_py, self.seqstart_py[1:], strict=False)

    def split(self, x: Tensor, batch_sizes: Sequence[int] | None = None) -> list[Tensor]:
        """The sequences of x (1, rows, ...), or the batches of equally long ones."""
        if x.shape[0] != 1 or x.shape[1] != self.seqstart_py[-1]:
            raise ValueError(
                f"a tensor has shape {tuple(x.shape)}: it must be (1, {self.seqstart_py[-1]}, ...)"
            )
        counts = [1] * (len(self.seqstart_py) - 1) if batch_sizes is None else list(batch_sizes)
        parts, sequence = [], 0
        for count in counts:
            first, last = (self.seqstart_py[i] for i in (sequence, sequence + count))
            rows = (last - first) // count if count else 0
            parts.append(x[0, first:last].reshape(count, rows, *x.shape[2:]))
            sequence += count
        return parts


@dataclass
class _PaddedSeqLenInfo(_SeqLenInfo):
    """Sequences that each have the same room, of which the first rows count."""

    seqlen: Tensor  # int32 (sequences,)
    seqlen_py: list[int]
    padding: int

    @classmethod
    def from_seqlens_padded(
        cls, seqlens: Sequence[int], padding: int, *, device: torch.device | str | None = None
    ) -> _PaddedSeqLenInfo:
        lengths = list(seqlens)
        if any(length > padding for length in lengths):
            raise ValueError(f"kv_seqlen is {lengths}: none may be above kv_padding={padding}")
        starts = list(range(0, (len(lengths) + 1) * padding, padding))
        seqstart, seqlen = (
            torch.tensor(x, dtype=torch.int32, device=_device(device)) for x in (starts, lengths)
        )
        longest, shortest = max(lengths, default=0), min(lengths, default=0)
        return cls(seqstart, longest, shortest, starts, seqlen, lengths, padding)

    def intervals(self) -> Iterable[tuple[int, int]]:
        for first, length in zip(self.seqstart_py, self.seqlen_py, strict=False):
            yield first, first + length


def _device(device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class _OfSequences(AttentionBias):
    """A query sees keys of its own sequence."""

    q_seqinfo: _SeqLenInfo
    k_seqinfo: _SeqLenInfo

    def of_sequence(self) -> AttentionBias | None:
        """Which of the keys of its sequence a query sees; None for all."""
        return None

    def _visible(self, nq: int, nk: int, device: torch.device) -> Tensor:
        seen = torch.zeros(nq, nk, dtype=torch.bool, device=device)
        inner = self.of_sequence()
        pairs = zip(self.q_seqinfo.intervals(), self.k_seqinfo.intervals(), strict=True)
        for (first, last), (begin, end) in pairs:
            rows = 1 if inner is None else inner._visible(last - first, end - begin, device)
            seen[first:last, begin:end] = rows
        return seen


@dataclass
class BlockDiagonalMask(_OfSequences):
    """A query sees all keys of its own sequence."""

    q_seqinfo: _SeqLenInfo
    k_seqinfo: _SeqLenInfo
    _batch_sizes: Sequence[int] | None = None

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_seqlen: Sequence[int] | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> Any:
        """Of the lengths of sequences; those of keys are those of queries by default."""
        if kv_seqlen is not None and len(kv_seqlen) != len(q_seqlen):
            raise ValueError(f"kv_seqlen has {len(kv_seqlen)} sequences, q_seqlen {len(q_seqlen)}")
        of_q = _SeqLenInfo.from_seqlens(q_seqlen, device=device)
        same = kv_seqlen is None or list(kv_seqlen) == list(q_seqlen)
        of_k = of_q if same else _SeqLenInfo.from_seqlens(kv_seqlen or (), device=device)
        return cls(q_seqinfo=of_q, k_seqinfo=of_k)

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[Tensor]) -> tuple[Any, Tensor]:
        """The mask of tensors (batch, rows, ...), and these as one (1, all rows, ...)."""
        bias = cls.from_seqlens(_lengths_of(tensors), device=tensors[0].device)
        bias._batch_sizes = [len(x) for x in tensors]
        return bias, _joined(tensors)

    @classmethod
    def from_tensor_lists_qkv(
        cls,
        tensors_q: Sequence[Tensor],
        tensors_k: Sequence[Tensor],
        tensors_v: Sequence[Tensor] | None = None,
    ) -> tuple[Any, Tensor, Tensor, Tensor | None]:
        """As `from_tensor_list`, of queries, keys and values."""
        device = tensors_q[0].device
        bias = cls.from_seqlens(_lengths_of(tensors_q), _lengths_of(tensors_k), device=device)
        bias._batch_sizes = [len(x) for x in tensors_q]
        v = None if tensors_v is None else _joined(tensors_v)
        return bias, _joined(tensors_q), _joined(tensors_k), v

    def split_queries(self, tensor: Tensor) -> Sequence[Tensor]:
        """The tensors of which `from_tensor_list` made one."""
        return self.q_seqinfo.split(tensor, self._batch_sizes)

    def split_kv(self, tensor: Tensor) -> Sequence[Tensor]:
        """`split_queries` of keys or values."""
        return self.k_seqinfo.split(tensor, self._batch_sizes)

    def split(self, tensor: Tensor) -> Sequence[Tensor]:
        """`split_queries`, where keys have the same lengths."""
        if self.q_seqinfo is not self.k_seqinfo:
            raise ValueError("queries and keys have other lengths: use split_queries or split_kv")
        return self.split_queries(tensor)

    def make_causal(self) -> BlockDiagonalCausalMask:
        """This, with query i of a sequence seeing its keys up to i."""
        return self._made_into(BlockDiagonalCausalMask)

    def make_causal_from_bottomright(self) -> BlockDiagonalCausalFromBottomRightMask:
        """This, with the last query of a sequence seeing up to its last key."""
        return self._made_into(BlockDiagonalCausalFromBottomRightMask)

    def make_local_attention(self, window_size: int) -> BlockDiagonalCausalLocalAttentionMask:
        """`make_causal` in a window of that many keys."""
        return self._made_into(BlockDiagonalCausalLocalAttentionMask, window_size)

    def make_local_attention_from_bottomright(
        self, window_size: int
    ) -> BlockDiagonalCausalLocalAttentionFromBottomRightMask:
        """`make_causal_from_bottomright` in a window of that many keys."""
        return self._made_into(BlockDiagonalCausalLocalAttentionFromBottomRightMask, window_size)

    def _made_into(self, kind: Callable[..., _Bias], *more: int) -> _Bias:
        return kind(self.q_seqinfo, self.k_seqinfo, self._batch_sizes, *more)

    def to(self, device: torch.device | str) -> Any:
        moved = super().to(device)
        if self.k_seqinfo is self.q_seqinfo:
            moved.k_seqinfo = moved.q_seqinfo
        return moved


def _lengths_of(tensors: Sequence[Tensor]) -> list[int]:
    return [x.shape[1] for x in tensors for _ in range(len(x))]


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.flatten(0, 1) for x in tensors])[None]


@dataclass
class BlockDiagonalCausalMask(BlockDiagonalMask):
    """Query i of a sequence sees its keys up to i."""

    def of_sequence(self) -> AttentionBias:
        return LowerTriangularMask()


@dataclass
class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    """The last query of a sequence sees up to its last key, the one before it up to the key before.
    A sequence has no more queries than keys.
    """

    def __post_init__(self) -> None:
        pairs = zip(self.q_seqinfo.intervals(), self.k_seqinfo.intervals(), strict=True)
        for number, ((first, last), (begin, end)) in enumerate(pairs):
            if last - first > end - begin:
                raise ValueError(
                    f"sequence {number} has {last - first} queries and {end - begin} keys: it must "
                    "have no more queries than keys"
                )

    def of_sequence(self) -> AttentionBias:
        return LowerTriangularFromBottomRightMask()


class _InWindow(AttentionBias):
    """A rule of sequences in a window of _window_size keys."""

    def __init__(self, inner: AttentionBias, size: int) -> None:
        self._inner, self._size = inner, size

    def options(self, nq: int, nk: int) -> dict[str, Any]:
        return self._inner.options(nq, nk) | {"window": (self._size - 1, None)}


@dataclass
class BlockDiagonalCausalLocalAttentionMask(BlockDiagonalCausalMask):
    """`BlockDiagonalCausalMask` in a window of that many keys."""

    _window_size: int = 0

    def __post_init__(self) -> None:
        _check_window(1, _window_size=self._window_size)

    def of_sequence(self) -> AttentionBias:
        return _InWindow(LowerTriangularMask(), self._window_size)


@dataclass
class BlockDiagonalCausalLocalAttentionFromBottomRightMask(BlockDiagonalCausalFromBottomRightMask):
    """`BlockDiagonalCausalFromBottomRightMask` in a window of that many keys."""

    _window_size: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_window(1, _window_size=self._window_size)

    def of_sequence(self) -> AttentionBias:
        return LowerTriangularFromBottomRightLocalAttentionMask(self._window_size)


@dataclass
class BlockDiagonalPaddedKeysMask(_OfSequences):
    """A query sees all keys of its own sequence, which have the same room in every sequence."""

    q_seqinfo: _SeqLenInfo
    k_seqinfo: _PaddedSeqLenInfo

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_padding: int,
        kv_seqlen: Sequence[int],
        causal_diagonal: Any = None,
        *,
        device: torch.device | str | None = None,
    ) -> Any:
        """Of the lengths of sequences, whose keys have room for kv_padding rows."""
        if len(kv_seqlen) != len(q_seqlen):
            raise ValueError(f"kv_seqlen has {len(kv_seqlen)} sequences, q_seqlen {len(q_seqlen)}")
        return cls(
            q_seqinfo=_SeqLenInfo.from_seqlens(q_seqlen, device=device),
            k_seqinfo=_PaddedSeqLenInfo.from_seqlens_padded(kv_seqlen, kv_padding, device=device),
        )


@dataclass
class BlockDiagonalCausalWithOffsetPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """`BlockDiagonalPaddedKeysMask`, where the last query of a sequence sees up to its last key."""

    causal_diagonal: Any = None  # has no effect

    def of_sequence(self) -> AttentionBias:
        return LowerTriangularFromBottomRightMask()
