"""Hand-written stand-ins for the rollout engine and the policy trainer, shared by the unit tests.

They append what happens to an event list, so a test can assert the order of calls.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from rollverify.engine.engine import (
    Completion,
    EngineMemory,
    FinishReason,
    GenerationRequest,
)
from rollverify.errors import RolloutError
from rollverify.rollout.trajectory import Status, append_segment, new_trajectory, set_outcome
from rollverify.training.packing import PackedRow, TrajectoryRow

EOS = 9


class FakeEngine:
    """Emits, at response position p (from 0) under version v, token 100 v + p at -0.1 (v + 1) nats.

    Every running request gets one token per step; more requests than `max_num_seqs` wait. The
    position goes on where a resumed request's response ends, with prompts of `prompt_tokens`.
    `stop_after` ends a response with the stop token after so many tokens: {request id: tokens}, the
    stop token included. With `records_routing` the token at position j of the context went, under
    version v, to experts 10 v + j + 1 and 100 (1 layer, 2 per token).
    """

    def __init__(
        self,
        version: int = 0,
        *,
        events: list[str] | None = None,
        stop_after: dict[str, int] | None = None,
        parameters: Iterable[str] = ("w",),
        prompt_tokens: int = 1,
        max_num_seqs: int = 1_000_000,
        records_routing: bool = False,
    ) -> None:
        self.records_routing = records_routing
        self.version = version
        self.events = events if events is not None else []
        self.stop_after = stop_after or {}
        self.prompt_tokens = prompt_tokens
        self.max_num_seqs = max_num_seqs
        self.requests: list[GenerationRequest] = []
        """Every request ever added."""
        self.weights = {name: torch.zeros(1) for name in parameters}
        self.scores = [-0.5]
        self.lost: set[str] = set()
        """Requests that end without an answer."""
        self.failures: list[Exception] = []
        """Raised by the next steps, one each."""
        self.fail_at: set[int] = set()
        """Calls of `step`, from 1, that raise."""
        self.num_calls = 0
        self.num_steps = 0
        self.num_preemptions = self.num_lost_tokens = 0
        self._running: dict[str, tuple[GenerationRequest, list[int]]] = {}

    def add_request(self, request: GenerationRequest) -> None:
        assert request.max_tokens >= 1 and request.request_id not in self._running
        self.requests.append(request)
        self._running[request.request_id] = (request, [])

    def before_memory_changes(self, action: Callable[[], None]) -> None:
        self.watcher = action

    def step(self) -> list[Completion]:
        self.num_calls += 1
        if self.num_calls in self.fail_at:
            raise RuntimeError(f"step {self.num_calls} failed")
        if self.failures:
            raise self.failures.pop(0)
        self.num_steps += 1
        done = []
        for name, (request, tokens) in list(self._running.items())[: self.max_num_seqs]:
            position = len(request.token_ids) - self.prompt_tokens + len(tokens)
            is_last = position + 1 == self.stop_after.get(name)
            tokens.append(EOS if is_last else 100 * self.version + position)
            if is_last or len(tokens) == request.max_tokens:
                done.append(self._completion(name, "stop" if is_last else "length"))
        return [one for one in done if one.request_id not in self.lost]

    def pause(self) -> list[Completion]:
        return [self._completion(name, "paused") for name in list(self._running)]

    def _completion(self, name: str, reason: FinishReason) -> Completion:
        request, tokens = self._running.pop(name)
        experts = None
        if self.records_routing and tokens:
            first = 10 * self.version + 1
            fed = len(request.token_ids) + len(tokens) - 1
            experts = torch.tensor([[[first + j, 100]] for j in range(fed)], dtype=torch.uint8)
        return Completion(
            request_id=name,
            token_ids=list(tokens),
            logprobs=[-0.1 * (self.version + 1)] * len(tokens),
            finish_reason=reason,
            routed_experts=experts,
        )

    @property
    def num_unfinished(self) -> int:
        return len(self._running)

    def sleep(self) -> None:
        if self._running:
            raise RolloutError("engine sent to sleep while requests run")
        self.events.append("sleep")

    def wake(self, memory: EngineMemory) -> None:
        self.events.append(f"wake {memory}")

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
        if self._running:
            raise RolloutError("weights loaded while requests are running")
        self.events.append("load")
        written = set()
        for name, tensor in named_tensors:
            if name in self.weights:
                self.weights[name] = tensor.clone()
                written.add(name)
        return written

    def parameter_names(self) -> set[str]:
        return set(self.weights)

    def reset_prefix_cache(self) -> None:
        self.events.append("clear")

    def score(self, token_ids: list[int]) -> list[float]:
        self.events.append("engine score")
        return list(self.scores) * (len(token_ids) - 1)

    def close(self) -> None:
        self.events.append("close engine")


class FakeTrainer:
    """A table of next-token logits, [vocabulary, vocabulary], behind the policy trainer's methods.

    An optimizer step is plain SGD with learning rate 1 and leaves its gradient in `gradient`.
    """

    def __init__(self, vocab_size: int = 6, *, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(vocab_size, vocab_size, generator=generator, dtype=torch.float64)
        self.logits = logits.requires_grad_()
        self.device = torch.device("cpu")
        self.gradient = torch.zeros_like(logits)
        self.num_rows = 0
        self.temperatures: list[float] = []

    def forward_backward(
        self,
        rows: list[TrajectoryRow],
        token_loss: Callable[[int, Tensor, Tensor], Tensor],
        *,
        temperature: float,
    ) -> Tensor:
        self.temperatures.append(temperature)
        self.num_rows = len(rows)
        total = torch.zeros((), dtype=torch.float64)
        for index, row in enumerate(rows):
            every = (self.logits[row.tokens] / temperature).log_softmax(dim=-1)
            logprobs = every.gather(-1, row.targets[:, None])[:, 0].float()
            entropy = -(every.exp() * every).sum(dim=-1).float()
            loss = token_loss(index, logprobs, entropy)
            loss.backward()
            total += loss.detach()
        return total

    def optimizer_step(self, *, is_last: bool = True) -> tuple[float, float]:
        assert self.logits.grad is not None
        self.gradient = self.logits.grad.clone()
        self.logits.grad = None
        with torch.no_grad():
            self.logits -= self.gradient
        return self.gradient.norm().item(), 1.0

    def logprobs(self, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Log-probs of ids 1.. given the id before each, in nats."""
        ids = torch.tensor(token_ids)
        every = (self.logits.detach()[ids[:-1]] / temperature).log_softmax(dim=-1)
        return every.gather(-1, ids[1:, None])[:, 0].tolist()


