"""A process of `archflash verify` in which one kernel has other machine code:
`python planted_worker.py KERNEL CUBIN FD`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from archflash import _archflash as native
from archflash import _dispatch, _eager_gradients
from archflash.verify import _worker


def plant(kernel: str, code: bytes) -> None:
    """From now on every plan with this kernel launches the code."""
    image = f"planted/{kernel}"
    native.add_image(image, code)

    def changed(plan: Any) -> Any:
        if not isinstance(plan, native.LaunchPlan) or kernel not in plan.kernels:
            return plan
        fields = plan.to_dict()
        launches = [
            row | {"image": image} if row["kernel"] == kernel else row for row in fields["launches"]
        ]
        return native.LaunchPlan.unchecked_from_dict(fields | {"launches": launches})

    def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments, **named: changed(function(*arguments, **named))

    for name in ("plan", "plan_backward"):
        setattr(native, name, wrapped(getattr(native, name)))
    # Without an order of kernels, by which the runtime would plan calls itself.
    native.set_decide(_dispatch.decide)
    native.set_decide_gradients(
        lambda *call: _eager_gradients.decide(*call[:-1], wrapped(call[-1]))  # type: ignore[misc]
    )


if __name__ == "__main__":
    _, kernel, cubin, *rest = sys.argv
    plant(kernel, Path(cubin).read_bytes())
    sys.argv = [sys.argv[0], *rest]
    sys.exit(_worker.main())
