"""Records three steps and is killed right after; used by test_recorder.py, not a test itself.

Argument: the run's folder.
"""

import os
import signal
import sys
from pathlib import Path

from rollverify.hooks import StepState
from rollverify.metrics.recorder import Recorder


def main() -> None:
    recorder = Recorder(
        folder=Path(sys.argv[1]),
        rank=0,
        world_size=1,
        total_steps=10,
        tensorboard=True,
        progress=True,
    )
    for step in (1, 2, 3):
        state = StepState(step=step, policy_version=step - 1)
        state.metrics["rollout/num_tokens"] = 100.0 * step
        state.metrics["train/loss"] = -0.5 * step
        recorder.log(state)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
