"""An evaluation on its own with a real engine: the numbers of training, also when interrupted.

One engine serves all tests. Its random model answers nothing right, so a made-up reward grades.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.engine_pair import MAX_NUM_SEQS, tiny_engine
from support.scripted_engine import parts_with
from support.tiny_models import tiny_folder

from rollverify.config.load import load_config
from rollverify.config.tables import EvaluationConfig
from rollverify.data.prompts import Prompt, write_jsonl
from rollverify.engine.model_folder import read_model_folder
from rollverify.evaluation.evaluator import Evaluator
from rollverify.evaluation.records import RECORDS_FILE, ProblemRecord, RecordFile, read_records
from rollverify.evaluation.stage import Evaluation
from rollverify.evaluation.summary import summarize
from rollverify.evaluation.worker import evaluate_model
from rollverify.rewards import BUILT_IN, ExactAnswer
from rollverify.rollout.inputs import load_encoded
from rollverify.toy.tokenizer import EOS_ID, save_tokenizer

pytestmark = pytest.mark.vllm

NUM_PROBLEMS = 7
NUM_SAMPLES = 4
MAX_RESPONSE_TOKENS = 40


class EvenLength(ExactAnswer):
    """Right about half of the time, and different for responses that differ."""

    def __call__(self, prompt: Prompt, response_text: str) -> float:
        return float(len(response_text) % 2 == 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model over the characters of the built-in task, and its problems."""
    root = tmp_path_factory.mktemp("evaluate")
    tiny_folder(root / "model", vocab_size=80, max_position_embeddings=512, initializer_range=0.1)
    save_tokenizer(root / "model")
    prompts = [
        Prompt(prompt_id=f"q{number}", text="ABCDEFG"[: number + 1], answer="0")
        for number in range(NUM_PROBLEMS)
    ]
    write_jsonl(root / "test.jsonl", prompts)
    return root


@pytest.fixture(scope="module")
def started(folder: Path) -> Iterator[Any]:
    made = tiny_engine(folder / "model", stop_token_ids=(EOS_ID,))
    yield made
    made.close()


@pytest.fixture
def engine(started: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The shared engine as a new one would be, and as what an evaluation starts."""
    started.reset_prefix_cache()
    monkeypatch.setattr(started, "close", lambda: None)
    monkeypatch.setitem(sys.modules, "rollverify.engine.start", parts_with(started))
    monkeypatch.setitem(BUILT_IN, "exact_answer", EvenLength)
    return started


def evaluate(folder: Path, output: Path, **changes: Any) -> dict[int, ProblemRecord]:
    """Records of an evaluation."""
    values = {
        "model.path": folder / "model",
        "data.test": folder / "test.jsonl",
        "rollout.max_response_tokens": MAX_RESPONSE_TOKENS,
        "engine.max_num_seqs": MAX_NUM_SEQS,
        "evaluation.samples_per_problem": NUM_SAMPLES,
        "evaluation.temperature": 0.9,
        "evaluation.output": output,
    } | changes
    flags = [word for key, value in values.items() for word in (f"--{key}", str(value))]
    evaluate_model(load_config(flags).config)
    return read_records(output / RECORDS_FILE)[1]


def test_the_numbers_are_those_of_training(engine, folder, tmp_path):
    found = summarize(list(evaluate(folder, tmp_path).values()), has_answers=False)
    model = read_model_folder(folder / "model", 512)
    _, encoded = load_encoded(folder / "test.jsonl", model, 32, EvenLength())
    engine.reset_prefix_cache()
    evaluator = Evaluator(
        engine=engine,
        problems=encoded,
        settings=EvaluationConfig(samples_per_problem=NUM_SAMPLES, temperature=0.9),
        reward=EvenLength(),
        decode=model.decode,
        max_response_tokens=MAX_RESPONSE_TOKENS,
        run_seed=0,
    )
    got = Evaluation(evaluator=evaluator, last_step=1).run(0)
    got["eval/avg_at_4"] = got["eval/mean_at_4"]  # Greedy, pass@2 and @4, length and truncation too
    common = {name: got[f"eval/{name}"] for name in found if f"eval/{name}" in got}
    assert common == pytest.approx({name: found[name].value for name in common})
    assert len(common) == 6
    assert 0 < found["avg_at_4"].value < 1 and 0 < found["truncated_frac"].value < 1


def test_an_interrupted_evaluation_ends_with_the_same_records(
    engine, folder, tmp_path, monkeypatch
):
    whole = evaluate(folder, tmp_path / "whole")
    append = RecordFile.append

    def stopping(records: RecordFile, record: ProblemRecord) -> None:
        append(records, record)
        if len(records.done) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RecordFile, "append", stopping)
        evaluate(folder, tmp_path / "parts")
    assert len(read_records(tmp_path / "parts" / RECORDS_FILE)[1]) == 3
    engine.pause()  # In a process of its own the engine would have ended with it.
    engine.reset_prefix_cache()
    assert evaluate(folder, tmp_path / "parts") == whole


def test_a_tiny_top_p_samples_what_is_most_likely(engine, folder, tmp_path):
    records = evaluate(folder, tmp_path, **{"evaluation.top_p": 1e-6})
    for record in records.values():
        assert {one.text for one in record.sampled} == {record.greedy.text}
