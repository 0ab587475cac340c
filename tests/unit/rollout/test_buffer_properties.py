"""Tokens are conserved whatever happens to a buffer: hypothesis looks for counterexamples."""

from collections import Counter
from dataclasses import asdict, dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from rollverify.rollout.buffer import TrajectoryBuffer
from rollverify.rollout.trajectory import Status, new_trajectory, validate_trajectory

GROUP_SIZE = 2
FATES = ("trained", "discarded", "dropped")

ACTIONS = ("add", "append", "append", "append", "finish", "finish", "cut", "discard", "pop", "move")
CALLS = st.lists(
    st.tuples(st.sampled_from(ACTIONS), st.integers(0, 11), st.integers(0, 5), st.integers(0, 2)),
    max_size=60,
)
"""(what to do, which sample or group, tokens to append or keep, a further choice)."""


@dataclass
class Sample:
    """What a trajectory must hold, kept by other means: one (id, version) per token."""

    rank: int
    tokens: list[tuple[int, int]] = field(default_factory=list)
    is_finished: bool = False


class Model:
    """Two ranks' buffers, and beside them the same as plain lists and counters."""

    def __init__(self) -> None:
        self.buffers = [TrajectoryBuffer(group_size=GROUP_SIZE) for _ in range(2)]
        self.samples: dict[tuple[int, int], Sample] = {}
        self.counts = [Counter[str](), Counter[str]()]
        self.num_groups = 0
        self.version = 0

    def trajectory(self, name: tuple[int, int]) -> TensorDict:
        return self.buffers[self.samples[name].rank].group(name[0])[name[1]]

    def act(self, action: str, choice: int, size: int, extra: int) -> None:
        if action == "add":
            self.add(extra % 2)
        elif self.samples:
            name = sorted(self.samples)[choice % len(self.samples)]
            getattr(self, action)(name, size, extra)

    def add(self, rank: int) -> None:
        group = [
            new_trajectory(
                prompt_ids=[7], group_id=self.num_groups, prompt_index=0, sample_index=index
            )
            for index in range(GROUP_SIZE)
        ]
        self.buffers[rank].add_group(group)
        self.samples |= {(self.num_groups, index): Sample(rank) for index in range(GROUP_SIZE)}
        self.num_groups += 1

    def append(self, name: tuple[int, int], size: int, extra: int) -> None:
        sample = self.samples[name]
        if sample.is_finished:
            return
        self.version += extra
        new = [100 * self.version + len(sample.tokens) + i for i in range(size)]
        self.buffers[sample.rank].append(
            self.trajectory(name), new, [-1.0] * size, policy_version=self.version, seed=size
        )
        sample.tokens += [(token, self.version) for token in new]
        self.counts[sample.rank]["generated"] += size

    def finish(self, name: tuple[int, int], size: int, extra: int) -> None:
        sample = self.samples[name]
        if not sample.is_finished:
            self.append(name, 1, extra)
        status = Status.STOP if size else Status.LENGTH
        self.buffers[sample.rank].set_outcome(self.trajectory(name), status, 1.0)
        sample.is_finished = True

    def cut(self, name: tuple[int, int], size: int, extra: int) -> None:
        sample = self.samples[name]
        kept = min(size, len(sample.tokens))
        num_cut = self.buffers[sample.rank].truncate(self.trajectory(name), kept)
        assert num_cut == len(sample.tokens) - kept
        self._keep(sample, kept, "cut")

    def discard(self, name: tuple[int, int], size: int, extra: int) -> None:
        sample = self.samples[name]
        num_discarded = self.buffers[sample.rank].discard(self.trajectory(name))
        assert num_discarded == len(sample.tokens)
        self._keep(sample, 0, "discarded")

    def _keep(self, sample: Sample, kept: int, fate: str) -> None:
        self.counts[sample.rank][fate] += len(sample.tokens) - kept
        sample.is_finished = sample.is_finished and kept == len(sample.tokens)
        del sample.tokens[kept:]

    def pop(self, name: tuple[int, int], size: int, extra: int) -> None:
        members = [(name[0], index) for index in range(GROUP_SIZE)]
        samples, fate = [self.samples[member] for member in members], FATES[extra]
        if fate == "trained" and not all(sample.is_finished for sample in samples):
            return
        self.buffers[samples[0].rank].pop_group(name[0], fate)
        self.counts[samples[0].rank][fate] += sum(len(sample.tokens) for sample in samples)
        for member in members:
            del self.samples[member]

    def move(self, name: tuple[int, int], size: int, extra: int) -> None:
        source = self.samples[name].rank
        self.buffers[1 - source].add_group(self.buffers[source].pop_group(name[0], "moved"))
        for index in range(GROUP_SIZE):
            self.samples[name[0], index].rank = 1 - source

    def held(self, rank: int) -> dict[tuple[int, int], Sample]:
        return {
            name: self.samples[name]
            for name in sorted(self.samples)
            if self.samples[name].rank == rank
        }

    def complete(self, rank: int) -> list[int]:
        finished = Counter(name[0] for name, one in self.held(rank).items() if one.is_finished)
        return sorted(group for group, count in finished.items() if count == GROUP_SIZE)


def check_counts(model: Model) -> None:
    """Counts of both ranks, and that all generated tokens are somewhere."""
    for rank, buffer in enumerate(model.buffers):
        buffer.check()
        assert {k: v for k, v in asdict(buffer.counts).items() if v} == +model.counts[rank]
        assert buffer.num_tokens == sum(len(one.tokens) for one in model.held(rank).values())
        assert buffer.complete_groups() == model.complete(rank)
        assert buffer.num_complete == len(model.complete(rank))
    total = sum(model.counts, Counter())
    fates = sum(total[fate] for fate in ("trained", "cut", "discarded", "dropped"))
    assert total["generated"] == fates + sum(buffer.num_tokens for buffer in model.buffers)
    assert sum(buffer.num_moved_in for buffer in model.buffers) == 0


def check_contents(model: Model) -> None:
    """Every trajectory holds its tokens in order, with their versions and rising segments."""
    for rank, buffer in enumerate(model.buffers):
        held = model.held(rank)
        trajectories = buffer.trajectories()
        assert [(int(t["group_id"]), int(t["sample_index"])) for t in trajectories] == list(held)
        for one, sample in zip(trajectories, held.values(), strict=True):
            validate_trajectory(one)
            ids, versions = one["response_ids"].tolist(), one["policy_version"].tolist()
            assert list(zip(ids, versions, strict=True)) == sample.tokens
            ranks_of_versions = {v: i for i, v in enumerate(sorted(set(versions)))}
            assert one["segment_ids"].tolist() == [ranks_of_versions[v] for v in versions]
            assert (int(one["status"]) != Status.UNFINISHED) == sample.is_finished


@settings(deadline=None, max_examples=150)
@given(CALLS)
def test_no_token_is_lost_or_counted_twice_whatever_happens(calls):
    model = Model()
    for call in calls:
        model.act(*call)
        check_counts(model)
    check_contents(model)
