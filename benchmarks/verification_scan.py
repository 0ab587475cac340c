"""Time of the OPS scan (Algorithms 1 and 2) on one core, against the literal Python loop.

Does not run a model: log-probs are random, with most trajectories close to on-policy.

    python benchmarks/verification_scan.py

Prints one JSON line. Target: 1M tokens over 2,000 trajectories in at most 50 ms; exit code 1 if
that is missed or the two disagree.
"""

import argparse
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rollverify.rollout.layout import pack_layout
from rollverify.verification.ops import token_ops
from rollverify.verification.prefix import Cut, find_cuts

TARGET_MS = 50.0
MAX_SEGMENTS = 6
SEGMENT_THRESHOLD, TOKEN_THRESHOLD = 0.01, 2.0


def load_reference() -> ModuleType:
    """The literal transcription that the unit tests compare with."""
    path = ROOT / "tests" / "unit" / "losses" / "reference.py"
    spec = importlib.util.spec_from_file_location("reference", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_batch(num_tokens: int, num_trajectories: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Updated and sampled log-probs, trajectory ids and segment ids, each [T]."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(num_trajectories, generator=generator) + 0.1
    lengths = (weights / weights.sum() * num_tokens).long()
    lengths[-1] += num_tokens - lengths.sum()
    trajectory_ids = torch.repeat_interleave(torch.arange(num_trajectories), lengths)
    starts = lengths.cumsum(0) - lengths
    positions = torch.arange(num_tokens) - starts[trajectory_ids]
    num_segments = torch.randint(1, MAX_SEGMENTS + 1, (num_trajectories,), generator=generator)
    segment_ids = positions * num_segments[trajectory_ids] // lengths[trajectory_ids]
    sampled = -torch.rand(num_tokens, generator=generator) * 3
    # The spread grows from segment to segment of some trajectories: about half are cut.
    drift = 10 ** (-4 + 2 * torch.rand(num_trajectories, generator=generator))[trajectory_ids]
    noise = torch.randn(num_tokens, generator=generator) * drift * (1 + segment_ids)
    noise[torch.rand(num_tokens, generator=generator) < 2e-5] = 1.5
    return sampled + noise, sampled, trajectory_ids, segment_ids


def best_ms(run: Callable[[], object], repeats: int) -> list[float]:
    """Milliseconds of each repeat, fastest first."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    return sorted(times)


def segments_of(row: Tensor, trajectory_ids: Tensor, segment_ids: Tensor, num: int) -> list:
    """The packed row as lists: per trajectory, per segment, per token."""
    nested: list[list[list[float]]] = [[] for _ in range(num)]
    last = None
    columns = (row.double().tolist(), trajectory_ids.tolist(), segment_ids.tolist())
    for value, owner, segment in zip(*columns, strict=True):
        if last != (owner, segment):
            nested[owner].append([])
            last = (owner, segment)
        nested[owner][-1].append(value)
    return nested


def main() -> int:
    """Measure, compare and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--trajectories", type=int, default=2_000)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    updated, behavior, owners, segments = make_batch(args.tokens, args.trajectories)
    reference = load_reference()

    def scan() -> list[Cut]:
        layout = pack_layout(owners, segments, args.trajectories)
        return find_cuts(
            token_ops(updated, behavior, layout),
            layout,
            segment_threshold=SEGMENT_THRESHOLD,
            token_threshold=TOKEN_THRESHOLD,
        )

    def literal() -> list[int]:
        kept = []
        for new, old in zip(*nested, strict=True):
            shifts = reference.ops_of_trajectory(new, old)
            kept.append(reference.verify_trajectory(shifts, SEGMENT_THRESHOLD, TOKEN_THRESHOLD)[0])
        return kept

    nested = [segments_of(row, owners, segments, args.trajectories) for row in (updated, behavior)]
    cuts = scan()
    accepted = owners.bincount(minlength=args.trajectories).tolist()
    for cut in cuts:
        accepted[cut.index] = cut.num_kept
    num_different = sum(a != b for a, b in zip(accepted, literal(), strict=True))
    scans, literals = best_ms(scan, args.repeats), best_ms(literal, 3)
    median = scans[len(scans) // 2]
    report = {
        "tokens": args.tokens,
        "trajectories": args.trajectories,
        "scan_best_ms": round(scans[0], 2),
        "scan_median_ms": round(median, 2),
        "literal_best_ms": round(literals[0], 2),
        "literal_to_scan_ratio": round(literals[0] / scans[0], 1),
        "acceptance_rate": round(sum(accepted) / args.tokens, 3),
        "num_cut_by_segment": sum(cut.rule == "segment" for cut in cuts),
        "num_cut_by_token": sum(cut.rule == "token" for cut in cuts),
        "num_different_trajectories": num_different,
        "load_average": round(os.getloadavg()[0], 2),
    }
    print(json.dumps(report))
    return int(median > TARGET_MS or num_different > 0)


if __name__ == "__main__":
    sys.exit(main())
