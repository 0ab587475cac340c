"""The launcher with torchrun and gloo: ports, first cause, nothing left behind (PX01, PX03)."""

import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from support.launch_workers import FAMILY, guarded, start_launcher, wait_for, wait_until_gone

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Starts the launcher with stand-in workers in a folder of their own."""
    return partial(start_launcher, tmp_path)


GLOO = r"""
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(value)
os.write(1, b"sum %d\n" % value.item())
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("ranks", "runs"), [(1, 8), (2, 3)])
def test_launches_at_once_do_not_clash(ranks: int, runs: int, start: Start) -> None:
    """PX03: each run forms its own group; 1 rank sums to 1, 2 ranks to 1 + 2 = 3."""
    children = [start(GLOO, ranks=ranks) for _ in range(runs)]
    expected = f"sum {1 if ranks == 1 else 3}\n" * ranks
    for child in children:
        out, err = child.communicate(timeout=120)
        assert (child.returncode, out) == (0, expected), err


@pytest.mark.slow
@pytest.mark.distributed
def test_error_on_one_rank_ends_all_ranks_with_its_cause_last(start: Start) -> None:
    lines = [r"os.write(1, b'%d\n' % rank)", "if rank == 1: raise DataError('broken line 7')"]
    child = start(guarded(*lines, "time.sleep(1000)"), ranks=2)
    begun = time.monotonic()
    out, err = child.communicate(timeout=60)
    assert child.returncode == 2
    assert sorted(out.split()) == ["0", "1"]
    assert err.splitlines()[-1] == "error: rank 1: broken line 7"
    assert time.monotonic() - begun < 40


@pytest.mark.slow
@pytest.mark.distributed
def test_killed_rank_is_the_first_cause_before_what_its_peers_say(start: Start) -> None:
    lines = ["import signal, torch, torch.distributed as dist", "dist.init_process_group('gloo')"]
    lines += [
        "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)",
        "dist.all_reduce(torch.ones(1))",
    ]
    child = start(guarded(*lines, "time.sleep(1000)"), ranks=2)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 1
    assert err.splitlines()[-1].startswith("error: rank 1: the process was ended by SIGKILL")


@pytest.mark.slow
@pytest.mark.distributed
def test_killed_rank_is_the_first_cause_though_a_peer_that_has_reported_does_not_end(
    start: Start,
) -> None:
    """The launcher then ends everything, torchrun too, before torchrun gives up on that peer."""
    killed = "__import__('pathlib').Path(os.environ['ROLLVERIFY_ERROR_DIR'], 'rank-0.json')"
    lines = ["import signal", "if rank == 1:", f"    while not {killed}.exists(): time.sleep(0.01)"]
    lines += ["    os.kill(os.getpid(), signal.SIGKILL)"]
    lines += ["signal.signal(signal.SIGTERM, signal.SIG_IGN)"]
    lines += ["write_rank_error(RuntimeError('connection closed by peer'))"]
    child = start(guarded(*lines, "time.sleep(1000)"), ranks=2)
    _, err = child.communicate(timeout=60)
    assert err.splitlines()[-1].startswith("error: rank 1: the process was ended by SIGKILL")
    assert "rank 0 failed too: RuntimeError: connection closed by peer" in err


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signal_with_two_ranks_leaves_no_process(number: int, start: Start, tmp_path: Path) -> None:
    """PX01 through torchrun, whose ranks have sessions of their own."""
    source = FAMILY.format(before="sys.argv[1] += os.environ['RANK']", after="time.sleep(1000)")
    child = start(source, str(tmp_path / "pids"), ranks=2)
    files = [wait_for(tmp_path / f"pids{rank}", 40) for rank in range(2)]
    pids = [int(word) for text in files for word in text.split()]
    child.send_signal(number)
    child.communicate(timeout=12)
    assert child.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert wait_until_gone(pids, 5.0) == []
