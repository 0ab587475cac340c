"""Whether a trajectory may go on under a policy version. Changes nothing."""

from collections.abc import Sequence

from tensordict import TensorDict

from rollverify.errors import UnverifiedTrajectoryError
from rollverify.rollout.schema import name_of


def is_current(trajectory: TensorDict, policy_version: int, *, verified: bool) -> bool:
    """Whether nothing in a trajectory is older than the policy now.

    Args:
        trajectory: finished or not.
        policy_version: version now.
        verified: True also takes older tokens that were verified against this version.

    Returns:
        True without tokens.
    """
    versions = trajectory["policy_version"]
    if len(versions) == 0 or int(versions[0]) == policy_version:
        return True
    return verified and int(trajectory["verified_version"]) == policy_version


def check_verified(trajectories: Sequence[TensorDict], policy_version: int) -> None:
    """Make sure that every older token was verified against the policy now.

    Args:
        trajectories: finished ones that wait for their group included.
        policy_version: version now.

    Raises:
        UnverifiedTrajectoryError: naming the first that was not.
    """
    for one in trajectories:
        if not is_current(one, policy_version, verified=True):
            raise UnverifiedTrajectoryError(
                f"{name_of(one)} was last verified against version "
                f"{int(one['verified_version'])}, the policy now is version {policy_version}"
            )
