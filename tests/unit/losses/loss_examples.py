"""Worked examples: inputs, settings, right values and right gradients, as data.

The numbers come from the published formulas, worked out by hand or with the authors' code and given
to six places; no number here was made with the code under test. How an example is run is decided
by the tests that import this module.
"""

from dataclasses import dataclass, field
from typing import Any

PAD = 0.0
MASK = [[1, 1, 1], [1, 1, 0]]
ADVANTAGES = [1.0, -1.0]
LP_ROLL = [[-0.50, -2.00, -1.20], [-0.80, -1.45, PAD]]
LP_OLD = [[-0.52, -1.20, -1.25], [-0.70, -1.60, PAD]]
LP_NEW = [[-0.40, -0.80, -1.30], [-1.10, -1.30, PAD]]
LOG_PROBS = {"new": LP_NEW, "old": LP_OLD, "roll": LP_ROLL}

RATIOS = [
    ("new", "old", [[1.127497, 1.491825, 0.951229], [0.670320, 1.349859]]),
    ("old", "roll", [[0.980199, 2.225541, 0.951229], [1.105171, 0.860708]]),
    ("new", "roll", [[1.105171, 3.320117, 0.904837], [0.740818, 1.161834]]),
]


@dataclass(frozen=True, kw_only=True)
class LossExample:
    """One loss on the inputs above.

    Attributes:
        name: what to call it in a test's id.
        loss: the loss, with its `settings` (ratios' clip ranges and so on).
        policy, denominator: which of LOG_PROBS is optimised, and which the ratio divides by.
        correction, correction_settings: the detached weights from old against roll, if any; a
            weight of 0 leaves the denominator of the mean as it is.
        aggregation, constant: how the tokens become one number.
        value: the loss.
        gradient: d loss / d policy log-prob, the padded token included; None: not given.
    """

    name: str
    loss: str
    value: float
    aggregation: str
    gradient: list[list[float]] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    constant: float | None = None
    policy: str = "new"
    denominator: str = "old"
    correction: str | None = None
    correction_settings: dict[str, Any] = field(default_factory=dict)


def example(name, loss, aggregation, value, row_1=None, row_2=None, **more):
    gradient = None if row_1 is None else [row_1, [*row_2, 0.0]]
    return LossExample(
        name=name, loss=loss, aggregation=aggregation, value=value, gradient=gradient, **more
    )


CLIP = {"eps_low": 0.2, "eps_high": 0.3}
CLIP_EVEN = {"eps_low": 0.2, "eps_high": 0.2}
TIS = {"correction": "truncated_token", "correction_settings": {"cap": 2.0}}
BAND = {"bounds": (0.5, 2.0)}

TOKEN, SEQUENCE, CONSTANT = "token_mean", "sequence_mean", "constant_length"
DAPO_ROW = [-0.225499, 0.0, -0.190246]
TIS_ROW_1, TIS_ROW_2 = [-0.221034, 0.0, -0.180967], [0.0, 0.232367]

EXAMPLES = [
    # Clipped surrogates
    example("grpo", "grpo", SEQUENCE, -0.008990, [-0.187916, 0.0, -0.158538], [0.0, 0.337465],
            settings=CLIP_EVEN),
    example("dapo_0.3", "grpo", TOKEN, -0.245773, DAPO_ROW, [0.0, 0.269972], settings=CLIP),
    example("dapo_0.28", "grpo", TOKEN, -0.241773, DAPO_ROW, [0.0, 0.269972],
            settings={"eps_low": 0.2, "eps_high": 0.28}),
    example("dual_clip", "grpo", TOKEN, -0.275745, DAPO_ROW, [0.0, 0.0],
            settings={**CLIP, "dual_clip": 1.2}),
    example("dr_grpo", "dr_grpo", CONSTANT, -0.188145, [-0.187916, 0.0, -0.158538],
            [0.0, 0.224976], settings=CLIP_EVEN, constant=3.0),
    # GSPO
    example("gspo_paper", "gspo", SEQUENCE, -0.000350, [0.0] * 3, [0.0] * 2,
            settings={"eps_low": 3e-4, "eps_high": 4e-4}),
    example("gspo_wide", "gspo", SEQUENCE, -0.109188, [-0.194934] * 3, [0.237807] * 2,
            settings=CLIP),
    example("gspo_token_paper", "gspo_token", SEQUENCE, -0.000350, [0.0] * 3, [0.0] * 2,
            settings={"eps_low": 3e-4, "eps_high": 4e-4}),
    example("gspo_token_wide", "gspo_token", SEQUENCE, -0.109188, [-0.194934] * 3,
            [0.237807] * 2, settings=CLIP),
    # SAPO
    example("sapo", "sapo", SEQUENCE, -0.136183, [-0.187155, -0.234188, -0.158444],
            [0.162658, 0.326331], settings={"tau_pos": 1.0, "tau_neg": 1.05}),
    example("sapo_token_mean", "sapo", TOKEN, -0.546327,
            settings={"tau_pos": 1.0, "tau_neg": 1.05}),
    # VESPO
    example("vespo_old", "vespo", TOKEN, -0.218556, [-0.084634] * 3, [0.179225] * 2),
    example("vespo_roll", "vespo", TOKEN, -0.399157, [-0.002092] * 3, [0.168494] * 2,
            denominator="roll"),
    example("vespo_old_tis", "vespo", TOKEN, -0.392798, [-0.004635] * 3, [0.168494] * 2, **TIS),
    # CISPO
    example("cispo_1.2", "cispo", TOKEN, 0.070049, [-0.225499, -0.24, -0.190246],
            [0.134064, 0.24], settings={"upper": 1.2}),
    example("cispo_5", "cispo", TOKEN, 0.077778, [-0.225499, -0.298365, -0.190246],
            [0.134064, 0.269972], settings={"upper": 5.0}),
    # Truncated importance sampling, three policies and two
    example("decoupled_tis", "grpo", TOKEN, -0.512807, TIS_ROW_1, TIS_ROW_2, settings=CLIP, **TIS),
    example("decoupled_raw", "decoupled_ppo", TOKEN, -0.571448, TIS_ROW_1, TIS_ROW_2,
            settings={**CLIP, "upper": None}),
    example("bypass_ppo", "grpo", TOKEN, -0.269635, TIS_ROW_1, TIS_ROW_2, settings=CLIP,
            denominator="roll"),
    example("bypass_pg", "cispo", TOKEN, 0.178614, [-0.221034, -0.4, -0.180967],
            [0.148164, 0.232367], settings={"upper": 2.0}, denominator="roll"),
    example("bypass_pg_by_name", "bypass_policy_gradient", TOKEN, 0.178614,
            [-0.221034, -0.4, -0.180967], [0.148164, 0.232367], settings={"cap": 2.0}),
    example("single_step", "grpo", TOKEN, -0.393110, [-0.19604, -0.4, -0.190246],
            [0.221034, 0.172142], settings=CLIP, policy="old", **TIS),
    # IcePop and masked importance sampling
    example("icepop_2", "grpo", TOKEN, 0.007193, TIS_ROW_1, TIS_ROW_2, settings=CLIP,
            correction="icepop", correction_settings={"alpha": 0.5, "beta": 2.0}),
    example("icepop_5", "grpo", TOKEN, -0.571448, TIS_ROW_1, TIS_ROW_2, settings=CLIP,
            correction="icepop", correction_settings={"alpha": 0.5, "beta": 5.0}),
    example("masked_sequence", "grpo", TOKEN, 0.409002, [0.0] * 3, [0.0, 0.256805], settings=CLIP,
            correction="masked_sequence", correction_settings=BAND),
    # M2PO
    example("m2po_old", "m2po", TOKEN, -0.145773, DAPO_ROW, [0.0, 0.269972],
            settings={"tau": 0.04}),
    example("m2po_roll", "m2po", TOKEN, -0.021471, settings={"tau": 0.04}, denominator="roll"),
]  # fmt: skip

