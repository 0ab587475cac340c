"""One rank of the verify phase that test_verify_ranks.py checks; not a test itself.

Each rank writes its metrics and how much of U_k it has left.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.fakes import ScoringTrainer, paused
from tensordict import TensorDict

from rollverify.config.tables import FilterConfig, SwitchingConfig, VerificationConfig
from rollverify.hooks import StepState
from rollverify.metrics.json_lines import AuditLog
from rollverify.ranks import Ranks
from rollverify.rollout.buffer import TrajectoryBuffer
from rollverify.rollout.ledger import PromptLedger, PromptState
from rollverify.training.scoring import TrajectoryScorer
from rollverify.verification.filters import TrajectoryFilter
from rollverify.verification.metrics import trained_metrics
from rollverify.verification.scoring import AnchorScoring, OpsScoring
from rollverify.verification.stage import Verification
from rollverify.verification.switching import Switching
from rollverify.verification.window import AcceptanceWindow

NUM_GROUPS = 6
VERSION = 9


class Told:
    """Stands in for the rollouter."""

    def set_on_policy(self, is_on_policy: bool) -> None:
        del is_on_policy


def groups_of(rank: int, world_size: int) -> dict[int, list[TensorDict]]:
    """This rank's share of the groups; group 0 is empty, so ranks hold different amounts."""
    made: dict[int, list[TensorDict]] = {}
    for group in range(NUM_GROUPS):
        generator = torch.Generator().manual_seed(group)
        members = []
        for sample in range(3):
            sizes = torch.randint(0, 5, (3,), generator=generator) * (group > 0)
            ages = (4, 2, 0) if group == 3 else (3, 2, 1)
            segments = {
                VERSION - age: (-2 * torch.rand(int(size), generator=generator)).tolist()
                for age, size in zip(ages, sizes, strict=True)
            }
            one = paused(segments, group=group, sample=sample, has_anchors=False)
            one["response_ids"] = torch.randint(
                0, 9, one["response_ids"].shape, generator=generator
            )
            members.append(one)
        if group % world_size == rank:
            made[group] = members
    return made


def verify(
    rank: int, world_size: int, group: dist.ProcessGroup | None, folder: Path
) -> dict[str, Any]:
    """Metrics and lengths after anchors, a step, OPS, filter, verification and switching."""
    buffer, ledger = TrajectoryBuffer(group_size=3), PromptLedger()
    for group_id, members in groups_of(rank, world_size).items():
        buffer.add_group(members)
        ledger.add(group_id)
        ledger.move(group_id, PromptState.RUNNING)
        ledger.move(group_id, PromptState.PAUSED)
    state = StepState(step=4, policy_version=VERSION, unfinished=buffer.trajectories())
    trainer = ScoringTrainer(vocab_size=9)
    ranks = Ranks.of(group)
    scorer = TrajectoryScorer(trainer=trainer, micro_batch_tokens=16, temperature=1.0, ranks=ranks)
    lengths = [len(one["response_ids"]) for one in state.unfinished]
    anchors = scorer.score(state.unfinished).split(lengths)
    for one, anchor in zip(state.unfinished, anchors, strict=True):
        one["anchor_logprobs"] = anchor  # As if taken in each version's own step.
    AnchorScoring(scorer=scorer)(state)
    own = 0.9 * scorer.score(state.unfinished)
    state.metrics |= trained_metrics(state.unfinished, own, VERSION, ranks)
    with torch.no_grad():
        trainer.logits += 0.05 * torch.arange(9.0)
    audit_log = AuditLog(folder, rank=rank)
    filtered = FilterConfig(name="staleness", max_staleness=3, discard="group")
    stages = (
        Verification(
            score=OpsScoring(scorer=scorer, against="anchor", symmetric=False, ranks=ranks),
            filter=TrajectoryFilter(settings=filtered, buffer=buffer, ledger=ledger, ranks=ranks),
            settings=VerificationConfig(segment_threshold=0.18, token_threshold=0.22),
            buffer=buffer,
            audit_log=audit_log,
            ranks=ranks,
        ),
        Switching(window=AcceptanceWindow(SwitchingConfig(window=2)), rollouter=Told()),
    )
    for stage in stages:
        stage(state)
    audit_log.close()
    del state.metrics["verification/scan_s"], state.metrics["verification/scoring_s"]
    left = {
        f"{int(one['group_id'])}/{int(one['sample_index'])}": one["response_ids"].tolist()
        for one in state.unfinished
    }
    return {"metrics": state.metrics, "left": left, "num_rows": len(trainer.scored_rows)}


def main(rank: int, world_size: int, folder: Path) -> None:
    result = verify(rank, world_size, dist.group.WORLD, folder)
    (folder / f"{rank}.json").write_text(json.dumps(result))
