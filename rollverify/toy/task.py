r"""A task whose chains of thought have a heavy-tailed length: apply a hidden table n times.

Each function permutes the states. The prompt "F12k\n" asks for function F applied 12 times to
state k. The response goes on in the same form, one line "<steps left><state>" per step, and counts
down to 0: "11c\n10d\n...01x\n00q\n". All counters have the same number of digits, so each line
depends on the one at a fixed distance before it and on the first letter of the prompt. n is
log-normal. Demonstrations show a share of the table wrongly some of the time, which leaves a base
model something to learn from rewards. All is a pure function of settings and seed.
"""

import math
import random
import string
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import NormalDist
from typing import Literal

from rollverify.data.prompts import Prompt
from rollverify.data.seeding import permutation, random_stream, stable_hash
from rollverify.errors import ConfigError

FUNCTION_NAMES = string.ascii_uppercase
STATE_NAMES = string.ascii_lowercase
TEST_FRAC = 0.25
"""Share of all (function, state, count) triples that belongs to the test side, in [0, 1]."""

Side = Literal["train", "test"]


@dataclass(kw_only=True, slots=True, frozen=True)
class Problem(Prompt):
    """A prompt of this task with the values it was made from."""

    function: int
    """Row of the table, from 0; shown as an upper-case letter."""
    state: int
    """First state, from 0; shown as a lower-case letter."""
    count: int


@dataclass(kw_only=True, slots=True, frozen=True)
class NoisyEntry:
    """A table entry that demonstrations sometimes show wrongly."""

    wrong_state: int
    """The one wrong alternative, never the true next state."""
    probability: float


def side_of(function: int, state: int, count: int) -> Side:
    """Side a problem belongs to: a fixed hash decides, whatever the seed and the set sizes."""
    draw = stable_hash("side", function, state, count) / 2**64
    return "test" if draw < TEST_FRAC else "train"


