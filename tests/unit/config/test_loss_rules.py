"""Rules of the objective: what is refused, with reason and cure, and what stands at the edge."""

import pytest

from rollverify.config.loss_rules import CORRECTION_SETTINGS, LOSS_SETTINGS
from rollverify.config.rule_error import RuleError
from rollverify.config.schema import SETTINGS, TABLES, Config
from rollverify.config.setting import settings_of

BEHAVIOR = {"loss.denominator": "behavior", "correction.name": "none"}
GSPO = {"loss.name": "gspo", "loss.aggregation": "sequence_mean"}
AT_SAMPLING = {"loss.denominator": "anchor_at_sampling"}

DECOUPLED = {"loss.name": "decoupled_ppo", "correction.name": "none"}
BROKEN = [
    ({"loss.name": "gspo"}, "'gspo' needs loss.aggregation = 'sequence_mean', got 'token_mean'"),
    (GSPO, "correction.name = 'truncated' with level 'token' weighs single tokens, but loss.name"),
    (GSPO | {"correction.name": "icepop"}, "'icepop' weighs single tokens, but loss.name = 'gspo'"),
    (GSPO | {"loss.name": "gspo_token", "correction.name": "mask_stale"}, "one ratio per response"),
    ({"loss.name": "dr_grpo"}, "'dr_grpo' needs advantage.std = 'none' and loss.aggregation"),
    ({"loss.name": "dr_grpo", "advantage.std": "none"}, "got 'none' and 'token_mean'"),
    (
        {"loss.denominator": "behavior"},
        "loss.denominator = 'behavior' with correction.name = 'truncated' counts the gap to the "
        "engine twice: the ratio divides by its log-probs already; set correction.name = 'none'",
    ),
    (BEHAVIOR | {"correction.name": "masked"}, "twice"),
    (BEHAVIOR | {"correction.name": "icepop"}, "twice"),
    (
        {"loss.name": "reinforce"} | BEHAVIOR,
        "'behavior' has no effect with loss.name = 'reinforce'",
    ),
    (
        AT_SAMPLING | {"verification.reference": "behavior"},
        "not recorded with verification.reference = 'behavior'",
    ),
    (
        AT_SAMPLING | {"method.name": "partial_rollout", "verification.measure": False},
        "verification.measure = false; set verification.reference = 'anchor'",
    ),
    ({"loss.name": "decoupled_ppo"}, "weigh by denominator / behavior twice; set correction.name"),
    ({"loss.name": "decoupled_ppo"} | BEHAVIOR, "where its weight is always 1"),
    ({"loss.masked_in_denominator": False}, "has no effect with correction.name = 'truncated'"),
    (
        DECOUPLED | {"loss.masked_in_denominator": False, "loss.decoupled_ppo_cap_action": "clamp"},
        "loss.name = 'decoupled_ppo', which drop no token; remove it, or set correction.name to",
    ),
    ({"advantage.baseline": "leave_one_out"}, "needs advantage.std = 'none', got 'unbiased'"),
    ({"advantage.overlong_buffer_tokens": 353}, "must be <= rollout.max_response_tokens = 352"),
    ({"training.minibatches": 3}, "must divide rollout.prompts_per_step = 32, got 3"),
    (
        {"correction.name": "masked", "correction.masked_low": 3.0},
        "correction.masked_low must be <= correction.masked_high = 2.0, got 3.0",
    ),
    (
        {"loss.sapo_tau_positive": 2.0},
        "loss.sapo_tau_positive = 2.0 has no effect with loss.name = 'grpo': only 'sapo' reads it",
    ),
    (
        {"correction.level": "sequence", "correction.name": "icepop"},
        "'truncated' or 'masked' reads",
    ),
]

ACCEPTED = [
    GSPO | {"correction.level": "sequence"},
    GSPO | {"correction.name": "geometric_mask"},
    GSPO | BEHAVIOR | {"loss.gspo_clip_low": 0.2, "loss.gspo_clip_high": 0.3},
    {"loss.name": "dr_grpo", "advantage.std": "none", "loss.aggregation": "constant_length"},
    BEHAVIOR | {"correction.name": "mask_stale"},
    BEHAVIOR | {"correction.name": "opsm", "correction.opsm_delta": 0.1},
    AT_SAMPLING,
    # Nothing is stale there, so the policy before the step is the anchor of every token.
    AT_SAMPLING | {"method.name": "on_policy", "verification.reference": "behavior"},
    AT_SAMPLING | {"method.name": "partial_rollout", "filter.name": "ops"},
    {"loss.name": "decoupled_ppo", "correction.name": "none", "loss.clip_high": 0.2},
    {"loss.name": "decoupled_ppo", "correction.name": "geometric_mask"},
    DECOUPLED | {"loss.masked_in_denominator": False},
    {"correction.name": "icepop", "loss.masked_in_denominator": False},
    {"advantage.baseline": "leave_one_out", "advantage.std": "none"},
    {"advantage.overlong_buffer_tokens": 352},
    {"training.minibatches": 32},
    {"correction.name": "none", "correction.threshold": 5.0},
    {"loss.dual_clip": 3.0},
    {"loss.entropy_coefficient": -0.01, "kl.coefficient": 0.1, "kl.estimator": "k1"},
]


def build(changes: dict[str, object]) -> Config:
    tables: dict[str, dict[str, object]] = {name: {} for name in TABLES}
    for key, value in changes.items():
        table, _, name = key.partition(".")
        tables[table][name] = value
    return Config(**{name: TABLES[name](**entries) for name, entries in tables.items()})  # type: ignore[arg-type]


@pytest.mark.parametrize(("changes", "message"), BROKEN)
def test_broken_rule_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(RuleError) as caught:
        build(changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert set(changes) & set(caught.value.keys)
    assert set(caught.value.keys) <= set(SETTINGS)


@pytest.mark.parametrize("changes", ACCEPTED)
def test_value_at_the_edge_of_a_rule_is_accepted(changes: dict[str, object]) -> None:
    build(changes)


def other_value(key: str) -> object:
    """A value of the setting that is not its default."""
    table, _, name = key.partition(".")
    setting = settings_of(TABLES[table])[name]
    default = getattr(TABLES[table](), name)
    if setting.choices:
        return next(one for one in setting.choices if one != default)
    return default + 1 if setting.kind is int else (default or 2.0) * 0.8 + 0.02


@pytest.mark.parametrize("name", LOSS_SETTINGS)
def test_a_setting_of_another_loss_is_refused(name: str) -> None:
    loss = "reinforce"  # It reads none of them.
    with pytest.raises(RuleError, match=f"loss.{name} = .* has no effect with loss.name"):
        build({"loss.name": loss, f"loss.{name}": other_value(f"loss.{name}")})


@pytest.mark.parametrize("name", CORRECTION_SETTINGS)
def test_a_setting_of_another_correction_is_refused(name: str) -> None:
    other = "opsm" if "opsm" not in CORRECTION_SETTINGS[name] else "icepop"
    with pytest.raises(RuleError, match=f"correction.{name} = .* has no effect"):
        build({"correction.name": other, f"correction.{name}": other_value(f"correction.{name}")})
