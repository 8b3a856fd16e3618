"""Ring and all-gather: a rank's rows against keys of other ranks, a stage after the other, while
the next stage's keys are under way.

Keys and values travel with rows first, ``(rows, batch, heads, d)``, in all-gather as one tensor
``(rows, batch, heads, d + dv)``: they are received where they belong in buffers of ascending global
rows. Their gradients travel back in float32 as such a tensor, and are added up in an order that
depends on the ranks alone.

Beside the rank's own rows there are at most keys and values of two stages at a time: those that are
computed with, and those under way; and in a ring the own ones once more where rows are not
outermost in memory ("bhnd", or a batch).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from archflash import _merge
from archflash._api import attention, explain
from archflash._backward import attention_backward
from archflash._dispatch import note_fallback
from archflash._errors import ForcedImplementationError, NotCompiledError
from archflash._registry import TORCH
from archflash.distributed import _exchange
from archflash.distributed._plan import Call, Dense, Packed, Part, Plan, Stage, overlaps, places
from archflash.distributed._shards import Piece


@dataclass(frozen=True)
class Options:
    """The options of a call that do not say who sees whom."""

    softcap: float | None
    scale: float | None
    implementation: str | None
    deterministic: bool | None = None  # of the gradients; None: as PyTorch's setting says


def forward(
    plan: Plan, group: dist.ProcessGroup | None, options: Options,
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, out: Tensor,
) -> Tensor:  # fmt: skip
    """Attention of the local rows, "bhnd". Writes `out`, and returns the log-sum-exps."""
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    for start, end in plan.untouched:
        out[:, :, start:end] = 0
        lse[:, :, start:end] = -torch.inf if sinks is None else sinks[:, None]
    turns, merging = _turns_of(plan, plan.stages, group, q.device), None
    keys = _Arrivals(plan, plan.stages, group, k, v, turns)
    with turns:
        for number, stage in enumerate(plan.stages):
            with_heads = _query_heads(stage, q, k)
            keys.take(number)
            to = out[:, with_heads], lse[:, with_heads]
            with turns.of(number):
                keys.arrive()
                if not plan.once and number % plan.stages_of_a_share == 0:
                    merging = _Merged(plan, *to)
                _attend_in(plan, number, options, q, keys, sinks, with_heads, to, merging)
                if merging is not None and (number + 1) % plan.stages_of_a_share == 0:
                    merging.finish()
    return lse


class _Turns:
    """A stream on which stages take turns with the current one; or the current one for all.

    Shares of the heads take turns: while SMs compute the last tiles of one, others begin with the
    next. Both wait for each other at the end of the context. Until then what both read is kept;
    then either may reuse its memory, the other one in a call from any stream.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._beside = None if device is None else _stream_beside(device)

    def __bool__(self) -> bool:
        return self._beside is not None

    def of(self, number: int) -> contextlib.AbstractContextManager[None]:
        """The stream of a stage."""
        if self._beside is None or number % 2:
            return contextlib.nullcontext()
        return torch.cuda.stream(self._beside)

    def now(self) -> torch.cuda.Event | None:
        """The current stream up to here."""
        if self._beside is None:
            return None
        event: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return event

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        if self._beside is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._beside)
            self._beside.wait_stream(current)


@functools.cache
def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


_MOST_TURNS = 3  # shares of the heads; there are more of them only for lack of memory


def _turns_of(
    plan: Plan, stages: Sequence[Stage], group: dist.ProcessGroup | None, device: torch.device
) -> _Turns:
    shares = plan.stages_of_a_share == 1 and 1 < len(stages) <= _MOST_TURNS
    in_turns = shares and device.type == "cuda" and _exchange.carries(group, device)
    return _Turns(device if in_turns else None)


def _attend_in(
    plan: Plan, number: int, options: Options, q: Tensor, keys: _Arrivals, sinks: Tensor | None,
    heads: slice, to: tuple[Tensor, Tensor], merging: _Merged | None,
) -> None:  # fmt: skip
    """The calls of a stage for its query heads; their results go to `to` or to what is merged."""
    stage, (out, lse) = plan.stages[number], to
    for place, part in enumerate(_parts(stage, q)):
        call = part.call
        rows = slice(call.q0, call.q1)
        key = (number % plan.stages_of_a_share, place)
        arguments = _arguments(plan, stage, call, key, heads, options, q.device)
        if sinks is not None and part.first:
            arguments["sinks"] = sinks[heads]
        given = _operands(call, q[:, heads, rows], keys.k, keys.v)
        if merging is None:
            lse[:, :, rows] = _attend(arguments, call, given, out[:, :, rows])[1]
            continue
        shape = options, key, q.dtype, q.device, q.shape, keys.k.shape, keys.v.shape, sinks is None
        if shape not in plan.in_f32:
            plan.in_f32[shape] = _can_be_f32(given, arguments)
        if plan.in_f32[shape]:
            arguments["out_dtype"] = torch.float32
        merging.add(call, *_attend(arguments, call, given))


