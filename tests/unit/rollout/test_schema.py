"""The trajectory's keys, types and lengths, and the messages that name what is wrong."""

import pytest
import torch
from support.fakes import trajectory
from tensordict import TensorDict

from rollverify.rollout.trajectory import (
    FIELDS,
    Status,
    name_of,
    new_trajectory,
    num_tokens,
    stacked,
    validate_trajectory,
)


def begun(prompt: list[int], *, group: int = 3, sample: int = 2) -> TensorDict:
    return new_trajectory(prompt_ids=prompt, group_id=group, prompt_index=8, sample_index=sample)


def test_a_new_trajectory_has_a_prompt_and_nothing_else_yet():
    """PR15: no token, no segment, unfinished, and valid."""
    made = begun([7, 8])
    assert set(made.keys()) == set(FIELDS)
    assert made["prompt_ids"].tolist() == [7, 8]
    per_token = [key for key, field in FIELDS.items() if field.per == "response"]
    assert {key: len(made[key]) for key in per_token} == dict.fromkeys(per_token, 0)
    singles = {key: made[key].item() for key, field in FIELDS.items() if not field.per}
    assert singles == {
        "reward": 0.0,
        "status": Status.UNFINISHED,
        "group_id": 3,
        "prompt_index": 8,
        "sample_index": 2,
        "seed": 0,
        "num_requests": 0,
        "verified_version": -1,
    }


def test_a_sample_that_came_back_does_not_repeat_its_sampling_streams():
    made = new_trajectory(
        prompt_ids=[1], group_id=0, prompt_index=0, sample_index=0, num_requests=4
    )
    assert int(made["num_requests"]) == 4


def test_a_trajectory_is_named_by_group_and_sample():
    assert name_of(begun([1], group=12, sample=5)) == "group 12 sample 5"


@pytest.mark.parametrize("key", list(FIELDS))
def test_a_missing_key_is_named(key):
    broken = trajectory([1], [2])
    del broken[key]
    with pytest.raises(ValueError, match=rf"lacks \['{key}'\]"):
        validate_trajectory(broken)


def test_an_unknown_key_is_named():
    broken = trajectory([1], [2]).set("other_logprobs", torch.zeros(1))
    with pytest.raises(ValueError, match="unknown \\['other_logprobs'\\]"):
        validate_trajectory(broken)


@pytest.mark.parametrize("key", list(FIELDS))
def test_a_wrong_type_is_named_with_group_and_sample(key):
    broken = trajectory([1], [2], group=5, sample=3)
    broken[key] = broken[key].to(torch.float64)
    with pytest.raises(ValueError, match=rf"group 5 sample 3: {key} must be torch\.\w+, got"):
        validate_trajectory(broken)


@pytest.mark.parametrize("key", [key for key, field in FIELDS.items() if field.per == "response"])
def test_per_token_values_must_be_as_long_as_the_response(key):
    """LP07: ids and log-probs of different lengths are refused, not shifted."""
    broken = trajectory([1], [2, 3])
    longer = torch.cat([broken[key], broken[key][:1]])
    broken[key] = longer
    with pytest.raises(ValueError, match="has shape"):
        validate_trajectory(broken)


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
def test_log_probs_of_the_engine_must_be_finite(value):
    broken = trajectory([1], [2, 3], group=2)
    broken["behavior_logprobs"][1] = value
    with pytest.raises(ValueError, match=r"group 2 sample 0: behavior_logprobs.*not finite"):
        validate_trajectory(broken)


def test_log_probs_of_the_trainer_may_be_unknown():
    made = trajectory([1], [2, 3])
    assert made["anchor_logprobs"].isnan().all()
    validate_trajectory(made)


def test_an_empty_prompt_is_refused_and_an_empty_response_is_not():
    with pytest.raises(ValueError, match="group 3 sample 2: the prompt is empty"):
        begun([])
    assert num_tokens(trajectory([1, 2], [])) == 2


@pytest.mark.parametrize("lengths", [[5], [5, 5], [5, 3]])
def test_trajectories_keep_their_own_lengths_whatever_the_others_have(lengths):
    """TD01: nothing is padded and nothing depends on all shapes being equal."""
    made = [trajectory([1], list(range(size))) for size in lengths]
    assert [len(one["response_ids"]) for one in made] == lengths
    assert [num_tokens(one) for one in made] == [size + 1 for size in lengths]
    assert {type(one["response_ids"]) for one in made} == {torch.Tensor}


def test_stacked_keeps_order_and_type():
    made = [trajectory([1], [2], reward=reward, group=7) for reward in (0.5, 0.0, 1.0)]
    assert torch.equal(stacked(made, "reward"), torch.tensor([0.5, 0.0, 1.0]))
    assert torch.equal(stacked(made, "group_id"), torch.tensor([7, 7, 7]))
    assert stacked([], "group_id").dtype == torch.int64
