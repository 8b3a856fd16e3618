"""archflash.warm_up: loads kernels onto a GPU before the first call that needs them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from archflash import _api, _dispatch, _quantize, _registry
from archflash import _archflash as _native
from archflash._errors import ForcedImplementationError, LaunchError, NotCompiledError

_DTYPES = tuple(getattr(torch, name) for name in _native.dtypes())


def warm_up(
    device: int | str | torch.device | None = None,
    *,
    dtypes: Sequence[torch.dtype] = (torch.float16, torch.bfloat16),
    head_dims: Sequence[int | tuple[int, int]] = (64, 128),
    implementations: Sequence[str] | None = None,
) -> list[str]:
    """Loads the kernels that calls on a GPU may need, so that their first launch does not wait.

    CUDA loads a kernel at its first launch in a process, and that launch waits until the device has
    finished all its work. After warm_up, first calls return as soon as later ones do. Call it while
    the device is idle, because it waits for the device itself. It launches nothing. Kernels of
    PyTorch, which serves some calls, are not loaded.

    Args:
        device: the CUDA device, as torch.device, "cuda:1" or its index; default torch's current
            one.
        dtypes: dtypes of q, k and v. An FP8 dtype also loads the kernels of
            `archflash.quantize_fp8`.
        head_dims: d of q, k and v in elements, or pairs (d, dv) if that of v differs.
        implementations: names of the implementations whose kernels are loaded. By default the one
            that `archflash.force` or the environment forces; if nothing is forced, all that could
            serve a call of these dtypes and head dims, whatever its lengths, number of heads,
            strides and options.

    Returns:
        The names of the kernels, sorted, with those that were loaded before. Empty if PyTorch
        serves all such calls.

    Raises:
        TypeError: dtypes, head_dims or implementations is not a sequence, or has an item of the
            wrong type.
        ValueError: a head dim below 1; a device that is not a CUDA device.
        ForcedImplementationError: no implementation has a given name, or a given implementation
            serves none of these calls on the device.
        NotCompiledError: this build lacks a given implementation.
        LaunchError: there is no GPU or no driver to load onto, or CUDA refused to load a kernel.

    Example:
        >>> import archflash, torch
        >>> if torch.cuda.is_available():
        ...     names = archflash.warm_up(dtypes=[torch.float16], head_dims=[64, (192, 128)])
    """
    pairs = _check(dtypes, head_dims, implementations)
    index = _index(device)
    with torch.device("cpu"):  # whatever the default is: no call touches the memory of its tensors
        plans = plans_by_kernel(_dispatch.query_device(index), dtypes, pairs, implementations)
    for plan in {id(plan): plan for plan in plans.values()}.values():
        _native.load_kernels(plan, index)
    return sorted(plans)


def _check(dtypes: Any, head_dims: Any, implementations: Any) -> list[tuple[int, int]]:
    """The head dims as pairs (d, dv)."""
    for name, given, example in (
        ("dtypes", dtypes, "[torch.float16]"),
        ("head_dims", head_dims, "[64, (192, 128)]"),
        ("implementations", [] if implementations is None else implementations, "['ampere']"),
    ):
        if isinstance(given, str) or not isinstance(given, Sequence):
            raise TypeError(
                f"{name} is {_native.given(given)}: it must be a sequence, such as {example}"
            )
    for dtype in dtypes:
        if dtype not in _DTYPES:
            allowed = ", ".join(str(known) for known in _DTYPES)
            raise TypeError(f"dtypes holds {_native.given(dtype)}: it may hold {allowed}")
    pairs = []
    for dims in head_dims:
        pair = dims if isinstance(dims, tuple) else (dims, dims)
        if len(pair) != 2 or not all(type(size) is int for size in pair):
            raise TypeError(
                f"head_dims holds {_native.given(dims)}: it may hold ints and pairs (d, dv) of ints"
            )
        if min(pair) < 1:
            raise ValueError(f"head_dims holds {_native.given(dims)}: head dims are 1 at least")
        pairs.append(pair)
    return pairs


def _index(device: int | str | torch.device | None) -> int:
    """The index of a CUDA device."""
    name = "cuda" if device is None else device
    try:
        asked = torch.device("cuda", name) if isinstance(name, int) else torch.device(name)
    except RuntimeError as error:  # no name of a device
        raise ValueError(
            f"device is {_native.given(device)}: it must be a CUDA device, such as 'cuda:0', or "
            "the index of one"
        ) from error
    if asked.type != "cuda":
        raise ValueError(f"device is {asked}: kernels are loaded onto CUDA devices, as 'cuda:0'")
    missing = _dispatch.driver_problem()
    if missing is None and not torch.cuda.is_available():
        missing = f"torch {torch.__version__} finds no CUDA device"
    if missing is not None:
        raise LaunchError(f"there is no GPU to load kernels onto: {missing}")
    return torch.cuda.current_device() if asked.index is None else asked.index


# --- which kernels ---


def plans_by_kernel(
    device: _native.Device,
    dtypes: Sequence[torch.dtype],
    head_dims: Sequence[tuple[int, int]],
    implementations: Sequence[str] | None = None,
) -> dict[str, _native.LaunchPlan]:
    """Each kernel that calls of these dtypes and head dims may launch on a device, with a plan that
    launches it. Raises what `warm_up` raises.

    It plans many problems, so that the rules by which a folder chooses among its kernels are not
    repeated here.
    """
    if implementations is None and (forced := _dispatch.forced()) is not None:
        implementations = (forced,)
    found: dict[str, _native.LaunchPlan] = {}
    head_dims = list(dict.fromkeys(head_dims))
    if implementations is None:
        for dtype, dims in itertools.product(dtypes, head_dims):
            for problem in _problems(device, dtype, *dims):
                _add(found, _dispatch.first_plan(problem, device))
    for name in implementations or ():
        _add_forced(found, name, device, dtypes, head_dims)
    if any(dtype.itemsize == 1 for dtype in dtypes):
        for plan in _quantize.plans(device):
            _add(found, plan)
    return found


def _add(found: dict[str, _native.LaunchPlan], plan: _native.LaunchPlan | None) -> None:
    if plan is not None:
        for kernel in plan.kernels:
            found.setdefault(kernel, plan)


def _add_forced(
    found: dict[str, _native.LaunchPlan],
    name: str,
    device: _native.Device,
    dtypes: Sequence[torch.dtype],
    head_dims: Sequence[tuple[int, int]],
) -> None:
    _dispatch.check_name(name)
    if name == _registry.TORCH:
        return
    if not _native.targets(name):
        raise NotCompiledError(
            f"{name} was left out of this build: build again with ARCHFLASH_ARCHS=all"
        )
    reasons: list[str] = []
    serves = False
    for dtype, dims in itertools.product(dtypes, head_dims):
        for problem in _problems(device, dtype, *dims):
            answer = _native.plan(name, problem, device)
            if isinstance(answer, list):
                reasons = reasons or answer
            else:
                serves = True
                _add(found, answer)
    if not serves and reasons:
        listed = "".join(f"\n  {reason}" for reason in reasons)
        raise ForcedImplementationError(
            f"{name} serves no call of these dtypes and head dims on {device.name}:{listed}"
        )


# Plans choose kernels by the query rows of a sequence, by the number of row tiles compared with the
# number of SMs, and by the keys. So these are lengths on both sides of every limit, and numbers of
# tiles from one to far more than the SMs, in steps small enough to miss no kernel.
_QUERIES = (1, 33, 65, 129, 257, 8192)
_KEYS = (64, 80, 128, 257, 577, 1025, 8192, 65536)
_HEADS_PER_SM = tuple(2 ** (step / 2) for step in range(-14, 10))


def _problems(
    device: _native.Device, dtype: torch.dtype, d: int, dv: int
) -> Iterator[_native.Problem]:
    """Problems that together launch every kernel that a call of this dtype and these head dims may
    launch.
    """
    sinks = torch.empty(1)  # with sinks, dispatch asks PyTorch's kernels after ours
    kinds: list[dict[str, Any]] = [
        {},
        {"causal": True},
        {"sinks": sinks},
        {"sinks": sinks, "causal": True},
        {"sinks": sinks, "num_splits": 1},
        {"sinks": sinks, "num_splits": 8},
    ]
    if dtype in (torch.float16, torch.bfloat16):
        state = torch.zeros(2, dtype=torch.int64)
        for causal in (False, True):
            kinds.append({"dropout_p": 0.1, "rng_state": state, "causal": causal, "sinks": sinks})
            kinds.append({"out_dtype": torch.float32, "causal": causal, "sinks": sinks})
    heads = sorted({max(1, round(device.sm_count * ratio)) for ratio in _HEADS_PER_SM})
    for nq, nk in itertools.product(_QUERIES, _KEYS):
        # The tensors are on the CPU, where nothing touches their memory. Tensors on the meta device
        # take 10 ms to read.
        one = [torch.empty(1, 1, n, dim, dtype=dtype) for n, dim in ((nq, d), (nk, d), (nk, dv))]
        # A row stride of 0, which no tensor map can have.
        repeated = one[1][:, :, :1].expand(-1, -1, nk, -1)
        for batch in heads:
            q, k, v, same_k = (x.expand(batch, -1, -1, -1) for x in (*one, repeated))
            for options in kinds:
                yield _api.make_problem(q, k, v, **options).as_if_on_cuda()
            yield _api.make_problem(q, same_k, v, sinks=sinks).as_if_on_cuda()
    if dtype in (torch.float16, torch.bfloat16):  # whose kernels go by the head dims alone
        ranges = torch.zeros(1, 1, 1, 1, 2, dtype=torch.int32)
        q, k, v = (torch.empty(1, 1, 64, dim, dtype=dtype) for dim in (d, d, dv))
        for name in _dispatch.approximating.NAMES:
            for options in ({}, {"key_ranges": ranges}):
                yield _api.make_problem(q, k, v, approximate=name, **options).as_if_on_cuda()
        yield from _packed_problems(dtype, d, dv)
    if dtype.itemsize == 1 and hasattr(torch, "float8_e8m0fnu"):
        q, k, v = (torch.empty(1, 1, 64, dim, dtype=dtype) for dim in (d, d, dv))
        columns, rows = (-(-n // _native.SCALED_NUMBERS) for n in (d, 64))
        of_q = torch.empty(1, 1, 64, columns, dtype=torch.float8_e8m0fnu)
        of_v = torch.empty(1, 1, rows, dv, dtype=torch.float8_e8m0fnu)
        scales = {"q_descale": of_q, "k_descale": of_q, "v_descale": of_v}
        yield _api.make_problem(q, k, v, **scales).as_if_on_cuda()
    if dtype.itemsize > 1:
        yield from _problems_with_lists(dtype, d, dv)
    yield from _problems_with_cache(device, dtype, d, dv)
    yield from _problems_with_masks(device, dtype, d, dv)


def _packed_problems(dtype: torch.dtype, d: int, dv: int) -> Iterator[_native.Problem]:
    """Problems that launch every kernel of packed sequences alone, which go by the mean length and,
    where it is known, by the longest.
    """
    ends = torch.zeros(65, dtype=torch.int32)
    for causal, heads, rows in itertools.product((False, True), (1, 16), (2, 50, 100, 200, 1000)):
        q, k, v = (torch.empty(64 * rows, heads, dim, dtype=dtype) for dim in (d, d, dv))
        # Tiles of few rows have up to 16; tiles of sequences of unequal lengths are listed.
        for longest in (None, max(rows, 33), 8 * rows):
            yield _api.make_problem(
                q, k, v, causal=causal, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=longest,
                max_seqlen_k=longest,
            ).as_if_on_cuda()  # fmt: skip


def _problems_with_lists(dtype: torch.dtype, d: int, dv: int) -> Iterator[_native.Problem]:
    """Problems that launch every kernel of calls with lists of keys, which go by the head dims and
    by how many rows share a list.
    """
    for heads, nq in itertools.product((1, 16, 64, 128), (1, 128)):
        q = torch.empty(1, heads, nq, d, dtype=dtype)
        k, v = (torch.empty(1, 1, 8192, dim, dtype=dtype) for dim in (d, dv))
        for rows in {nq, -(-nq // _native.MASK_BLOCK)}:
            lists = torch.zeros(1, 1, rows, 64, dtype=torch.int32)
            for num_splits in (1, 8):
                problem = _api.make_problem(q, k, v, key_indices=lists, num_splits=num_splits)
                yield problem.as_if_on_cuda()


def _problems_with_masks(
    device: _native.Device, dtype: torch.dtype, d: int, dv: int
) -> Iterator[_native.Problem]:
    """Problems that launch every kernel of calls with masks as data. These kernels go by the dtype,
    the head dims, the kind of mask, and by whether there are row tiles for all SMs.
    """
    ranges = torch.zeros(1, 1, 1, 1, 2, dtype=torch.int32)
    for nq, num_splits in itertools.product((1, 8192), (1, 8)):
        q, k, v = (
            torch.empty(1, 1, n, dim, dtype=dtype) for n, dim in ((nq, d), (8192, d), (8192, dv))
        )
        keep = torch.ones(1, 1, 1, 1, dtype=torch.bool).expand(-1, -1, nq, 8192)
        table = torch.ones(1, 1, -(-nq // 64), 8192 // 64, dtype=torch.int8)
        for batch in (1, device.sm_count):
            many = [x.expand(batch, -1, -1, -1) for x in (q, k, v)]
            both = {"block_mask": table, "key_ranges": ranges}
            for mask in ({"key_ranges": ranges}, {"attn_mask": keep}, {"block_mask": table}, both):
                problem = _api.make_problem(*many, **mask, num_splits=num_splits)
                yield problem.as_if_on_cuda()
    # Elements that are added, for several heads.
    q, k, v = (
        torch.empty(device.sm_count, 2, 8192, n, dtype=dtype, device="meta") for n in (d, d, dv)
    )
    for kind in {dtype, torch.float32}:
        added = torch.empty(1, 1, 8192, 8192, dtype=kind, device="meta")
        yield _api.make_problem(q, k, v, attn_mask=added).as_if_on_cuda()


def _problems_with_cache(
    device: _native.Device, dtype: torch.dtype, d: int, dv: int
) -> Iterator[_native.Problem]:
    """Problems that launch every kernel of calls with a KV cache. These kernels go by the dtypes,
    the head dims, by whether 16 rows are enough, and for many rows by whether there are row tiles
    for all SMs and by pages.
    """
    lengths = torch.zeros(1, dtype=torch.int32)
    cos, sin = (torch.empty(1, max(d // 2, 1)) for _ in range(2))
    kinds = [dtype] if dtype.itemsize == 1 else [dtype, torch.float8_e4m3fn]
    for kind, num_splits, nq in itertools.product(kinds, (1, 8), (1, 17)):
        q, k, v = (
            torch.empty(1, n, 1, dim, dtype=of)
            for n, dim, of in ((nq, d, dtype), (8192, d, kind), (8192, dv, kind))
        )
        options: dict[str, Any] = {"cache_seqlens": lengths, "num_splits": num_splits}
        new = {"k_new": k[:, :1], "v_new": v[:, :1]}
        yield _api.make_problem(q, k, v, **options, **new).as_if_on_cuda()
        if d > 1 and kind == dtype and dtype.itemsize > 1:
            rotary = {"rotary_cos": cos, "rotary_sin": sin}
            yield _api.make_problem(q, k, v, **options, **new, **rotary).as_if_on_cuda()
    if dtype not in (torch.float16, torch.bfloat16):
        return
    page, pages = 64, 16
    for batch, num_splits in itertools.product((1, device.sm_count), (1, 8)):
        q = torch.empty(batch, page * pages, 1, d, dtype=dtype)
        k, v = (torch.empty(batch * pages, page, 1, dim, dtype=dtype) for dim in (d, dv))
        lengths = torch.zeros(batch, dtype=torch.int32)
        options = {"cache_seqlens": lengths, "num_splits": num_splits}
        table = torch.zeros(batch, pages, dtype=torch.int32)
        yield _api.make_problem(q, k, v, **options, page_table=table).as_if_on_cuda()
        contiguous = (x.view(batch, page * pages, 1, -1) for x in (k, v))
        yield _api.make_problem(q, *contiguous, **options).as_if_on_cuda()
    # Packed sequences of mixed lengths.
    q, k, v = (
        torch.empty(*rows, 1, n, dtype=dtype)
        for rows, n in (((512,), d), ((32, 64), d), ((32, 64), dv))
    )
    lengths = torch.zeros(2, dtype=torch.int32)
    options = {"cache_seqlens": lengths, "cu_seqlens_q": torch.zeros(3, dtype=torch.int32)}
    table = torch.zeros(2, pages, dtype=torch.int32)
    yield _api.make_problem(q, k, v, **options, page_table=table).as_if_on_cuda()
