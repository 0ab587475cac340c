"""The whole config: one table per TOML table, with every default of the project but the losses'."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic.fields import FieldInfo

from rollverify.config.base import (
    Count,
    CountOrZero,
    Limit,
    NotNegative,
    Positive,
    Seed,
    Share,
    Table,
)
from rollverify.config.losses import UNIONS, Correction, Grpo, Loss, Truncated, named
from rollverify.config.rules import broken_rules
from rollverify.toy.settings import PrepareConfig

Name = Annotated[str, Field(min_length=1)]
Columns = dict[Annotated[str, Field(pattern="^(prompt|answer|id)$")], Name]
Hub = dict[Annotated[str, Field(pattern="^(subset|split|revision)$")], Name]
Temperature = Annotated[float, Field(ge=0.01, le=2)]
"""vLLM raises what is below 0.01 to it; the trainer would then divide by another number."""


class RunConfig(Table, frozen=True):
    """Name, seed and place of a run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "default"
    """First part of the run folder's name: letters, digits, '.', '_' and '-', not first a sign."""
    seed: Seed = 0
    """Seed of prompt order and sampling; each request's seed is derived from it."""
    output_dir: str = "outputs"
    """Folder that holds the run folders."""
    deterministic: bool = False
    """Whether GPUs repeat a run exactly where they can (docs/gpu.md), which is slower; CPUs do."""


class MethodConfig(Table, frozen=True):
    """The training method."""

    name: Literal["on_policy", "partial_rollout", "rollverify"] = "rollverify"
    """on_policy: every response is finished under the policy that started it. partial_rollout: the
    rest of the responses is paused when a batch is full and resumed under the next policy.
    rollverify: the same, but what that policy would not have sampled is cut first."""


class VerificationConfig(Table, frozen=True):
    """The check of unfinished responses by OPS, D = |p_updated / p_reference - 1| of each token.

    Only the method rollverify cuts by it.
    """

    segment_threshold: Limit = 0.01
    """A response is cut before its first segment whose mean OPS reaches this; inf turns it off."""
    token_threshold: Limit = 2.0
    """What is left is cut before its first token whose OPS reaches this; inf turns it off."""
    against: Literal["anchor", "behavior"] = "anchor"
    """What updated log-probs are compared with. anchor: the trainer's when the token was sampled.
    behavior: the engine's, which halves the scoring and adds the gap of the two to OPS."""
    symmetric: bool = False
    """Whether OPS is max(r, 1/r) - 1 of the ratio r, so that tokens the policy has turned away from
    can reach the token threshold; |r - 1| stays below 1 for them."""
    measure: bool = True
    """Whether unfinished responses are scored for the metrics even where no rule needs it."""
    packing_noise_every: CountOrZero = 50
    """Steps between two measurements of what packing alone does to log-probs; 0: never."""


class SwitchingConfig(Table, frozen=True):
    """The change to on-policy rollouts once too little survives filter and verification."""

    enable: bool = True
    """Whether to switch at all; with method on_policy there is nothing to switch."""
    window: Count = 8
    """Steps whose acceptance rates are averaged; there is no decision before that many."""
    threshold: Share = 0.5
    """Switch when the average share of kept tokens is below this."""
    average: Literal["window", "ema"] = "window"
    """window: mean of the last `window` steps. ema: exponential, weight 2 / (window + 1)."""
    reversible: bool = False
    """Whether partial rollouts are tried again after `window` on-policy steps."""


class FilterConfig(Table, frozen=True):
    """Baselines that discard whole unfinished responses instead of cutting them."""

    name: Literal["off", "staleness", "ops"] = "off"
    """staleness: discard by the age of the oldest segment. ops: discard by the mean OPS."""
    max_staleness: Count = 4
    """Oldest segment that filter staleness keeps, in steps; the newest is 1 step old by then."""
    max_ops: Positive = 0.1
    """Largest mean OPS of a response that is kept; for filter ops."""
    discard: Literal["trajectory", "group"] = "trajectory"
    """trajectory: the response starts again. group: the prompt is given up with all responses."""


class RoutingReplayConfig(Table, frozen=True):
    """Experts of mixture-of-experts models: whose choice the trainer repeats."""

    mode: Literal["off", "trainer", "engine"] = "off"
    """off: the router chooses in every pass. trainer: scoring after the step, and the steps of
    several minibatches, repeat the choice of the trainer's first pass (R2). engine: training and
    scoring repeat the choice that the engine made when it sampled (R3)."""
    on_resume: Literal["keep", "replace"] = "keep"
    """With mode engine, experts of the tokens that a resumed response holds. keep: as when they
    were sampled. replace: as the new policy chose when it read them again."""
    measure_every: CountOrZero = 0
    """Steps between two extra passes that compare engine and trainer without replay; 0: never."""


