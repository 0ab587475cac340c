"""Whether the GPUs of this machine can be used, looked at before anything large is loaded."""

import os
import subprocess

import torch

from rollverify.config.tables import Config
from rollverify.engine.memory import GIB
from rollverify.errors import ConfigError

BUSY_SHARE = 0.1
"""Of a GPU's memory that others may hold before a run that takes what is free is refused."""


def check_devices(config: Config) -> None:
    """Refuse a driver that torch cannot use, more ranks than GPUs, and a GPU that is taken.

    Does nothing where no GPU is listed, or ROLLVERIFY_DEVICE is cpu.
    """
    if os.environ.get("ROLLVERIFY_DEVICE") == "cpu":
        return
    if not torch.cuda.is_available():
        _check_driver()
        return
    number, rank = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", "0"))
    # Some launchers show each rank its own GPU alone; that is number 0 there, whatever the rank.
    is_masked = number == 1 and os.environ.get("CUDA_VISIBLE_DEVICES", "").isdigit()
    device = 0 if is_masked else rank
    if device >= number:
        ranks = os.environ.get("LOCAL_WORLD_SIZE", rank + 1)
        raise ConfigError(
            f"{ranks} ranks were started and torch sees {number} GPUs here; start at most "
            f"NGPU={number}"
        )
    if config.run.deterministic and torch.cuda.get_device_capability() < (9, 0):
        major, minor = torch.cuda.get_device_capability()
        raise ConfigError(
            "run.deterministic needs batch-invariant kernels of vLLM, for GPUs of compute "
            f"capability 9.0 and above; this one has {major}.{minor}: set it to false"
        )
    free, total = torch.cuda.mem_get_info(device)
    if not config.engine.gpu_memory_utilization and free < (1 - BUSY_SHARE) * total:
        raise ConfigError(
            f"GPU {device} has {free / GIB:.1f} of {total / GIB:.1f} GiB free: "
            "other processes hold the rest (nvidia-smi names them); end them, choose other GPUs "
            "by CUDA_VISIBLE_DEVICES, or set engine.gpu_memory_utilization to share this one"
        )


def _check_driver() -> None:
    """Refuse to run on the CPU without being asked to where the machine has GPUs."""
    if torch.version.cuda is None:
        return
    driver = listed_driver()
    if driver:
        raise ConfigError(
            f"nvidia-smi lists GPUs with driver {driver}, but torch {torch.__version__} (CUDA "
            f"{torch.version.cuda}) can use none of them; update the driver (CUDA 13 needs 580 or "
            "newer), or set ROLLVERIFY_DEVICE=cpu"
        )


def listed_driver() -> str:
    """Version of the driver by nvidia-smi; "" where that finds no GPU."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.splitlines()[0].strip() if found.returncode == 0 and found.stdout else ""
