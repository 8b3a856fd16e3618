"""Serves a tiny model with random weights by SGLang, whose attention archflash computes.

    python examples/serve_sglang.py                          on a GPU
    PYTHONPATH=tests/servers/site_sglang python examples/serve_sglang.py --implementation ampere
                                        without one: the kernel `ampere` on the simulator

It prints the tokens that follow two prompts. A program for a real model needs the last lines of
`main` only. SGLang has no kernels for a CPU on PyPI; tests/servers/site_sglang makes it start.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence

PROMPTS = [[5, 17, 3, 99, 42], [7, 7, 7, 8, 11, 2, 64, 31, 90]]


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
    if options.implementation:  # SGLang's processes see it, too
        os.environ["ARCHFLASH_FORCE_IMPLEMENTATION"] = options.implementation

    import sglang
    import torch

    with tempfile.TemporaryDirectory() as folder:
        save_model(folder)
        engine = sglang.Engine(
            model_path=folder,
            attention_backend="archflash",
            device="cuda" if torch.cuda.is_available() else "cpu",
            disable_cuda_graph=not torch.cuda.is_available(),
            page_size=16,
            context_length=128,
            max_total_tokens=1024,
            mem_fraction_static=0.3,
            skip_tokenizer_init=True,
            log_level="error",
        )
        wanted = {"max_new_tokens": options.tokens, "temperature": 0, "ignore_eos": True}
        results = engine.generate(input_ids=PROMPTS, sampling_params=wanted)
        for prompt, result in zip(PROMPTS, results, strict=True):
            print(prompt, "->", result["output_ids"])
        engine.shutdown()


if __name__ == "__main__":
    main()