class ModelConfig(Table, frozen=True):
    """The model to train."""

    path: str = ""
    """Hugging Face folder (config, tokenizer, safetensors); "" trains the prepared base model."""


class DataConfig(Table, frozen=True):
    """Prompts and their reward (docs/data.md)."""

    train: str = ""
    """Training prompts: a preset such as "gsm8k", "gsm8k:FILE", a JSON lines, JSON or Parquet
    file, or a Hugging Face dataset "owner/name"; "" takes the prepared problems."""
    test: str = ""
    """Test prompts, written like `train`; "" takes the prepared problems."""
    train_columns: Columns = Field(default_factory=dict[str, str])
    """Columns of `train` that hold prompt, answer and id, as in { prompt = "question" }."""
    test_columns: Columns = Field(default_factory=dict[str, str])
    """The same for `test`."""
    train_hub: Hub = Field(default_factory=dict[str, str])
    """Subset, split and revision of a Hugging Face dataset in `train`."""
    test_hub: Hub = Field(default_factory=dict[str, str])
    """The same for `test`."""
    answer_format: Literal["auto", "text", "integer", "hashes"] = "auto"
    """text: as it is; integer: a whole number, however it is written; hashes: what stands after
    the last "####", without commas; auto: what the preset says, without one text."""
    template: str = "auto"
    """Wording: none, boxed, answer_line, or a text that holds {prompt} once; auto: the preset's."""
    chat_template: bool = False
    """Whether the prompt then becomes the user's message in the model's own chat template."""
    system_prompt: str = ""
    """System message of the chat template; "" sends none."""
    duplicates: Literal["auto", "keep", "drop"] = "auto"
    """Prompts that occur again, which are counted; auto: what the preset says, else keep."""
    long_prompts: Literal["error", "drop"] = "error"
    """Prompts above rollout.max_prompt_tokens: end the run, or are dropped and counted."""
    shuffle: bool = True
    """Whether training prompts are put in a new order, derived from the seed, in each pass."""
    reward: Annotated[str, named(("exact_answer", "math"))] = "exact_answer"
    """exact_answer: 1 if the response's last line equals the answer, else 0. math: 1 if its last
    box means the same as the answer, which is LaTeX or a number. "module:function" or
    "file.py:function": your own (docs/rewards.md)."""


class RewardConfig(Table, frozen=True):
    """Worker processes of `data.reward = "math"`, on every rank."""

    time_out_s: Annotated[float, Field(gt=0, le=3600)] = 5.0
    """Seconds one comparison may take; then the answer scores 0 and is counted as timed out."""
    num_workers: Annotated[int, Field(ge=1, le=1024)] = 2
    """Processes at most; as many responses are graded at once, while the engine goes on."""


class RolloutConfig(Table, frozen=True):
    """What is sampled in one step."""

    prompts_per_step: Count = 32
    """Prompts in one training batch, over all data-parallel ranks."""
    group_size: Annotated[int, Field(ge=2, lt=2**31)] = 8
    """Responses per prompt (n), at least 2: their mean is the baseline of the advantages."""
    oversampling: Annotated[float, Field(ge=1, le=1000)] = 2.0
    """Responses in flight over one batch's; method on_policy starts exactly one batch."""
    count_every: Count = 8
    """Engine steps between two counts of complete groups over the ranks; not in on_policy."""
    mask_older_segments: bool = False
    """Whether a resumed response is trained only on the tokens of its newest policy version."""
    max_prompt_tokens: Count = 32
    """Longest prompt; a longer one is an error, never cut."""
    max_response_tokens: Count = 352
    """Longest response; sampling stops there with status "length"."""
    stop_token_ids: list[CountOrZero] = Field(default_factory=list[int])
    """Ids that end a response beside those that the model folder and its chat template name."""
    temperature: Temperature = 1.0
    """Sampling temperature; the trainer divides its logits by the same number."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling. Must stay 1: the engine's log-probs would be renormalised."""
    top_k: int = -1
    """Sampling from the k likeliest tokens. Must stay -1 (off), for the same reason."""

    @property
    def max_sequence_tokens(self) -> int:
        """Longest prompt plus longest response, tokens."""
        return self.max_prompt_tokens + self.max_response_tokens


class DynamicSamplingConfig(Table, frozen=True):
    """Groups whose rewards are all equal teach nothing: others can take their place."""

    enable: bool = False
    """Whether a step trains on exactly rollout.prompts_per_step groups whose rewards differ; the
    others are given up for good and replaced."""
    max_dropped_batches: Positive = 8.0
    """Most groups that one step gives up, in batches of rollout.prompts_per_step."""
    at_cap: Literal["stop", "train"] = "stop"
    """Beyond that: stop ends the run and says why, train fills up with useless groups."""


