"""The interfaces of other attention libraries, served by archflash, for code that is written for
them.

- `archflash.compat.flash_attn`: FlashAttention-2's package `flash_attn`
- `archflash.compat.flash_attn.cute`: FlashAttention-4's functions
- `archflash.compat.flash_attn_interface`: FlashAttention-3's module `flash_attn_interface`
- `archflash.compat.flash_attn_2_cuda`, `archflash.compat.flash_attn_3`: what lies below these two
- `archflash.compat.flash_mla`: FlashMLA's module `flash_mla`
- `archflash.compat.sageattention`, `archflash.compat.sageattn3`: SageAttention's packages
- `archflash.compat.xformers`: of xformers `memory_efficient_attention` and its masks

Import them in place of the originals. `install` gives them the originals' names, for code that
cannot be edited.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from archflash.compat import (
    _operators,
    flash_attn,
    flash_attn_2_cuda,
    flash_attn_3,
    flash_attn_interface,
    flash_mla,
    sageattention,
    sageattn3,
    xformers,
)
from archflash.compat.flash_attn import bert_padding, cute, layers, ops
from archflash.compat.flash_attn import flash_attn_interface as _flash_attn_2_interface
from archflash.compat.flash_attn.layers import rotary
from archflash.compat.flash_attn.ops import triton
from archflash.compat.flash_attn.ops.triton import rotary as _triton_rotary
from archflash.compat.sageattention import core as _sageattention_core
from archflash.compat.xformers import ops as _xformers_ops
from archflash.compat.xformers import version as _xformers_version
from archflash.compat.xformers.ops import fmha as _fmha

__all__ = [
    "flash_attn",
    "flash_attn_2_cuda",
    "flash_attn_3",
    "flash_attn_interface",
    "flash_mla",
    "install",
    "sageattention",
    "sageattn3",
    "uninstall",
    "xformers",
]

_MODULES: dict[str, ModuleType] = {
    "flash_attn": flash_attn,
    "flash_attn.bert_padding": bert_padding,
    "flash_attn.cute": cute,
    "flash_attn.cute.interface": cute,
    "flash_attn.flash_attn_interface": _flash_attn_2_interface,
    "flash_attn.layers": layers,
    "flash_attn.layers.rotary": rotary,
    "flash_attn.ops": ops,
    "flash_attn.ops.triton": triton,
    "flash_attn.ops.triton.rotary": _triton_rotary,
    "flash_attn_2_cuda": flash_attn_2_cuda,
    "flash_attn_3": flash_attn_3,
    # TransformerEngine and Megatron import it from there.
    "flash_attn_3.flash_attn_interface": flash_attn_interface,
    "flash_attn_interface": flash_attn_interface,
    "flash_mla": flash_mla,
    "sageattention": sageattention,
    "sageattention.core": _sageattention_core,
    "sageattn3": sageattn3,
    "xformers": xformers,
    "xformers.ops": _xformers_ops,
    "xformers.ops.fmha": _fmha,
    "xformers.ops.fmha.attn_bias": _fmha.attn_bias,
    "xformers.version": _xformers_version,
}
# The extension calls functions of that module, which therefore cannot import it.
vars(_flash_attn_2_interface)["flash_attn_gpu"] = flash_attn_2_cuda
# The distributions of the originals, by which transformers and diffusers look for them: names, the
# versions of these interfaces, and their modules.
_DISTRIBUTIONS = {
    "flash_attn": (f"{flash_attn.__version__}+archflash", ("flash_attn", "flash_attn_2_cuda")),
    "flash_attn_3": ("3.0.0+archflash", ("flash_attn_3", "flash_attn_interface")),
    "flash_attn_4": ("4.0.0+archflash", ("flash_attn",)),  # flash_attn.cute
    "flash_mla": ("1.0.0+archflash", ("flash_mla",)),
    "sageattention": ("2.2.0+archflash", ("sageattention",)),
    "sageattn3": ("1.0.0+archflash", ("sageattn3",)),
    "xformers": (f"{xformers.__version__}+archflash", ("xformers",)),
}
_hidden: dict[str, ModuleType] = {}  # modules that install() took the names of
_listed: list[tuple[dict[str, list[str]], str]] = []  # what it put into tables of others


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
    """Finds _DISTRIBUTIONS, by name and among all. It is asked last, so an original that is
    installed is found in its place.
    """

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        """No module: `install` has put them into sys.modules."""

    def find_distributions(self, context: Any = None) -> Iterator[importlib.metadata.Distribution]:
        wanted = None if context is None or context.name is None else _normal(context.name)
        for name, (version, modules) in _DISTRIBUTIONS.items():
            if wanted in (None, name):
                yield _Names(name, version, modules)


def _normal(name: str) -> str:
    return re.sub("[-_.]+", "_", name).lower()


_PROVIDER = _Provider()


def install(*, replace: bool = False) -> None:
    """Makes ``import flash_attn`` (FlashAttention-2), ``import flash_attn_interface``
    (FlashAttention-3), ``import flash_mla``, ``import sageattention`` and ``import sageattn3`` find
    the modules of this package, in this process; ``import xformers``, too, if xformers is not
    installed, as it has much besides attention.

    The operators torch.ops.flash_attn and torch.ops.flash_attn_3 are registered, too, if those of
    the originals are not. Call it before the code that imports them. What looks for the installed
    distribution behind such a name, as transformers and diffusers do, finds one of the version that
    these interfaces have. An install that raises changes nothing.

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
    given = _given_names()
    others = {
        name: sys.modules[name]
        for name, module in given.items()
        if sys.modules.get(name, module) is not module
    }
    if others and not replace:
        raise RuntimeError(
            f"{', '.join(others)} was imported before archflash.compat.install(): call install() "
            "first, or with replace=True"
        )
    _operators.register()  # the only step here that can fail
    _hidden.update(others)
    sys.modules.update(given)
    if _PROVIDER not in sys.meta_path:
        sys.meta_path.append(_PROVIDER)
    _tell_transformers()


def _given_names() -> dict[str, ModuleType]:
    """The modules of `install`: xformers has more than its attention, so where it is installed it
    stays.
    """
    ours = sys.modules.get("xformers", xformers) is xformers
    if ours and importlib.machinery.PathFinder.find_spec("xformers") is None:
        return _MODULES
    return {name: x for name, x in _MODULES.items() if name.partition(".")[0] != "xformers"}


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
    while _listed:
        known, name = _listed.pop()
        known.pop(name, None)
    _forget_distributions()


def _forget_distributions() -> None:
    """Has transformers 5 look for flash-attn and for all distributions again, which it does once,
    as soon as it makes a model.
    """
    for name, function in vars(sys.modules.get("transformers.utils.import_utils", object)).items():
        if name.startswith(("is_flash_attn_", "_package_distribution_mapping")):
            clear = getattr(function, "cache_clear", None)
            if clear is not None:
                clear()


def _tell_transformers() -> None:
    """Adds _DISTRIBUTIONS to what transformers 5 was told of distributions when it was imported."""
    _forget_distributions()
    module = sys.modules.get("transformers.utils.import_utils")
    known = getattr(module, "PACKAGE_DISTRIBUTION_MAPPING", None)  # of its earlier versions
    if isinstance(known, dict):
        named = [(one, name) for name, (_, modules) in _DISTRIBUTIONS.items() for one in modules]
        for one in {one for one, _ in named}.difference(known):
            known[one] = [name for other, name in named if other == one]
            _listed.append((known, one))
