"""Packed rows: alignment, completeness, limits, and the same number of rows on every rank."""

import json
from dataclasses import MISSING, fields

import pytest
import torch
from support.fakes import trajectory
from unit.training import packing_worker
from unit.training.packing_worker import MAX_TOKENS, SHARES, one_step

from rollverify.engine.model_folder import RoutingShape
from rollverify.errors import RolloutError
from rollverify.losses.inputs import RowInputs
from rollverify.ranks import Ranks
from rollverify.rollout.trajectory import ROUTING, num_fed_tokens, num_tokens
from rollverify.training.packing import (
    equalize_rows,
    filler_rows,
    pack_for_scoring,
    pack_trajectories,
    response_values,
    trajectory_values,
)


def test_every_column_is_aligned_with_the_token_that_follows():
    """logp[t] is that of R[t] given P and R[:t]: it lies where the token before R[t] is fed."""
    one = trajectory([7, 8], [5, 6], logprobs=[-0.25, -0.5])
    (row,) = pack_trajectories([one], torch.tensor([2.0]), 16)
    assert row.tokens.tolist() == [7, 8, 5]  # The last token is never fed.
    assert row.targets.tolist() == [8, 5, 6]
    assert row.positions.tolist() == [0, 1, 2]
    assert row.loss.loss_mask.tolist() == [False, True, True]
    assert row.loss.behavior_logprobs.tolist() == [0.0, -0.25, -0.5]
    assert row.loss.advantages.tolist() == [2.0, 2.0, 2.0]
    assert row.sequence_ids.tolist() == [0, 0, 0]


def test_trajectories_of_a_row_do_not_run_into_each_other():
    two = [trajectory([1], [2, 3], logprobs=[-1.0, -2.0]), trajectory([4, 5], [6], logprobs=[-3.0])]
    (row,) = pack_trajectories(two, torch.tensor([1.0, -1.0]), 16)
    assert row.tokens.tolist() == [1, 2, 4, 5]
    assert row.targets.tolist() == [2, 3, 5, 6]  # 4 is nobody's target, 3 and 6 are never fed.
    assert row.positions.tolist() == [0, 1, 0, 1]
    assert row.loss.loss_mask.tolist() == [True, True, False, True]
    assert row.loss.behavior_logprobs.tolist() == [-1.0, -2.0, 0.0, -3.0]
    assert row.loss.advantages.tolist() == [1.0, 1.0, -1.0, -1.0]
    assert row.sequence_ids.tolist() == [0, 0, 1, 1]


def test_tokens_that_a_trajectory_leaves_out_of_the_loss_stay_out():
    one = trajectory([7], [5, 6, 4])
    one["loss_mask"] = torch.tensor([False, True, True])
    (row,) = pack_trajectories([one], torch.ones(1), 16)
    assert row.loss.loss_mask.tolist() == [False, True, True]
    assert row.targets[row.loss.loss_mask].tolist() == [6, 4]


def test_every_trajectory_lies_in_exactly_one_row():
    sizes = [3, 9, 1, 6, 6, 2]
    made = [trajectory([1, 2], list(range(size))) for size in sizes]
    rows = pack_trajectories(made, torch.arange(6.0), 10)
    for index, one in enumerate(made):
        inside = [int((row.sequence_ids == index).sum()) for row in rows]
        assert sorted(inside)[:-1] == [0] * (len(rows) - 1)
        assert max(inside) == num_tokens(one) - 1
    assert sum(int(row.loss.loss_mask.sum()) for row in rows) == sum(sizes)
    assert all(len(row.tokens) <= 10 for row in rows)


def test_ages_are_counted_from_the_version_that_is_trained():
    one = trajectory([7], [5, 6, 4])
    one["policy_version"] = torch.tensor([2, 2, 5], dtype=torch.int32)
    (row,) = pack_trajectories([one], torch.ones(1), 16, policy_version=5)
    assert row.loss.ages.tolist() == [3, 3, 0]


def test_a_filler_has_no_loss_and_belongs_to_no_trajectory():
    (filler,) = filler_rows(1)
    names = [field.name for field in fields(RowInputs) if field.default is MISSING]
    names.remove("num_sequences")
    assert [len(getattr(filler.loss, name)) for name in names] == [1] * 6
    for name in ("tokens", "positions", "targets", "sequence_ids"):
        assert getattr(filler, name).shape == (1,)
    assert not filler.loss.loss_mask.any()
    assert filler.sequence_ids.tolist() == [-1]
    (row,) = pack_trajectories([trajectory([1], [2])], torch.zeros(1), 8)
    for name in names:
        assert getattr(filler.loss, name).dtype == getattr(row.loss, name).dtype


