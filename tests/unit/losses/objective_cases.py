"""Objectives and a batch for the tests that one step must not depend on how the work is split."""

from typing import Any

import torch
from support.fakes import ScoringTrainer, trajectory
from tensordict import TensorDict
from unit.training.updates import policy_update

from rollverify.config.losses import (
    Cispo,
    DecoupledPpo,
    DrGrpo,
    GeometricMask,
    Grpo,
    Gspo,
    GspoToken,
    Icepop,
    M2po,
    Masked,
    MaskStale,
    NoCorrection,
    Opsm,
    Reinforce,
    Sapo,
    Truncated,
    Vespo,
)
from rollverify.config.tables import KlConfig
from rollverify.losses.advantages import CreditRule
from rollverify.losses.objective import Objective
from rollverify.rollout.trajectory import Status

VERSION = 3
WIDE_CLIP = {"clip_low": 0.2, "clip_high": 0.3}
BEHAVIOR, AT_SAMPLING = {"denominator": "behavior"}, {"denominator": "anchor_at_sampling"}
NONE = NoCorrection()

OBJECTIVES = {
    "grpo": Objective(),
    "grpo_behavior": Objective(loss=Grpo(**BEHAVIOR), correction=NONE),
    "grpo_at_sampling": Objective(loss=Grpo(**AT_SAMPLING, dual_clip=1.5)),
    "dr_grpo": Objective(loss=DrGrpo(), correction=Icepop()),
    "gspo": Objective(
        loss=Gspo(**WIDE_CLIP, **AT_SAMPLING), correction=Truncated(level="sequence")
    ),
    "gspo_token": Objective(
        loss=GspoToken(**WIDE_CLIP, **BEHAVIOR), correction=GeometricMask(low=0.7, high=1.4)
    ),
    "sapo": Objective(loss=Sapo(**BEHAVIOR), correction=Opsm()),
    "vespo": Objective(loss=Vespo(**AT_SAMPLING)),
    "cispo": Objective(loss=Cispo(**BEHAVIOR), correction=MaskStale(max_age=1)),
    "decoupled_ppo": Objective(loss=DecoupledPpo(), correction=NONE),
    "m2po": Objective(loss=M2po(**BEHAVIOR), correction=NONE),
    "reinforce": Objective(
        loss=Reinforce(), correction=Masked(level="sequence", low=0.1, high=10.0)
    ),
    "terms": Objective(loss=Grpo(entropy_coefficient=0.2), kl=KlConfig(coefficient=0.3)),
}
"""Every loss and every correction at least once, and the two extra terms."""

MASKING = ("gspo_token", "sapo", "cispo", "m2po")
"""Objectives whose correction or loss drops tokens of `stale_batch`."""

RANK_CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in OBJECTIVES),
    *((name, {"minibatches": 2}) for name in ("gspo", "m2po")),
    *((name, {"masked_in_denominator": False}) for name in MASKING),
    ("m2po", {"masked_in_denominator": False, "minibatches": 2}),
]
"""Objective and settings of the steps that are also taken on several ranks."""


def stale_batch() -> list[TensorDict]:
    """Eight groups of three, 1 to 9 tokens; the first half of each is 2 or 1 steps old."""
    generator = torch.Generator().manual_seed(1)
    trainer = ScoringTrainer()
    made = []
    for group in range(8):
        for sample in range(3):
            size = int(torch.randint(1, 10, (1,), generator=generator))
            ids = torch.randint(0, 6, (size + 2,), generator=generator).tolist()
            own = torch.tensor(trainer.logprobs(ids)[1:])
            noise = 0.25 * torch.randn(2, size, generator=generator)
            one = trajectory(ids[:2], ids[2:], reward=sample / 2, group=group, sample=sample)
            num_old = size // 2
            one["policy_version"] = torch.full((size,), VERSION, dtype=torch.int32)
            one["policy_version"][:num_old] = VERSION - 1 - group % 2
            one["segment_ids"] = (torch.arange(size) >= num_old).int() * (num_old > 0)
            one["behavior_logprobs"] = own + noise.sum(0)
            one["anchor_logprobs"] = torch.full((size,), float("nan"))
            one["anchor_logprobs"][:num_old] = (own + noise[0])[:num_old]
            one["loss_mask"] = torch.rand(size, generator=generator) < 0.9
            one["status"] = torch.tensor(int(Status.LENGTH if size == 9 else Status.STOP))
            made.append(one)
    return made


def take_step(
    trainer: ScoringTrainer,
    finished: list[TensorDict],
    objective: Objective,
    **changes: object,
) -> dict[str, float]:
    """One iteration; the reference is a policy of its own."""
    settings = {
        "credit": CreditRule(max_response_tokens=9),
        "micro_batch_tokens": 1000,
        "aggregation": "sequence_mean",
        "reference": ScoringTrainer(seed=5),
    }
    update = policy_update(trainer, objective, **(settings | changes))
    return update.train_step(finished, VERSION)
