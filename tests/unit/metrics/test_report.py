"""The table at the end of a run."""

import json

from rollverify.metrics.recorder import METRICS_FILE
from rollverify.metrics.report import REPORT_FILE, final_report


def write_steps(folder, steps):
    lines = [json.dumps(step) for step in steps]
    (folder / METRICS_FILE).write_text("\n".join(lines) + "\n")


STEP = {
    "time/rollout_s": 6.0,
    "time/train_s": 2.0,
    "time/verify_s": 0.0,
    "time/sync_s": 1.5,
    "time/hook/evaluation_s": 0.5,
    "time/checkpoint_s": 0.25,
    "time/step_s": 10.0,
}
RESULTS = {
    0: {"eval/greedy_accuracy": 0.25, "eval/mean_at_8": 0.2, "eval/truncated_frac": 0.5},
    60: {"eval/greedy_accuracy": 0.75, "eval/mean_at_8": 0.15, "eval/truncated_frac": 0.1},
}


def rows(text: str) -> dict[str, list[str]]:
    """Cells after the first of each table line, by the first."""
    split = [line.split("  ") for line in text.splitlines() if "  " in line]
    return {cells[0]: [cell.strip() for cell in cells[1:] if cell.strip()] for cells in split}


def test_accuracies_before_and_after(tmp_path):
    write_steps(tmp_path, [{"step": 0}, {"step": 60, **STEP}])
    found = rows(final_report(tmp_path, RESULTS, {}))
    assert found["test set"] == ["before", "after step 60", "change"]
    assert found["greedy accuracy"] == ["25.0 %", "75.0 %", "+50.0 points"]
    assert found["mean@8"] == ["20.0 %", "15.0 %", "-5.0 points"]
    assert "truncated frac" not in found


def test_chances_of_all_samples_stand_below_their_mean(tmp_path):
    """Those of fewer samples, and the ends of the interval, are in metrics.jsonl only."""
    more = {"eval/mean_at_8_low": 0.1, "eval/mean_at_8_high": 0.3, "eval/pass_at_2": 0.3}
    more |= {"eval/pass_at_8": 0.5, "eval/maj_at_4": 0.1, "eval/maj_at_8": 0.125}
    write_steps(tmp_path, [{"step": 60, **STEP}])
    results = {0: RESULTS[0] | more, 60: RESULTS[60] | more | {"eval/pass_at_8": 0.75}}
    text = final_report(tmp_path, results, {})
    names = [line.split("  ")[0] for line in text.split("\n\n")[0].splitlines()]
    assert names[2:] == ["greedy accuracy", "mean@8", "pass@8", "maj@8"]
    assert rows(text)["pass@8"] == ["50.0 %", "75.0 %", "+25.0 points"]
    assert rows(text)["maj@8"] == ["12.5 %", "12.5 %", "+0.0 points"]


def test_a_run_begun_without_chances_has_nothing_before(tmp_path):
    write_steps(tmp_path, [{"step": 60, **STEP}])
    last = RESULTS[60] | {"eval/pass_at_8": 0.75}
    found = rows(final_report(tmp_path, {0: RESULTS[0], 60: last}, {}))
    assert found["pass@8"] == ["-", "75.0 %", "-"]
    assert found["mean@8"] == ["20.0 %", "15.0 %", "-5.0 points"]


def test_seconds_add_up_over_steps_and_hooks_leave_the_sync_phase(tmp_path):
    write_steps(
        tmp_path, [{"step": 0, "time/step_s": 99.0}, {"step": 1, **STEP}, {"step": 2, **STEP}]
    )
    found = rows(final_report(tmp_path, RESULTS, {}))
    assert found["rollout"] == ["12.0", "60.0 %"]
    assert found["train"] == ["4.0", "20.0 %"]
    assert found["sync"] == ["2.0", "10.0 %"]  # 2 * (1.5 - 0.5) of 20 s
    assert found["evaluation"] == ["1.0", "5.0 %"]
    assert found["checkpoint"] == ["0.5", "2.5 %"]
    assert found["all"] == ["20.0", "100.0 %"]


def test_the_checkpoint_after_the_last_line_counts(tmp_path):
    write_steps(tmp_path, [{"step": 1, **STEP}])
    found = rows(final_report(tmp_path, {}, {"checkpoint": 2.25}))
    assert found["checkpoint"] == ["2.5", "20.4 %"]  # 0.25 + 2.25 of 10 + 2.25 s
    assert found["all"] == ["12.2", "100.0 %"]


def mismatch(mean: float, largest: float, noise: float, tokens: int) -> dict[str, float]:
    return {
        "mismatch/logprob_abs_mean": mean,
        "mismatch/logprob_abs_max": largest,
        "mismatch/ops_mean": noise,
        "train/num_tokens": tokens,
    }


def test_the_noise_floor_stands_beside_the_segment_threshold(tmp_path):
    first, second = mismatch(0.02, 0.5, 0.03, 100), mismatch(0.04, 0.25, 0.05, 300)
    write_steps(tmp_path, [{"step": 1, **STEP, **first}, {"step": 2, **STEP, **second}])
    found = rows(final_report(tmp_path, {}, {}, 0.01))
    assert found["mean |log ratio|, nats"] == ["0.035"]  # (0.02 * 100 + 0.04 * 300) / 400
    assert found["largest"] == ["0.5"]
    assert found["mean |ratio - 1|, the noise floor of OPS"] == ["0.045"]
    assert found["verification.segment_threshold, d_s"] == ["0.01"]
    assert "verification.segment_threshold, d_s" not in rows(final_report(tmp_path, {}, {}))


def test_tensorboard_is_mentioned_where_it_was_on(tmp_path):
    write_steps(tmp_path, [{"step": 1, **STEP}])
    assert "--logdir" not in final_report(tmp_path, {}, {})
    (tmp_path / "tb").mkdir()
    assert f"(tensorboard --logdir {tmp_path}/tb)" in final_report(tmp_path, {}, {})


def test_the_text_is_printed_and_kept(tmp_path, capsys):
    write_steps(tmp_path, [{"step": 1, **STEP}])
    text = final_report(tmp_path, RESULTS, {})
    assert capsys.readouterr().out == text + "\n"
    assert (tmp_path / REPORT_FILE).read_text() == text + "\n"
    assert str(tmp_path) in text


def test_without_evaluation_there_is_no_accuracy(tmp_path):
    write_steps(tmp_path, [{"step": 1, **STEP}])
    text = final_report(tmp_path, {}, {})
    assert "test set" not in text
    assert rows(text)["all"] == ["10.0", "100.0 %"]


def test_without_a_result_of_the_base_model_nothing_is_called_before(tmp_path):
    write_steps(tmp_path, [{"step": 60, **STEP}])
    found = rows(final_report(tmp_path, {60: RESULTS[60]}, {}))
    assert found["test set"] == ["after step 60"]
    assert found["greedy accuracy"] == ["75.0 %"]


def test_another_number_of_samples_since_a_resume_is_not_compared(tmp_path):
    write_steps(tmp_path, [{"step": 60, **STEP}])
    last = {"eval/greedy_accuracy": 0.5, "eval/mean_at_4": 0.5}
    found = rows(final_report(tmp_path, {0: RESULTS[0], 60: last}, {}))
    assert found["mean@4"] == ["-", "50.0 %", "-"]
    assert found["greedy accuracy"] == ["25.0 %", "50.0 %", "+25.0 points"]


def test_a_run_without_steps_has_a_table(tmp_path):
    write_steps(tmp_path, [{"step": 0}])
    assert rows(final_report(tmp_path, {}, {}))["all"] == ["0.0", "-"]
