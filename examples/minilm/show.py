"""`archflash show`: attention weights of a real model and of synthetic heads, and the error of
every implementation against float64, as text, as pictures, or as one HTML page that works offline.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

import archflash
from archflash import _archflash as _native
from archflash.cli import Parser
from examples.minilm import demo, figure, model, page
from examples.minilm.heads import Shown, compare, describe, model_heads, synthetic_heads

PAGE, PICTURES = ".html", (".png", ".svg", ".pdf")
SENTENCE = demo.SENTENCES[1]


def main(given: Sequence[str]) -> int:
    """Prints the errors and writes the files; exit status 1 where the error rule is broken."""
    parser = Parser(
        prog="archflash show",
        description="Shows where the heads of all-MiniLM-L6-v2 and four synthetic heads look, and "
        "how far each implementation is from float64 by position and by head. Without a GPU the "
        "kernels run on the simulator. Exits with 1 if an implementation breaks the error rule.",
    )
    parser.add_argument(
        "files",
        nargs="*",
        type=Path,
        metavar="FILE",
        help=".html: one page that needs nothing else; .png, .svg, .pdf: a picture, by matplotlib "
        "(pip install matplotlib)",
    )
    parser.add_argument("--sentence", default=SENTENCE, help="that the model reads")
    parser.add_argument(
        "--layer", type=int, default=1, help="whose q, k and v are compared (default: 1)"
    )
    parser.add_argument("--weights", metavar="FOLDER", help="the model, as for `archflash demo`")
    parser.add_argument("--no-model", action="store_true", help="synthetic heads only")
    parser.add_argument(
        "--implementations", metavar="NAME,...", help="which are compared (default: all)"
    )
    arguments = parser.parse_args(given)
    for file in arguments.files:
        if file.suffix.lower() not in (PAGE, *PICTURES):
            allowed = ", ".join((PAGE, *PICTURES))
            raise ValueError(f"{file}: the name must end in one of {allowed}")
        if file.suffix.lower() != PAGE:
            figure.require()
    shown = collect(arguments)
    if shown.layers:
        heads = sum(len(layer.names) for layer in shown.layers)
        print(f"all-MiniLM-L6-v2, {len(shown.layers)} layers, {heads} heads: {shown.sentence}")
    for compared in shown.compared:
        print("\n".join(describe(compared)), flush=True)
    for file in arguments.files:
        if file.suffix.lower() == PAGE:
            file.write_text(page.render(shown), encoding="utf-8")
        else:
            figure.save(shown, file)
        print(f"wrote {file}")
    return int(any(not e.report.ok for c in shown.compared for e in c.errors))


def collect(arguments: argparse.Namespace) -> Shown:
    """Runs the model and the implementations."""
    known = [item.name for item in archflash.implementations()]
    names = known
    if arguments.implementations is not None:
        names = arguments.implementations.split(",")
        if unknown := [name for name in names if name not in known]:
            raise ValueError(
                f"--implementations {', '.join(unknown)}: there is none of that name; choose from "
                f"{', '.join(known)}"
            )
    else:  # those that the build left out have no code to run
        names = [name for name in known if name == "torch" or _native.targets(name)]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    synthetic = synthetic_heads()
    if arguments.no_model:
        return Shown("", (), (), synthetic, (compare(synthetic, names, device),))
    folder = model.find_weights(arguments.weights)
    tokens, layers = model_heads(folder, arguments.sentence)
    if not 1 <= arguments.layer <= len(layers):
        raise ValueError(f"--layer {arguments.layer}: the model has layers 1 to {len(layers)}")
    compared = [compare(heads, names, device) for heads in (layers[arguments.layer - 1], synthetic)]
    return Shown(arguments.sentence, tokens, layers, synthetic, tuple(compared))
