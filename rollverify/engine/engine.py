"""What a rollout engine is: token ids in, ids and their log-probs out, weights swapped in place.

`vllm_engine.py` holds the real one and tests hold fakes.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

FinishReason = Literal["stop", "length", "paused"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """One response to generate."""

    request_id: str
    """Unique among the requests in flight."""

    token_ids: tuple[int, ...]
    """Prompt and, when resumed, the response so far; at least one id."""

    max_tokens: int
    """Tokens to generate at most, >= 1."""

    seed: int
    """Seed of this request's own random stream; ignored when greedy."""

    temperature: float
    """> 0 samples at this temperature; 0 is greedy."""

    top_p: float = 1.0
    """Smallest probability mass that is sampled from, in (0, 1]; 1 is the full distribution, which
    training needs: below 1 the log-probs are renormalised."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What one request generated."""

    request_id: str
    """Id of the request."""

    token_ids: list[int]
    """Generated ids, the stop token included."""

    logprobs: list[float]
    """Log-prob of each generated id in nats, after the temperature; 0.0 each when greedy."""

    finish_reason: FinishReason
    """`stop` where the stop token was drawn, `length` where `max_tokens` was reached, `paused`
    where the request was ended from outside."""

    routed_experts: Tensor | None = None
    """[len(request.token_ids) + len(token_ids) - 1, L, K] uint8, int16 beyond 256 experts: ids of
    the K experts of every token fed, in each of the model's L layers (0 in layers without experts).
    Row j routed the pass that predicted token j + 1; the last generated token was not fed. None
    where the engine does not record routing or nothing was generated."""


class RolloutEngine(Protocol):
    """A generation engine that lives in this process and holds its own copy of the weights."""

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
