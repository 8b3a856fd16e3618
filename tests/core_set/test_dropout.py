"""Dropout: which weights are dropped, and that every kernel drops the same ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import archflash
from archflash import _archflash as native
from archflash import reference

from ..replanned import plan_with
from .executors import executor
from .gradients import differentiate_and_check, inputs, kernels_with_gradients

on = executor()
# The kernels that drop weights, each with the dtypes for which it does.
KERNELS = [
    (kernel, dtype)
    for kernel in on.kernels("dropout_p")
    for dtype in on.dtypes_of(kernel)
    if (dtype == "float32") == (kernel == "simt")
]
each_kernel = pytest.mark.parametrize(("kernel", "dtype"), KERNELS)
on_hopper = pytest.mark.skipif("hopper" not in on.kernels(), reason="kernels for 9.0")
on_cpu = pytest.mark.filterwarnings("ignore:archflash. tensors are on the CPU")

CALLS: dict[str, dict[str, Any]] = {
    "causal": {"dims": (64, 64), "heads": (2, 1), "causal": True},
    "few-rows-of-packed-heads-in-shares": {
        "dims": (128, 72), "heads": (6, 2), "nq": 5, "nk": 300, "num_splits": 2,
    },
    "heads-above-256-in-shares": {
        "dims": (512, 264), "heads": (4, 2), "causal": True, "num_splits": 2,
    },
    "window-softcap": {"dims": (192, 256), "heads": (2, 2), "window": (40, 9), "softcap": 2.0},
}  # fmt: skip


def state(seed: int = -12345678901234567, offset: int = (5 << 32) + 77) -> Tensor:
    return on.tensor([seed, offset], torch.int64)


@pytest.mark.parametrize("name", CALLS)
@each_kernel
def test_kernels_drop_what_dropout_mask_says(kernel: str, dtype: str, name: str) -> None:
    call = dict(CALLS[name])
    dims, heads = call.pop("dims"), call.pop("heads")
    nq, nk = call.pop("nq", 70), call.pop("nk", 101)
    if kernel in ("simt", "hopper"):  # up to 256 or 128 columns, no shares of keys
        call.pop("num_splits", None)
        dims = tuple(min(dim, 256 if kernel == "simt" else 128) for dim in dims)
    if kernel == "hopper":
        call.pop("softcap", None)
    q, k, v = on.qkv(nq, nk, *dims, dtype=dtype, batch=2, heads=heads)
    on.attend_and_check(kernel, q, k, v, dropout_p=0.3, rng_state=state(), schedules=[1], **call)


# Several tiles of rows and blocks of keys, the last ones ragged, of the kernels that have dropout
# alone: queries, keys, head dimensions, heads.
TILES: dict[str, tuple[int, int, tuple[int, int], tuple[int, int], dict[str, Any]]] = {
    "d64-causal": (150, 300, (64, 64), (2, 1), {"causal": True}),
    "d64-sinks": (130, 270, (40, 56), (1, 1), {"sinks": True}),
    "d128-window": (200, 290, (128, 128), (2, 2), {"window": (90, 30)}),
    "d128-all-keys": (140, 400, (72, 120), (3, 1), {}),
}


def options_of(words: dict[str, Any], heads: int) -> dict[str, Any]:
    options = {"dropout_p": 0.4, "rng_state": state(), **words}
    return options | ({"sinks": on.rand(heads, seed=9)} if "sinks" in words else {})


@on_hopper
@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_many_tiles_of_hopper(dtype: str, name: str) -> None:
    nq, nk, dims, heads, words = TILES[name]
    options = options_of(words, heads[0])
    number = list(TILES).index(name)
    q, k, v = on.qkv(nq, nk, *dims, dtype=dtype, batch=2, heads=heads)
    on.attend_and_check("hopper", q, k, v, schedules=[number], **options)
    tensors = inputs(on, nq, nk, *dims, dtype, heads=heads)
    differentiate_and_check(
        on, "hopper", *tensors, schedules=[number], deterministic=number % 2 == 0, **options
    )


# Calls of many tiles for ampere: those of hopper, and some with larger heads or heads that share
# one of K.
TILES_OF_AMPERE = TILES | {
    "d256-causal": (140, 150, (256, 192), (4, 2), {"causal": True}),
    "d128-groups": (150, 170, (128, 128), (4, 1), {"causal": True}),
    "d64-window": (260, 140, (64, 64), (2, 2), {"window": (60, 20)}),
    "d96-causal": (130, 150, (96, 72), (2, 1), {"causal": True}),
}


def plan_of_ampere(*qkv: Tensor, device: str = "H200", **options: Any) -> native.LaunchPlan:
    """The plan for a GPU with one SM, which few tiles fill."""
    given = {name: x.to("meta") if isinstance(x, Tensor) else x for name, x in options.items()}
    meta = (x.to("meta") for x in qkv)
    return plan_with({"sm_count": 1}, *meta, device=device, implementation="ampere", **given)


@pytest.mark.skipif("ampere" not in on.kernels(), reason="GPUs from 8.0 on")
@pytest.mark.parametrize("name", TILES_OF_AMPERE)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_many_tiles_of_ampere(dtype: str, name: str) -> None:
    nq, nk, dims, heads, words = TILES_OF_AMPERE[name]
    options = options_of(words, heads[0])
    number = list(TILES_OF_AMPERE).index(name)
    q, k, v = on.qkv(nq, nk, *dims, dtype=dtype, batch=2, heads=heads)
    tiles = set()
    for device in ("H200", "RTX 4090") if dims[0] <= 64 else ("H200",):
        plan = plan_of_ampere(q, k, v, device=device, **options)
        assert plan.tile is not None
        tiles.add(plan.tile.name)
        on.attend_and_check("ampere", q, k, v, plan=plan, schedules=[number], **options)
    size = name.split("-")[0]
    of_64 = {"d64_large_dropout", "d64_medium_dropout"}
    assert tiles == (of_64 if size == "d64" else {f"{size}_dropout"})
    tensors = inputs(on, nq, nk, *dims, dtype, heads=heads)
    # The two types, which share code, share out the tiles.
    for device in on.pick(
        simulator=("A100" if dtype == "float16" else "H200",), gpu=("A100", "H200")
    ):
        differentiate_and_check(
            on, "ampere", *tensors, schedules=[number], planned_for=device,
            deterministic=number % 2 == 0, **options,
        )  # fmt: skip


@pytest.mark.skipif("ampere" not in on.kernels(), reason="GPUs from 8.0 on")
@pytest.mark.parametrize(
    ("tile", "rows", "dtype"),
    [("d64_dense_dropout", 250, "float16"), ("d64_dense_few_dropout", 60, "bfloat16")],
)
def test_every_key_is_seen(tile: str, rows: int, dtype: str) -> None:
    options = options_of({}, 1)
    q, k, v = on.qkv(rows, 100, 64, 40, dtype=dtype)
    plan = plan_of_ampere(q, k, v, **options)
    assert plan.tile is not None
    assert plan.tile.name == tile
    on.attend_and_check("ampere", q, k, v, plan=plan, schedules=[rows], **options)


@pytest.mark.skipif("ampere" not in on.kernels(), reason="GPUs from 8.0 on")
@pytest.mark.parametrize(("dtype", "word"), [(torch.float16, "f16"), (torch.bfloat16, "bf16")])
def test_the_calls_above_run_every_kernel_of_ampere(dtype: torch.dtype, word: str) -> None:
    planned: set[str] = set()
    calls = [(d, 2048, causal) for d in (64, 96, 128, 256) for causal in (False, True)]
    for d, rows, causal in [*calls, (64, 64, False)]:
        x = torch.empty(2, 16, rows, d, device="meta", dtype=dtype)
        for device in ("A100", "RTX 4090", "H200"):
            for backward in (False, True):
                plan = archflash.explain(
                    x, x, x, dropout_p=0.1, causal=causal, backward=backward, device=device,
                    implementation="ampere",
                ).plan  # fmt: skip
                assert plan is not None
                planned |= {kernel for kernel in plan.kernels if kernel.endswith("_dropout")}
    built: set[str] = set()
    for stem in ("dropout", "dense", "bwd_dropout", "bwd_wide"):
        file = files("archflash") / "_kernels" / "ampere" / f"{stem}_{word}.json"
        for entries in json.loads(file.read_text()).values():
            built |= {kernel for kernel in entries if kernel.endswith("_dropout")}
    assert planned == built


KERNELS_OF_MANY_ROWS = [kernel for kernel in ("ampere", "hopper") if kernel in on.kernels()]


@pytest.mark.parametrize("kernel", KERNELS_OF_MANY_ROWS)
@pytest.mark.parametrize("d", [64, 128])
def test_packed_sequences(kernel: str, d: int) -> None:
    """The random bits are those of the row within its sequence, and of the sequence's number."""
    lengths_q, lengths_k = (150, 0, 21), (140, 7, 290)
    cu_seqlens = {
        "cu_seqlens_q": on.cu_seqlens(lengths_q), "cu_seqlens_k": on.cu_seqlens(lengths_k),
    }  # fmt: skip
    dout, q, k, v = (
        on.rand(sum(of), heads, d, seed=seed, dtype="bfloat16")
        for seed, (of, heads) in enumerate(((lengths_q, 4),) * 2 + ((lengths_k, 2),) * 2)
    )
    options = {"causal": True, **cu_seqlens, **options_of({}, 4)}
    plan = plan_of_ampere(q, k, v, **options) if kernel == "ampere" else None
    on.attend_and_check(kernel, q, k, v, plan=plan, schedules=[1], **options)
    differentiate_and_check(
        on, kernel, dout, q, k, v, schedules=[2], deterministic=False, **options
    )


