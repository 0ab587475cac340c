"""How a run goes on: partial or on-policy, and what of a checkpoint may be resumed in it.

Sees `Config`. Does not decide when a run switches: the acceptance window does.
"""

from rollverify.algorithms.switching import AcceptanceWindow
from rollverify.config.schema import Config
from rollverify.rollout.rollouter import Rollouter


def make_window(config: Config) -> AcceptanceWindow:
    """The acceptance window; without `switching.enable` it is never asked."""
    return AcceptanceWindow(
        size=config.switching.window,
        threshold=config.switching.threshold,
        average=config.switching.average,
        reversible=config.switching.reversible,
    )


def scores_unfinished(config: Config) -> bool:
    """Whether the trainer scores what a phase leaves unfinished: to cut, to filter or to measure.

    Only then does routing replay need the experts of unfinished responses from the trainer.
    """
    method, verification = config.method.name, config.verification
    if method == "on_policy":
        return False
    return method == "rollverify" or config.filter.name == "ops" or verification.measure


def set_mode(
    config: Config, rollouter: Rollouter, window: AcceptanceWindow, policy_version: int
) -> None:
    """On-policy by the method or because the run has switched; after a resume, what may go on.

    A run that is resumed as rollverify drops what another method never verified, and one with
    routing replay what has no experts to replay.
    """
    has_switched = config.switching.enable and window.is_on_policy
    rollouter.is_on_policy = config.method.name == "on_policy" or has_switched
    if config.method.name == "rollverify":
        rollouter.drop_older(policy_version, verified=True)
    mode = config.routing_replay.mode
    if mode == "engine":
        rollouter.drop_unrouted(recorded_later=None)
    elif mode == "trainer" and scores_unfinished(config):
        rollouter.drop_unrouted(recorded_later=policy_version)
