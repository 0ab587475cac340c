"""Where prompts and tokens are after each step, and what is noticed when one goes missing."""

import pytest
from support.fakes import FakeEngine
from support.rollout_parts import Parts, make_parts

from rollverify.errors import LedgerError
from rollverify.hooks import StepState
from rollverify.metrics.names import is_declared
from rollverify.rollout.accounting import Accounting
from rollverify.rollout.ledger import PromptState


def parts_and_hook() -> tuple[Parts, Accounting]:
    """Groups 0, 2, ... end after 4 tokens, the others after 25; two per step, two in flight."""
    lengths = {f"{g}/0": 25 if g % 2 else 4 for g in range(20)}
    parts = make_parts(FakeEngine(stop_after=lengths))
    return parts, Accounting(rollouter=parts.rollouter)


def run_step(parts: Parts, hook: Accounting, version: int, cut: int | None = None) -> StepState:
    """One step; `cut` leaves so many tokens of the unfinished trajectory."""
    state = StepState(step=version + 1, policy_version=version)
    state.finished, state.unfinished = parts.collect(version)
    hook.after_train(state)
    if cut is not None:
        parts.buffer.truncate(state.unfinished[0], cut)
    hook(state)
    return state


def test_counts_of_a_step_by_hand():
    parts, hook = parts_and_hook()
    # 8 ticks: groups 0 and 2 of 4 tokens each are trained on, group 1 has 8 tokens, 3 are cut.
    metrics = run_step(parts, hook, 0, cut=5).metrics
    assert {key: num for key, num in metrics.items() if num} == {
        "ledger/trained": 2,
        "ledger/paused": 1,
        "tokens/generated": 16,
        "tokens/trained": 8,
        "tokens/cut": 3,
        "tokens/held": 5,
        "rollout/tokens_to_regenerate": 3,
        "progress/num_prompts": 3,
    }
    assert all(is_declared(key) for key in metrics)


def test_tokens_to_regenerate_are_those_of_the_step():
    parts, hook = parts_and_hook()
    run_step(parts, hook, 0, cut=5)
    metrics = run_step(parts, hook, 1).metrics
    assert metrics["tokens/cut"] == 3 and metrics["rollout/tokens_to_regenerate"] == 0


def test_a_token_that_vanished_is_noticed():
    parts, hook = parts_and_hook()
    state = run_step(parts, hook, 0)
    one = state.unfinished[0]
    one["response_ids"] = one["response_ids"][:-1]
    with pytest.raises(LedgerError, match="holds 7 tokens and counted 8"):
        hook(state)


def test_a_group_that_vanished_is_noticed():
    parts, hook = parts_and_hook()
    state = run_step(parts, hook, 0)
    del parts.ledger._live[1]
    with pytest.raises(LedgerError, match="holds 2 groups"):
        hook(state)


def test_moves_between_ranks_must_add_up_to_nothing():
    parts, hook = parts_and_hook()
    state = run_step(parts, hook, 0)
    parts.buffer.pop_group(1, "moved")
    parts.ledger.release(1)
    with pytest.raises(LedgerError, match=r"step 1: moves between ranks.*'groups': -1"):
        hook(state)


def test_a_group_that_only_the_ledger_knows_is_noticed():
    parts, hook = parts_and_hook()
    state = run_step(parts, hook, 0)
    parts.buffer.pop_group(1, "dropped")
    with pytest.raises(LedgerError, match="ledger, buffer and queue do not agree on group 1"):
        hook(state)


def test_a_prompt_that_left_the_queue_is_noticed():
    parts, hook = parts_and_hook()
    run_step(parts, hook, 0)
    parts.rollouter.set_on_policy(True)
    state = StepState(step=2, policy_version=1)
    hook(state)
    assert state.metrics["ledger/pending"] == 1 and state.metrics["tokens/dropped"] == 8
    assert state.metrics["rollout/tokens_to_regenerate"] == 8
    parts.queue.draw()
    with pytest.raises(LedgerError, match="do not agree on group 1"):
        hook(state)


def test_a_group_left_running_is_noticed():
    parts, hook = parts_and_hook()
    state = run_step(parts, hook, 0)
    parts.ledger.move(1, PromptState.RUNNING)
    with pytest.raises(LedgerError, match="do not agree on group 1"):
        hook(state)
