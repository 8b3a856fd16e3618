"""archflash in vLLM: the attention backend CUSTOM.

Installing archflash is enough: vLLM finds `register` by the entry point `vllm.general_plugins`, and
``--attention-backend CUSTOM`` chooses it. Where another plug-in takes CUSTOM too, the environment
variable VLLM_PLUGINS says which plug-ins vLLM loads.
"""

from __future__ import annotations

import warnings

BACKEND = "archflash.integrations.vllm_backend.ArchflashBackend"


def register() -> None:
    """Tells vLLM where its attention backend CUSTOM is, which is imported when it is chosen.

    vLLM calls this in all of its processes, whether archflash is chosen or not, so a version of
    vLLM without such a registry gets a warning and no error.
    """
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
    except (ImportError, AttributeError) as error:
        warnings.warn(
            f"archflash is no backend of this vLLM, which has no registry for it: {error}",
            stacklevel=2,
        )
