"""One of two ranks that test_pulse.py checks; not a test itself."""

import json
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from rollverify.launch import pulse
from rollverify.launch.pulse import Pulse
from rollverify.ranks import Ranks

WAIT_S = 1.0


class Stop(SimpleNamespace):
    """What reaches a rank's StopRequest."""

    def take(self, number: int, *, of_others: bool) -> None:
        assert of_others
        self.signal_number = number


def main(rank: int, world_size: int, folder: Path) -> None:
    pulse.EVERY_S = 0.05
    stop: Any = Stop(signal_number=None)
    phase = "rollout of step 3"
    beating = Pulse(lambda: phase, stop)
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=WAIT_S))
    ranks = Ranks.of(group)
    ranks.largest(1)
    told = ""
    if rank == 0:
        try:
            ranks.largest(2)
        except RuntimeError as error:
            told = str(beating.explained(error))
        assert str(beating.explained(ValueError("other"))) == "other"
        stop.signal_number = 15
    else:
        phase = "verify of step 3"
    deadline = time.monotonic() + 20
    while stop.signal_number is None and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.3)  # The other rank's store is this one's.
    beating.close()
    (folder / f"{rank}.json").write_text(json.dumps([told, stop.signal_number]))
