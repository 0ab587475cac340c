"""Every metric key with its unit and meaning; `<...>` stands for letters, digits, underscores."""

import re
from typing import NamedTuple


class Metric(NamedTuple):
    """Unit and meaning of one key."""

    unit: str
    meaning: str


METRICS: dict[str, Metric] = {
    # Rewards of the trajectories trained on in this step.
    "reward/mean": Metric("reward", "mean reward of the finished trajectories"),
    "reward/accuracy": Metric("share", "finished trajectories with a right answer"),
    "reward/std": Metric("reward", "standard deviation of the rewards over the batch"),
    "reward/mean_drawn": Metric("reward", "the same with the groups that dynamic sampling gave up"),
    "reward/grading_errors": Metric("count", "answers that could not be compared; they score 0"),
    "reward/timeouts": Metric("count", "answers whose comparison took too long; they score 0"),
    "reward/gold_unreadable": Metric("count", "answers to prompts without readable gold; 0"),
    # The optimizer step.
    "train/loss": Metric("1", "batch loss under the configured aggregation"),
    "train/entropy_nats": Metric("nats", "mean entropy of the policy over loss tokens"),
    "train/grad_norm": Metric("1", "global gradient norm before clipping"),
    "train/lr": Metric("1", "learning rate of this step"),
    "train/clip_low_frac": Metric("share", "loss tokens whose ratio is clipped at 1 - clip_low"),
    "train/clip_high_frac": Metric("share", "loss tokens whose ratio is clipped at 1 + clip_high"),
    "train/ratio_mean": Metric("1", "mean of policy / denominator over loss tokens"),
    # <bucket>: below_0_5, from_0_5, from_0_8, from_0_95, from_1_05, from_1_25, from_2_up.
    "train/ratio_<bucket>_frac": Metric("share", "loss tokens with policy / denominator in it"),
    "train/kl_estimate": Metric("nats", "k3 estimate of KL(denominator || policy)"),
    "train/kl_reference_nats": Metric("nats", "mean of the KL term, with its estimator"),
    "train/masked_frac": Metric("share", "loss tokens dropped by the loss or the correction"),
    "train/gate_mean": Metric("1", "mean weight of the losses that gate instead of clipping"),
    "train/num_tokens": Metric("tokens", "tokens in the loss, all ranks"),
    "train/num_micro_batches": Metric("count", "forward and backward passes per rank"),
    "train/mfu": Metric("share", "of the GPUs' peak flops, by tokens trained, in the train phase"),
    "train/tokens_per_s": Metric("tokens/s", "loss tokens over the seconds of the train phase"),
    # Rollouts that fed this step.
    "rollout/response_tokens_mean": Metric("tokens", "mean response length"),
    "rollout/response_tokens_p50": Metric("tokens", "median response length"),
    "rollout/response_tokens_p95": Metric("tokens", "95th percentile of the response length"),
    "rollout/response_tokens_max": Metric("tokens", "longest response"),
    "rollout/num_tokens": Metric("tokens", "response tokens generated in this phase, all ranks"),
    "rollout/num_finished": Metric("count", "finished trajectories, all ranks"),
    "rollout/num_unfinished": Metric("count", "trajectories in U_k, finished ones that wait too"),
    "rollout/truncated_frac": Metric("share", "finished trajectories cut at the length limit"),
    "rollout/zero_signal_groups": Metric("count", "groups whose rewards are all equal"),
    "rollout/groups_given_up": Metric("count", "complete groups without signal, not trained on"),
    "rollout/signal_frac": Metric("share", "complete groups with signal, given up or trained on"),
    "rollout/tokens_per_s": Metric("tokens/s", "generated tokens over the phase without scoring"),
    "rollout/engine_busy_frac": Metric("share", "mean share of the engine's slots in use"),
    "rollout/decode_steps": Metric("count", "engine steps of this phase, the rank with most"),
    "rollout/tokens_lost_at_pause": Metric(
        "tokens", "under way when the engine was paused, and sampled again later, all ranks"
    ),
    "rollout/idle_slot_steps": Metric("count", "engine steps times slots not in use, all ranks"),
    "rollout/preemptions": Metric(
        "count", "responses computed again after they made room in the cache, all ranks"
    ),
    "rollout/num_resumed": Metric("count", "requests for the rest of a response, all ranks"),
    "rollout/tokens_resumed": Metric(
        "tokens", "prompts and responses that the engine read again to resume them, all ranks"
    ),
    "rollout/num_started": Metric("count", "responses begun for the first time, all ranks"),
    "rollout/tokens_to_regenerate": Metric(
        "tokens", "cut or discarded in this step and sampled again in the next phase, all ranks"
    ),
    # Where every group and every token of the run is; see `rollout/ledger.py`, `rollout/buffer.py`.
    "ledger/<state>": Metric("groups", "groups in this state at the end of the step, all ranks"),
    "ledger/num_dropped": Metric("groups", "times a group was dropped and queued again, so far"),
    "tokens/<fate>": Metric("tokens", "response tokens that met this fate so far, all ranks"),
    # Off-policy shift |p / p_when_sampled - 1| under the trainer's scores, all ranks.
    # <of>: "unfinished" is U_k under policy k + 1, "trained" the loss tokens of F_k under policy k.
    # <level>: token, segment, sequence; those without a token have no OPS and are left out.
    # <age>: steps since the token was sampled: 0, 1, 2, 3, 4_7, 8_up; left out where none is.
    "ops/<of>_<level>_mean": Metric("1", "mean off-policy shift"),
    "ops/<of>_<level>_p95": Metric("1", "95th percentile of the off-policy shift"),
    "ops/<of>_<level>_max": Metric("1", "largest off-policy shift"),
    "ops/<of>_age_<age>": Metric("1", "mean off-policy shift of tokens of this age"),
    # Age of what the step trained on, in optimizer steps.
    "staleness/trained_mean": Metric("steps", "mean over trajectories, oldest trained segment"),
    "staleness/trained_max": Metric("steps", "age of the oldest trained token"),
    "staleness/trained_tokens_age_<age>_frac": Metric("share", "loss tokens of this age"),
    # Verification of U_k against the policy after the step.
    "verification/acceptance_rate": Metric(
        "share", "response tokens of U_k left after filter and verification"
    ),
    "verification/untouched_frac": Metric("share", "trajectories of U_k that lost no token"),
    "verification/cuts_segment": Metric("count", "trajectories cut by the segment threshold"),
    "verification/cuts_token": Metric("count", "trajectories cut by the token threshold"),
    "verification/tokens_checked": Metric("tokens", "response tokens of U_k before the filter"),
    "verification/tokens_cut": Metric("tokens", "response tokens that verification cut"),
    "verification/scan_s": Metric("s", "the two stages and the cuts, without scoring; rank 0"),
    "verification/scoring_s": Metric("s", "both scoring passes over U_k; rank 0"),
    "verification/step_frac": Metric("share", "scoring, scan and log over the step's seconds"),
    # Filter baselines: trajectories or groups of U_k that are given up.
    "filter/trajectories_discarded": Metric("count", "trajectories above the limit"),
    "filter/groups_discarded": Metric("count", "groups given up for good"),
    "filter/tokens_discarded": Metric("tokens", "response tokens of U_k that were discarded"),
    # Switch to on-policy rollouts.
    "switching/acceptance_rate": Metric("share", "acceptance rate the window took in"),
    "switching/average_rate": Metric("share", "average over the window so far"),
    "switching/is_on_policy": Metric("0 or 1", "1 once rollouts are on-policy"),
    # Rollout engine against trainer, on the same weights and tokens.
    "mismatch/logprob_abs_mean": Metric("nats", "mean |anchor - behavior| over loss tokens"),
    "mismatch/logprob_abs_max": Metric("nats", "largest |anchor - behavior|"),
    "mismatch/k3_nats": Metric("nats", "k3 estimate of KL(behavior || anchor)"),
    "mismatch/ops_mean": Metric("1", "mean |p_trainer / p_engine - 1|: noise floor of OPS"),
    "mismatch/packing_ops_mean": Metric("1", "OPS between two packings under equal weights"),
    "mismatch/packing_ops_max": Metric("1", "the same, the token with most"),
    "mismatch/age_<age>": Metric("nats", "mean |anchor - behavior| of loss tokens of this age"),
    "mismatch/native_abs_mean": Metric("nats", "mean |own - behavior| of new tokens, no replay"),
    "mismatch/native_abs_max": Metric("nats", "largest |own - behavior| of new tokens, no replay"),
    # Experts, in the passes with gradient; only of models that have any.
    "routing/changed_frac": Metric("share", "tokens the router would send elsewhere, layer mean"),
    "routing/changed_layer_<layer>_frac": Metric("share", "the same of one layer"),
    "routing/load_max": Metric("1", "tokens of the fullest expert over the mean, worst layer"),
    "routing/load_layer_<layer>_max": Metric("1", "the same of one layer"),
    "routing/bytes_per_token": Metric("bytes", "recorded expert ids of a token, all layers"),
    "routing/reprefill_changed_frac": Metric(
        "share", "tokens of resumed contexts that the new policy sends to other experts"
    ),
    # Of the configured correction; with "none" of truncation by token, which is not applied then.
    "correction/weight_mean": Metric("1", "mean importance weight over loss tokens"),
    "correction/truncated_frac": Metric("share", "loss tokens whose weight hit the threshold"),
    "correction/masked_frac": Metric("share", "loss tokens whose weight is 0"),
    "correction/effective_sample_frac": Metric("share", "(sum w)^2 / (tokens * sum w^2)"),
    "correction/ratio_<bucket>_frac": Metric("share", "loss tokens with that ratio to the engine"),
    "sync/parity_abs_max": Metric("nats", "largest engine-trainer gap on the probe after sync"),
    "sync/push_s": Metric("s", "weight transfer and probe alone, without the hooks after it"),
    # Wall-clock seconds, measured on rank 0.
    "time/rollout_s": Metric("s", "rollout phase with its hooks"),
    "time/train_s": Metric("s", "train phase with its hooks"),
    "time/verify_s": Metric("s", "verify phase, which is its hooks"),
    "time/sync_s": Metric("s", "sync phase with its hooks (evaluation)"),
    "time/checkpoint_s": Metric("s", "checkpoint of the step before, written after its line"),
    "time/step_s": Metric("s", "from the first phase to the line, with the checkpoint before it"),
    "time/hook/<name>_s": Metric("s", "one hook"),
    # Test set.
    "eval/greedy_accuracy": Metric("share", "right answers with greedy decoding"),
    "eval/mean_at_<k>": Metric("share", "mean accuracy of k samples per problem"),
    "eval/mean_at_<k>_low": Metric("share", "lower end of its 95 % interval over problems"),
    "eval/mean_at_<k>_high": Metric("share", "upper end of that interval"),
    "eval/pass_at_<k>": Metric("share", "unbiased estimate that one of k samples is right"),
    "eval/maj_at_<k>": Metric("share", "how often the commonest answer of k samples is right"),
    "eval/response_tokens_mean": Metric("tokens", "mean length of the sampled responses"),
    "eval/truncated_frac": Metric("share", "sampled responses cut at the length limit"),
    # The run itself.
    "memory/rss_gib": Metric("GiB", "resident memory of the largest rank"),
    "memory/gpu_peak_gib": Metric("GiB", "most of a GPU in use in the step, libraries included"),
    "memory/gpu_reserved_peak_gib": Metric("GiB", "the same with what the allocator keeps free"),
    "memory/gpu_alloc_retries": Metric("count", "times the allocator had to free memory first"),
    "progress/epoch": Metric("epochs", "passes over the training prompts, from 0"),
    "progress/policy_version": Metric("count", "optimizer steps taken, at the end of the step"),
    "progress/num_prompts": Metric("count", "training prompts drawn since the start of the run"),
}

_PLACEHOLDER = re.compile(r"<\w+>")


def _pattern(key: str) -> re.Pattern[str]:
    literals = (re.escape(literal) for literal in _PLACEHOLDER.split(key))
    return re.compile(r"\w+".join(literals))


_FAMILIES = [_pattern(key) for key in METRICS if _PLACEHOLDER.search(key)]


def is_declared(key: str) -> bool:
    """Whether a key may be logged: it stands in METRICS or fits one of its `<...>` families."""
    return key in METRICS or any(family.fullmatch(key) for family in _FAMILIES)


def phase_time_key(phase: str) -> str:
    """Key of a phase's seconds."""
    return f"time/{phase}_s"
