"""The table of options (src/common/options.inc) against what people write and read by hand."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import archflash
from archflash import _archflash as _native
from archflash import _options, _torch, _torch_cache, reference
from archflash._api import find_device, make_problem

OF_ATTENTION = [row for row in _options.ROWS if row.of_attention]
ANNOTATIONS = {
    "flag": "bool",
    "number": "float | None",
    "integer": "int | None",
    "tensor": "Tensor | None",
    "integer or tensor": "int | Tensor | None",
    "window": "tuple[int | None, int | None] | None",
    "dtype": "torch.dtype | None",
    "text": "str | None",
    "output": "Tensor | None",
}


def inputs(*shape: int, dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.empty(shape or (1, 2, 4, 8), dtype=dtype) for _ in "qkv")
    return q, k, v


def test_the_signature_of_attention_is_the_table() -> None:
    signature = inspect.signature(archflash.attention)
    parameters = [p for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert "implementation" in [p.name for p in parameters]
    written = [(p.name, p.annotation, p.default) for p in parameters if p.name != "implementation"]
    expected = []
    for row in OF_ATTENTION:
        annotation = ANNOTATIONS[row.kind]
        if row.default is not None:
            annotation = annotation.removesuffix(" | None")
        expected.append((row.name, annotation, row.default))
    assert written == expected


def test_the_docstring_of_attention_begins_each_option_as_the_table_does() -> None:
    text = " ".join(str(inspect.getdoc(archflash.attention)).split())
    for row in OF_ATTENTION:
        assert row.doc
        assert f" {row.name}: {row.doc}" in text, row.name


@pytest.mark.parametrize(
    ("call", "module", "names"),
    [
        (archflash.attention, "_api", _options.OF_ATTENTION),
        (archflash.attention_with_kvcache, "_kvcache", _options.OF_CACHE),
    ],
)
def test_each_option_is_passed_in_its_place(
    call: Any, module: str, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[Any] = []

    class Recorder:
        @staticmethod
        def attention(q: Tensor, k: Tensor, v: Tensor, values: Any, grad: bool, name: Any) -> str:
            passed.extend([values, name])
            return "served"

    monkeypatch.setattr(f"archflash.{module}._native", Recorder)
    given: dict[str, Any] = {name: f"the {name}" for name in names}
    x = torch.zeros(1)
    assert call(x, x, x, **given, implementation="a name") == "served"
    values, name = passed
    assert [*values] == [given[name] for name in _options.NAMES if name in given]
    assert name == "a name"


def test_the_operator_takes_every_option_but_out() -> None:
    def names(schema: Any) -> set[str]:
        return {re.sub(r"_(left|right|tensor)$", "", a.name) for a in schema.arguments}

    of_attention = {row.name for row in OF_ATTENTION}
    extra = {"q", "k", "v", "implementation", "needs_grad"}
    operators = torch.ops.archflash
    assert names(operators.attention.default._schema) == of_attention - {"out"} | extra
    of_cache = {row.name for row in _options.ROWS if row.of_cache}
    extra = {"q", "k_cache", "v_cache", "implementation"}
    schema = operators.attention_with_kvcache.default._schema
    assert names(schema) == of_cache - {"out"} | extra
    assert schema.is_mutable


def test_options_come_back_from_the_operator_as_they_went() -> None:
    given = {name: f"the {name}" for name in _options.OF_ATTENTION}
    given |= {"window": (3, None), "q_offset": 5, "out": None}  # type: ignore[dict-item]
    of_cache = {name: _options.DEFAULTS[name] for name in _options.NAMES if name not in given}
    assert _options.from_operator(_options.to_operator(given)) == given | of_cache
    tensor = torch.zeros(2, dtype=torch.int32)
    back = _options.from_operator(_options.to_operator({**given, "q_offset": tensor}))
    assert back["q_offset"] is tensor


def test_torch_and_the_reference_take_every_option_that_the_result_depends_on() -> None:
    rows = [row for row in _options.ROWS if not row.advice]
    with_cache = {row.name for row in rows if row.of_cache}
    tensors = {"q", "k_cache", "v_cache"}
    assert set(inspect.signature(_torch_cache.attention).parameters) == with_cache | tensors
    of_reference = {field.name for field in dataclasses.fields(reference.cache.CacheOptions)}
    assert with_cache - {"out", "return_lse"} <= of_reference
    exact = {row.name for row in rows if row.of_attention}
    assert set(inspect.signature(_torch.attention).parameters) == exact | {"q", "k", "v"}
    of_reference = {field.name for field in dataclasses.fields(reference.blocks.Options)}
    assert exact - {"out", "return_lse"} <= of_reference


def test_the_signature_of_attention_backward_has_the_options_of_the_table() -> None:
    forward = inspect.signature(archflash.attention).parameters
    backward = inspect.signature(archflash.attention_backward).parameters
    assert set(_options.OF_BACKWARD) == set(forward) & set(backward) - {
        "q",
        "k",
        "v",
        "implementation",
        "out",
    }
    for name in _options.OF_BACKWARD:
        assert str(backward[name]) == str(forward[name])


def test_attention_backward_passes_each_option_on(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: dict[str, Any] = {}

    def record(*tensors: Any) -> Any:
        passed.update(tensors[7])
        raise StopIteration

    def to_the_runtime(*arguments: Any) -> Any:
        values = dict(zip(_options.OF_ATTENTION, arguments[7], strict=True))
        assert _options.complete(values) == _options.complete(given)
        return NotImplemented

    monkeypatch.setattr(_native, "attention_backward", to_the_runtime)
    monkeypatch.setattr("archflash._ops_backward.backward_request", record)
    x = inputs()[0]
    given: dict[str, Any] = {name: f"the {name}" for name in _options.OF_BACKWARD}
    with pytest.raises(StopIteration):
        archflash.attention_backward(x, x, x, x, x, x, **given)
    assert passed == _options.complete(given)


def test_every_tensor_among_the_options_is_an_operand_of_its_own() -> None:
    tensors = [row.name for row in _options.ROWS if row.may_be_tensor and row.kind != "output"]
    assert [*_options.OPERANDS] == tensors
    assert all(operand == name for name, operand in _options.OPERANDS.items())


def test_a_name_that_no_option_has_is_refused_with_those_there_are() -> None:
    with pytest.raises(TypeError, match=r"casual is no option of a call: it takes causal, window"):
        archflash.explain(*inputs(), device="H200", casual=True)


def test_the_runtime_takes_no_other_number_of_options() -> None:
    q, k, v = inputs()
    values = tuple(_options.complete({}).values())
    assert _native.make_problem(q, k, v, values, 0) == make_problem(q, k, v)
    of_attention = values[: len(_options.OF_ATTENTION)]
    assert _native.make_problem(q, k, v, of_attention, 0) == make_problem(q, k, v)
    for wrong in (values[:-1], (*values, None), list(values), of_attention[:-1]):
        with pytest.raises(TypeError, match=f"it must be a tuple of {len(values)} values"):
            _native.make_problem(q, k, v, wrong, 0)


# That of a cache: test_kvcache.py.
FLAGS = tuple(name for name in _options.FLAG_FIELDS if name in _options.OF_ATTENTION)


def test_the_flags_are_known() -> None:
    assert {"causal", "return_lse"} <= set(FLAGS)


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_is_a_field_of_the_problem_and_a_word_of_its_description(name: str) -> None:
    q, k, v = inputs()
    field = _options.FLAG_FIELDS[name]
    for value in (False, True):
        problem = make_problem(q, k, v, **{name: value})
        assert getattr(problem, field) is value
        assert problem.to_dict()[field] == int(value)
        assert _native.Problem.from_dict(problem.to_dict()) == problem
        shown = str(archflash.explain(q, k, v, device="H200", **{name: value})).splitlines()[0]
        assert (({"want_lse": "LSE"}.get(field, field)) in shown) is value
    wrong = {**problem.to_dict(), field: 2}
    with pytest.raises(ValueError, match=f"field '{field}' is 2: it must be an integer from 0 to"):
        _native.Problem.from_dict(wrong)
    with pytest.raises(TypeError, match=f"{name} is 1: it must be a bool"):
        make_problem(q, k, v, **{name: 1})


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_is_served_where_the_folder_lists_it_and_refused_elsewhere(name: str) -> None:
    row = next(row for row in _options.ROWS if row.name == name)
    q, k, v = inputs()
    for folder in _native.folder_names():
        described = _native.describe(folder)
        if not _native.targets(folder) or "float16" not in described.dtypes:
            continue
        problem = make_problem(q, k, v, **{name: True}).as_if_on_cuda()
        answer = _native.plan(folder, problem, find_device(described.home_device))
        if row.feature in described.features:
            assert isinstance(answer, _native.LaunchPlan), answer
        else:
            assert answer == [
                f"{name}=True: {folder} does not serve this option; leave it at False or use "
                "implementation='torch'"
            ]


def test_what_torch_is_given_are_the_options_that_are_not_at_their_defaults() -> None:
    assert _options.given_to_torch(tuple(_options.complete({}).values())) == {}
    sinks = torch.ones(2)
    given = {"scale": np.float32(0.5), "window": (np.int64(3), None), "sinks": sinks}
    values = tuple(_options.complete({**given, "num_splits": 4, "causal": True}).values())
    passed = _options.given_to_torch(values)
    assert passed == {"causal": True, "scale": 0.5, "window": (3, None), "sinks": sinks}
    assert type(passed["scale"]) is float
    assert type(passed["window"][0]) is int


def test_outputs_nest_as_q_does_whichever_way_a_call_goes() -> None:
    for order in itertools.permutations(range(3)):
        sizes = (2, 3, 4, 8)
        dense = torch.randn([*(sizes[i] for i in order), 8])
        q = dense.permute(*(order.index(i) for i in range(3)), 3)
        for x in (q, q[:1].expand(2, -1, -1, -1), q[:, :1].expand(-1, 3, -1, -1)):
            planned = make_problem(x, x, x).to_dict()["out"]
            strides = archflash.attention(x, x, x, implementation="torch").stride()
            assert tuple(planned.values()) == strides[:3]
            with FakeTensorMode() as mode:
                fake = mode.from_tensor(x)
                assert archflash.attention(fake, fake, fake).stride() == strides
