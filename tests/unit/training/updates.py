"""A policy update whose settings are one flat list; the tables they belong to are made from it."""

from dataclasses import replace
from typing import Any

from support.fakes import FakeTrainer

from rollverify.config.tables import AdvantageConfig, TrainingConfig
from rollverify.losses.advantages import CreditRule
from rollverify.losses.objective import Objective
from rollverify.ranks import Ranks
from rollverify.training.policy_update import PolicyUpdate

OF_LOSS = ("aggregation", "masked_in_denominator")
OF_TRAINING = ("micro_batch_tokens", "minibatches")


def policy_update(
    trainer: FakeTrainer, objective: Objective | None = None, **settings: Any
) -> PolicyUpdate:
    """Centred advantages, responses of up to 4 tokens and rows of 64, where nothing else is set."""
    objective, every = objective or Objective(), {"micro_batch_tokens": 64} | settings
    credit = CreditRule(settings=AdvantageConfig(std="none"), max_response_tokens=4)
    loss, training = (
        {name: every.pop(name) for name in names if name in every}
        for names in (OF_LOSS, OF_TRAINING)
    )
    return PolicyUpdate(
        trainer=trainer,  # pyright: ignore[reportArgumentType]
        objective=replace(objective, loss=objective.loss.model_copy(update=loss)),
        training=TrainingConfig(**training),
        **({"credit": credit, "temperature": 1.0, "ranks": Ranks()} | every),
    )
