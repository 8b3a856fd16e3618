"""PyTorch's own samples of its attention operators (OpInfo): outputs and gradients are as near to
float64 as OpInfo asks, and its wrong calls raise what it says.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPERATORS = [x for x in op_db if "scaled_dot_product_attention" in x.name]
TOLERANCE = {
    torch.float16: 3e-2, torch.bfloat16: 2e-1, torch.float32: 1e-4, torch.float64: 1e-7,
}  # fmt: skip
CASES = [
    (op, dtype)
    for op in OPERATORS
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    if dtype in op.supported_dtypes(DEVICE)
]


def _leaves(sample: Any) -> list[torch.Tensor]:
    tensors = (sample.input, *sample.args, *sample.kwargs.values())
    return [x for x in tensors if isinstance(x, torch.Tensor)]


def _run(op: Any, sample: Any, backward: bool) -> list[torch.Tensor]:
    out = op(sample.input, *sample.args, **sample.kwargs)
    if not backward:
        return [out]
    leaves = [x for x in _leaves(sample) if x.requires_grad]
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).reshape(out.shape)
    return [out, *torch.autograd.grad(out, leaves, weights.to(out.device, out.dtype))]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "sample" not in metafunc.fixturenames:
        return
    cases = []
    for op, dtype in CASES:
        for backward in (False, True):
            torch.manual_seed(0)
            samples = op.sample_inputs(DEVICE, dtype, requires_grad=backward)
            for i, sample in enumerate(samples):
                if not sample.kwargs.get("dropout_p"):
                    name = f"{op.name}-{str(dtype)[6:]}-{'both' if backward else 'forward'}-{i}"
                    cases.append(pytest.param(op, sample, backward, id=name))
    metafunc.parametrize(("op", "sample", "backward"), cases)


def test_samples(op: Any, sample: Any, backward: bool) -> None:
    found = _run(op, sample, backward)
    wide = sample.transform(
        lambda x: (
            x.detach().double().requires_grad_(x.requires_grad)
            if isinstance(x, torch.Tensor) and x.is_floating_point()
            else x
        )
    )
    exact = _run(op, wide, backward)  # PyTorch's, because no kernel of ours takes float64
    tolerance = TOLERANCE[sample.input.dtype]
    for x, wanted in zip(found, exact, strict=True):
        torch.testing.assert_close(
            x.double(), wanted, atol=tolerance, rtol=tolerance, equal_nan=True
        )


@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.name)
def test_wrong_calls(op: Any) -> None:
    if op.error_inputs_func is None:
        pytest.skip("OpInfo has none")
    for wrong in op.error_inputs(DEVICE):
        sample = wrong.sample_input
        with pytest.raises(wrong.error_type, match=wrong.error_regex):
            op(sample.input, *sample.args, **sample.kwargs)