@dataclass(kw_only=True, slots=True, frozen=True)
class PermutationChain:
    """The task for one seed: its table, its problems and its demonstrations."""

    seed: int = 0
    num_functions: int = 8
    """1..26, one upper-case letter each."""
    num_states: int = 24
    """2..26, one lower-case letter each."""
    median_steps: float = 8.0
    """Median of the log-normal count, in steps."""
    sigma: float = 0.9
    """Standard deviation of ln(count)."""
    min_steps: int = 2
    max_steps: int = 80
    """Counts are rounded, then clipped to min_steps..max_steps."""
    noisy_entry_frac: float = 0.25
    """Share of table entries that demonstrations sometimes show wrongly, in [0, 1]."""
    noise_low: float = 0.3
    noise_high: float = 0.7
    """Each noisy entry is wrong with a probability uniform in [noise_low, noise_high]."""
    table: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    """[num_functions][num_states]: true next state."""
    noise: dict[tuple[int, int], NoisyEntry] = field(init=False, repr=False, compare=False)
    """(function, state) -> noisy entry."""
    _pools: dict[Side, dict[int, list[tuple[int, int]]]] = field(
        init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        self._check()
        stream = random_stream(self.seed, "table")
        rows = [tuple(permutation(self.num_states, stream)) for _ in range(self.num_functions)]
        object.__setattr__(self, "table", tuple(rows))
        object.__setattr__(self, "noise", self._draw_noise())
        object.__setattr__(self, "_pools", self._split_problems())

    def count_probabilities(self) -> dict[int, float]:
        """Probability of each count: log-normal, rounded to an integer, clipped; sums to 1."""
        normal = NormalDist(math.log(self.median_steps), self.sigma)
        counts = range(self.min_steps, self.max_steps + 1)
        edges = [normal.cdf(math.log(count + 0.5)) for count in counts[:-1]]
        bounds = zip(counts, [0.0, *edges], [*edges, 1.0], strict=True)
        return {count: above - below for count, below, above in bounds}

    def train_problems(self, num: int) -> list[Problem]:
        """Training problems; the first k of a longer list are the same k.

        Counts follow the log-normal exactly, and short counts have few problems, so a problem comes
        back (under another id) once all of its count were used: by default from the 1,500th on.
        """
        return self._problems("train", num)

    def test_problems(self, num: int) -> list[Problem]:
        """Held-out problems, all distinct, lengths as above; a ConfigError if they run out."""
        return self._problems("test", num)

    def demonstrations(self, num: int, seed: int) -> list[tuple[str, str]]:
        """Pairs (prompt, response) of training problems, with repetition and noise, without <eos>.

        A wrong step is not repaired: the chain goes on from the wrong state. `seed` is independent
        of the task's; the first k of a longer list are the same k.
        """
        stream = random_stream(self.seed, "demonstrations", seed)
        draw_count = self._count_drawer("train", stream)
        pairs: list[tuple[str, str]] = []
        for _ in range(num):
            count = draw_count()
            pool = self._pools["train"][count]
            function, state = pool[int(stream.random() * len(pool))]
            lines = self._chain(function, state, count, stream)
            pairs.append((self.prompt_text(function, state, count), "".join(lines)))
        return pairs

    def true_response(self, problem: Problem) -> str:
        """The response that follows the true table; the reward gives it 1."""
        return "".join(self._chain(problem.function, problem.state, problem.count, None))

    def prompt_text(self, function: int, state: int, count: int) -> str:
        r"""Prompt of a problem, e.g. (5, 10, 12) -> "F12k\n"."""
        return FUNCTION_NAMES[function] + self._line(count, state)

    def _line(self, left: int, state: int) -> str:
        return f"{left:0{len(str(self.max_steps))}d}{STATE_NAMES[state]}\n"

    def _chain(
        self, function: int, state: int, count: int, noise_stream: random.Random | None
    ) -> list[str]:
        """Lines of a response; `None` follows the true table."""
        row = self.table[function]
        lines: list[str] = []
        for left in range(count - 1, -1, -1):
            noisy = self.noise.get((function, state)) if noise_stream is not None else None
            if noisy and noise_stream and noise_stream.random() < noisy.probability:
                state = noisy.wrong_state
            else:
                state = row[state]
            lines.append(self._line(left, state))
        return lines

    def _problems(self, side: Side, num: int) -> list[Problem]:
        stream = random_stream(self.seed, "problems", side)
        draw_count = self._count_drawer(side, stream)
        unused: dict[int, list[tuple[int, int]]] = {}
        problems: list[Problem] = []
        for index in range(num):
            count = draw_count()
            if side == "test" and unused.get(count) == []:
                raise ConfigError(
                    f"prepare.num_test_problems = {num}: only {index} distinct ones follow the "
                    f"length distribution (count {count} is used up); lower it, or raise "
                    "prepare.num_functions or prepare.num_states"
                )
            if not unused.get(count):
                pool = self._pools[side][count]
                unused[count] = [pool[i] for i in permutation(len(pool), stream)]
            function, state = unused[count].pop()
            problems.append(self._problem(f"{side}-{index:05d}", function, state, count))
        return problems

    def _problem(self, prompt_id: str, function: int, state: int, count: int) -> Problem:
        final = state
        for _ in range(count):
            final = self.table[function][final]
        return Problem(
            prompt_id=prompt_id,
            text=self.prompt_text(function, state, count),
            answer=self._line(0, final).strip(),
            function=function,
            state=state,
            count=count,
        )

    def _count_drawer(self, side: Side, stream: random.Random) -> Callable[[], int]:
        """Function that draws a count among those that have problems on this side."""
        chances = [(n, p) for n, p in self.count_probabilities().items() if self._pools[side][n]]
        counts = [n for n, _ in chances]
        sums = list(accumulate(p for _, p in chances))
        return lambda: counts[min(bisect_right(sums, stream.random() * sums[-1]), len(sums) - 1)]

    def _draw_noise(self) -> dict[tuple[int, int], NoisyEntry]:
        stream = random_stream(self.seed, "noise")
        num_entries = self.num_functions * self.num_states
        noise: dict[tuple[int, int], NoisyEntry] = {}
        for entry in permutation(num_entries, stream)[: round(self.noisy_entry_frac * num_entries)]:
            function, state = divmod(entry, self.num_states)
            shift = 1 + int(stream.random() * (self.num_states - 1))
            noise[function, state] = NoisyEntry(
                wrong_state=(self.table[function][state] + shift) % self.num_states,
                probability=self.noise_low + (self.noise_high - self.noise_low) * stream.random(),
            )
        return noise

    def _split_problems(self) -> dict[Side, dict[int, list[tuple[int, int]]]]:
        """Side -> count -> all (function, state) of that side."""
        counts = range(self.min_steps, self.max_steps + 1)
        pools: dict[Side, dict[int, list[tuple[int, int]]]] = {
            "train": {n: [] for n in counts},
            "test": {n: [] for n in counts},
        }
        for function in range(self.num_functions):
            for state in range(self.num_states):
                for n in counts:
                    pools[side_of(function, state, n)][n].append((function, state))
        for side, pool in pools.items():
            if not any(pool.values()):
                raise ConfigError(
                    f"the task has no {side} problem; raise prepare.num_functions, "
                    "prepare.num_states or prepare.max_steps"
                )
        return pools

    def _check(self) -> None:
        rules = [
            ("num_functions", 1 <= self.num_functions <= len(FUNCTION_NAMES), "in 1..26"),
            ("num_states", 2 <= self.num_states <= len(STATE_NAMES), "in 2..26"),
            ("median_steps", 0 < self.median_steps < math.inf, "> 0"),
            ("sigma", 0 < self.sigma < math.inf, "> 0"),
            ("min_steps", self.min_steps >= 1, ">= 1"),
            ("max_steps", self.max_steps >= self.min_steps, f">= min_steps = {self.min_steps}"),
            ("noisy_entry_frac", 0 <= self.noisy_entry_frac <= 1, "in [0, 1]"),
            ("noise_low", 0 <= self.noise_low <= 1, "in [0, 1]"),
            ("noise_high", self.noise_low <= self.noise_high <= 1, "in [noise_low, 1]"),
        ]
        for name, holds, rule in rules:
            if not holds:
                raise ConfigError(f"prepare.{name} must be {rule}, got {getattr(self, name)}")
