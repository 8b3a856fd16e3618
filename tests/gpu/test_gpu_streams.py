"""Streams, CUDA graphs, threads, the plan cache: when and where a kernel runs."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import archflash
from archflash import _archflash as _native

from .gpu_cases import NAN, assert_close, cu_seqlens, int32, kernel_dtypes, kernels, qkv, same_bits

pytestmark = pytest.mark.gpu

LONG_SLEEP = 400_000_000  # GPU clock cycles: about 0.2 s
each_kernel = pytest.mark.parametrize("kernel", kernels())


def dtype_of(kernel: str) -> str:
    return next(dtype for name, dtype in kernel_dtypes() if name == kernel)


def inputs(kernel: str, nq: int = 129, nk: int = 239, **options: Any) -> tuple[Tensor, ...]:
    return qkv(nq, nk, dtype=dtype_of(kernel), heads=(4, 2), **options)


# --- streams ---


@each_kernel
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_each_call_waits_for_the_one_before_it(kernel: str, causal: bool) -> None:
    """A call reads what the one before has written, and writes where that one has read."""
    q, k, v = inputs(kernel, 600, 600, batch=16)
    call: dict[str, Any] = {"implementation": kernel, "causal": causal}
    first = archflash.attention(q, k, v, **call)
    if first.dtype != q.dtype:
        pytest.skip("the outputs of 8-bit calls are no inputs of such a call")

    def calls(between: Callable[[], object]) -> Tensor:
        x, y = torch.clone(q), torch.full_like(q, NAN)
        for _ in range(8):
            for given, out in ((x, y), (y, x)):
                between()
                archflash.attention(given, k, v, **call, out=out)
                k.add_(out.mean(2, keepdim=True)[:, ::2])  # a kernel of PyTorch's in between
                archflash.attention(given, k, v, **call, out=out)
        return x

    keys = torch.clone(k)
    expected = calls(torch.cuda.synchronize)
    k.copy_(keys)
    assert same_bits(calls(lambda: None), expected)
    k.copy_(keys)
    graph, out = capture(lambda: calls(lambda: None))
    for _ in range(2):
        k.copy_(keys)
        graph.replay()
        assert same_bits(out, expected)


@each_kernel
def test_it_waits_for_its_own_stream_and_nothing_else(kernel: str) -> None:
    q, k, v = inputs(kernel)
    expected = archflash.attention(q, k, v, implementation=kernel)  # also loads the kernel
    late_q, out = torch.full_like(q, NAN), torch.empty_like(q)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG_SLEEP)
        late_q.copy_(q)
        archflash.attention(late_q, k, v, implementation=kernel, out=out)
        done = torch.cuda.Event()
        done.record(side)
    assert not done.query(), "the call waited for the GPU"
    torch.cuda.current_stream().synchronize()
    assert not done.query(), "the kernel did not run on the side stream"
    side.synchronize()
    assert same_bits(out, expected)


@each_kernel
def test_a_captured_call_waits_for_two_streams(kernel: str) -> None:
    q, k, v = inputs(kernel, 600, 600, batch=16)
    expected = archflash.attention(q, k, v, implementation=kernel)
    late_q, late_k = torch.full_like(q, NAN), torch.full_like(k, NAN)
    side = torch.cuda.Stream()

    def call() -> Tensor:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            late_k.copy_(k)
        late_q.copy_(q)
        main.wait_stream(side)
        return archflash.attention(late_q, late_k, v, implementation=kernel)

    graph, out = capture(call)
    for late in (late_q, late_k):
        late.fill_(NAN)
        graph.replay()
        assert same_bits(out, expected)
    late_q.fill_(NAN), late_k.fill_(NAN)
    assert same_bits(call(), expected)


@each_kernel
def test_two_streams_at_once(kernel: str) -> None:
    q, k, v = inputs(kernel, 1023, 1023)
    q2, k2, v2 = inputs(kernel, 799, 65, seed=1)
    expected = archflash.attention(q, k, v, implementation=kernel)
    expected2 = archflash.attention(q2, k2, v2, implementation=kernel, causal=True)
    torch.cuda.synchronize()
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    outs = []
    for _ in range(10):
        with torch.cuda.stream(streams[0]):
            outs.append((archflash.attention(q, k, v, implementation=kernel), expected))
        with torch.cuda.stream(streams[1]):
            out = archflash.attention(q2, k2, v2, implementation=kernel, causal=True)
            outs.append((out, expected2))
    torch.cuda.synchronize()
    assert all(same_bits(out, right) for out, right in outs)


# --- CUDA graphs ---


def capture(call: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = call()
    return graph, out


@each_kernel
def test_a_graph_replays_with_changed_inputs(kernel: str) -> None:
    q, k, v = inputs(kernel, batch=2)
    offsets = int32(110, 50)
    call: dict[str, Any] = {"causal": True, "q_offset": offsets}
    call["implementation"] = kernel
    archflash.attention(q, k, v, **call)
    graph, out = capture(lambda: archflash.attention(q, k, v, **call))
    for seed in (1, 2):
        for old, new in zip((q, k, v), inputs(kernel, batch=2, seed=seed), strict=True):
            old.copy_(new)
        offsets.add_(seed)
        out.fill_(NAN)
        graph.replay()
        assert same_bits(out, archflash.attention(q, k, v, **call))
        assert_close(out, None, q, k, v, causal=True, q_offset=offsets)


@each_kernel
def test_a_graph_replays_with_changed_sequence_lengths(kernel: str) -> None:
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in inputs(kernel))
    ends: dict[str, Any] = {
        "cu_seqlens_q": cu_seqlens((64, 0, 65)),
        "cu_seqlens_k": cu_seqlens((100, 9, 130)),
    }
    archflash.attention(q, k, v, implementation=kernel, **ends)
    graph, out = capture(lambda: archflash.attention(q, k, v, implementation=kernel, **ends))
    for q_lengths, k_lengths in (((129, 0, 0), (1, 0, 238)), ((1, 127, 1), (80, 80, 79))):
        ends["cu_seqlens_q"].copy_(cu_seqlens(q_lengths))
        ends["cu_seqlens_k"].copy_(cu_seqlens(k_lengths))
        out.fill_(NAN)
        graph.replay()
        assert_close(out, None, q, k, v, **ends)


def test_the_zeroed_bytes_of_a_workspace_are_zeroed_in_every_call_and_replay() -> None:
    q, k, v = inputs("ampere")
    decision = archflash.explain(q, k, v, implementation="ampere")
    fields = decision.plan.to_dict() | {"workspace_bytes": 256, "zeroed_bytes": 128}
    plan = _native.LaunchPlan.unchecked_from_dict(fields)
    workspace = torch.full((256,), 7, dtype=torch.uint8, device="cuda")
    operands = {"q": q, "k": k, "v": v, "out": torch.empty_like(q), "workspace": workspace}

    def run() -> Tensor:
        _native.launch(plan, operands)
        return workspace

    def check() -> None:
        assert workspace[:128].eq(0).all()
        assert workspace[128:].eq(7).all()
        workspace.fill_(7)

    run()
    check()
    graph, _ = capture(run)
    for _ in range(2):
        graph.replay()
        check()
    assert same_bits(operands["out"], archflash.attention(q, k, v, implementation="ampere"))


FIRST_CALL_IN_A_CAPTURE = """
import sys, torch, archflash
kernel, dtype = sys.argv[1] or None, getattr(torch, sys.argv[2])
q, k, v = torch.randn(3, 2, 1, 2048, 64, device="cuda").to(dtype).unbind(0)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out = archflash.attention(q, k, v, implementation=kernel, causal=True)
out.fill_(float("nan"))
graph.replay()
eager = archflash.attention(q, k, v, implementation=kernel, causal=True)
assert torch.equal(out, eager), "the graph gives other bits"
print("captured")
"""


def assert_first_call_captured(kernel: str, dtype: str) -> None:
    command = [sys.executable, "-c", FIRST_CALL_IN_A_CAPTURE, kernel, dtype]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "captured", done.stderr


@each_kernel
def test_the_first_call_of_a_process_can_be_captured(kernel: str) -> None:
    assert_first_call_captured(kernel, dtype_of(kernel))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_first_call_that_nobody_forces_can_be_captured(dtype: str) -> None:
    """Where a kernel of ours serves it: cuDNN, which PyTorch may choose for large calls, plans at
    the first call of a shape, and cannot do so inside a capture.
    """
    assert_first_call_captured("", dtype)


# --- loading ---

FIRST_CALLS_BEHIND_WORK = """
import sys, time, torch, archflash
kernel, dtype = sys.argv[1:]
like = {"device": "cuda", "dtype": getattr(torch, dtype)}
dtypes = [like["dtype"]] + [torch.float8_e4m3fn] * (kernel == "ada")
names = archflash.warm_up(dtypes=dtypes, head_dims=[64], implementations=[kernel])
def rows(n, make=torch.zeros):
    return make(1, 2, n, 64, **like)
