"""Where PyTorch's own attention kernels give wrong results or break, as a list of rules.

Dispatch and the implementation `torch` read it, and so does `archflash.enable()`: a call of such a
kind goes to a kernel of ours, or to one of PyTorch's kernels that computes it rightly. The values
in tensors are not known then, so a rule goes by shapes, dtypes and options alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

CUDNN, FLASH, EFFICIENT = "torch-cudnn", "torch-flash", "torch-efficient"


class Call(NamedTuple):
    """What faults depend on.

    Attributes:
        capability: compute capability of the GPU.
        cudnn: version of cuDNN, 91900 for 9.19.0.
        batch, heads, nq, nk, d, dv: sizes; heads are those of q.
        masked: whether PyTorch gets a mask as a tensor.
        causal: whether PyTorch gets is_causal.
        gradients: whether the gradients of the call are needed.
        scale: multiplies q k^T.
        dropout: whether weights are dropped.
    """

    capability: tuple[int, int]
    cudnn: int
    batch: int
    heads: int
    nq: int
    nk: int
    d: int
    dv: int
    masked: bool
    causal: bool
    gradients: bool
    scale: float
    dropout: bool


@dataclass(frozen=True)
class Fault:
    """One way in which kernels of PyTorch fail.

    Attributes:
        kernels: which of them.
        of: whether a call is of the kind.
        what: what happens, to be read after "PyTorch's ... kernel".
        seen: where and when it was seen, and the issues that report it.
    """

    kernels: tuple[str, ...]
    of: Callable[[Call], bool]
    what: str
    seen: str


_INT32 = 1 << 31
_GRID = 65535  # CTAs along the second and third dimension of a grid


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _flash_dq_elements(call: Call) -> int:
    """Elements of dq as the flash kernel accumulates it, in whole tiles."""
    columns = _round_up(max(call.d, call.dv), 32 if call.d <= 128 else 64)
    return call.batch * call.heads * _round_up(call.nq, 128) * columns


def _largest_elements(call: Call) -> int:
    """Elements of the largest of q, k and v, with a head of k and v for each of q."""
    return call.batch * call.heads * max(call.nq, call.nk) * max(call.d, call.dv)


def hidden_keys(capability: tuple[int, int], cudnn: int, nq: int, nk: int) -> int:
    """How many keys that a mask hides have to follow the others for cuDNN's gradients to be right;
    0 where they are without.

    On 9.x its backward pass gives key columns beyond the last the score 0, so that their weight,
    exp(0 - lse), overflows in rows whose log-sum-exp is below -88. The dq of such rows is NaN where
    nk % 128 is 64, until cuDNN 9.26, and dk and dv are where there is one row and nk % 64 is 0.
    """
    if capability[0] != 9:
        return 0
    if nq == 1 and nk % 64 == 0:
        return 8
    return 64 if nk % 128 == 64 and cudnn < 92600 else 0


FAULTS = (
    Fault(
        kernels=(CUDNN, FLASH),
        of=lambda call: not call.scale > 0,
        what="multiplies the -inf of masked scores by the scale, which is not positive here",
        seen="H200, torch 2.11, cuDNN 9.19, 2026-11-28; NVIDIA/cudnn-frontend#804",
    ),
    Fault(  # under a mask there is a way round: hidden keys are added
        kernels=(CUDNN,),
        of=lambda call: (
            call.gradients
            and not call.causal
            and not call.masked
            and hidden_keys(call.capability, call.cudnn, call.nq, call.nk) > 0
        ),
        what="gives NaN as gradients of rows with a log-sum-exp below -88 for such numbers of rows "
        "and keys",
        seen="H200, torch 2.11, cuDNN 9.19, 2026-11-28; pytorch/pytorch#196678, "
        "NVIDIA/cudnn-frontend#1072 (one row; 9.25 and 9.26), #1071 (one row; 9.26 crashes)",
    ),
    Fault(
        kernels=(CUDNN,),
        of=lambda call: call.gradients and _largest_elements(call) > _INT32,
        what="gives wrong gradients where q, k or v have more than 2^31 elements",
        seen="H200, torch 2.11, cuDNN 9.19, 2026-11-28: 17 x 16 x 65536 rows, 8 keys, D=128",
    ),
    Fault(
        kernels=(CUDNN,),
        of=lambda call: call.capability[0] == 10 and call.nq == 1 and 91900 <= call.cudnn < 92600,
        what="gives wrong results for one query row with cuDNN 9.19 to 9.25",
        seen="pytorch/pytorch#193893 (B200), which PyTorch avoids since #194927; not by us",
    ),
    Fault(
        kernels=(CUDNN, FLASH),
        of=lambda call: call.batch > _GRID,
        what=f"takes at most {_GRID} sequences",
        seen="H200, torch 2.11, cuDNN 9.19, 2026-11-28; pytorch/pytorch#146704, #181085",
    ),
    Fault(
        kernels=(CUDNN, FLASH, EFFICIENT),
        of=lambda call: call.heads > _GRID,
        what=f"takes at most {_GRID} heads",
        seen="H200, torch 2.11, cuDNN 9.19, 2026-11-28; pytorch/pytorch#142228",
    ),
    Fault(
        kernels=(FLASH,),
        of=lambda call: call.gradients and _flash_dq_elements(call) > _INT32,
        what="accesses memory out of bounds where dq, in tiles of 128 rows, has more than 2^31 "
        "elements",
        seen="H200, torch 2.11, 2026-11-28: from 16,385 x 16 x 1 x 64 on",
    ),
    Fault(
        kernels=(EFFICIENT,),
        of=lambda call: call.masked and call.nq * call.nk > 2 * _INT32,
        what="reads a mask of more than 2^32 elements wrongly",
        seen="H200, torch 2.11, 2026-11-28: 65,537 rows and keys; pytorch/pytorch#162588",
    ),
    Fault(
        kernels=(EFFICIENT,),
        of=lambda call: call.dropout and call.batch > _GRID,
        what=f"drops weights of at most {_GRID} sequences",
        seen="H200, torch 2.11, 2026-11-28: it says so",
    ),
)


def find(call: Call) -> dict[str, str]:
    """The kernels of PyTorch that fail at a call, and what happens there."""
    return {
        kernel: fault.what
        for fault in reversed(FAULTS)  # of several faults the first is told
        if fault.of(call)
        for kernel in fault.kernels
    }
