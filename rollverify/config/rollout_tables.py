"""Tables [rollout], [dynamic_sampling], [engine] and [weight_sync]: what is sampled, and how.

They hold no training setting; those are in `training_tables`.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from rollverify.config.setting import Range, Table


@dataclass(kw_only=True, slots=True, frozen=True)
class RolloutConfig(Table):
    """What is sampled in one step."""

    prompts_per_step: Annotated[int, Range(ge=1)] = 32
    """Prompts in one training batch, over all data-parallel ranks."""
    group_size: Annotated[int, Range(ge=1)] = 8
    """Responses sampled for each prompt (n); the group is the baseline of its advantages."""
    oversampling: Annotated[float, Range(ge=1)] = 2.0
    """Responses in flight over those of one batch, so that the engine stays busy while the longest
    finish; method on_policy starts exactly one batch."""
    count_every: Annotated[int, Range(ge=1)] = 8
    """Engine steps between two counts of complete groups over the ranks, which end a rollout phase;
    method on_policy does not count."""
    mask_older_segments: bool = False
    """Whether a resumed response is trained only on the tokens of its newest policy version."""
    max_prompt_tokens: Annotated[int, Range(ge=1)] = 32
    """Longest prompt; a longer one is an error, never cut."""
    max_response_tokens: Annotated[int, Range(ge=1)] = 352
    """Longest response; sampling stops there with status "length"."""
    temperature: Annotated[float, Range(gt=0, le=2)] = 1.0
    """Sampling temperature; the trainer divides its logits by the same number."""
    top_p: Annotated[float, Range(gt=0, le=1)] = 1.0
    """Nucleus sampling. Must stay 1: see `rollverify.config.check`."""
    top_k: int = -1
    """Sampling from the k likeliest tokens. Must stay -1 (off): see `rollverify.config.check`."""

    @property
    def max_sequence_tokens(self) -> int:
        """Longest prompt plus longest response, tokens."""
        return self.max_prompt_tokens + self.max_response_tokens


@dataclass(kw_only=True, slots=True, frozen=True)
class DynamicSamplingConfig(Table):
    """Groups whose rewards are all equal teach nothing: others can take their place."""

    enable: bool = False
    """Whether a step trains on exactly rollout.prompts_per_step groups whose rewards differ; those
    without a difference are given up for good and as many prompts more are drawn."""
    max_dropped_batches: Annotated[float, Range(gt=0)] = 8.0
    """Most groups that one step gives up before its batch is full, in batches of
    rollout.prompts_per_step."""
    at_cap: Literal["stop", "train"] = "stop"
    """What happens beyond that. stop: the run ends and says why. train: the batch is filled up with
    groups that teach nothing."""


@dataclass(kw_only=True, slots=True, frozen=True)
class EngineConfig(Table):
    """The vLLM engine that lives in each data-parallel rank."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the engine's weights and activations."""
    max_num_seqs: Annotated[int, Range(ge=1)] = 512
    """Most responses decoded at the same time by one engine. The default holds all that are in
    flight: rollout.oversampling * prompts_per_step * group_size, divided by the ranks."""
    max_num_batched_tokens: Annotated[int, Range(ge=1)] = 8192
    """Most tokens processed in one engine step."""
    kv_cache_gib: Annotated[float, Range(gt=0)] = 1.0
    """Size of the key-value cache on CPU, GiB per rank."""
    gpu_memory_utilization: Annotated[float, Range(gt=0, le=1)] = 0.4
    """Share of GPU memory the engine may take; not used on CPU."""
    enforce_eager: bool = True
    """Whether to run without CUDA graphs and compilation."""
    num_cpu_threads: Annotated[int, Range(ge=0)] = 0
    """Threads of an engine step on CPU; 0 = one for small steps of small models, else torch's."""
    options: dict[str, object] = field(default_factory=dict[str, object])
    """Further engine arguments, passed to vLLM as they are: the one table whose keys are free."""


@dataclass(kw_only=True, slots=True, frozen=True)
class WeightSyncConfig(Table):
    """The transfer of weights from the trainer to the engine, and its check."""

    parity_tolerance: Annotated[float, Range(gt=0)] = 1e-4
    """Largest allowed |engine - trainer| log-prob difference after a sync, nats."""
    probe_tokens: Annotated[int, Range(ge=2)] = 48
    """Length of the fixed sequence that both score after each sync; less in a short context."""