@on_hopper
@pytest.mark.parametrize(
    ("d", "options", "words"),
    [
        (192, {}, "head dimensions above 128"),
        (64, {"num_splits": 2}, "num_splits 2"),
        (64, {"alibi_slopes": torch.ones(2, device="meta")}, "masks as data"),
        (64, {"softcap": 2.0}, "a softcap"),
        (64, {"scale": -0.5}, "a softcap, or a scale of 0 or less"),
    ],
    ids=["head-dim", "splits", "masks", "softcap", "scale"],
)
def test_what_hopper_leaves_to_ampere(d: int, options: dict[str, Any], words: str) -> None:
    q = torch.empty(1, 2, 300, d, dtype=torch.bfloat16, device="meta")
    decision = archflash.explain(q, q, q, dropout_p=0.1, device="H200", **options)
    assert decision.chosen == "ampere"
    assert words in decision.reasons["hopper"][0]


def test_the_reference_drops_what_dropout_mask_says_and_scales_the_rest() -> None:
    q, k, v = on.qkv(9, 40, dtype="float64" if on.name == "simulator" else "float32", batch=2)
    out, lse = reference.attention(q, k, v, dropout_p=0.25, rng_state=state())
    keep = archflash.dropout_mask((2, q.shape[1], 9, 40), 0.25, state())
    weights = torch.softmax(q.double() @ k.double().transpose(-1, -2) / 8, -1)
    torch.testing.assert_close(out, weights * keep / 0.75 @ v.double())
    without, lse_without = reference.attention(q, k, v)
    assert torch.equal(lse, lse_without)
    assert not torch.equal(out, without)


