"""The bits that probes give on the simulator: `python -m tests.sim.probes --write` stores them for
`archflash verify` (python/archflash/verify/probes.json); without --write it compares them.
"""

from __future__ import annotations

import json
import sys

from archflash import _archflash as native
from archflash._api import find_device
from archflash.verify import _probes

# One GPU of each compute capability.
GPUS = {
    f"{row.device.major}.{row.device.minor}": row.device.name
    for row in reversed(native.known_devices())
}


def simulated(probe: _probes.Probe, capability: str) -> str:
    """The hash of what a probe writes on a simulated GPU."""
    return _probes.digest(_probes.run(probe, find_device(GPUS[capability]), "cpu"))


def capabilities(probe: _probes.Probe) -> list[str]:
    """The compute capabilities for which this build has code of a probe, the lowest first."""
    devices = [find_device(name) for name in GPUS.values()]
    found = [device.capability for device in devices if _probes.runs_on(probe, device.capability)]
    return [f"{major}.{minor}" for major, minor in sorted(found)]


def bits(probe: _probes.Probe) -> str | dict[str, str]:
    """The hash of a probe: one for all GPUs, or one for each compute capability."""
    found = {capability: simulated(probe, capability) for capability in capabilities(probe)}
    same = set(found.values())
    return same.pop() if len(same) == 1 else found


def main() -> int:
    made = {probe.name: bits(probe) for probe in _probes.PROBES}
    text = json.dumps(made, indent=1) + "\n"
    if "--write" in sys.argv[1:]:
        _probes.EXPECTED.write_text(text)
        return 0
    if _probes.EXPECTED.read_text() != text:
        print(f"{_probes.EXPECTED} is not what the simulator gives: --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
