"""A function of one's own: from a module or file, and every failure is one line with its cause."""

from pathlib import Path

import pytest

from rollverify.config.function import load_function
from rollverify.errors import ConfigError

GOOD = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Settings:
    power: int = 2

def squared(x):
    return x ** Settings().power

constant = 3
"""


def test_function_of_a_file_and_of_a_module(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(GOOD)
    assert load_function("loss.name", f"{tmp_path}/mine.py:squared")(3) == 9
    assert load_function("loss.name", "math:sqrt")(9) == 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:f", "importing 'no_such_module' failed (ModuleNotFoundError: No module"),
        ("missing.py:f", "importing 'missing.py' failed (FileNotFoundError: "),
        ("raises.py:f", "importing 'raises.py' failed (ValueError: first line)"),
        ("leaves.py:f", "importing 'leaves.py' failed (SystemExit: 3)"),
        ("wrong.py:f", "importing 'wrong.py' failed (SyntaxError: "),
        ("mine.py:cubed", "'mine.py' has no function 'cubed'; it has dataclass, Settings, squared"),
        ("mine.py:constant", "'mine.py' has no function 'constant'"),
        ("empty.py:f", "'empty.py' has no function 'f'; it has none"),
    ],
)
def test_failure_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    load_function.cache_clear()
    Path("mine.py").write_text(GOOD)
    Path("raises.py").write_text("raise ValueError('first line\\nsecond line')")
    Path("leaves.py").write_text("raise SystemExit(3)")
    Path("wrong.py").write_text("def f(:")
    Path("empty.py").touch()
    with pytest.raises(ConfigError) as caught:
        load_function("data.reward", name)
    assert str(caught.value).startswith(f"data.reward = {name!r}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
