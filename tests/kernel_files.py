"""Where the installed package has the PTX and the resources of its kernels. An editable install has
them in another folder than its Python sources.
"""

from __future__ import annotations

from pathlib import Path

import archflash

KERNELS = next(
    folder for path in archflash.__path__ if (folder := Path(path) / "_kernels").is_dir()
)
