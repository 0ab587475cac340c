"""Groups without signal are given up and replaced, in both modes, up to a limit.

A response's reward is its length here, so a group has a signal if its lengths differ.
"""

import pytest
import torch
from support.fakes import FakeEngine
from support.rollout_parts import Parts, make_parts, names

from rollverify.config.tables import DynamicSamplingConfig
from rollverify.errors import EngineFailedError, NoSignalError, exit_code
from rollverify.rollout.dynamic_sampling import GivenUp
from rollverify.rollout.trajectory import is_finished, stacked


def differ(rewards: torch.Tensor) -> bool:
    return bool((rewards != rewards[0]).any())


def rule(
    max_given_up: int = 100, at_cap: str = "stop", prompts_per_step: int = 2
) -> DynamicSamplingConfig:
    return DynamicSamplingConfig(
        enable=True,
        max_dropped_batches=max_given_up / prompts_per_step,
        at_cap=at_cap,  # type: ignore[arg-type]
    )


def groups(silent: set[int], count: int = 60) -> FakeEngine:
    """Groups of two: 3 and 3 tokens where silent, else 2 and 4."""
    return FakeEngine(
        stop_after={
            f"{g}/{s}": 3 if g in silent else 2 + 2 * s for g in range(count) for s in range(2)
        }
    )


def sampling(engine: FakeEngine, settings: DynamicSamplingConfig | None = None, **changes) -> Parts:
    """On-policy phases of two groups of two unless changed."""
    options = {"group_size": 2, "is_on_policy": True, "num_in_flight": 6} | changes
    return make_parts(engine, dynamic_sampling=settings or rule(), **options)


def trained(parts: Parts, version: int = 0) -> list[int]:
    """Groups of F_k, each whole; the books are checked."""
    finished, _ = parts.collect(version)
    parts.rollouter.mark_trained()
    parts.check()
    found = [group for group, _ in names(finished)]
    assert found[::2] == found[1::2]
    return found[::2]


def test_as_many_groups_are_drawn_as_were_given_up():
    """On-policy: 0, 1 -> 0 has none; 2 -> none; 3 has one. Next step: 4 and 5."""
    parts = sampling(groups(silent={0, 2}))
    assert trained(parts, 0) == [1, 3]
    assert parts.rollouter.given_up == GivenUp(num_groups=2, num_trajectories=4, reward=12.0)
    assert [r.request_id for r in parts.engine.requests[::2]] == ["0/0", "1/0", "2/0", "3/0"]
    assert trained(parts, 1) == [4, 5]
    assert parts.rollouter.given_up == GivenUp()
    assert parts.ledger.counts()["filtered"] == 2 and parts.ledger.counts()["trained"] == 4
    counts = parts.buffer.counts
    # 6 tokens a group, with signal or without.
    assert (counts.generated, counts.trained, counts.filtered) == (36, 24, 12)


def test_rounds_of_one_phase_are_counted_together():
    parts = sampling(groups(silent={0, 2}))
    trained(parts)
    stats = parts.rollouter.stats
    # Rounds of 4, 2 and 2 requests; the longest response of each has 4, 3 and 4 tokens.
    assert (stats.num_steps, stats.num_started, stats.num_tokens) == (4 + 3 + 4, 8, 24)
    assert stats.capacity == 11 * 4


def test_a_batch_with_signal_draws_nothing_more():
    with_rule, without = (
        sampling(groups(set())),
        make_parts(groups(set()), group_size=2, is_on_policy=True),
    )
    for version in range(3):
        assert trained(with_rule, version) == trained(without, version)
    assert with_rule.engine.requests == without.engine.requests
    assert without.rollouter.given_up is None


def test_without_a_rule_groups_without_signal_are_trained_on():
    parts = make_parts(groups({0, 1}), group_size=2, is_on_policy=True)
    assert trained(parts) == [0, 1]


@pytest.mark.parametrize("in_flight", [2, 5, 12])
@pytest.mark.parametrize("is_on_policy", [True, False])
def test_every_batch_is_full_and_every_group_accounted_for(is_on_policy, in_flight):
    """Two of three groups have no signal; nothing of them is left to be scored."""
    silent = {g for g in range(200) if g % 3}
    parts = sampling(
        groups(silent, 200), is_on_policy=is_on_policy, num_in_flight=in_flight, prompts_per_step=3
    )
    num_given_up = 0
    for version in range(8):
        found = trained(parts, version)
        assert len(found) == 3 and not silent & set(found)
        assert not silent & set(parts.buffer.complete_groups())
        num_given_up += parts.rollouter.given_up.num_groups
    counts = parts.ledger.counts()
    assert counts["filtered"] == num_given_up > 0 and counts["trained"] == 24
    assert parts.ledger.num_added == 24 + num_given_up + len(parts.buffer.group_ids())
    assert parts.buffer.counts.filtered == 6 * num_given_up


