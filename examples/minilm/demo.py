"""`archflash demo`: a trained sentence-embedding model on real sentences, attention by archflash.

The sentences are packed, with no padding, and each layer's attention is one archflash.attention
call with cu_seqlens. Each call's output is checked against the float64 reference and compared with
the model's own masked attention; the sentence embeddings are compared with those of the model's own
float32 forward over a padded batch. On a machine with no GPU the kernels run on the PTX simulator.
"""

from __future__ import annotations

import copy
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import archflash
from archflash import _archflash as _native
from archflash import _dispatch, reference
from archflash.cli import Parser
from examples.minilm import model

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Pairs of sentences with the same meaning (1 and 2, 3 and 4, ...), then single sentences.
PAIRS = 5
SENTENCES = (
    "A man is playing the guitar.",
    "Someone strums a guitar on a small stage in front of a handful of people.",
    "The central bank raised interest rates by half a percentage point on Thursday, saying that "
    "inflation had stayed above its target for longer than it had expected and that wages were "
    "still rising quickly, so that borrowing would have to cost more until prices settled.",
    "Borrowing gets dearer: policy makers lifted rates again to bring inflation down.",
    "My flight was cancelled because of the storm.",
    "Bad weather grounded our plane, so we spent the night on plastic chairs at the airport and "
    "were put on another one in the morning.",
    "How do I reset my password?",
    "I have forgotten my login details and cannot get into my account any more; what should I do?",
    "The telescope photographed a galaxy more than thirteen billion light years away.",
    "Astronomers have published an image of one of the most distant galaxies ever seen.",
    "Simmer the onions in butter until they are soft, stir in the flour, pour in the stock a "
    "little at a time, add thyme, salt and pepper, and let the soup cook gently for forty minutes "
    "before you grate the cheese over slices of toasted bread and put the bowls under a hot grill.",
    "Stop!",
    "The lease ends in March.",
    "Our goalkeeper saved two penalties in the final.",
)

# The smallest cosine that is accepted between a sentence's embedding and the model's float32 one.
MIN_COSINE = {torch.float32: 0.9999, torch.bfloat16: 0.999}

# The implementations whose kernels run on the simulator if there is no GPU, and the seconds that
# they may take together. If all layers would take longer, only the first one is simulated.
SIMULATED_KERNELS = {torch.float32: "simt", torch.bfloat16: "ampere"}
SIMULATION_SECONDS = 60.0


@dataclass(frozen=True)
class Batch:
    """Sentences as token ids, packed and padded."""

    tokens: Tensor  # (T,) int64
    cu_seqlens: Tensor  # (B+1,) int32
    max_seqlen: int
    padded: Tensor  # (B, N) int64, 0 where mask is False
    mask: Tensor  # (B, N) bool


@dataclass(frozen=True)
class LayerResult:
    """The result of one layer's attention call."""

    layer: int
    implementation: str
    simulated: bool
    difference: float  # largest, from masked attention in float32
    error: reference.ErrorReport


@dataclass
class CheckedAttention:
    """The attention that an encoder is given: archflash, with every call checked and printed.

    Attributes:
        batch: the sentences.
        implementation: the implementation that is forced; None if archflash chooses.
        layers: how many calls there will be.
        simulation_seconds: if the forced kernels are simulated and all layers would take longer
            than this, the layers after the first are left to archflash's own choice.
        results: results of the calls so far.
    """

    batch: Batch
    implementation: str | None = None
    layers: int = 1
    simulation_seconds: float = SIMULATION_SECONDS
    results: list[LayerResult] = field(default_factory=list)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        packing: dict[str, Any] = {
            "cu_seqlens_q": self.batch.cu_seqlens,
            "cu_seqlens_k": self.batch.cu_seqlens,
            "max_seqlen_q": self.batch.max_seqlen,
            "max_seqlen_k": self.batch.max_seqlen,
        }
        call = {**packing, "implementation": self.implementation}
        begin = time.perf_counter()
        with warnings.catch_warnings():  # the demo itself says that the simulator runs
            warnings.filterwarnings("ignore", message="archflash: tensors are on the CPU")
            out: Tensor = archflash.attention(q, k, v, **call)
        seconds = time.perf_counter() - begin

        expected, _ = reference.attention(q, k, v, **packing)
        plain = reference.baseline(q, k, v, **packing)
        chosen = archflash.explain(q, k, v, **call).chosen
        result = LayerResult(
            layer,
            chosen,
            chosen != "torch" and q.device.type == "cpu",
            _difference(out, _masked(self.batch.mask, q, k, v)),
            reference.check(out, expected, plain),
        )
        self.results.append(result)
        print(_layer_row(result), flush=True)
        if result.simulated and seconds * self.layers > self.simulation_seconds:
            print(
                f"       that took {seconds:.1f} s: the other {self.layers - 1} layers are not "
                "simulated"
            )
            self.implementation = None
        return out


