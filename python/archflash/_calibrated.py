"""The tables that `archflash calibrate` keeps of this machine's GPUs. Dispatch asks here first, and
then looks at what was measured elsewhere (_measured.py).
"""

from __future__ import annotations

import ctypes
import logging
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from archflash import _archflash as _native
from archflash import _fused_kernels, _measured, _user_tables
from archflash._call_times import BOTH, FEATURES, FORWARD, Fit, Group, Kind, Shape, Sizes

TABLE = "calibration"  # the name of the file in the user's folder
FORMAT = 1  # of an entry; another one does not count
# Candidates whose times differ by less count as equally fast. A time that is predicted from few
# sizes, none of them near, is off by up to UNSURE on an H200: there an order that was measured on
# such GPUs holds unless times differ by more.
EQUAL, UNSURE = 0.02, 0.1
# With few query rows each call may have another number of keys, for which cuDNN makes a plan, which
# takes the host long: PyTorch has to be faster by this.
FEW_ROWS_MARGIN = 0.05

logger = logging.getLogger("archflash")
_FEW = _measured.FEW_QUERIES
_DTYPES = {
    "float16": "16 bits",
    "bfloat16": "16 bits",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    "float32": "float32",
}
# Capacities of caches and keys of few rows are looked up in steps of a sixteenth of an octave,
# because in a decoding loop every step has another number.
_STEPS = 16
_UNBOUNDED = 2**63 - 1  # a side of a window without a limit, as problems have it


class Prediction(NamedTuple):
    """The candidates for a call by what they cost.

    Attributes:
        cost: of each candidate, in microseconds: the geometric mean of the time in a CUDA graph and
            of the time eagerly, which is at least that of the host.
        date: when it was measured.
        gpu: the GPU.
        key: what the table holds for, in words.
        wrong: candidates that gave wrong numbers in calls of this kind.
        sure: candidates whose times at these sizes are known well.
    """

    cost: dict[str, float]
    date: str
    gpu: str
    key: str
    wrong: frozenset[str]
    sure: frozenset[str]

    def in_order(self, today: tuple[str, ...], measured: bool = False) -> tuple[str, ...]:
        """The candidates of `today` that were measured, the fastest first. Those that are equally
        fast keep the order that they have there. measured: whether that is by times of such GPUs.
        """
        left = [name for name in today if name in self.cost]
        order = []
        while left:
            fastest = min(left, key=self.cost.__getitem__)
            unsure = UNSURE if measured else EQUAL
            name = next(x for x in left if not self._differ(x, fastest, unsure))
            order.append(name)
            left.remove(name)
        return tuple(order)

    def _differ(self, name: str, fastest: str, unsure: float) -> bool:
        """Whether a candidate is slower than another one by what counts."""
        margin = EQUAL if {name, fastest} <= self.sure else unsure
        return self.cost[name] > self.cost[fastest] * (1 + margin)

    def __str__(self) -> str:
        fastest = sorted(self.cost.items(), key=lambda item: item[1])[:4]
        times = ", ".join(f"{name} {us:.3g}" for name, us in fastest)
        return f"`archflash calibrate` on this {self.gpu}, {self.date}, {self.key}: {times} us"