class EngineConfig(Table, frozen=True):
    """The vLLM engine that lives in each data-parallel rank."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the engine's weights and activations."""
    max_num_seqs: Count = 512
    """Most responses that one engine decodes at a time, best all that are in flight on its rank."""
    max_num_batched_tokens: Count = 8192
    """Most tokens processed in one engine step."""
    kv_cache_gib: Annotated[float, Field(gt=0, le=2**20)] = 1.0
    """Size of the key-value cache on CPU, GiB per rank."""
    gpu_memory_utilization: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of GPU memory the engine may take; 0: with `sleep` all that the trainer's weights and
    optimizer leave, but a margin, without it 0.4. Not used on CPU."""
    sleep: bool = True
    """Whether weights and cache leave the GPU while the trainer works; no effect on CPU."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Whether the model is compiled, on GPUs with CUDA graphs; auto: on GPUs."""
    tensor_parallel: Annotated[int, Field(ge=1, le=1024)] = 1
    """Ranks that hold one engine together, each a part of its weights and cache; they follow each
    other in the world. 1: every rank has an engine of its own."""
    num_cpu_threads: Annotated[int, Field(ge=0, le=4096)] = 0
    """Threads of an engine step on CPU; 0 = one for small steps of small models, else torch's."""
    options: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Further engine arguments, passed to vLLM as they are: the one table whose keys are free."""


class TrainingConfig(Table, frozen=True):
    """Optimizer, schedule, and the shape of the trainer's work."""

    steps: Annotated[int, Field(ge=1, le=10**9)] = 60
    """Number of training steps; one step is rollout, training, verification and sync."""
    lr: Annotated[float, Field(ge=0, le=1)] = 4.5e-4
    """Peak learning rate of AdamW. The paper's 1e-6 is for models of billions of parameters."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of AdamW's first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of AdamW's second moment."""
    eps: Annotated[float, Field(ge=1e-30, le=1)] = 1e-8
    """Term added to AdamW's denominator."""
    warmup_steps: CountOrZero = 0
    """Steps over which the learning rate rises linearly from 0."""
    lr_decay: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up."""
    max_grad_norm: Positive = 1.0
    """Gradients are scaled down to this L2 norm."""
    minibatches: Count = 1
    """Optimizer steps per training step, each on as many whole prompts, in the order drawn. With
    more than 1 a scoring pass over the batch is added; schedule and version advance once."""
    micro_batch_tokens: Count = 8192
    """Most tokens packed into one row of a micro-batch."""
    logprob_chunk_mib: CountOrZero = 0
    """Memory for one chunk of logits while log-probs are computed, MiB; 0: 64 on CPU, 512 on GPU.
    """
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of parameters and activations in forward and backward; reductions are float32."""
    activation_checkpoint: Literal["none", "selective", "full"] = "none"
    """Which activations are recomputed in backward instead of kept."""
    attention: Literal["auto", "FA2", "FA3", "FA4"] = "auto"
    """FlashAttention of the trainer in bfloat16 on GPUs; auto: FA3 or FA4 where the GPU and an
    installed package allow it, else FA2, which is part of torch."""
    compile: bool = False
    """Whether each block is compiled, on GPUs; the first steps then take minutes longer."""
    offload_optimizer: bool = False
    """Whether the optimizer's state waits in main memory, but for the optimizer's own step."""


class AdvantageConfig(Table, frozen=True):
    """How rewards of a group become advantages."""

    baseline: Literal["group_mean", "leave_one_out"] = "group_mean"
    """What is subtracted: the mean of the group, or that of the other responses."""
    std: Literal["unbiased", "population", "none"] = "unbiased"
    """Standard deviation the centred rewards are divided by; none only centres them."""
    overlong_buffer_tokens: CountOrZero = 0
    """Last tokens before rollout.max_response_tokens over which a penalty on the reward grows from
    0 to overlong_factor; 0 turns it off. Reward metrics stay without it."""
    overlong_factor: NotNegative = 1.0
    """Penalty at rollout.max_response_tokens, in units of the reward."""


