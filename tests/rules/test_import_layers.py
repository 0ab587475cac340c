"""Who may import whom: one direction, floor by floor, and each big library in its one place."""

import ast
import sys
from graphlib import CycleError, TopologicalSorter

from rules.repository import ROOT, name_of, parsed, python_files

FLOORS = [
    "errors",
    "log",
    "files",
    "hooks",
    "config",
    "ranks",
    "torchtitan_ext",
    "data",
    "rewards",
    "engine",
    "rollout",
    "losses",
    "training",
    "metrics",
    "verification",
    "checkpoint",
    "toy",
    "dry_run",
    "launch",
    "evaluation",
    "run",
    "build",
    "train",
    "evaluate",
    "study",
]
"""Packages and loose modules from the ground up; each imports from itself and from below."""

CONFIG = {"rollverify.toy.settings"}
"""Modules of a higher floor that belong to the config: tables that live with their feature."""

MATHEMATICS = [
    "rollverify/verification/ops.py",
    "rollverify/verification/prefix.py",
    "rollverify/verification/window.py",
    "rollverify/losses/aggregation.py",
    "rollverify/losses/clipped.py",
    "rollverify/losses/corrections.py",
    "rollverify/losses/diagnostics.py",
    "rollverify/losses/inputs.py",
    "rollverify/losses/sequence.py",
    "rollverify/losses/weighted.py",
]
"""Formulas of the papers: torch, the errors, their own tables and each other, nothing else."""

ONE_PLACE = {
    "vllm": {
        "rollverify/engine/vllm_cpu.py",
        "rollverify/engine/vllm_engine.py",
        "rollverify/engine/vllm_gpu.py",
        "rollverify/engine/vllm_shared.py",
        "torchtitan_ext/cpu/kernels.py",
    },
    "tensorboard": {"rollverify/metrics/recorder.py"},
    "torchdata": {"rollverify/data/loader.py"},
    "math_verify": {"rollverify/rewards/symbolic.py"},
    "matplotlib": {"rollverify/study/plots.py"},
}


def modules() -> dict[str, ast.Module]:
    """Syntax tree of every product module by its dotted name."""
    files = python_files("rollverify", "torchtitan_ext")
    names = [name_of(file).removesuffix(".py").removesuffix("/__init__") for file in files]
    return {name.replace("/", "."): parsed(file) for name, file in zip(names, files, strict=True)}


def for_types_only(tree: ast.Module) -> set[ast.AST]:
    """Imports that only a type checker makes."""
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If)]
    checked = [block for block in blocks if ast.unparse(block.test) == "TYPE_CHECKING"]
    return {node for block in checked for node in block.body}


def imports_in(tree: ast.Module) -> set[str]:
    """Dotted names of all modules imported at run time and of what is imported from them."""
    found: set[str] = set()
    skipped = for_types_only(tree)
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports hide which layer is used"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def own_imports(tree: ast.Module, known: set[str]) -> set[str]:
    """The product's modules among the imports."""
    names = imports_in(tree)
    return {name for name in names if name in known} | {
        name.rpartition(".")[0]
        for name in names
        if name not in known and name.rpartition(".")[0] in known
    }


def floor_of(module: str) -> int:
    if module in CONFIG:
        return FLOORS.index("config")
    top, _, rest = module.partition(".")
    place = top if top == "torchtitan_ext" else rest.split(".")[0]
    return FLOORS.index(place) if place else -1


def upward_arrows(trees: dict[str, ast.Module]) -> list[str]:
    return [
        f"{module} -> {target}"
        for module, tree in trees.items()
        for target in sorted(own_imports(tree, set(trees)))
        if floor_of(target) > floor_of(module)
    ]


def test_imports_go_down():
    assert upward_arrows(modules()) == []


def test_no_imports_go_round_in_circles():
    trees = modules()
    arrows = {module: own_imports(tree, set(trees)) - {module} for module, tree in trees.items()}
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def test_the_mathematics_imports_torch_only():
    trees = modules()
    allowed = {
        "torch",
        "rollverify.errors",
        "rollverify.config.losses",
        "rollverify.config.tables",
        "rollverify.rollout.layout",
    }
    pure = {name.removesuffix(".py").replace("/", ".") for name in MATHEMATICS}
    for module in pure:
        outside = {n.split(".")[0] for n in imports_in(trees[module])} - {"rollverify"}
        assert outside - sys.stdlib_module_names <= allowed, module
        assert own_imports(trees[module], set(trees)) <= allowed | pure, module


def test_a_library_has_one_place():
    trees = {name_of(path): parsed(path) for path in python_files("rollverify", "torchtitan_ext")}
    for library, places in ONE_PLACE.items():
        users = {
            name
            for name, tree in trees.items()
            if any(library in used.split(".") for used in imports_in(tree))
        }
        assert users == places, library


def test_torchtitan_is_known_to_torchtitan_ext_only():
    for module, tree in modules().items():
        if module.startswith("rollverify"):
            assert not any(n.split(".")[0] == "torchtitan" for n in imports_in(tree)), module


def test_torchtitan_ext_stands_alone():
    libraries = {"torch", "torchtitan", "safetensors", "torchtitan_ext", "vllm"}
    for path in python_files("torchtitan_ext"):
        tops = {name.split(".")[0] for name in imports_in(parsed(path))}
        assert tops - sys.stdlib_module_names <= libraries, name_of(path)


def test_the_config_needs_no_torch():
    heavy = {"torch", "vllm", "transformers", "datasets", "tensordict"}
    for module, tree in modules().items():
        if module.startswith("rollverify.config") or module in CONFIG:
            assert not {n.split(".")[0] for n in imports_in(tree)} & heavy, module


def test_unit_tests_need_neither_vllm_nor_torchtitan():
    heavy = ("vllm", "torchtitan", "torchtitan_ext", "rollverify.build")
    for path in [*python_files("tests/unit"), ROOT / "tests" / "support" / "fakes.py"]:
        names = imports_in(parsed(path))
        used = [n for n in names if any(f"{n}.".startswith(f"{top}.") for top in heavy)]
        assert used == [], name_of(path)


def test_an_arrow_upwards_is_found():
    trees = {
        "rollverify.config.load": ast.parse("def f():\n    from rollverify.train import main\n"),
        "rollverify.train": ast.parse("from rollverify.config.load import load_config\n"),
    }
    assert upward_arrows(trees) == ["rollverify.config.load -> rollverify.train"]
