"""Group advantages: hand-worked values, groups without signal, and any order of groups."""

import pytest
import torch
from unit.losses.correction_reference import has_signal as reference_has_signal
from unit.losses.correction_reference import leave_one_out
from unit.losses.loss_examples import OVERLONG_EXAMPLES

from rollverify.losses.advantages import (
    count_zero_signal_groups,
    group_advantages,
    has_signal,
    overlong_penalty,
)


def one_group(*rewards: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(rewards, dtype=torch.float32), torch.zeros(len(rewards), dtype=torch.int64)


def test_pair_is_divided_by_its_sample_deviation():
    # mean 0, sum of squares 2, n - 1 = 1: std 1.414214; 1 / 1.414215 = 0.707106.
    advantages = group_advantages(*one_group(1.0, -1.0), std="unbiased")
    assert advantages.dtype == torch.float32
    assert advantages.tolist() == pytest.approx([0.707106, -0.707106], abs=1e-6)


def test_pair_is_divided_by_its_population_deviation():
    # mean 0, sum of squares 2, n = 2: std 1; 1 / 1.000001 = 0.999999.
    advantages = group_advantages(*one_group(1.0, -1.0), std="population")
    assert advantages.tolist() == pytest.approx([0.999999, -0.999999], abs=1e-6)


def test_a_small_deviation_is_not_divided_by_alone():
    # Mean 1e-6, std 1e-6: 1e-6 / (1e-6 + 1e-6).
    advantages = group_advantages(*one_group(2e-6, 0.0), std="population")
    assert advantages.tolist() == pytest.approx([0.5, -0.5], abs=1e-6)


def test_none_only_centres():
    assert group_advantages(*one_group(1.0, -1.0), std="none").tolist() == [1.0, -1.0]


def test_eight_rewards_are_divided_by_their_sample_deviation():
    # mean -0.25; squares 3 * 1.5625 + 5 * 0.5625 = 7.5; std sqrt(7.5 / 7) = 1.035098;
    # 1.25 / 1.035099 = 1.207614 and -0.75 / 1.035099 = -0.724568.
    advantages = group_advantages(*one_group(1, 1, 1, -1, -1, -1, -1, -1))
    assert advantages.tolist() == pytest.approx([1.207614] * 3 + [-0.724568] * 5, abs=1e-6)


@pytest.mark.parametrize(
    ("std", "expected"),
    [
        ("population", [1.732051] + [-0.577350] * 3),  # 0.75 / sqrt(0.75 / 4)
        ("unbiased", [1.5] + [-0.5] * 3),  # 0.75 / sqrt(0.75 / 3)
        ("none", [0.75] + [-0.25] * 3),
    ],
)
def test_ad05_the_config_names_the_deviation(std, expected):
    # The 1e-6 in the divisor moves 1.732051 by 4e-6.
    advantages = group_advantages(*one_group(1.0, 0.0, 0.0, 0.0), std=std)
    assert advantages.tolist() == pytest.approx(expected, abs=5e-6)


@pytest.mark.parametrize("std", ["unbiased", "population", "none"])
def test_ad01_equal_rewards_give_exactly_zero(std):
    rewards = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    group_ids = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    assert group_advantages(rewards, group_ids, std=std).tolist() == [0.0] * 8
    assert count_zero_signal_groups(rewards, group_ids) == 2


def test_ad01_equal_rewards_whose_mean_is_rounded_give_exactly_zero():
    # In float64 (0.1 + 0.1 + 0.1) / 3 is not 0.1, so a deviation of 1e-17 would be left.
    rewards = torch.full((3,), 0.1, dtype=torch.float64)
    assert (rewards.sum() / 3 - 0.1).item() != 0.0
    group_ids = torch.zeros(3, dtype=torch.int64)
    assert group_advantages(rewards, group_ids, std="none").tolist() == [0.0] * 3
    assert count_zero_signal_groups(rewards, group_ids) == 1


@pytest.mark.parametrize("std", ["unbiased", "population", "none"])
def test_ad03_a_group_of_one_gives_zero(std):
    assert group_advantages(*one_group(5.0), std=std).tolist() == [0.0]
    assert count_zero_signal_groups(*one_group(5.0)) == 1


def test_groups_may_be_interleaved_and_their_ids_arbitrary():
    # Group 900: (1, 0), std 0.707107: +-0.707106. Group -3: (2, 2). Group 7: (3, 1): +-0.707106.
    rewards = torch.tensor([1.0, 2.0, 3.0, 0.0, 1.0, 2.0])
    group_ids = torch.tensor([900, -3, 7, 900, 7, -3])
    advantages = group_advantages(rewards, group_ids)
    expected = [0.707106, 0.0, 0.707106, -0.707106, -0.707106, 0.0]
    assert advantages.tolist() == pytest.approx(expected, abs=1e-6)
    assert count_zero_signal_groups(rewards, group_ids) == 1


@pytest.mark.parametrize("std", ["unbiased", "population"])
def test_random_groups_agree_with_a_loop(std):
    generator = torch.Generator().manual_seed(5)
    rewards = torch.rand(64, generator=generator, dtype=torch.float64)
    group_ids = torch.randint(0, 9, (64,), generator=generator)
    advantages = group_advantages(rewards, group_ids, std=std)
    for group in group_ids.unique():
        own = rewards[group_ids == group]
        deviation = own.std(correction=1 if std == "unbiased" else 0)
        expected = (own - own.mean()) / (deviation + 1e-6)
        torch.testing.assert_close(advantages[group_ids == group], expected.float())


def test_nothing_gives_nothing():
    nothing = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    assert group_advantages(*nothing).shape == (0,)
    assert count_zero_signal_groups(*nothing) == 0


def test_a_reward_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="reward 1 is nan; a reward must be finite"):
        group_advantages(*one_group(0.0, torch.nan))


