"""The test set pass: requests, shares of ranks, arithmetic, and when it is due."""

import threading
from collections.abc import Sequence

import pytest
from support.fakes import EOS, FakeEngine
from unit.evaluation.examples import Answers, encoded, evaluator

from rollverify.evaluation.records import ProblemRecord, ResponseRecord
from rollverify.evaluation.stage import Evaluation
from rollverify.evaluation.summary import summarize
from rollverify.hooks import StepState
from rollverify.metrics.names import is_declared
from rollverify.ranks import Ranks
from rollverify.rewards import Reward
from rollverify.rollout.prompt_queue import EncodedPrompt

# Three problems, a greedy response (sample 0) and two sampled ones each, limit 4 tokens. A
# response is right if it ends with the stop token after 2 tokens or fewer.
STOPS = {"eval/0/0": 2, "eval/0/1": 1, "eval/1/2": 2, "eval/2/0": 3, "eval/2/1": 4}


def grade(ids: list[int]) -> float:
    return float(ids[-1] == EOS and len(ids) <= 2)


def evaluation(
    engine: FakeEngine | None = None,
    problems: Sequence[EncodedPrompt] | None = None,
    reward: Reward | None = None,
    **changes: object,
) -> Evaluation:
    engine = engine or FakeEngine(stop_after=STOPS)
    problems = encoded(3, grade) if problems is None else problems
    return Evaluation(evaluator=evaluator(engine, problems, reward, **changes), last_step=5)


def test_accuracies_by_hand():
    stage = evaluation()
    metrics = stage.run(0)
    expected = {
        "eval/greedy_accuracy": 1 / 3,  # Problem 0; problem 2 stops too late.
        "eval/mean_at_2": 2 / 6,  # 0/1 and 1/2.
        # Shares 1/2, 1/2, 0: variance 1/12, of the mean 1/36; 2/9 / (1/36) = 8 trials, at most 6.
        "eval/mean_at_2_low": 0.0968,
        "eval/mean_at_2_high": 0.7000,
        "eval/pass_at_2": 2 / 3,
        # Sampled lengths: 1, 4; 4, 2; 4, 4. The limit cut 0/2, 1/1 and 2/2; 2/1 stopped at 4.
        "eval/response_tokens_mean": 19 / 6,
        "eval/truncated_frac": 3 / 6,
    }
    assert metrics == pytest.approx(expected, abs=1e-4)
    assert stage.results == {0: metrics}
    assert all(is_declared(key) for key in metrics)


def test_one_response_is_greedy_and_the_others_are_sampled():
    engine = FakeEngine()
    evaluation(engine).run(0)
    assert len(engine.requests) == 9
    for request in engine.requests:
        is_greedy = request.request_id.endswith("/0")
        assert request.temperature == (0.0 if is_greedy else 0.8)
        assert request.top_p == (1.0 if is_greedy else 0.9)
        assert request.max_tokens == 4
    assert len({request.seed for request in engine.requests}) == 9


@pytest.mark.parametrize("world_size", [2, 3, 5, 11])
def test_ranks_together_ask_for_every_response_once_with_the_same_seeds(world_size):
    """DH03: shares of the 9 are disjoint, complete and even, also where a rank gets nothing."""

    def asked(rank: int, size: int) -> list[tuple[str, int, tuple[int, ...]]]:
        engine = FakeEngine()
        ranks = Ranks(rank=rank, size=size)
        evaluation(engine).evaluator.run_share(lambda *_: None, ranks)
        assert len(engine.requests) == len(range(rank, 9, size))
        return [(one.request_id, one.seed, one.token_ids) for one in engine.requests]

    alone = asked(0, 1)
    together = [one for rank in range(world_size) for one in asked(rank, world_size)]
    assert sorted(together) == sorted(alone)


def test_an_evaluation_that_is_stopped_says_nothing_and_is_still_to_be_done():
    engine = FakeEngine(stop_after=STOPS)
    stage = evaluation(engine)
    stage.evaluator.has_stopped = lambda: engine.num_steps == 2
    assert stage.run(4) == {} and stage.results == {} and stage.is_pending
    assert engine.num_steps == 2 and engine.num_unfinished == 0
    stage.evaluator.has_stopped = lambda: False
    assert stage.run(4) == stage.results[4] != {} and not stage.is_pending


def test_two_evaluations_use_the_same_seeds():
    engine = FakeEngine()
    stage = evaluation(engine)
    stage.run(0)
    stage.run(7)
    assert [r.seed for r in engine.requests[:9]] == [r.seed for r in engine.requests[9:]]
    assert list(stage.results) == [0, 7]


