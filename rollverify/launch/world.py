"""Where the ranks of a run meet."""

import os

import torch.distributed as dist

from rollverify.config.tables import ParallelismConfig
from rollverify.errors import ConfigError
from rollverify.ranks import Ranks, make_patient
from torchtitan_ext.process_group import init_process_group


def join_world(parallelism: ParallelismConfig) -> Ranks:
    """All ranks of the run. Collective over them."""
    try:
        init_process_group(parallelism.timeout_s)
        make_patient(parallelism.wait_timeout_s)
    except dist.DistNetworkError as error:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"the ranks cannot meet at {place} ({reason}); if the port is in use, choose another "
            "with torchrun's --rdzv-endpoint or MASTER_PORT"
        ) from error
    return Ranks.world()
