"""What each switch of blackwell_dc changes on the simulator: `python -m bench.switches [D ...]`.

Prints warp-instructions of PTX: for softmax, correction, mma and load those that one more block of
keys costs an average warp of the role, for store those of a whole tile.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from bench.on_the_spot import find_nvcc
from bench.run import align
from bench.switches.variants import ROWS, SETTINGS, counts_of

FEW, MORE = 4, 8  # blocks


def head_dim(text: str) -> int:
    """A head dimension of the command line."""
    if text not in map(str, ROWS):
        raise argparse.ArgumentTypeError(f"{text!r}: kernels are for {', '.join(map(str, ROWS))}")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table for each head dimension of the command line (128 by default)."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.switches", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "head_dims", nargs="*", type=head_dim, metavar="D", help="head dimension of a kernel"
    )
    head_dims = parser.parse_args(argv).head_dims
    nvcc = find_nvcc()
    if nvcc is None:
        print("nvcc is not found: it compiles the variants", file=sys.stderr)
        return 2
    for d in head_dims or [128]:
        lines = [["kernel", f"d{d}", "softmax", "correction", "mma", "load", "store"]]
        for setting in (None, *SETTINGS):
            few, more = (counts_of(setting, blocks, nvcc, d).roles for blocks in (FEW, MORE))
            block = [(more[name] - few[name]) / (MORE - FEW) for name in lines[0][2:6]]
            cells = [*block, few["store"]]
            name = "as in the wheel" if setting is None else setting.name
            lines.append([name, "", *(f"{cell:.0f}" for cell in cells)])
        print("\n".join(align(lines)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