k, v = rows(512), rows(512)
calls = [(rows(n), rows(n, torch.empty)) for n in (1, 16, 512, 16384)]
torch.cuda._sleep(1000)
done = torch.cuda.Event()
done.record()
torch.cuda.synchronize()
torch.cuda._sleep(2_000_000_000)  # clock cycles: about a second
done.record()
for q, out in calls:
    start = time.perf_counter()
    archflash.attention(q, k, v, out=out, causal=True, implementation=kernel)
    if kernel == "ada":
        archflash.quantize_fp8(q, implementation=kernel)
    took = time.perf_counter() - start
    assert took < 0.1, f"{q.shape[2]} queries: the call returned after {took} s"
assert not done.query(), "the device was not busy for long enough"
print("returned", *names)
"""


@pytest.mark.alone
@each_kernel
def test_after_warm_up_the_first_call_does_not_wait_for_the_device(kernel: str) -> None:
    command = [sys.executable, "-c", FIRST_CALLS_BEHIND_WORK, kernel, dtype_of(kernel)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("returned "), done.stderr


# --- fork ---

USED_IN_A_CHILD = """
import os, torch, archflash
archflash.enable()
print(len(archflash.implementations()))
pid = os.fork()  # CUDA was not used so far
q = torch.randn(1, 2, 512, 64, device="cuda", dtype=torch.bfloat16)
own = archflash.attention(q, q, q, implementation="ampere").float()
right = archflash.reference.attention(q, q, q)[0].float()
assert torch.allclose(own, right, atol=2e-2), (own - right).abs().max()
with archflash.force("ampere"):
    sdpa = torch.nn.functional.scaled_dot_product_attention(q, q, q).float()
    assert torch.allclose(sdpa, right, atol=2e-2)
