"""The kinds of calls of a soak."""

from __future__ import annotations

import collections
import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import archflash

Call = Callable[[], Any]


def _tensors(result: Any) -> list[Tensor]:
    results = result if isinstance(result, (tuple, list)) else [result]
    return [x.detach() for x in results]


def same(found: Any, right: list[Tensor]) -> bool:
    return all(
        torch.equal(x.view(torch.uint8), y.view(torch.uint8))
        for x, y in zip(map(torch.Tensor.contiguous, _tensors(found)), right, strict=True)
    )


class Known:
    """Calls whose bits are known, and what all threads share."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.bytes = 0
        self.capturing = threading.Lock()
        self._turns = threading.Condition()
        self._running, self._waiting = 0, False
        kernels = [x.name for x in archflash.implementations() if x.name != "torch"]
        self.calls: dict[str, Call] = {}
        rows = 300 if device == "cuda" else 5
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            q, k, v = tensors(device, dtype, (2, 4, rows, 64), 2, rows + 17, seed=1)
            for name in ("torch", *kernels):
                for causal in (False, True):
                    call = self._call(q, k, v, name, causal)
                    with contextlib.suppress(
                        archflash.ForcedImplementationError, archflash.NotCompiledError
                    ):
                        call()
                        self.calls[f"{name} {dtype} {causal}"] = call
        self.right = {
            name: [x.contiguous().clone() for x in _tensors(call())]
            for name, call in self.calls.items()
        }
        if device == "cuda":
            self.bytes = allocated()

    @staticmethod
    def _call(q: Tensor, k: Tensor, v: Tensor, name: str, causal: bool) -> Call:
        return lambda: archflash.attention(
            q, k, v, causal=causal, return_lse=True, implementation=name
        )

    def differences(self) -> list[str]:
        """Known calls that have other bits now."""
        names = (name for name, call in self.calls.items() if not same(call(), self.right[name]))
        return [f"at the end {name} has other bits" for name in names]

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """A call of a thread: none begins while `quiet` waits."""
        with self._turns:
            self._turns.wait_for(lambda: not self._waiting)
            self._running += 1
        try:
            yield
        finally:
            with self._turns:
                self._running -= 1
                self._turns.notify_all()

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """No thread is in a call."""
        with self._turns:
            self._waiting = True
            self._turns.wait_for(lambda: not self._running)
        try:
            yield
        finally:
            with self._turns:
                self._waiting = False
                self._turns.notify_all()


def allocated() -> int:
    """Bytes of tensors on the GPU, without what cuBLAS keeps for each stream."""
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


def tensors(
    device: str, dtype: torch.dtype, shape: tuple[int, ...], kv_heads: int, nk: int, seed: int
) -> list[Tensor]:
    """q, and k and v with other heads and rows."""
    of_keys = (shape[0], kv_heads, nk, shape[3])
    made = torch.Generator(device).manual_seed(seed)
    return [
        torch.randn(size, generator=made, device=device).to(dtype)
        for size in (shape, of_keys, of_keys)
    ]


class Worker:
    """One thread's stream, graph, draws and counts."""

    def __init__(self, known: Known, seed: int) -> None:
        self.known, self.seed = known, seed
        self.chance = random.Random(seed)
        self.counts: collections.Counter[str] = collections.Counter()
        self.stream = torch.cuda.Stream() if known.device == "cuda" else None
        self.graph: Any = None

    def run(self, kind: str) -> str:
        """What was wrong with a call of this kind, or nothing."""
        place = torch.cuda.stream(self.stream) if self.stream else contextlib.nullcontext()
        with place:
            calls, said = KINDS[kind](self)
        self.counts[kind] += calls
        return said

    def draw(self) -> tuple[list[Tensor], dict[str, Any]]:
        """A call whose shape is most likely new."""
        chance, gpu = self.chance, self.known.device == "cuda"
        most = 700 if gpu else 9
        kv_heads, d = chance.choice((1, 2, 3)), chance.choice((32, 64, 96, 128, 192))
        shape = (chance.randint(1, 3), kv_heads * chance.choice((1, 2, 4)), chance.randint(1, most))
        dtype = chance.choice((torch.float16, torch.bfloat16, torch.float32))
        call: dict[str, Any] = {"causal": chance.random() < 0.5}
        if chance.random() < 0.2:
            call["window"] = (chance.randint(0, 99), chance.choice((None, 0, 7)))
        if chance.random() < 0.2:
            call["softcap"] = 20.0
        seed = chance.randrange(1 << 30)
        nk = chance.randint(1, most)
        return tensors(self.known.device, dtype, (*shape, d), kv_heads, nk, seed), call


Answer = tuple[int, str]  # how many calls there were, and what was wrong


def _known(worker: Worker) -> Answer:
    name = worker.chance.choice(list(worker.known.calls))
    found = worker.known.calls[name]()
    return 1, "" if same(found, worker.known.right[name]) else f"other bits of {name}"


