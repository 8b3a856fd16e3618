"""The jobs of a run, in their order: what tells most about a GPU comes first."""

from __future__ import annotations

from archflash import _archflash as _native
from archflash.verify import _calls, _probes, _times
from archflash.verify._setup import Job, Setup

PROBES, FIRST, LONG, GRADIENTS, CACHES, DECODING, FUNCTIONS, TIMES = (
    "probes", "first calls", "long calls", "gradients", "caches", "decoding", "functions", "times",
)  # fmt: skip
PARTS = (PROBES, FIRST, LONG, GRADIENTS, CACHES, DECODING, FUNCTIONS, TIMES)
# A second item of these that runs into its limit ends the run.
CORRECTNESS = PARTS[:-1]


def make_jobs(setup: Setup) -> list[Job]:
    """All jobs of a run."""
    jobs = [Job(PROBES, "", image, tuple(items)) for image, items in _probes.items_by_image(setup)]
    names = {name: _native.describe(name) for name in setup.kernels}

    for name, said in names.items():
        for dtype in dict.fromkeys((*said.dtypes[::-1],)):
            dims = _calls.DIMS + (_calls.MORE_DIMS if setup.full else ())
            items = [
                item
                for both in dims[: 1 if setup.simulate else None]
                for item in _calls.first_items(name, dtype, both, setup)
            ]
            items += [] if setup.simulate else _calls.odd_items(name, dtype, setup)
            jobs.append(Job(FIRST, name, dtype, tuple(items)))
            if setup.simulate:
                break  # one dtype shows that the way works
    if setup.simulate:
        return jobs
    for name, said in names.items():
        exact = [dtype for dtype in said.dtypes if dtype not in _calls.FP8]
        jobs.append(Job(LONG, name, "", tuple(_calls.long_items(name, setup))))
        jobs += [
            Job(GRADIENTS, name, dtype, tuple(_calls.gradient_items(name, dtype, setup)))
            for dtype in exact
            if _native.has_backward(name)
        ]
        jobs += [
            Job(CACHES, name, dtype, tuple(_calls.cache_items(name, dtype, setup)))
            for dtype in exact
            if {"kv_cache", "kv_cache_prefill", "qv"} & {*said.features}
        ]
        jobs.append(Job(DECODING, name, "", tuple(_calls.decode_items(name, setup))))
    jobs.append(Job(FUNCTIONS, "", "", tuple(_calls.function_items(setup))))
    jobs += [Job(TIMES, "", shape, tuple(items)) for shape, items in _times.items_by_shape(setup)]
    return [job for job in jobs if job.items]
