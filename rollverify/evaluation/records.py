"""The records of an evaluation: a JSON line per problem, to read, to sum up and to go on from.

The first line says what was evaluated and how. A killed evaluation leaves whole lines and perhaps
a torn one, and goes on with the problems that have none.
"""

import fcntl
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, TextIO

from pydantic import Field, TypeAdapter, ValidationError

from rollverify.errors import ConfigError
from rollverify.files import write_atomic

logger = logging.getLogger(__name__)

RECORDS_FILE = "problems.jsonl"

Identity = dict[str, str | int | float | bool]
"""What must be equal for two parts of an evaluation to belong together, by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseRecord:
    """One response to a problem."""

    reward: float
    """What the reward gives; more than 0 is right."""
    num_tokens: int
    """Generated tokens, the stop token included."""
    finish_reason: str
    """"stop", or "length" where the limit cut it."""
    answer: str | None
    """Text of its answer, where the reward offers one and the response gives one."""
    text: str | None = None
    """The response; None where it is not kept."""

    @property
    def is_right(self) -> bool:
        """Whether it counts as right."""
        return self.reward > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ProblemRecord:
    """One problem with all its responses."""

    index: Annotated[int, Field(ge=0)]
    """Place in the test set, from 0."""
    problem_id: str
    """Its id in the data file; "" in training."""
    gold: str
    """The expected answer; "" in training."""
    greedy: ResponseRecord
    sampled: tuple[ResponseRecord, ...]
    """The sampled ones, in the order of their seeds."""

    @property
    def num_right(self) -> int:
        """Right ones among the sampled responses."""
        return sum(one.is_right for one in self.sampled)


Responses = dict[int, ResponseRecord]
"""Of one problem by number: 0 is greedy, 1 to k are sampled."""


def problem_record(index: int, responses: Responses) -> ProblemRecord:
    """All responses to the problem at a place of the test set, which names neither id nor gold."""
    greedy, *sampled = (responses[number] for number in range(len(responses)))
    return ProblemRecord(index=index, problem_id="", gold="", greedy=greedy, sampled=tuple(sampled))


_RECORD = TypeAdapter(ProblemRecord)


class RecordFile:
    """The records of one model, open for appending; only one process at a time."""

    def __init__(
        self, folder: Path, identity: Identity, problem_ids: Sequence[str] | None = None
    ) -> None:
        """Read what is there, without records of other problems than these, and open the file.

        Raises:
            ConfigError: if the folder cannot be written, another process has the file, or it holds
                another evaluation.
        """
        self.path = folder / RECORDS_FILE
        self.done: dict[int, ProblemRecord] = {}
        """Records so far by index."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = (folder / ".lock").open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"evaluation.output: {folder} cannot be written ({error.strerror}); choose another"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise ConfigError(
                f"another evaluation is writing to {folder}; wait for it or set evaluation.output"
            ) from error
        try:
            self._file = self._opened(identity, problem_ids)
        except BaseException:
            self._lock.close()
            raise

    def _opened(self, identity: Identity, problem_ids: Sequence[str] | None) -> TextIO:
        """Rewrite the file without damaged lines, in one move, and append to it."""
        if self.path.exists():
            found, records = read_records(self.path)
            if found:
                _check_same(self.path, found, identity)
            self.done = records if found else {}
            if problem_ids is not None:
                self._drop_others(problem_ids)
        lines = [json.dumps({"identity": identity}), *map(_line, self.done.values())]
        write_atomic(self.path, "".join(line + "\n" for line in lines))
        return self.path.open("a", encoding="utf-8")

    def _drop_others(self, problem_ids: Sequence[str]) -> None:
        ids = dict(enumerate(problem_ids))
        others = [at for at, one in self.done.items() if ids.get(at) != one.problem_id]
        for index in others:
            del self.done[index]
        if others:
            names = ", ".join(map(str, others))
            logger.warning("%s: dropping the records of problems %s", self.path, names)

    def append(self, record: ProblemRecord) -> None:
        """Add a problem's line; it is in the file when this returns."""
        self._file.write(_line(record) + "\n")
        self._file.flush()
        self.done[record.index] = record

    def close(self) -> None:
        """Close the file and let others have it; may be called twice."""
        self._file.close()
        self._lock.close()


def read_records(path: Path) -> tuple[Identity, dict[int, ProblemRecord]]:
    """Identity and records by ascending index; both empty where the first line is damaged.

    Other damaged lines are dropped with a warning.

    Raises:
        ConfigError: if it cannot be read.
    """
    try:
        first, *rest = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror})") from error
    try:
        identity = dict(json.loads(first)["identity"])
    except (ValueError, KeyError, TypeError):
        logger.warning("%s does not begin with what was evaluated; starting again", path)
        return {}, {}
    num_samples = identity.get("samples_per_problem")
    records: dict[int, ProblemRecord] = {}
    for number, line in enumerate(rest, start=2):
        if not line:
            continue
        try:
            record = _RECORD.validate_json(line, strict=True)
        except ValidationError:
            record = None
        if record is None or num_samples not in (None, len(record.sampled)):
            logger.warning("%s:%d: dropping a damaged line", path, number)
            continue
        records[record.index] = record
    return identity, dict(sorted(records.items()))


def _line(record: ProblemRecord) -> str:
    return json.dumps(asdict(record), allow_nan=False)


def _check_same(path: Path, found: Identity, wanted: Identity) -> None:
    """Refuse to mix two evaluations in one file."""
    for key in dict.fromkeys([*wanted, *found]):
        if found.get(key) != wanted.get(key):
            raise ConfigError(
                f"{path} holds another evaluation ({key}: {found.get(key)!r} there, "
                f"{wanted.get(key)!r} now); set evaluation.output to another folder or delete it"
            )
