"""Makes torchtitan 0.3.0 run on machines without an accelerator.

Its modules copy the device at import time, so `install_cpu_backend` must run before.
"""

import contextlib
import os
import resource
import sys
import types
import warnings

import torch

_COPIES = (
    "torchtitan.distributed.utils",
    "torchtitan.distributed.parallel_dims",
    "torchtitan.components.metrics",
    "torchtitan.models.common.token_dispatcher",
    "torchtitan.tools.profiler",
)


def _memory_stats(device: object = None) -> dict[str, int]:
    """Peak resident memory of this process under the keys of `torch.cuda.memory_stats`."""
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "active_bytes.all.peak": peak_bytes,
        "reserved_bytes.all.peak": peak_bytes,
        "num_alloc_retries": 0,
        "num_ooms": 0,
    }


def _cpu_device_module() -> types.ModuleType:
    """Build the module that stands where `torch.cuda` would."""
    module = types.ModuleType("torchtitan_ext_cpu_device")
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    module.__dict__.update(
        get_device_name=lambda device=None: "CPU",
        get_device_properties=lambda device=None: types.SimpleNamespace(total_memory=memory_bytes),
        current_device=lambda: 0,
        device_count=lambda: 1,
        set_device=lambda device: None,
        synchronize=lambda device=None: None,
        empty_cache=lambda: None,
        reset_peak_memory_stats=lambda device=None: None,
        memory_stats=_memory_stats,
        is_available=lambda: True,
        Stream=torch.Stream,
        stream=lambda stream: contextlib.nullcontext(),
    )
    return module


def uses_cpu() -> bool:
    """True where no accelerator is visible to torch."""
    return torch.accelerator.current_accelerator(check_available=True) is None


def install_cpu_backend() -> None:
    """Point torchtitan at the CPU where no accelerator is visible. May be called again.

    RuntimeError if a torchtitan module that copies the device was imported before.
    """
    if not uses_cpu():
        return
    from torchtitan.tools import utils

    if utils.device_type == "cpu":
        return
    early = [name for name in _COPIES if name in sys.modules]
    if early:
        raise RuntimeError(
            f"install_cpu_backend() must run before {early[0]} is imported; call it first"
        )
    # DTensor says so at every random draw on a CPU mesh; weights are drawn replicated.
    warnings.filterwarnings("ignore", message="DTensor random operators may not have complete")
    warnings.filterwarnings("ignore", message="DTensor manual_seed")
    utils.device_type = "cpu"
    utils.device_module = _cpu_device_module()
    # Model FLOPS utilisation is meaningless here, and the table look-up starts `lspci`.
    utils.get_peak_flops = lambda device_name: 1e12
