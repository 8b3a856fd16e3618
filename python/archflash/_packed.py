"""Archives of kernels, as _build/pack_images.py writes them: machine code in the native module, PTX
in files of the package.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import resources

CHUNK = 1 << 12


def members(archive: bytes) -> Iterator[tuple[str, bytes]]:
    """The members with their names, each unpacked when it is asked for.

    Raises:
        lzma.LZMAError, ValueError: it is damaged.
        ImportError: this Python was built without lzma.
    """
    try:
        import lzma
    except ImportError as error:
        raise ImportError(
            "this Python was built without the module lzma, which unpacks archflash's kernels: "
            "install liblzma and build Python again, or use another Python"
        ) from error
    decoder = lzma.LZMADecompressor(lzma.FORMAT_ALONE)
    content = decoder.decompress(archive, CHUNK)
    while content:
        line, _, content = content.partition(b"\n")
        name, _, digits = line.decode().partition(" ")
        size = int(digits)
        while len(content) < size:
            more = b"" if decoder.eof else decoder.decompress(b"", size - len(content) + CHUNK)
            if not more:
                raise ValueError(f"{name} ends after {len(content)} of {size} bytes")
            content += more
        yield name, content[:size]
        content = content[size:]
        if not content and not decoder.eof:
            content = decoder.decompress(b"", CHUNK)
    if not decoder.eof:
        raise ValueError("an archive of kernels is cut off")


def member(archive: bytes, name: str) -> bytes:
    """One member; empty if there is none of that name."""
    return next((content for own, content in members(archive) if own == name), b"")


def texts(image: str) -> Iterator[tuple[str, bytes]]:
    """The PTX of an image ("folder/stem") by target, such as compute_90a."""
    archive = archive_of(image)
    return texts_in(members(archive) if archive else (), image)


def texts_in(found: Iterable[tuple[str, bytes]], image: str) -> Iterator[tuple[str, bytes]]:
    """Those of them that are the texts of an image, by target."""
    for name, content in found:
        own, _, target = name.partition(".")
        if own == image.partition("/")[2]:
            yield target, content


def archive_of(image: str) -> bytes:
    """The archive with the PTX of an image; empty if there is none."""
    folder, _, stem = image.partition("/")
    kernels = resources.files("archflash") / "_kernels" / folder
    for file in kernels.iterdir() if kernels.is_dir() else ():
        images, _, kind = file.name.partition(".")
        if kind == "ptx.lzma" and stem in images.split("+"):
            return file.read_bytes()
    return b""


def text(image: str, target: str) -> bytes:
    """The PTX of an image for a target; empty if there is none."""
    return dict(texts(image)).get(target, b"")
