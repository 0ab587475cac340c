"""Public functions give the shapes of their tensors, and every module says what it is for."""

import ast
import re

from rules.repository import functions_in, name_of, parsed, python_files

FOLDERS = [f"rollverify/{name}" for name in ("losses", "rollout", "training", "verification")]

SHAPE = re.compile(r"\[[^\]]*\]")


def lacks_shapes(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether tensors go in or out of a public function and its docstring shows fewer shapes."""
    annotations = [one.annotation for one in (*function.args.args, *function.args.kwonlyargs)]
    annotations.append(function.returns)
    has_tensors = any(note is not None and ast.unparse(note) == "Tensor" for note in annotations)
    return has_tensors and not SHAPE.search(ast.get_docstring(function) or "")


def test_tensors_have_shapes_in_the_docstring():
    found = [
        f"{name_of(path)}:{function.name}"
        for path in python_files(*FOLDERS)
        for function in functions_in(parsed(path))
        if not function.name.startswith("_") and lacks_shapes(function)
    ]
    assert found == []


def test_every_module_says_what_it_is_for():
    for path in python_files("rollverify", "torchtitan_ext"):
        text = ast.get_docstring(parsed(path)) or ""
        is_empty = path.stat().st_size == 0
        assert is_empty or len(text.splitlines()[0].split()) >= 3, name_of(path)


def test_a_missing_shape_is_found():
    source = 'def f(x: Tensor) -> int:\n    """Sum of `x`."""\n'
    (function,) = functions_in(ast.parse(source))
    assert lacks_shapes(function)
    (function,) = functions_in(ast.parse(source.replace("`x`", "`x` [T]")))
    assert not lacks_shapes(function)
