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
from archflash._call_times import BOTH, FORWARD, MOST_LOG, NOISE, Family, Fit, Kind, Measured, Sizes

TABLE = "calibration"  # the name of the file in the user's folder
FORMAT = 3  # of an entry; another one does not count
EQUAL = 0.02  # candidates whose times differ by less count as equally fast
# Calls have ever other sizes, for each of which cuDNN makes a plan, which takes the host long:
# PyTorch has to be faster by this. With few rows each step of decoding has another number of keys.
PLANS_MARGIN = {"few": 0.05, "many": 0.03}
RISK = 0.5  # standard deviations by which a candidate counts as slower than it is predicted to be

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
            of the time eagerly.
        date: when it was measured.
        gpu: the GPU.
        key: what the table holds for, in words.
        wrong: candidates that gave wrong numbers in calls of this kind.
        doubt: by what part the cost of each may be off, a standard deviation.
        plans: by what part PyTorch has to be faster.
    """

    cost: dict[str, float]
    date: str
    gpu: str
    key: str
    wrong: frozenset[str]
    doubt: dict[str, float]
    plans: float

    def in_order(self, today: tuple[str, ...], measured: bool = False) -> tuple[str, ...]:
        """The candidates of `today` that were measured, the fastest first. Those that are equally
        fast keep the order that they have there. Where that is by times of such GPUs (measured),
        it also holds against differences that the predictions are in doubt of.
        """
        left = [name for name in today if name in self.cost]
        order = []
        while left:
            fastest = min(left, key=self._weighed)
            name = next(x for x in left if not self._differ(x, fastest, measured))
            order.append(name)
            left.remove(name)
        return tuple(order)

    def _differ(self, name: str, fastest: str, measured: bool) -> bool:
        """Whether a candidate is slower than another one by what counts."""
        doubt = math.hypot(self.doubt[name], self.doubt[fastest]) if measured else 0.0
        return self._weighed(name) > self._weighed(fastest) * (1 + EQUAL + doubt)

    def _weighed(self, name: str) -> float:
        """The cost of a candidate, more where it is in doubt, and of PyTorch what plans cost."""
        plans = self.plans if name.startswith("torch") else 0.0
        return self.cost[name] * (1 + plans + RISK * self.doubt[name])

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
        host_us: what an eager call costs on the host: by passes and a folder of ours or "torch".
        families: what was measured, by kind of family.
        wrong: candidates that gave wrong numbers, (name, passes), and what was seen.
        wrong_kinds: the kinds of calls where they did.
    """

    gpu: str
    date: str
    key: str
    sms: int
    host_us: dict[tuple[str, str], float]
    families: dict[Kind, Family]
    wrong: dict[tuple[str, str], str]
    wrong_kinds: frozenset[tuple[str, Kind]]

    @classmethod
    def read(cls, entry: dict[str, Any]) -> Table:
        """The table of an entry of the file.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: it is none.
        """
        key = entry["key"]
        sms = _at_least_1(entry["sms"])
        families = {Kind(*told["kind"]): _family(told, sms) for told in entry["families"]}
        words = ", ".join(f"{name} {word}" for name, word in key.items() if name in _SHOWN)
        return cls(
            gpu=str(key["gpu"]), date=str(entry["date"]), key=words, sms=sms,
            host_us={(str(p), str(who)): float(_number(us)) for p, who, us in entry["host_us"]},
            families=families,
            wrong={(str(name), str(of)): str(text) for name, of, text in entry["wrong"]},
            wrong_kinds=frozenset((str(name), Kind(*kind)) for name, kind in entry["wrong_kinds"]),
        )  # fmt: skip

    def predict(self, kind: Kind, sizes: Sizes, d: int, dv: int) -> Prediction | None:
        """What each candidate costs; None where such calls were not measured."""
        family = self.families.get(kind.family())
        if family is None or not family.reaches(d, dv):
            return None
        times, cost = family.predict(kind, sizes, d, dv), {}
        for name, us in times.us.items():
            who = "torch" if name.startswith("torch") else name
            # An eager call waits for the host at times, and for the device at others.
            eager = math.hypot(us, self.host_us.get((kind.passes, who), 0.0))
            cost[name] = math.sqrt(us * eager)
        wrong = frozenset(name for name, where in self.wrong_kinds if where == kind)
        plans = PLANS_MARGIN[kind.rows]
        return Prediction(cost, self.date, self.gpu, self.key, wrong, times.doubt, plans)


def _number(told: object) -> Any:
    """A number from 0 on, with which one can compute."""
    if isinstance(told, bool) or not isinstance(told, int | float) or not 0 <= told < _LARGEST:
        raise ValueError(f"{told!r} is no size")
    return told


def _at_least_1(told: object) -> int:
    if not isinstance(told, int) or not 1 <= told < _LARGEST:
        raise ValueError(f"{told!r} is no number from 1 on")
    return told


def _family(told: dict[str, Any], sms: int) -> Family:
    """The family of a part of an entry."""
    kind, calls = Kind(*told["kind"]), []
    for causal, d, dv, *shape, us in told["calls"]:
        b, hq, hkv, nq, nk = map(_number, shape)
        sizes = Sizes.of((b, hq, hkv, nq, nk), bool(causal))
        times = {str(name): float(_number(one)) for name, one in us.items()}
        dims = _at_least_1(d), _at_least_1(dv)
        calls.append(Measured(kind._replace(causal=bool(causal)), *dims, sizes, times))
    fits = {
        str(name): Fit(
            _logarithm(mean), _logarithm(_number(spread)),
            tuple(None if x is None else _logarithm(x, MOST_LOG / NOISE) for x in pulls),
        )
        for name, (mean, spread, pulls) in told["fits"].items()
    }  # fmt: skip
    if any(len(fit.pulls) != len(calls) for fit in fits.values()):
        raise ValueError("pulls and calls differ in number")
    if (reference := str(told["reference"])) not in fits:
        raise ValueError("its reference was not measured")
    if not (start := float(_number(told["start"]))):
        raise ValueError("its start is 0")
    return Family(tuple(calls), start, reference, fits, sms)


def _logarithm(told: object, most: float = MOST_LOG) -> float:
    """A logarithm of times, or of their ratio."""
    if isinstance(told, bool) or not isinstance(told, int | float) or not abs(told) < most:
        raise ValueError(f"{told!r} is no logarithm of times")
    return float(told)


_LARGEST = 1e15  # far beyond all sizes and times
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
    if fitting.get("format") != FORMAT:
        logger.warning("%s", of_another_version(fitting))
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


def of_another_version(entry: dict[str, Any]) -> str:
    """A sentence on a table of another format."""
    return (
        f"archflash: the table of {entry['key'].get('gpu')} was measured by another version of "
        "archflash and does not count: run `archflash calibrate` again"
    )


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
    _native.clear_cache()  # what was decided by the table as it was
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
