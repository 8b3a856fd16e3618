"""Every stride and offset of q, k, v and attn_mask gives the right output, and every one of the
output's gradient the right gradients, whoever serves the call.

A load at an odd address is a fault that spoils the CUDA context: if the copies that prevent it are
missing, all tests after the first of these fail too.
"""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import archflash
from archflash import reference

from ..core_set.odd_strides import READABLE, UNREADABLE, laid_out
from .gpu_cases import DTYPES

pytestmark = pytest.mark.gpu

# PyTorch's kernel that is to serve the call where it can; None for what dispatch chooses.
BACKENDS = {
    "automatic": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
each_backend = pytest.mark.parametrize("backend", BACKENDS)


def attend_and_check(names: list[str], dtype: str, backend: str, **call: Any) -> None:
    kind = DTYPES[dtype]
    shapes = ((2, 2, 40, 64), (2, 2, 72, 64), (2, 2, 72, 64))
    q, k, v = (
        laid_out(name, shape, kind, "cuda", seed)
        for seed, (name, shape) in enumerate(zip(names, shapes, strict=True))
    )
    wanted = BACKENDS[backend]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a fallback is named once; PyTorch says why not flash
        if wanted is None:
            out = archflash.attention(q, k, v, **call)
        else:
            with sdpa_kernel([wanted, SDPBackend.MATH]):
                out = archflash.attention(q, k, v, implementation="torch", **call)
    torch.cuda.synchronize()
    expected = reference.attention(q, k, v, return_lse=False, **call)
    report = reference.check(out, expected, reference.baseline(q, k, v, **call))
    # PyTorch's fp32 kernels multiply in three TF32 products: up to 1.9 times the bound on an H200.
    room = 4 if dtype == "float32" else 1
    assert report.max_error <= room * report.bound, report


@each_dtype
@each_backend
@pytest.mark.parametrize("name", [*READABLE, *UNREADABLE])
def test_odd_strides_and_offsets_give_the_right_output(name: str, backend: str, dtype: str) -> None:
    for odd in range(3):
        names = [name if i == odd else "dense" for i in range(3)]
        attend_and_check(names, dtype, backend)
    calls: list[dict[str, Any]] = [{"causal": True, "q_offset": 0}, {"window": (20, 9)}]
    for call in calls:
        attend_and_check([name] * 3, dtype, backend, **call)


@each_dtype
@each_backend
@pytest.mark.parametrize("boolean", [True, False], ids=["bool", "bias"])
def test_masks_of_odd_strides_and_offsets_give_the_right_output(
    boolean: bool, backend: str, dtype: str
) -> None:
    for name in (*READABLE, *UNREADABLE):
        for shape in ((2, 2, 40, 72), (1, 1, 40, 72), (1, 1, 1, 72), (1, 1, 40, 1)):
            mask = laid_out(name, shape, DTYPES[dtype], "cuda", seed=7)
            if boolean:  # the same strides, counted in bytes
                start = mask.storage_offset()
                positive = torch.empty(0, dtype=mask.dtype, device="cuda")
                positive = positive.set_(mask.untyped_storage()) > -1
                mask = positive.as_strided(mask.shape, mask.stride(), start)
            attend_and_check(["dense"] * 3, dtype, backend, attn_mask=mask)


@each_dtype
@each_backend
@pytest.mark.parametrize("name", [*READABLE, *UNREADABLE])
def test_output_gradients_of_odd_strides_and_offsets_give_the_right_gradients(
    name: str, backend: str, dtype: str
) -> None:
    wanted = BACKENDS[backend]
    seen = torch.ones(40, 40, dtype=torch.bool, device="cuda")
    calls: list[dict[str, Any]] = [{}, {"attn_mask": seen}]
    for call, heads in itertools.product(calls, (1, 2)):
        shape = (2, heads, 40, 64)
        dense = [laid_out("dense", shape, DTYPES[dtype], "cuda", seed) for seed in range(3)]
        q, k, v = (x.requires_grad_() for x in dense)
        dout = laid_out(name, shape, DTYPES[dtype], "cuda", 7)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch says why not flash
            if wanted is None:
                out = archflash.attention(q, k, v, **call)
            else:
                with sdpa_kernel([wanted, SDPBackend.MATH]):
                    out = archflash.attention(q, k, v, implementation="torch", **call)
        expected = torch.autograd.grad(out, (q, k, v), dout.contiguous().clone(), retain_graph=True)
        for x, y in zip(torch.autograd.grad(out, (q, k, v), dout), expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-2)  # sums in another order
