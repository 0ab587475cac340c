"""The slot log: one line per phase, on rank 0, and each step once whatever happens."""

import json

from rollverify.metrics.json_lines import SLOTS_FILE, SlotLog


def lines_in(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / SLOTS_FILE).read_text().splitlines()]


def test_a_phase_is_on_disk_as_soon_as_it_is_written(tmp_path):
    log = SlotLog(tmp_path, rank=0)
    log.write(1, [{"active": [8, 3], "lengths": [4, 5]}])
    log.write(2, [{"active": [], "lengths": []}])
    assert lines_in(tmp_path) == [
        {"step": 1, "active": [8, 3], "lengths": [4, 5]},
        {"step": 2, "active": [], "lengths": []},
    ]
    log.close()
    log.close()


def test_a_resumed_run_writes_each_step_once(tmp_path):
    """Killed after step 3, resumed from the checkpoint of step 1: steps 2 and 3 run again."""
    killed = SlotLog(tmp_path, rank=0)
    for step in (1, 2, 3):
        killed.write(step, [{"active": [step]}])
    resumed = SlotLog(tmp_path, rank=0, resume_step=1)
    resumed.write(2, [{"active": [20]}])
    assert [(line["step"], line["active"]) for line in lines_in(tmp_path)] == [(1, [1]), (2, [20])]


def test_a_resume_without_the_file_is_warned_of(tmp_path, caplog):
    SlotLog(tmp_path, rank=0, resume_step=3)
    assert "slots.jsonl lacks 3 of the 3 steps so far" in caplog.text


def test_other_ranks_write_nothing(tmp_path):
    log = SlotLog(tmp_path, rank=1)
    log.write(1, [{"active": [8], "lengths": [4]}])
    log.close()
    assert list(tmp_path.iterdir()) == []