def make_batch(
    tokenizer: Tokenizer, config: model.Config, sentences: tuple[str, ...], device: torch.device
) -> Batch:
    """Tokenise sentences; lay them out packed for archflash and padded for the model's own."""
    ids = [
        torch.tensor(tokenizer.encode(sentence).ids, dtype=torch.int64) for sentence in sentences
    ]
    lengths = torch.tensor([len(i) for i in ids])
    model.check_tokens(torch.cat(ids), lengths, config)
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    mask = torch.arange(padded.shape[1]) < lengths[:, None]
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    return Batch(
        torch.cat(ids).to(device),
        cu_seqlens.to(device),
        int(lengths.max()),
        padded.to(device),
        mask.to(device),
    )


def main(arguments: Sequence[str]) -> int:
    """Runs the demo; returns the exit status, 0 if everything agreed."""
    parser = Parser(
        prog="archflash demo",
        description="Run all-MiniLM-L6-v2 over a batch of sentences of unequal lengths, each "
        "layer's attention through archflash, and compare with the model's own masked attention "
        "and with a float64 reference. Exits with 1 if anything disagrees.",
    )
    parser.add_argument(
        "--weights",
        metavar="FOLDER",
        help="a local copy of the model, half precision or not (default: the installed package)",
    )
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], help="run in this dtype only (default: both)"
    )
    parser.add_argument(
        "--implementation",
        metavar="NAME",
        help="force one implementation (default: automatic choice)",
    )
    parser.add_argument(
        "--save-half",
        metavar="FOLDER",
        help="write a half-precision copy of the model (45 MB) for --weights elsewhere, and stop",
    )
    args = parser.parse_args(arguments)
    folder = model.find_weights(args.weights)
    if args.save_half is not None:
        written = model.save_half(folder, Path(args.save_half))
        print(
            f"wrote {written} ({written.stat().st_size / 1e6:.0f} MB), "
            f"{model.TOKENIZER_FILE} and {model.CONFIG_FILE}"
        )
        print(f"use it with: archflash demo --weights {args.save_half}")
        return 0
    known = [i.name for i in archflash.implementations()]
    if args.implementation not in (None, *known):
        raise ValueError(
            f"--implementation {args.implementation!r}: there is none of that name; "
            f"choose from {', '.join(known)}"
        )
    dtypes = [d for d in MIN_COSINE if args.dtype in (None, _name(d))]
    with torch.inference_mode():
        failures = _demo(folder, dtypes, args.implementation)
    if failures:
        print("\nFAILED:", *failures, sep="\n  ", file=sys.stderr)
        return 1
    print(
        "\nOK: every layer meets the error rule and every sentence embedding agrees with the "
        "model's own"
    )
    return 0


