"""What is measured: every implementation of ours, and PyTorch's attention backends one by one."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.cases import TORCH_DTYPES, Case

if TYPE_CHECKING:
    import torch

    Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

# torch-math stores the scores: above this it only measures how memory runs out.
MATH_SCORE_BYTES = 8_000_000_000


def _serves_all(case: Case) -> str | None:
    return None


def _serves_everywhere(case: Case, device: str | int) -> str | None:
    return None


@dataclass(frozen=True)
class Candidate:
    """One row of the tables.

    Args:
        name: value of the column `implementation`.
        version: value of the column `version`.
        ours: True for a folder of this project; a wrong result of ours fails the run.
        bind: makes the function of q, k and v (in the layout of torch SDPA) that computes a case.
            It must add as little host time as it can: its cost is part of host_us.
        context: entered around all calls, so that it is not part of their cost.
        refuses: returns the reason why a case is not even tried, or None.
        refuses_on: returns the reason why a GPU cannot run a case, as far as that is known without
            a call, or None. The GPU is an index, or the name of a known one that is not at hand.
        features: value of the column `features`; rows that have one stay out of the tables.
        exact: False if it approximates on purpose, and is held to a coarse limit like a peer.
    """

    name: str
    version: str
    ours: bool
    bind: Callable[[Case], Call]
    context: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    refuses: Callable[[Case], str | None] = _serves_all
    refuses_on: Callable[[Case, str | int], str | None] = _serves_everywhere
    features: str = ""
    exact: bool = True


def our_candidates() -> list[Candidate]:
    """One candidate for each implementation of the installed package, each of them forced.

    PyTorch's attention inside the package is left out: its backends are the peers.
    """
    import archflash

    def bind(name: str, case: Case) -> Call:
        return functools.partial(archflash.attention, causal=case.causal, implementation=name)

    return [
        Candidate(
            item.name,
            archflash.__version__,
            True,
            functools.partial(bind, item.name),
            refuses_on=functools.partial(_planner_refuses, item.name),
        )
        for item in archflash.implementations()
        if item.name != "torch"
    ]


def _planner_refuses(name: str, case: Case, device: str | int) -> str | None:
    """Why an implementation has no plan for a case on a GPU."""
    import archflash

    q, k, v = _empty(case, "meta")
    try:
        archflash.explain(q, k, v, device=device, implementation=name, causal=case.causal)
    except archflash.ArchflashError as error:
        return str(error)
    return None


def _empty(case: Case, device: str) -> list[torch.Tensor]:
    """q, k and v of a case, whose numbers nobody reads."""
    import torch

    rows = ((case.hq, case.nq, case.d), (case.hkv, case.nk, case.d), (case.hkv, case.nk, case.dv))
    dtype = getattr(torch, TORCH_DTYPES[case.dtype])
    return [torch.empty(case.b, *shape, dtype=dtype, device=device) for shape in rows]


def chosen_candidates() -> list[Candidate]:
    """archflash and PyTorch as a user gets them who forces nothing.

    A call through archflash must not be slower than the same call of PyTorch; the two rows of a run
    show whether it is. They name no kernel, so no table has them.
    """
    import torch

    import archflash

    def ours(case: Case) -> Call:
        return functools.partial(archflash.attention, causal=case.causal)

    return [
        Candidate(
            "archflash", archflash.__version__, True, ours, features="chosen=archflash", exact=False
        ),
        Candidate(
            "torch",
            torch.__version__,
            False,
            _sdpa,
            refuses=_torch_refuses,
            features="chosen=torch",
        ),
    ]


def int8_candidate() -> Candidate:
    """ada with Q K^T in int8, the preparation of Q and K included."""
    import archflash

    def bind(case: Case) -> Call:
        return functools.partial(
            archflash.attention, causal=case.causal, implementation="ada", approximate="int8_qk"
        )

    return Candidate(
        "ada-int8", archflash.__version__, True, bind, features="approximate=int8_qk", exact=False
    )


# Shared memory that a GPU of compute capability 12.x has for all CTAs of an SM, and for one CTA.
# CUDA reserves 1 KB for each CTA.
SHARED_12X = {"shared_per_sm": 100 * 1024, "shared_per_block": 99 * 1024}
RESERVED_SHARED = 1024


def consumer_as_on_12x() -> Candidate:
    """blackwell_consumer with no more CTAs on an SM than a 12.x GPU has room for.

    The plan is made for this GPU with the shared memory of 12.x. Each CTA then requests more shared
    memory than it uses, so that no more CTAs fit on an SM than on a 12.x GPU.
    """
    import torch

    import archflash
    from archflash import _api, _dispatch
    from archflash import _archflash as native

    name = "blackwell_consumer"

    def bind(case: Case) -> Call:
        here = _dispatch.query_device(torch.cuda.current_device())
        device = native.Device.from_dict(here.to_dict() | SHARED_12X)
        plans: dict[torch.Size, native.LaunchPlan] = {}

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            dtype = torch.bfloat16 if case.dtype == "e4m3" else q.dtype
            out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=dtype)
            if q.shape not in plans:
                plan = native.plan(name, _api.make_problem(q, k, v, causal=case.causal), device)
                if isinstance(plan, list):
                    raise RuntimeError("; ".join(plan))
                fields = plan.to_dict()
                for launch in fields["launches"]:
                    needed = launch["shared_bytes"] + RESERVED_SHARED
                    ctas = device.shared_per_sm // needed
                    part = here.shared_per_sm // ctas - RESERVED_SHARED
                    launch["shared_bytes"] = min(part, here.shared_per_block)
                plans[q.shape] = native.LaunchPlan.unchecked_from_dict(fields)
            native.launch(plans[q.shape], {"q": q, "k": k, "v": v, "out": out})
            return out

        return call

    return Candidate(f"{name}-99KB", archflash.__version__, True, bind, features="shared=99KB")


def _sdpa(case: Case) -> Call:
    import torch

    # enable_gqa only where needed: some backends refuse every call that has it.
    extra: dict[str, Any] = {"enable_gqa": True} if case.hq != case.hkv else {}
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return functools.partial(sdpa, is_causal=case.causal, **extra)


def _torch_refuses(case: Case) -> str | None:
    if case.dtype == "e4m3":
        return "scaled_dot_product_attention of torch takes no FP8 inputs"
    if case.causal and case.nq != case.nk:
        return "is_causal of torch aligns to the top left: another result than ours"
    return None


def torch_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends_q: torch.Tensor, ends_k: torch.Tensor,
    longest_q: int, longest_k: int, *, causal: bool = False, window: tuple[int, int] | None = None,
) -> torch.Tensor:  # fmt: skip
    """PyTorch's operator for packed sequences, whose kernel is that of torch-flash.

    Args:
        q, k, v: (rows of all sequences, heads, head dim).
        ends_q, ends_k: where the sequences end, from 0 on: int32.
        longest_q, longest_k: rows of the longest sequence.
        causal: whether a query sees no later keys.
        window: (left, right) keys that it sees beside the one at its own place.

    Returns:
        The output, as q is.
    """
    from torch.nn.attention.varlen import varlen_attn

    left, right = window or (-1, -1)
    out: torch.Tensor = varlen_attn(
        q, k, v, ends_q, ends_k, longest_q, longest_k, window_size=(left, 0 if causal else right)
    )
    return out


def torch_candidates() -> list[Candidate]:
    """PyTorch's scaled_dot_product_attention with one backend allowed at a time."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def math_refuses(case: Case) -> str | None:
        if case.score_bytes() >= MATH_SCORE_BYTES:
            return "its float32 score matrix has 8 GB or more"
        return _torch_refuses(case)

    def context(backend: SDPBackend) -> AbstractContextManager[object]:
        manager: AbstractContextManager[object] = sdpa_kernel([backend])
        return manager

    def backend_refuses(
        check: Callable[[Any, bool], bool], case: Case, device: str | int
    ) -> str | None:
        if isinstance(device, str):
            return None  # PyTorch can be asked about a GPU at hand only
        q, k, v = _empty(case, f"cuda:{device}")
        gqa = case.hq != case.hkv
        asked = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, case.causal, gqa)
        return None if check(asked, False) else "PyTorch says that this kernel cannot serve it"

    checks = {
        "torch-flash": torch.backends.cuda.can_use_flash_attention,
        "torch-cudnn": torch.backends.cuda.can_use_cudnn_attention,
        "torch-efficient": torch.backends.cuda.can_use_efficient_attention,
    }
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    version = torch.__version__
    backends = (
        ("torch-flash", version, SDPBackend.FLASH_ATTENTION, _torch_refuses),
        ("torch-cudnn", _cudnn_version(cudnn), SDPBackend.CUDNN_ATTENTION, _torch_refuses),
        ("torch-efficient", version, SDPBackend.EFFICIENT_ATTENTION, _torch_refuses),
        ("torch-math", version, SDPBackend.MATH, math_refuses),
    )
    return [
        Candidate(
            name,
            text,
            False,
            _sdpa,
            functools.partial(context, backend),
            refusal,
            functools.partial(backend_refuses, checks[name])
            if name in checks
            else _serves_everywhere,
        )
        for name, text, backend, refusal in backends
    ]


