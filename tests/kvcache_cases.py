"""Calls of attention_with_kvcache for tests: caches whose unused slots are NaN, page tables in no
order, and the judgement of what a call returned and wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from archflash import reference
from archflash._packed_rows import ROW_BYTES

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class CacheCall:
    """The tensors and options of a call."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    options: dict[str, Any] = field(default_factory=dict)

    def copied(self) -> CacheCall:
        """The same call with caches of its own, in the same strides."""
        k, v = (
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)
            for x in (self.k_cache, self.v_cache)
        )
        return replace(self, k_cache=k, v_cache=v)

    def with_options(self, **options: Any) -> CacheCall:
        return replace(self, options={**self.options, **options})


def make(
    lengths: Sequence[int], *, nq: int = 1, heads: tuple[int, int] = (4, 2), d: int = 64,
    dv: int | None = None, capacity: int = 96, page_size: int | None = None, n_new: int = 0,
    leftpad: Sequence[int] | None = None, rows_of: Sequence[int] | None = None,
    q_lengths: Sequence[int] | None = None, rotary: int = 0, qv: bool = False,
    dtype: torch.dtype = torch.float32, cache_dtype: torch.dtype | None = None,
    shared_pages: int = 0, layout: str = "bnhd", device: str = "cpu", seed: int = 0, **options: Any,
) -> CacheCall:  # fmt: skip
    """A call for sequences of these lengths (before the append).

    Args:
        lengths: valid rows of each sequence.
        nq: query rows of each sequence, unless q_lengths are given.
        heads: of q and of the caches.
        capacity: rows that a sequence has room for.
        page_size: of a paged cache; None for a contiguous one.
        n_new: rows to append.
        leftpad, rows_of: leftpad_k and cache_batch_idx.
        q_lengths: query rows of each sequence, packed.
        rotary: columns to rotate.
        qv: with a second query.
        cache_dtype: of the caches; default dtype.
        shared_pages: so many of the first pages are those of sequence 0 for all sequences.
        **options: other options of the call.
    """
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    def int32(values: Any) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int32).to(device)

    batch, (heads_q, heads_kv), dv = len(lengths), heads, dv or d
    kind = cache_dtype or dtype
    first = leftpad or [0] * batch
    options = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in options.items()}
    options["cache_seqlens"] = int32(list(lengths))
    if page_size is None:
        blocks, rows = (batch if rows_of is None else max(rows_of) + 2), capacity
    else:
        pages = -(-capacity // page_size)
        blocks, rows = batch * pages + 3, page_size
        order = torch.randperm(blocks, generator=generator)[: batch * pages].reshape(batch, pages)
        order[:, :shared_pages] = order[0, :shared_pages]
        options["page_table"] = int32(order)
    caches = [torch.full((blocks, rows, heads_kv, n), torch.nan, dtype=kind) for n in (d, dv)]
    for number, length in enumerate(lengths):
        for row in range(first[number], length):
            if page_size is None:
                place = (number if rows_of is None else rows_of[number], row)
            else:
                place = (int(order[number, row // page_size]), row % page_size)
            for cache, n in zip(caches, (d, dv), strict=True):
                cache[place] = rand(heads_kv, n, dtype=torch.float32).cpu().to(kind)
    if rows_of is not None:
        options["cache_batch_idx"] = int32(list(rows_of))
    if leftpad is not None:
        options["leftpad_k"] = int32(list(leftpad))
    if n_new:
        options["k_new"] = rand(batch, n_new, heads_kv, d, dtype=torch.float32).to(kind)
        options["v_new"] = rand(batch, n_new, heads_kv, dv, dtype=torch.float32).to(kind)
    if rotary:
        angles = torch.randn(capacity + 8, rotary // 2, generator=generator).to(device)
        options["rotary_cos"], options["rotary_sin"] = angles.cos(), angles.sin()
    if q_lengths is not None:
        ends = torch.tensor([0, *q_lengths]).cumsum(0)
        options["cu_seqlens_q"] = int32(ends)
        rows_of_q = [int(ends[-1]) + 2]  # the last two rows belong to no sequence
    else:
        rows_of_q = [batch, nq]
    q = rand(*rows_of_q, heads_q, d)
    if qv:
        options["qv"] = rand(*rows_of_q, heads_q, dv)
    caches = [cache.to(device) for cache in caches]
    if layout == "bhnd":
        options["layout"] = "bhnd"
        caches = [cache.transpose(1, 2).contiguous() for cache in caches]
        for name in ("k_new", "v_new"):
            if name in options:
                options[name] = options[name].transpose(1, 2).contiguous()
        if q_lengths is None:
            q = q.transpose(1, 2).contiguous()
            if qv:
                options["qv"] = options["qv"].transpose(1, 2).contiguous()
    return CacheCall(q, caches[0], caches[1], options)


def with_places(call: CacheCall) -> CacheCall:
    """A call with pages and lists of positions as one whose lists name places in the cache."""
    options = dict(call.options)
    table, lengths = options.pop("page_table").long(), options.pop("cache_seqlens").long()
    lists = options["key_indices"].expand(len(lengths), -1, -1, -1)
    size = call.k_cache.shape[1 if options.get("layout") != "bhnd" else 2]
    named = (lists >= 0) & (lists < lengths[:, None, None, None])
    at = torch.where(named, lists, 0).long()
    page = table[torch.arange(len(lengths), device=at.device)[:, None, None, None], at // size]
    places = torch.where(named, page * size + at % size, -1).int()
    return CacheCall(call.q, call.k_cache, call.v_cache, options).with_options(
        key_indices=places, physical_indices=True
    )


def packed_cache(form: str, pages: int, size: int, *, seed: int, device: str) -> Tensor:
    """Packed latent rows of random numbers, ``(pages, size, 1, bytes of a row)``."""
    generator = torch.Generator().manual_seed(seed)
    width = ROW_BYTES[form]
    length = size * width
    memory = torch.randint(0, 255, (pages, -(-length // 576) * 576), generator=generator)
    memory = memory.masked_fill(memory % 128 == 127, 5).byte()  # no NaN
    if form == "fp8_656":
        memory = memory[:, :length].contiguous()
    cache = memory[:, :length].unflatten(1, (size, 1, width))
    rest = torch.randn(pages, size, 64, generator=generator).bfloat16()
    if form == "fp8_656":
        scales = torch.rand(pages, size, 1, 4, generator=generator) / 64
        cache[..., 512:528] = scales.view(torch.uint8)
        cache[..., 528:] = rest[:, :, None].view(torch.uint8)
    else:
        memory[:, : size * 576].unflatten(1, (size, 576))[..., 448:] = rest.view(torch.uint8)
        memory[:, size * 576 : length] = memory[:, size * 576 : length] % 6 + 118
    return memory.to(device)[:, :length].unflatten(1, (size, 1, width))


def with_latent_rows(call: CacheCall, form: str | None) -> CacheCall:
    """A call with qv, of 64 and 512 columns, whose K and V are parts of the same rows, or of packed
    ones.
    """
    if form is None:
        both = torch.cat([call.v_cache, call.k_cache], -1)
        return replace(call, k_cache=both[..., 512:], v_cache=both[..., :512])
    pages, size = call.k_cache.shape[:2]
    cache = packed_cache(form, pages, size, seed=0, device=str(call.q.device))
    cache = cache.view(torch.float8_e4m3fn)
    options = {"scale": (576 if form == "fp8_656" else 512) ** -0.5, **call.options}
    return CacheCall(call.q, cache, cache, {**options, "packed_rows": form})


def as_given(call: CacheCall) -> tuple[list[Tensor | None], dict[str, Any]]:
    """What attention_with_kvcache is given for a call: with packed rows, q in one."""
    options = dict(call.options)
    form = options.get("packed_rows")
    if form is None:
        return [call.q, call.k_cache, call.v_cache], options
    qv = options.pop("qv")
    q = torch.cat([qv, call.q], -1) if form == "fp8_656" else qv
    return [q, call.k_cache, None], options


def random_mask(*shape: int) -> Tensor:
    """An attn_mask that keeps most keys."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(5)) < 0.7


def random_ranges(*shape: int) -> Tensor:
    """key_ranges, some of them empty, and some beyond the keys."""
    generator = torch.Generator().manual_seed(6)
    begin = torch.randint(-20, 200, shape, generator=generator)
    length = torch.randint(-5, 60, shape, generator=generator)
    return torch.stack([begin, begin + length], -1).int()


@dataclass(frozen=True)
class Exact:
    """What a call returns and writes in float64, and what plain operations return."""

    out: Tensor
    lse: Tensor
    baseline: Tensor
    caches: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, call: CacheCall) -> Exact:
        tensors = (call.q, call.k_cache, call.v_cache)
        out, lse = reference.attention_with_kvcache(*tensors, **call.options)
        baseline = reference.baseline_with_kvcache(*tensors, **call.options)
        return cls(out, lse, baseline, reference.appended(*tensors[1:], **call.options))


def check(
    call: CacheCall,
    serve: Callable[[CacheCall], tuple[Tensor, Tensor]],
    slack: float = 0.0,
    exact: Callable[[], Exact] | None = None,
) -> Tensor:
    """Serves a call on copies of its caches, and judges the output, the log-sum-exp and what was
    written to the caches. Returns the output.

    Args:
        call: the call.
        serve: gives its output and log-sum-exp.
        slack: an output or log-sum-exp is also right with no error above so many times the rule's
            bound.
        exact: gives the call's exact results, if they are known.
    """
    mine = call.copied()
    out, lse = serve(mine)
    expected = Exact.of(call) if exact is None else exact()
    report = reference.check(out, expected.out, expected.baseline)
    assert report.ok or report.max_error <= slack * report.bound, report
    rotated = call.options.get("rotary_cos") is not None and call.q.dtype != torch.float64
    # A rotation rounds q and k to their dtype, which the exact log-sum-exp does not.
    more = 16 * float(torch.finfo(call.q.dtype).eps) if rotated else 0.0
    of_lse = reference.check_lse(lse, expected.lse, more)
    assert of_lse.ok or of_lse.max_error <= slack * of_lse.bound, of_lse
    for after, want in zip((mine.k_cache, mine.v_cache), expected.caches, strict=True):
        assert_written_like(after, want)
    return out


def assert_written_like(after: Tensor, want: Tensor) -> None:
    """Equal but for the last bit of a rotated number; NaN where the reference has NaN."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[after.element_size()]
    other = after.view(bits) != want.view(bits)
    if not bool(other.any()):
        return
    both_nan = after.float().isnan() & want.float().isnan()
    wrong = other & ~both_nan
    error = (after.double() - want.double()).abs()
    info = torch.finfo(after.dtype)
    bound = 2 * info.eps * want.double().abs() + 4 * info.eps
    assert not bool((wrong & ~(error <= bound)).any())