def test_a_partial_phase_goes_on_until_enough_groups_have_a_signal():
    parts = sampling(groups({0, 1, 2}), is_on_policy=False, num_in_flight=4)
    finished, unfinished = parts.collect(0)
    # Ticks 1-3: 0 and 1 end. Ticks 4-6: 2 ends, 3/0 too. Tick 7: 3. 4 and 5 follow in its slots.
    assert [g for g, _ in names(finished)[::2]] == [3, 4]
    assert all(not is_finished(t) or int(t["group_id"]) > 4 for t in unfinished)
    assert parts.rollouter.given_up.num_groups == 3


def test_a_group_that_was_cut_is_judged_by_its_new_responses():
    """The third complete group waits with a signal; cut and sampled again it has none."""
    parts = sampling(groups(set()), is_on_policy=False)
    parts.collect(0)
    parts.rollouter.mark_trained()
    waiting = parts.buffer.complete_groups()[0]
    parts.engine.stop_after[f"{waiting}/1"] = 2
    parts.buffer.truncate(parts.buffer.group(waiting)[1], 1)
    assert waiting not in trained(parts, 1)
    assert parts.rollouter.given_up.num_groups == 1 and waiting not in parts.buffer.group_ids()


@pytest.mark.parametrize(("is_on_policy", "num_found"), [(True, 4), (False, 6)])
def test_too_many_groups_without_signal_stop_the_run(is_on_policy, num_found):
    """On-policy rounds end 2 groups at a time, three groups in flight 3 at a time."""
    parts = sampling(groups(set(range(60))), rule(3), is_on_policy=is_on_policy)
    with pytest.raises(NoSignalError) as caught:
        parts.collect(0)
    message = str(caught.value)
    assert f"{num_found} groups without signal in one step, more than the 3" in message
    assert "0 of the 2 groups of a batch have a signal" in message
    assert "mean reward of the others is 3:" in message and "\n" not in message
    assert exit_code(caught.value) == 2
    parts.check()
    assert parts.ledger.counts()["paused"] == len(parts.buffer.group_ids()) >= 4


def test_what_a_stopped_phase_held_counts_when_it_goes_on():
    parts = sampling(groups({0, 1, 2, 3}), rule(3))
    with pytest.raises(NoSignalError):
        parts.collect(0)
    parts.rollouter._choice.dynamic_sampling = rule(4)
    assert trained(parts) == [4, 5]
    assert parts.rollouter.given_up.num_groups == 4


def test_as_many_as_the_limit_are_given_up():
    assert trained(sampling(groups({0, 1, 2}), rule(3))) == [3, 4]
    with pytest.raises(NoSignalError, match=r"1 of the 2 groups"):
        sampling(groups({0, 1, 2}), rule(2)).collect(0)


@pytest.mark.parametrize(
    ("silent", "max_given_up", "expected", "num_given_up"),
    [
        # Rounds 0 1 | 2 3: four without signal are more than 3, the first two are trained on.
        ({0, 1, 2, 3}, 3, [0, 1], 2),
        # Rounds 0 1 | 2 | 3: 1 is trained on whatever it is, 0 beside it, 2 and 3 are given up.
        ({0, 2, 3}, 2, [0, 1], 2),
        ({0, 2}, 2, [1, 3], 2),  # not above the limit
    ],
)
def test_at_the_limit_the_batch_can_be_filled_up(silent, max_given_up, expected, num_given_up):
    parts = sampling(groups(silent), rule(max_given_up, "train"))
    assert trained(parts) == expected
    assert parts.rollouter.given_up.num_groups == num_given_up


def test_a_limit_below_a_batch_still_fills_it_up():
    """Partial, limit 1, batch of 3: after two without signal there is no batch yet."""
    parts = sampling(
        groups(set(range(60))),
        rule(1, "train", prompts_per_step=3),
        is_on_policy=False,
        prompts_per_step=3,
        num_in_flight=2,
    )
    assert trained(parts) == [0, 1, 2]


@pytest.mark.parametrize("is_on_policy", [True, False])
@pytest.mark.parametrize("failing", range(1, 12, 2))
def test_a_phase_that_failed_goes_on_with_the_same_groups(is_on_policy, failing):
    """Two failures of the engine end a phase; run again it gives what it would have given."""
    whole = sampling(groups({0, 2, 4, 5}), is_on_policy=is_on_policy)
    parts = sampling(groups({0, 2, 4, 5}), is_on_policy=is_on_policy)
    parts.engine.fail_at = {failing, failing + 1}
    expected, found = trained(whole), []
    try:
        found = trained(parts)
    except EngineFailedError:
        parts.check()
        found = trained(parts)
    assert found == expected
    assert parts.ledger.counts()["filtered"] == whole.ledger.counts()["filtered"]


def test_the_rule_is_asked_once_per_group_and_phase():
    asked: list[list[float]] = []

    def has_signal(rewards: torch.Tensor) -> bool:
        asked.append(rewards.tolist())
        return differ(rewards)

    parts = sampling(groups({0, 2}), has_signal=has_signal)
    finished, _ = parts.collect(0)
    assert asked == [[3.0, 3.0], [2.0, 4.0], [3.0, 3.0], [2.0, 4.0]]
    assert stacked(finished, "reward").tolist() == [2.0, 4.0, 2.0, 4.0]
