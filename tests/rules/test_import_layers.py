"""Who may import whom. Packages below know nothing of those above, nor of the config."""

import ast
import sys
from pathlib import Path

import pytest
from rules.repository import ROOT, name_of, parsed, python_files

COMPOSITION = {
    "rollverify/build.py",
    "rollverify/dry_run.py",
    "rollverify/parts.py",
    "rollverify/rollout_parts.py",
    "rollverify/run.py",
    "rollverify/supervised.py",
}
"""The only modules that may know torchtitan_ext; the last trains the base model."""

OWN = {
    "config": {"errors"},
    "algorithms": {"errors"},
    "rollout": {"environment", "errors", "log"},
    "data": {"errors", "log"},
    "rewards": {"data", "errors", "log"},
    "tasks": {"data", "errors"},
    "training": {
        "algorithms",
        "rollout.routing",
        "rollout.schema",
        "metrics.reduction",
        "errors",
        "log",
    },
    "metrics": {"state", "errors", "log", "rollout.schema"},
    "evaluation": {"data.prompts", "errors", "metrics.table", "rollout", "study.statistics"},
    "stages": {
        "algorithms",
        "evaluation.records",
        "evaluation.requests",
        "evaluation.statistics",
        "evaluation.summary",
        "rollout",
        "training",
        "rewards",
        "hooks",
        "state",
        "metrics",
        "errors",
    },
    "study": {
        "config",
        "errors",
        "metrics.audit_log",
        "metrics.names",
        "metrics.recorder",
        "metrics.slot_log",
        "run_folder",
        "shutdown",
    },
    "errors.py": set(),
    "state.py": {"rollout.schema"},
    "hooks.py": {"metrics.names", "state", "errors"},
    "log.py": set(),
    "environment.py": set(),
    "train.py": {"build", "environment", "errors", "hooks", "log", "shutdown", "state"},
}
"""What a package or module may import of `rollverify`, besides itself."""

OUTSIDE = {
    "config": {"tomli", "tyro"},
    "algorithms": {"torch"},
    "rollout": {"torch", "tensordict", "vllm", "safetensors"},
    "data": {"torch", "torchdata", "tokenizers", "transformers", "datasets", "pyarrow"},
    "rewards": {"latex2sympy2_extended", "math_verify", "sympy"},
    "evaluation": set(),
    "tasks": {"tokenizers"},
    "training": {"torch", "tensordict"},
    "metrics": {"torch", "tqdm"},
    "stages": {"torch", "tensordict"},
    "study": {"matplotlib", "tomli"},
    "errors.py": set(),
    "state.py": {"tensordict"},
    "hooks.py": set(),
    "train.py": set(),
    "launch.py": set(),
    "run_folder.py": set(),
    "processes.py": set(),
    "shutdown.py": set(),
    "environment.py": set(),
}
"""What it may import besides the standard library and `rollverify`."""

ONE_PLACE = {
    "vllm": {
        "rollverify/rollout/vllm_engine.py",
        "rollverify/rollout/vllm_cpu.py",
        "torchtitan_ext/engine_kernels.py",
    },
    "tensorboard": {"rollverify/metrics/recorder.py"},
    "torchdata": {"rollverify/data/loader.py"},
    "math_verify": {"rollverify/rewards/symbolic.py"},
    "matplotlib": {"rollverify/study/plots.py"},
    "datasets": {"rollverify/data/hub.py"},
    "pyarrow": {"rollverify/data/row_files.py"},
}


def imports_in(tree: ast.Module) -> set[str]:
    """Dotted names of all imported modules and of what is imported from them."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports hide which layer is used"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def is_within(name: str, allowed: set[str]) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in allowed)


def own_violations(place: str, tree: ast.Module) -> set[str]:
    """Imports of `rollverify` that a package or module must not make."""
    allowed = {f"rollverify.{name}" for name in OWN[place] | {place.removesuffix(".py")}}
    own = {name for name in imports_in(tree) if name.split(".")[0] == "rollverify"}
    return {name for name in own if not is_within(name, allowed)}


def outside_violations(place: str, tree: ast.Module) -> set[str]:
    """Imports from elsewhere that it must not make."""
    tops = {name.split(".")[0] for name in imports_in(tree)}
    return tops - sys.stdlib_module_names - OUTSIDE[place] - {"rollverify"}


def files_of(place: str) -> list[Path]:
    path = ROOT / "rollverify" / place
    files = [path] if path.suffix else python_files(f"rollverify/{place}")
    return [one for one in files if name_of(one) not in COMPOSITION]


@pytest.mark.parametrize("place", OWN)
def test_a_layer_imports_only_what_lies_below_it(place):
    found = {name_of(one): own_violations(place, parsed(one)) for one in files_of(place)}
    assert {name: bad for name, bad in found.items() if bad} == {}


@pytest.mark.parametrize("place", OUTSIDE)
def test_a_layer_needs_only_its_own_libraries(place):
    found = {name_of(one): outside_violations(place, parsed(one)) for one in files_of(place)}
    assert {name: bad for name, bad in found.items() if bad} == {}


@pytest.mark.parametrize("library", ONE_PLACE)
def test_a_library_has_one_place(library):
    found = {
        name_of(path)
        for path in python_files("rollverify", "torchtitan_ext")
        if any(library in name.split(".") for name in imports_in(parsed(path)))
    }
    assert found == ONE_PLACE[library]


def test_torchtitan_is_known_to_torchtitan_ext_only():
    users = [
        name_of(path)
        for path in python_files("rollverify")
        if any(is_within(name, {"torchtitan"}) for name in imports_in(parsed(path)))
    ]
    assert users == []


def test_torchtitan_ext_is_known_to_the_composition_only():
    users = {
        name_of(path)
        for path in python_files("rollverify")
        if any(is_within(name, {"torchtitan_ext"}) for name in imports_in(parsed(path)))
    }
    assert users == COMPOSITION


def test_torchtitan_ext_knows_nothing_of_rollverify():
    libraries = {"torch", "torchtitan", "safetensors", "torchtitan_ext", "vllm"}
    for path in python_files("torchtitan_ext"):
        tops = {name.split(".")[0] for name in imports_in(parsed(path))}
        assert tops - sys.stdlib_module_names <= libraries, name_of(path)


def test_every_package_has_a_layer():
    packages = {path.parent.name for path in (ROOT / "rollverify").glob("*/__init__.py")}
    assert packages <= OWN.keys() and packages <= OUTSIDE.keys()


def test_unit_tests_need_neither_vllm_nor_torchtitan():
    heavy = {"vllm", "torchtitan", "torchtitan_ext", "rollverify.build", "rollverify.parts"}
    for path in [*python_files("tests/unit"), ROOT / "tests" / "fakes.py"]:
        used = {name for name in imports_in(parsed(path)) if is_within(name, heavy)}
        assert used == set(), name_of(path)


def test_violations_are_found():
    tree = ast.parse("from rollverify import run_folder\nimport rollverify.config.schema, yaml\n")
    assert own_violations("rollout", tree) == {"rollverify.run_folder", "rollverify.config.schema"}
    assert outside_violations("rollout", tree) == {"yaml"}
    nested = ast.parse("def f():\n    from rollverify.rollout.engine import X\n")
    assert own_violations("training", nested) == {"rollverify.rollout.engine.X"}
    assert own_violations("stages", nested) == set()
