"""The front end of an evaluation: which models it starts, what it reports, how it refuses."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.evaluation_inputs import flags_in, model_at
from support.scripted_engine import ScriptedEngine, parts_with

from rollverify.checkpoint.run_folder import write_config
from rollverify.config.load import load_config
from rollverify.data.prompts import Prompt, write_jsonl
from rollverify.evaluate import RESULTS_FILE, job_flags, main, output_folder
from rollverify.evaluation import worker as evaluate_model


class Ranks:
    """Records each model in this process, with texts by the name of the model's folder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, texts: dict[str, str]) -> None:
        self.calls: list[tuple[list[str], bool]] = []
        """Flags of each model and whether the base model may have to be prepared."""
        self._monkeypatch, self._texts = monkeypatch, texts

    def __call__(self, flags: Sequence[str], needs_prepare: bool) -> int:
        self.calls.append((list(flags), needs_prepare))
        name = Path(load_config(flags).config.model.path).name
        engine = ScriptedEngine(default=self._texts[name])
        self._monkeypatch.setitem(sys.modules, "rollverify.engine.start", parts_with(engine))
        return evaluate_model.main(flags)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    """The model `m` answers 00k, the baseline `b` answers 00m."""
    return Ranks(monkeypatch, {"m": "00k\n", "b": "00m\n"})


def results_of(folder: Path) -> dict:
    (file,) = folder.glob(f"out/evaluation/*/{RESULTS_FILE}")
    return json.loads(file.read_text())


def words_of(capsys: pytest.CaptureFixture[str]) -> str:
    """What was printed, without the alignment of tables."""
    return " ".join(capsys.readouterr().out.split())


