"""A function of one's own, named in the config: "package.module:function" or "file.py:function"."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from rollverify.errors import ConfigError


@cache
def load_function(key: str, name: str) -> Callable[..., Any]:
    """Import the function that a setting names.

    Raises:
        ConfigError: the module is not found, fails while it is imported, or has no such function.
    """
    place, _, function = name.rpartition(":")
    try:
        module = _file(place) if place.endswith(".py") else importlib.import_module(place)
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(f"{key} = {name!r}: importing {place!r} failed ({reason})") from error
    found = getattr(module, function, None)
    if not callable(found):
        own = [known for known, value in vars(module).items() if callable(value)]
        cure = f"it has {', '.join(own)}" if own else "it has none"
        raise ConfigError(f"{key} = {name!r}: {place!r} has no function {function!r}; {cure}")
    return found


def _file(place: str) -> ModuleType:
    """Execute a file as a module, which its own classes can find by its name."""
    spec = importlib.util.spec_from_file_location(f"user_file_{Path(place).stem}", place)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
