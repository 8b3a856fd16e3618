"""Tiny models with random weights on the disk, and what transformers says that they compute."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tokenizers
import torch
import transformers
from torch import Tensor

VOCABULARY = 128
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_DECODER = _COMMON | {"head_dim": 32}
# Where half of the layers have a window, the first has.
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("Llama", _DECODER),
    "mistral": ("Mistral", _DECODER | {"sliding_window": 8}),
    "gemma2": (
        "Gemma2",
        _DECODER
        | {"sliding_window": 8, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 32}
        | {"hidden_act": "gelu_pytorch_tanh"},  # SGLang reads this name
    ),
    "gemma3": (
        "Gemma3",
        _DECODER
        | {"sliding_window": 8, "query_pre_attn_scalar": 32}
        | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gpt_oss": (
        "GptOss",
        _DECODER
        | {"sliding_window": 8, "num_local_experts": 2, "num_experts_per_tok": 1}
        | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    "deepseek": (
        "DeepseekV3",
        _COMMON
        | {"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 512}
        | {"qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32, "head_dim": 64}
        | {"n_routed_experts": 2, "n_shared_experts": 1, "num_experts_per_tok": 1}
        | {"moe_intermediate_size": 32, "first_k_dense_replace": 2, "topk_group": 1, "n_group": 1},
    ),
    "bert": ("Bert", {name: _COMMON[name] for name in _COMMON if "key_value" not in name}),
}
# SGLang has this model without a GPU only with positions that YaRN scales.
MODELS["deepseek_yarn"] = (
    "DeepseekV2",
    MODELS["deepseek"][1]
    | {"moe_layer_freq": 1}
    | {
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 32, "beta_slow": 1}
        | {"original_max_position_embeddings": 128, "mscale": 1.0, "mscale_all_dim": 1.0}
    },
)
_CLASSES = {
    "Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "Bert": ("BertConfig", "BertModel"),
}


def classes(name: str) -> tuple[type, type]:
    """The configuration and the model."""
    family = MODELS[name][0]
    names = _CLASSES.get(family, (f"{family}Config", f"{family}ForCausalLM"))
    return tuple(getattr(transformers, x) for x in names)  # type: ignore[return-value]


def save(name: str, folder: Path) -> Path:
    """Saves a model of `MODELS` in bfloat16; returns its path."""
    path = folder / name
    if not path.exists():
        config, model = classes(name)
        torch.manual_seed(0)
        made = model(config(**MODELS[name][1]))
        with torch.no_grad():
            for weight in made.parameters():  # of a new model nearly all tokens are alike
                if weight.ndim > 1:
                    weight.mul_(4)
        made.bfloat16().save_pretrained(path)
        if name == "bert":  # servers ask encoders for a tokenizer: token i is the word "i"
            words = {str(i): i for i in range(VOCABULARY)}
            tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="0"))
            transformers.PreTrainedTokenizerFast(
                tokenizer_object=tokenizer, pad_token="0", unk_token="0"
            ).save_pretrained(path)
    return path


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths
    ]


@torch.inference_mode()
def log_probabilities(path: Path, name: str, tokens: Sequence[int]) -> Tensor:
    """Of each next token, float32 (tokens, vocabulary): row i is of what comes behind token i."""
    model = classes(name)[1].from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return model.eval()(torch.tensor([tokens])).logits[0].float().log_softmax(-1)


@torch.inference_mode()
def hidden(path: Path, name: str, tokens: Sequence[int]) -> Tensor:
    """The last layer's rows, (tokens, hidden size); float32."""
    model = classes(name)[1].from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return model.eval()(torch.tensor([tokens])).last_hidden_state[0].float()
