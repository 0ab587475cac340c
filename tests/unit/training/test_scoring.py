"""Scores of responses: by trajectory, at the temperature, without touching the prompts."""

import pytest
import torch
from support.fakes import ScoringTrainer, paused, trajectory

from rollverify.engine.model_folder import RoutingShape
from rollverify.errors import RolloutError
from rollverify.ranks import Ranks
from rollverify.rollout.trajectory import ROUTING, new_trajectory
from rollverify.training.scoring import TrajectoryScorer, check_finite


def scorer(
    trainer: ScoringTrainer, *, max_tokens: int = 64, temperature: float = 1.0
) -> TrajectoryScorer:
    return TrajectoryScorer(
        trainer=trainer,
        micro_batch_tokens=max_tokens,
        temperature=temperature,
        ranks=Ranks(),
    )


def random_trajectories(count: int = 20) -> list:
    """Prompts of 1 to 4 tokens, responses of 0 to 9, ids below 6."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for sample in range(count):
        prompt = int(torch.randint(1, 5, (1,), generator=generator))
        response = int(torch.randint(0, 10, (1,), generator=generator))
        ids = torch.randint(0, 6, (prompt + response,), generator=generator).tolist()
        made.append(trajectory(ids[:prompt], ids[prompt:], sample=sample))
    return made


@pytest.mark.parametrize("max_tokens", [1, 13, 1000])
def test_each_trajectory_gets_the_scores_of_its_own_response(max_tokens):
    """Score t is that of R[t] given everything before it, whatever else is in the row."""
    trainer, batch = ScoringTrainer(), random_trajectories()
    scores = scorer(trainer, max_tokens=max_tokens).score(batch)
    lengths = [len(one["response_ids"]) for one in batch]
    for one, score in zip(batch, scores.split(lengths), strict=True):
        ids = torch.cat([one["prompt_ids"], one["response_ids"]]).tolist()
        expected = trainer.logprobs(ids)[len(one["prompt_ids"]) - 1 :]
        assert score.tolist() == pytest.approx(expected, abs=1e-6)
        assert score.dtype == torch.float32


def test_scores_are_taken_at_the_sampling_temperature():
    trainer, one = ScoringTrainer(), trajectory([0], [1, 2])
    score = scorer(trainer, temperature=0.5).score([one])
    assert score.tolist() == pytest.approx(trainer.logprobs([0, 1, 2], temperature=0.5), abs=1e-6)


def test_empty_responses_cost_nothing():
    """PR15: paused before the first token: a score of no tokens, and nothing packed for it."""
    trainer = ScoringTrainer()
    empty = new_trajectory(prompt_ids=[1], group_id=0, prompt_index=0, sample_index=0)
    scores = scorer(trainer).score([empty, trajectory([1, 2], [3]), empty])
    assert len(scores) == 1
    (row,) = trainer.scored_rows
    assert row.tokens.tolist() == [1, 2]
    assert row.targets.tolist() == [2, 3]
    assert row.sequence_ids.tolist() == [1, 1]


def test_nothing_to_score_runs_no_row():
    trainer = ScoringTrainer()
    empty = new_trajectory(prompt_ids=[1], group_id=0, prompt_index=0, sample_index=0)
    assert len(scorer(trainer).score([])) == 0
    assert len(scorer(trainer).score([empty])) == 0
    assert trainer.scored_rows == []


def test_rows_are_filled_up_to_the_limit():
    trainer = ScoringTrainer()
    # 2 + 3 - 1 = 4 tokens are fed of each: two fit into 9, so 5 need three rows.
    scorer(trainer, max_tokens=9).score([trajectory([1, 2], [3, 4, 5]) for _ in range(5)])
    assert [len(row.tokens) for row in trainer.scored_rows] == [8, 8, 4]
    assert trainer.scored_rows[0].positions.tolist() == [0, 1, 2, 3] * 2


def test_a_value_that_is_not_finite_names_group_sample_and_token():
    batch = [
        paused({0: [-1.0, -1.0]}, group=41, sample=0),
        paused({}, group=41, sample=1),
        paused({0: [-1.0, -1.0, -1.0]}, group=57, sample=3),
    ]
    values = torch.tensor([-1.0, -1.0, -1.0, float("nan"), -1.0])
    with pytest.raises(RolloutError, match=r"group 57 sample 3: anchor .* token 1 is nan, must"):
        check_finite(values, batch, "anchor")
    check_finite(torch.zeros(5), batch, "anchor")


def test_recorded_experts_are_replayed_where_that_is_asked_for():
    trainer, one = ScoringTrainer(), trajectory([1], [2, 3])
    one[ROUTING] = torch.tensor([[[5]], [[6]]], dtype=torch.uint8)
    shape = RoutingShape(num_layers=1, experts_per_token=1, num_experts=8)
    TrajectoryScorer(
        trainer=trainer, micro_batch_tokens=8, temperature=1.0, ranks=Ranks(), routing=shape
    ).score([one])
    scorer(trainer).score([one])
    replayed, native = trainer.scored_rows
    assert replayed.routed_experts.flatten().tolist() == [5, 6]
    assert native.routed_experts is None


def test_the_routers_own_choice_comes_back_per_trajectory():
    """The stand-in routes by position: 0, 1, 2 for 2 + 2 tokens of which 3 are fed."""
    batch = [trajectory([1, 2], [3, 4]), trajectory([1], []), trajectory([1], [2])]
    scores, routes = scorer(ScoringTrainer()).score_and_route(batch)
    assert len(scores) == 3
    assert [None if r is None else r.flatten().tolist() for r in routes] == [[0, 1, 2], None, [0]]


def test_the_trainers_choice_has_the_type_of_the_engines():
    """A run that changes from one to the other joins rows of both: one byte up to 256 experts."""
    shape = RoutingShape(num_layers=1, experts_per_token=1, num_experts=8)
    made = TrajectoryScorer(
        trainer=ScoringTrainer(),
        micro_batch_tokens=8,
        temperature=1.0,
        ranks=Ranks(),
        routing=shape,
    )
    _, (routes,) = made.score_and_route([trajectory([1, 2], [3])])
    assert routes is not None and routes.dtype == torch.uint8
