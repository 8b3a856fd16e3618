"""The exceptions of archflash. Wrong arguments raise the built-in ValueError and TypeError
instead.
"""

from __future__ import annotations


class ArchflashError(Exception):
    """The base class of archflash's own exceptions."""


class UnsupportedError(ArchflashError):
    """The call asks for a feature that is not built, or no implementation may serve it."""


class NotCompiledError(ArchflashError):
    """The implementation exists, but this build left its kernels out."""


class ForcedImplementationError(ArchflashError):
    """The forced implementation is unknown or cannot serve the call; nothing else was tried."""


class LaunchError(ArchflashError):
    """CUDA refused to load or launch a kernel."""
