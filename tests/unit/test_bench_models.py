"""bench.models: what it measures, how it checks windows and sinks, and what its tables say."""

from __future__ import annotations

import pytest
import torch
from bench import correctness, gradients, model_tables, models
from bench.cases import Case
from bench.correctness import Checker, sinks_of
from bench.results import EAGER, GRADIENTS, Row, make_row

from archflash import reference

WINDOW = Case("w", "bf16", 1, 4, 2, 40, 40, 16, 16, True, packed=True, window=(7, 0))
SINKS = Case("s", "bf16", 1, 4, 2, 40, 40, 16, 16, True, packed=True, sinks=True)
DOCUMENTS = Case("d", "bf16", 1, 4, 2, 90, 90, 16, 16, True, packed=True, documents=(5, 30))
FACTS = dict.fromkeys(("run_id", "date", "commit", "dirty", "gpu", "driver", "cuda", "torch"), "1")


def row(case: Case, name: str, us: float, *words: str, run: str = "1") -> Row:
    features = ";".join([*models.words(case), *words])
    return make_row(
        {**FACTS, "run_id": run}, case, implementation=name, version="1", features=features,
        clocks_mhz="1980", samples_us=[us] * 3, max_err=0.0, host_us=1.0,
    )  # fmt: skip


@pytest.mark.parametrize("case", [WINDOW, SINKS], ids=["window", "sinks"])
def test_a_check_knows_windows_and_sinks(case: Case) -> None:
    shapes = ((case.hq, case.nq), (case.hkv, case.nk), (case.hkv, case.nk))
    q, k, v = (torch.randn(1, *s, case.d, dtype=torch.bfloat16) for s in shapes)
    options = {"window": case.window} if case.window else {"sinks": sinks_of(case, "cpu")}
    right = reference.attention(q, k, v, causal=True, return_lse=False, **options)
    wrong = reference.attention(q, k, v, causal=True, return_lse=False)
    assert not Checker(case)(q, k, v, right.bfloat16(), ours=True).problem
    assert Checker(case)(q, k, v, wrong.bfloat16(), ours=True).problem


@pytest.mark.parametrize("whole", [False, True], ids=["slices", "whole"])
def test_a_check_knows_documents(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not whole:
        monkeypatch.setattr(correctness, "WHOLE_SCORES", 0)
        monkeypatch.setattr(correctness, "WINDOW_ROWS", 8)
    case, lengths = DOCUMENTS, DOCUMENTS.lengths()
    assert sum(lengths) == case.nq
    assert len(set(lengths)) > 2
    assert case.flops() == 2 * case.hq * sum(n * n for n in lengths) * case.d
    q, k, v, dout = (
        torch.randn(1, h, case.nq, case.d, dtype=torch.bfloat16, requires_grad=True)
        for h in (case.hq, case.hkv, case.hkv, case.hq)
    )
    out = gradients.packed_call(case, gradients.our_packed())(q, k, v)
    found = gradients.Gradients(*torch.autograd.grad(out, (q, k, v), dout))
    wrong = reference.attention(q, k, v, causal=True, return_lse=False).bfloat16()
    with torch.no_grad():
        assert not Checker(case)(q, k, v, out, ours=True).problem
        assert Checker(case)(q, k, v, wrong, ours=True).problem
        check = gradients.Checker(case, dout)
        assert not check(q, k, v, found, ours=True).problem
        assert check(q, k, v, found._replace(dk=found.dk.flip(2)), ours=True).problem


@pytest.mark.parametrize("both", [False, True], ids=["forward", "gradients"])
def test_a_check_does_not_take_new_inputs_for_those_that_are_gone(both: bool) -> None:
    """A new tensor may have the id of one that was freed."""
    dout = gradients.dout_of(WINDOW, "cpu")
    check = gradients.Checker(WINDOW, dout) if both else Checker(WINDOW)
    options = {"window": WINDOW.window, "causal": True}
    for _ in range(20):
        q, k, v = (torch.randn(1, heads, 40, 16, dtype=torch.bfloat16) for heads in (4, 2, 2))
        if both:
            exact = reference.attention_backward(dout, q, k, v, **options)
            found = gradients.Gradients(*(x.bfloat16() for x in (exact.dq, exact.dk, exact.dv)))
        else:
            found = reference.attention(q, k, v, return_lse=False, **options).bfloat16()
        assert not check(q, k, v, found, ours=True).problem


def test_a_ratio_is_that_of_the_fastest_peer_in_the_same_run_and_way() -> None:
    rows = [
        row(WINDOW, "fa3", 1.0, run="0"),
        row(WINDOW, models.OURS, 10.0, "kernel=hopper"),
        row(WINDOW, "fa3", 12.0),
        row(WINDOW, "torch-flash", 15.0),
        row(WINDOW, models.OURS, 20.0, "kernel=hopper", EAGER),
        row(WINDOW, "torch-flash", 19.0, EAGER),
        row(WINDOW, models.OURS, 30.0, "kernel=ampere", GRADIENTS),
        row(WINDOW, "torch-flash", 27.0, GRADIENTS),
    ]
    found = models.ratio_of(rows, WINDOW, both=False, eager=False)
    assert found is not None
    assert (found.best, found.ratio, found.kernel) == ("fa3", 1.2, "hopper")
    eager = models.ratio_of(rows, WINDOW, both=False, eager=True)
    assert eager is not None
    assert (eager.best, eager.ratio) == ("torch-flash", 0.95)
    both = models.ratio_of(rows, WINDOW, both=True, eager=False)
    assert both is not None
    assert (both.kernel, both.ratio) == ("ampere", 0.9)
    full = Case("f", "bf16", 1, 4, 2, 40, 40, 16, 16, True, packed=True)
    assert models.ratio_of(rows, full, both=False, eager=False) is None


def test_the_table_marks_every_row_that_is_behind() -> None:
    cases = models.load_models()
    rows = [
        row(case, name, us, *words)
        for number, case in enumerate(cases)
        for name, us, words in (
            (models.OURS, 10.0, ["kernel=hopper"]),
            ("torch-cudnn", 9.0 if number == 3 else 11.0, []),
        )
    ]
    table = model_tables.models_table(rows)
    behind = [line for line in table.splitlines() if "**" in line]
    assert len(behind) == 1
    assert behind[0].startswith(f"| {cases[3].name} |")
    assert "| **0.90** (torch-cudnn) |" in behind[0]
    mean = models.geometric_mean([0.9] + [1.1] * (len(cases) - 1))
    assert "leaves out rows whose only peer is plain operations" in table
    assert f"| geometric mean |  | {mean:.3f} | unmeasured |" in table
