"""When checkpoints are due, and that none is written twice."""

import pytest

from rollverify.stages.checkpointing import Checkpointing
from rollverify.state import StepState


def saved_steps(every_steps: int, last_step: int) -> list[int]:
    saved: list[int] = []
    hook = Checkpointing(save=saved.append, every_steps=every_steps, last_step=last_step)
    for step in range(1, last_step + 1):
        assert hook(StepState(step=step, policy_version=step)) is None
    return saved


@pytest.mark.parametrize(
    ("every_steps", "last_step", "expected"),
    [(2, 5, [2, 4, 5]), (2, 4, [2, 4]), (9, 3, [3]), (1, 3, [1, 2, 3]), (0, 3, [])],
)
def test_a_checkpoint_is_due_every_so_many_steps_and_at_the_end(every_steps, last_step, expected):
    assert saved_steps(every_steps, last_step) == expected


def test_a_stop_right_after_a_due_step_saves_nothing_twice():
    saved: list[int] = []
    hook = Checkpointing(save=saved.append, every_steps=2, last_step=9)
    hook(StepState(step=2, policy_version=2))
    hook.save(2)
    hook.save(3)
    assert saved == [2, 3]
    assert hook.saved_step == 3


def test_a_failed_save_does_not_count_as_saved():
    def full(step: int) -> None:
        raise OSError("disk full")

    hook = Checkpointing(save=full, every_steps=1, last_step=2)
    with pytest.raises(OSError, match="disk full"):
        hook(StepState(step=1, policy_version=1))
    assert hook.saved_step == 0
