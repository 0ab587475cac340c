"""What a rollout engine is: token ids in, ids and their log-probs out, weights swapped in place.

`vllm_engine.py` holds the real one and tests hold fakes.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

FinishReason = Literal["stop", "length", "paused"]
EngineMemory = Literal["weights", "kv_cache"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """One response to generate."""

    request_id: str
    """Unique among the requests in flight."""

    token_ids: tuple[int, ...]
    """Prompt and, when resumed, the response so far."""

    max_tokens: int
    """To generate, >= 1."""

    seed: int
    """Of this request's own random stream."""

    temperature: float
    """0 is greedy."""

    top_p: float = 1.0
    """In (0, 1]; training needs 1: below it the log-probs are renormalised."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What one request generated."""

    request_id: str
    token_ids: list[int]
    """The stop token included."""

    logprobs: list[float]
    """In nats, after the temperature; 0.0 each when greedy."""

    finish_reason: FinishReason
    """"paused" where the request was ended from outside."""

    routed_experts: Tensor | None = None
    """[len(request.token_ids) + len(token_ids) - 1, L, K] uint8, int16 beyond 256 experts.

    The K experts of every token fed, in each of L layers (0 in those without experts); row j routed
    the pass that predicted token j + 1. None where nothing is recorded or generated."""


class RolloutEngine(Protocol):
    """A generation engine that lives in this process and holds its own copy of the weights."""

    @property
    def num_preemptions(self) -> int:
        """Requests that had to make room in the cache and were computed again, since the start."""
        ...

    @property
    def num_lost_tokens(self) -> int:
        """Tokens under way at the last pause, which nobody has seen and are sampled again."""
        ...

    def add_request(self, request: GenerationRequest) -> None:
        """Queue a request; `step` works on it."""
        ...

    def step(self) -> list[Completion]:
        """Decode one token of every running request; return what finished in this step."""
        ...

    def pause(self) -> list[Completion]:
        """End every request, queued or running; return what each has generated, maybe nothing."""
        ...

    @property
    def num_unfinished(self) -> int:
        """Requests queued or running."""
        ...

    def before_memory_changes(self, action: Callable[[], None]) -> None:
        """Have `action` called before memory is given up or taken back, to measure what is used."""
        ...

    def sleep(self) -> None:
        """Give up weights and cache, so that their memory is free, until they are woken."""
        ...

    def wake(self, memory: EngineMemory) -> None:
        """Take memory back, its contents undefined: weights are to be loaded, the cache reset."""
        ...

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Replace weights in place; returns the engine's own names that were written."""
        ...

    def parameter_names(self) -> set[str]:
        """The engine's own parameter names; tied parameters once."""
        ...

    def reset_prefix_cache(self) -> None:
        """Forget keys and values computed under older weights."""
        ...

    def score(self, token_ids: list[int]) -> list[float]:
        """Log-probs in nats, temperature 1, of ids 1.. given those before them."""
        ...

    def close(self) -> None:
        """Release the engine; it cannot be used afterwards."""
        ...
