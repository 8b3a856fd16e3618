"""archflash: attention kernels written by hand for each NVIDIA GPU generation. One call:
`archflash.attention(q, k, v)`.

The modules stand in layers, and each imports only from layers below its own:

- `_archflash`, the runtime in C++; the exceptions; where PyTorch's kernels fail; `_user_tables`,
  the files in which commands keep what they found on this machine
- `_eager`, who watches a call: torch.compile, modes, tracing, transforms, forward mode; `_given`,
  checks of arguments; `_flops`, what counts of operations are made of; the order of dimensions in
  memory; packed sequences
- what PyTorch's causal biases mean; `masks`, masks as data; dropout; how calls on
  DTensors are split; `_torch_kernels`, which of PyTorch's kernels may serve
- the table of options, the implementations, what was measured, dtypes under autocast, the float64
  reference; masks of the implementation `torch`, its plain operations, and `_torch` itself
- `_proofs`, where the kernels have run; `_calibrated`, what the user measured on the GPU at hand,
  by the formula of `_call_times`
- `_dispatch`, which decides who serves a problem; the implementation `torch` of calls with a cache
- `_gradients`, who computes those of a call, and how; `_eager_gradients` tells the runtime
- `_ops` and `_ops_backward`, a call and its gradients as torch operators; `_autograd`, the eager
  calls that autograd records without them
- `_api`: attention() and explain(); attention_backward(); attention_with_kvcache(); `quantize_fp8`;
  `quantize_mxfp8`; `quantize_nvfp4`; `merge_attention`
- `attention_with_shared_prefix`, `attention_nvfp4` and `warm_up`, made of those; `_stats`,
  `_replacing` and `_overrides`, through which PyTorch's own attention is served
- `scaled_dot_product_attention`
- `distributed`, one sequence over many GPUs, which is imported only by who wants it
- `compat`, the interfaces of other libraries, and `integrations` into others, which are imported
  only by who wants them
- `sim`, which makes a problem, selects, allocates and simulates
- this package, which registers the simulator with the runtime; above it `verify`, which tries the
  kernels on a GPU, `_calibrate`, which measures them, and the command line
"""

from importlib import import_module as _import_module
from importlib.util import find_spec as _find_spec
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _find_spec("archflash._archflash") is None:
    raise ImportError(
        f"the compiled part of archflash is not in {__path__[0]}. If those are the sources, run "
        "`pip install .` in the clone, and start Python outside of its folder python"
    )

from torch import __version__ as _torch_version

if tuple(map(int, _torch_version.split(".")[:2])) < (2, 6):
    raise ImportError(
        f"archflash needs torch 2.6 or newer, and this is torch {_torch_version}: "
        "run `pip install --upgrade torch`"
    )

from archflash import _archflash as _native
from archflash import masks, reference
from archflash._api import attention, explain
from archflash._archflash import version as __version__
from archflash._backward import attention_backward
from archflash._dispatch import Decision, approximate, force
from archflash._dropout import dropout_mask, dropout_state
from archflash._errors import (
    ArchflashError,
    ForcedImplementationError,
    LaunchError,
    NotCompiledError,
    UnsupportedError,
)
from archflash._kvcache import attention_with_kvcache
from archflash._merge import merge_attention
from archflash._nvfp4_attention import attention_nvfp4
from archflash._overrides import disable, enable, enabled
from archflash._overrides import enable_if_asked as _enable_if_asked
from archflash._quantize import quantize_fp8
from archflash._quantize_mxfp8 import quantize_mxfp8
from archflash._quantize_nvfp4 import quantize_nvfp4
from archflash._registry import Implementation, implementations
from archflash._sdpa import scaled_dot_product_attention
from archflash._shared_prefix import attention_with_shared_prefix
from archflash._stats import Stats, stats
from archflash._warm_up import warm_up
from archflash.masks import summarize_mask

__all__ = [
    "ArchflashError",
    "Decision",
    "ForcedImplementationError",
    "Implementation",
    "LaunchError",
    "NotCompiledError",
    "Stats",
    "UnsupportedError",
    "__version__",
    "approximate",
    "attention",
    "attention_backward",
    "attention_nvfp4",
    "attention_with_kvcache",
    "attention_with_shared_prefix",
    "disable",
    "dropout_mask",
    "dropout_state",
    "enable",
    "enabled",
    "explain",
    "force",
    "implementations",
    "masks",
    "merge_attention",
    "quantize_fp8",
    "quantize_mxfp8",
    "quantize_nvfp4",
    "reference",
    "scaled_dot_product_attention",
    "stats",
    "summarize_mask",
    "warm_up",
]


if _TYPE_CHECKING:
    from archflash import compat as compat
    from archflash import distributed as distributed
    from archflash import integrations as integrations
    from archflash import sim as sim
else:
    _PACKAGES = ("compat", "distributed", "integrations", "sim")

    def __getattr__(name: str) -> _Any:
        """The packages that are imported only by who wants them, as by an import of their own."""
        if name in _PACKAGES:
            return _import_module(f"archflash.{name}")
        raise AttributeError(f"module 'archflash' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *_PACKAGES})


def _simulate(plan: _native.LaunchPlan, tensors: dict[str, _Any]) -> None:
    """Runs a plan on tensors on the CPU. The simulator is imported at the first such call only."""
    from archflash.sim import _attention

    _attention.serve(plan, tensors)


_native.set_simulate(_simulate)
_enable_if_asked()
