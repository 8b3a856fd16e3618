"""Options that are no plain Python values: NumPy numbers are taken, tensors are never read."""

from __future__ import annotations

import copy
import pickle
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import archflash
from archflash import _archflash as native
from archflash import _options, reference


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


Q, K = rand(1, 2, 5, 16), rand(1, 2, 9, 16)
PACKED = {"cu_seqlens_q": torch.tensor([0, 5], dtype=torch.int32)}
PACKED["cu_seqlens_k"] = torch.tensor([0, 9], dtype=torch.int32)


class Silent(Tensor):
    """A subclass of Tensor. Messages describe it as they describe a Tensor."""


class Holder:
    """An object whose repr asks a tensor for its values."""

    def __init__(self) -> None:
        self.tensor = torch.tensor(1.0)

    def __repr__(self) -> str:
        return f"Holder({self.tensor})"


ASKING = (
    "__repr__", "__str__", "__format__", "__bool__", "__int__", "__float__", "__index__", "__len__",
    "__iter__", "__contains__", "item", "tolist", "numpy", "cpu", "__array__",
)  # fmt: skip


@pytest.fixture
def tensors_keep_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every way to read a tensor fail. On a GPU it would wait and break a graph capture."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("a tensor was asked for its values")

    for name in ASKING:
        monkeypatch.setattr(Tensor, name, refuse, raising=False)


ONE = torch.tensor(1.0)
FOREIGN: dict[str, Any] = {
    "tensor": ONE,
    "subclass": ONE.as_subclass(Silent),  # type: ignore[no-untyped-call]
    "pair": (ONE, 3),
    "pair-of-tensors": [ONE, ONE],
    "nested": [[ONE]],
    "dict": {"x": ONE},
    "object": Holder(),
}
WORDS = {
    "tensor": "a torch.Tensor of dtype torch.float32 and shape () on cpu",
    "pair": "(a torch.Tensor of dtype torch.float32 and shape () on cpu, 3)",
    "dict": "a dict",
}
OPTIONS = (
    *(
        row.name
        for row in _options.ROWS
        if row.of_attention and row.kind not in ("tensor", "output")
    ),
    "implementation",
)


@pytest.mark.usefixtures("tensors_keep_their_values")
@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("option", OPTIONS)
def test_no_error_asks_a_tensor_for_its_values(option: str, kind: str) -> None:
    call: dict[str, Any] = {"q": Q, "k": K, "v": K}
    if option.startswith("max_seqlen"):
        call = {name: x[0].transpose(0, 1) for name, x in call.items()} | PACKED
    call[option] = FOREIGN[kind]
    wrong = (TypeError, ValueError, archflash.ArchflashError)
    with pytest.raises(wrong) as caught:
        archflash.attention(**call)
    words = WORDS.get(kind, "")
    if (option, kind) == ("q_offset", "tensor"):  # a tensor may be an offset, but not this one
        words = "q_offset has dtype torch.float32"
    elif (option, kind) == ("window", "pair"):  # the left side alone is wrong
        words = WORDS["tensor"]
    assert words in str(caught.value)
    with pytest.raises(wrong):
        archflash.explain(**call, device="H200")


@pytest.mark.usefixtures("tensors_keep_their_values")
def test_no_error_asks_a_tensor_for_its_values_in_the_other_entry_points() -> None:
    wrong = (TypeError, ValueError, archflash.ArchflashError)
    for name in ("q", "k", "v", "sinks", "attn_mask", "cu_seqlens_q", "q_descale", "out"):
        with pytest.raises(wrong):
            archflash.attention(**{"q": Q, "k": K, "v": K} | {name: [ONE, ONE]})
    for value in FOREIGN.values():
        for option in ("per", "layout", "implementation"):
            with pytest.raises(wrong):
                archflash.quantize_fp8(Q, **{option: value})
        for option in ("dropout_p", "is_causal", "enable_gqa", "scale"):
            if option == "dropout_p" and not isinstance(value, Tensor):
                continue
            with pytest.raises(wrong):
                archflash.scaled_dot_product_attention(Q, K, K, **{option: value})
        with pytest.raises(wrong), archflash.force(value):
            pass
        with pytest.raises(wrong):
            archflash.explain(Q, K, K, device=value)
    with pytest.raises(TypeError, match=r"dtype is a torch\.Tensor of dtype"):
        archflash.quantize_fp8(Q, dtype=ONE)  # type: ignore[arg-type]


@pytest.mark.usefixtures("tensors_keep_their_values")
def test_under_a_dispatch_mode_a_wrong_implementation_shows_no_values() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    with Mode(), pytest.raises(archflash.ForcedImplementationError, match=r"a torch\.Tensor of"):
        archflash.attention(Q, K, K, implementation=ONE)  # type: ignore[arg-type]


# --- numbers of numpy ---

