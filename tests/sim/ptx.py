"""Small PTX programs for tests: a body between a standard header and `ret`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from archflash import sim

TARGET = "sm_90a"
HEADER = f""".version 8.7
.target {TARGET}
.address_size 64
"""


def program(
    body: str, *, parameters: int = 2, module: str = "", shared: int = 0, target: str = TARGET
) -> str:
    """A module with the kernel `test`: `parameters` pointers in %rd0, %rd1, ...; %r0 is %tid.x,
    %rd10 + %rd11 are the addresses of this thread's 4-byte element of the first two buffers.
    `shared` bytes of static shared memory are called `smem`.
    """
    names = ", ".join(f".param .u64 p{index}" for index in range(parameters))
    loads = "\n".join(f"ld.param.u64 %rd{index}, [p{index}];" for index in range(parameters))
    elements = "\n".join(
        f"mad.wide.u32 %rd{10 + index}, %r0, 4, %rd{index};" for index in range(min(parameters, 2))
    )
    memory = f".shared .align 16 .b8 smem[{shared}];" if shared else ""
    return f"""{HEADER.replace(TARGET, target)}{module}
.visible .entry test({names})
{{
.reg .pred %p<10>;
.reg .b16 %h<40>;
.reg .b32 %r<60>;
.reg .f32 %f<40>;
.reg .b64 %rd<40>;
.reg .f64 %d<20>;
{memory}
mov.u32 %r0, %tid.x;
{loads}
{elements}
{body}
ret;
}}
"""


def run(text: str, *arguments: Any, **options: Any) -> sim.Report:
    """Loads and launches `test`."""
    return sim.launch(sim.load(text), "test", arguments, **options)


def lanes(body: str, *inputs: Tensor, **options: Any) -> Tensor:
    """Runs `body` on one warp: it finds up to three int32 inputs of this lane in %r1, %r2, %r3 and
    leaves its result in %r9.
    """
    loads = "\n".join(
        f"ld.global.u32 %r{index + 1}, [%rd1+{128 * index}];" for index in range(len(inputs))
    )
    text = program(
        f"""
        mov.u64 %rd1, %rd11;
        {loads}
        {body}
        st.global.u32 [%rd10], %r9;
        """
    )
    out = torch.zeros(32, dtype=torch.int32)
    packed = torch.cat([x.to(torch.int32).reshape(32) for x in inputs] or [out.clone()])
    run(text, out, packed, **options)
    return out


def findings(text: str, *arguments: Any, **options: Any) -> list[sim.Finding]:
    """What a run of `test` finds."""
    return list(run(text, *arguments, check=False, **options).findings)
