"""Files and functions stay small enough to be read in one go."""

import ast

import pytest
from rules.repository import ROOT, functions_in, name_of, parsed, python_files

MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 60
MAX_LOOP_LINES = 45
"""Of `train`, which has to fit on one screen."""

MAX_TEST_LINES = 25


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring, which the docstring rule wants to be complete."""
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function, clean=False) is None:
        return lines
    text = function.body[0]
    return lines - (text.end_lineno - text.lineno + 1)


@pytest.mark.parametrize("path", python_files(), ids=name_of)
def test_a_file_is_not_too_long(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_FILE_LINES


def test_no_function_is_too_long():
    found = {
        f"{name_of(path)}:{function.name}": code_lines(function)
        for path in python_files()
        for function in functions_in(parsed(path))
    }
    assert {name: size for name, size in found.items() if size > MAX_FUNCTION_LINES} == {}


def test_the_training_loop_fits_on_one_screen():
    tree = parsed(ROOT / "rollverify" / "train.py")
    (loop,) = [function for function in functions_in(tree) if function.name == "train"]
    assert code_lines(loop) <= MAX_LOOP_LINES


def test_test_functions_are_short():
    found = {
        f"{name_of(path)}:{function.name}": code_lines(function)
        for path in python_files("tests")
        for function in functions_in(parsed(path))
        if function.name.startswith("test_")
    }
    assert {name: size for name, size in found.items() if size > MAX_TEST_LINES} == {}


def test_the_docstring_is_not_counted():
    source = 'def f():\n    """One.\n\n    Two.\n    """\n    return 1\n'
    (function,) = functions_in(ast.parse(source))
    assert code_lines(function) == 2
