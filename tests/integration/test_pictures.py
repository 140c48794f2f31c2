"""The pictures of docs/pictures are there, small, and of the present templates."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import pictures

pytestmark = pytest.mark.integration


def problems(folder: Path, sources: Path) -> list[str]:
    """Return what is wrong with the pictures in a folder."""
    found = {file.name: file.stat().st_size for file in folder.iterdir()}
    wanted = {*pictures.NAMES, pictures.DIGEST.name}
    digest = folder / pictures.DIGEST.name
    current = digest.is_file() and digest.read_text() == f"{pictures.templates_digest(sources)}\n"
    return [
        *(f"{name} is missing" for name in sorted(wanted - found.keys())),
        *(f"{name} is not taken by the script" for name in sorted(found.keys() - wanted)),
        *(f"{name} has {size} bytes" for name, size in sorted(found.items()) if size > pictures.MAX_BYTES),
        *([] if current else ["the templates have changed since"]),
    ]


def test_the_pictures_are_up_to_date() -> None:
    assert problems(pictures.PICTURES, pictures.SOURCES) == [], f"take them anew: {pictures.COMMAND}"


def test_the_terminal_loads_nothing() -> None:
    assert pictures.terminal_picture("status", "\x1b[32mok\x1b[0m").count("://") == 1  # the name space of SVG


def test_old_pictures_are_reported(tmp_path: Path) -> None:
    folder, sources = tmp_path / "pictures", tmp_path / "console"
    shutil.copytree(pictures.PICTURES, folder)
    shutil.copytree(pictures.SOURCES, sources)
    assert problems(folder, sources) == []
    (sources / "static" / "console.css").write_text("body {}")
    assert problems(folder, sources) == ["the templates have changed since"]
    shutil.copytree(pictures.SOURCES, sources, dirs_exist_ok=True)
    (folder / "status.svg").unlink()
    (folder / "old.png").write_bytes(b"0" * (pictures.MAX_BYTES + 1))
    assert problems(folder, sources) == [
        "status.svg is missing",
        "old.png is not taken by the script",
        f"old.png has {pictures.MAX_BYTES + 1} bytes",
    ]
