"""What the rules look at: the files of the repository, without what runs and tools leave behind."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_LEFT_BEHIND = {".git", ".venv", "outputs", "shared", "build", "dist", "htmlcov", "__pycache__"}
_LEFT_BEHIND |= {".pytest_cache", ".ruff_cache", ".hypothesis", ".idea", ".vscode"}


def files_below(folder: Path = ROOT) -> Iterator[Path]:
    """Every file of the repository below a folder."""
    for path in sorted(folder.iterdir()):
        if path.name in _LEFT_BEHIND or path.name.endswith(".egg-info"):
            continue
        if path.is_dir():
            yield from files_below(path)
        elif path.suffix not in (".pyc", ".log"):
            yield path


def python_files(*folders: str) -> list[Path]:
    """Python files of top-level folders; of the whole repository if none is named."""
    roots = [ROOT / folder for folder in folders] or [ROOT]
    return [path for root in roots for path in files_below(root) if path.suffix == ".py"]


def name_of(path: Path) -> str:
    """Path from the root, for messages."""
    return path.relative_to(ROOT).as_posix()


@cache
def parsed(path: Path) -> ast.Module:
    """Syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def functions_in(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions and methods, nested ones too."""
    return [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
