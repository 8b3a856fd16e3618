"""README and docs: every command and example runs and prints what the document shows; links, paths
and Makefile targets exist.
"""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion

# The documents, their tool and the benchmarks are no part of the installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests import documents
from tests.documents import NOT_RUN, NOTES, PAGES, ROOT, Run, pages

import archflash
from archflash import _archflash as native

ALL = [*pages(PAGES), *pages(NOTES)]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def runs_of(page: Path) -> list[Run]:
    return documents.runs(page.read_text())


RUN_PAGES = [page for page in pages() if any(run.excuse is None for run in runs_of(page))]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Runs in an empty folder and without the variables that change what archflash does."""
    for variable in ("FORCE_IMPLEMENTATION", "FALLBACK", "SIM_DEVICE", "SIM_LIMIT"):
        monkeypatch.delenv(f"ARCHFLASH_{variable}", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("page", RUN_PAGES, ids=name_of)
def test_commands_and_examples_print_what_the_document_shows(page: Path) -> None:
    text = page.read_text()
    archflash.stats(reset=True)  # a document shows what a new process prints
    fresh = documents.with_fresh_outputs(text)
    assert fresh == text, "run: python -m tests.documents --write"


@pytest.mark.skipif(
    TorchVersion(torch.__version__) < (2, 10),  # type: ignore[operator]
    reason="older versions of PyTorch prefer other kernels on 9.0",
)
def test_the_table_of_gpus_is_what_dispatch_chooses() -> None:
    readme = (ROOT / "README.md").read_text()
    assert documents.GPU_TABLE.search(readme)
    fresh = documents.with_fresh_gpu_table(readme)
    assert fresh == readme, "run: python -m tests.documents --write"


@pytest.mark.parametrize("page", ALL, ids=name_of)
def test_what_a_document_names_exists(page: Path) -> None:
    text = page.read_text()
    assert documents.missing_links(page, text) == []
    assert documents.missing_paths(text) == []
    assert documents.missing_commands(text) == []
    assert documents.named_targets(text) <= documents.make_targets()


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_no_command_stands_where_the_tests_do_not_look(page: Path) -> None:
    """Indented blocks would not be run."""
    inside_fence = False
    for number, line in enumerate(page.read_text().split("\n"), 1):
        inside_fence ^= line.startswith("```")
        if not inside_fence and re.match(r" {4,}\S", line):
            in_list = re.match(r" +(\d+\.|[-*|]) ?", line)
            assert in_list, f"line {number} is an indented block"


def test_every_excuse_is_used_and_most_things_run() -> None:
    everything = [run for page in pages() for run in runs_of(page)]
    used = {run.excuse for run in everything}
    unused = [begin for begin, why in NOT_RUN if why not in used]
    assert unused == [], "no document has such a command: delete the row"
    assert sum(run.excuse is None for run in everything) >= 8


def test_every_environment_variable_is_in_the_table() -> None:
    sources = [
        path for folder in ("python", "_build", "bench") for path in (ROOT / folder).rglob("*.py")
    ]
    read = {
        name for path in sources for name in re.findall(r'"(ARCHFLASH_[A-Z_]+)"', path.read_text())
    }
    read -= {"ARCHFLASH_MLA", "ARCHFLASH_MLA_SPARSE"}  # names of backends in vLLM
    read |= set(re.findall(r"ENV\{(ARCHFLASH_[A-Z_]+)\}", (ROOT / "CMakeLists.txt").read_text()))
    table = (ROOT / "docs" / "dispatch.md").read_text().partition("## Environment variables")[2]
    told = set(re.findall(r"`(ARCHFLASH_[A-Z_]+)`", table.partition("\n## ")[0]))
    assert "ARCHFLASH_FALLBACK" in read
    assert told == read


def largest_head_dim(name: str, feature: str) -> int | None:
    """The largest head dimension with which a forced implementation serves calls of a feature."""
    dtype = torch.float32 if name == "simt" else torch.bfloat16
    options = {
        "split": {"num_splits": 2},
        "batch_invariant": {"batch_invariant": True},
        "mask": {"attn_mask": torch.empty(512, 512, dtype=torch.bool, device="meta")},
        "dropout": {
            "dropout_p": 0.1,
            "rng_state": torch.empty(2, dtype=torch.int64, device="meta"),
        },
    }
    found = None
    for d in (64, 128, 192, 256, 512):
        q = torch.empty(2, 8, 1 if feature == "split" else 512, d, dtype=dtype, device="meta")
        k = torch.empty(2, 8, 512, d, dtype=dtype, device="meta")
        q.requires_grad_(feature == "gradients")
        with contextlib.suppress(archflash.ForcedImplementationError):
            archflash.explain(
                q, k, k, device=native.describe(name).home_device, implementation=name,
                **options.get(feature, {}),
            )  # fmt: skip
            found = d
    return found


FEATURES = {
    "any call": "any",
    "split keys": "split",
    "`batch_invariant`": "batch_invariant",
    "[mask tensors]": "mask",
    "[dropout]": "dropout",
    "gradients": "gradients",
}


@pytest.mark.parametrize("row", FEATURES)
def test_the_table_of_support_is_what_plans_say(row: str) -> None:
    table = (ROOT / "docs" / "dispatch.md").read_text().partition("### What each one serves")[2]
    lines = re.findall(r"^\| .*", table.partition("\n1. ")[0], re.MULTILINE)
    names = [re.findall(r"`(\w+)`", cell) for cell in lines[0].split(" | ")[1:]]
    assert sorted(name for group in names for name in group) == sorted(native.folder_names())
    (cells,) = [line.split(" | ")[1:] for line in lines if line.startswith(f"| {row}")]
    for cell, folders in zip(cells, names, strict=True):
        said = re.search(r"d up to (\d+)", cell)
        assert said or cell.startswith("no"), cell
        for name in folders:
            assert largest_head_dim(name, FEATURES[row]) == (int(said[1]) if said else None), name


# ---- the map


MAP = (ROOT / "docs" / "architecture.md").read_text()
FILE = r"\w[\w/]*\.(?:py|cpp|h|cuh|inc)"


def files_called(name: str) -> list[Path]:
    """The files of the project whose path ends in a name."""
    folders = ("src", "python", "sim", "tests", "bench", "examples", "_build")
    found = [path for folder in folders for path in (ROOT / folder).rglob(Path(name).name)]
    return [path for path in found if path.as_posix().endswith(f"/{name}")]


def test_what_is_read_from_top_to_bottom_is_short() -> None:
    """Trials and what ideas gained go to docs/lab; a changelog's entries are a line each."""
    lengths = {"CHANGELOG.md": 60, "docs/architecture.md": 150}
    lengths |= {str(path.relative_to(ROOT)): 150 for path in ROOT.glob("src/*/NOTES.md")}
    assert len(lengths) > 8
    assert [x for x in lengths if (ROOT / x).read_text().count("\n") > lengths[x]] == []