def test_leave_one_out_compares_with_the_mean_of_the_others():
    # 1 - 0 = 1 for the right one, 0 - 1/3 for each of the others: 4/3 of the centred rewards.
    advantages = group_advantages(
        *one_group(1.0, 0.0, 0.0, 0.0), std="none", baseline="leave_one_out"
    )
    assert advantages.tolist() == pytest.approx([1.0] + [-1 / 3] * 3, abs=1e-6)


def test_leave_one_out_of_groups_of_other_sizes():
    # Group 0: 2 and 0 -> +-2. Group 1: one alone -> 0. Group 2: equal -> 0.
    rewards = torch.tensor([2.0, 0.0, 5.0, 3.0, 3.0])
    groups = torch.tensor([0, 0, 1, 2, 2])
    advantages = group_advantages(rewards, groups, std="none", baseline="leave_one_out")
    assert advantages.tolist() == [2.0, -2.0, 0.0, 0.0, 0.0]


def test_leave_one_out_is_that_of_the_transcription():
    rewards = [0.3, 1.0, -0.5, 2.0, 0.0]
    found = group_advantages(*one_group(*rewards), std="none", baseline="leave_one_out")
    assert found.tolist() == pytest.approx(leave_one_out(rewards), abs=1e-6)


@pytest.mark.parametrize("num_right", range(5))
def test_a_group_has_signal_unless_all_or_none_are_right(num_right):
    rewards = torch.tensor([1.0] * num_right + [0.0] * (4 - num_right))
    assert has_signal(rewards) == reference_has_signal(num_right, 4) == (num_right not in (0, 4))


def test_one_response_or_none_has_no_signal():
    assert not has_signal(torch.tensor([1.0])) and not has_signal(torch.zeros(0))


@pytest.mark.parametrize(
    ("tokens", "penalty"), [*OVERLONG_EXAMPLES, (0, 0.0), (16385, -1 / 4096), (30000, -1.0)]
)
def test_the_penalty_grows_over_the_last_tokens(tokens, penalty):
    found = overlong_penalty(torch.tensor([tokens]), max_tokens=20480, buffer_tokens=4096)
    assert found.tolist() == pytest.approx([penalty], abs=1e-7)
    doubled = overlong_penalty(
        torch.tensor([tokens]), max_tokens=20480, buffer_tokens=4096, factor=2.0
    )
    assert doubled.tolist() == pytest.approx([2 * penalty], abs=1e-7)
