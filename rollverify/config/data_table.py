"""Table [data]: where prompts come from, how they are worded, and their reward.

Rules that join several of its settings are in `data_rules`. Nothing here opens a file or knows the
presets; `rollverify.data` does.
"""

from dataclasses import dataclass, field
from typing import Literal

from rollverify.config.setting import Table


@dataclass(kw_only=True, slots=True, frozen=True)
class DataConfig(Table):
    """Prompts and their reward (docs/data.md)."""

    train: str = ""
    """Training prompts: a preset such as "gsm8k", "gsm8k:FILE", a JSON lines, JSON or Parquet
    file, or a Hugging Face dataset "owner/name"; "" takes the prepared problems."""
    test: str = ""
    """Test prompts, written like `train`; "" takes the prepared problems."""
    train_columns: dict[str, object] = field(default_factory=dict[str, object])
    """Columns of `train` that hold prompt, answer and id, as in { prompt = "question" }."""
    test_columns: dict[str, object] = field(default_factory=dict[str, object])
    """The same for `test`."""
    train_hub: dict[str, object] = field(default_factory=dict[str, object])
    """Subset, split and revision of a Hugging Face dataset in `train`."""
    test_hub: dict[str, object] = field(default_factory=dict[str, object])
    """The same for `test`."""
    answer_format: Literal["auto", "text", "integer", "hashes"] = "auto"
    """text: as it is; integer: a whole number, however it is written; hashes: what stands after
    the last "####", without commas; auto: what the preset says, without one text."""
    template: str = "auto"
    """Wording around the prompt: none, boxed, answer_line, or a text that holds {prompt} once;
    auto: what the preset says, without one none."""
    chat_template: bool = False
    """Whether the prompt then becomes the user's message in the model's own chat template."""
    system_prompt: str = ""
    """System message of the chat template; "" sends none."""
    duplicates: Literal["auto", "keep", "drop"] = "auto"
    """Prompts that occur again: counted, and kept or dropped; auto: what the preset says, without
    one kept."""
    long_prompts: Literal["error", "drop"] = "error"
    """Prompts above rollout.max_prompt_tokens: end the run with an error, or are dropped and
    counted. A prompt is never cut."""
    shuffle: bool = True
    """Whether training prompts are put in a new order, derived from the seed, in each pass."""
    reward: Literal["exact_answer", "math"] = "exact_answer"
    """exact_answer: 1 if the response's last line equals the answer, else 0. math: 1 if its last
    box means the same as the answer, which is LaTeX or a number (docs/rewards.md)."""