def test_pytorchs_operations_drop_the_same_weights() -> None:
    lengths = {"cu_seqlens_q": on.cu_seqlens((5, 9)), "cu_seqlens_k": on.cu_seqlens((20, 33))}
    q, k, v = (on.rand(n, 4, 16, seed=n) for n in (14, 53, 53))
    call: dict[str, Any] = {"dropout_p": 0.4, "rng_state": state(), "causal": True, **lengths}
    found = archflash.attention(q, k, v, implementation="torch", **call)
    exact = reference.attention(q, k, v, return_lse=False, **call)
    report = reference.check(found, exact, reference.baseline(q, k, v, **call))
    assert report.ok, report


@each_kernel
@on_cpu
def test_a_state_decides_what_is_dropped_and_the_generator_makes_it(
    kernel: str, dtype: str
) -> None:
    q, k, v = on.qkv(20, 40, dtype=dtype)

    def call(**options: Any) -> Tensor:
        out: Tensor = archflash.attention(q, k, v, dropout_p=0.5, implementation=kernel, **options)
        return out

    assert torch.equal(call(rng_state=state()), call(rng_state=state()))
    assert not torch.equal(call(rng_state=state()), call(rng_state=state(seed=1)))
    assert not torch.equal(call(rng_state=state()), call(rng_state=state(offset=1)))
    torch.manual_seed(3)
    first, second = call(), call()
    torch.manual_seed(3)
    assert torch.equal(call(), first)
    assert not torch.equal(second, first)