SAPO_GATES = [[2.127324, 2.482145, 1.951239], [1.578335, 2.250739]]
SAPO_SLOPES = [[0.995947, 0.941884, 0.999406], [0.970631, 0.967008]]
GSPO_RATIOS = [1.169606, 0.951229]
# name of the example above, W, phi
VESPO_KERNELS = [
    ("vespo_old", [1.599994, 0.904837], [0.423169, 0.896125]),
    ("vespo_roll", [3.320117, 0.860708], [0.010458, 0.842471]),
    ("vespo_old_tis", [2.983649, 0.860708], [0.023176, 0.842471]),
]
TIS_WEIGHTS = [[0.980199, 2.0, 0.951229], [1.105171, 0.860708]]
SEQUENCE_PRODUCTS = [2.075081, 0.951229]
M2_OLD = [[0.0144, 0.16, 0.0025], [0.16, 0.09]]
# denominator, positions kept
M2PO_KEPT = [("old", [{0, 2}, {1}]), ("roll", [{0, 2}, {0, 1}])]

# With max_length 20480 and cache 4096: length, penalty
OVERLONG_EXAMPLES = [(16384, 0.0), (17408, -0.25), (18432, -0.5), (20480, -1.0)]

# New against old, tokens in the loss
KL_EXAMPLES = {
    "k1": [[0.12, 0.4, -0.05], [-0.4, 0.3]],
    "k2": [[0.0072, 0.08, 0.00125], [0.08, 0.045]],
    "k3": [[0.00692, 0.07032, 0.001271], [0.091825, 0.040818]],
}
KL_P, KL_Q = [0.5, 0.3, 0.2], [0.4, 0.4, 0.2]
KL_EXPECTED = {"k1": 0.025267, "k2": 0.024862, "k3": 0.025267}

# Fault cases: inputs and right values


@dataclass(frozen=True, kw_only=True)
class FaultCase:
    """A fault others met: `inputs` to whatever computes it, and the `right` answers by name."""

    id: str
    inputs: dict[str, Any]
    right: dict[str, Any]


FAULT_CASES = {
    case.id: case
    for case in [
        # exp overflows in float32 beyond 88.72, and inf * 0 is not 0
        FaultCase(
            id="IR01",
            inputs={"log_ratios": [100.0, -100.0], "advantage": 0.0, "clamp": 20.0},
            right={"loss": 0.0, "ratios": [4.8517e8, 2.06e-9]},
        ),
        # 0 * inf, when the mask is multiplied in after exp
        FaultCase(
            id="IR03",
            inputs={
                "new": [-1.0, -2.0, 0.0],
                "old": [-1.0, -2.0, float("-inf")],
                "mask": [1, 1, 0],
            },
            right={"ratios": [1.0, 1.0], "mean": 1.0, "padded_gradient": 0.0},
        ),
        # truncated, not masked, and no gradient through the weight
        FaultCase(
            id="IR07",
            inputs={"log_ratios": [0.7, -1.5], "cap": 2.0},
            right={"weights": [2.0, 0.223130], "uncapped": 2.013753, "weight_gradient": 0.0},
        ),
    ]
}