def test_rows_of_experts_lie_where_their_tokens_are_fed():
    """RR01: 3 prompt and 4 response tokens have 6 rows and feed 6 tokens, whatever lies before."""
    pair = [trajectory([7], [5, 6], sample=0), trajectory([1, 2, 3], [4, 5, 6, 7], sample=1)]
    for number, one in enumerate(pair):
        ids = 10 * number + torch.arange(num_fed_tokens(one))
        one[ROUTING] = ids.byte()[:, None, None]
    for packed in (
        pack_trajectories(pair, torch.zeros(2), 64, with_routing=True),
        pack_for_scoring(pair, 64, with_routing=True),
    ):
        (row,) = packed
        assert row.routed_experts is not None
        assert row.tokens.tolist() == [7, 5, 1, 2, 3, 4, 5, 6]
        assert row.routed_experts.flatten().tolist() == [0, 1, 10, 11, 12, 13, 14, 15]


def test_experts_are_packed_only_on_demand_and_never_made_up():
    one = trajectory([7], [5, 6])
    (row,) = pack_trajectories([one], torch.zeros(1), 8)
    assert row.routed_experts is None
    with pytest.raises(RolloutError, match="0 rows of expert ids for 2 tokens"):
        pack_trajectories([one], torch.zeros(1), 8, with_routing=True)


def test_values_of_fed_tokens_come_back_per_trajectory():
    """Responses of 2, 0 and 1 tokens after prompts of 2: 3, none and 2 fed tokens."""
    batch = [trajectory([7, 8], [5, 6]), trajectory([7, 8], []), trajectory([7, 8], [4])]
    rows = [*pack_for_scoring(batch, 3), *filler_rows(1)]
    found = trajectory_values(rows, [row.tokens for row in rows], len(batch))
    assert [None if one is None else one.tolist() for one in found] == [[7, 8, 5], None, [7, 8]]


def test_fillers_spread_over_the_experts():
    """RR05: E=4, k=2, 4 rows: each expert twice, and none twice in one row."""
    fillers = filler_rows(4, RoutingShape(num_layers=3, experts_per_token=2, num_experts=4))
    experts = [row.routed_experts for row in fillers]
    assert [one.shape for one in experts] == [(1, 3, 2)] * 4
    for layer in range(3):
        ids = torch.cat([one[0, layer] for one in experts])
        assert ids.bincount(minlength=4).tolist() == [2, 2, 2, 2]
        assert all(len(set(one[0, layer].tolist())) == 2 for one in experts)


def test_a_rank_that_lacks_no_row_gets_no_filler_with_experts_either():
    assert filler_rows(0, RoutingShape(num_layers=3, experts_per_token=2, num_experts=4)) == []


def test_filler_experts_beyond_255_fit_their_type():
    """RR09: with 512 experts, filler 150 goes to 300 and 301."""
    fillers = filler_rows(151, RoutingShape(num_layers=1, experts_per_token=2, num_experts=512))
    assert fillers[150].routed_experts.flatten().tolist() == [300, 301]


def test_one_process_gets_a_filler_only_if_it_has_no_row():
    rows = pack_trajectories([trajectory([1], [2])], torch.zeros(1), 8)
    assert equalize_rows(rows, Ranks()) == rows
    (only,) = equalize_rows([], Ranks())
    assert not only.loss.loss_mask.any()


@pytest.mark.distributed
def test_ranks_with_fewer_rows_add_fillers_and_the_step_is_the_same(run_gloo_workers):
    """DH01: budget 8, lengths [8, 8, 8] and [4, 4]: 3 rows on both ranks, loss as without fillers.

    DH03 too: 5 trajectories on 2 ranks give the gradient of 5 trajectories on one.
    """
    folder = run_gloo_workers(packing_worker.main, 2)
    alone = one_step(SHARES[0] + SHARES[1], None)
    for rank in range(2):
        result = json.loads((folder / f"{rank}.json").read_text())
        assert result["num_rows"] == 3
        assert result["metrics"]["train/num_micro_batches"] == 3
        assert result["metrics"]["train/loss"] == pytest.approx(alone["metrics"]["train/loss"])
        assert result["metrics"]["train/num_tokens"] == 3 * 7 + 2 * 3
        assert result["gradient"] == pytest.approx(alone["gradient"], abs=1e-7)
    assert MAX_TOKENS == 8
    assert max(map(abs, alone["gradient"])) > 0.01


def test_a_rank_that_ran_fillers_only_has_no_values():
    """Its rows belong to no trajectory, and it has none."""
    fillers = filler_rows(2)
    values = [torch.zeros(len(row.tokens)) for row in fillers]
    assert response_values(fillers, values, []).shape == (0,)
