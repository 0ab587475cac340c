"""An engine that several ranks hold together: proves before each call that all make the same.

Members that called differently would wait for each other in the model's collectives, for good.
"""

import hashlib
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from rollverify.engine.engine import Completion, EngineMemory, GenerationRequest, RolloutEngine
from rollverify.errors import TwinsError
from rollverify.ranks import Ranks

T = TypeVar("T")


@dataclass(kw_only=True)
class SharedEngine:
    """See `RolloutEngine`; every call but `add_request` and counts is collective over members.

    All that a member was asked and answered goes into a digest, which is compared before the next
    call. A failure of one member ends the run: the others are inside a collective by then.
    """

    engine: RolloutEngine
    members: Ranks

    def __post_init__(self) -> None:
        self._history = hashlib.blake2b(digest_size=7)

    @property
    def num_preemptions(self) -> int:
        """Requests that had to make room in the cache; all members count the same."""
        return self.engine.num_preemptions

    @property
    def num_lost_tokens(self) -> int:
        """Tokens under way at the last pause."""
        return self.engine.num_lost_tokens

    @property
    def num_unfinished(self) -> int:
        """Requests queued or running."""
        return self.engine.num_unfinished

    def add_request(self, request: GenerationRequest) -> None:
        """Queue a request; that all members did is seen at the next call."""
        self._note(f"{request.request_id} {request.seed} {request.max_tokens}", request.token_ids)
        self.engine.add_request(request)

    def step(self) -> list[Completion]:
        """Decode one token of every running request; return what finished."""
        return self._noted(self._together("step", self.engine.step))

    def pause(self) -> list[Completion]:
        """End every request; return what each has generated."""
        completions = self._noted(self._together("pause", self.engine.pause))
        self._compare("the end of a pause")
        return completions

    def before_memory_changes(self, action: Callable[[], None]) -> None:
        """Have `action` called before memory is given up or taken back."""
        self.engine.before_memory_changes(action)

    def sleep(self) -> None:
        """Give up weights and cache."""
        self._together("sleep", self.engine.sleep)

    def wake(self, memory: EngineMemory) -> None:
        """Take memory back."""
        self._together("wake", lambda: self.engine.wake(memory))

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Replace weights: every member is given all of each and keeps its part."""
        self._compare("load_weights")
        return self.engine.load_weights(named_tensors)

    def parameter_names(self) -> set[str]:
        """The engine's own parameter names."""
        return self.engine.parameter_names()

    def reset_prefix_cache(self) -> None:
        """Forget keys and values computed under older weights."""
        self._together("reset_prefix_cache", self.engine.reset_prefix_cache)

    def score(self, token_ids: list[int]) -> list[float]:
        """Log-probs of ids 1.. given those before them."""
        return self._together("score", lambda: self.engine.score(token_ids))

    def close(self) -> None:
        """Release the engine."""
        self.engine.close()

    def _together(self, call: str, action: Callable[[], T]) -> T:
        self._compare(call)
        try:
            return action()
        except Exception as error:
            reason = (str(error).splitlines() or [""])[0]
            raise TwinsError(
                f"the engine that {self.members.size} ranks share failed in '{call}' "
                f"({type(error).__name__}: {reason}); go on from the last checkpoint with --resume"
            ) from error

    def _note(self, text: str, token_ids: Iterable[int]) -> None:
        self._history.update(text.encode())
        self._history.update(array("q", token_ids).tobytes())

    def _noted(self, completions: list[Completion]) -> list[Completion]:
        for done in completions:
            self._note(f"{done.request_id} {done.finish_reason}", done.token_ids)
            self._history.update(array("d", done.logprobs).tobytes())
        return completions

    def _compare(self, call: str) -> None:
        self._history.update(call.encode())
        digest = self._history.hexdigest()
        if self.members.are_equal(int(digest, 16)):
            return
        seen = self.members.gather((call, digest))
        ranks = [self.members.world_rank(member) for member in range(len(seen))]
        others = [member for member, one in enumerate(seen) if one != seen[0]]
        names = ", ".join(f"rank {ranks[member]} (at {seen[member][0]})" for member in others)
        raise TwinsError(
            f"{names} went another way than rank {ranks[0]} (at {seen[0][0]}), with which it holds "
            "one engine: it was given other requests or sampled other tokens; all need the same "
            "packages, GPUs and model files; go on from the last checkpoint with --resume"
        )