def _new_shapes(worker: Worker) -> Answer:
    given, call = worker.draw()
    first = [x.contiguous() for x in _tensors(archflash.attention(*given, return_lse=True, **call))]
    again = archflash.attention(*given, return_lse=True, **call)
    shapes = [tuple(x.shape) for x in given]
    return 2, "" if same(again, first) else f"other bits of {shapes} {call}"


def _gradients(worker: Worker) -> Answer:
    given, call = worker.draw()

    def both() -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in given]
        out = archflash.attention(*leaves, **call)
        return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    first, again = both(), both()
    # Without deterministic=True the sums of gradients may have another order.
    near = all(
        torch.allclose(x, y, atol=0.05, rtol=0.05) for x, y in zip(first, again, strict=True)
    )
    return 4, "" if same(again[0], first[:1]) and near else f"other gradients of {call}"


def _cache(worker: Worker) -> Answer:
    chance, device = worker.chance, worker.known.device
    batch, page, pages = chance.randint(1, 4), chance.choice((16, 64)), chance.randint(1, 4)
    seed = chance.randrange(1 << 30)
    q, k, v = tensors(device, torch.float16, (batch, 4, 1, 64), 2, page * pages, seed)
    table = torch.randperm(batch * pages).reshape(batch, pages).int().to(device)
    caches = [x.reshape(batch * pages, page, 2, 64).clone() for x in (k, v)]
    lengths = torch.tensor([chance.randint(0, page * pages - 1) for _ in range(batch)]).int()
    new = [x[:, :, :1].transpose(1, 2).contiguous() for x in (k, v)]
    call = {
        "page_table": table, "cache_seqlens": lengths.to(device), "k_new": new[0], "v_new": new[1],
    }  # fmt: skip
    rows = q.transpose(1, 2)
    first = archflash.attention_with_kvcache(rows, *caches, return_lse=True, **call)
    first = [x.contiguous() for x in _tensors(first)]
    again = archflash.attention_with_kvcache(rows, *caches, return_lse=True, **call)
    return 2, "" if same(again, first) else f"other bits of a cache of {batch} x {pages} x {page}"


def _refusals(worker: Worker) -> Answer:
    (q, k, v), _ = worker.draw()
    wrong: tuple[Call, ...] = (
        lambda: archflash.attention(q, k, v[..., :-1, :]),
        lambda: archflash.attention(q, k.double(), v),
        lambda: archflash.attention(q, k, v, softcap=-1.0),
        lambda: archflash.attention(q.double(), k.double(), v.double(), implementation="ampere"),
        lambda: archflash.attention(q, k, v, implementation="fastest"),
    )
    call = worker.chance.choice(wrong)
    try:
        call()
    except (ValueError, TypeError, archflash.ForcedImplementationError):
        return 1, ""
    return 1, "a wrong call was not refused" if k.shape[2] > 1 or call is not wrong[0] else ""


def _graph(worker: Worker) -> Answer:
    """Replays this thread's graph with other inputs; captures another one now and then."""
    if worker.stream is None:
        return 0, ""
    chance, said = worker.chance, ""
    if worker.graph is None or chance.random() < 0.02:
        q, k, v = tensors("cuda", torch.bfloat16, (2, 8, chance.randint(1, 300), 64), 2, 400, 3)
        archflash.attention(q, k, v)  # plans, and loads the kernel
        worker.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with (
            worker.known.capturing,
            torch.cuda.graph(graph, stream=worker.stream, capture_error_mode="thread_local"),
        ):
            out = archflash.attention(q, k, v)
        worker.graph = (graph, out, q, k, v)
    graph, out, q, k, v = worker.graph
    # Not by the default generator, which may belong to a capture of another thread.
    q.copy_(tensors("cuda", q.dtype, tuple(q.shape), 8, 1, chance.randrange(1 << 30))[0])
    graph.replay()
    if not same(archflash.attention(q, k, v), [out.contiguous()]):
        said = f"a graph of {tuple(q.shape)} gave other bits than a call"
    return 2, said


KINDS: dict[str, Callable[[Worker], Answer]] = {
    "known": _known,
    "new shapes": _new_shapes,
    "gradients": _gradients,
    "cache": _cache,
    "refused": _refusals,
    "graph": _graph,
}


def without_memory(known: Known, wrong: list[str]) -> int:
    """Calls with less and less memory, until they have enough: those without raise, the next ones
    have the right bits. Returns how many calls had too little.
    """
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    q, k, v = tensors("cuda", torch.float16, (256, 16, 640, 64), 4, 40, 5)  # 335 MB, lse 10 MB
    torch.cuda.empty_cache()
    base, short = torch.cuda.memory_reserved(), 0
    try:
        for more in (0, 4, 100, 338, 346, 352, 1000):
            torch.cuda.set_per_process_memory_fraction((base + (more << 20)) / total)
            try:
                archflash.attention(q, k, v, return_lse=True)
            except torch.OutOfMemoryError:
                short += 1
            torch.cuda.empty_cache()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    name = next(iter(known.calls))
    if not same(known.calls[name](), known.right[name]):
        wrong.append(f"after a lack of memory {name} has other bits")
    torch.cuda.synchronize()
    return short
