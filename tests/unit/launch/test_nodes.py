"""Which machines a run has: torchrun's variables, Slurm's, and what is refused in one line."""

import os
import socket
import stat
from pathlib import Path

import pytest

from rollverify.errors import ConfigError
from rollverify.launch.nodes import Nodes, read_nodes
from rollverify.launch.rendezvous import listening_socket

SECOND = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1"}
STEP = {
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "node[07-08]",
}


def test_without_variables_there_is_one_machine_and_only_itself_reaches_it():
    assert read_nodes({}) == read_nodes({"NNODES": "1", "NODE_RANK": ""}) == Nodes()
    assert (Nodes().address, Nodes().port) == ("127.0.0.1", 0)
    # A batch script of two nodes outside of srun is one process on one of them.
    assert read_nodes({"SLURM_NNODES": "2", "SLURM_NODEID": "0"}) == Nodes()


def test_torchruns_variables_name_the_node_and_where_to_meet():
    assert read_nodes(SECOND) == Nodes(count=2, rank=1, address="10.0.0.1", port=29500)
    assert read_nodes(SECOND | {"MASTER_PORT": "1234"}).port == 1234


def test_slurm_fills_in_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    command = tmp_path / "scontrol"
    command.write_text('#!/bin/sh\n[ "$3" = "node[07-08]" ] && printf "node07\\nnode08\\n"\n')
    command.chmod(command.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert read_nodes(STEP) == Nodes(count=2, rank=1, address="node07", port=29500)
    assert read_nodes(STEP | {"MASTER_ADDR": "ib07"}).address == "ib07"
    assert read_nodes(STEP | SECOND | {"NODE_RANK": "0"}).rank == 0


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"NNODES": "two"}, "NNODES must be a whole number >= 1, got 'two'"),
        ({"NNODES": "0"}, "NNODES must be a whole number >= 1, got '0'"),
        ({"NNODES": "2", "MASTER_ADDR": "a"}, "NODE_RANK must be a whole number >= 0, got ''"),
        (SECOND | {"NODE_RANK": "2"}, "NODE_RANK must be below NNODES = 2, got 2"),
        ({"NNODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR is not set"),
        (SECOND | {"MASTER_PORT": "-1"}, "MASTER_PORT must be a whole number >= 1, got '-1'"),
        (STEP | {"SLURM_STEP_NUM_TASKS": "16"}, "16 tasks on 2 nodes; start one per node"),
        (STEP | {"SLURM_STEP_NODELIST": "--bad"}, "does not name the first node; set MASTER_ADDR"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(variables: dict[str, str], message: str):
    with pytest.raises(ConfigError, match=message) as caught:
        read_nodes(variables)
    assert "\n" not in str(caught.value)


def test_the_store_listens_on_the_address_that_was_asked_for():
    for address in ("127.0.0.1", "localhost", "::1"):
        with listening_socket(address, 0) as listener:
            assert listener.getsockname()[0] in ("127.0.0.1", "::1")


def test_an_own_name_that_leads_to_loopback_is_bound_to_all(monkeypatch: pytest.MonkeyPatch):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with listening_socket("node07", 0) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"
