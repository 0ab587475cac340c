"""A function that writes a TOML file and gives the `--config` arguments for it."""

from collections.abc import Callable
from pathlib import Path

import pytest

Write = Callable[..., list[str]]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write `text` to `name` in an empty current folder; return ["--config", name]."""
    monkeypatch.chdir(tmp_path)

    def write_file(text: str, name: str = "a.toml") -> list[str]:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return ["--config", name]

    return write_file
