"""A rollouter on a fake engine with everything it needs, one data rank unless told otherwise."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from support.fakes import EOS, FakeEngine
from tensordict import TensorDict

from rollverify.config.tables import DynamicSamplingConfig, RolloutConfig
from rollverify.ranks import Ranks
from rollverify.rollout.buffer import TrajectoryBuffer
from rollverify.rollout.ledger import PromptLedger
from rollverify.rollout.prompt_queue import EncodedPrompt, PromptQueue
from rollverify.rollout.requests import RequestLoop, ResumedRouting
from rollverify.rollout.rollouter import Rollouter

NUM_PROMPTS = 1000


def prompt(number: int) -> EncodedPrompt:
    """Prompt [number]; its reward is the response's length."""
    return EncodedPrompt(
        token_ids=(number,), grade=lambda ids: float(len(ids)), prompt_index=number
    )


PROMPTS = [prompt(number) for number in range(NUM_PROMPTS)]


def stream(world_size: int) -> Iterator[list[EncodedPrompt]]:
    """Prompts in order, `world_size` at a time."""
    start = 0
    while True:
        yield [PROMPTS[(start + i) % NUM_PROMPTS] for i in range(world_size)]
        start += world_size


@dataclass(kw_only=True)
class Parts:
    """The objects of one rank's rollout phase."""

    engine: FakeEngine
    buffer: TrajectoryBuffer
    ledger: PromptLedger
    queue: PromptQueue
    loop: RequestLoop
    rollouter: Rollouter

    def collect(self, version: int) -> tuple[list[TensorDict], list[TensorDict]]:
        """One phase under a version that engine and caller share."""
        self.engine.version = version
        return self.rollouter.collect(version)

    def check(self) -> None:
        """Tokens and prompts add up."""
        self.buffer.check()
        self.ledger.check()


def make_parts(
    engine: FakeEngine | None = None,
    *,
    group_size: int = 1,
    prompts_per_step: int = 2,
    count_every: int = 1,
    max_response_tokens: int = 1000,
    mask_older: bool = False,
    routing: ResumedRouting | None = None,
    prompts: Sequence[EncodedPrompt] = PROMPTS,
    num_graders: int = 0,
    **changes: Any,
) -> Parts:
    """Two groups per step, two requests in flight, partial rollouts without verification."""
    rollout = RolloutConfig(
        prompts_per_step=prompts_per_step,
        count_every=count_every,
        max_response_tokens=max_response_tokens,
        mask_older_segments=mask_older,
        temperature=0.7,
    )
    values: dict[str, Any] = {
        "num_in_flight": 2,
        "max_num_seqs": 1_000_000,
        "is_on_policy": False,
        "must_be_verified": False,
        "ranks": Ranks(),
        "dynamic_sampling": DynamicSamplingConfig(),
        "has_signal": lambda rewards: bool((rewards != rewards[0]).any()),
    } | changes
    ranks, engine = values["ranks"], engine or FakeEngine()
    buffer, ledger = TrajectoryBuffer(group_size=group_size), PromptLedger()
    queue = PromptQueue(batches=stream(ranks.size), prompts=PROMPTS, ranks=ranks)
    loop = RequestLoop(
        engine=engine,
        buffer=buffer,
        prompts=prompts,
        rollout=rollout,
        stop_token_ids=(EOS,),
        run_seed=3,
        routing=routing,
        num_graders=num_graders,
    )
    rollouter = Rollouter(
        loop=loop, buffer=buffer, queue=queue, ledger=ledger, rollout=rollout, **values
    )
    return Parts(
        engine=engine, buffer=buffer, ledger=ledger, queue=queue, loop=loop, rollouter=rollouter
    )


def names(trajectories: list[TensorDict]) -> list[tuple[int, int]]:
    """(group, sample) of each."""
    return [(int(t["group_id"]), int(t["sample_index"])) for t in trajectories]
