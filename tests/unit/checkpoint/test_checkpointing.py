"""When checkpoints are due, and that none is written twice."""

import pytest

from rollverify.checkpoint.checkpoint import Checkpointing


@pytest.mark.parametrize(
    ("every_steps", "last_step", "expected"),
    [(2, 5, [2, 4, 5]), (2, 4, [2, 4]), (9, 3, [3]), (1, 3, [1, 2, 3]), (0, 3, [])],
)
def test_a_checkpoint_is_due_every_so_many_steps_and_at_the_end(every_steps, last_step, expected):
    saver = Checkpointing(save_step=lambda step: None, every_steps=every_steps, last_step=last_step)
    assert [step for step in range(1, last_step + 1) if saver.is_due(step)] == expected


def test_a_stop_right_after_a_due_step_saves_nothing_twice():
    saved: list[int] = []
    saver = Checkpointing(save_step=saved.append, every_steps=2, last_step=9)
    for step in (2, 2, 3):
        saver.save(step)
    assert saved == [2, 3]
    assert saver.saved_step == 3


def test_a_failed_save_does_not_count_as_saved():
    def full(step: int) -> None:
        raise OSError("disk full")

    saver = Checkpointing(save_step=full, every_steps=1, last_step=2)
    with pytest.raises(OSError, match="disk full"):
        saver.save(1)
    assert saver.saved_step == 0