class KlConfig(Table, frozen=True):
    """Penalty on the distance to the weights the run started from."""

    coefficient: NotNegative = 0.0
    """Times the mean KL estimate, added to the loss; 0 keeps no reference and costs nothing."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """With d = log policy - log reference: k1 is d, k2 is d^2 / 2, k3 is exp(-d) - 1 + d."""


class WeightSyncConfig(Table, frozen=True):
    """The transfer of weights from the trainer to the engine, and its check."""

    parity_tolerance: NotNegative = 0.0
    """Largest allowed |engine - trainer| log-prob difference after a sync, nats; 0: three times
    that of the first sync, at least 1e-4."""
    probe_tokens: Annotated[int, Field(ge=2, lt=2**31)] = 48
    """Length of the fixed sequence that both score after each sync; less in a short context."""


class EvaluationConfig(Table, frozen=True):
    """Accuracy on the test set: before, in and after training, or by `rollverify.evaluate`."""

    enable: bool = True
    """Whether training evaluates at all."""
    every_steps: CountOrZero = 0
    """Steps between evaluations; 0 evaluates only before and after training."""
    num_problems: Count = 256
    """Test problems used, from the start of the file; fewer if the file has fewer."""
    samples_per_problem: Count = 8
    """Responses sampled per problem for the mean accuracy; a greedy one is scored beside them."""
    temperature: Temperature = 1.0
    """Temperature of the sampled responses."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Probability mass that the sampled responses are drawn from; 1 is the full distribution."""
    baseline: str = ""
    """Model folder that `rollverify.evaluate` compares the model with; "" compares with none."""
    output: str = ""
    """Folder of `rollverify.evaluate`; "" names one in run.output_dir after what is evaluated."""
    save_responses: bool = True
    """Whether the records of `rollverify.evaluate` hold the text of every response."""
    contamination_ngram: CountOrZero = 13
    """Words in a row that a test and a training problem must not share; 0 checks nothing."""


class CheckpointConfig(Table, frozen=True):
    """Saving and export."""

    every_steps: CountOrZero = 20
    """Steps between checkpoints; 0 saves none."""
    keep: Count = 2
    """Newest checkpoints kept; older ones are deleted."""
    save_on_interrupt: bool = True
    """Whether Ctrl-C and SIGTERM save a checkpoint before the run ends."""
    export_final: bool = True
    """Whether the final weights are written as a Hugging Face folder."""
    in_background: bool = False
    """Whether model and optimizer are written beside the next step, from a copy in main memory."""


class MetricsConfig(Table, frozen=True):
    """What is recorded beside the console line."""

    tensorboard: bool = True
    """Whether to write TensorBoard events to the run folder."""
    text_samples: CountOrZero = 2
    """Responses written as text each time."""
    text_samples_every: Count = 10
    """Steps between text samples."""


class ParallelismConfig(Table, frozen=True):
    """How the ranks are arranged; the product of the first three is the number of ranks."""

    data_parallel_replicate: Count = 1
    """Copies of the sharded model (HSDP)."""
    data_parallel_shard: Annotated[int, Field(ge=-1, lt=2**31)] = -1
    """Ranks over which parameters are sharded (FSDP2); -1 takes the ranks that are left."""
    tensor_parallel: Count = 1
    """Ranks over which each matrix is split."""
    expert_parallel: Count = 1
    """Ranks over which experts are spread; 1 for dense models."""


class Config(Table, frozen=True):
    """All tables; built only from values that obey every rule."""

    run: RunConfig = RunConfig()
    method: MethodConfig = MethodConfig()
    verification: VerificationConfig = VerificationConfig()
    switching: SwitchingConfig = SwitchingConfig()
    filter: FilterConfig = FilterConfig()
    routing_replay: RoutingReplayConfig = RoutingReplayConfig()
    prepare: PrepareConfig = PrepareConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    engine: EngineConfig = EngineConfig()
    training: TrainingConfig = TrainingConfig()
    loss: Loss = Grpo()
    advantage: AdvantageConfig = AdvantageConfig()
    correction: Correction = Truncated()
    kl: KlConfig = KlConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    metrics: MetricsConfig = MetricsConfig()
    parallelism: ParallelismConfig = ParallelismConfig()

    @model_validator(mode="after")
    def _obeys_the_rules(self) -> "Config":
        for broken in broken_rules(self):
            raise ValueError(broken)
        return self


def classes_of(table: str) -> list[type[Table]]:
    """The class of a TOML table; of [loss] and [correction] all, first what their members share."""
    if table in UNIONS:
        base, members, other = UNIONS[table]
        return list(dict.fromkeys([base, *members.values(), other]))
    return [type(Config.model_fields[table].default)]


SETTINGS: dict[str, FieldInfo] = {
    f"{table}.{name}": setting
    for table in Config.model_fields
    for kind in reversed(classes_of(table))
    for name, setting in kind.model_fields.items()
}
"""A field for every dotted key; where losses share a name, that of the first of them."""