assert archflash.stats().served == {"ampere": 1}
if pid == 0:
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
print("both served")
"""


def test_a_child_process_after_import() -> None:
    """Importing and enabling archflash does not use CUDA, which a forked process cannot share."""
    command = [sys.executable, "-c", USED_IN_A_CHILD]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.endswith("both served\n"), done.stderr


# --- threads ---


@each_kernel
def test_eight_threads_with_their_own_shapes_and_streams(kernel: str) -> None:
    cases = [inputs(kernel, 60 + 13 * i, 300 - 31 * i, seed=i) for i in range(8)]
    expected = [archflash.attention(*case, implementation=kernel, causal=True) for case in cases]
    _native.clear_cache()
    torch.cuda.synchronize()
    together = threading.Barrier(8)

    def work(i: int) -> bool:
        with torch.cuda.stream(torch.cuda.Stream()), archflash.force(kernel):
            together.wait(timeout=60)
            # Neighbouring threads' problems too, so that they meet in the plan cache.
            outs = []
            for step in range(24):
                j = (i + step % 3) % 8
                outs.append((archflash.attention(*cases[j], causal=True), expected[j]))
            torch.cuda.current_stream().synchronize()
            return all(same_bits(out, right) for out, right in outs)

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(work, range(8)))


@each_kernel
def test_a_new_thread_calls_what_another_has_called(kernel: str) -> None:
    """No context is current in it, the plan is in the cache, and the kernel is loaded."""
    case = inputs(kernel)
    expected = archflash.attention(*case, implementation=kernel, causal=True)
    torch.cuda.synchronize()

    def work(_: int) -> Tensor:
        return archflash.attention(*case, implementation=kernel, causal=True)

    # PyTorch's allocator may call CUDA in the first one. For the next one it has free memory.
    for _ in range(3):
        with ThreadPoolExecutor(1) as thread:
            (out,) = thread.map(work, range(1))
        assert same_bits(out, expected)


def test_threads_call_sdpa_through_the_registry() -> None:
    """16 threads, each on a stream of its own, call 16 shapes in turns. Every call is counted."""
    sdpa = torch.nn.functional.scaled_dot_product_attention
    lengths = range(64, 320, 16)
    cases = [qkv(n, n, dtype="bfloat16", heads=(4, 4), seed=n) for n in lengths]
    together, calls = threading.Barrier(16), 32

    def work(i: int) -> bool:
        with torch.cuda.stream(torch.cuda.Stream()), archflash.force("ampere"):
            together.wait(timeout=60)
            turns = [(i + step) % 16 for step in range(calls)]
            outs = [sdpa(*cases[turn]) for turn in turns]
            torch.cuda.current_stream().synchronize()
            pairs = zip(outs, turns, strict=True)
            return all(same_bits(out, expected[turn]) for out, turn in pairs)

    with archflash.enabled():
        with archflash.force("ampere"):
            expected = [sdpa(*case) for case in cases]
        torch.cuda.synchronize()
        archflash.stats(reset=True)
        with ThreadPoolExecutor(16) as threads:
            assert all(threads.map(work, range(16)))
        assert archflash.stats().served == {"ampere": 16 * calls}


# --- the plan cache ---


@each_kernel
def test_more_problems_than_the_plan_cache_holds(kernel: str) -> None:
    _native.clear_cache()
    capacity = _native.cache_info()[3]
    longest = capacity + 20
    q, k, v = inputs(kernel, 5, longest)
    first = archflash.attention(q, k[:, :, :1], v[:, :, :1], implementation=kernel)
    assert _native.cache_info()[:3] == (0, 1, 1)
    assert same_bits(archflash.attention(q, k[:, :, :1], v[:, :, :1], implementation=kernel), first)
    assert _native.cache_info()[:3] == (1, 1, 1)
    outs = {}
    for nk in range(1, longest + 1):
        out = archflash.attention(q, k[:, :, :nk], v[:, :, :nk], implementation=kernel)
        if nk in (1, 43, longest):
            outs[nk] = out
    _, misses, entries, _ = _native.cache_info()
    assert entries == capacity
    assert same_bits(archflash.attention(q, k[:, :, :1], v[:, :, :1], implementation=kernel), first)
    assert _native.cache_info()[1] == misses + 1, "the least recently used problem had to go"
    for nk, out in outs.items():
        assert_close(out, None, q, k[:, :, :nk], v[:, :, :nk])


@pytest.fixture
def without_exchange_table() -> Iterator[None]:
    _native.use_exchange_table(False)
    yield
    _native.use_exchange_table(True)


@each_kernel
def test_tensors_read_through_their_attributes_give_the_same_bits(
    kernel: str, request: pytest.FixtureRequest
) -> None:
    case, offsets = inputs(kernel, batch=2), int32(110, 50)
    call: dict[str, Any] = {"causal": True, "q_offset": offsets, "return_lse": True}
    call["implementation"] = kernel
    expected, expected_lse = archflash.attention(*case, **call)
    request.getfixturevalue("without_exchange_table")
    out, lse = archflash.attention(*case, **call)
    assert same_bits(out, expected)
    assert same_bits(lse, expected_lse)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    late_q = torch.full_like(case[0], NAN)
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG_SLEEP)
        late_q.copy_(case[0])
        out = archflash.attention(late_q, *case[1:], **{**call, "return_lse": False})
    side.synchronize()
    assert same_bits(out, expected)
