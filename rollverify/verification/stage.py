"""What RollVerify does with U_k once the trainer holds policy k + 1 (Section 4.2)."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rollverify.config.tables import VerificationConfig
from rollverify.hooks import StepState
from rollverify.metrics.json_lines import AuditLog
from rollverify.ranks import Ranks
from rollverify.rollout.buffer import TrajectoryBuffer
from rollverify.rollout.trajectory import single_value
from rollverify.verification.filters import TrajectoryFilter
from rollverify.verification.prefix import Cut, find_cuts
from rollverify.verification.scoring import OpsScoring, Scored
from rollverify.verification.window import acceptance_rate

CutLine = dict[str, Any]
"""What the audit log says of a cut."""


@dataclass(kw_only=True)
class Verification:
    """Hook: measures, filters and cuts U_k, as far as it is given the means."""

    score: OpsScoring
    filter: TrajectoryFilter
    settings: VerificationConfig
    buffer: TrajectoryBuffer
    audit_log: AuditLog | None
    """Takes a line per cut; None where nothing is cut, as with method partial_rollout."""
    ranks: Ranks

    def __call__(self, state: StepState) -> None:
        """Score U_k under policy k + 1, filter, cut and stamp it with that version. Collective."""
        with _timed(state, "verification/scoring_s"):
            scored = self.score(state)  # Algorithm 1: OPS of each token
        kept = self.filter(scored, state)  # Section 3.3: baselines, off by default
        cuts: list[CutLine] = []
        if self.audit_log is not None:
            with _timed(state, "verification/scan_s"):
                cuts = self._cut(kept, state.policy_version)  # Algorithm 2
                version = single_value("verified_version", state.policy_version)
                for trajectory in state.unfinished:
                    trajectory["verified_version"] = version
            self.audit_log.write(state.step, self._of_all_ranks(cuts))
        self._count(scored, kept, cuts, state)

    def _cut(self, scored: Scored, policy_version: int) -> list[CutLine]:
        cuts = find_cuts(
            scored.ops,
            scored.layout,
            segment_threshold=self.settings.segment_threshold,
            token_threshold=self.settings.token_threshold,
        )
        return [self._truncate(scored, cut, policy_version) for cut in cuts]

    def _truncate(self, scored: Scored, cut: Cut, policy_version: int) -> CutLine:
        trajectory = scored.trajectories[cut.index]
        cut_versions = trajectory["policy_version"][cut.num_kept :].unique().tolist()
        num_cut = self.buffer.truncate(trajectory, cut.num_kept)
        return {
            "policy_version": policy_version,
            "group_id": int(trajectory["group_id"]),
            "sample_index": int(trajectory["sample_index"]),
            "rule": cut.rule,
            "index": cut.num_kept,
            "ops": cut.ops,
            "kept_tokens": cut.num_kept,
            "cut_tokens": num_cut,
            "cut_versions": cut_versions,
        }

    def _of_all_ranks(self, cuts: list[CutLine]) -> list[CutLine]:
        every = [cut for part in self.ranks.gather(cuts) for cut in part]
        return sorted(every, key=lambda cut: (cut["group_id"], cut["sample_index"]))

    def _count(self, scored: Scored, kept: Scored, cuts: list[CutLine], state: StepState) -> None:
        """Acceptance rate of the step over all ranks, and `verification/` where U_k is cut."""
        rules = [cut["rule"] for cut in cuts]
        sums = self.ranks.sum(
            {
                "trajectories": len(scored.trajectories),
                "checked": scored.layout.num_tokens,
                "accepted": sum(len(t["response_ids"]) for t in kept.trajectories),
                "untouched": len(kept.trajectories) - len(cuts),
                "segment": rules.count("segment"),
                "token": rules.count("token"),
                "cut": sum(cut["cut_tokens"] for cut in cuts),
            }
        )
        state.acceptance_rate = acceptance_rate(int(sums["accepted"]), int(sums["checked"]))
        if self.audit_log is None:
            return
        num = sums["trajectories"]
        state.metrics |= {
            "verification/acceptance_rate": state.acceptance_rate,
            "verification/untouched_frac": sums["untouched"] / num if num else 1.0,
            "verification/cuts_segment": sums["segment"],
            "verification/cuts_token": sums["token"],
            "verification/tokens_checked": sums["checked"],
            "verification/tokens_cut": sums["cut"],
        }


@contextmanager
def _timed(state: StepState, key: str) -> Iterator[None]:
    start_s = time.perf_counter()
    yield
    state.metrics[key] = time.perf_counter() - start_s
