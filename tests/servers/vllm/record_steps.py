"""Records the metadata that vLLM's scheduler and block pool give a backend, for bench/serving.py:

    python -m tests.servers.vllm.record_steps

The requests of a mix come to an engine on a CPU, whose tiny model computes no attention: what it
would say does not matter. Writes bench/recorded_steps.json: of some steps the rows and lengths of
requests, and their tables of blocks as runs (first block, how many). Runs where `make test-servers`
has installed vLLM, with its folders on PYTHONPATH as there.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import tempfile
from operator import attrgetter
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
from bench.serving import MIXES, PAGE, RECORDED, REQUESTS, TOKENS, Step, chosen
from vllm import LLM, SamplingParams
from vllm.v1.attention.backend import CommonAttentionMetadata

from archflash.integrations import vllm_backend
from tests.servers import models

MIX = "chat"
ROWS, LENGTHS = attrgetter("rows"), attrgetter("lengths")
LONGEST = 8192


def runs(blocks: list[int]) -> list[list[int]]:
    """Consecutive blocks as (first, how many)."""
    found: list[list[int]] = []
    for block in blocks:
        if found and block == sum(found[-1]):
            found[-1][1] += 1
        else:
            found.append([block, 1])
    return found


def step_of(common: CommonAttentionMetadata) -> Step:
    rows = common.query_start_loc_cpu.diff().tolist()
    lengths = common.seq_lens.tolist()
    table = common.block_table_tensor
    tables = [table[i, : -(-n // PAGE)].tolist() for i, n in enumerate(lengths)]
    return Step(tuple(rows), tuple(lengths), tuple(map(tuple, tables)))


class Recorder(vllm_backend.ArchflashMetadataBuilder):  # type: ignore[misc]
    """The backend's builder, which notes each batch."""

    steps: list[Step] = []  # noqa: RUF012
    facts: dict[str, Any] = {}  # noqa: RUF012

    def build(self, common_prefix_len: int, common: Any, fast_build: bool = False) -> Any:
        self.steps.append(step_of(common))
        table = common.block_table_tensor
        self.facts.update(columns=table.stride(0), types=f"{table.dtype}, {common.seq_lens.dtype}")
        return super().build(common_prefix_len, common, fast_build)


def record(path: Path) -> None:
    vllm_backend.ArchflashBackend.get_builder_cls = staticmethod(  # type: ignore[method-assign]
        lambda: Recorder
    )
    vllm_backend.ArchflashImpl.forward = (  # type: ignore[method-assign]
        lambda self, layer, q, k, v, cache, metadata, output, **scales: output.zero_()
    )
    config, model = models.classes("llama")
    tiny = {**models.MODELS["llama"][1], "max_position_embeddings": LONGEST}
    with tempfile.TemporaryDirectory() as folder:
        model(config(**tiny)).bfloat16().save_pretrained(folder)
        llm = LLM(
            folder,
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=LONGEST,
            max_num_batched_tokens=TOKENS,
            max_num_seqs=REQUESTS,
            block_size=PAGE,
            dtype="bfloat16",
            attention_backend="CUSTOM",
            compilation_config={"custom_ops": ["none"]},
        )
        mix, engine, came = MIXES[MIX], llm.llm_engine, 0.0
        waiting = mix.draw()[:200]
        Recorder.steps.clear()
        number = 0
        while waiting or engine.has_unfinished_requests():
            came += mix.arrivals
            while waiting and came >= 1:
                (prompt, answer), came, number = waiting.pop(0), came - 1, number + 1
                engine.add_request(
                    str(number),
                    {"prompt_token_ids": models.prompts(prompt, seed=number)[0]},
                    SamplingParams(
                        max_tokens=answer, temperature=0, detokenize=False, ignore_eos=True
                    ),
                )
            engine.step()
        engine.engine_core.shutdown()
    kept = chosen(Recorder.steps, "prefill", 1)
    mixed = [step for step in Recorder.steps if step.kind == "mixed"]
    kept += [max(mixed, key=lambda step: sum(numbers(step))) for numbers in (ROWS, LENGTHS)]
    kept += chosen(Recorder.steps, "decode")
    found = {
        "vllm": importlib.metadata.version("vllm"),
        "mix": MIX,
        **Recorder.facts,
        "steps": [
            {"rows": s.rows, "lengths": s.lengths, "tables": [runs(list(t)) for t in s.tables]}
            for s in kept
        ],
    }
    path.write_text(json.dumps(found) + "\n")
    print(f"{len(Recorder.steps)} steps, {len(kept)} of them in {path}")


if __name__ == "__main__":
    torch.manual_seed(0)
    record(RECORDED)