def test_the_files_and_folders_of_the_map_exist() -> None:
    files = dict.fromkeys(re.findall(rf"(?<![\w*]){FILE}\b", MAP))
    assert len(files) > 60
    assert [name for name in files if not files_called(name)] == []
    named = dict.fromkeys(re.findall(r"`([\w/]+)/`", MAP))
    assert len(named) > 8
    folders = [f"/{path.relative_to(ROOT)}" for path in ROOT.glob("[!.]*/**/") if path.is_dir()]
    assert [n for n in named if not any(f.endswith(f"/{n}") for f in folders)] == []


def test_every_function_of_the_ways_of_a_call_is_in_its_file() -> None:
    figures = [block for block in documents.blocks(MAP) if block.kind == "text"]
    assert len(figures) == 4
    text = "\n".join(line for block in figures for line in block.lines)
    steps = re.findall(rf"({FILE}):(\w+)", text)
    assert len(steps) > 12
    missing = [
        (file, function)
        for file, function in steps
        if not any(re.search(rf"\b{function}\(", p.read_text()) for p in files_called(file))
    ]
    assert missing == []


# ---- the tool itself


PAGE = """# Title

```python
x = 2
print(x)
```
```text
2
```

```console
$ archflash info
archflash ...
...
```
"""


def test_an_output_that_is_wrong_is_written_anew() -> None:
    wrong = PAGE.replace("```text\n2\n", "```text\n3\n4\n")
    assert documents.with_fresh_outputs(wrong) == PAGE
    page = "```console\n$ archflash explain --shape 1,2,3\n```\n"
    with pytest.raises(RuntimeError, match="exit status 2"):
        documents.with_fresh_outputs(page)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```python\nx = 1\n", "not closed"),
        ("```bash\nls\n```\n", "of the kind 'bash'"),
        ("```console\noutput\n```\n", "without a command above it"),
        ("```sh\nls /\n```\n", "runs archflash and python -m MODULE only"),
    ],
)
def test_a_block_that_cannot_be_checked_is_an_error(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        documents.with_fresh_outputs(text)


def test_missing_names_are_found() -> None:
    page = ROOT / "docs" / "dispatch.md"
    text = "[a](numerics.md#edges) [b](no-such.md) [c](numerics.md#no-such) [d](#no-such)"
    assert documents.missing_links(page, text) == ["no-such.md", "numerics.md#no-such", "#no-such"]
    text = (
        "`src/common/problem.h` and `src/common/no_such.h`, `tests/unit/test_*.py`, `tests/no*.py`"
    )
    assert documents.missing_paths(text) == ["src/common/no_such.h", "tests/no*.py"]
    text = "unit/test_documents.py (1), test_no_such_thing.py (2)"
    assert documents.missing_paths(text) == ["test_no_such_thing.py"]
    text = "`python -m bench.run`, `python -m bench.no_such`, `archflash info`, `archflash fly x`"
    assert documents.missing_commands(text) == ["bench.no_such", "archflash fly"]
    assert documents.named_targets("`make test` and `make no-such X=1`") == {"test", "no-such"}
    assert "no-such" not in documents.make_targets() >= {"test", "lint", "test-gpu"}


# Headers of CUDA, PyTorch and other projects.
FOREIGN = ("arch_traits.h", "cuda_occupancy.h", "dlpack.h", "Exceptions.h", "sm100_store_cd.cuh")


def test_files_that_comments_name_exist() -> None:
    sources = [x for folder in ("src", "sim", "bench") for x in (ROOT / folder).rglob("*.*")]
    names = {str(x.relative_to(ROOT)) for x in sources} | {"generated/folders.inc"}
    ends = {"/".join(name.split("/")[i:]) for name in names for i in range(name.count("/") + 1)}
    missing = [
        f"{source.relative_to(ROOT)}: {name}"
        for source in sources
        if source.suffix in (".cpp", ".h", ".cuh", ".cu", ".inc")
        for comment in re.findall(r"//.*", source.read_text())
        for name in re.findall(r"(?<![\w./-])[a-zA-Z.][\w./]*\.(?:cuh|cu|cpp|h|inc)\b", comment)
        if name not in ends and not name.endswith(FOREIGN)
    ]
    assert missing == []


# ---- glossary

GLOSSARY = re.findall(
    r"^\| ([^|]+) \| [^|]+ \| [^|]+ \| `([^`]+)`: `([^`]+)` \|$",
    (ROOT / "docs" / "glossary.md").read_text(),
    re.MULTILINE,
)


def test_the_glossary_is_sorted_and_every_term_is_where_it_says() -> None:
    terms = [term for term, _, _ in GLOSSARY]
    assert len(terms) == (ROOT / "docs" / "glossary.md").read_text().count("\n| ") - 2
    assert terms == sorted(set(terms))
    missing = [
        f"{term}: {name} in {path}"
        for term, path, name in GLOSSARY
        if not re.search(rf"\b{re.escape(name)}\b", (ROOT / path).read_text())
    ]
    assert missing == []
