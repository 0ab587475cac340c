"""Evaluates a model on the test problems: `python -m rollverify.evaluate [--run FOLDER] [flags]`.

With `evaluation.baseline`, or `--run` for a finished run and the model it started from, two models
are compared. The same command goes on where an earlier one was interrupted. Each model has a
process of its own (`evaluation.worker`); this one sums up what they recorded.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollverify.checkpoint.run_folder import CONFIG_TOML, LATEST, find_run
from rollverify.config.load import load_config
from rollverify.config.tables import Config
from rollverify.data.prompts import read_prompt_set
from rollverify.data.sources import PromptSource
from rollverify.errors import ConfigError, RollVerifyError, exit_code
from rollverify.evaluation.contamination import find_overlaps
from rollverify.evaluation.records import RECORDS_FILE, Identity, ProblemRecord, read_records
from rollverify.evaluation.summary import compare, summarize
from rollverify.evaluation.tables import (
    change_json,
    estimate_json,
    one_model_table,
    overlap_json,
    overlap_line,
    two_model_table,
)
from rollverify.evaluation.worker import model_folder, sampling_identity
from rollverify.files import write_atomic
from rollverify.launch.launcher import Modules, launch
from rollverify.rewards import reward_class
from rollverify.rollout.inputs import prompt_source

RESULTS_FILE = "results.json"
REPORT_FILE = "report.txt"
MODEL = "model"
BASELINE = "baseline"
MODEL_FILES = ("config.json", "tokenizer.json", "*.safetensors")
PROG = "python -m rollverify.evaluate"

Execute = Callable[[Sequence[str], bool], int]
"""(flags of one model, whether the base model may have to be prepared first) -> exit code."""

Records = dict[str, tuple[Identity, dict[int, ProblemRecord]]]
"""Identity and records of each model, by MODEL and BASELINE."""


def main(argv: Sequence[str], execute: Execute | None = None) -> int:
    """Do what the command line asks for; return the exit code. The launcher executes if None."""
    try:
        flags = job_flags(argv)
        config = load_config(flags, prog=f"{PROG} [--run [FOLDER]]").config
        folder = output_folder(config)
        prompt_source(config, "test")
        if config.data.train and config.evaluation.contamination_ngram:
            # Else its mistakes would be found at the end.
            read_prompt_set(prompt_source(config, "train"))
        for name, path in _models(config).items():
            words = [*flags, "--evaluation.output", str(folder / name)]
            if name == BASELINE:
                words += ["--model.path", str(path)]
            needs_prepare = name == MODEL and not config.model.path
            code = (execute or _launched)(words, needs_prepare)
            if code:
                return code
        _say(report(config, folder))
        return 0
    except RollVerifyError as error:
        sys.stderr.write(f"error: {error}\n")
        return exit_code(error)


def _launched(words: Sequence[str], needs_prepare: bool) -> int:
    modules = Modules(train="rollverify.evaluation.worker")
    ranks = load_config(words).config.engine.tensor_parallel
    return launch(words, ranks, needs_prepare=needs_prepare, modules=modules)


def job_flags(argv: Sequence[str]) -> list[str]:
    """The command line with --run replaced by the settings it stands for.

    Without a folder, `--run` is the newest run that has checkpoints.

    Raises:
        ConfigError: --resume is given, or the run has no config or no exported model.
        CheckpointError: there is no such run.
    """
    rest = list(argv)
    if any(word.partition("=")[0] == "--resume" for word in rest):
        raise ConfigError(
            "--resume: an evaluation goes on when the same command is given again; leave it out, "
            "or write --run FOLDER to evaluate a run"
        )
    places = [at for at, word in enumerate(rest) if word.partition("=")[0] == "--run"]
    if not places:
        return rest
    at = places[0]
    _, equals, value = rest[at].partition("=")
    end = at + 1
    if not equals and end < len(rest) and not rest[end].startswith("--"):
        value, end = rest[end], end + 1
    rest = rest[:at] + rest[end:]
    return [*_run_flags(value or LATEST, rest), *rest]


def _run_flags(run: str, rest: Sequence[str]) -> list[str]:
    """Settings of a run's exported model against the model it started from."""
    place = load_config(rest).config if run == LATEST else Config()
    folder = find_run(place, run, "--run")
    if not (folder / CONFIG_TOML).is_file():
        raise ConfigError(f"--run: {folder} holds no {CONFIG_TOML}; give a run folder")
    if not (folder / "model").is_dir():
        raise ConfigError(
            f"--run: {folder} holds no exported model; finish the run, with "
            "checkpoint.export_final = true"
        )
    started = load_config(["--config", str(folder / CONFIG_TOML)]).config
    flags = ["--config", str(folder / CONFIG_TOML), "--model.path", str(folder / "model")]
    return [*flags, "--evaluation.baseline", str(model_folder(started))]


def _models(config: Config) -> dict[str, Path]:
    """Folder of each model; that of the baseline is looked at before an hour is spent on the model.

    Raises:
        ConfigError: if the baseline's is no complete model folder.
    """
    models = {MODEL: model_folder(config)}
    baseline = config.evaluation.baseline
    if baseline:
        if not Path(baseline).is_dir():
            raise ConfigError(
                f"evaluation.baseline '{baseline}' is not a folder; give a Hugging Face folder"
            )
        for name in MODEL_FILES:
            if not any(Path(baseline).glob(name)):
                raise ConfigError(
                    f"evaluation.baseline '{baseline}' holds no {name}; give a Hugging Face folder"
                )
        models[BASELINE] = Path(baseline)
    return models


