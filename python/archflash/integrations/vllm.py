"""archflash in vLLM: the attention backends CUSTOM (also ARCHFLASH) and ARCHFLASH_MLA.

Installing archflash is enough: vLLM finds `register` by the entry point `vllm.general_plugins`, and
``--attention-backend CUSTOM`` chooses it. Where another plug-in takes CUSTOM too, the environment
variable VLLM_PLUGINS says which plug-ins vLLM loads, and the name ARCHFLASH is there in any case.
"""

from __future__ import annotations

import warnings

BACKEND = "archflash.integrations.vllm_backend.ArchflashBackend"
MLA_BACKEND = "archflash.integrations.vllm_mla.ArchflashMLABackend"
MLA_PREFILL_BACKEND = "archflash.integrations.vllm_mla.ArchflashMLAPrefillBackend"


def register() -> None:
    """Tells vLLM where its attention backends are, which are imported when they are chosen.

    vLLM calls this in all of its processes, whether archflash is chosen or not, so a version of
    vLLM without such a registry gets a warning and no error.
    """
    try:
        from vllm.v1.attention.backends.mla.prefill.registry import (
            MLAPrefillBackendEnum,
            register_mla_prefill_backend,
        )
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
        for name, path in (("ARCHFLASH", BACKEND), ("ARCHFLASH_MLA", MLA_BACKEND)):
            if name not in AttentionBackendEnum.__members__:  # a process may call this twice
                register_backend(name, path)
        if "ARCHFLASH" not in MLAPrefillBackendEnum.__members__:
            register_mla_prefill_backend("ARCHFLASH", MLA_PREFILL_BACKEND)
    except (ImportError, AttributeError) as error:
        warnings.warn(
            f"archflash is no backend of this vLLM, which has no registry for it: {error}",
            stacklevel=2,
        )
