"""The schedules under which tests run a kernel on the simulator."""

from __future__ import annotations

import os

MODES = ("lazy", "eager", "random", "priority")
# Schedule number n has mode n % 4 and seed n. By default each mode runs once.
SEEDS = int(os.environ.get("ARCHFLASH_SIM_SEEDS", "4"))
IN_FULL = len(MODES) < SEEDS  # `make test-sim-full`
