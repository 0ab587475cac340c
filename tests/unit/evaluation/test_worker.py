"""The rank that records a model's responses, with a scripted engine in vLLM's place."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.evaluation_inputs import flags_in, model_at
from support.scripted_engine import ScriptedEngine, parts_with

from rollverify.evaluation.records import RECORDS_FILE, ProblemRecord, read_records
from rollverify.evaluation.worker import folder_digest, main


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    """Three problems with the answers 00k, 00m, 00k, two samples each."""
    return [*flags_in(tmp_path), "--evaluation.output", str(tmp_path / "e")]


def record(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], engine: ScriptedEngine
) -> dict[int, ProblemRecord]:
    """Run the rank; returns the records it leaves."""
    monkeypatch.setitem(sys.modules, "rollverify.engine.start", parts_with(engine))
    assert main(flags) == 0
    folder = Path(flags[flags.index("--evaluation.output") + 1])
    return read_records(folder / RECORDS_FILE)[1]


def test_responses_are_graded_and_kept(monkeypatch, flags):
    engine = ScriptedEngine({"eval/0/1": "01c\n00m\n", "eval/0/2": "01c\n00k~"})
    first = record(monkeypatch, flags, engine)[0]
    found = [first.greedy, *first.sampled]
    assert [one.reward for one in found] == [1.0, 0.0, 0.0]
    assert [one.answer for one in found] == ["00k", "00m", None]
    assert [one.num_tokens for one in found] == [5, 9, 7]  # With the stop token unless cut.
    assert [one.finish_reason for one in found] == ["stop", "stop", "length"]
    assert [one.text for one in found] == ["00k\n", "01c\n00m\n", "01c\n00k"]
    assert (first.problem_id, first.gold) == ("q0", "00k") and engine.is_closed


def test_responses_may_be_left_out(monkeypatch, flags):
    found = record(monkeypatch, [*flags, "--evaluation.no-save-responses"], ScriptedEngine())
    assert [one.text for one in (found[1].greedy, *found[1].sampled)] == [None] * 3
    assert found[1].greedy.answer == "00k"


def test_only_so_many_problems_are_used(monkeypatch, flags):
    found = record(monkeypatch, [*flags, "--evaluation.num-problems", "2"], ScriptedEngine())
    assert list(found) == [0, 1]


def test_settings_reach_the_requests(monkeypatch, flags):
    engine = ScriptedEngine()
    words = ["--evaluation.temperature", "0.6", "--evaluation.top-p", "0.7"]
    record(monkeypatch, [*flags, *words, "--rollout.max-response-tokens", "77"], engine)
    assert len(engine.requests) == 3 * (1 + 2)
    assert {one.max_tokens for one in engine.requests} == {77}
    assert {(one.temperature, one.top_p) for one in engine.requests} == {(0.0, 1.0), (0.6, 0.7)}


def test_what_is_recorded_is_not_asked_for_again(monkeypatch, flags):
    whole = record(monkeypatch, flags, ScriptedEngine())
    engine = ScriptedEngine()
    assert record(monkeypatch, flags, engine) == whole and engine.requests == []


def test_a_killed_evaluation_goes_on_with_what_is_missing(monkeypatch, flags, tmp_path):
    """It dies in step 5 of 9: problem 0 is complete after step 3, problem 1 is not."""
    command = [sys.executable, "-m", "support.scripted_engine", "5", *flags]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    killed = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert list(read_records(tmp_path / "e" / RECORDS_FILE)[1]) == [0]
    engine = ScriptedEngine()
    found = record(monkeypatch, flags, engine)
    assert {one.request_id.split("/")[1] for one in engine.requests} == {"1", "2"}
    other = [*flags[:-1], str(tmp_path / "other")]
    assert found == record(monkeypatch, other, ScriptedEngine())


@pytest.mark.parametrize(
    ("more", "want"),
    [
        (["--evaluation.temperature", "0.5"], "temperature: 1.0 there, 0.5 now"),
        (["--run.seed", "7"], "seed: 0 there, 7 now"),
        (["--evaluation.num-problems", "2"], "problems: "),
    ],
)
def test_other_settings_do_not_go_on(monkeypatch, capsys, flags, more, want):
    record(monkeypatch, flags, ScriptedEngine())
    assert main([*flags, *more]) == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith("error: ") and want in err and "set evaluation.output" in err


def test_other_weights_do_not_go_on(monkeypatch, capsys, flags, tmp_path):
    record(monkeypatch, flags, ScriptedEngine())
    (tmp_path / "m" / "model.safetensors").write_bytes(b"\1")
    assert main(flags) == 2
    assert "holds another evaluation (model: " in capsys.readouterr().err


def test_responses_without_a_verdict_are_counted_in_the_log(monkeypatch, flags, caplog):
    counts = {"error": 1, "timeout": 2, "gold_unreadable": 0}
    monkeypatch.setattr("rollverify.rewards.ExactAnswer.take_counts", lambda _: counts)
    record(monkeypatch, flags, ScriptedEngine())
    assert "3 responses count as wrong without a verdict (1 error, 2 timeout)" in caplog.text


def test_the_digest_is_of_the_content(tmp_path):
    first, same = model_at(tmp_path / "a", b"12"), model_at(tmp_path / "b", b"12")
    assert folder_digest(first) == folder_digest(same)
    assert folder_digest(first) != folder_digest(model_at(tmp_path / "c", b"13"))
    config = json.loads((same / "config.json").read_text()) | {"rms_norm_eps": 1e-5}
    (same / "config.json").write_text(json.dumps(config))
    assert folder_digest(first) != folder_digest(same)


def test_a_bad_test_file_is_one_line_and_exit_code_2(capsys, flags, tmp_path):
    (tmp_path / "test.jsonl").write_text('{"prompt": "D01w"}\n')
    assert main(flags) == 2
    assert "test.jsonl:1: key 'answer' is missing" in capsys.readouterr().err