def leaves(dtype: str) -> list[Tensor]:
    return [x.requires_grad_() for x in on.qkv(9, 40, 32, dtype=dtype, heads=(2, 1))]


def gradients_of(loss: Callable[..., Tensor], given: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss(*given), given)


GRADIENTS = [(k, d) for k, d in KERNELS if k in kernels_with_gradients(on)]


@pytest.mark.parametrize(("kernel", "dtype"), GRADIENTS)
@on_cpu
def test_gradients_through_autograd_a_checkpoint_and_the_compiler(kernel: str, dtype: str) -> None:
    """All draw the state from PyTorch's generator, and the backward pass drops what the forward
    pass dropped.
    """

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = archflash.attention(q, k, v, dropout_p=0.3, implementation=kernel)
        return out.float().square().sum()

    given = leaves(dtype)
    torch.manual_seed(7)
    rng_state = archflash.dropout_state(on.device)
    torch.manual_seed(7)
    found = gradients_of(loss, given)
    plain = [x.detach() for x in given]
    exact_out = reference.attention(*plain, return_lse=False, dropout_p=0.3, rng_state=rng_state)
    dout = 2 * exact_out.to(plain[0].dtype)
    call: dict[str, Any] = {"dropout_p": 0.3, "rng_state": rng_state}
    exact = reference.attention_backward(dout, *plain, **call)
    rounded = reference.baseline_backward(dout, *plain, **call)
    for name, x in zip(("dq", "dk", "dv"), found, strict=True):
        report = reference.check(x, getattr(exact, name), getattr(rounded, name).double())
        assert report.nrmse < (1e-5 if dtype == "float32" else 2e-2), f"{name}: {report}"

    def recomputed(*tensors: Tensor) -> Tensor:
        result: Tensor = checkpoint(loss, *tensors, use_reentrant=False)
        return result

    torch.manual_seed(7)
    for x, expected in zip(gradients_of(recomputed, given), found, strict=True):
        assert torch.equal(x, expected)
    torch._dynamo.reset()
    traced = torch.compile(loss, backend="aot_eager", fullgraph=True)
    torch.manual_seed(7)
    for x, expected in zip(gradients_of(traced, given), found, strict=True):
        torch.testing.assert_close(x, expected)


@each_kernel
@on_cpu
def test_other_interfaces_pass_dropout_on(kernel: str, dtype: str) -> None:
    from archflash.compat.flash_attn import flash_attn_func

    q, k, v = on.qkv(9, 40, dtype=dtype)
    with archflash.force(kernel):
        torch.manual_seed(5)
        out = archflash.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
        torch.manual_seed(5)
        as_flash = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), dropout_p=0.5)
        torch.manual_seed(5)
        rng_state = archflash.dropout_state(on.device)
        expected = archflash.attention(q, k, v, dropout_p=0.5, rng_state=rng_state)
    assert torch.equal(out, expected)
    torch.testing.assert_close(as_flash.transpose(1, 2), expected)


@pytest.mark.skipif(on.name == "simulator", reason="CUDA graphs need a GPU")
@each_kernel
def test_each_replay_of_a_cuda_graph_drops_other_weights(kernel: str, dtype: str) -> None:
    q, k, v = on.qkv(64, 128, dtype=dtype)

    def call() -> Tensor:
        out: Tensor = archflash.attention(q, k, v, dropout_p=0.5, implementation=kernel)
        return out

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    graph.replay()
    first = out.clone()
    graph.replay()
    assert not torch.equal(out, first)
