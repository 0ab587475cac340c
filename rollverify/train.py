"""The training loop: rollout, train, verify, sync (RollVerify, Section 4.1).

Invariant: at the start of iteration k + 1 trainer and rollout engine both hold policy k; the
trainer moves to k + 1 in phase 2 and the engine follows in phase 4. What runs between the phases is
listed in `build.py`.
"""

import logging
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rollverify.checkpoint.run_folder import resolve
from rollverify.config.environment import set_defaults
from rollverify.errors import EngineFailedError, NoSignalError, RolloutStopped
from rollverify.hooks import HookPoint, StepState
from rollverify.launch.shutdown import die_with_parent, exit_at_once, mark, write_rank_error
from rollverify.log import init_logger

if TYPE_CHECKING:
    from rollverify.build import Run

logger = logging.getLogger(__name__)


def train(run: "Run") -> None:
    """Run the iterations that are left; leaves between two of them when asked to stop."""
    rollouter, trainer, hooks, recorder = run.rollouter, run.trainer, run.hooks, run.recorder
    for step in run.steps():
        state = StepState(step=step, policy_version=step - 1)

        # 1. Rollout: fill F_k under policy k; what is left over is U_k.
        with recorder.phase("rollout", state):
            state.finished, state.unfinished = rollouter.collect(state.policy_version)
            run.engine.sleep()  # The hooks score with the trainer, which needs the memory.
            hooks.run(HookPoint.AFTER_ROLLOUT, state)

        # 2. Train: one optimizer step on F_k; the trainer now holds policy k + 1.
        with recorder.phase("train", state):
            state.metrics |= trainer.train_step(state.finished, state.policy_version)
            state.policy_version += 1
            hooks.run(HookPoint.AFTER_TRAIN, state)

        # 3. Verify: score U_k under policy k + 1 and cut stale suffixes.
        with recorder.phase("verify", state):
            hooks.run(HookPoint.BEFORE_WEIGHT_SYNC, state)

        # 4. Sync: load policy k + 1 into the rollout engine.
        with recorder.phase("sync", state):
            run.weight_sync.push(state.policy_version)
            hooks.run(HookPoint.AFTER_WEIGHT_SYNC, state)

        # Last: a resumed run keeps the lines up to its checkpoint, so they are on disk before it.
        recorder.log(state)
        if run.checkpointing.is_due(step):
            with recorder.phase("checkpoint"):
                run.checkpointing.save(step)


def train_to_end(run: "Run") -> int:
    """Train and finish, return the exit code; a failed rollout first saves what was in flight."""
    try:
        train(run)
    except RolloutStopped as stopped:
        logger.info("%s", stopped)
        return run.finish(in_flight=True)
    except (EngineFailedError, NoSignalError):
        run.save_after_failure()
        raise
    return run.finish()


def main(argv: Sequence[str]) -> int:
    """Build the run of a command line, train, report; return the exit code."""
    die_with_parent()
    mark("begun")
    set_defaults()
    init_logger(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))
    run = None
    try:
        from rollverify.build import build_run

        loaded, resumed = resolve(argv)
        run = build_run(loaded.config, resumed)
        run.start()
        return train_to_end(run)
    except BaseException as error:  # The rank's last line of defence: report, then end.
        if isinstance(error, SystemExit):
            raise
        return write_rank_error(error if run is None else run.pulse.explained(error))
    finally:  # after the report: closing may wait for ranks that have ended
        if run is not None:
            run.close()


if __name__ == "__main__":
    exit_at_once(main(sys.argv[1:]))
