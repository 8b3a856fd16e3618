"""A hash of a kernel's PTX, by which a recording knows the kernel that it was made from."""

from __future__ import annotations

import hashlib
import re

from .mutation.statements import kernel_module

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_LINE_INFORMATION = re.compile(r"^\s*\.(loc|file)\b[^\n]*", re.MULTILINE)


def ptx_hash(text: str, kernel: str) -> str:
    """16 hexadecimal digits for what a module says of one kernel.

    Comments, line information and spacing do not count, nor do other kernels of the module: the
    hash stays when the CUDA source is only commented anew or its lines move.

    Raises:
        ValueError: the module has no such kernel.
    """
    return module_hash(kernel_module(text, kernel))


def module_hash(module: str) -> str:
    """The same for the whole text of a module."""
    bare = _LINE_INFORMATION.sub("", _COMMENT.sub(" ", module))
    return hashlib.sha256(" ".join(bare.split()).encode()).hexdigest()[:16]
