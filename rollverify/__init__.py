"""RollVerify: reinforcement learning with verified partial rollouts. Importing it does nothing."""

__version__ = "0.1.0"
