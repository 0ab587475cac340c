"""The machines of a run, as torchrun's variables or Slurm's name them."""

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from rollverify.errors import ConfigError

DEFAULT_PORT = 29500


@dataclass(frozen=True, kw_only=True, slots=True)
class Nodes:
    """How many, which one this is, and where the first one listens."""

    count: int = 1
    rank: int = 0
    address: str = "127.0.0.1"
    port: int = 0
    """0: a free one, which only one machine can do."""


def read_nodes(variables: Mapping[str, str]) -> Nodes:
    """NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT; inside srun what they leave out is Slurm's.

    Raises:
        ConfigError: if one is missing, no number, or contradicts another.
    """
    values = {**_of_slurm(variables), **{key: text for key, text in variables.items() if text}}
    count = _number(values, "NNODES", 1, least=1)
    if count == 1:
        return Nodes()
    rank = _number(values, "NODE_RANK", None, least=0)
    if rank >= count:
        raise ConfigError(
            f"NODE_RANK must be below NNODES = {count}, got {rank}; nodes are numbered from 0"
        )
    address = values.get("MASTER_ADDR", "")
    if not address:
        raise ConfigError(
            f"NNODES is {count} but MASTER_ADDR is not set; give every node the address of node 0"
        )
    port = _number(values, "MASTER_PORT", DEFAULT_PORT, least=1)
    return Nodes(count=count, rank=rank, address=address, port=port)


def _number(values: Mapping[str, str], name: str, default: int | None, *, least: int) -> int:
    text = values.get(name, "" if default is None else str(default))
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise ConfigError(f"{name} must be a whole number >= {least}, got {text!r}")
    return int(text)


def _of_slurm(variables: Mapping[str, str]) -> dict[str, str]:
    """The same from the variables of a job step, which srun sets; nothing outside of one."""
    nodes = variables.get("SLURM_STEP_NUM_NODES", "1")
    if nodes == "1" or variables.get("NNODES"):
        return {}
    if variables.get("SLURM_STEP_NUM_TASKS") != nodes:
        raise ConfigError(
            f"srun started {variables.get('SLURM_STEP_NUM_TASKS')} tasks on {nodes} nodes; start "
            "one per node (srun --ntasks-per-node 1), it starts NGPU ranks there"
        )
    found = {"NNODES": nodes, "NODE_RANK": variables.get("SLURM_NODEID", "")}
    if not variables.get("MASTER_ADDR"):
        found["MASTER_ADDR"] = _first_host(variables.get("SLURM_STEP_NODELIST", ""))
    return found


def _first_host(hosts: str) -> str:
    """Of a list in Slurm's notation, such as node[07-09]."""
    try:
        command = ["scontrol", "show", "hostnames", hosts]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
        return done.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        raise ConfigError(
            f"`scontrol show hostnames {hosts}` does not name the first node; set MASTER_ADDR"
        ) from error
