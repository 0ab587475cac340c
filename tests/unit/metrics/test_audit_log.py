"""The audit log: one line per cut, on rank 0, and each step once whatever happens."""

import json

import pytest

from rollverify.metrics.json_lines import CUTS_FILE, AuditLog


def cuts_in(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / CUTS_FILE).read_text().splitlines()]


def test_a_cut_is_on_disk_as_soon_as_it_is_written(tmp_path):
    log = AuditLog(tmp_path, rank=0)
    log.write(1, [{"group_id": 4, "ops": 0.5}, {"group_id": 5, "ops": 2.0}])
    log.write(2, [])
    assert cuts_in(tmp_path) == [
        {"step": 1, "group_id": 4, "ops": 0.5},
        {"step": 1, "group_id": 5, "ops": 2.0},
    ]
    log.close()
    log.close()


def test_a_resumed_run_writes_each_step_once(tmp_path):
    """Killed after step 3, resumed from the checkpoint of step 1: steps 2 and 3 run again."""
    killed = AuditLog(tmp_path, rank=0)
    for step in (1, 2, 3):
        killed.write(step, [{"group_id": step, "run": 1}])
    resumed = AuditLog(tmp_path, rank=0, resume_step=1)
    resumed.write(2, [{"group_id": 2, "run": 2}])
    assert [(cut["step"], cut["run"]) for cut in cuts_in(tmp_path)] == [(1, 1), (2, 2)]


def test_a_torn_line_is_dropped(tmp_path):
    AuditLog(tmp_path, rank=0).write(1, [{"group_id": 4}])
    with (tmp_path / CUTS_FILE).open("a") as file:
        file.write('{"step": 1, "gro')
    AuditLog(tmp_path, rank=0, resume_step=5)
    assert cuts_in(tmp_path) == [{"step": 1, "group_id": 4}]


def test_steps_without_a_cut_are_not_missed(tmp_path, caplog):
    AuditLog(tmp_path, rank=0, resume_step=3)
    assert "lacks" not in caplog.text


def test_a_new_run_starts_with_an_empty_file(tmp_path):
    AuditLog(tmp_path / "run", rank=0)
    assert cuts_in(tmp_path / "run") == []


def test_other_ranks_write_nothing(tmp_path):
    log = AuditLog(tmp_path, rank=1)
    log.write(1, [{"group_id": 4}])
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_a_value_that_json_cannot_hold_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        AuditLog(tmp_path, rank=0).write(1, [{"ops": float("nan")}])
