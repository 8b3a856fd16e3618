"""The interfaces of other attention libraries, served by archflash, for code that is written for
them.

- `archflash.compat.flash_attn`: FlashAttention-2's package `flash_attn`
- `archflash.compat.flash_attn_interface`: FlashAttention-3's module `flash_attn_interface`
- `archflash.compat.flash_attn_2_cuda`: the extension below the first
- `archflash.compat.flash_mla`: FlashMLA's module `flash_mla`
- `archflash.compat.sageattention`, `archflash.compat.sageattn3`: SageAttention's packages

Import them in place of the originals. `install` gives them the originals' names, for code that
cannot be edited.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from archflash import _archflash as _native
from archflash.compat import (
    _operators,
    flash_attn,
    flash_attn_2_cuda,
    flash_attn_interface,
    flash_mla,
    sageattention,
    sageattn3,
)
from archflash.compat.flash_attn import bert_padding, layers, ops
from archflash.compat.flash_attn import flash_attn_interface as _flash_attn_2_interface
from archflash.compat.flash_attn.layers import rotary
from archflash.compat.flash_attn.ops import triton
from archflash.compat.flash_attn.ops.triton import rotary as _triton_rotary
from archflash.compat.sageattention import core as _sageattention_core

__all__ = [
    "flash_attn",
    "flash_attn_2_cuda",
    "flash_attn_interface",
    "flash_mla",
    "install",
    "sageattention",
    "sageattn3",
    "uninstall",
]

_MODULES: dict[str, ModuleType] = {
    "flash_attn": flash_attn,
    "flash_attn.bert_padding": bert_padding,
    "flash_attn.flash_attn_interface": _flash_attn_2_interface,
    "flash_attn.layers": layers,
    "flash_attn.layers.rotary": rotary,
    "flash_attn.ops": ops,
    "flash_attn.ops.triton": triton,
    "flash_attn.ops.triton.rotary": _triton_rotary,
    "flash_attn_2_cuda": flash_attn_2_cuda,
    "flash_attn_interface": flash_attn_interface,
    "flash_mla": flash_mla,
    "sageattention": sageattention,
    "sageattention.core": _sageattention_core,
    "sageattn3": sageattn3,
}
# The extension calls functions of that module, which therefore cannot import it.
vars(_flash_attn_2_interface)["flash_attn_gpu"] = flash_attn_2_cuda
_TOP_LEVEL = tuple(name for name in _MODULES if "." not in name)
_DISTRIBUTION = "archflash"
# diffusers asks for a version of this name, and takes no module without one. It is that of the
# interface.
_VERSIONS = {"sageattention": "2.2.0+archflash"}
_hidden: dict[str, ModuleType] = {}  # modules that install() took the names of


class _Names(importlib.metadata.Distribution):
    """A distribution with modules of `install` as its top-level names."""

    def __init__(self, name: str, version: str, modules: Iterable[str]) -> None:
        self._texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            "top_level.txt": "\n".join(modules),
        }

    def read_text(self, filename: str) -> str | None:
        return self._texts.get(filename)

    def locate_file(self, path: Any) -> Any:
        return Path(__file__).parent / path


class _Provider(importlib.metadata.DistributionFinder):
    """Finds archflash with all modules among all distributions, for
    importlib.metadata.packages_distributions(), and those of _VERSIONS by name. It is asked last,
    so an original that is installed is found in its place.
    """

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        """No module: `install` has put them into sys.modules."""

    def find_distributions(self, context: Any = None) -> Iterator[importlib.metadata.Distribution]:
        if context is None or context.name is None:  # by its name it is found as it is installed
            yield _Names(_DISTRIBUTION, _native.version, _TOP_LEVEL)
        elif context.name in _VERSIONS:
            yield _Names(context.name, _VERSIONS[context.name], [context.name])


_PROVIDER = _Provider()


def install(*, replace: bool = False) -> None:
    """Makes ``import flash_attn`` (FlashAttention-2), ``import flash_attn_interface``
    (FlashAttention-3), ``import flash_mla``, ``import sageattention`` and ``import sageattn3`` find
    the modules of this package, in this process.

    The operators torch.ops.flash_attn and torch.ops.flash_attn_3 are registered, too, if those of
    the originals are not. Call it before the code that imports them. What looks for the installed
    distribution behind such a name, as transformers does for
    ``attn_implementation="flash_attention_2"``, finds archflash and not the original.

    Args:
        replace: also where a module of such a name was imported before; code that has taken
            functions from it keeps them. Off by default.

    Raises:
        RuntimeError: a module of such a name was imported before, and replace is off.

    Example:
        >>> import archflash.compat
        >>> archflash.compat.install()
        >>> from flash_attn import flash_attn_func
        >>> archflash.compat.uninstall()
    """
    others = {
        name: sys.modules[name]
        for name, module in _MODULES.items()
        if sys.modules.get(name, module) is not module
    }
    if others and not replace:
        raise RuntimeError(
            f"{', '.join(others)} was imported before archflash.compat.install(): call install() "
            "first, or with replace=True"
        )
    _hidden.update(others)
    sys.modules.update(_MODULES)
    _operators.register()
    if _PROVIDER not in sys.meta_path:
        sys.meta_path.append(_PROVIDER)
    # transformers 5 asks for the distributions once, at import, and looks a module up in the answer
    # without asking whether it is listed.
    transformers = sys.modules.get("transformers.utils.import_utils")
    distributions = getattr(transformers, "PACKAGE_DISTRIBUTION_MAPPING", None)
    if isinstance(distributions, dict):
        for name in _TOP_LEVEL:
            distributions.setdefault(name, [_DISTRIBUTION])


def uninstall() -> None:
    """Takes the names back that `install` gave; modules that it replaced have them again."""
    _operators.remove()
    if _PROVIDER in sys.meta_path:
        sys.meta_path.remove(_PROVIDER)
    for name, module in _MODULES.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]
            if name in _hidden:
                sys.modules[name] = _hidden.pop(name)
