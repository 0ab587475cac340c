"""Files and functions stay small enough to be read in one go; lines of code are counted."""

import ast

from rules.repository import ROOT, functions_in, name_of, parsed, python_files

MAX_FILE_LINES = 350
"""About 250 is the point to look for a second idea, never a reason to split one."""

MAX_FUNCTION_LINES = 60
MAX_LOOP_LINES = 45
"""Of `train`, which has to fit on one screen, docstring aside."""

MAX_TEST_LINES = 25


def lines_of_code(text: str, tree: ast.AST) -> set[int]:
    """Numbers of the lines that are code: no blanks, comments, docstrings, imports."""
    stripped = enumerate((line.strip() for line in text.splitlines()), start=1)
    kept = {number for number, line in stripped if line and not line.startswith("#")}
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.Import | ast.ImportFrom) or is_text:
            kept -= set(range(node.lineno, node.end_lineno + 1))
    return kept


def sizes(*folders: str) -> tuple[dict[str, int], dict[str, int]]:
    """(lines of code of each file, of each function)."""
    files, functions = {}, {}
    for path in python_files(*folders):
        tree = parsed(path)
        code = lines_of_code(path.read_text(encoding="utf-8"), tree)
        files[name_of(path)] = len(code)
        for function in functions_in(tree):
            inside = range(function.lineno, function.end_lineno + 1)
            functions[f"{name_of(path)}:{function.name}"] = len(code.intersection(inside))
    return files, functions


def test_files_and_functions_are_not_too_long():
    files, functions = sizes()
    assert {name: size for name, size in files.items() if size > MAX_FILE_LINES} == {}
    assert {name: size for name, size in functions.items() if size > MAX_FUNCTION_LINES} == {}


def test_the_training_loop_fits_on_one_screen():
    assert sizes("rollverify")[1]["rollverify/train.py:train"] <= MAX_LOOP_LINES


def test_test_functions_are_short():
    functions = sizes("tests")[1]
    tests = {name: size for name, size in functions.items() if ":test_" in name}
    assert {name: size for name, size in tests.items() if size > MAX_TEST_LINES} == {}


def test_few_modules_lie_loose():
    loose = [path.name for path in (ROOT / "rollverify").glob("*.py")]
    assert len(loose) <= 9 + 1  # and __init__.py


def test_docstrings_comments_and_imports_are_not_counted():
    text = 'import os\n\n\ndef f():\n    """One.\n\n    Two.\n    """\n    # Why.\n    return 1\n'
    assert lines_of_code(text, ast.parse(text)) == {4, 10}
