"""Plain tensors and others: which calls go through PyTorch's dispatcher, and what a kernel reads of
a tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from archflash import _archflash as _native
from archflash._eager import in_transform, is_tracing


def goes_through_operator(*arguments: Any) -> bool:
    """Whether a call goes through torch's dispatcher: while PyTorch traces or transforms it, or if
    an argument is no plain tensor (a subclass, a fake tensor), whose own dispatcher finds the real
    ones. Arguments that are no tensors do not matter.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or is_tracing()
        or in_transform()
        or not _native.all_plain(*arguments)
    )


def is_symbolic(*values: Any) -> bool:
    """Whether a call is traced without numbers: while PyTorch compiles it, or where a number or the
    size of a tensor is symbolic.
    """
    return torch.compiler.is_compiling() or has_symbols(*values)


def has_symbols(*values: Any) -> bool:

    def symbolic(x: Any) -> bool:
        if isinstance(x, Tensor):
            return not x.is_nested and any(not isinstance(size, int) for size in x.shape)
        if isinstance(x, (tuple, list)):
            return any(symbolic(part) for part in x)
        return isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool))

    return symbolic(values)


def resolved(x: Any) -> Any:
    """A tensor whose memory holds its values: a copy if x has the negative bit or is a zero tensor,
    otherwise x itself.
    """
    # A subclass is handled by its own dispatcher first, and resolved when it comes back as a plain
    # tensor.
    if isinstance(x, Tensor) and _native.is_plain_tensor(x) and (x.is_neg() or x._is_zerotensor()):
        return x.clone()
    return x


def plain(x: Any) -> Any:
    """A plain tensor whose memory holds its values, for a tensor; everything else as it is."""
    if not isinstance(x, Tensor) or x.layout is not torch.strided:  # sparse ones are refused later
        return x
    return resolved(x.as_subclass(Tensor))
