"""What `make coverage` makes of the answers of coverage.py and gcov."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests import covered


def test_lines_that_never_ran_are_told_as_ranges() -> None:
    assert covered.missed({1: 3, 2: 0, 4: 0, 5: 1, 9: 0}) == ("2-4", "9")
    assert covered.missed({1: 1}) == ()


def unit(root: Path, count: int) -> dict[str, Any]:
    """What gcov tells of an object file with a header of this project and one of others."""
    lines = [{"line_number": n, "count": count * (n == 1)} for n in (1, 2)]
    files = [{"file": name, "lines": lines} for name in ("sim/a.h", "/usr/include/b.h", "src/c.h")]
    return {"current_working_directory": str(root), "files": files}


def test_a_line_ran_if_it_ran_in_any_object_file(tmp_path: Path) -> None:
    (part,) = covered.lines([unit(tmp_path, 0), unit(tmp_path, 7)], tmp_path)
    assert part == covered.Part("sim/a.h", 1, 2, ("2",))
    assert str(part) == "sim/a.h: 1 of 2 (50.0%)"


def test_branches_of_the_installed_package_have_its_names_here() -> None:
    summary = {"covered_branches": 3, "num_branches": 5}
    file = {"summary": summary, "missing_branches": [[9, -4], [7, 8]]}
    told = {"files": {"/x/site/archflash/_api.py": file, "/x/torch/a.py": file}}
    (part,) = covered.branches(told, Path("nowhere"))
    assert part == covered.Part("python/archflash/_api.py", 3, 5, ("7 to 8", "9 to end"))
    assert covered.together("all", [part, part]) == covered.Part("all", 6, 10)
