"""Puts modules of our own into the settings of a model: the one place where they come in.

Those for CPUs, and those that compute in float32: torchtitan's attention and experts never do.
"""

from typing import Any

from torchtitan.config.override import derive
from torchtitan.models.common.attention import VarlenAttention
from torchtitan.models.common.decoder import TransformerBlock
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.protocols.model import BaseModel

from torchtitan_ext.cpu.attention import PackedSDPA
from torchtitan_ext.cpu.experts import Float32Experts
from torchtitan_ext.cpu.kernels import KernelRMSNorm
from torchtitan_ext.cpu.scoring_block import ScoringBlock

_FLOAT32_MODULES: dict[type, type] = {
    VarlenAttention.Config: PackedSDPA.Config,
    GroupedExperts.Config: Float32Experts.Config,
}
_CPU_MODULES: dict[type, type] = _FLOAT32_MODULES | {
    RMSNorm.Config: KernelRMSNorm.Config,
    TransformerBlock.Config: ScoringBlock.Config,
}


def use_cpu_modules(model: BaseModel.Config) -> None:
    """Put the modules for CPUs into the settings of a model, in place; names of weights stay."""
    _replace(model, _CPU_MODULES)


def use_float32_modules(model: BaseModel.Config) -> None:
    """Put the modules that compute in float32 on any device into the settings, in place."""
    _replace(model, _FLOAT32_MODULES)


def _replace(model: BaseModel.Config, modules: dict[type, type]) -> None:
    """Torchtitan's own `@override` does not reach a block that holds something else to override."""
    for theirs, ours in modules.items():
        found: list[Any] = list(model.traverse(theirs))
        for _, config, parent, place in found:
            if isinstance(parent, list):
                parent[place] = derive(config, ours)
            else:
                setattr(parent, place, derive(config, ours))
