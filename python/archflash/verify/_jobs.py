"""The jobs of a run, in their order: what tells most about a GPU comes first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from archflash import _archflash as _native
from archflash._proofs import BACKWARD, FORWARD
from archflash.verify import _calls, _kernels, _making, _probes, _times
from archflash.verify._setup import Item, Job, Setup

PROBES, FIRST, KERNELS, LONG, GRADIENTS, CACHES, DECODING, FUNCTIONS, TIMES = (
    "probes", "first calls", "every kernel", "long calls", "gradients", "caches", "decoding",
    "functions", "times",
)  # fmt: skip
PARTS = (PROBES, FIRST, KERNELS, LONG, GRADIENTS, CACHES, DECODING, FUNCTIONS, TIMES)
# A second item of these that runs into its limit ends the run.
CORRECTNESS = PARTS[:-1]


def make_jobs(setup: Setup) -> list[Job]:
    """All jobs of a run."""
    made = [Job(PROBES, "", "", "instructions", partial(_probes.probe_items, setup))]
    if setup.simulate:  # one dtype and head dimension of each kernel show that the way works
        for name in setup.kernels:
            dtype = _native.describe(name).dtypes[-1]
            items = partial(_calls.first_items, name, dtype, _calls.DIMS[0], setup)
            made.append(Job(FIRST, name, FORWARD, dtype, items))
        return made
    made += [job for part in PARTS for name in setup.kernels for job in jobs_of(part, name, setup)]
    made.append(Job(FUNCTIONS, "", "", "beside attention", partial(_calls.function_items, setup)))
    made.append(Job(TIMES, "", "", "all kernels", partial(_times.time_items, setup)))
    return made


def jobs_of(part: str, name: str, setup: Setup) -> Iterator[Job]:
    """The jobs of a part about a kernel."""
    said = _native.describe(name)
    exact = [dtype for dtype in said.dtypes if dtype not in _making.FP8]
    # The dtypes of the backward pass and of caches, where the folder has either.
    of_gradients = exact if _native.has_backward(name) else []
    of_caches = exact if {"kv_cache", "kv_cache_prefill", "qv"} & {*said.features} else []
    if "float32" in exact:  # a folder for fp32 has these for fp32 alone
        of_gradients, of_caches = of_gradients[:1], of_caches[:1]

    def job(of: str, what: str, make: Callable[..., Sequence[Item]], *given: str) -> Job:
        return Job(part, name, of, what, partial(make, name, *given, setup))

    def of_kernels(of: str, dtype: str) -> Job:
        given = (name, dtype, of, setup)
        what = dtype if of == FORWARD else f"{of} {dtype}"
        make, find = partial(_kernels.kernel_items, *given), partial(_kernels.items_named, *given)
        return Job(part, name, of, what, make, find)

    if part == FIRST:
        for dtype in said.dtypes:
            yield job(FORWARD, dtype, first_items, dtype)
    elif part == KERNELS:
        for dtype in said.dtypes:
            yield of_kernels(FORWARD, dtype)
        for dtype in of_gradients:
            yield of_kernels(BACKWARD, dtype)
    elif part == LONG:
        yield job(FORWARD, "", _calls.long_items)
    elif part == GRADIENTS:
        for dtype in of_gradients:
            yield job(BACKWARD, dtype, _calls.gradient_items, dtype)
    elif part == CACHES:
        for dtype in of_caches:
            yield job(FORWARD, dtype, _calls.cache_items, dtype)
    elif part == DECODING:
        yield job(FORWARD, "", _calls.decode_items)


def first_items(name: str, dtype: str, setup: Setup) -> list[Item]:
    """Small calls of all head dimensions, and odd ones."""
    dims = _calls.DIMS + (_calls.MORE_DIMS if setup.full else ())
    items = [item for both in dims for item in _calls.first_items(name, dtype, both, setup)]
    return items + _calls.odd_items(name, dtype, setup)