def runnable(
    cases: Iterable[Case], candidates: Iterable[Candidate], device: str | int
) -> list[tuple[Case, Candidate]]:
    """The cases that a GPU can run, each with every candidate that serves it there.

    Args:
        cases: shapes, in the order of the result.
        candidates: of which some may not serve a case, or not on this GPU.
        device: index of the GPU, or the name of a known one that is not at hand.
    """
    return [
        (case, candidate)
        for case in cases
        for candidate in candidates
        if candidate.refuses(case) is None and candidate.refuses_on(case, device) is None
    ]


# FlashAttention-3 and -4: the name of the row, the modules that may have the function, the packages
# that may tell its version, and the dtypes. PyPI's fa3-fwd is built without fp16; a call says so.
FLASH_ATTENTION = (
    (
        "fa3",
        ("flash_attn_interface", "fa3_fwd_interface"),
        ("flash-attn-3", "fa3-fwd"),
        ("fp16", "bf16", "e4m3"),
    ),
    ("fa4", ("flash_attn.cute",), ("flash-attn-4",), ("fp16", "bf16")),
)


def flash_attention_candidates() -> list[Candidate]:
    """FlashAttention-3 and -4, whose tensors are (batch, rows, heads, d). One that is not installed
    refuses every case with that reason.
    """
    return [_flash_attention(*row) for row in FLASH_ATTENTION]