@dataclass(frozen=True, eq=False)  # equal only to itself: it is a key of a cache
class Table:
    """What was measured on one GPU.

    Attributes:
        gpu: its name.
        date: when, as people write it.
        key: with what, in words.
        sms: its SMs.
        host_us: what an eager call costs on the host: by passes and "ours" or "torch".
        groups: what was measured, by kind.
        wrong: candidates that gave wrong numbers, (name, passes), and what was seen.
        wrong_kinds: the kinds of calls where they did.
    """

    gpu: str
    date: str
    key: str
    sms: int
    host_us: dict[tuple[str, str], float]
    groups: dict[Kind, tuple[Group, ...]]
    wrong: dict[tuple[str, str], str]
    wrong_kinds: frozenset[tuple[str, Kind]]

    @classmethod
    def read(cls, entry: dict[str, Any]) -> Table:
        """The table of an entry of the file.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: it is none.
        """
        key = entry["key"]
        if entry.get("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        groups: dict[Kind, list[Group]] = {}
        for told in entry["groups"]:
            fits = {
                str(name): Fit(
                    Shape(*map(_at_least_1, fit["shape"])),
                    tuple(map(float, fit["weights"])),
                    tuple(None if x is None else float(x) for x in fit["residuals"]),
                )
                for name, fit in told["fits"].items()
            }
            points = tuple(Sizes(*map(_number, point)) for point in told["points"])
            for fit in fits.values():
                _check_fit(fit, len(points))
            if not 0 <= int(told["own"]) <= len(points):
                raise ValueError("it has fewer points than it says")
            group = Group(int(told["d"]), int(told["dv"]), points, fits, int(told["own"]))
            groups.setdefault(Kind(*told["kind"]), []).append(group)
        words = ", ".join(f"{name} {word}" for name, word in key.items() if name in _SHOWN)
        return cls(
            gpu=str(key["gpu"]),
            date=str(entry["date"]),
            key=words,
            sms=_at_least_1(entry["sms"]),
            host_us={(str(p), str(who)): float(_number(us)) for p, who, us in entry["host_us"]},
            groups={
                kind: tuple(sorted(found, key=lambda g: g.d + g.dv))
                for kind, found in groups.items()
            },
            wrong={(str(name), str(of)): str(text) for name, of, text in entry["wrong"]},
            wrong_kinds=frozenset((str(name), Kind(*kind)) for name, kind in entry["wrong_kinds"]),
        )

    def group(self, kind: Kind, d: int, dv: int) -> Group | None:
        """The measured head dimensions that stand for those of a call."""
        found = self.groups.get(kind, ())
        return next((group for group in found if group.d >= d and group.dv >= dv), None)

    def predict(self, kind: Kind, sizes: Sizes, d: int, dv: int) -> Prediction | None:
        """What each candidate costs; None where such calls were not measured."""
        group = self.group(kind, d, dv)
        if group is None:
            return None
        cost = {}
        for name, us in group.predict(kind, sizes, self.sms).items():
            who = "torch" if name.startswith("torch") else "ours"
            cost[name] = math.sqrt(us * max(us, self.host_us.get((kind.passes, who), 0.0)))
            if who == "torch" and kind.rows == "few":
                cost[name] *= 1 + FEW_ROWS_MARGIN
        wrong = frozenset(name for name, where in self.wrong_kinds if where == kind)
        sure = group.sure_of(sizes) if (group.d, group.dv) == (d, dv) else frozenset[str]()
        return Prediction(cost, self.date, self.gpu, self.key, wrong, sure)


def _number(told: object) -> Any:
    """A number that is at least 0."""
    if isinstance(told, bool) or not isinstance(told, int | float) or not 0 <= told < math.inf:
        raise ValueError(f"{told!r} is no size")
    return told


def _at_least_1(told: object) -> int:
    if not isinstance(told, int) or told < 1:
        raise ValueError(f"{told!r} is no number from 1 on")
    return told


def _check_fit(fit: Fit, points: int) -> None:
    """Raises ValueError where no times can be made of a fit."""
    if len(fit.residuals) != points:
        raise ValueError("residuals and points differ in number")
    if len(fit.weights) != FEATURES or not all(abs(x) < _MOST_WEIGHT for x in fit.weights):
        raise ValueError(f"there must be {FEATURES} weights of microseconds")
    if not all(x is None or abs(x) < _MOST_RESIDUAL for x in fit.residuals):
        raise ValueError("a residual is no logarithm of a ratio of times")


_MOST_RESIDUAL, _MOST_WEIGHT = 20.0, 1e12  # far beyond what any GPU gives
_SHOWN = ("driver", "torch", "cudnn", "power")


# --- the table of this machine ---


def key_of(device: _native.Device) -> _user_tables.Key:
    """What a table of a GPU of this machine holds for."""
    return _user_tables.key_of(
        device, cudnn=str(_fused_kernels.cudnn_version()), power=_power_limit(device.name)
    )


def _power_limit(name: str) -> str:
    """The power limit of the first GPU of that name, such as "700 W"; "unknown" where the driver's
    library does not say. GPUs of one name share a table.
    """
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return "unknown"
    handle, count, milliwatts = ctypes.c_void_p(), ctypes.c_uint(), ctypes.c_uint()
    text = ctypes.create_string_buffer(96)
    if library.nvmlInit_v2() != 0 or library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return "unknown"
    for index in range(count.value):
        if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) != 0:
            continue
        library.nvmlDeviceGetName(handle, text, len(text))
        if text.value.decode() != name:
            continue
        if library.nvmlDeviceGetEnforcedPowerLimit(handle, ctypes.byref(milliwatts)) == 0:
            return f"{milliwatts.value / 1000:.0f} W"
    return "unknown"


