"""sglang.Engine with archflash, on a CPU: its log-probabilities against those of transformers and
of SGLang's own backend. Processes, scheduler, memory pools and plug-ins are SGLang's.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sglang
import torch
from examples import serve_sglang
from sglang.srt.utils import kill_process_tree
from torch import Tensor

from tests.servers import models

NEW = 5
PROMPTS = models.prompts(19, 3, 9)
OPTIONS: dict[str, Any] = {
    "device": "cpu", "attention_backend": "archflash", "dtype": "float32",
    "skip_tokenizer_init": True, "disable_cuda_graph": True, "disable_overlap_schedule": True,
    "max_total_tokens": 1024, "context_length": 128, "mem_fraction_static": 0.9,
    "log_level": "error",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def failed(signal: int, frame: Any) -> None:
    """Runs when a process of SGLang fails. SGLang's own handler would end this process, too."""
    raise RuntimeError("a process of SGLang failed: its output says why")


@contextmanager
def started(path: Path, **options: Any) -> Iterator[Any]:
    try:
        engine = sglang.Engine(
            model_path=str(path), custom_sigquit_handler=failed, **OPTIONS | options
        )
    except BaseException:
        kill_process_tree(os.getpid(), include_parent=False)
        raise
    try:
        yield engine
    finally:
        engine.shutdown()


def generated(
    engine: Any, new: int = NEW, verified: list[int] | None = None
) -> list[tuple[list[int], Tensor]]:
    """For each prompt its tokens with those that follow, and the log-probability of each but the
    first. How often drafts were verified is added to `verified`.
    """
    answers = engine.generate(
        input_ids=PROMPTS, return_logprob=True, logprob_start_len=0,
        sampling_params={"temperature": 0, "max_new_tokens": new, "ignore_eos": True},
    )  # fmt: skip
    results = []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        meta = answer["meta_info"]
        if verified is not None:
            verified.append(meta["spec_verify_ct"])
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
        ("deepseek_yarn", {"page_size": 4, "chunked_prefill_size": 8}),
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


def test_a_model_with_a_fixed_list_of_backends(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT-OSS has sinks and windows; SGLang computes parts of it in bfloat16 only."""
    monkeypatch.setenv("ARCHFLASH_SGLANG_REPLACES", "triton")
    path = models.save("gpt_oss", folder)
    with started(path, attention_backend="triton", dtype="bfloat16") as engine:
        check(path, "gpt_oss", generated(engine), 0.15)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_drafts_from_a_corpus(folder: Path, name: str) -> None:
    """SGLang's ngram drafts are trees, from a corpus that it makes of what is generated."""
    path = models.save(name, folder)
    options = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4}
    with started(path, **options) as engine:
        generated(engine)
        check(path, name, generated(engine), 1e-4)


def verifications(path: Path, prompt: list[int], tokens: list[int]) -> int:
    """How often a model verifies three of its own drafts. SGLang does not show a draft model the
    first token of a prompt, so they may be wrong.
    """
    known, count = len(prompt) + 1, 0
    while known < len(tokens):
        seen = tokens[1:known]
        for _ in range(3):
            seen = [*seen, int(models.log_probabilities(path, "llama", seen)[-1].argmax())]
        right = [a == b for a, b in zip(seen[known - 1 :], tokens[known:], strict=False)]
        known += 1 + [*right, False].index(False)
        count += 1
    return count


def draft_model(path: Path, topk: int) -> dict[str, Any]:
    return {
        "speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(path),
        "speculative_num_steps": 3, "speculative_eagle_topk": topk,
        "speculative_num_draft_tokens": 4 if topk == 1 else 11,  # all that can be drafted
        "speculative_draft_attention_backend": "archflash",
    }  # fmt: skip


@pytest.mark.parametrize("topk", [1, 2])
def test_drafts_from_a_draft_model(folder: Path, topk: int) -> None:
    """The model drafts for itself: each draft is the one that it makes without SGLang."""
    path = models.save("llama", folder)
    with started(path, **draft_model(path, topk)) as engine:
        verified: list[int] = []
        results = generated(engine, verified=verified)
    check(path, "llama", results, 1e-4)
    for prompt, (tokens, _), count in zip(PROMPTS, results, verified, strict=True):
        if topk == 1:
            assert count == verifications(path, prompt, tokens)
        else:  # the chain is a branch of the tree
            assert count <= verifications(path, prompt, tokens)


def test_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    serve_sglang.main(["--tokens", "2"])
    lines = capsys.readouterr().out.splitlines()
    for prompt, line in zip(serve_sglang.PROMPTS, lines[-2:], strict=True):
        assert re.fullmatch(rf"{re.escape(str(prompt))} -> \[\d+, \d+\]", line), line


def test_a_refusal_is_a_sentence_at_the_start(folder: Path) -> None:
    """In a process of its own, which SGLang ends."""
    path = models.save("gemma2", folder)
    arguments = {"model_path": str(path)} | OPTIONS | draft_model(path, 2)
    program = f"import sglang; sglang.Engine(**{arguments})"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode != 0
    assert "a window beside a tree of drafts, in a draft model" in run.stderr
