"""Exit status 0 when an installed torch is new enough for archflash, 1 when one must be
installed.
"""

import importlib.metadata
import re
import sys

MINIMUM = (2, 6)

try:
    version = importlib.metadata.version("torch")
except importlib.metadata.PackageNotFoundError:
    sys.exit(1)
major, minor = (int(part) for part in re.findall(r"\d+", version)[:2])
sys.exit(0 if (major, minor) >= MINIMUM else 1)
