"""What an engine must know of a model folder before it starts: its config.json and its experts.

Does not check the folder; the engine's own errors are clear where nothing can be read.
"""

import json
from pathlib import Path
from typing import Any

from rollverify.errors import ConfigError

NUM_EXPERTS_KEYS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
"""Names under which a config.json says how many experts a layer has."""


def read_model_config(model_folder: str) -> dict[str, Any]:
    """Contents of config.json; empty where there is none or none that can be read."""
    try:
        config = json.loads((Path(model_folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def has_experts(model_config: dict[str, Any]) -> bool:
    """Whether the model routes tokens to experts, under any of the names for their number."""
    return any(model_config.get(key) for key in NUM_EXPERTS_KEYS)


def check_experts(model_folder: str, model_config: dict[str, Any]) -> None:
    """Refuse to record the routing of a model without experts.

    Args:
        model_folder: named in the error.
        model_config: contents of the folder's config.json.

    Raises:
        ConfigError: if the model has none.
    """
    if not has_experts(model_config):
        raise ConfigError(
            f"'{model_folder}' has no experts whose routing could be recorded; use a "
            "mixture-of-experts model or set routing_replay.mode to off"
        )
