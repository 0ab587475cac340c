"""Records the responses of one model: the process that `rollverify.evaluate` starts.

The records do not depend on how often it was interrupted, but for the rounding of another batch.
"""

import contextlib
import hashlib
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rollverify.config.environment import set_defaults
from rollverify.config.load import load_config
from rollverify.config.tables import Config
from rollverify.data.prompts import Prompt
from rollverify.engine.model_folder import ModelFolder, read_model_folder
from rollverify.evaluation.evaluator import Evaluator
from rollverify.evaluation.records import Identity, ProblemRecord, RecordFile
from rollverify.launch.devices import check_devices
from rollverify.launch.shutdown import die_with_parent, exit_at_once, mark, write_rank_error
from rollverify.launch.world import join_world
from rollverify.log import init_logger
from rollverify.ranks import Ranks
from rollverify.rewards import Reward
from rollverify.rollout.inputs import (
    load_from,
    make_run_reward,
    prompt_source,
    with_stop_tokens,
)
from rollverify.rollout.prompt_queue import EncodedPrompt
from rollverify.toy.settings import base_folder

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
    names = ["config.json", "tokenizer.json", *(file.name for file in folder.glob("*.safetensors"))]
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


def _problems_digest(prompts: Sequence[Prompt]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for prompt in prompts:
        digest.update(repr((prompt.prompt_id, prompt.text, prompt.answer)).encode())
    return digest.hexdigest()


def evaluate_model(config: Config) -> None:
    """Record every problem that has no record yet; of the ranks of one engine the first writes.

    Raises:
        UserError: for anything the user can cure.
    """
    check_devices(config)
    is_alone = config.engine.tensor_parallel == 1
    members = Ranks() if is_alone else join_world(config.parallelism)
    evaluation = config.evaluation
    folder = read_model_folder(model_folder(config), config.rollout.max_sequence_tokens)
    model = with_stop_tokens(config, folder)
    reward = make_run_reward(config)
    prompts, encoded = load_from(config, model, prompt_source(config, "test"), reward)
    prompts, encoded = prompts[: evaluation.num_problems], encoded[: evaluation.num_problems]
    identity = {
        "model": folder_digest(model.path),
        "problems": _problems_digest(prompts),
        **sampling_identity(config),
    }
    ids = [prompt.prompt_id for prompt in prompts]
    with contextlib.ExitStack() as stack:
        stack.callback(reward.close)
        records = None
        if members.rank == 0:
            records = RecordFile(Path(evaluation.output), identity, ids)
            stack.callback(records.close)
        done = members.from_first(set(records.done) if records else set[int]())
        left = [problem for problem in encoded if problem.prompt_index not in done]
        logger.info("%s: %d of %d problems are left", model.path, len(left), len(prompts))
        if left:
            _record(config, model, reward, left, prompts, records)
        _report_ungraded(reward.take_counts())


def _record(
    config: Config,
    model: ModelFolder,
    reward: Reward,
    left: Sequence[EncodedPrompt],
    prompts: Sequence[Prompt],
    records: RecordFile | None,
) -> None:
    from rollverify.engine.start import start_engine  # Loads vLLM.

    num_done = 0

    def keep(record: ProblemRecord) -> None:
        nonlocal num_done
        if records is None:
            return
        prompt = prompts[record.index]
        records.append(replace(record, problem_id=prompt.prompt_id, gold=prompt.answer))
        num_done += 1
        if num_done * PROGRESS_PARTS // len(left) > (num_done - 1) * PROGRESS_PARTS // len(left):
            logger.info("%d of %d problems done", num_done, len(left))

    started = start_engine(
        model,
        config.engine,
        max_sequence_tokens=config.rollout.max_sequence_tokens,
        seed=config.run.seed,
        record_routing=config.routing_replay.mode == "engine",
    )
    with contextlib.closing(started) as engine:
        evaluator = Evaluator(
            engine=engine,
            problems=left,
            settings=config.evaluation,
            reward=reward,
            decode=model.decode,
            max_response_tokens=config.rollout.max_response_tokens,
            run_seed=config.run.seed,
            max_num_seqs=config.engine.max_num_seqs,
            keeps_text=config.evaluation.save_responses,
        )
        evaluator.run(keep)


def _report_ungraded(counts: Mapping[str, int]) -> None:
    """Say how many zeros are no statement on the response."""
    if any(counts.values()):
        kinds = ", ".join(f"{number} {kind}" for kind, number in counts.items() if number)
        logger.warning(
            "%d responses count as wrong without a verdict (%s)", sum(counts.values()), kinds
        )


def main(argv: Sequence[str]) -> int:
    """Evaluate the model of a command line; return the exit code."""
    die_with_parent()
    mark("begun")
    set_defaults()
    init_logger(int(os.environ.get("RANK", "0")))
    try:
        evaluate_model(load_config(argv).config)
    except Exception as error:  # The rank's last line of defence: report, then end.
        return write_rank_error(error)
    return 0


if __name__ == "__main__":
    exit_at_once(main(sys.argv[1:]))
