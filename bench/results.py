"""Result rows: the columns, the append-only CSV file, and ratios that stay within one run."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from bench.cases import Case, Key

RESULTS_FOLDER = Path(__file__).with_name("results")
HEADER = (
    "run_id,date,commit,dirty,gpu,driver,cuda,torch,implementation,version,dtype,b,hq,hkv,nq,nk,"
    "d,dv,causal,features,clocks_mhz,p20_us,p50_us,p80_us,tflops,gbps,max_err,host_us"
)
COLUMNS = HEADER.split(",")
SHAPE_COLUMNS = ("b", "hq", "hkv", "nq", "nk", "d", "dv")
# Kernels of other projects. Every other value of the column `implementation` is a folder of ours.
PEERS = ("torch-flash", "torch-cudnn", "torch-efficient", "torch-math", "fa3", "fa4", "triton")
# Words in `features`. The first says that the candidate could not be captured in a CUDA graph, the
# second that it was timed alone for a second, the third that the time and the operations are those
# of the call and its gradients.
EAGER = "timing=eager"
SUSTAINED = "sustained"
GRADIENTS = (
    "gradients"  # word in `features`: the call and its gradients, in 3.5 times the operations
)
PACKED = "layout=packed"  # word in `features` of a call of packed sequences
MASK = "mask="  # word in `features`; behind it stands the kind of mask as data, of bench.masks
POWER = "power="  # word in `features` of a sustained row; "W" stands behind the number

Row = dict[str, str]


def is_peer(implementation: str) -> bool:
    """Whether rows of this name are the measurements of somebody else's kernel."""
    return implementation in PEERS or implementation.startswith("torch")


def percentile(samples: Sequence[float], fraction: float) -> float:
    """Percentile with linear interpolation between the two nearest samples.

    Args:
        samples: at least one number, in any order.
        fraction: 0.0 for the smallest to 1.0 for the largest.

    Returns:
        The percentile, in the unit of the samples.

    Raises:
        ValueError: no samples, or a fraction outside 0 to 1.
    """
    if not samples or not 0.0 <= fraction <= 1.0:
        raise ValueError(f"percentile {fraction} of {len(samples)} samples is not defined")
    ordered = sorted(samples)
    position = fraction * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def make_row(
    facts: Mapping[str, str], case: Case, *, implementation: str, version: str, features: str,
    clocks_mhz: str, samples_us: Sequence[float], max_err: float, host_us: float,
) -> Row:  # fmt: skip
    """Builds one result row.

    Args:
        facts: the columns of the run: run_id, date, commit, dirty, gpu, driver, cuda, torch.
        case: the shape.
        implementation: folder of ours, or name of a peer.
        version: version of the package that the implementation comes from.
        features: words joined by ";": what the call asks for beyond the shape; "" for nothing.
        clocks_mhz: SM clock under load, or "unknown".
        samples_us: microseconds per call, one number per round.
        max_err: largest absolute difference from float64 on what was checked.
        host_us: median microseconds that one eager call takes on the host.

    Returns:
        A value for every column.
    """
    p50 = percentile(samples_us, 0.5)
    row = {
        **facts,
        "implementation": implementation,
        "version": version,
        **shape_columns(case),
        "features": features,
        "clocks_mhz": clocks_mhz,
        "p20_us": f"{percentile(samples_us, 0.2):.3f}",
        "p50_us": f"{p50:.3f}",
        "p80_us": f"{percentile(samples_us, 0.8):.3f}",
        "tflops": f"{case.flops() / p50 / 1e6:.2f}",
        "gbps": f"{case.bytes() / p50 / 1e3:.1f}",
        "max_err": f"{max_err:.3e}",
        "host_us": f"{host_us:.2f}",
    }
    return {column: row[column] for column in COLUMNS}


def shape_columns(case: Case) -> Row:
    """The columns that say which shape a row is about."""
    sizes = {name: str(getattr(case, name)) for name in SHAPE_COLUMNS}
    return {"dtype": case.dtype, **sizes, "causal": str(int(case.causal))}


