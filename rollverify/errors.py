"""The exceptions RollVerify raises on purpose, and the exit code each one means.

Every message is one line that names what is wrong, where, and what to change.
"""

USER_ERROR_EXIT_CODE = 2
"""Exit code when the user's config, data or checkpoint is at fault."""

FAILURE_EXIT_CODE = 1
"""Exit code for every other exception."""


class UserError:
    """Marker: the user can cure it; front ends print one line `error: ...` and exit with code 2."""


class RollVerifyError(Exception):
    """Base of every exception that RollVerify raises on purpose."""


class ConfigError(UserError, RollVerifyError, ValueError):
    """A config file, a command line flag, or a combination of settings is not acceptable."""


class DataError(UserError, RollVerifyError, ValueError):
    """A prompt file, a tokenizer or a model folder does not hold what the run needs."""


class CheckpointError(UserError, RollVerifyError, RuntimeError):
    """A checkpoint is missing, incomplete, or belongs to another model or run."""


class RolloutError(RollVerifyError, RuntimeError):
    """The rollout engine returned something that cannot be used."""


class EngineFailedError(RolloutError):
    """The rollout engine failed on some rank, and its retry too; raised on every rank together."""


class RolloutStopped(RollVerifyError, RuntimeError):
    """The run was asked to stop in a rollout, which is paused; on every rank together."""


class TwinsError(RolloutError):
    """Ranks that must hold the same trajectories do not, so the run cannot go on."""


class SilentRankError(RollVerifyError, RuntimeError):
    """Ranks waited too long for another one, which the message names."""


class LedgerError(RollVerifyError, RuntimeError):
    """A prompt or a token was lost or counted twice: a fault in RollVerify, not in the data."""


class RewardError(UserError, RollVerifyError, RuntimeError):
    """A user's own reward raised, ended its process, or returned something else than a number."""


class NoSignalError(UserError, RollVerifyError, RuntimeError):
    """Too few prompts teach the policy anything, so a batch cannot be filled; on every rank."""


class StaleWeightsError(RollVerifyError, RuntimeError):
    """The rollout engine does not hold the trainer's weights (parity probe or version check)."""


class UnverifiedTrajectoryError(RollVerifyError, RuntimeError):
    """An unfinished trajectory was about to be resumed without verification under this policy."""


class WeightSyncError(RollVerifyError, RuntimeError):
    """The transfer of weights to the rollout engine could not be carried out."""


def exit_code(error: BaseException) -> int:
    """Exit code of a front end that ends because of `error`: 2 for user errors, else 1."""
    return USER_ERROR_EXIT_CODE if isinstance(error, UserError) else FAILURE_EXIT_CODE
