"""The files in which commands keep what they found on this machine."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from archflash import _user_tables
from archflash._api import find_device

KIND = "things"


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.setenv(_user_tables.VARIABLE, str(tmp_path / "tables"))
    _user_tables.entries.cache_clear()
    yield tmp_path / "tables"
    _user_tables.entries.cache_clear()


def test_the_folder_is_that_of_the_variable_or_of_the_users_data(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path
) -> None:
    assert _user_tables.file_of(KIND) == folder / "things.json"
    monkeypatch.delenv(_user_tables.VARIABLE)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert _user_tables.folder() == tmp_path / "archflash"
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert _user_tables.folder() == tmp_path / ".local" / "share" / "archflash"


def test_without_a_home_nothing_is_read_and_writing_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv(_user_tables.VARIABLE)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert _user_tables.entries(KIND) == ()
    with pytest.raises(ValueError, match=f"set {_user_tables.VARIABLE} to a folder"):
        _user_tables.put(KIND, {"key": {}})


def test_an_entry_takes_the_place_of_the_one_with_its_key() -> None:
    b200, h200 = (_user_tables.key_of(find_device(name)) for name in ("B200", "H200"))
    assert b200["capability"] == "10.0"
    for key, number in ((b200, 1), (h200, 2), (b200, 3)):
        _user_tables.put(KIND, {"key": key, "number": number})
    assert [entry["number"] for entry in _user_tables.entries(KIND)] == [2, 3]
    _user_tables.forget(KIND, lambda entry: entry["key"] == h200)
    assert [entry["number"] for entry in _user_tables.entries(KIND)] == [3]
    _user_tables.forget(KIND)
    assert _user_tables.entries(KIND) == ()


def test_differences_name_what_changed() -> None:
    key = {"driver": "580.1", "torch": "2.13"}
    assert _user_tables.differences(key, dict(key)) == ""
    now = {"driver": "590.2", "torch": "2.13", "power": "700 W"}
    said = "driver 580.1, now 590.2; power unknown, now 700 W"
    assert _user_tables.differences(key, now) == said


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"entries": 3}',
        '{"entries": [{}]}',
        '{"entries": [{"key": {"gpu": 1}}]}',
        100_000 * "[",
    ],
)
def test_a_damaged_file_is_named_once_does_not_count_and_is_replaced(
    folder: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = folder / "things.json"
    folder.mkdir()
    file.write_text(text)
    assert [_user_tables.entries(KIND) for _ in range(2)] == [(), ()]
    assert [str(file) in record.getMessage() for record in caplog.records] == [True]
    _user_tables.put(KIND, {"key": {"gpu": "x"}})
    assert _user_tables.entries(KIND) == ({"key": {"gpu": "x"}},)


def test_a_place_that_cannot_be_written_is_named(folder: Path) -> None:
    folder.write_text("a file where the folder should be")  # root may write any folder
    with pytest.raises(ValueError, match=rf"{folder}.*cannot be written.*{_user_tables.VARIABLE}"):
        _user_tables.put(KIND, {"key": {}})


def write_some(first: int) -> None:
    for number in range(first, first + 20):
        _user_tables.put(KIND, {"key": {"gpu": str(number)}})


def test_processes_that_write_at_the_same_time_lose_nothing(folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_some, args=(20 * index,)) for index in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    kept = json.loads((folder / "things.json").read_text())["entries"]
    assert {entry["key"]["gpu"] for entry in kept} == {str(number) for number in range(60)}
    assert sorted(os.listdir(folder)) == ["things.json", "things.lock"]


def count_some(times: int) -> None:
    for _ in range(times):
        _user_tables.update(
            KIND, {"gpu": "x"}, lambda old: {**old, "number": old.get("number", 0) + 1}
        )


def test_changes_are_of_what_the_file_holds_and_not_of_what_was_read(folder: Path) -> None:
    assert _user_tables.entries(KIND) == ()
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=count_some, args=(20,)) for _ in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    count_some(1)
    assert _user_tables.entries(KIND) == ({"key": {"gpu": "x"}, "number": 61},)
    assert (folder / "things.json").stat().st_mode & 0o777 == 0o644


def test_a_home_that_is_no_folder_is_as_no_file(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(_user_tables.VARIABLE, "/dev/null/tables")
    assert _user_tables.entries(KIND) == ()
    assert not caplog.records
    monkeypatch.setenv(_user_tables.VARIABLE, "~/tables")
    assert _user_tables.folder() == Path.home() / "tables"
