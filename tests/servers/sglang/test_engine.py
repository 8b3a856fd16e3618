"""sglang.Engine with archflash, on a CPU: its log-probabilities against those of transformers and
of SGLang's own backend. Processes, scheduler, memory pools and plug-ins are SGLang's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sglang
import torch
from torch import Tensor

from tests.servers import models

NEW = 5
PROMPTS = models.prompts(19, 3, 9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def goes_on(signal: int, frame: Any) -> None:
    """SGLang's own handler of a process that fails ends this one; with this one Engine raises."""


@contextmanager
def started(path: Path, **options: Any) -> Iterator[Any]:
    defaults: dict[str, Any] = {
        "device": "cpu", "attention_backend": "archflash", "dtype": "float32",
        "skip_tokenizer_init": True, "disable_cuda_graph": True, "disable_overlap_schedule": True,
        "max_total_tokens": 1024, "context_length": 128, "mem_fraction_static": 0.3,
        "log_level": "error", "custom_sigquit_handler": goes_on,
    }  # fmt: skip
    engine = sglang.Engine(model_path=str(path), **defaults | options)
    try:
        yield engine
    finally:
        engine.shutdown()


def generated(engine: Any, new: int = NEW) -> list[tuple[list[int], Tensor]]:
    """For each prompt its tokens with those that follow, and the log-probability of each but the
    first.
    """
    answers = engine.generate(
        input_ids=PROMPTS, return_logprob=True, logprob_start_len=0,
        sampling_params={"temperature": 0, "max_new_tokens": new, "ignore_eos": True},
    )  # fmt: skip
    results = []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        meta = answer["meta_info"]
        rows = [*meta["input_token_logprobs"][1:], *meta["output_token_logprobs"]]
        assert len(answer["output_ids"]) == new
        results.append((prompt + answer["output_ids"], torch.tensor([row[0] for row in rows])))
    return results


def check(path: Path, name: str, results: list[tuple[list[int], Tensor]], atol: float) -> None:
    """Log-probabilities are those of transformers, and each new token is the likeliest."""
    for prompt, (tokens, found) in zip(PROMPTS, results, strict=True):
        expected = models.log_probabilities(path, name, tokens)[:-1]
        of_tokens = expected.gather(1, torch.tensor(tokens)[1:, None])[:, 0]
        torch.testing.assert_close(found, of_tokens, atol=atol, rtol=0)
        new = slice(len(prompt) - 1, None)
        assert (expected.amax(-1) - of_tokens)[new].max() < 2 * atol


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"page_size": 1}),
        ("llama", {"page_size": 16}),
        ("llama", {"page_size": 4, "chunked_prefill_size": 8}),
        ("gemma2", {"page_size": 1}),
        ("gemma3", {"page_size": 4}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_log_probabilities(folder: Path, name: str, options: dict[str, Any]) -> None:
    path = models.save(name, folder)
    with started(path, **options) as engine:
        check(path, name, generated(engine), 1e-4)


def test_the_same_as_sglangs_own_backend(folder: Path) -> None:
    """SGLang's Mistral has no window, whatever its configuration says."""
    path = models.save("mistral", folder)
    found = []
    for backend in ("torch_native", "archflash"):
        with started(path, page_size=16, attention_backend=backend) as engine:
            found.append(generated(engine))
    for (tokens, ours), (their_tokens, theirs) in zip(*found, strict=True):
        assert tokens == their_tokens
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_kernels_on_the_simulator(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARCHFLASH_FORCE_IMPLEMENTATION", "ampere")
    path = models.save("llama", folder)
    with started(path, page_size=16, dtype="bfloat16") as engine:
        check(path, "llama", generated(engine, 2), 0.1)


def test_drafts_from_a_corpus(folder: Path) -> None:
    """SGLang's ngram drafts are trees, from a corpus that it makes of what is generated."""
    path = models.save("llama", folder)
    options = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4}
    with started(path, **options) as engine:
        generated(engine)
        check(path, "llama", generated(engine), 1e-4)


def test_drafts_from_a_draft_model(folder: Path) -> None:
    """The model drafts for itself, so that all drafts are accepted."""
    path = models.save("llama", folder)
    options = {
        "speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(path),
        "speculative_num_steps": 3, "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4, "speculative_draft_attention_backend": "archflash",
    }  # fmt: skip
    with started(path, **options) as engine:
        check(path, "llama", generated(engine), 1e-4)


def test_a_refusal_is_a_sentence_at_the_start(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = models.save("gemma2", folder)
    options = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4}
    with pytest.raises(RuntimeError, match="scheduler died"), started(path, **options):
        pass
    assert (
        "a window beside a tree of drafts: pass --speculative-eagle-topk 1"
        in capfd.readouterr().err
    )
