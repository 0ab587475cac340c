"""The evaluation of a config has votes where its reward offers answers; no engine is started."""

from types import SimpleNamespace
from typing import Any

import pytest
from support.fakes import FakeEngine

from rollverify.build import make_evaluation
from rollverify.config.load import load_config
from rollverify.ranks import Ranks
from rollverify.rewards import ExactAnswer, exact_answer
from rollverify.rollout.prompt_queue import EncodedPrompt


def metrics_of() -> dict[str, float]:
    """Of one problem whose four samples are right and say the same."""
    config = load_config(["--evaluation.samples-per-problem", "4"]).config
    model: Any = SimpleNamespace(decode=lambda _: "00k\n")
    problem = EncodedPrompt(token_ids=(5,), grade=lambda _: 1.0, prompt_index=0)
    engine = FakeEngine(stop_after={f"eval/0/{sample}": 3 for sample in range(5)})
    return make_evaluation(config, model, engine, [problem], Ranks(), exact_answer).run(0)


def test_a_reward_with_answers_is_voted_on() -> None:
    assert metrics_of()["eval/maj_at_4"] == 1.0


def test_a_reward_without_answers_has_no_votes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ExactAnswer, "has_answers", False)
    metrics = metrics_of()
    assert [key for key in metrics if "maj" in key] == []
    assert metrics["eval/pass_at_4"] == 1.0
