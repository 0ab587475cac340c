"""A rollout engine that says what it is told to, and what makes `evaluate_model` start it.

`python -m support.scripted_engine KILL_AT flags...` is `evaluate_model` with that engine: with
KILL_AT > 0 the process kills itself in that step of the engine, once a problem is recorded.
"""

import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from rollverify.engine.engine import Completion, GenerationRequest
from rollverify.evaluation.records import RECORDS_FILE, read_records
from rollverify.toy.tokenizer import EOS_ID, build_tokenizer


class ScriptedEngine:
    """Finishes one request per step, with a text by request id; others say `default`.

    A text that ends with "~" is cut by the length limit there.
    """

    def __init__(self, texts: Mapping[str, str] | None = None, *, default: str = "00k\n") -> None:
        self._texts, self._default = texts or {}, default
        self.requests: list[GenerationRequest] = []
        self.is_closed = False
        self._waiting: list[GenerationRequest] = []

    def add_request(self, request: GenerationRequest) -> None:
        self.requests.append(request)
        self._waiting.append(request)

    def step(self) -> list[Completion]:
        request = self._waiting.pop(0)
        text = self._texts.get(request.request_id, self._default)
        is_cut = text.endswith("~")
        ids = build_tokenizer().encode(text.rstrip("~")).ids
        return [
            Completion(
                request_id=request.request_id,
                token_ids=ids if is_cut else [*ids, EOS_ID],
                logprobs=[0.0] * (len(ids) + (not is_cut)),
                finish_reason="length" if is_cut else "stop",
            )
        ]

    @property
    def num_unfinished(self) -> int:
        return len(self._waiting)

    def close(self) -> None:
        self.is_closed = True


class DyingEngine(ScriptedEngine):
    """Kills the process in a step, once the file of records has one: grading has its own time."""

    def __init__(self, kill_at: int, records: Path) -> None:
        super().__init__()
        self._kill_at, self._records = kill_at, records
        self._num_steps = 0

    def step(self) -> list[Completion]:
        self._num_steps += 1
        if self._num_steps == self._kill_at:
            deadline = time.monotonic() + 30.0
            while not read_records(self._records)[1] and time.monotonic() < deadline:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step()


def parts_with(engine: Any) -> ModuleType:
    """A stand-in for `rollverify.engine.start`, which would load vLLM."""
    module = ModuleType("rollverify.engine.start")
    module.start_engine = lambda *_, **__: engine  # type: ignore[attr-defined]
    return module


if __name__ == "__main__":
    engine = ScriptedEngine()
    if kill_at := int(sys.argv[1]):
        folder = Path(sys.argv[sys.argv.index("--evaluation.output") + 1])
        engine = DyingEngine(kill_at, folder / RECORDS_FILE)
    sys.modules["rollverify.engine.start"] = parts_with(engine)
    from rollverify.evaluation.worker import main

    sys.exit(main(sys.argv[2:]))
