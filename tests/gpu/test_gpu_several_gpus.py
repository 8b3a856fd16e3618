"""Several GPUs in one process: a call runs where its tensors are, whichever GPU is current."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import archflash
from archflash import _archflash as _native
from tests.distributed_worker import run_ranks

from .gpu_cases import (
    NAN,
    assert_close,
    cu_seqlens,
    int32,
    kernel_dtypes,
    kernels,
    qkv,
    rand,
    same_bits,
)  # fmt: skip

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

HERE, THERE = "cuda:0", "cuda:1"  # the first one is current in all tests
LONG_SLEEP = 400_000_000  # GPU clock cycles: about 0.2 s
each_kernel = pytest.mark.parametrize("kernel", kernels())
NAMES = kernels()
# Kernels that compute gradients, that of caches, and that of the quantiser, where they are built.
WITH_GRADIENTS = [name for name in ("simt", "ampere", "hopper") if name in NAMES]
needs_ampere = pytest.mark.skipif("ampere" not in NAMES, reason="ampere is not built")


def dtype_of(kernel: str) -> str:
    return next(dtype for name, dtype in kernel_dtypes() if name == kernel)


def inputs(kernel: str, nq: int = 129, nk: int = 239, **options: Any) -> tuple[Tensor, ...]:
    return qkv(nq, nk, dtype=dtype_of(kernel), heads=(4, 2), **options)


def moved(tensors: Any, device: str = THERE) -> list[Tensor]:
    return [x.to(device) for x in tensors]


def assert_same_on_both(call: Callable[..., Any], tensors: tuple[Tensor, ...]) -> None:
    """A call gives the same bits on both GPUs, in turns, and leaves the first one current."""
    found = []
    for device in (THERE, HERE, THERE, HERE):
        results = call(*moved(tensors, device))
        results = results if isinstance(results, (tuple, list)) else (results,)
        assert torch.cuda.current_device() == 0
        assert all(str(x.device) == device for x in results)
        found.append([x.cpu().float() for x in results])
    if torch.cuda.get_device_name(0) != torch.cuda.get_device_name(1):
        return
    for one, other in itertools.pairwise(found):
        assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


# --- calls ---


@each_kernel
def test_it_runs_where_its_tensors_are(kernel: str) -> None:
    q, k, v = inputs(kernel)
    expected = archflash.attention(q, k, v, implementation=kernel)
    there = moved((q, k, v))
    with torch.cuda.device(0):
        out = archflash.attention(*there, implementation=kernel)
        assert torch.cuda.current_device() == 0
    assert out.device.index == 1
    assert_close(out, None, *there)
    if torch.cuda.get_device_name(0) == torch.cuda.get_device_name(1):
        assert same_bits(out.cpu(), expected.cpu())
    with pytest.raises(TypeError, match="cuda:1"):
        archflash.attention(q, there[1], v)


@each_kernel
def test_every_kind_of_plan_runs_on_both(kernel: str) -> None:
    """Long rows, few rows (which split their keys and need a workspace), packed sequences."""
    q, k, v = inputs(kernel, 300, 1500, batch=2)
    packed = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    _native.clear_cache()

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return archflash.attention(q, k, v, causal=True, return_lse=True, implementation=kernel)

    def few(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return archflash.attention(q[:, :, :2], k, v, implementation=kernel)

    def ragged(q: Tensor, k: Tensor, v: Tensor) -> Any:
        ends = [cu_seqlens(lengths).to(q.device) for lengths in ((500, 100), (2900, 100))]
        return archflash.attention(
            q, k, v, cu_seqlens_q=ends[0], cu_seqlens_k=ends[1], implementation=kernel
        )

    assert_same_on_both(plain, (q, k, v))
    assert_same_on_both(few, (q, k, v))
    assert_same_on_both(ragged, tuple(packed))


def test_the_cache_of_plans_has_entries_for_each() -> None:
    q, k, v = inputs("ampere" if "ampere" in NAMES else kernels()[0])
    kernel = "ampere" if "ampere" in NAMES else kernels()[0]
    _native.clear_cache()
    for device in (HERE, THERE):
        case = moved((q, k, v), device)
        for _ in range(2):
            archflash.attention(*case, implementation=kernel)
    assert _native.cache_info()[:3] == (2, 2, 2)  # hits, misses, entries


@pytest.mark.parametrize("kernel", WITH_GRADIENTS)
def test_gradients_run_where_their_tensors_are(kernel: str) -> None:
    def gradients(q: Tensor, k: Tensor, v: Tensor) -> Any:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = archflash.attention(*leaves, causal=True, implementation=kernel)
        (out.float() * weight.to(q.device)).sum().backward()
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    weight = rand(2, 4, 129, 64, seed=9)
    dtype = dtype_of(kernel)
    # The order in which the parts of dQ are added is free without this, and the bits with it.
    torch.use_deterministic_algorithms(True)
    try:
        assert_same_on_both(gradients, qkv(129, 129, dtype=dtype, batch=2, heads=(4, 4)))
    finally:
        torch.use_deterministic_algorithms(False)


@needs_ampere
def test_caches_pages_and_merging_run_where_their_tensors_are() -> None:
    q, k, v = (x.transpose(1, 2).contiguous() for x in qkv(1, 256, dtype="bfloat16", batch=2))
    pages = [x.reshape(8, 64, *x.shape[2:]) for x in (k, v)]
    table, lengths = int32(3, 1, 0, 2, 5, 7, 4, 6).view(2, 4), int32(129, 250)

    def contiguous(*given: Tensor) -> Any:
        q, k, v, lengths = given
        return archflash.attention_with_kvcache(q, k, v, cache_seqlens=lengths)

    def paged(*given: Tensor) -> Any:
        q, k, v, lengths, table = given
        return archflash.attention_with_kvcache(q, k, v, cache_seqlens=lengths, page_table=table)

    def appended(*given: Tensor) -> Any:
        q, k, v, lengths = given
        k, v, new = k.clone(), v.clone(), q * 2
        out = archflash.attention_with_kvcache(
            q, k, v, cache_seqlens=lengths, k_new=new, v_new=new, causal=True
        )
        return [out, k, v]

    def merged(*given: Tensor) -> Any:
        q, k, v = (x.transpose(1, 2) for x in given)
        parts = [
            archflash.attention(q, *part, return_lse=True, implementation="ampere")
            for part in zip(k.chunk(2, 2), v.chunk(2, 2), strict=True)
        ]
        return archflash.merge_attention(*zip(*parts, strict=True))

    assert_same_on_both(contiguous, (q, k, v, lengths))
    assert_same_on_both(paged, (q, *pages, lengths, table))
    assert_same_on_both(appended, (q, k, v, lengths))
    assert_same_on_both(merged, (q, k, v))


@pytest.mark.skipif("ada" not in NAMES, reason="ada is not built")
def test_quantisation_runs_where_its_tensor_is() -> None:
    x = rand(2, 4, 200, 64, seed=1, dtype="bfloat16")
    for per in ("tensor", "head", "block"):
        assert_same_on_both(
            lambda x, per=per: archflash.quantize_fp8(x, per=per, implementation="ada"), (x,)
        )


# --- PyTorch's own attention, torch.compile, CUDA graphs, streams ---


@needs_ampere
def test_sdpa_through_the_registry_runs_where_its_tensors_are() -> None:
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        with torch.no_grad(), archflash.force("ampere"):
            return sdpa(q, k, v, is_causal=True)

    def train(q: Tensor, k: Tensor, v: Tensor) -> Any:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with archflash.force("ampere"):
            out = sdpa(*leaves, is_causal=True)
        grads = torch.autograd.grad(out.float().square().sum(), leaves)
        assert all(str(x.device) == str(q.device) for x in grads)
        return out.detach()  # gradients may be added up in any order

    case = qkv(129, 129, dtype="bfloat16", batch=2, heads=(4, 4))
    archflash.stats(reset=True)
    with archflash.enabled():
        assert_same_on_both(attend, case)
        assert_same_on_both(train, case)
    # Nobody forces the four gradients.
    served = archflash.stats().served
    assert served["ampere"] >= 8
    assert sum(served.values()) == 12


@each_kernel
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_code_runs_where_its_tensors_are(kernel: str, backend: str) -> None:
    if backend == "inductor" and kernel != kernels()[0]:
        pytest.skip("one kernel is enough for Inductor, whose compilation takes seconds")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return archflash.attention(q + q, k, v, causal=True, implementation=kernel)

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend=backend, fullgraph=True)
    case = inputs(kernel)
    for device in (THERE, HERE, THERE):
        given = moved(case, device)
        out = compiled(*given)
        assert torch.cuda.current_device() == 0
        assert same_bits(out, attend(*given))


@each_kernel
def test_a_graph_of_the_second_gpu_replays(kernel: str) -> None:
    case = moved(inputs(kernel, batch=2))
    archflash.attention(*case, causal=True, implementation=kernel)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(1):
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            out = archflash.attention(*case, causal=True, implementation=kernel)
    for seed in (1, 2):
        for old, new in zip(case, inputs(kernel, batch=2, seed=seed), strict=True):
            old.copy_(new)
        out.fill_(NAN)
        torch.cuda.synchronize(1)
        graph.replay()
        torch.cuda.synchronize(1)
        assert same_bits(out, archflash.attention(*case, causal=True, implementation=kernel))


@each_kernel
def test_it_waits_for_the_current_stream_of_its_tensors_gpu(kernel: str) -> None:
    q, k, v = moved(inputs(kernel))
    expected = archflash.attention(q, k, v, implementation=kernel)
    late_q, out = torch.full_like(q, NAN), torch.empty_like(q)
    side = torch.cuda.Stream(device=1)
    torch.cuda.synchronize(1)
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG_SLEEP)
        late_q.copy_(q)
        with torch.cuda.device(0):  # the second GPU's current stream stays the side stream
            archflash.attention(late_q, k, v, implementation=kernel, out=out)
        done = torch.cuda.Event()
        done.record(side)
    assert not done.query(), "the call waited for the GPU"
    torch.cuda.synchronize(0)
    assert not done.query(), "the kernel ran on the first GPU"
    side.synchronize()
    assert same_bits(out, expected)


# --- threads ---


@each_kernel
def test_threads_that_call_both_in_turns(kernel: str) -> None:
    cases = [moved(inputs(kernel), device) for device in (HERE, THERE)]
    expected = [archflash.attention(*case, implementation=kernel, causal=True) for case in cases]
    for device in (0, 1):
        torch.cuda.synchronize(device)
    _native.clear_cache()
    together = threading.Barrier(6)

    def work(index: int) -> bool:
        with torch.cuda.device(index % 2), torch.cuda.stream(torch.cuda.Stream()):
            together.wait(timeout=60)
            outs = [
                archflash.attention(*cases[(index + step) % 2], implementation=kernel, causal=True)
                for step in range(50)
            ]
            for device in (0, 1):
                torch.cuda.synchronize(device)
            return all(same_bits(out, expected[(index + i) % 2]) for i, out in enumerate(outs))

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(work, range(6)))


# --- errors, the first call ---


def test_tensors_of_both_in_one_call_are_refused() -> None:
    q, k, v = qkv(64, 64, dtype="bfloat16")
    there = moved((q, k, v))
    wrong: list[tuple[tuple[Tensor, ...], dict[str, Any]]] = [
        ((q, there[1], v), {}),
        ((q, k, there[2]), {}),
        ((there[0], k, v), {}),
        (tuple(there), {"sinks": rand(2, seed=1)}),
        (tuple(there), {"q_offset": int32(3)}),
        (tuple(there), {"attn_mask": torch.ones(64, 64, dtype=torch.bool, device=HERE)}),
        ((q, k, v), {"out": torch.empty_like(there[0])}),
    ]
    for tensors, call in wrong:
        with pytest.raises(TypeError, match="cuda:1"):
            archflash.attention(*tensors, **call)
    ends = cu_seqlens((64,))
    with pytest.raises(TypeError, match="cuda:1"):
        archflash.attention(
            *(x[0].transpose(0, 1) for x in there), cu_seqlens_q=ends, cu_seqlens_k=ends
        )
    rows = [x.transpose(1, 2) for x in there]
    with pytest.raises(TypeError, match="cuda:1"):
        archflash.attention_with_kvcache(*rows, cache_seqlens=int32(5))
    assert archflash.attention(*there).device.index == 1  # and nothing broke


FIRST_CALL_ON_THE_SECOND = """
import ctypes, sys, torch, archflash
kernel, dtype = sys.argv[1:]
driver = ctypes.CDLL("libcuda.so.1")
def used(index):
    flags, active = ctypes.c_uint(), ctypes.c_int()
    assert driver.cuDevicePrimaryCtxGetState(index, ctypes.byref(flags), ctypes.byref(active)) == 0
    return bool(active.value)
