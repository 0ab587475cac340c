"""Anchors: taken once per token, under the version that sampled it, and nowhere else."""

import pytest
import torch
from support.fakes import FakeScorer, ScoringTrainer, paused

from rollverify.errors import RolloutError
from rollverify.hooks import StepState
from rollverify.ranks import Ranks
from rollverify.rollout.trajectory import ROUTING
from rollverify.training.scoring import TrajectoryScorer
from rollverify.verification.scoring import AnchorScoring

NAN = float("nan")


def run(unfinished: list, logprobs: dict) -> FakeScorer:
    scorer = FakeScorer(logprobs)
    AnchorScoring(scorer=scorer)(StepState(step=3, policy_version=2, unfinished=unfinished))
    return scorer


def test_only_tokens_without_an_anchor_get_one():
    """A token that was scored under its own version keeps that score for good."""
    one = paused({1: [-1.0, -2.0], 2: [-3.0]})
    one["anchor_logprobs"] = torch.tensor([-1.5, -2.5, NAN])
    run([one], {(0, 0): [-9.0, -9.0, -3.5]})
    assert one["anchor_logprobs"].tolist() == [-1.5, -2.5, -3.5]
    assert one["behavior_logprobs"].tolist() == [-1.0, -2.0, -3.0]


def test_an_older_token_without_an_anchor_stays_without():
    """Its version is gone: the score now would hide how far the policy has moved since."""
    one = paused({1: [-1.0, -2.0], 2: [-3.0]}, has_anchors=False)
    run([one], {(0, 0): [-9.0, -9.0, -3.5]})
    assert one["anchor_logprobs"].isnan().tolist() == [True, True, False]
    assert one["anchor_logprobs"][2].item() == -3.5


def test_only_trajectories_with_a_new_segment_are_scored():
    done = paused({1: [-1.0]}, sample=0)
    new = paused({2: [-1.0, -2.0]}, sample=1, has_anchors=False)
    empty = paused({}, sample=2)
    other = paused({2: [-4.0]}, group=5, has_anchors=False)
    scorer = run([done, new, empty, other], {(0, 1): [-1.5, -2.5], (5, 0): [-4.5]})
    assert scorer.calls == [[(0, 1), (5, 0)]]
    assert new["anchor_logprobs"].tolist() == [-1.5, -2.5]
    assert other["anchor_logprobs"].tolist() == [-4.5]
    assert done["anchor_logprobs"].tolist() == [-1.0]
    assert empty["anchor_logprobs"].shape == (0,)


def test_a_rank_with_nothing_to_score_takes_part():
    """Scoring is collective: another rank may have something."""
    assert run([paused({1: [-1.0]})], {}).calls == [[]]
    assert run([], {}).calls == [[]]


def test_anchors_do_not_share_memory_with_each_other():
    pair = [paused({2: [-1.0]}, sample=index, has_anchors=False) for index in range(2)]
    run(pair, {(0, 0): [-1.5], (0, 1): [-2.5]})
    storages = {one["anchor_logprobs"].untyped_storage().data_ptr() for one in pair}
    assert len(storages) == 2
    assert pair[0]["anchor_logprobs"].untyped_storage().nbytes() == 4


@pytest.mark.parametrize("bad", [NAN, float("-inf")])
def test_a_score_that_is_not_finite_names_the_trajectory(bad):
    fine = paused({2: [-1.0, -1.0]}, group=8, sample=0, has_anchors=False)
    broken = paused({1: [-1.0], 2: [-1.0, -1.0]}, group=8, sample=5, has_anchors=False)
    with pytest.raises(RolloutError, match="group 8 sample 5: anchor_logprobs of response token 2"):
        run([fine, broken], {(8, 0): [-1.0, -1.0], (8, 5): [-1.0, -1.0, bad]})
    assert broken["anchor_logprobs"].isnan().all()


def test_the_trainers_experts_are_recorded_with_the_anchors():
    """R2: the older token keeps expert 7 of its own pass; the others get those of this one."""
    one = paused({1: [-1.0], 2: [-3.0, -4.0]})
    one["anchor_logprobs"] = torch.tensor([-1.5, NAN, NAN])
    one[ROUTING] = torch.tensor([[[6]], [[7]]], dtype=torch.int16)
    scorer = TrajectoryScorer(
        trainer=ScoringTrainer(vocab_size=9),
        micro_batch_tokens=8,
        temperature=1.0,
        ranks=Ranks(),
    )
    hook = AnchorScoring(scorer=scorer, records_routing=True)
    hook(StepState(step=3, policy_version=2, unfinished=[one]))
    # 2 + 3 tokens, 4 fed; the stand-in's router sends position p to expert p.
    assert one[ROUTING].flatten().tolist() == [6, 7, 2, 3]
    assert one["anchor_logprobs"].isfinite().all()
