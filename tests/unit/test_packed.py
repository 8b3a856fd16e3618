"""Archives of kernels are read as they were written, and damaged ones are refused."""

from __future__ import annotations

import lzma
import random

import pytest

from archflash import _archflash as native
from archflash import _packed

DRAW = random.Random(0)
MEMBERS = {
    "fwd_bf16": DRAW.randbytes(_packed.CHUNK + 9) + b"\n5\n" * 9000,
    "fwd_f16": b"",
    "last": DRAW.randbytes(5),
}


def archive(members: dict[str, bytes]) -> bytes:
    parts = [f"{name} {len(content)}\n".encode() + content for name, content in members.items()]
    return lzma.compress(b"".join(parts), lzma.FORMAT_ALONE)


def test_members_come_with_their_names_in_order() -> None:
    assert list(_packed.members(archive(MEMBERS))) == list(MEMBERS.items())
    assert list(_packed.members(archive({}))) == []
    for name, content in MEMBERS.items():
        assert _packed.member(archive(MEMBERS), name) == content
    assert _packed.member(archive(MEMBERS), "fwd") == b""


def test_a_member_does_not_ask_for_those_behind_it() -> None:
    noise = {name: random.Random(name).randbytes(100_000) for name in ("one", "two")}
    assert _packed.member(archive(noise)[:120_000], "one") == noise["one"]


@pytest.mark.parametrize("bytes_left", [0, 13, 2000, -20])
def test_an_archive_cut_off_is_refused(bytes_left: int) -> None:
    cut = archive(MEMBERS)[:bytes_left]
    with pytest.raises((lzma.LZMAError, ValueError), match=r"."):
        list(_packed.members(cut))


def test_the_texts_of_an_image_are_those_that_it_was_built_from() -> None:
    image = "simt/fwd_f32"
    texts = dict(_packed.texts(image))
    assert {"compute_75", "compute_80"} == set(texts)
    for target, text in texts.items():
        assert f"\n.target {target.replace('compute_', 'sm_')}\n".encode() in text
        assert native.code_of(image, target) == _packed.text(image, target) == text
    assert _packed.text(image, "compute_90") == b""
    assert dict(_packed.texts("simt/nothing")) == dict(_packed.texts("nothing/fwd")) == {}
