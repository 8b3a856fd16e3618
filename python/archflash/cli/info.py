"""`archflash info`: version, devices, implementations and what each is compiled for, environment
variables.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch

from archflash import _archflash as _native
from archflash import _dispatch
from archflash._registry import implementations

ENVIRONMENT = (
    (
        "ARCHFLASH_FORCE_IMPLEMENTATION",
        "a name",
        "forces an implementation; read at import; force() and the argument beat it",
    ),
    (
        "ARCHFLASH_FALLBACK",
        "error",
        "a CUDA call that no kernel can serve raises instead of running in PyTorch",
    ),
    (
        "ARCHFLASH_UNPROVED",
        "1, or names",
        "kernels are chosen on GPUs where they have never run: all, or those named, by comma",
    ),
    (
        "ARCHFLASH_TABLES",
        "a folder",
        "where commands keep what they found on this machine; default ~/.local/share/archflash",
    ),
    (
        "ARCHFLASH_SDPA",
        "1",
        "PyTorch's own attention is served by archflash, in programs that only import torch too",
    ),
    (
        "ARCHFLASH_CHECK",
        "1",
        "attention_with_kvcache checks lengths and page tables on the device first; read at import",
    ),
    (
        "ARCHFLASH_SIM_DEVICE",
        "a known GPU",
        "what the simulator plans for; default each implementation's home GPU",
    ),
    (
        "ARCHFLASH_SIM_LIMIT",
        "seconds",
        "a call that the simulator would take longer for raises; inf: none does; default 60",
    ),
    (
        "ARCHFLASH_APPROXIMATE",
        "int8 or another word of approximate=",
        "calls are approximate where a kernel offers it; read at import; default exact",
    ),
    (
        "ARCHFLASH_SAGE_APPROXIMATE",
        "as ARCHFLASH_APPROXIMATE",
        "the same for archflash.compat.sageattention alone; read at import; default exact",
    ),
    (
        "ARCHFLASH_SGLANG_REPLACES",
        "a name of SGLang's",
        "archflash takes the place of that attention backend; read when SGLang loads its plug-ins",
    ),
)


def add_parser(commands: Any) -> None:
    """Adds the command to the parser of `archflash`."""
    parser = commands.add_parser(
        "info", help="version, devices, implementations, environment variables (the default)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the report."""
    print(f"archflash {_native.version}, torch {torch.__version__}")
    print("\ndevices")
    trouble = _dispatch.driver_problem()
    if trouble:
        print(f"  none: {trouble}")
    else:
        for index in range(_native.driver_status().device_count):
            print(f"  cuda:{index}  {_dispatch.describe_device(_dispatch.query_device(index))}")
    print("\nimplementations, best first among those that take the dtype")
    for implementation in implementations():
        print("  " + str(implementation).replace("\n", "\n  "))
    if left_out := _native.left_out_targets():
        print(f"  no machine code in this build, but PTX, for {', '.join(left_out)}")
    print("\nenvironment variables")
    for name, values, effect in ENVIRONMENT:
        value = os.environ.get(name)
        print(f"  {name}={values}: {effect}; now {'unset' if value is None else repr(value)}")
    print("\nknown GPUs for explain --device")
    print("  " + ", ".join(row.device.name for row in _native.known_devices()))
    return 0
