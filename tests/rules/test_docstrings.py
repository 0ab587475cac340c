"""Public functions of the three math and data packages say what goes in, comes out and goes wrong.

One argument may be explained by the summary line. A method of a protocol is documented there, so
those that implement it need no sections of their own.
"""

import ast
import re

import pytest
from rules.repository import name_of, parsed, python_files

SECTIONS = ("Args", "Returns", "Yields", "Raises", "Source", "Example")
_SECTION = re.compile(r"^(Args|Returns|Yields|Raises|Source|Example):", re.MULTILINE)

Function = ast.FunctionDef | ast.AsyncFunctionDef

FILES = python_files("rollverify/algorithms", "rollverify/rollout", "rollverify/training")


def protocol_methods() -> set[str]:
    """Names of the methods of all protocols, and of torch's `Stateful`."""
    classes = [n for path in FILES for n in ast.walk(parsed(path)) if isinstance(n, ast.ClassDef)]
    protocols = [one for one in classes if any(ast.unparse(b) == "Protocol" for b in one.bases)]
    names = {n.name for one in protocols for n in one.body if isinstance(n, Function)}
    return names | {"state_dict", "load_state_dict"}


def public_functions(tree: ast.Module) -> list[Function]:
    """Functions of the module and methods of its public classes, `__init__` included."""
    found = [n for n in tree.body if isinstance(n, Function)]
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            found += [n for n in node.body if isinstance(n, Function)]
    return [one for one in found if not one.name.startswith("_") or one.name == "__init__"]


def sections_of(text: str) -> dict[str, str]:
    """Body of each section by its title, in order; "" is what stands before the first."""
    parts = _SECTION.split(text)
    return {"": parts[0]} | dict(zip(parts[1::2], parts[2::2], strict=True))


def faults_of(function: Function, shared: set[str], *, needs_source: bool) -> list[str]:
    """What the docstring lacks."""
    text = ast.get_docstring(function)
    if not text:
        return ["no docstring"]
    if function.name in shared:
        return []
    sections = sections_of(text)
    titles = [title for title in sections if title]
    faults = _argument_faults(function, sections)
    returns = ast.unparse(function.returns) if function.returns else "None"
    if re.search(r"\bTensor\b", returns) and "[" not in sections.get("Returns", sections[""]):
        faults.append("no shape of the returned tensor")
    raised = {
        ast.unparse(n.exc.func)
        for n in ast.walk(function)
        if isinstance(n, ast.Raise) and isinstance(n.exc, ast.Call)
    }
    faults += [f"Raises lacks {name}" for name in raised if name not in sections.get("Raises", "")]
    if needs_source and "Source" not in sections:
        faults.append("no Source")
    if titles != sorted(titles, key=SECTIONS.index):
        faults.append(f"sections in the order {titles}")
    return faults


def _argument_faults(function: Function, sections: dict[str, str]) -> list[str]:
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    arguments = [one for one in arguments if one.arg not in ("self", "cls")]
    is_tensor = [one.annotation and ast.unparse(one.annotation) == "Tensor" for one in arguments]
    if "Args" not in sections:
        return ["no Args"] if len(arguments) > 1 or any(is_tensor) else []
    faults = []
    for one, has_shape in zip(arguments, is_tensor, strict=True):
        entry = re.search(rf"^\s+{one.arg}: (.*)$", sections["Args"], re.MULTILINE)
        if not entry:
            faults.append(f"Args lacks {one.arg}")
        elif has_shape and not entry[1].startswith("["):
            faults.append(f"{one.arg} has no shape")
    return faults


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_public_functions_are_documented(path):
    shared, needs_source = protocol_methods(), path.parent.name == "algorithms"
    found = {
        one.name: faults_of(one, shared, needs_source=needs_source and one.name != "__init__")
        for one in public_functions(parsed(path))
    }
    assert {name: faults for name, faults in found.items() if faults} == {}


@pytest.mark.parametrize("path", python_files("rollverify", "torchtitan_ext"), ids=name_of)
def test_every_module_says_what_it_is_for(path):
    text = ast.get_docstring(parsed(path)) or ""
    assert len(text.splitlines()[0].split()) >= 3 if text else path.stat().st_size == 0


def test_faults_are_found():
    source = '''
def f(x: Tensor, n: int) -> Tensor:
    """Short.

    Returns:
        A tensor.

    Args:
        x: float32.
    """
    raise ValueError("no")
'''
    (function,) = public_functions(ast.parse(source))
    assert set(faults_of(function, set(), needs_source=True)) == {
        "x has no shape",
        "Args lacks n",
        "no shape of the returned tensor",
        "Raises lacks ValueError",
        "no Source",
        "sections in the order ['Returns', 'Args']",
    }
