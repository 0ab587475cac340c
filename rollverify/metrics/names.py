"""Every metric key with its unit and meaning; a key that is not here cannot be logged.

Computes nothing. A `<...>` in a key stands for any name of letters, digits and underscores.
"""

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
    # The optimizer step.
    "train/loss": Metric("1", "batch loss under the configured aggregation"),
    "train/entropy_nats": Metric("nats", "mean entropy of the policy over loss tokens"),
    "train/grad_norm": Metric("1", "global gradient norm before clipping"),
    "train/lr": Metric("1", "learning rate of this step"),
    "train/clip_low_frac": Metric("share", "loss tokens whose ratio is clipped at 1 - clip_low"),
    "train/clip_high_frac": Metric("share", "loss tokens whose ratio is clipped at 1 + clip_high"),
    "train/ratio_mean": Metric("1", "mean of policy / anchor over loss tokens"),
    "train/kl_estimate": Metric("nats", "k3 estimate of KL(anchor || policy) over loss tokens"),
    "train/num_tokens": Metric("tokens", "tokens in the loss, all ranks"),
    "train/num_micro_batches": Metric("count", "forward and backward passes per rank"),
    "train/tokens_per_s": Metric("tokens/s", "loss tokens over the seconds of the train phase"),
    # Rollouts that fed this step.
    "rollout/response_tokens_mean": Metric("tokens", "mean response length"),
    "rollout/response_tokens_p50": Metric("tokens", "median response length"),
    "rollout/response_tokens_p95": Metric("tokens", "95th percentile of the response length"),
    "rollout/response_tokens_max": Metric("tokens", "longest response"),
    "rollout/num_tokens": Metric("tokens", "response tokens generated in this phase, all ranks"),
    "rollout/num_finished": Metric("count", "finished trajectories, all ranks"),
    "rollout/num_unfinished": Metric("count", "trajectories left unfinished, all ranks"),
    "rollout/truncated_frac": Metric("share", "finished trajectories cut at the length limit"),
    "rollout/zero_signal_groups": Metric("count", "groups whose rewards are all equal"),
    "rollout/tokens_per_s": Metric("tokens/s", "generated tokens over the seconds of the phase"),
    "rollout/engine_busy_frac": Metric("share", "mean share of the engine's slots in use"),
    # Rollout engine against trainer, on the same weights and tokens.
    "mismatch/logprob_abs_mean": Metric("nats", "mean |anchor - behavior| over loss tokens"),
    "mismatch/logprob_abs_max": Metric("nats", "largest |anchor - behavior|"),
    "mismatch/k3_nats": Metric("nats", "k3 estimate of KL(behavior || anchor)"),
    "correction/weight_mean": Metric("1", "mean importance weight over loss tokens"),
    "correction/truncated_frac": Metric("share", "loss tokens whose weight hit the threshold"),
    "sync/parity_abs_max": Metric("nats", "largest engine-trainer gap on the probe after sync"),
    "sync/push_s": Metric("s", "weight transfer and probe alone, without the hooks after it"),
    # Wall-clock seconds, measured on rank 0.
    "time/rollout_s": Metric("s", "rollout phase with its hooks"),
    "time/train_s": Metric("s", "train phase with its hooks"),
    "time/verify_s": Metric("s", "verify phase, which is its hooks"),
    "time/sync_s": Metric("s", "sync phase with its hooks (evaluation, checkpointing)"),
    "time/step_s": Metric("s", "from the start of the first phase to the log line"),
    "time/hook/<name>_s": Metric("s", "one hook"),
    # Test set.
    "eval/greedy_accuracy": Metric("share", "right answers with greedy decoding"),
    "eval/mean_at_<k>": Metric("share", "mean accuracy of k samples per problem"),
    "eval/response_tokens_mean": Metric("tokens", "mean length of the sampled responses"),
    "eval/truncated_frac": Metric("share", "sampled responses cut at the length limit"),
    # The run itself.
    "memory/rss_gib": Metric("GiB", "resident memory of the largest rank"),
    "progress/epoch": Metric("epochs", "passes over the training prompts, from 0"),
    "progress/policy_version": Metric("count", "optimizer steps taken, at the end of the step"),
    "progress/num_prompts": Metric("count", "training prompts used since the start of the run"),
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


def hook_time_key(hook: str) -> str:
    """Key of a hook's seconds."""
    return f"time/hook/{hook}_s"
