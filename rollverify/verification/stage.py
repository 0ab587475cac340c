"""Cuts U_k back to what the policy after the step still agrees with, and logs every cut.

Runs at BEFORE_WEIGHT_SYNC after scoring and filter. Which tokens stay is decided in
`algorithms/verification.py`; the buffer cuts.
"""

import logging
import time
from typing import Any

import torch.distributed as dist

from rollverify.hooks import StepState
from rollverify.metrics.json_lines import AuditLog
from rollverify.ranks import reduce_metrics
from rollverify.rollout.buffer import TrajectoryBuffer
from rollverify.rollout.trajectory import single_value
from rollverify.verification.prefix import CutRule, VerificationResult, verify_prefixes
from rollverify.verification.scoring import OpsScoring, Reference
from rollverify.verification.switching import acceptance_rate


class Verification:
    """Hook: truncates U_k in place and stamps it with the version it was verified against."""

    def __init__(
        self,
        *,
        ops_scoring: OpsScoring,
        buffer: TrajectoryBuffer,
        segment_threshold: float,
        token_threshold: float,
        audit_log: AuditLog,
        data_group: dist.ProcessGroup | None,
    ) -> None:
        """Set up.

        Args:
            ops_scoring: has scored U_k in this step.
            buffer: holds U_k.
            segment_threshold: d_s, dimensionless, > 0; inf turns the stage off.
            token_threshold: d_t, dimensionless, > 0; inf turns the stage off.
            audit_log: takes a line per cut.
            data_group: ranks that hold different trajectories; None where there is one.
        """
        self._ops_scoring = ops_scoring
        self._buffer = buffer
        self._segment_threshold = segment_threshold
        self._token_threshold = token_threshold
        self._audit_log = audit_log
        self._data_group = data_group

    def __call__(self, state: StepState) -> None:
        """Cut in place. Collective: yes, over the data ranks."""
        start_s = time.perf_counter()
        result = verify_prefixes(
            self._ops_scoring.ops,
            self._ops_scoring.layout,
            segment_threshold=self._segment_threshold,
            token_threshold=self._token_threshold,
        )
        cuts = self._cut(result, state)
        version = single_value("verified_version", state.policy_version)
        for trajectory in state.unfinished:
            trajectory["verified_version"] = version
        scan_s = time.perf_counter() - start_s
        self._audit_log.write(state.step, self._all_cuts(cuts))
        state.metrics |= self._metrics(result)
        state.metrics["verification/scan_s"] = scan_s

    def _cut(self, result: VerificationResult, state: StepState) -> list[dict[str, Any]]:
        """Truncate what verification did not accept whole; a line of the audit log per cut."""
        cuts: list[dict[str, Any]] = []
        accepted: list[int] = result.accepted_lengths.tolist()
        rules: list[int] = result.rules.tolist()
        ops: list[float] = result.cut_ops.tolist()
        for index, trajectory in enumerate(self._ops_scoring.trajectories):
            if rules[index] == CutRule.NONE:
                continue
            num_kept = accepted[index]
            versions = trajectory["policy_version"][num_kept:].unique().tolist()
            num_cut = self._buffer.truncate(trajectory, num_kept)
            cuts.append(
                {
                    "policy_version": state.policy_version,
                    "group_id": int(trajectory["group_id"]),
                    "sample_index": int(trajectory["sample_index"]),
                    "rule": CutRule(rules[index]).name.lower(),
                    "index": num_kept,
                    "ops": ops[index],
                    "kept_tokens": num_kept,
                    "cut_tokens": num_cut,
                    "cut_versions": versions,
                }
            )
        return cuts

    def _all_cuts(self, cuts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Cuts of all ranks by group and sample; nothing on ranks other than the first."""
        group = self._data_group
        if group is not None:
            is_target = dist.get_rank(group) == 0
            parts: list[Any] | None = [None] * dist.get_world_size(group) if is_target else None
            dist.gather_object(cuts, parts, group=group, group_dst=0)
            cuts = [cut for part in parts or [] for cut in part]
        return sorted(cuts, key=lambda cut: (cut["group_id"], cut["sample_index"]))

    def _metrics(self, result: VerificationResult) -> dict[str, float]:
        sums = {
            "trajectories": self._ops_scoring.num_checked_trajectories,
            "checked": self._ops_scoring.num_checked_tokens,
            "untouched": (result.rules == int(CutRule.NONE)).sum().item(),
            "segment": (result.rules == int(CutRule.SEGMENT)).sum().item(),
            "token": (result.rules == int(CutRule.TOKEN)).sum().item(),
            "verified": result.checked_lengths.sum().item(),
            "accepted": result.accepted_lengths.sum().item(),
        }
        if self._data_group is not None:
            sums, _ = reduce_metrics(sums, {}, self._data_group)
        num = sums["trajectories"]
        return {
            "verification/acceptance_rate": acceptance_rate(
                int(sums["accepted"]), int(sums["checked"])
            ),
            "verification/untouched_frac": sums["untouched"] / num if num else 1.0,
            "verification/cuts_segment": sums["segment"],
            "verification/cuts_token": sums["token"],
            "verification/tokens_checked": sums["checked"],
            "verification/tokens_cut": sums["verified"] - sums["accepted"],
        }


logger = logging.getLogger(__name__)

_CONSEQUENCE = {
    "behavior": (
        "responses are cut for the engine's rounding; set verification.reference = 'anchor', raise "
        "segment_threshold or make engine.dtype finer"
    ),
    "anchor": (
        "reference = 'anchor' keeps this out of what is cut, but even fresh tokens are that far "
        "from the trainer's policy"
    ),
}


class NoiseFloor:
    """Hook: warns once in a run, in the first step whose noise reaches d_s."""

    def __init__(self, *, segment_threshold: float, reference: Reference) -> None:
        """Set up.

        Args:
            segment_threshold: d_s, dimensionless, > 0; inf never warns.
            reference: log-probs that verification compares with, which decides what noise does.
        """
        self._segment_threshold = segment_threshold
        self._reference: Reference = reference
        self._has_warned = False

    def __call__(self, state: StepState) -> None:
        """Read `mismatch/ops_mean` of the step."""
        noise = state.metrics["mismatch/ops_mean"]
        if self._has_warned or noise < self._segment_threshold:
            return
        self._has_warned = True
        logger.warning(
            "step %d: engine and trainer differ by an OPS of %.2g under the same weights, not "
            "below verification.segment_threshold = %g: %s",
            state.step,
            noise,
            self._segment_threshold,
            _CONSEQUENCE[self._reference],
        )
