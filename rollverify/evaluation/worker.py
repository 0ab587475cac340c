"""Generates and records the responses of one model: the rank that `rollverify.evaluate` starts.

One process with one engine, started as in training. It sums up nothing; the records do not depend
on how often it was interrupted, but for the rounding of another batch.
"""

import contextlib
import hashlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rollverify.config.environment import set_defaults
from rollverify.config.load import load_config
from rollverify.config.tables import Config
from rollverify.evaluation.records import (
    Identity,
    ProblemRecord,
    RecordFile,
    ResponseRecord,
)
from rollverify.launch.shutdown import die_with_parent, write_rank_error
from rollverify.log import init_logger
from rollverify.rollout.inputs import load_from, make_run_reward, prompt_source
from rollverify.toy.settings import base_folder

if TYPE_CHECKING:
    from rollverify.data.prompts import Prompt
    from rollverify.engine.engine import Completion, GenerationRequest
    from rollverify.engine.model_folder import ModelFolder
    from rollverify.rewards import Reward
    from rollverify.rollout.prompt_queue import EncodedPrompt

logger = logging.getLogger(__name__)

FORMAT = 1
"""Raised when records of the same settings would hold something else."""

PROGRESS_PARTS = 10
"""Log lines on the way."""


def model_folder(config: Config) -> Path:
    """The Hugging Face folder of the model that a config names."""
    return Path(config.model.path) if config.model.path else base_folder(config.prepare)


def folder_digest(folder: Path) -> str:
    """Hash of a model's weights, config and tokenizer, whatever the folder is called."""
    digest = hashlib.blake2b(digest_size=8)
    names = ["config.json", "tokenizer.json", *(one.name for one in folder.glob("*.safetensors"))]
    for name in sorted(names):
        digest.update(f"{name}\n".encode())
        with (folder / name).open("rb") as file:
            while block := file.read(1 << 24):
                digest.update(block)
    return digest.hexdigest()


def sampling_identity(config: Config) -> Identity:
    """How the responses are made and graded."""
    evaluation = config.evaluation
    return {
        "format": FORMAT,
        "samples_per_problem": evaluation.samples_per_problem,
        "temperature": evaluation.temperature,
        "top_p": evaluation.top_p,
        "max_response_tokens": config.rollout.max_response_tokens,
        "seed": config.run.seed,
        "reward": config.data.reward,
        "dtype": config.engine.dtype,
        "responses_kept": evaluation.save_responses,
    }


def _problems_digest(prompts: Sequence["Prompt"]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for prompt in prompts:
        digest.update(repr((prompt.prompt_id, prompt.text, prompt.answer)).encode())
    return digest.hexdigest()


def evaluate_model(config: Config) -> None:
    """Record every problem that has no record yet.

    Raises:
        UserError: for anything the user can cure.
    """
    from rollverify.engine.model_folder import read_model_folder

    model = read_model_folder(model_folder(config), config.rollout.max_sequence_tokens)
    num_problems = config.evaluation.num_problems
    reward = make_run_reward(config)
    prompts, encoded = load_from(config, model, prompt_source(config, "test"), reward)
    prompts, encoded = prompts[:num_problems], encoded[:num_problems]
    identity = {
        "model": folder_digest(model.path),
        "problems": _problems_digest(prompts),
        **sampling_identity(config),
    }
    recorder = _Recorder(prompts, encoded, model, reward, config.evaluation.save_responses)
    output, ids = Path(config.evaluation.output), [one.prompt_id for one in prompts]
    with (
        contextlib.ExitStack() as stack,
        contextlib.closing(RecordFile(output, identity, ids)) as records,
    ):
        stack.callback(reward.close)
        left = [one for one in range(len(prompts)) if one not in records.done]
        logger.info("%s: %d of %d problems are left", model.path, len(left), len(prompts))
        if left:
            _generate(config, model, recorder, left, records)
        _report_ungraded(reward.take_counts())


def _report_ungraded(counts: Mapping[str, int]) -> None:
    """Say how many zeros are no statement on the response."""
    if any(counts.values()):
        kinds = ", ".join(f"{number} {kind}" for kind, number in counts.items() if number)
        logger.warning(
            "%d responses count as wrong without a verdict (%s)", sum(counts.values()), kinds
        )


class _Recorder:
    """Turns a problem's completions into its record."""

    def __init__(
        self,
        prompts: Sequence["Prompt"],
        encoded: Sequence["EncodedPrompt"],
        model: "ModelFolder",
        reward: "Reward",
        keeps_text: bool,
    ) -> None:
        self.prompts, self.encoded, self._model = prompts, encoded, model
        self.reward, self._keeps_text = reward, keeps_text

    def record(self, index: int, completions: Sequence["Completion"]) -> ProblemRecord:
        """Grade the responses of a problem, the greedy one first."""
        greedy, *sampled = (self._response(index, one) for one in completions)
        prompt = self.prompts[index]
        return ProblemRecord(
            index=index,
            problem_id=prompt.prompt_id,
            gold=prompt.answer,
            greedy=greedy,
            sampled=tuple(sampled),
        )

    def _response(self, index: int, completion: "Completion") -> ResponseRecord:
        text = self._model.decode(completion.token_ids)
        return ResponseRecord(
            reward=self.encoded[index].grade(completion.token_ids),
            num_tokens=len(completion.token_ids),
            finish_reason=completion.finish_reason,
            answer=self.reward.answer_of(text),
            text=text if self._keeps_text else None,
        )


def _generate(
    config: Config,
    model: "ModelFolder",
    recorder: _Recorder,
    left: Sequence[int],
    records: RecordFile,
) -> None:
    from rollverify.engine.generation import problem_requests, run_problems
    from rollverify.engine.start import start_engine
    from rollverify.evaluation.grading import BackgroundGrading

    evaluation = config.evaluation

    def problems() -> Iterator[tuple[int, list["GenerationRequest"]]]:
        for index in left:
            requests = problem_requests(
                index,
                recorder.encoded[index].token_ids,
                num_samples=evaluation.samples_per_problem,
                temperature=evaluation.temperature,
                top_p=evaluation.top_p,
                max_response_tokens=config.rollout.max_response_tokens,
                run_seed=config.run.seed,
            )
            yield index, requests

    num_done = 0

    def write(record: ProblemRecord) -> None:
        nonlocal num_done
        records.append(record)
        num_done += 1
        if num_done * PROGRESS_PARTS // len(left) > (num_done - 1) * PROGRESS_PARTS // len(left):
            logger.info("%d of %d problems done", num_done, len(left))

    with (
        contextlib.closing(
            start_engine(
                model,
                config.engine,
                max_sequence_tokens=config.rollout.max_sequence_tokens,
                seed=config.run.seed,
                record_routing=config.routing_replay.mode == "engine",
            )
        ) as engine,
        BackgroundGrading(recorder.record, write, recorder.reward.num_threads) as grading,
    ):
        run_problems(engine, problems(), config.engine.max_num_seqs, grading.add)


def main(argv: Sequence[str]) -> int:
    """Evaluate the model of a command line; return the exit code."""
    die_with_parent()
    set_defaults()
    init_logger(rank=0)
    try:
        evaluate_model(load_config(argv).config)
    except Exception as error:  # The rank's last line of defence: report, then end.
        return write_rank_error(error)
    return 0


def _exit(code: int) -> None:
    """End without the interpreter's teardown, in which native libraries print leak reports."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _exit(main(sys.argv[1:]))
