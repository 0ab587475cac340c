"""Hand-written stand-ins for the rollout engine and the policy trainer, shared by the unit tests.

They append what happens to an event list, so a test can assert the order of calls.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from rollverify.errors import RolloutError
from rollverify.rollout.engine import Completion, GenerationRequest
from rollverify.rollout.schema import Status, make_trajectory
from rollverify.training.packing import TrajectoryRow

EOS = 9


class FakeEngine:
    """Emits, at response position p (from 0) under version v, token 100 v + p at -0.1 (v + 1) nats.

    Every running request gets one token per step. `stop_after` ends a request with the stop token
    after so many tokens: {request id: tokens}, the stop token included.
    """

    def __init__(
        self,
        version: int = 0,
        *,
        events: list[str] | None = None,
        stop_after: dict[str, int] | None = None,
        parameters: Iterable[str] = ("w",),
    ) -> None:
        self.version = version
        self.events = events if events is not None else []
        self.stop_after = stop_after or {}
        self.requests: list[GenerationRequest] = []
        """Every request ever added."""
        self.weights = {name: torch.zeros(1) for name in parameters}
        self.scores = [-0.5]
        self.lost: set[str] = set()
        """Requests that end without an answer."""
        self._running: dict[str, list[int]] = {}

    def add_request(self, request: GenerationRequest) -> None:
        self.requests.append(request)
        self._running[request.request_id] = []

    def step(self) -> list[Completion]:
        for name, tokens in self._running.items():
            is_last = len(tokens) + 1 == self.stop_after.get(name)
            tokens.append(EOS if is_last else 100 * self.version + len(tokens))
        limits = {request.request_id: request.max_tokens for request in self.requests}
        done = [
            self._completion(name, tokens, limits[name])
            for name, tokens in self._running.items()
            if len(tokens) in (self.stop_after.get(name), limits[name])
        ]
        for completion in done:
            del self._running[completion.request_id]
        return [one for one in done if one.request_id not in self.lost]

    def _completion(self, name: str, tokens: list[int], limit: int) -> Completion:
        del limit
        return Completion(
            request_id=name,
            token_ids=list(tokens),
            logprobs=[-0.1 * (self.version + 1)] * len(tokens),
            finish_reason="stop" if len(tokens) == self.stop_after.get(name) else "length",
        )

    @property
    def num_unfinished(self) -> int:
        return len(self._running)

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

    def optimizer_step(self) -> tuple[float, float]:
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
    status: Status = Status.STOP,
) -> TensorDict:
    """A finished trajectory of version 0; behavior log-probs -1 nat unless given."""
    return make_trajectory(
        prompt_ids=list(prompt),
        response_ids=list(response),
        behavior_logprobs=[-1.0] * len(response) if logprobs is None else list(logprobs),
        policy_version=0,
        status=status,
        reward=reward,
        group_id=group,
        sample_index=sample,
        seed=0,
    )
