"""A function of one's own, named in the config: "package.module:function" or "file.py:function"."""

import importlib
import importlib.util
import operator
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from rollverify.errors import ConfigError

NAME_OF_A_FUNCTION = re.compile(r"(?:[^\W\d]\w*(?:\.\w+)*|.+\.py):[^\W\d]\w*(?:\.\w+)*")
"""What such a name looks like; the part behind the colon may be dotted."""


@cache
def load_function(key: str, name: str) -> Callable[..., Any]:
    """Import the function that a setting names; a ConfigError if the import fails or has none."""
    place, _, function = name.rpartition(":")
    try:
        module = import_place(place)
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(f"{key} = {name!r}: importing {place!r} failed ({reason})") from error
    try:
        found = operator.attrgetter(function)(module)
    except AttributeError:
        found = None
    if not callable(found):
        own = [known for known, value in vars(module).items() if callable(value)]
        cure = f"it has {', '.join(own)}" if own else "it has none"
        raise ConfigError(f"{key} = {name!r}: {place!r} has no function {function!r}; {cure}")
    return found


def import_place(place: str) -> ModuleType:
    """Import a module, or execute a .py file as one, which its own classes find by its name."""
    if not place.endswith(".py"):
        return importlib.import_module(place)
    spec = importlib.util.spec_from_file_location(f"user_file_{Path(place).stem}", place)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
