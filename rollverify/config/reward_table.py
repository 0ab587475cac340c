"""Table [reward]: limits of rewards that compare answers in worker processes.

Which reward is used is `data.reward`; `exact_answer` needs none of this.
"""

from dataclasses import dataclass
from typing import Annotated

from rollverify.config.setting import Range, Table


@dataclass(kw_only=True, slots=True, frozen=True)
class RewardConfig(Table):
    """Worker processes of `data.reward = "math"`, on every rank."""

    time_out_s: Annotated[float, Range(gt=0, le=3600)] = 5.0
    """Seconds one comparison may take; then the answer scores 0 and is counted as timed out."""
    num_workers: Annotated[int, Range(ge=1)] = 2
    """Processes at most; as many responses are graded at once, while the engine goes on."""
