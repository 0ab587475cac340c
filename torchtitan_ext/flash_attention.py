"""Which FlashAttention the trainer uses on a GPU, and that torchtitan uses that one.

torchtitan asks for FA3 on SM 9.0 and FA4 on SM 10.0 whether or not a package has them. FA2 is part
of torch; the others come with packages of their own, and torch needs their backward pass too.
"""

import importlib
import logging

import torch
from torchtitan.tools import utils

logger = logging.getLogger(__name__)

_PACKAGES = {"FA3": "flash_attn_interface", "FA4": "flash_attn.cute.interface"}
_CAPABILITIES = {"FA3": (9,), "FA4": (10, 11, 12)}
"""Major numbers of the compute capabilities that each was written for."""


class AttentionError(ValueError):
    """The attention that was asked for cannot be had."""


def use_flash_attention(asked: str) -> str:
    """Make torchtitan's attention use "FA2", "FA3" or "FA4"; "auto" takes what can be had.

    Returns the one in use. AttentionError if the one asked for does not fit GPU or packages.
    """
    capability = torch.cuda.get_device_capability()
    chosen = asked
    if asked == "auto":
        fitting = [name for name in _PACKAGES if _obstacle(name, capability) is None]
        chosen = fitting[0] if fitting else "FA2"
    elif asked != "FA2" and (obstacle := _obstacle(asked, capability)):
        raise AttentionError(f"training.attention = '{asked}': {obstacle}; use 'auto' or 'FA2'")
    logger.info("attention of the trainer: %s", chosen)
    # FA2 is what torch uses by itself. `VarlenAttention` looks the function up as it is built.
    utils.get_cuda_flash_attention_impl = lambda: None if chosen == "FA2" else chosen
    return chosen


def _obstacle(name: str, capability: tuple[int, int]) -> str | None:
    """Why an implementation cannot be used."""
    if capability[0] not in _CAPABILITIES[name]:
        return f"it is not for GPUs of compute capability {capability[0]}.{capability[1]}"
    package = _PACKAGES[name]
    try:
        importlib.import_module(package)
    except ImportError as error:
        return f"its package cannot be imported ({error})"
    if name == "FA3" and not hasattr(torch.ops.flash_attn_3, "bwd"):
        return f"the installed {package} has no backward pass"
    return None
