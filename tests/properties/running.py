"""Draws and tries random problems until the time is over."""

from __future__ import annotations

import argparse
import collections
import itertools
import random
import time
from collections.abc import Iterator

import torch

from archflash import _archflash as native
from tests.core_set.executors import EXECUTORS
from tests.properties import ENTRIES, Problem, attempt, draw
from tests.properties.found import FOUND

Counts = collections.Counter[tuple[str, str, str]]  # of (entry, implementation, verdict)
OF_ONE_NAME = {"merge_attention": native.merger_names(), "quantize_fp8": native.quantizer_names()}


def work(args: argparse.Namespace, worker: int) -> tuple[int, Counts]:
    """Every so-many-th problem of a seed, until the time is over; the first worker begins with what
    has failed.
    """
    device, every = "cpu", ["torch"]
    if args.executor != "torch":
        executor = EXECUTORS[args.executor]()
        device, every = executor.device, executor.kernels()
        every = ["chosen", "torch", *every] if device == "cuda" else every
    torch.set_num_threads(1)
    counts, end = Counts(), time.monotonic() + args.seconds
    for number, problem in enumerate(_problems(args, worker)):
        if time.monotonic() > end:
            return number, counts
        names = args.implementation or every
        if problem.entry == "masks":
            names = ["torch"]  # they are plain operations
        elif problem.entry in OF_ONE_NAME:
            names = [x for x in names if x in ("chosen", "torch", *OF_ONE_NAME[problem.entry])]
        asked = [None if name == "chosen" else name for name in names]
        for name, verdict in attempt(problem, asked, device).items():
            wrong = verdict not in ("right", "refused")
            counts[problem.entry, name, "wrong" if wrong else verdict] += 1
            if wrong:
                _tell(problem, None if name == "chosen" else name, device, verdict)
        if device == "cuda":
            torch.cuda.synchronize()  # after a fault of the GPU nothing more can be tried
    raise AssertionError


def _problems(args: argparse.Namespace, worker: int) -> Iterator[Problem]:
    entries = args.entry or list(ENTRIES)
    if worker == 0:
        yield from (problem for problem in FOUND if problem.entry in entries)
    for number in itertools.count(worker, args.workers):
        chance = random.Random(f"{args.seed} {number}")
        yield draw(chance.choice(entries), chance, args.most)


def _tell(problem: Problem, name: str | None, device: str, verdict: str) -> None:
    print(
        f"from tests.properties import *; print(attempt({problem}, [{name!r}], {device!r}))"
        f"\n    # {verdict.splitlines()[0]}",
        flush=True,
    )
