"""Puts the modules for CPUs into the settings of a model: the one place where they come in."""

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

_MODULES: dict[type, type] = {
    VarlenAttention.Config: PackedSDPA.Config,
    GroupedExperts.Config: Float32Experts.Config,
    RMSNorm.Config: KernelRMSNorm.Config,
    TransformerBlock.Config: ScoringBlock.Config,
}


def use_cpu_modules(model: BaseModel.Config) -> None:
    """Replace settings in place, each by those of the CPU's module; names of weights stay.

    torchtitan's own `@override` does not reach a block that holds something else to override.
    """
    for theirs, ours in _MODULES.items():
        found: list[Any] = list(model.traverse(theirs))
        for _, config, parent, place in found:
            if isinstance(parent, list):
                parent[place] = derive(config, ours)
            else:
                setattr(parent, place, derive(config, ours))