# Partial outputs that are kept before they are merged: at most so many, and so many bytes. More of
# them take less of the memory's time.
_MOST_PARTS, _BYTES_OF_PARTS = 4, 1 << 30


class _Merged:
    """Partial outputs of rows, which are merged in float32, several at once, and rounded once."""

    def __init__(self, plan: Plan, out: Tensor, lse: Tensor) -> None:
        self._out, self._lse = out, lse
        self._sum: Tensor | None = None  # of parts that were merged already
        self._parts: list[tuple[int, int, Tensor, Tensor]] = []  # first row, end, output, lse
        for start, end in plan.untouched:  # what they hold is a part
            rows = slice(start, end)
            self._parts.append((start, end, out[:, :, rows].clone(), lse[:, :, rows].clone()))

    def add(self, call: Call, part: Tensor, lse: Tensor) -> None:
        self._parts.append((call.q0, call.q1, part, lse))
        kept = sum(x.numel() * x.element_size() for _, _, x, _ in self._parts)
        if len(self._parts) > _MOST_PARTS or (kept > _BYTES_OF_PARTS and len(self._parts) > 1):
            wide = torch.promote_types(part.dtype, torch.float32)
            total = self._sum
            if total is None:
                total = self._out.new_empty(self._out.shape, dtype=wide)
            self._merge(total)
            self._sum = total

    def finish(self) -> None:
        self._merge(self._out)

    def _merge(self, target: Tensor) -> None:
        """Merges what there is into `target`, for rows of the same parts at a time."""
        edges = sorted({x for part in self._parts for x in part[:2]} | {0, target.shape[2]})
        before = self._sum
        for start, end in itertools.pairwise(edges):
            parts = [p for p in self._parts if p[0] <= start and end <= p[1]]
            outs = [out[:, :, start - q0 : end - q0] for q0, _, out, _ in parts]
            lses = [lse[:, :, start - q0 : end - q0] for q0, _, _, lse in parts]
            if before is not None:
                outs.insert(0, before[:, :, start:end])
                lses.insert(0, self._lse[:, :, start:end])
            here = target[:, :, start:end]
            if outs:
                self._lse[:, :, start:end] = _merge.merge_into(outs, lses, here)
            else:  # rows whose first part is still to come
                here.zero_()
                self._lse[:, :, start:end] = -torch.inf
        self._parts = []


