"""The training program with a kill -9 at one place of one step; tests start it in its stead.

The place "slow" does not kill: engine steps of the rollout take long.

KILL_AT is "<place>:<step>:<rank>"; without it the program runs as it is.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from rollverify import train as program
from rollverify.config.environment import set_defaults

DECODE_STEPS = 2


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _wrap(owner: type, name: str, wrapper: Callable[..., Any]) -> None:
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: wrapper(original, *args, **kwargs))


def _in_rollout(step: int) -> None:
    """After a few engine steps of the phase."""
    from rollverify.rollout.requests import RequestLoop

    def decode(original: Any, loop: Any) -> Any:
        if loop._policy_version == step - 1 and loop.stats.num_steps == DECODE_STEPS:
            _die()
        return original(loop)

    _wrap(RequestLoop, "step", decode)


def _slow_rollout(step: int) -> None:
    """Each engine step of the phase takes a second."""
    from rollverify.rollout.requests import RequestLoop

    def decode(original: Any, loop: Any) -> Any:
        if loop._policy_version == step - 1:
            time.sleep(1.0)
        return original(loop)

    _wrap(RequestLoop, "step", decode)


def _in_train(step: int) -> None:
    """When the weights have changed and nothing else has."""
    from torchtitan_ext.policy_trainer import PolicyTrainer

    def optimizer_step(original: Any, trainer: Any) -> Any:
        result = original(trainer)
        if trainer.step == step:
            _die()
        return result

    _wrap(PolicyTrainer, "optimizer_step", optimizer_step)


def _in_verify(step: int) -> None:
    """When trajectories are cut and the audit log is written."""
    from rollverify.verification.stage import Verification

    def verify(original: Any, stage: Any, state: Any) -> None:
        original(stage, state)
        if state.step == step:
            _die()

    _wrap(Verification, "__call__", verify)


def _in_sync(step: int) -> None:
    """When the engine has new weights and the probe is due."""
    from rollverify.engine.weight_sync import WeightSync

    def probe(original: Any, sync: Any, policy_version: int) -> None:
        if policy_version == step:
            _die()
        original(sync, policy_version)

    _wrap(WeightSync, "_probe", probe)


def _in_checkpoint(step: int) -> None:
    """When every file of the checkpoint is written but the one that makes it complete."""
    from torch.distributed.checkpoint import FileSystemWriter

    def complete(original: Any, writer: Any, *args: Any, **kwargs: Any) -> None:
        if str(writer.path).endswith(f"step-{step}"):
            _die()
        original(writer, *args, **kwargs)

    _wrap(FileSystemWriter, "finish", complete)


def _after_checkpoint(step: int) -> None:
    """When a checkpoint has just become complete."""
    from torch.distributed.checkpoint import FileSystemWriter

    def complete(original: Any, writer: Any, *args: Any, **kwargs: Any) -> None:
        original(writer, *args, **kwargs)
        if str(writer.path).endswith(f"step-{step}"):
            _die()

    _wrap(FileSystemWriter, "finish", complete)


PLACES = {
    "rollout": _in_rollout,
    "slow": _slow_rollout,
    "train": _in_train,
    "verify": _in_verify,
    "sync": _in_sync,
    "checkpoint": _in_checkpoint,
    "saved": _after_checkpoint,
}


def main() -> int:
    set_defaults()
    if "KILL_AT" in os.environ:
        place, step, rank = os.environ["KILL_AT"].split(":")
        if rank == os.environ.get("RANK", "0"):
            PLACES[place](int(step))
    return program.main(sys.argv[1:])


if __name__ == "__main__":
    program.exit_at_once(main())
