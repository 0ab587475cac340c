"""Periodic checkpoints. Runs last at AFTER_WEIGHT_SYNC: a checkpoint holds a whole step."""

from collections.abc import Callable

from rollverify.state import StepState


class Checkpointing:
    """Hook: saves every so many steps and after the last one."""

    def __init__(self, *, save: Callable[[int], None], every_steps: int, last_step: int) -> None:
        """Set up.

        Args:
            save: writes the checkpoint of a step; collective.
            every_steps: steps between checkpoints; 0 never saves.
            last_step: saved in any case, unless `every_steps` is 0.
        """
        self._save = save
        self._every_steps = every_steps
        self._last_step = last_step
        self.saved_step = 0
        """Newest step saved by this process; 0 for none."""

    def __call__(self, state: StepState) -> None:
        """Save when it is due. Collective: yes, over the world."""
        if not self._every_steps:
            return
        if state.step % self._every_steps == 0 or state.step == self._last_step:
            self.save(state.step)

    def save(self, step: int) -> None:
        """Save now, unless this step is saved. Collective: yes, over the world."""
        if step != self.saved_step:
            self._save(step)
            self.saved_step = step
