"""archflash in vLLM: the attention backend CUSTOM.

Installing archflash is enough: vLLM finds `register` by the entry point `vllm.general_plugins`, and
``--attention-backend CUSTOM`` chooses it. Where another plug-in takes CUSTOM too, the environment
variable VLLM_PLUGINS says which plug-ins vLLM loads.
"""

from __future__ import annotations

BACKEND = "archflash.integrations.vllm_backend.ArchflashBackend"


def register() -> None:
    """Tells vLLM where its attention backend CUSTOM is. The backend is imported when it is chosen.

    Raises:
        ImportError: vLLM is not installed, or of a version without this registry.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
