"""Periodic checkpoints. No hook: a step is saved when its lines are written, so after all hooks.

Does not decide what a checkpoint holds.
"""

from collections.abc import Callable


class Checkpointing:
    """Saves every so many steps and after the last one, each step once."""

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

    def is_due(self, step: int) -> bool:
        """Whether the step is to be saved; the same on every rank."""
        if not self._every_steps:
            return False
        return step % self._every_steps == 0 or step == self._last_step

    def save(self, step: int) -> None:
        """Save now, unless this step is saved. Collective: yes, over the world."""
        if step != self.saved_step:
            self._save(step)
            self.saved_step = step