@pytest.mark.parametrize(
    ("every_steps", "expected"), [(2, [2, 4, 5]), (5, [5]), (0, [5]), (1, [1, 2, 3, 4, 5])]
)
def test_it_is_due_every_so_many_steps_and_at_the_end(every_steps, expected):
    stage = evaluation(every_steps=every_steps)
    done = []
    for step in range(1, 6):
        state = StepState(step=step, policy_version=step)
        assert stage(state) is None
        if state.metrics:
            done.append(step)
            assert state.metrics == stage.results[step]
    assert done == expected == list(stage.results)


def test_responses_are_graded_by_as_many_threads_as_asked_for():
    """Each grading waits for another one to have begun, so one thread alone would never end."""
    pair = threading.Barrier(2)

    def together(ids: list[int]) -> float:
        pair.wait(timeout=30.0)
        return grade(ids)

    metrics = evaluation(problems=encoded(2, together), reward=Answers(2)).run(0)
    assert metrics == evaluation(problems=encoded(2, grade)).run(0)


# Two problems, five samples each: lengths 1 and 2 are right, 3 and 4 are not.
FIVE = {"eval/0": (1, 2, 3, 3, 3), "eval/1": (4, 1, 4, 1, 2)}


def five_samples(reward: Reward | None = None) -> dict[str, float]:
    stops = {f"{name}/{i}": n for name, ns in FIVE.items() for i, n in enumerate(ns, 1)}
    engine = FakeEngine(stop_after=stops | {"eval/0/0": 1, "eval/1/0": 4})
    return evaluation(engine, encoded(2, grade), reward, samples_per_problem=5).run(0)


def test_pass_at_k_by_hand():
    metrics = five_samples()
    # 2 and 3 of 5 right: without a right one are C(3, 2) and C(2, 2) of C(5, 2) = 10 pairs.
    assert metrics["eval/pass_at_2"] == pytest.approx(1 - (0.3 + 0.1) / 2)
    # C(3, 4) = C(2, 4) = 0
    assert metrics["eval/pass_at_4"] == metrics["eval/pass_at_5"] == 1.0
    assert [key for key in metrics if "maj" in key or "pass_at_1" in key] == []


def test_majorities_by_hand():
    """The length is the answer, and a response of four tokens gives none."""
    metrics = five_samples(Answers(0, lambda text: str(len(text)) if len(text) < 4 else None))
    # Problem 0, first four: 1, 2, 3, 3 -> 3, wrong. All five: 3, wrong.
    # Problem 1, first four: only 1 votes, right. All five: 1, 1, 2 -> 1, right.
    assert (metrics["eval/maj_at_4"], metrics["eval/maj_at_5"]) == (0.5, 0.5)
    assert "eval/maj_at_2" not in metrics  # It would be the mean.
    assert all(is_declared(key) for key in metrics)


def test_the_interval_of_problems_that_agree_counts_problems_only():
    """Both always right: Wilson's 2 trials, low end 1 / (1 + 1.96^2 / 2) = 0.3424."""
    problems = encoded(2, lambda _: 1.0)
    metrics = evaluation(problems=problems, samples_per_problem=3).run(0)
    assert metrics["eval/mean_at_3_low"] == pytest.approx(0.3424, abs=1e-4)
    assert metrics["eval/mean_at_3"] == metrics["eval/mean_at_3_high"] == 1.0


def test_the_numbers_are_those_of_an_evaluation_on_its_own():
    """The same records, summed up by the same functions."""
    metrics = five_samples(Answers(0, lambda text: str(len(text))))
    records = [
        ProblemRecord(
            index=index,
            problem_id="",
            gold="",
            greedy=response(1 if index == 0 else 4),
            sampled=tuple(map(response, FIVE[f"eval/{index}"])),
        )
        for index in range(2)
    ]
    summary = summarize(records, has_answers=True)
    for name in ("pass_at_2", "pass_at_4", "pass_at_5", "maj_at_4", "maj_at_5"):
        assert metrics[f"eval/{name}"] == summary[name].value
    ends = metrics["eval/mean_at_5_low"], metrics["eval/mean_at_5_high"]
    assert ends == summary["avg_at_5"].interval


def response(length: int) -> ResponseRecord:
    right, end = float(length <= 2), "stop"
    return ResponseRecord(
        reward=right, num_tokens=length, finish_reason=end, answer=str(length), text=None
    )