q, k, v = torch.randn(3, 1, 2, 300, 64).to("cuda:1", getattr(torch, dtype)).unbind(0)
before = used(0)
out = archflash.attention(q, k, v, causal=True, implementation=kernel)
torch.cuda.synchronize(1)
assert used(1) and used(0) == before, "the call used a GPU that holds none of its tensors"
right = archflash.reference.attention(q, k, v, causal=True)[0]
assert (out.double() - right).abs().max() < 0.05
print("served")
"""


@each_kernel
def test_the_first_call_of_a_process_uses_its_tensors_gpu_only(kernel: str) -> None:
    command = [sys.executable, "-c", FIRST_CALL_ON_THE_SECOND, kernel, dtype_of(kernel)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout == "served\n", done.stderr


@each_kernel
def test_warm_up_loads_kernels_on_the_named_gpu(kernel: str) -> None:
    dtypes = [getattr(torch, dtype_of(kernel))]
    names = archflash.warm_up(1, dtypes=dtypes, head_dims=[64], implementations=[kernel])
    assert names == archflash.warm_up(0, dtypes=dtypes, head_dims=[64], implementations=[kernel])
    assert torch.cuda.current_device() == 0


def test_ranks_of_nccl_give_what_one_process_gives(tmp_path: Path) -> None:
    """archflash.distributed, and PyTorch's own ring through enable(), on up to four GPUs."""
    ranks = min(4, torch.cuda.device_count())
    parts = ["random_calls", "same_bits", "faults", "shards_of_tensors",
             "gloo_beside_groups", "pytorchs_context_parallel", "missing"]  # fmt: skip
    options = ["--backend", "nccl", "--device", "cuda", "--cases", "500", "--seconds", "60"]
    for text in run_ranks(ranks, tmp_path, *parts, *options):
        assert "done" in text, text[-3000:]
