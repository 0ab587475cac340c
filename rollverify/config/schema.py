"""The whole config: one frozen dataclass per TOML table, with every default of the project.

Larger tables are in the other modules of this package named `*_table` and `*_tables`.
Nothing here reads files.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated

from rollverify.config.check import check_rules
from rollverify.config.data_table import DataConfig
from rollverify.config.loss_tables import (
    AdvantageConfig,
    CorrectionConfig,
    KlConfig,
    LossConfig,
)
from rollverify.config.method_tables import (
    FilterConfig,
    MethodConfig,
    RoutingReplayConfig,
    SwitchingConfig,
    VerificationConfig,
)
from rollverify.config.prepare_table import PrepareConfig
from rollverify.config.rollout_tables import (
    DynamicSamplingConfig,
    EngineConfig,
    RolloutConfig,
    WeightSyncConfig,
)
from rollverify.config.setting import Range, Setting, Table, settings_of
from rollverify.config.training_tables import ParallelismConfig, TrainingConfig


@dataclass(kw_only=True, slots=True, frozen=True)
class RunConfig(Table):
    """Name, seed and place of a run."""

    name: str = "default"
    """First part of the run folder's name."""
    seed: Annotated[int, Range(ge=0, lt=2**32)] = 0
    """Seed of prompt order and sampling; each request's seed is derived from it."""
    output_dir: str = "outputs"
    """Folder that holds the run folders."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelConfig(Table):
    """The model to train."""

    path: str = ""
    """Hugging Face folder (config, tokenizer, safetensors); "" trains the prepared base model."""


@dataclass(kw_only=True, slots=True, frozen=True)
class EvaluationConfig(Table):
    """Accuracy on the test set, before and after training and in between."""

    enable: bool = True
    """Whether to evaluate at all."""
    every_steps: Annotated[int, Range(ge=0)] = 0
    """Steps between evaluations; 0 evaluates only before and after training."""
    num_problems: Annotated[int, Range(ge=1)] = 256
    """Test problems used, from the start of the file; fewer if the file has fewer."""
    samples_per_problem: Annotated[int, Range(ge=1)] = 8
    """Responses sampled per problem for the mean accuracy; a greedy one is scored beside them."""
    temperature: Annotated[float, Range(gt=0, le=2)] = 1.0
    """Temperature of the sampled responses."""


@dataclass(kw_only=True, slots=True, frozen=True)
class CheckpointConfig(Table):
    """Saving and export."""

    every_steps: Annotated[int, Range(ge=0)] = 20
    """Steps between checkpoints; 0 saves none."""
    keep: Annotated[int, Range(ge=1)] = 2
    """Newest checkpoints kept; older ones are deleted."""
    save_on_interrupt: bool = True
    """Whether Ctrl-C and SIGTERM save a checkpoint before the run ends."""
    export_final: bool = True
    """Whether the final weights are written as a Hugging Face folder."""


@dataclass(kw_only=True, slots=True, frozen=True)
class MetricsConfig(Table):
    """What is recorded beside the console line."""

    tensorboard: bool = True
    """Whether to write TensorBoard events to the run folder."""
    text_samples: Annotated[int, Range(ge=0)] = 2
    """Responses written as text each time."""
    text_samples_every: Annotated[int, Range(ge=1)] = 10
    """Steps between text samples."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Config:
    """All tables; built only from values that obey every rule."""

    run: RunConfig = field(default_factory=RunConfig)
    """Name, seed and place of the run."""
    method: MethodConfig = field(default_factory=MethodConfig)
    """The training method."""
    verification: VerificationConfig = field(default_factory=VerificationConfig)
    """The check of unfinished responses."""
    switching: SwitchingConfig = field(default_factory=SwitchingConfig)
    """The change to on-policy rollouts."""
    filter: FilterConfig = field(default_factory=FilterConfig)
    """Baselines that discard unfinished responses."""
    routing_replay: RoutingReplayConfig = field(default_factory=RoutingReplayConfig)
    """Experts of mixture-of-experts models."""
    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    """The built-in task and base model."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The model to train."""
    data: DataConfig = field(default_factory=DataConfig)
    """Prompts and reward."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """What is sampled in one step."""
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    """Replacement of groups that teach nothing."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """The vLLM engine."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """Optimizer, schedule, micro-batches."""
    loss: LossConfig = field(default_factory=LossConfig)
    """The policy loss."""
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    """Advantages of a group."""
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    """Importance weights and masks."""
    kl: KlConfig = field(default_factory=KlConfig)
    """Distance to the start weights."""
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    """Transfer of weights and its parity probe."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Accuracy on the test set."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Saving and export."""
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    """TensorBoard and text samples."""
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    """Arrangement of the ranks."""

    def __post_init__(self) -> None:
        """Check the rules that join several settings."""
        check_rules(self)


TABLES: dict[str, type[Table]] = {
    table.name: table.default_factory  # pyright: ignore[reportAssignmentType]
    for table in dataclasses.fields(Config)
}
"""Table class by TOML name, in the order of `Config`."""

SETTINGS: dict[str, Setting] = {
    setting.key: setting for table in TABLES.values() for setting in settings_of(table).values()
}
"""Every setting by dotted key, in the order of `Config`."""
