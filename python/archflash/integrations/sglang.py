"""archflash in SGLang: the attention backend "archflash".

Installing archflash is enough: SGLang finds `register` by the entry point `sglang.srt.plugins`, and
``--attention-backend archflash`` chooses it. The environment variable SGLANG_PLUGINS says which
plug-ins SGLang loads, where it should not be all that are installed.

SGLang starts some models, GPT-OSS and Llama 4 among them, only with backends of a fixed list. For
these, ARCHFLASH_SGLANG_REPLACES=triton puts archflash in the place of the backend "triton".
"""

from __future__ import annotations

import os
import warnings
from typing import Any

NAME = "archflash"
_replaced = os.environ.get("ARCHFLASH_SGLANG_REPLACES")
_NAMES = (NAME, _replaced) if _replaced else (NAME,)
_DRAFTS = "sglang.srt.speculative.draft_utils.DraftBackendFactory"


def register() -> None:
    """Makes "archflash" a name that SGLang takes, for the target model and for draft models.

    SGLang calls this in all of its processes, whether archflash is chosen or not, so a version of
    SGLang without this interface gets a warning and no error.
    """
    try:
        from sglang.srt.arg_groups import choices
        from sglang.srt.layers.attention.attention_registry import register_attention_backend
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        choices.add_attention_backend_choices([NAME])
        choices.add_draft_attention_backend_choices([NAME])
        choices.add_deterministic_attention_backend_choices([NAME])
        choices.add_radix_supported_deterministic_attention_backend_choices([NAME])
        for name in _NAMES:
            register_attention_backend(name)(_backend)
        # SGLang makes the backends of draft models by name, from a table without a registry.
        for method, make in (
            ("create_decode_backend", _draft_decode_backend),
            ("create_draft_extend_backend", _draft_extend_backend),
        ):
            HookRegistry.register(f"{_DRAFTS}.{method}", make, HookType.AROUND)
    except (ImportError, AttributeError) as error:
        warnings.warn(
            f"archflash is no backend of this SGLang, whose interface is another: {error}",
            stacklevel=2,
        )


def _backend(runner: Any) -> Any:
    from archflash.integrations.sglang_backend import ArchflashBackend

    return ArchflashBackend(runner)


def _is_ours(factory: Any, decodes: bool) -> bool:
    """Whether a DraftBackendFactory is to make our backends."""
    from sglang.srt.runtime_context import attention_backends

    return (factory.draft_attn_backend or attention_backends()[decodes]) in _NAMES


def _draft_decode_backend(original: Any, factory: Any) -> Any:
    """The backend of a draft model's decoding steps: one for each step but the last, which drafts
    nothing.
    """
    if factory.speculative_num_steps <= 1 or not _is_ours(factory, decodes=True):
        return original(factory)
    from archflash.integrations.sglang_backend import DraftSteps

    steps = DraftSteps(factory.draft_model_runner, factory.topk, factory.speculative_num_steps)
    return _named(steps, *steps.attn_backends)


def _draft_extend_backend(original: Any, factory: Any) -> Any:
    """The backend by which a draft model reads the tokens that were accepted."""
    from sglang.srt.runtime_context import get_spec

    if not _is_ours(factory, decodes=get_spec().speculative_attention_mode == "decode"):
        return original(factory)
    return _named(_backend(factory.draft_model_runner))


def _named(*backends: Any) -> Any:
    """Tells backends their name, by which models ask for it; returns the first one."""
    for backend in backends:
        backend.prefill_attention_backend_str = backend.decode_attention_backend_str = NAME
    return backends[0]
