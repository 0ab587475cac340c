"""Processes are found by the token they inherit, never by name (PX01)."""

import os
import signal
import subprocess

from rollverify.launch.processes import TOKEN_VARIABLE, end_processes, processes_of_run


def test_processes_of_other_runs_are_left_alone() -> None:
    other = subprocess.Popen(["sleep", "60"], env={**os.environ, TOKEN_VARIABLE: "b" * 8})
    mine = subprocess.Popen(["sleep", "60"], env={**os.environ, TOKEN_VARIABLE: "a" * 8})
    try:
        assert processes_of_run("a" * 8) == {mine.pid}
        assert end_processes("a" * 8)
        assert mine.wait(timeout=5) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        for child in (mine, other):
            child.kill()
            child.wait()


def test_descendant_without_the_token_is_found_through_its_parent() -> None:
    shell = "env -u ROLLVERIFY_RUN_TOKEN sleep 60 & echo $!; wait"
    environment = {**os.environ, TOKEN_VARIABLE: "c" * 8}
    parent = subprocess.Popen(["sh", "-c", shell], env=environment, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        assert processes_of_run("c" * 8) == {parent.pid, child}
    finally:
        assert end_processes("c" * 8)
        parent.wait()
        parent.stdout.close()


def test_run_without_processes_is_ended_at_once() -> None:
    assert processes_of_run("d" * 8) == set()
    assert end_processes("d" * 8, patience_s=0.0)