def output_folder(config: Config) -> Path:
    """The folder of an evaluation: the one named, else one that only the same evaluation has."""
    if config.evaluation.output:
        return Path(config.evaluation.output)
    models = {name: str(path.resolve()) for name, path in _models(config).items()}
    what = [models, _place(prompt_source(config, "test")), config.evaluation.num_problems]
    text = json.dumps([what, sampling_identity(config)], sort_keys=True)
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    return Path(config.run.output_dir) / "evaluation" / f"{config.run.name}-{digest}"


def report(config: Config, folder: Path) -> str:
    """Sum up the records in a folder, write results.json and report.txt there; return the report.

    Raises:
        ConfigError: if records are missing or belong to different problems.
    """
    models = _models(config)
    records = {name: read_records(folder / name / RECORDS_FILE) for name in models}
    _check_together(folder, records)
    has_answers = reward_class(config.data.reward).has_answers
    numbers, table = _numbers(records, has_answers=has_answers)
    overlaps, line = _contamination(config, records, has_answers=has_answers)
    results = {
        "settings": sampling_identity(config),
        "test": _place(prompt_source(config, "test")),
        "num_problems": len(records[MODEL][1]),
        "models": {
            name: {"path": str(path), "digest": records[name][0]["model"]}
            for name, path in models.items()
        },
        **numbers,
        "contamination": overlaps,
    }
    what = _measured(config, len(records[MODEL][1]))
    text = "\n\n".join([what, table, line, f"records and {RESULTS_FILE}: {folder}"])
    _write(folder / RESULTS_FILE, json.dumps(results, indent=2, allow_nan=False) + "\n")
    _write(folder / REPORT_FILE, text + "\n")
    return text


def _numbers(records: Records, *, has_answers: bool) -> tuple[dict[str, Any], str]:
    """The numbers of each model and the changes between two, as JSON and as a table."""
    summaries = {
        name: summarize(list(some.values()), has_answers=has_answers)
        for name, (_, some) in records.items()
    }
    numbers = {"summaries": {name: estimate_json(one) for name, one in summaries.items()}}
    if BASELINE not in records:
        return numbers, one_model_table(summaries[MODEL])
    changes = compare(records[MODEL][1], records[BASELINE][1], has_answers=has_answers)
    table = two_model_table(summaries[MODEL], summaries[BASELINE], changes)
    return numbers | {"changes": change_json(changes)}, table


def _measured(config: Config, num_problems: int) -> str:
    """One line on what the table is about: so many problems of a set are not the whole set."""
    evaluation = config.evaluation
    limit = f", the most that evaluation.num_problems = {num_problems} allows"
    return (
        f"{num_problems} problems of {_place(prompt_source(config, 'test'))}"
        f"{limit * (num_problems == evaluation.num_problems)}; {evaluation.samples_per_problem} "
        f"samples each at temperature {evaluation.temperature} and top-p {evaluation.top_p}, up to "
        f"{config.rollout.max_response_tokens} tokens"
    )


def _check_together(folder: Path, records: Records) -> None:
    identities = [{**found, "model": ""} for found, _ in records.values()]
    indices = [some.keys() for _, some in records.values()]
    if identities.count(identities[0]) != len(records) or indices.count(indices[0]) != len(records):
        raise ConfigError(
            f"{folder}: model and baseline have been evaluated on different problems; delete the "
            "folder or set evaluation.output to another"
        )
    if not indices[0]:
        raise ConfigError(f"{folder} holds no records; delete it and evaluate again")


def _contamination(
    config: Config, records: Records, *, has_answers: bool
) -> tuple[dict[str, Any] | None, str]:
    """What the check of test against training problems found, as JSON and as a line."""
    ngram, train = config.evaluation.contamination_ngram, _train_source(config)
    if ngram == 0:
        return None, "contamination: not checked (evaluation.contamination_ngram = 0)"
    if train is None:
        return None, "contamination: not checked (data.train is not set)"
    by_id = {one.prompt_id: one for one in read_prompt_set(prompt_source(config, "test")).prompts}
    indices = sorted(records[MODEL][1])
    # By name: prompts that were too long are not among the records.
    test = [by_id[records[MODEL][1][index].problem_id] for index in indices]
    overlaps = find_overlaps(test, read_prompt_set(train).prompts, ngram)
    dirty = {indices[one.index] for one in overlaps}
    clean: dict[str, Mapping[str, Any]] = {}
    if 0 < len(dirty) < len(test):
        for name, (_, some) in records.items():
            left = [record for index, record in some.items() if index not in dirty]
            clean[name] = estimate_json(summarize(left, has_answers=has_answers))
    found = overlap_json(overlaps, ngram, len(test), clean)
    return found, overlap_line(found)


def _train_source(config: Config) -> PromptSource | None:
    """The training problems that belong to the test problems; None where the config names none."""
    is_named = config.data.train or not config.data.test
    return prompt_source(config, "train") if is_named else None


def _place(source: PromptSource) -> str:
    location = source.location
    return str(location.resolve() if isinstance(location, Path) else location)


def _write(path: Path, text: str) -> None:
    try:
        write_atomic(path, text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror})") from error


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