def trajectory(
    prompt: Sequence[int],
    response: Sequence[int],
    *,
    reward: float = 0.0,
    group: int = 0,
    sample: int = 0,
    logprobs: Sequence[float] | None = None,
    version: int = 0,
    status: Status = Status.STOP,
) -> TensorDict:
    """A finished trajectory of one segment; behavior log-probs -1 nat unless given."""
    made = new_trajectory(prompt_ids=prompt, group_id=group, prompt_index=0, sample_index=sample)
    values = [-1.0] * len(response) if logprobs is None else logprobs
    append_segment(made, response, values, policy_version=version, seed=0)
    set_outcome(made, status, reward)
    return made


class ScoringTrainer(FakeTrainer):
    """Scores rows as the policy trainer does; remembers the rows it was given."""

    def __init__(self, vocab_size: int = 6, *, seed: int = 0) -> None:
        super().__init__(vocab_size, seed=seed)
        self.scored_rows: list[PackedRow] = []
        self.rows_at_once = 1

    def score(self, rows: Sequence[PackedRow], *, temperature: float) -> list[Tensor]:
        self.scored_rows += rows
        every = (self.logits.detach() / temperature).log_softmax(dim=-1)
        return [every[row.tokens, row.targets].float() for row in rows]

    def score_and_route(
        self, rows: Sequence[PackedRow], *, temperature: float
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Its router sends a token to the expert of its position (1 layer, 1 per token)."""
        routes = [row.positions[:, None, None].to(torch.int16) for row in rows]
        return self.score(rows, temperature=temperature), routes


class FakeScorer:
    """Hands out given log-probs, {(group, sample): nats}, instead of scoring."""

    def __init__(self, logprobs: dict[tuple[int, int], Sequence[float]]) -> None:
        self.logprobs = logprobs
        self.calls: list[list[tuple[int, int]]] = []
        """(group, sample) of what was asked for, call by call."""

    def score(self, trajectories: Sequence[TensorDict]) -> Tensor:
        names = [(int(one["group_id"]), int(one["sample_index"])) for one in trajectories]
        self.calls.append(names)
        return torch.tensor([value for name in names for value in self.logprobs.get(name, ())])


def paused(
    segments: dict[int, Sequence[float]],
    *,
    group: int = 0,
    sample: int = 0,
    has_anchors: bool = True,
) -> TensorDict:
    """An unfinished trajectory with a segment per version, {version: behavior log-probs in nats}.

    The prompt is [7, 8], the response 0, 1, 2, ...; anchors equal the behavior log-probs.
    """
    made = new_trajectory(prompt_ids=[7, 8], group_id=group, prompt_index=0, sample_index=sample)
    for version, logprobs in segments.items():
        start = len(made["response_ids"])
        ids = range(start, start + len(logprobs))
        append_segment(made, list(ids), logprobs, policy_version=version, seed=0)
    if has_anchors:
        made["anchor_logprobs"] = made["behavior_logprobs"].clone()
    return made