def row_key(row: Mapping[str, str]) -> Key:
    """The shape of a row, as Case.key gives it."""
    b, hq, hkv, nq, nk, d, dv = (int(row[name]) for name in SHAPE_COLUMNS)
    return (row["dtype"], b, hq, hkv, nq, nk, d, dv, row["causal"] == "1")


def append_rows(path: Path, rows: Iterable[Mapping[str, str]]) -> None:
    """Appends rows to a results file, which is made with its header where there is none.

    Args:
        path: CSV file; its folder must exist.
        rows: one mapping per row, with exactly the columns of COLUMNS.

    Raises:
        ValueError: the file has another header, or a row other columns; nothing is written.
    """
    rows = list(rows)
    for row in rows:
        if set(row) != set(COLUMNS):
            wrong = ", ".join(sorted(set(row) ^ set(COLUMNS)))
            raise ValueError(f"a row for {path.name} has missing or unknown columns: {wrong}")
    check_header(path)
    is_new = not path.exists() or path.stat().st_size == 0
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(rows)


def check_header(path: Path) -> None:
    """Raises ValueError when the file holds something else than result rows, or is cut off."""
    if not path.exists() or path.stat().st_size == 0:
        return
    text = path.read_text()
    header = text.split("\n", 1)[0]
    if header != HEADER:
        raise ValueError(
            f"{path} has another header than this version writes; move it away or choose another "
            f"--output. It has: {header}"
        )
    if not text.endswith("\n"):
        raise ValueError(f"{path} ends in the middle of a row; complete or remove that row")


def load_rows(path: Path) -> list[Row]:
    """Reads a results file.

    Args:
        path: CSV file written by append_rows.

    Returns:
        The rows in file order; none where there is no file.

    Raises:
        ValueError: the file has another header.
    """
    if not path.exists():
        return []
    check_header(path)
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def speedup(ours: Mapping[str, str], peer: Mapping[str, str]) -> float:
    """How many times faster one row is than another of the same run and shape.

    Args:
        ours: the row whose speed is asked for.
        peer: the row that it is compared with.

    Returns:
        p50 of the peer over p50 of ours: above 1 where ours is faster.

    Raises:
        ValueError: the rows are of two runs, two shapes, two feature sets or two ways of timing.
    """
    if ours["run_id"] != peer["run_id"]:
        raise ValueError(
            f"no ratio between two runs: {ours['run_id']} ({ours['implementation']}) and "
            f"{peer['run_id']} ({peer['implementation']})"
        )
    if row_key(ours) != row_key(peer) or asked_for(ours) != asked_for(peer):
        raise ValueError("no ratio between two cases")
    if is_sustained(ours) != is_sustained(peer):
        raise ValueError("no ratio between two ways of timing")
    return float(peer["p50_us"]) / float(ours["p50_us"])


def call_features(row: Mapping[str, str]) -> tuple[str, ...]:
    """The words of `features` that say what the call asked for and which GPU it was planned for,
    without those about how it was timed.
    """
    timing = (SUSTAINED, POWER, "timing=")
    return tuple(w for w in row["features"].split(";") if w and not w.startswith(timing))


def is_sustained(row: Mapping[str, str]) -> bool:
    """Whether the candidate ran alone for a second; otherwise it took turns with the others."""
    return SUSTAINED in row["features"].split(";")


def power_w(row: Mapping[str, str]) -> int | None:
    """Mean power in watts while a sustained row was measured; None where it is not known."""
    words = [word for word in row["features"].split(";") if word.startswith(POWER)]
    return int(words[0].removeprefix(POWER).removesuffix("W")) if words else None


def asked_for(row: Mapping[str, str]) -> tuple[str, ...]:
    """The words of `features` about the call itself, without those about its planning, about what
    it approximates, about who chose its kernel and about how its sequences and keys lie in memory.
    """
    how = ("shared=", "approximate=", "chosen=", "cache=", "layout=")
    return tuple(word for word in call_features(row) if not word.startswith(how))


def figure(row: Mapping[str, str]) -> str:
    """Speed for a table: GB/s for one query row, else TFLOP/s, with "*" where timed eagerly."""
    value = f"{float(row['gbps']):.0f}" if row["nq"] == "1" else f"{float(row['tflops']):.1f}"
    return value + ("*" if EAGER in row["features"] else "")