def _function_of(modules: tuple[str, ...], name: str) -> tuple[Callable[..., Any] | None, str]:
    """A function of the first module that has it, else None; and why others have not."""
    missing = []
    for module in modules:
        try:
            return getattr(importlib.import_module(module), name), ""
        except Exception as error:  # a broken installation fails in its own way
            missing.append(f"{module}: {type(error).__name__}: {error}")
    return None, "; ".join(missing)


def flash_attention_varlen(name: str) -> Callable[..., Any]:
    """The function of packed sequences of FlashAttention-3 or -4, called as `torch_varlen` is."""
    function, missing = _function_of(
        next(modules for row, modules, _, _ in FLASH_ATTENTION if row == name),
        "flash_attn_varlen_func",
    )

    def attend(*given: Any, causal: bool) -> Any:
        if function is None:
            raise RuntimeError(f"not installed: {missing}")
        q, k, v, ends_q, ends_k, longest_q, longest_k = given
        return function(
            q, k, v, cu_seqlens_q=ends_q, cu_seqlens_k=ends_k, max_seqlen_q=longest_q,
            max_seqlen_k=longest_k, causal=causal,
        )  # fmt: skip

    return attend


def _flash_attention(
    name: str, modules: tuple[str, ...], packages: tuple[str, ...], dtypes: tuple[str, ...]
) -> Candidate:
    function, missing = _function_of(modules, "flash_attn_func")
    version = "unknown"
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(package)

    def refuses(case: Case) -> str | None:
        if function is None:
            return f"not installed: {missing}"
        if case.dtype not in dtypes:
            return f"called with {', '.join(dtypes)} only"
        return None

    def bind(case: Case) -> Call:
        assert function is not None  # otherwise refuses() has refused the case
        attend = function
        # FlashAttention-3 splits the keys of few queries where the number of splits is left to it.
        options: dict[str, Any] = {"num_splits": 0} if name == "fa3" and case.is_decode else {}
        if case.window is not None:
            options["window_size"] = case.window

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            made = attend(*(x.transpose(1, 2) for x in (q, k, v)), causal=case.causal, **options)
            out: torch.Tensor = made[0] if isinstance(made, tuple) else made
            return out.transpose(1, 2)

        return call

    return Candidate(name, version, False, bind, refuses=refuses)


def _cudnn_version(number: int | None) -> str:
    """Version of cuDNN 9 and newer from its number: 91900 is "9.19.0"."""
    if number is None:
        return "unknown"
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


@contextlib.contextmanager
def refusals() -> Iterator[list[str]]:
    """Collects what PyTorch says about why a backend cannot serve a call.

    Yields:
        A list that is complete when the block ends: PyTorch warns with the real reasons before
        it raises a general error.
    """
    reasons: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield reasons
        finally:
            for warning in caught:
                text = str(warning.message).split(" (Triggered internally")[0].strip()
                if text not in reasons:
                    reasons.append(text)


def reason_of(error: BaseException, warned: list[str]) -> str:
    """One line that says why a candidate did not run, at most 200 characters."""
    said = str(error).strip().split("\n\n")[0]
    text = " ".join(f"{type(error).__name__}: {said}".split())
    # Some warnings are no reasons: headings, and those about backends that are switched off here.
    noise = ("not used because", "runtime disabled")
    specific = [warning for warning in warned if not any(part in warning for part in noise)]
    if "No available kernel" in text and specific:
        text = " ".join("; ".join(specific).split())
    return text if len(text) <= 200 else text[:197] + "..."
