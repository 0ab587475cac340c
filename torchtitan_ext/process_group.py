"""Joins the default process group the same way on one process, one node and many."""

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from torchtitan_ext.cpu.backend import uses_cpu


def _keep_gloo_on_loopback() -> None:
    """On one machine gloo needs no other interface; what the user has set is left alone."""
    world_size = os.environ.get("WORLD_SIZE", "1")
    is_one_machine = os.environ.get("LOCAL_WORLD_SIZE", world_size) == world_size
    if is_one_machine and any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def init_process_group(timeout_s: float) -> tuple[int, int]:
    """Join the default group, without an address if alone: (rank, world size). Collective."""
    # torchtitan needs the whole backward pass on one thread (its own set-up does the same).
    torch.autograd.set_multithreading_enabled(False)
    if not dist.is_initialized():
        os.environ.setdefault("LOCAL_RANK", "0")
        _keep_gloo_on_loopback()
        backend = "gloo" if uses_cpu() else "cpu:gloo,cuda:nccl"
        timeout = timedelta(seconds=timeout_s)
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            store = HashStore()
            dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
        else:
            dist.init_process_group(backend, timeout=timeout)
    return dist.get_rank(), dist.get_world_size()
