"""`archflash explain`: which implementation would serve a call on a GPU that need not be here, and
with what launch.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import archflash
from archflash import _dispatch

MOST = 1 << 59  # most elements of a tensor, so that its bytes fit 63 bits
DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_SHORT = dict(zip(("fp32", "fp16", "bf16", "e4m3", "e5m2"), DTYPES, strict=True))


def dtype_named(word: str) -> str:
    """PyTorch's name of a dtype that a command was given, which may be as our tables write it."""
    return _SHORT.get(word, word)


def add_parser(commands: Any) -> None:
    """Adds the command to the parser of `archflash`."""
    parser = commands.add_parser(
        "explain", help="which implementation would serve a call, why, and what it would launch"
    )
    add_call_arguments(parser)
    parser.add_argument(
        "--device", help="a known GPU such as 'RTX 5090', or cuda:0; default the first GPU here"
    )
    parser.add_argument("--implementation", help="force one")
    parser.add_argument("--backward", action="store_true", help="who computes its gradients")
    parser.add_argument(
        "--plan", type=Path, metavar="FILE", help="write the plan as JSON, for `archflash replay`"
    )
    parser.set_defaults(run=run)


def add_call_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that describe a call of `archflash.attention`."""
    parser.add_argument(
        "--shape", required=True, metavar="B,H,N,D", help="of q; k and v have the same unless told"
    )
    parser.add_argument("--dtype", type=dtype_named, choices=DTYPES, default="float16")
    parser.add_argument("--heads-kv", type=int, help="heads of k and v")
    parser.add_argument("--keys", type=int, help="rows of k and v")
    parser.add_argument("--dv", type=int, help="head dim of v")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--window", metavar="LEFT,RIGHT", help="either side may be empty")
    parser.add_argument("--softcap", type=float)
    parser.add_argument("--sinks", action="store_true")
    parser.add_argument("--lse", action="store_true", help="the log-sum-exp is asked for")
    parser.add_argument("--layout", choices=("bhnd", "bnhd"), default="bhnd")


def parse_shape(text: str) -> tuple[int, int, int, int]:
    """ "4,16,512,64" -> (4, 16, 512, 64).

    Raises:
        ValueError: not four integers of at least 0.
    """
    try:
        batch, heads, rows, dim = (int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        raise ValueError(
            f"--shape {_short(text)}: it must be four integers B,H,N,D such as 4,16,512,64"
        ) from None
    if min(batch, heads, rows, dim) < 0:
        raise ValueError(f"--shape {_short(text)}: sizes must be >= 0")
    return batch, heads, rows, dim


def parse_window(text: str | None) -> tuple[int | None, int | None] | None:
    """ "128," -> (128, None).

    Raises:
        ValueError: not two integers or blanks.
    """
    if text is None:
        return None
    return parse_pair("--window", "LEFT,RIGHT", text)


def parse_pair(option: str, form: str, text: str) -> tuple[int | None, int | None]:
    """ "128," -> (128, None).

    Raises:
        ValueError: not two integers from 0 to MOST, or blanks.
    """
    sides = [side.strip() for side in text.split(",")]
    if len(sides) != 2 or not all(_is_size(side) or not side for side in sides):
        raise ValueError(
            f"{option} {_short(text)}: it must be {form}, either side an integer >= 0 and at most "
            "2^59, or empty"
        )
    left, right = (int(side) if side else None for side in sides)
    return left, right


def parse_indices(option: str, text: str) -> list[int]:
    """ "0,3" -> [0, 3].

    Raises:
        ValueError: not integers from 0 to MOST.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(map(_is_size, parts)):
        raise ValueError(f"{option} {_short(text)}: it must be indices of CTAs such as 0 or 0,3")
    return list(dict.fromkeys(map(int, parts)))


def _is_size(text: str) -> bool:
    few = text.isascii() and text.isdecimal() and len(text) < 20  # int() refuses thousands
    return few and int(text) <= MOST


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:80] + "...")


@dataclass(frozen=True)
class Call:
    """The call that the arguments of a command describe.

    Attributes:
        shapes: shapes of q, k and v.
        dtype: dtype of all three.
        heads: number of heads of q.
        options: options of `archflash.attention`, without sinks.
    """

    shapes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    dtype: torch.dtype
    heads: int
    options: dict[str, Any]


def read_call(arguments: argparse.Namespace) -> Call:
    """The call that a command's arguments describe.

    Raises:
        ValueError: a size or window that is not valid.
    """
    batch, heads, rows, dim = parse_shape(arguments.shape)
    heads_kv = heads if arguments.heads_kv is None else arguments.heads_kv
    keys = rows if arguments.keys is None else arguments.keys
    dv = dim if arguments.dv is None else arguments.dv
    if min(heads_kv, keys, dv) < 0:
        raise ValueError(f"--heads-kv {heads_kv}, --keys {keys}, --dv {dv}: sizes must be >= 0")
    for name, sizes in (("q", (heads, rows, dim)), ("k and v", (heads_kv, keys, max(dim, dv)))):
        if math.prod(max(size, 1) for size in (batch, *sizes)) > MOST:
            raise ValueError(
                "--shape, --heads-kv, --keys and --dv make q, k or v too large: "
                f"{name} would have more than 2^59 elements"
            )

    def shape(h: int, n: int, d: int) -> tuple[int, ...]:
        return (batch, h, n, d) if arguments.layout == "bhnd" else (batch, n, h, d)

    options = {
        "causal": arguments.causal,
        "window": parse_window(arguments.window),
        "softcap": arguments.softcap,
        "layout": arguments.layout,
        "return_lse": arguments.lse,
    }
    shapes = (shape(heads, rows, dim), shape(heads_kv, keys, dim), shape(heads_kv, keys, dv))
    return Call(shapes, getattr(torch, arguments.dtype), heads, options)


def run(arguments: argparse.Namespace) -> int:
    """Prints the decision; with --plan also writes the plan."""
    call = read_call(arguments)
    if arguments.backward and arguments.plan is not None:
        raise ValueError("--plan with --backward: `archflash replay` runs no backward pass")
    device = arguments.device
    if device is None:
        if trouble := _dispatch.driver_problem():
            raise ValueError(
                f"there is no GPU to explain for ({trouble}): "
                "name one with --device, such as 'RTX 5090'"
            )
        device = "cuda:0"
    decision = archflash.explain(
        *(torch.empty(shape, dtype=call.dtype, device="meta") for shape in call.shapes),
        device=device, implementation=arguments.implementation, backward=arguments.backward,
        sinks=torch.empty(call.heads, device="meta") if arguments.sinks else None, **call.options,
    )  # fmt: skip
    print(decision)
    if arguments.plan is not None:
        if decision.plan is None:
            raise ValueError(
                f"--plan: {decision.chosen} serves this call, and only kernels have plans"
            )
        arguments.plan.write_text(json.dumps(decision.plan.to_dict(), indent=1) + "\n")
        print(f"plan written to {arguments.plan}")
    return 0