def _demo(folder: Path, dtypes: list[torch.dtype], implementation: str | None) -> list[str]:
    """Run the model in each dtype, print the results, return what failed."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"

    print(f"loading weights from {folder}", flush=True)
    tokenizer, encoder = model.load_model(folder)
    encoder.to(device)
    config = encoder.config
    print(
        f"all-MiniLM-L6-v2: {config.num_hidden_layers} layers, {config.num_attention_heads} heads "
        f"of {config.head_dim}, on {where}"
    )

    batch = make_batch(tokenizer, config, SENTENCES, device)
    lengths = batch.mask.sum(1).tolist()
    print(
        f"{len(SENTENCES)} sentences of {min(lengths)} to {max(lengths)} tokens: "
        f"{len(batch.tokens)} packed tokens (a padded batch has {batch.mask.numel()})"
    )
    for number, (sentence, length) in enumerate(zip(SENTENCES, lengths, strict=True), 1):
        print(f"{number:4}  {length:3} tokens  {_shorten(sentence, 82)}")

    print("\nthe model's own forward: padded batch, masked attention, float32", flush=True)
    own = encoder.forward_padded(batch.padded, batch.mask)

    failures = []
    for index, dtype in enumerate(dtypes):
        forced = implementation
        if device.type == "cpu" and forced is None:
            forced = _simulated_kernel(dtype)
        print(f"\n{_name(dtype)}, packed, every attention call through archflash", flush=True)
        if device.type == "cpu" and forced not in (None, "torch"):
            simulated = _dispatch.simulated_device(forced)
            print(
                f"no GPU here: the kernels of {forced} run on the PTX simulator, as on "
                f"{simulated.name}"
            )
        print(_LAYER_HEADER)
        attention = CheckedAttention(
            batch, forced, config.num_hidden_layers, SIMULATION_SECONDS / len(dtypes)
        )
        embeddings = copy.deepcopy(encoder).to(dtype)(batch.tokens, batch.cu_seqlens, attention)
        cosines = torch.nn.functional.cosine_similarity(embeddings.double(), own.double())
        failures += find_failures(dtype, attention.results, cosines)
        print(
            f"largest difference {max(r.difference for r in attention.results):.2e}\n"
            f"smallest cosine with the model's own embeddings {cosines.min():.7f} "
            f"(at least {MIN_COSINE[dtype]})"
        )
        if index == 0:
            _print_similarities(embeddings @ embeddings.T, _name(dtype))
    return failures


def _simulated_kernel(dtype: torch.dtype) -> str | None:
    """The implementation that the simulator runs in a dtype; None if the build left it out."""
    name = SIMULATED_KERNELS[dtype]
    return name if _native.targets(name) else None


def find_failures(dtype: torch.dtype, results: list[LayerResult], cosines: Tensor) -> list[str]:
    """Say what is wrong with one run.

    Args:
        dtype: the dtype that the encoder ran in.
        results: one for each layer.
        cosines: (B,), the cosine of each sentence's embedding with the model's own.

    Returns:
        One sentence for each failure.
    """
    failures = [
        f"{_name(dtype)}, layer {r.layer + 1}, {r.implementation}: beyond the error rule: {r.error}"
        for r in results
        if not r.error.ok
    ]
    least = MIN_COSINE[dtype]
    failures += [
        f"{_name(dtype)}, sentence {number}: cosine {cosine:.7f} with the model's own embedding, "
        f"needs {least}"
        for number, cosine in enumerate(cosines.tolist(), 1)
        if not cosine >= least  # so that NaN fails
    ]
    return failures


def _masked(mask: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the model's own masked attention of packed q, k, v, in float32 over a padded batch."""

    def pad(x: Tensor) -> Tensor:
        padded = x.new_zeros(*mask.shape, *x.shape[1:], dtype=torch.float32)
        padded[mask] = x.float()
        return padded

    return model.masked_attention(pad(q), pad(k), pad(v), mask)[mask]


def _difference(out: Tensor, other: Tensor) -> float:
    return float((out.float() - other).abs().max())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shorten(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3].rstrip() + "..."


_LAYER_HEADER = (
    "layer  implementation        largest difference  largest error  allowed    error rule\n"
    "                             from masked attn.   from float64   by rule"
)


def _layer_row(result: LayerResult) -> str:
    error = result.error
    name = result.implementation + (" (simulated)" if result.simulated else "")
    return (
        f"{result.layer + 1:5}  {name:20}  {result.difference:<18.2e}  "
        f"{error.max_error:<13.2e}  {error.bound:<9.2e}  {'met' if error.ok else 'NOT MET'}"
    )


def _print_similarities(similarity: Tensor, dtype: str) -> None:
    """Print the similarity table (B, B) in 100 columns, and each sentence's nearest neighbour."""
    rows = similarity.tolist()
    print(f"\nsimilarity of the sentences (cosine, {dtype})")
    print(" " * 27 + "".join(f"{number:5}" for number in range(1, len(rows) + 1)))
    for number, row in enumerate(rows, 1):
        text = _shorten(SENTENCES[number - 1], 22)
        # Without the leading zero two decimals and a sign leave a space between the columns.
        cells = (f"{value:.2f}".replace("0.", ".", 1).rjust(5) for value in row)
        print(f"{number:3}  {text:22}" + "".join(cells))

    print("\nnearest neighbour of each sentence")
    others = similarity.clone().fill_diagonal_(-1)
    for number, (value, nearest) in enumerate(
        zip(others.amax(1).tolist(), others.argmax(1).tolist(), strict=True), 1
    ):
        text, other = SENTENCES[number - 1], SENTENCES[nearest]
        print(
            f"{number:3}  {_shorten(text, 40):40}  {value:.2f}  {nearest + 1:3}  "
            f"{_shorten(other, 42)}"
        )
