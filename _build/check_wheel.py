"""Checks a finished wheel, and says what is in it:

    python _build/check_wheel.py WHEEL --sbom FILE [--same-as OTHER_BUILD]

Every file of the wheel is of a kind that belongs there, no file names the folder in which it was
built, and there is machine code for every target. The bill of materials is CycloneDX (JSON): each
file with its SHA-256, and what was compiled in, with its licence. --same-as compares two builds
byte for byte.
"""

from __future__ import annotations

import argparse
import email
import hashlib
import json
import re
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

BELONGS = re.compile(
    r"""
    archflash/([\w/]+/)?\w+\.(py|pyi|json)  # the package, plans of known devices
    | archflash/([\w/]+/)?py\.typed
    | archflash_autoload/\w+\.py
    | archflash/_archflash(_sim)?\.abi3\.so
    | archflash/_kernels/\w+/[\w+]+\.(ptx\.lzma|json)
    | archflash/_minilm/[\w.-]+
    | archflash-[\d.\w]+\.dist-info/(licenses/LICENSE|sboms/.+|\w+|entry_points\.txt)
    """,
    re.VERBOSE,
)
# What the native modules contain beside our own code. nanobind's functions are called in
# nanobind-backend, which is installed beside the wheel; its headers bring robin-map.
COMPILED_IN = (
    ("nvidia-cuda-runtime", "LicenseRef-NVIDIA-CUDA-EULA", "libcudart_static, redistributable"),
    ("nanobind", "BSD-3-Clause", "headers"),
    ("robin-map", "MIT", "headers in nanobind"),
)


def files_of(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {x.filename: archive.read(x) for x in archive.infolist() if not x.is_dir()}


def wrong_files(files: dict[str, bytes], built_in: str) -> list[str]:
    """What should not be in a wheel, a sentence each."""
    found = [f"{name} does not belong there" for name in files if not BELONGS.fullmatch(name)]
    here = built_in.encode()
    return found + [f"{name} names {built_in}" for name, data in files.items() if here in data]


def left_out(files: dict[str, bytes]) -> list[str]:
    """The machine code that the build has left out (ARCHFLASH_MACHINE_CODE), a sentence for each
    image and target: pack_images.py writes no resources of it.
    """
    return [
        f"{name} has no machine code for {target}"
        for name, data in files.items()
        if re.fullmatch(r"archflash/_kernels/.*\.json", name)
        for target, kernels in json.loads(data).items()
        if not all(kernels.values())
    ]


def differences(one: dict[str, bytes], two: dict[str, bytes]) -> list[str]:
    """The files that two builds do not have alike."""
    found = []
    for name in sorted(one.keys() | two.keys()):
        if name not in one or name not in two:
            found.append(f"{name} is in one of them only")
        elif one[name] != two[name]:
            pairs = zip(one[name], two[name], strict=False)
            count = sum(x != y for x, y in pairs) + abs(len(one[name]) - len(two[name]))
            found.append(f"{name} differs in {count} of {len(one[name])} bytes")
    return found


def same_archives(one: Path, two: Path) -> str:
    """Whether two wheels are the same bytes, or what beside their files makes them differ."""
    if one.read_bytes() == two.read_bytes():
        return "the archives are the same, too"
    with zipfile.ZipFile(one) as first, zipfile.ZipFile(two) as second:
        names = [
            name
            for name in ("filename", "date_time", "external_attr", "extra", "compress_size")
            if [getattr(x, name) for x in first.infolist()]
            != [getattr(x, name) for x in second.infolist()]
        ]
    return f"the archives differ in {', '.join(names)} (date_time is when, external_attr the umask)"


def bill_of_materials(wheel: Path, files: dict[str, bytes]) -> dict[str, Any]:
    """CycloneDX 1.6."""
    (told,) = (x for name, x in files.items() if name.endswith(".dist-info/METADATA"))
    about = email.message_from_bytes(told)
    components = []
    for name, licence, what in COMPILED_IN:
        kind = "id" if not licence.startswith("LicenseRef") else "name"
        component: dict[str, Any] = {
            "type": "library", "name": name, "description": what,
            "licenses": [{"license": {kind: licence}}],
        }  # fmt: skip
        try:
            component["version"] = metadata.version(name)
        except metadata.PackageNotFoundError:
            component["version"] = "of the build"
        components.append(component)
    components += [
        {
            "type": "file",
            "name": name,
            "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(data).hexdigest()}],
        }
        for name, data in sorted(files.items())
    ]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "name": about["Name"],
                "version": about["Version"],
                "licenses": [{"license": {"id": about["License-Expression"]}}],
                "hashes": [
                    {"alg": "SHA-256", "content": hashlib.sha256(wheel.read_bytes()).hexdigest()}
                ],
            }
        },
        "components": components,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--sbom", type=Path, help="the file that the bill of materials goes to")
    parser.add_argument("--same-as", type=Path, metavar="WHEEL", help="another build of the same")
    args = parser.parse_args()
    files = files_of(args.wheel)
    wrong = wrong_files(files, str(Path.cwd())) + left_out(files)
    if args.same_as is not None:
        found = differences(files, files_of(args.same_as))
        print(f"{len(files) - len(found)} of {len(files)} files are the same in both builds")
        print(same_archives(args.wheel, args.same_as))
        wrong += found
    if args.sbom is not None:
        args.sbom.write_text(json.dumps(bill_of_materials(args.wheel, files), indent=1) + "\n")
    print("\n".join(wrong) or f"{args.wheel.name}: {len(files)} files, all of which belong there")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
