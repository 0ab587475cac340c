"""Known sets of maths problems: where each lies, its columns, and how its answers are written.

Columns fit the hub's schema and the usual local copies, so that "gsm8k:FILE" needs no more.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from rollverify.data.columns import AnswerFormat, Columns


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """What is known of a set."""

    hub: str
    columns: Columns
    splits: Mapping[str, str]
    """Split for the use as "train" and as "test"."""
    subset: str = ""
    """Configuration on the hub; "" for the only one."""
    answer_format: AnswerFormat = "text"
    drop_duplicates: bool = False
    """Whether the set repeats its problems on purpose."""
    taken_off: str = "none"
    """Template that the set itself has put around its problems; it is taken off."""
    template: str = "boxed"


_TRAIN = {"train": "train", "test": "train"}
_TEST = {"train": "test", "test": "test"}
_BOTH = {"train": "train", "test": "test"}

_PROBLEM = Columns(prompt=("problem",), answer=("answer",), id=("unique_id", "id"))

OWN = Preset(hub="", columns=Columns(), splits=_BOTH, template="none")
"""Stands for a preset where there is none: the project's own columns and no template."""

PRESETS: dict[str, Preset] = {
    "dapo_math_17k": Preset(
        hub="BytedTsinghua-SIA/DAPO-Math-17k",
        columns=Columns(
            prompt=("prompt",), answer=("reward_model.ground_truth",), id=("extra_info.index",)
        ),
        splits=_TRAIN,
        answer_format="integer",
        drop_duplicates=True,  # about 1.8 million rows: each problem a hundred times
        taken_off="answer_line",
    ),
    "deepscaler": Preset(
        hub="agentica-org/DeepScaleR-Preview-Dataset", columns=_PROBLEM, splits=_TRAIN
    ),
    "gsm8k": Preset(
        hub="openai/gsm8k",
        subset="main",
        columns=Columns(prompt=("question",), answer=("answer",), id=("id",)),
        splits=_BOTH,
        answer_format="hashes",
    ),
    "math500": Preset(hub="HuggingFaceH4/MATH-500", columns=_PROBLEM, splits=_TEST),
    "aime24": Preset(
        hub="HuggingFaceH4/aime_2024", columns=_PROBLEM, splits=_TRAIN, answer_format="integer"
    ),
    "aime25": Preset(hub="math-ai/aime25", columns=_PROBLEM, splits=_TEST, answer_format="integer"),
    "amc23": Preset(
        hub="math-ai/amc23",
        columns=Columns(prompt=("question", "problem"), answer=("answer",), id=("id",)),
        splits=_TEST,
        answer_format="integer",
    ),
}
"""Preset by the name it has in `data.train` and `data.test`."""