NUMPY: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"window": (np.int64(2), np.int32(1))}, {"window": (2, 1)}),
    ({"window": [np.uint8(2), None]}, {"window": (2, None)}),
    ({"causal": True, "q_offset": np.int16(2)}, {"causal": True, "q_offset": 2}),
    ({"scale": np.float32(0.5)}, {"scale": 0.5}),
    ({"scale": np.int64(2)}, {"scale": 2}),
    ({"softcap": np.float16(4.0), "num_splits": np.int64(1)}, {"softcap": 4.0, "num_splits": 1}),
]


@pytest.mark.parametrize("kernel", ["simt", None])
@pytest.mark.parametrize(("given", "plain"), NUMPY, ids=lambda x: "-".join(x))
def test_numbers_of_numpy_are_numbers(
    given: dict[str, Any], plain: dict[str, Any], kernel: str | None
) -> None:
    out = archflash.attention(Q, K, K, **given, implementation=kernel)
    assert torch.equal(out, archflash.attention(Q, K, K, **plain, implementation=kernel))
    with FlopCounterMode(display=False):  # through the operator
        again = archflash.attention(Q, K, K, **given, implementation=kernel)
    assert torch.equal(out, again)


def test_a_number_of_numpy_is_a_max_seqlen() -> None:
    q, k = (x[0].transpose(0, 1) for x in (Q, K))
    for kernel in ("simt", None):
        out = archflash.attention(
            q, k, k, **PACKED, max_seqlen_q=np.int64(5), max_seqlen_k=np.int32(9),  # type: ignore[arg-type]
            implementation=kernel,
        )  # fmt: skip
        expected, _ = reference.attention(q, k, k, **PACKED)
        assert reference.check(out, expected, reference.baseline(q, k, k, **PACKED)).ok


@pytest.mark.parametrize("option", ["q_offset", "num_splits", "scale", "softcap"])
@pytest.mark.parametrize("value", [np.bool_(True), np.ones(1, dtype=np.int64), np.array(1)])
def test_flags_and_arrays_of_numpy_are_no_numbers(option: str, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"{option} is a numpy\.(bool|bool_|ndarray): it must be"):
        archflash.attention(Q, K, K, **{option: value})


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_offsets_are_taken(sign: int) -> None:
    limit = (1 << 60) - 1
    assert archflash.explain(Q, K, K, device="H200", q_offset=sign * limit, causal=True).plan
    out = archflash.attention(Q, K, K, q_offset=sign * limit, causal=True)
    expected = archflash.attention(Q, K, K) if sign > 0 else torch.zeros_like(Q)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize(
    ("field", "value"),
    [("q_offset", 1 << 60), ("q_offset", -(1 << 60)), ("window_left", 1 << 60),
     ("window_right", -1)],
)  # fmt: skip
def test_a_problem_from_outside_keeps_to_the_range_of_positions(field: str, value: int) -> None:
    fields = archflash.explain(Q, K, K, device="H200").problem.to_dict()
    with pytest.raises(ValueError, match=rf"field '{field}' is {value}"):
        native.Problem.from_dict(fields | {field: value})


# --- pickle and copy ---


def pickled(x: Any) -> Any:
    return pickle.loads(pickle.dumps(x))


@pytest.mark.parametrize("through", [pickled, copy.deepcopy, copy.copy])
def test_decisions_and_their_parts_pickle(through: Any) -> None:
    decision = archflash.explain(Q, K, K, device="L4", window=(None, 3), implementation="simt")
    again = through(decision)
    assert str(again) == str(decision)
    for part in ("problem", "device", "plan"):
        original, copied = getattr(decision, part), through(getattr(decision, part))
        assert type(copied) is type(original)
        assert copied.to_dict() == original.to_dict()
        assert getattr(again, part).to_dict() == original.to_dict()
    assert again.problem == decision.problem
    assert hash(again.problem) == hash(decision.problem)
    cpu = archflash.explain(Q, K, K)
    assert through(cpu).reasons == cpu.reasons


@pytest.mark.parametrize("device", ["L4", "H200"])
def test_a_plan_of_gradients_is_copied_and_says_that_it_has_no_pickle(device: str) -> None:
    q = torch.empty(2, 8, 70, 64, dtype=torch.float16, device="meta")
    decision = archflash.explain(q, q, q, device=device, backward=True, implementation="ampere")
    assert decision.plan is not None
    assert copy.deepcopy(decision).plan.to_dict() == decision.plan.to_dict()
    with pytest.raises(TypeError, match=r"a plan of gradients cannot be pickled: pickle str"):
        pickle.dumps(decision)


def test_a_spoilt_pickle_is_refused_as_from_dict_would() -> None:
    problem = archflash.explain(Q, K, K, device="H200").problem
    empty = native.Problem.__new__(native.Problem)
    with pytest.raises(ValueError, match="field 'heads_kv'"):
        empty.__setstate__(problem.to_dict() | {"heads_kv": 7})
