"""Single values of a Hugging Face `config.json`: each is checked, or refused in one line.

Knows how large a size may be, but not which keys an architecture has nor what they mean.
"""

import math
from collections.abc import Mapping
from typing import Any

_LARGEST = {
    "vocab_size": 2**31 - 1,
    "max_position_embeddings": 2**31 - 1,
    "num_hidden_layers": 10_000,
    "num_experts": 10_000,
    "num_local_experts": 10_000,
}
_LARGEST_WIDTH = 2**19
"""Of every other size: experts x width x width in float32 still have a number of bytes."""

CURE = "restore the config.json that the model came with"
_LONGEST_VALUE = 60
"""Characters of a value that are shown."""


class ModelFolderError(ValueError):
    """A model folder that is missing, incomplete or of an architecture without a spec."""


def shown(value: object) -> str:
    """A value for a message: on one line, shortened."""
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 4]} ..."


def wrong(
    folder: object, key: str, wanted: str, value: object, cure: str = CURE
) -> ModelFolderError:
    """The error of a value that is not what it must be.

    Args:
        folder: that holds the config.json.
        key: of the value.
        wanted: what it must be.
        value: what it is.
        cure: what to do.
    """
    return ModelFolderError(
        f"'{folder}': config.json: {key} must be {wanted}, got {shown(value)}; {cure}"
    )


def whole_number(config: Mapping[str, Any], folder: object, key: str) -> int:
    """A size: at least 1, and not so large that the model's bytes have no number.

    A float is refused even where it is whole: transformers, and with it the engine, refuses it,
    so a trainer that took it would only move the error to the end of the start-up.

    Raises:
        ModelFolderError: if it is missing or something else; one line.
    """
    value = _present(config, folder, key)
    largest = _LARGEST.get(key, _LARGEST_WIDTH)
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= largest:
        return value
    is_whole = isinstance(value, float) and value.is_integer() and 1 <= value <= largest
    cure = f"write {int(value)}" if is_whole else CURE
    raise wrong(folder, key, f"a whole number from 1 to {largest}", value, cure)


def real_number(
    config: Mapping[str, Any], folder: object, key: str, *, or_zero: bool = False
) -> float:
    """A finite number above 0, written as a whole number or not.

    Args:
        config: contents of config.json, or of an object in it.
        folder: named in errors.
        key: of the number.
        or_zero: whether 0 will do, too.

    Raises:
        ModelFolderError: if it is missing or something else; one line.
    """
    value = _present(config, folder, key)
    wanted = f"a finite number {'of at least' if or_zero else 'above'} 0"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong(folder, key, wanted, value)
    try:
        number = float(value)
    except OverflowError:  # A whole number of more than 308 digits.
        number = math.inf
    if not math.isfinite(number) or number < 0 or (number == 0 and not or_zero):
        raise wrong(folder, key, wanted, value)
    return number


def flag(config: Mapping[str, Any], folder: object, key: str) -> bool:
    """True or false; false where it is missing.

    Raises:
        ModelFolderError: if it is something else, such as the text "false".
    """
    value = config.get(key, False)
    if not isinstance(value, bool):
        raise wrong(folder, key, "true or false", value)
    return value


def _present(config: Mapping[str, Any], folder: object, key: str) -> Any:
    if key not in config:
        raise ModelFolderError(f"'{folder}': config.json lacks {key}; {CURE}")
    return config[key]
