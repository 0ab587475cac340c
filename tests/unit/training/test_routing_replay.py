"""Whose experts the passes of an iteration repeat: the engine's, the trainer's, or nobody's."""

import torch
from support.fakes import ScoringTrainer, trajectory
from tensordict import TensorDict
from torch import Tensor
from unit.training.updates import policy_update

from rollverify.config.tables import KlConfig
from rollverify.losses.objective import Objective
from rollverify.rollout.trajectory import ROUTING


class RememberingTrainer(ScoringTrainer):
    """Keeps the experts that the passes with gradient were given."""

    def __init__(self) -> None:
        super().__init__()
        self.trained: list[Tensor | None] = []

    def forward_backward(self, rows, token_loss, *, temperature):
        self.trained += [row.routed_experts for row in rows]
        return super().forward_backward(rows, token_loss, temperature=temperature)

    @property
    def scored(self) -> list[Tensor | None]:
        """What the passes without gradient were given."""
        return [row.routed_experts for row in self.scored_rows]


def batch() -> list[TensorDict]:
    """Two groups of two responses; the engine sent every token to expert 5."""
    made = []
    for group in range(2):
        for sample in range(2):
            one = trajectory([1, 2], [3, 4], reward=float(sample), group=group, sample=sample)
            one[ROUTING] = torch.full((3, 1, 1), 5, dtype=torch.uint8)
            made.append(one)
    return made


def train(minibatches: int = 1, **changes: object) -> RememberingTrainer:
    trainer = RememberingTrainer()
    policy_update(trainer, micro_batch_tokens=6, minibatches=minibatches, **changes).train_step(
        batch(), 0
    )
    return trainer


def experts(routes: list[Tensor | None]) -> list[list[int]]:
    assert all(one is not None for one in routes)
    return [one.flatten().tolist() for one in routes]


def test_every_pass_repeats_the_engines_choice():
    """R3: 4 responses in two rows of 6 tokens; two minibatches of one row, each scored first."""
    trainer = train(minibatches=2, replay="engine")
    assert experts(trainer.scored) == [[5] * 6] * 2
    assert experts(trainer.trained) == [[5] * 6] * 2


def test_the_trainers_first_pass_is_repeated_by_the_steps_after_it():
    """R2: scored with its own choice, which is the position here, then trained with that."""
    trainer = train(minibatches=2, replay="trainer")
    assert trainer.scored == [None, None]
    assert experts(trainer.trained) == [[0, 1, 2] * 2] * 2


def test_a_single_step_is_its_own_first_pass():
    trainer = train(minibatches=1, replay="trainer")
    assert trainer.scored == []
    assert trainer.trained == [None, None]


def test_without_replay_the_router_chooses_everywhere():
    trainer = train(minibatches=2, replay="off")
    assert trainer.scored + trainer.trained == [None] * 4


def test_a_reference_model_chooses_its_own_experts():
    """Its weights are others; repeating the policy's choice would not give its log-probs."""
    reference = ScoringTrainer()
    objective = Objective(kl=KlConfig(coefficient=0.1))
    trainer = train(replay="engine", reference=reference, objective=objective)
    assert [row.routed_experts for row in reference.scored_rows] == [None, None]
    assert experts(trainer.trained) == [[5] * 6] * 2
