"""Ring and all-gather: a rank's rows against keys of other ranks, a stage after the other, while
the next stage's keys are under way.

Beside the rank's own rows there are at most keys and values of two stages at a time: those that are
computed with, and those under way; and in a ring the own ones once more where rows are not
outermost in memory ("bhnd", or a batch).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from archflash._api import attention, explain
from archflash._backward import attention_backward
from archflash._dispatch import note_fallback
from archflash._errors import ForcedImplementationError, NotCompiledError
from archflash._registry import TORCH
from archflash.distributed._agree import Agreement
from archflash.distributed._calls import Call, Dense, Packed
from archflash.distributed._partial import Fresh, Merged
from archflash.distributed._plan import Part, Plan, Stage
from archflash.distributed._shards import rows_of
from archflash.distributed._travel import Arrivals, Returned, buffer_of, columns, where_alone
from archflash.distributed._turns import turns_of


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
    agreement: Agreement | None = None,
) -> Tensor:  # fmt: skip
    """Attention of the local rows, "bhnd". Writes `out`, and returns the log-sum-exps.

    Args:
        agreement: asked for before an exchange of all ranks.
    """
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    for start, end in plan.untouched:
        out[:, :, start:end] = 0
        lse[:, :, start:end] = -torch.inf if sinks is None else sinks[:, None]
    turns, merging = turns_of(plan, plan.stages, group, q.device), None
    keys = Arrivals(plan, plan.stages, group, k, v, turns, agreement)
    with turns:
        for number, stage in enumerate(plan.stages):
            with_heads = _query_heads(stage, q, k)
            keys.take(number)
            to = _part(out, 1, with_heads), _part(lse, 1, with_heads)
            with turns.of(number):
                keys.arrive()
                if not plan.once and number % plan.stages_of_a_share == 0:
                    merging = Merged(plan, *to)
                _attend_in(plan, number, options, q, keys, sinks, with_heads, to, merging)
                if merging is not None and (number + 1) % plan.stages_of_a_share == 0:
                    merging.finish()
    return lse


def _attend_in(
    plan: Plan, number: int, options: Options, q: Tensor, keys: Arrivals, sinks: Tensor | None,
    heads: slice, to: tuple[Tensor, Tensor], merging: Merged | None,
) -> None:  # fmt: skip
    """The calls of a stage for its query heads; their results go to `to` or to what is merged."""
    stage, (out, lse) = plan.stages[number], to
    q = _part(q, 1, heads)
    for place, part in enumerate(_parts(stage, q)):
        call = part.call
        rows = slice(call.q0, call.q1)
        key = (number % plan.stages_of_a_share, place)
        arguments = _arguments(plan, stage, call, key, heads, options, q.device)
        if sinks is not None and part.first:
            arguments["sinks"] = sinks[heads]
        given = _operands(call, _part(q, 2, rows), keys.k, keys.v)
        if merging is None:
            found = _attend(arguments, call, given, _part(out, 2, rows))[1]
            _part(lse, 2, rows).copy_(found)
            continue
        shape = options, key, q.dtype, q.device, q.shape, keys.k.shape, keys.v.shape, sinks is None
        if shape not in plan.in_f32:
            plan.in_f32[shape] = _can_be_f32(given, arguments)
        if plan.in_f32[shape]:
            arguments["out_dtype"] = torch.float32
        merging.add(call, *_attend(arguments, call, given))


def _operands(call: Call, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """q, k and v of one call, of its rows and of the keys of its stage."""
    if isinstance(call, Dense):
        k, v = (_part(x, 2, slice(call.k0, call.k1)) for x in (k, v))
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
    agreement: Agreement | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of `forward`: that of q, and those of k and v ``(rows, batch, heads, d + dv)``
    in float32 (float64 for float64).
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    dq = torch.empty_like(q, dtype=q.dtype if plan.once else wide)
    total = buffer_of(plan.rows, k, v, wide)
    turns = turns_of(plan, plan.stages_back, group, q.device)
    keys = Arrivals(plan, plan.stages_back, group, k, v, turns, agreement)
    back: Returned | None = None
    kept = []
    with turns:
        for number, stage in enumerate(plan.stages_back):
            # What the last stage gave travels with keys while this one is computed; in turns it
            # does not wait for keys, which are there.
            keys.take(number, None if turns else back)
            heads = _query_heads(stage, q, k)
            given = [x if x is None else _part(x, 1, heads) for x in (dout, q, out, lse, dlse, dq)]
            if number % plan.stages_of_a_share == 0:
                of_q = Fresh(_part(dq, 1, heads), 2)
                own = Fresh(_part(total, 2, slice(*stage.heads)), 0)
            with turns.of(number):
                keys.arrive()
                alone = where_alone(plan, stage)
                if alone is not None:
                    found = own.rows(*alone)
                else:
                    found = Fresh(buffer_of(stage.key_rows, keys.k, keys.v, wide), 0)
                _differentiate_in(plan, number, options, heads, given, keys, of_q, found)
                following = Returned(plan, stage, found, own, alone is None)
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


def _differentiate_in(
    plan: Plan, number: int, options: Options, heads: slice, given: Sequence[Any],
    keys: Arrivals, of_q: Fresh, found: Fresh,
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
            key = (number % plan.stages_of_a_share, place, which)
            calls.append((call, key, span))
    # That of the most keys comes first: it can write all of their gradients.
    for call, key, span in sorted(calls, key=lambda x: x[2][0] - x[2][1]):
        rows = call.q0, call.q1
        first = of_q.holds_none(*rows) and found.holds_none(*span)
        for x, touched in ((of_q, rows), (found, span)):
            (x.wrote if first else x.clear)(*touched)
        arguments = _arguments(plan, stage, call, key, heads, options, given[1].device)
        arguments |= {"accumulate": not first, "deterministic": options.deterministic}
        parts = [x if x is None else _part(x, 2, slice(*rows)) for x in given]
        _differentiate(arguments, call, parts, keys, found.x)
    found.clear()


def _differentiate(
    arguments: dict[str, Any], call: Call, given: Sequence[Any], keys: Arrivals, found: Tensor
) -> None:
    dout, q, out, lse, dlse, dq = given
    k, v = keys.k, keys.v
    dk, dv = columns(found, k.shape[-1])
    if isinstance(call, Dense):
        k, v, dk, dv = (_part(x, 2, slice(call.k0, call.k1)) for x in (k, v, dk, dv))
    if isinstance(call, Packed):
        dout, q, out, dq, k, v, dk, dv = map(_rows_first, (dout, q, out, dq, k, v, dk, dv))
        lse, dlse = lse[0], None if dlse is None else dlse[0]
    attention_backward(
        dout, q, k, v, out, lse.contiguous(), dlse=None if dlse is None else dlse.contiguous(),
        dq=dq, dk=dk, dv=dv, **arguments,
    )  # fmt: skip


def _part(x: Tensor, dim: int, some: slice) -> Tensor:
    """Some of a tensor in one dimension; for all of it no view is made."""
    n = some.stop - some.start
    return x if n == x.shape[dim] else x.narrow(dim, some.start, n)


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
        given["max_seqlen_q"], given["max_seqlen_k"] = call.longest
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
    made = torch.tensor([of_q, of_k], dtype=torch.int32, device=device)
    return made[0], made[1]


def _ranges(plan: Plan, stage: Stage, device: torch.device) -> Tensor:
    """key_ranges of all local rows for the keys of a stage's buffer."""
    rows = plan.shards.positions(plan.rank).to(device)
    wanted = plan.mask.row_ranges(rows)
    keys = rows_of(stage.keys).to(device)
    return torch.searchsorted(keys, wanted.contiguous()).int()
