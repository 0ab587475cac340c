"""The objects of one run on one rank, and what happens before, between and after its iterations."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from rollverify.checkpoint import run_folder
from rollverify.checkpoint.checkpoint import Checkpointing
from rollverify.config.dump import to_json
from rollverify.config.tables import Config
from rollverify.engine.engine import RolloutEngine
from rollverify.engine.weight_sync import WeightSync
from rollverify.evaluation.stage import Evaluation
from rollverify.hooks import HookRegistry, StepState
from rollverify.launch.pulse import Pulse
from rollverify.launch.shutdown import StopRequest
from rollverify.metrics.recorder import Recorder
from rollverify.metrics.report import final_report
from rollverify.ranks import Ranks
from rollverify.rewards import Reward, exact_answer
from rollverify.rollout.rollouter import Rollouter
from rollverify.training.policy_update import PolicyUpdate
from rollverify.verification.window import AcceptanceWindow

if TYPE_CHECKING:
    from torchtitan_ext.policy_trainer import PolicyTrainer

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Run:
    """The objects of one run, on one rank."""

    config: Config
    folder: Path
    rank: int
    policy: "PolicyTrainer"
    rollouter: Rollouter
    trainer: PolicyUpdate
    weight_sync: WeightSync
    hooks: HookRegistry
    recorder: Recorder
    evaluation: Evaluation | None
    checkpointing: Checkpointing
    engine: RolloutEngine
    save_in_flight: Callable[[int], None]
    """Saves a step with what is in flight, even if the step is saved already. Collective."""

    finish_checkpoint: Callable[[], None]
    """Waits for a checkpoint that is written in the background. Collective."""

    export: Callable[[Path], None]
    """Writes the policy as a Hugging Face folder. Collective."""

    stop: StopRequest
    first_step: int = 1
    reward: Reward = exact_answer
    """Closed at the end: it may own processes."""

    def __post_init__(self) -> None:
        """A signal ends a rollout or an evaluation on its way where the step takes too long."""
        self.rollouter.has_stopped = lambda: self.stop.is_urgent
        if self.evaluation is not None:
            self.evaluation.evaluator.has_stopped = self._twins_have_stopped
        self.pulse = Pulse(lambda: self.recorder.current_phase, self.stop)

    def _twins_have_stopped(self) -> bool:
        """Whether to leave an evaluation: twins leave it at the same engine step."""
        return bool(self.rollouter.twins.ranks.largest(int(self.stop.is_urgent)))

    def start(self) -> None:
        """Write the config, push the weights to the engine, measure the base model. Collective.

        The config comes this late so that a refused resume leaves the run's own config alone.
        """
        if self.rank == 0:
            for line in run_folder.changed_settings(self.folder, self.config):
                logger.info("changed since the run began: %s", line)
            run_folder.write_config(self.folder, self.config)
        self.hooks.log_order()
        self.recorder.log_config(to_json(self.config))
        self.weight_sync.push(self.first_step - 1)
        if self.evaluation is None:
            return
        done = self.first_step - 1
        if done == 0:
            state = StepState(step=0, policy_version=0)
            state.metrics |= self.evaluation.run(0)
            self.recorder.log(state)
        elif self.evaluation.is_due(done) and done not in self.evaluation.results:
            self.evaluation.run(done)  # It was stopped on its way.

    def steps(self) -> Iterator[int]:
        """Steps that are left, until one rank was asked to stop. Collective: yes, per step."""
        for step in range(self.first_step, self.config.training.steps + 1):
            if self._stop_agreed():
                logger.info("stopping before step %d", step)
                break
            yield step
            self.policy.step = step

    def _stop_agreed(self) -> bool:
        """Whether some rank got a signal, which is then that of all."""
        number = Ranks.world().largest(self.stop.signal_number or 0)
        if number:
            self.stop.take(number, of_others=True)
        return number > 0

    def finish(self, *, in_flight: bool = False) -> int:
        """Save what was asked for, export, print the table; return the exit code. Collective.

        `in_flight`: a rollout was stopped on its way and has generated something since the step.
        """
        is_evaluated = self.evaluation is None or not self.evaluation.is_pending
        if self.policy.step < self.config.training.steps or not is_evaluated:
            return self._finish_early(in_flight=in_flight)
        self.finish_checkpoint()
        if self.config.checkpoint.export_final:
            self.export(self.folder / "model")
        self.stop.done()
        if self.rank == 0:
            results = self.evaluation.results if self.evaluation else {}
            verifies = self.config.method.name == "rollverify"
            threshold = self.config.verification.segment_threshold if verifies else None
            final_report(self.folder, results, self.recorder.unlogged_s, threshold)
        return 0

    def _finish_early(self, *, in_flight: bool) -> int:
        self._stop_agreed()
        done = self.policy.step
        saves = self.config.checkpoint.save_on_interrupt and done > 0
        if saves:
            (self.save_in_flight if in_flight else self.checkpointing.save)(done)
        self.finish_checkpoint()
        self.stop.done()
        if saves or self.checkpointing.saved_step or self.first_step > 1:
            logger.info("stopped after step %d; go on with --resume %s", done, self.folder)
        else:
            logger.info("stopped after step %d; nothing was saved", done)
        return self.stop.exit_code

    def save_after_failure(self) -> None:
        """Keep what was generated when rollouts cannot go on; the caller raises. Collective.

        The trainer still holds the last step's policy, so this is a checkpoint of that step with
        everything in flight.
        """
        if self.config.checkpoint.every_steps and self.policy.step > 0:
            self.save_in_flight(self.policy.step)
            logger.info("all that was generated is saved; go on with --resume %s", self.folder)

    def __enter__(self) -> "Run":
        """The run itself; it is closed at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Release what the run holds; Ctrl-C does again what it did before."""
        self.close()
        self.stop.close()

    def close(self) -> None:
        """Release engine, files and process group; a failure here never hides an earlier one."""
        self.pulse.close()
        self.reward.close()
        for part in (self.recorder, self.engine, self.policy):
            try:
                part.close()
            except Exception as error:  # Such as a full disk when buffered lines are written.
                logger.warning("%s was not closed: %s", type(part).__name__, error)
        if dist.is_initialized():
            dist.destroy_process_group()


def scores_unfinished(config: Config) -> bool:
    """Whether the trainer scores U_k: to cut, to filter or to measure."""
    method, verification = config.method.name, config.verification
    if method == "on_policy":
        return False
    return method == "rollverify" or config.filter.name == "ops" or verification.measure


def drop_what_may_not_resume(
    config: Config, rollouter: Rollouter, window: AcceptanceWindow, policy_version: int
) -> None:
    """Set the mode; drop what was never verified (rollverify) or has no experts to replay."""
    has_switched = config.switching.enable and window.is_on_policy
    rollouter.is_on_policy = config.method.name == "on_policy" or has_switched
    if config.method.name == "rollverify":
        rollouter.drop_older(policy_version, verified=True)
    mode = config.routing_replay.mode
    if mode == "engine":
        rollouter.drop_unrouted(recorded_later=None)
    elif mode == "trainer" and scores_unfinished(config):
        rollouter.drop_unrouted(recorded_later=policy_version)
