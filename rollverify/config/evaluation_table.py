"""Table [evaluation]: the test set during training, and `python -m rollverify.evaluate`.

It does not say which problems are used; `[data]` does.
"""

from dataclasses import dataclass
from typing import Annotated

from rollverify.config.setting import Range, Table


@dataclass(kw_only=True, slots=True, frozen=True)
class EvaluationConfig(Table):
    """Accuracy on the test set, before and after training and in between, or on its own."""

    enable: bool = True
    """Whether training evaluates at all."""
    every_steps: Annotated[int, Range(ge=0)] = 0
    """Steps between evaluations; 0 evaluates only before and after training."""
    num_problems: Annotated[int, Range(ge=1)] = 256
    """Test problems used, from the start of the file; fewer if the file has fewer."""
    samples_per_problem: Annotated[int, Range(ge=1)] = 8
    """Responses sampled per problem for the mean accuracy; a greedy one is scored beside them."""
    temperature: Annotated[float, Range(gt=0, le=2)] = 1.0
    """Temperature of the sampled responses."""
    top_p: Annotated[float, Range(gt=0, le=1)] = 1.0
    """Probability mass that the sampled responses are drawn from; 1 is the full distribution."""
    baseline: str = ""
    """Model folder that `rollverify.evaluate` compares the model with; "" compares with none."""
    output: str = ""
    """Folder of `rollverify.evaluate`; "" names one in run.output_dir after what is evaluated."""
    save_responses: bool = True
    """Whether the records of `rollverify.evaluate` hold the text of every response."""
    contamination_ngram: Annotated[int, Range(ge=0)] = 13
    """Words in a row that a test and a training problem must not share; 0 checks nothing."""