def table_of(device: _native.Device) -> Table | None:
    """The table of a GPU of this machine that counts; None if there is none. A known GPU of another
    machine has none, because its name is not the driver's. The file is read once.
    """
    if not _user_tables.entries(TABLE):
        return None
    if device.name not in _found:
        _found[device.name] = _find(device)
    return _found[device.name]


_found: dict[str, Table | None] = {}


def _find(device: _native.Device) -> Table | None:
    mine = [x for x in _user_tables.entries(TABLE) if x["key"].get("gpu") == device.name]
    if not mine:
        return None
    now = key_of(device)
    fitting = next((entry for entry in mine if entry["key"] == now), None)
    if fitting is None:
        logger.warning("%s", stale(mine[-1], now))
        return None
    try:
        table = Table.read(fitting)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        logger.warning(
            "archflash: the table of %s is damaged (%s: %s) and does not count: "
            "`archflash calibrate` makes a new one",
            device.name, type(error).__name__, error,
        )  # fmt: skip
        return None
    # GPUs of one name may differ in SMs, as parts of a GPU (MIG) do.
    return table if table.sms == device.sm_count else None


def stale(entry: dict[str, Any], now: _user_tables.Key) -> str:
    """A sentence on a table that no longer holds."""
    changed = _user_tables.differences(entry["key"], now)
    return (
        f"archflash: what `archflash calibrate` measured on {entry['key'].get('gpu')} does not "
        f"count any more ({changed}): run it again, or `archflash calibrate --forget`"
    )


def read_again() -> None:
    """Forgets what was read, after the file has changed."""
    _user_tables.entries.cache_clear()
    _found.clear()
    _predict.cache_clear()


def find(problem: _native.Problem, device: _native.Device | None) -> Prediction | None:
    """What each candidate costs for a problem on a GPU of this machine; None if that was not
    measured, or if it must not matter.
    """
    if device is None:
        return None
    # With batch_invariant the choice must not depend on how large a call is.
    if problem.batch_invariant or problem.dropout_p or problem.approximate:
        return None
    table = table_of(device)
    dtype, mask = _DTYPES.get(problem.dtype), _measured.mask_of(problem)
    if table is None or dtype is None or mask is None:
        return None
    sequences = max(problem.batch, 1)
    nq, nk = problem.nq, problem.nk
    if problem.varlen:
        nq, nk = -(-nq // sequences), -(-nk // sequences)
        if problem.kv_cache:
            nk = problem.nk
    few = nq <= _FEW
    way = "cache" if problem.kv_cache else "packed" if problem.varlen else "dense"
    passes = BOTH if problem.needs_grad else FORWARD
    kind = Kind(dtype, passes, "few" if few else "many", problem.causal and not few, mask, way)
    if few or way == "cache":
        step = 2.0 ** (math.ceil(math.log2(max(nk, 1)) * _STEPS) / _STEPS)
        nk = round(step)
    sides = (problem.window_left, problem.window_right) if problem.window else ()
    window = tuple(None if keys == _UNBOUNDED else keys for keys in sides) or (None, None)
    shape = (sequences, problem.heads_q, problem.heads_kv, nq, nk)
    return _predict(table, kind, shape, window, problem.d, problem.dv)


@lru_cache(maxsize=1024)
def _predict(
    table: Table,
    kind: Kind,
    shape: tuple[int, int, int, int, int],
    window: tuple[int | None, int | None],
    d: int,
    dv: int,
) -> Prediction | None:
    sizes = Sizes.of(shape, kind.causal, window)
    found = table.predict(kind, sizes, d, dv)
    if found is None and kind.way == "packed":
        found = table.predict(kind._replace(way="dense"), sizes, d, dv)
    return found
