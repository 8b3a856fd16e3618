"""PyTorch's attention operators, replaced while archflash stands in front of them.

A kernel in front of an operator serves a call, or hands it to PyTorch's own kernel, which it keeps.
Where the runtime can stand there itself, it serves calls that it knows without Python.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from archflash import _archflash as _native
from archflash import _dispatch, _forward_operators, _mended_calls, _schemas, _sharding
from archflash._forward_operators import Kernel
from archflash._stats import declined

_KEY = "CUDA"  # the dispatch key whose kernels are replaced; tests take "CPU"


class _Inside(threading.local):
    """Whether this thread is inside a kernel of PyTorch's. Some of them call other operators of the
    list, and that must not count as a call.
    """

    pytorch = False


_inside = _Inside()


def _original(operator: str) -> Kernel | None:
    """PyTorch's own kernel, which takes a set of dispatch keys before its arguments; None if there
    is none, or no way to call it while it is replaced.
    """
    name = f"aten::{operator}"
    if not (
        _schemas.find(operator) is not None
        and torch._C._dispatch_has_kernel_for_dispatch_key(name, _KEY)
    ):
        return None
    if hasattr(torch.library, "get_kernel"):
        kernel: Kernel = torch.library.get_kernel(name, _KEY).call_boxed
        return kernel
    return _BY_OTHER_OPERATORS.get(operator)


def _flash_by_its_part(
    keys: object, query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0,
    is_causal: bool = False, return_debug_mask: bool = False, *, scale: float | None = None,
) -> Any:  # fmt: skip
    nq, nk = query.shape[2], key.shape[2]
    out, lse, *rest = torch.ops.aten._flash_attention_forward(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), None, None, nq, nk,
        dropout_p, is_causal, return_debug_mask, scale=scale,
    )  # fmt: skip
    return out.transpose(1, 2), lse, None, None, nq, nk, *rest


def _efficient_by_its_part(
    keys: object, query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None,
    compute_log_sumexp: bool, dropout_p: float = 0.0, is_causal: bool = False, *,
    scale: float | None = None,
) -> Any:  # fmt: skip
    out, lse, seed, offset, *_ = torch.ops.aten._efficient_attention_forward(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attn_bias,
        None, None, None, None, dropout_p, int(is_causal), compute_log_sumexp, scale=scale,
    )  # fmt: skip
    return out.transpose(1, 2), lse, seed, offset


# Versions of PyTorch without torch.library.get_kernel cannot call a kernel that is replaced. Two
# operators only transpose and call another one there, which is not replaced; the others keep
# PyTorch's kernel.
_BY_OTHER_OPERATORS: dict[str, Kernel] = {
    "_scaled_dot_product_flash_attention": _flash_by_its_part,
    "_scaled_dot_product_efficient_attention": _efficient_by_its_part,
}


def _replacement(operator: str, serve: Kernel, original: Kernel) -> Kernel:
    """The kernel that stands before PyTorch's own one, the original."""
    # Asking the dispatcher for the keys of each call takes time, and no kernel on CUDA reads them.
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEY))

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if _inside.pytorch:
            return original(keys, *args, **kwargs)
        result = serve(*args, **kwargs)
        if type(result) is not str:
            return result
        declined.add(result)
        mended = _mended_calls.Call(operator, args, kwargs)
        if not mended.differs:  # else the runtime asks again for each call of the kind
            _native.note_declined(result)
        _inside.pytorch = True
        _native.note_inside_pytorch(True)
        try:
            return mended.results(original(keys, *mended.args, **mended.kwargs))
        finally:
            _inside.pytorch = False
            _native.note_inside_pytorch(False)

    return kernel


# Operators whose calls the runtime serves, or hands to PyTorch's own kernel, without Python where
# it knows one like it.
_IN_RUNTIME = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_efficient_attention",
    "_flash_attention_forward",
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_cudnn_attention_backward",
    "_flash_attention_backward",
)


def runtime_serves() -> bool:
    """Whether the runtime can stand in front of PyTorch's operators itself. Where it cannot, the
    functions in Python serve every call.
    """
    return _native.has_torch_functions() and _schemas.handle_functions() is not None


def _install_in_runtime(operator: str, kernel: Kernel) -> None:
    """Lets the runtime serve an operator, and `kernel` what the runtime does not know. Nothing
    happens where the operator takes arguments of a kind that the runtime does not read.
    """
    arguments = getattr(torch.ops.aten, operator).default._schema.arguments
    types, functions = _schemas.letters(operator), _schemas.handle_functions()
    if types is None or functions is None:
        return
    positional = sum(not argument.kwarg_only for argument in arguments)
    names = [argument.name for argument in arguments[positional:]]

    def by_python(*given: Any) -> Any:
        return kernel(*given[:positional], **dict(zip(names, given[positional:], strict=True)))

    _native.install_operator(operator, types, _KEY, by_python, _dispatch.steered, *functions)


class Replaced:
    """PyTorch's operators while archflash stands in front of them, until remove()."""

    def __init__(self, operators: Mapping[str, Kernel]) -> None:
        self._library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        try:
            self._install(operators)
        except BaseException:
            self.remove()
            raise

    def _install(self, operators: Mapping[str, Kernel]) -> None:
        _forward_operators.flash_shapes()  # asks PyTorch, outside of any call
        _sharding.register_if_loaded()  # PyTorch's operator for the CPU has no strategy
        kernels = {
            operator: _replacement(operator, serve, original)
            for operator, serve in operators.items()
            if (original := _original(operator)) is not None
        }
        with warnings.catch_warnings():
            # PyTorch warns that a kernel of its own is replaced, which is what was asked for. It
            # does so once: the runtime's kernels come afterwards, in front of these.
            warnings.simplefilter("ignore", UserWarning)
            for operator, kernel in kernels.items():
                self._library.impl(operator, kernel, _KEY)
        if runtime_serves():
            for operator in _IN_RUNTIME:
                if operator in kernels:
                    _install_in_runtime(operator, kernels[operator])

    def remove(self) -> None:
        _native.remove_operators()
        self._library._destroy()
