"""Metrics that TensorBoard shows in one chart on its "Custom Scalars" page, as the paper does.

Records nothing; `recorder.py` writes the layout once per process.
"""

import re

CHARTS: dict[str, dict[str, tuple[str, ...]]] = {
    "training": {
        "entropy (nats)": ("train/entropy_nats",),
        "reward": ("reward/mean", "reward/accuracy"),
        "response length (tokens)": (
            "rollout/response_tokens_mean",
            "rollout/response_tokens_p95",
        ),
        "OPS of what was trained on": ("ops/trained_sequence_mean", "ops/trained_sequence_p95"),
    },
    "speed": {
        "generation time (s)": ("time/rollout_s", "time/step_s"),
        "acceptance rate": ("verification/acceptance_rate", "switching/average_rate"),
        "share of verification": ("verification/step_frac",),
    },
    "staleness": {
        "OPS of unfinished responses": (
            "ops/unfinished_sequence_mean",
            "ops/unfinished_sequence_p95",
        ),
        "OPS by age": ("ops/trained_age_<age>",),
        "engine mismatch by age (nats)": ("mismatch/age_<age>",),
        "trained tokens by age": ("staleness/trained_tokens_age_<age>_frac",),
        "age of what was trained on (steps)": ("staleness/trained_mean", "staleness/trained_max"),
    },
}
"""Keys of metrics by category and chart; `<...>` stands for every name, as in `names.py`."""


def layout() -> dict[str, dict[str, list[object]]]:
    """The charts as TensorBoard's `add_custom_scalars` takes them: one regular expression a key."""
    return {
        category: {
            title: ["Multiline", [_pattern(key) for key in keys]] for title, keys in charts.items()
        }
        for category, charts in CHARTS.items()
    }


def _pattern(key: str) -> str:
    """TensorBoard matches from the start only, so the end is marked."""
    return re.sub(r"<\w+>", r"\\w+", key) + "$"