def _operands(call: Call, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """q, k and v of one call, of its rows and of the keys of its stage."""
    if isinstance(call, Dense):
        k, v = (x[:, :, call.k0 : call.k1] for x in (k, v))
    return [_rows_first(x) for x in (q, k, v)] if isinstance(call, Packed) else [q, k, v]


def _attend(
    arguments: dict[str, Any], call: Call, given: list[Tensor], into: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The output, in `into` if that is given, and the log-sum-exps of one call."""
    packed = isinstance(call, Packed)
    if packed and into is not None:
        into = _rows_first(into)
    out, lse = attention(*given, out=into, return_lse=True, **arguments)
    return (out.transpose(0, 1)[None], lse[None]) if packed else (out, lse)


def _can_be_f32(given: list[Tensor], arguments: dict[str, Any]) -> bool:
    """Whether a call of 16-bit inputs can have a float32 output at little cost. PyTorch's fused
    kernels cannot; on the CPU its plain operations can.
    """
    if given[0].element_size() != 2:
        return False
    try:
        chosen = explain(*given, return_lse=True, out_dtype=torch.float32, **arguments).chosen
    except (ForcedImplementationError, NotCompiledError):
        return False
    return chosen != TORCH or not given[0].is_cuda


def _rows_first(x: Tensor) -> Tensor:
    """A tensor "bhnd" with a batch of 1 as a packed one."""
    return x[0].transpose(0, 1)


def check(
    plan: Plan, options: Options, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None,
    differentiated: bool,
) -> None:  # fmt: skip
    """Raises what the calls of a plan would raise because of a forced implementation or of
    ARCHFLASH_FALLBACK=error. It launches nothing.

    Args:
        q, k, v: of the shapes of the plan's rows; their values do not matter.
        differentiated: whether there will be a backward pass.
    """
    key = (options, q.shape, k.shape, v.shape, q.dtype, q.device, sinks is None, differentiated)
    if key in plan.checked:
        return
    for back, stages in ((False, plan.stages), (True, plan.stages_back)):
        for number, stage in enumerate(stages if differentiated or not back else ()):
            heads = _query_heads(stage, q, k)
            own = slice(*stage.heads)
            keys = [
                x.new_empty((stage.key_rows, x.shape[0], own.stop - own.start, x.shape[3]))
                for x in (k, v)
            ]
            keys = [x.permute(1, 2, 0, 3) for x in keys]
            for place, part in enumerate(_parts(stage, q)):
                apart = part.call.apart if back and isinstance(part.call, Packed) else (part.call,)
                for which, call in enumerate(apart):
                    at = (number % plan.stages_of_a_share, place) + ((which,) if back else ())
                    arguments = _arguments(plan, stage, call, at, heads, options, q.device)
                    if sinks is not None and part.first and not back:
                        arguments["sinks"] = sinks[heads]
                    given = _operands(call, q[:, heads, call.q0 : call.q1], *keys)
                    decision = explain(*given, backward=back, return_lse=True, **arguments)
                    if decision.fallback:
                        note_fallback("one of the calls of attention over ranks")
    plan.checked.add(key)


def backward(
    plan: Plan, group: dist.ProcessGroup | None, options: Options,
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of `forward`: that of q, and those of k and v ``(rows, batch, heads, d + dv)``
    in float32 (float64 for float64).
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    dq = torch.empty_like(q, dtype=q.dtype if plan.once else wide)
    total = _buffer(plan.rows, k, v, wide)
    turns = _turns_of(plan, plan.stages_back, group, q.device)
    keys = _Arrivals(plan, plan.stages_back, group, k, v, turns)
    back: _Returned | None = None
    kept = []
    with turns:
        for number, stage in enumerate(plan.stages_back):
            # What the last stage gave travels with keys while this one is computed; in turns it
            # does not wait for keys, which are there.
            keys.take(number, None if turns else back)
            heads = _query_heads(stage, q, k)
            given = [None if x is None else x[:, heads] for x in (dout, q, out, lse, dlse, dq)]
            if number % plan.stages_of_a_share == 0:
                of_q = _Fresh(dq[:, heads], 2)
                own = _Fresh(total[:, :, slice(*stage.heads)], 0)
            with turns.of(number):
                keys.arrive()
                alone = _alone(plan, stage)
                if alone is not None:
                    found = own.rows(*alone)
                else:
                    found = _Fresh(_buffer(stage.key_rows, keys.k, keys.v, wide), 0)
                _differentiate_in(plan, number, options, heads, given, keys, of_q, found)
                following = _Returned(plan, stage, found, own, alone is None)
                if (number + 1) % plan.stages_of_a_share == 0:
                    of_q.clear()
                    own.clear()
                if turns or number + 1 == len(plan.stages_back):
                    following.start(group)
            if back is not None:
                back.add()
            back = following
            if turns:
                kept.append(back)
        if back is not None:
            back.add()
    return dq, total


class _Fresh:
    """A gradient, and which of its rows hold nothing yet: the first call writes to them, others add
    to what they hold.
    """

    def __init__(self, x: Tensor, dim: int) -> None:
        self.x, self._dim = x, dim
        self._left = [(0, x.shape[dim])]

    def rows(self, start: int, end: int) -> _Fresh:
        """Some rows, which count as written from here on."""
        part = _Fresh(self.x.narrow(self._dim, start, end - start), self._dim)
        part._left = [(a - start, b - start) for a, b in overlaps(self._left, [(start, end)])]
        self.wrote(start, end)
        return part

    def holds_none(self, start: int, end: int) -> bool:
        return any(a <= start and end <= b for a, b in self._left)

    def wrote(self, start: int, end: int) -> None:
        cut = [piece for a, b in self._left for piece in ((a, min(b, start)), (max(a, end), b))]
        self._left = [(a, b) for a, b in cut if a < b]

    def clear(self, start: int = 0, end: int | None = None) -> None:
        """Lets rows that hold nothing hold 0."""
        end = self.x.shape[self._dim] if end is None else end
        for a, b in overlaps(self._left, [(start, end)]):
            self.x.narrow(self._dim, a, b - a).zero_()
        self.wrote(start, end)


def _differentiate_in(
    plan: Plan, number: int, options: Options, heads: slice, given: Sequence[Any],
    keys: _Arrivals, of_q: _Fresh, found: _Fresh,
) -> None:  # fmt: skip
    """The gradients of the calls of a stage for its query heads, those of its keys in `found`.

    Args:
        given: of these heads dout, q, out, lse, dlse or None, and dq.
        of_q: the last of them.
    """
    stage, all_keys = plan.stages_back[number], (0, plan.stages_back[number].key_rows)
    calls = []
    for place, part in enumerate(_parts(stage, given[1])):
        apart = part.call.apart if isinstance(part.call, Packed) else (part.call,)
        for which, call in enumerate(apart):
            span = (call.k0, call.k1) if isinstance(call, Dense) else all_keys
            calls.append((call, (number % plan.stages_of_a_share, place, which), span))
    # That of the most keys comes first: it can write all of their gradients.
    for call, key, span in sorted(calls, key=lambda x: x[2][0] - x[2][1]):
        rows = call.q0, call.q1
        first = of_q.holds_none(*rows) and found.holds_none(*span)
        for x, touched in ((of_q, rows), (found, span)):
            (x.wrote if first else x.clear)(*touched)
        arguments = _arguments(plan, stage, call, key, heads, options, given[1].device)
        arguments |= {"accumulate": not first, "deterministic": options.deterministic}
        parts = [None if x is None else x[:, :, slice(*rows)] for x in given]
        _differentiate(arguments, call, parts, keys, found.x)
    found.clear()


def _differentiate(
    arguments: dict[str, Any], call: Call, given: Sequence[Any], keys: _Arrivals, found: Tensor
) -> None:
    dout, q, out, lse, dlse, dq = given
    k, v = keys.k, keys.v
    dk, dv = columns(found, k.shape[-1])
    if isinstance(call, Dense):
        k, v, dk, dv = (x[:, :, call.k0 : call.k1] for x in (k, v, dk, dv))
    if isinstance(call, Packed):
        dout, q, out, dq, k, v, dk, dv = map(_rows_first, (dout, q, out, dq, k, v, dk, dv))
        lse, dlse = lse[0], None if dlse is None else dlse[0]
    attention_backward(
        dout, q, k, v, out, lse.contiguous(), dlse=None if dlse is None else dlse.contiguous(),
        dq=dq, dk=dk, dv=dv, **arguments,
    )  # fmt: skip


def _query_heads(stage: Stage, q: Tensor, k: Tensor) -> slice:
    shared = q.shape[1] // max(1, k.shape[1])
    return slice(stage.heads[0] * shared, stage.heads[1] * shared)


def _parts(stage: Stage, q: Tensor) -> tuple[Part, ...]:
    """The calls of a stage: none where a rank has no heads, or the batch is empty."""
    return stage.parts if q.numel() else ()


def _arguments(
    plan: Plan, stage: Stage, call: Call, key: tuple[int, ...], heads: slice, options: Options,
    device: torch.device,
) -> dict[str, Any]:  # fmt: skip
    """The options of one call. key: numbers of the stage, the part, and the call of that."""
    given: dict[str, Any] = {
        "softcap": options.softcap, "scale": options.scale,
        "implementation": options.implementation,
    }  # fmt: skip
    table = (*key, device)
    if isinstance(call, Dense):
        given |= _bounds(call)
        if not call.bottom_right:
            given["q_offset"] = call.offset
    elif isinstance(call, Packed):
        tables = plan.table(table, lambda: _packed_tables(call, device))
        given |= _bounds(call.calls[0])
        given |= {"cu_seqlens_q": tables[0], "cu_seqlens_k": tables[1]}
        given["max_seqlen_q"] = max(c.q1 - c.q0 for c in call.calls)
        given["max_seqlen_k"] = max(c.k1 - c.k0 for c in call.calls)
    else:
        ranges = plan.table(table, lambda: (_ranges(plan, stage, device),))[0]
        given["key_ranges"] = ranges[:, heads] if ranges.shape[1] > 1 else ranges
    return given


def _bounds(call: Dense) -> dict[str, Any]:
    if call.plain:
        return {}
    if call.right == 0:
        return {"causal": True} | ({} if call.left is None else {"window": (call.left, None)})
    return {"window": (call.left, call.right)}


def _packed_tables(call: Packed, device: torch.device) -> tuple[Tensor, Tensor]:
    """cu_seqlens of q, counted from the first row of the call, and of k. Between two sequences
    stand one of rows without keys and one of keys without rows, which step over what lies between.
    """
    of_q: list[int] = []
    of_k: list[int] = []
    for c in call.calls:
        if of_q:
            of_q += [c.q0 - call.q0] * 2
            of_k += [of_k[-1], c.k0]
        else:
            of_q.append(c.q0 - call.q0)
            of_k.append(c.k0)
        of_q.append(c.q1 - call.q0)
        of_k.append(c.k1)
    made = torch.tensor([of_q, of_k], dtype=torch.int32).to(device)
    return made[0], made[1]


def _ranges(plan: Plan, stage: Stage, device: torch.device) -> Tensor:
    """key_ranges of all local rows for the keys of a stage's buffer."""
    rows = plan.shards.positions(plan.rank).to(device)
    wanted = plan.mask.row_ranges(rows)
    ranges = [torch.arange(start, end, device=device) for start, end in stage.keys]
    return torch.searchsorted(torch.cat(ranges), wanted.contiguous()).int()


def columns(x: Tensor, d: int) -> tuple[Tensor, Tensor]:
    """k and v, or their gradients, "bhnd" in a buffer."""
    x = x.permute(1, 2, 0, 3)
    return x[..., :d], x[..., d:]


def _buffer(rows: int, k: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
    """A buffer for rows of k and v "bhnd", or for their gradients."""
    return k.new_empty((rows, *k.shape[:2], k.shape[-1] + v.shape[-1]), dtype=dtype)


def _alone(plan: Plan, stage: Stage) -> Piece | None:
    """Where the keys of a stage stand among the rank's own, if it needs no others and these are
    neighbours.
    """
    if stage.receives:
        return None
    local = plan.local(stage.own)
    if not local:
        return (0, 0)
    if any(a[1] != b[0] for a, b in itertools.pairwise(local)):
        return None
    return local[0][0], local[-1][1]


class _Arrivals:
    """The keys of the stages, of which the next one's are under way, or in turns all others'.

    Attributes:
        k, v: "bhnd", of the stage that was taken last.
    """

    def __init__(
        self, plan: Plan, stages: Sequence[Stage], group: dist.ProcessGroup | None, k: Tensor,
        v: Tensor, turns: _Turns,
    ) -> None:  # fmt: skip
        self._plan, self._stages, self._group, self._k, self._v = plan, stages, group, k, v
        self._turns = turns
        self.k, self.v = k, v
        # The own keys and values of the heads of a share, as they travel.
        self._sent: tuple[Piece, list[Tensor]] | None = None
        self._together = plan.stages_of_a_share == 1
        # K and V of the stages that are still to be taken (with turns, of every stage), each with
        # the messages that bring them.
        self._coming: list[tuple[Tensor, Tensor, _exchange.Pending]] = []
        self._asked = 0  # stages whose messages were started
        self._pending, self._behind = _exchange.Pending(), _exchange.Pending()

    def take(self, number: int, back: _Returned | None = None) -> None:
        """Turns to the keys of a stage. Starts the messages of the next one, and those of `back`
        with them: what one kernel of NCCL sends needs SMs once.
        """
        if number == 0:
            self._ask(1)
        self.k, self.v, self._pending = self._coming[number] if self._turns else self._coming.pop()
        self._behind = self._ask(len(self._stages) if self._turns else number + 2, back)
        if number == 0:
            # Attention on all SMs would let copies wait, and the messages that wait for these.
            self._pending.after = self._behind.after = self._turns.now()
        if back is not None:
            back.pending = self._behind

    def arrive(self) -> None:
        """Lets the current stream wait for the keys of the stage that was taken."""
        self._pending.wait()
        self._behind.let_start()

    def _ask(self, end: int, back: _Returned | None = None) -> _exchange.Pending:
        """Starts the messages of the stages up to `end`, and those of `back`, at once."""
        sends, receives = ([], []) if back is None else ([*back.sends], [*back.receives])
        made = []
        for number in range(self._asked, min(end, len(self._stages))):
            k, v, of_stage, to_stage = self._prepare(number)
            made.append((k, v))
            sends += of_stage
            receives += to_stage
        self._asked += len(made)
        pending = _exchange.start(self._group, sends, receives)
        self._coming += [(k, v, pending) for k, v in made]
        return pending

    def _prepare(
        self, number: int
    ) -> tuple[Tensor, Tensor, list[_exchange.Message], list[_exchange.Message]]:
        """k and v of a stage, and the messages that bring them."""
        stage = self._stages[number]
        heads = slice(*stage.heads)
        alone = _alone(self._plan, stage)
        if alone is not None:
            k, v = (x[:, heads, slice(*alone)] for x in (self._k, self._v))
            return k, v, self._sends(stage, heads), []
        tensors, (k, v) = self._room(stage.key_rows, heads)
        own = zip(places(stage.keys, stage.own), self._plan.local(stage.own), strict=True)
        for (a, b), (start, end) in own:
            k[:, :, a:b] = self._k[:, heads, start:end]
            v[:, :, a:b] = self._v[:, heads, start:end]
        if all(overlaps(stage.own, pieces) == list(pieces) for _, pieces in stage.sends):
            sends = _messages(stage.keys, stage.sends, tensors)
        else:
            sends = self._sends(stage, heads)
        return k, v, sends, _messages(stage.keys, stage.receives, tensors)

    def _sends(self, stage: Stage, heads: slice) -> list[_exchange.Message]:
        """What a stage sends, from the rank's own keys and values as they travel."""
        if not stage.sends:
            return []
        share = (heads.start, heads.stop)
        if self._sent is None or self._sent[0] != share:
            k, v = self._k[:, heads], self._v[:, heads]
            if self._together:
                own, to = self._room(self._plan.rows, heads)
                to[0].copy_(k), to[1].copy_(v)
            else:
                own = [x.permute(2, 0, 1, 3).contiguous() for x in (k, v)]
            self._sent = share, own
        return _messages(self._plan.shards.pieces[self._plan.rank], stage.sends, self._sent[1])

    def _room(self, rows: int, heads: slice) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
        """New tensors for keys and values as they travel, and both "bhnd" in them."""
        k, v = self._k[:, heads], self._v[:, heads]
        if self._together:
            both = _buffer(rows, k, v, k.dtype)
            return [both], columns(both, k.shape[3])
        apart = [x.new_empty((rows, *x.shape[:2], x.shape[3])) for x in (k, v)]
        return apart, (apart[0].permute(1, 2, 0, 3), apart[1].permute(1, 2, 0, 3))


def _messages(
    held: Sequence[Piece], by_rank: Sequence[tuple[int, tuple[Piece, ...]]],
    tensors: Sequence[Tensor],
) -> list[_exchange.Message]:  # fmt: skip
    """Global rows of tensors that hold those of `held`, with rows first, for each rank."""
    return [
        (rank, x[a:b]) for rank, pieces in by_rank for a, b in places(held, pieces) for x in tensors
    ]


class _Returned:
    """Gradients of a stage's keys on their way to the ranks that hold these."""

    def __init__(
        self, plan: Plan, stage: Stage, found: _Fresh, own: _Fresh, adds_own: bool
    ) -> None:
        self._own = own.x
        self.sends = _messages(stage.keys, stage.receives, [found.x])
        if adds_own:
            for (a, b), (start, end) in zip(
                places(stage.keys, stage.own), plan.local(stage.own), strict=True
            ):
                if own.holds_none(start, end):
                    own.x[start:end] = found.x[a:b]
                    own.wrote(start, end)
                else:
                    own.clear(start, end)
                    own.x[start:end] += found.x[a:b]
        self._received = []
        for rank, pieces in stage.sends:
            for start, end in plan.local(pieces):
                own.clear(start, end)
                x = own.x.new_empty((end - start, *own.x.shape[1:]))
                self._received.append((rank, (start, end), x))
        self.receives = [(rank, x) for rank, _, x in self._received]
        self.pending = _exchange.Pending()  # once these messages are under way

    def start(self, group: dist.ProcessGroup | None) -> None:
        self.pending = _exchange.start(group, self.sends, self.receives)

    def add(self) -> None:
        """Adds what other ranks found, in the order of the plan."""
        self.pending.wait()
        for _, (start, end), x in self._received:
            self._own[start:end] += x