def message(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a user error."""
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_one_model_is_summed_up(ranks, tmp_path, capsys):
    assert main(flags_in(tmp_path), ranks) == 0
    found = results_of(tmp_path)
    summary = found["summaries"]["model"]
    # It answers 00k; two of the three problems expect that.
    assert summary["greedy_accuracy"]["value"] == pytest.approx(2 / 3)
    assert summary["avg_at_2"]["value"] == pytest.approx(2 / 3)
    assert (found["num_problems"], found["settings"]["temperature"]) == (3, 1.0)
    assert found["contamination"]["overlapping"] == 0 and "changes" not in found
    out = words_of(capsys)
    assert "greedy accuracy 66.7 %" in out and "contamination: 0 of 3 problems" in out


def test_two_models_are_compared(ranks, tmp_path, capsys):
    flags = [*flags_in(tmp_path), "--evaluation.baseline", str(model_at(tmp_path / "b"))]
    assert main(flags, ranks) == 0
    change = results_of(tmp_path)["changes"]["greedy_accuracy"]
    # The baseline is right on the second problem only: 2 / 3 - 1 / 3.
    assert change["difference"] == pytest.approx(1 / 3)
    assert (change["problems_better"], change["problems_worse"]) == (2, 1)
    assert "greedy accuracy 33.3 % 66.7 % +33.3" in words_of(capsys)
    assert [load_config(one).config.model.path for one, _ in ranks.calls] == [
        str(tmp_path / "m"),
        str(tmp_path / "b"),
    ]


def test_the_report_is_kept(ranks, tmp_path, capsys):
    main(flags_in(tmp_path), ranks)
    (file,) = tmp_path.glob("out/evaluation/*/report.txt")
    assert file.read_text() == capsys.readouterr().out


def test_the_same_command_uses_the_same_folder_and_another_one_does_not(tmp_path):
    flags = flags_in(tmp_path)
    folders = {
        output_folder(load_config([*flags, *more]).config)
        for more in ([], [], ["--evaluation.top-p", "0.7"], ["--evaluation.num-problems", "2"])
    }
    assert len(folders) == 3


def test_a_failed_model_ends_the_evaluation_with_its_code(tmp_path):
    flags = [*flags_in(tmp_path), "--evaluation.baseline", str(model_at(tmp_path / "b"))]
    calls = []
    assert main(flags, lambda *one: calls.append(one) or 130) == 130
    assert len(calls) == 1


def test_only_the_built_in_model_is_prepared(tmp_path):
    calls = []
    words = ["--run.output-dir", str(tmp_path), "--prepare.cache-dir", str(tmp_path)]
    main(words, lambda _, needs_prepare: calls.append(needs_prepare) or 1)
    main(flags_in(tmp_path), lambda _, needs_prepare: calls.append(needs_prepare) or 1)
    assert calls == [True, False]


def test_overlap_with_the_training_problems_is_reported(ranks, tmp_path, capsys):
    flags = flags_in(tmp_path)
    train = [Prompt(prompt_id="t0", text="D01w\n", answer="0")]  # Problem q1.
    write_jsonl(tmp_path / "train.jsonl", train)
    assert main(flags, ranks) == 0
    found = results_of(tmp_path)["contamination"]
    assert [(one["test_id"], one["train_id"]) for one in found["overlaps"]] == [("q1", "t0")]
    # Without q1, the one that the model gets wrong, all are right.
    assert found["without_overlapping"]["model"]["avg_at_2"]["value"] == 1.0
    assert "1 of 3 problems" in capsys.readouterr().out


def test_a_check_that_is_off_is_said_to_be_off(ranks, tmp_path, capsys):
    assert main([*flags_in(tmp_path), "--evaluation.contamination-ngram", "0"], ranks) == 0
    assert results_of(tmp_path)["contamination"] is None
    assert "contamination: not checked (evaluation.contamination_ngram = 0)" in words_of(capsys)


def test_a_bad_training_file_is_found_before_anything_is_generated(ranks, tmp_path, capsys):
    flags = flags_in(tmp_path)
    (tmp_path / "train.jsonl").write_text("no JSON")
    assert main(flags, ranks) == 2
    assert "train.jsonl:1: not valid JSON" in message(capsys) and ranks.calls == []


def test_without_training_problems_nothing_is_checked(ranks, tmp_path, capsys):
    flags = flags_in(tmp_path)
    at = flags.index("--data.train")
    assert main(flags[:at] + flags[at + 2 :], ranks) == 0
    assert "contamination: not checked (data.train is not set)" in words_of(capsys)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run, from `b` to the exported model."""
    folder = tmp_path / "runs" / "one"
    model_at(folder / "model")
    (folder / "checkpoints").mkdir()
    flags = [*flags_in(tmp_path), "--model.path", str(model_at(tmp_path / "b"))]
    write_config(folder, load_config(flags).config)
    return folder


def test_a_run_stands_for_its_model_against_its_start(run, tmp_path):
    config = load_config(job_flags(["--run", str(run), "--evaluation.top-p", "0.7"])).config
    assert config.model.path == str(run / "model")
    assert config.evaluation.baseline == str(tmp_path / "b")
    assert config.evaluation.top_p == 0.7
    assert config.data.test == str(tmp_path / "test.jsonl")


@pytest.mark.parametrize("words", [["--run"], ["--run", "--evaluation.top-p", "0.7"]])
def test_a_run_without_a_folder_is_the_newest(run, words):
    flags = job_flags([*words, "--run.output-dir", str(run.parent)])
    assert load_config(flags).config.model.path == str(run / "model")


def test_a_run_can_be_compared_with_another_baseline(run, tmp_path):
    other = ["--evaluation.baseline", str(tmp_path / "m")]
    assert load_config(job_flags([f"--run={run}", *other])).config.evaluation.baseline == other[1]


def test_an_unfinished_run_is_refused(run, capsys):
    (run / "model").rename(run / "elsewhere")
    assert main(["--run", str(run)]) == 2
    assert "holds no exported model; finish the run" in message(capsys)


def test_a_folder_that_is_no_run_is_refused(tmp_path, capsys):
    assert main(["--run", str(tmp_path)]) == 2
    assert "holds no config.toml; give a run folder" in message(capsys)
    assert main(["--run", str(tmp_path / "none")]) == 2
    assert "--run: " in (line := message(capsys)) and "is not a folder; give a run folder" in line


def test_where_no_run_is_found_the_flag_is_named(tmp_path, capsys):
    assert main(["--run", "--run.output-dir", str(tmp_path)]) == 2
    line = message(capsys)
    assert "--run: no run with checkpoints below" in line and "--resume" not in line


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_an_incomplete_baseline_is_found_before_anything_is_generated(
    ranks, tmp_path, capsys, name
):
    baseline = model_at(tmp_path / "b")
    (baseline / name).unlink()
    assert main([*flags_in(tmp_path), "--evaluation.baseline", str(baseline)], ranks) == 2
    wanted = name.replace("model.", "*.")
    assert f"evaluation.baseline '{baseline}' holds no {wanted}" in message(capsys)
    assert ranks.calls == []


def test_the_report_says_what_was_measured(ranks, tmp_path, capsys):
    """A table of the first two of three problems must not pass for one of all."""
    flags = flags_in(tmp_path)
    assert main([*flags, "--evaluation.num-problems", "2", "--evaluation.top-p", "0.7"], ranks) == 0
    words = words_of(capsys)
    assert (
        f"2 problems of {tmp_path / 'test.jsonl'}, the most that evaluation.num_problems" in words
    )
    assert "2 samples each at temperature 1.0 and top-p 0.7" in words
    assert main(flags, ranks) == 0
    assert "evaluation.num_problems" not in words_of(capsys)


@pytest.mark.parametrize(
    ("flags", "want"),
    [
        (["--resume"], "goes on when the same command is given again"),
        (["--evaluation.baseline", "nowhere"], "evaluation.baseline 'nowhere' is not a folder"),
        (["--evaluation.top-p", "0"], "evaluation.top_p must be greater than 0, got 0"),
        (["--evaluation.tpo-p", "0.5"], "unknown flag"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(capsys, flags, want):
    assert main(flags) == 2
    assert want in (line := message(capsys)) and line.startswith("error: ")


def test_models_recorded_on_different_problems_are_not_compared(ranks, tmp_path, capsys):
    flags = [*flags_in(tmp_path), "--evaluation.baseline", str(model_at(tmp_path / "b"))]

    def changing(words: Sequence[str], needs_prepare: bool) -> int:
        code = ranks(words, needs_prepare)
        flags_in(tmp_path, ("00k", "00m", "00n"))
        return code

    assert main(flags, changing) == 2
    assert "have been evaluated on different problems" in capsys.readouterr().err
