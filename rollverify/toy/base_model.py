"""Makes the tiny base model and its task: `python -m rollverify.toy.base_model [flags]`.

The result is kept in a cache folder named after the content of the [prepare] table.
"""

import json
import logging
import os
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rollverify.checkpoint.run_folder import resolve
from rollverify.config.environment import set_defaults
from rollverify.errors import ConfigError, RollVerifyError, exit_code
from rollverify.log import init_logger
from rollverify.toy.settings import (
    REPORT_FILE,
    TEST_FILE,
    TRAIN_FILE,
    PrepareConfig,
    base_folder,
    is_prepared,
)

if TYPE_CHECKING:
    from rollverify.toy.task import PermutationChain

logger = logging.getLogger(__name__)


def prepare_base_model(prepare: PrepareConfig) -> Path:
    """The cached base model's folder, made first where it is missing."""
    target = base_folder(prepare)
    if is_prepared(prepare):
        logger.info("base model: %s (cached)", target)
        return target
    from rollverify.toy.task import PermutationChain

    task = PermutationChain(
        seed=prepare.seed,
        num_functions=prepare.num_functions,
        num_states=prepare.num_states,
        median_steps=prepare.median_steps,
        sigma=prepare.sigma,
        min_steps=prepare.min_steps,
        max_steps=prepare.max_steps,
        noisy_entry_frac=prepare.noisy_entry_frac,
        noise_low=prepare.noise_low,
        noise_high=prepare.noise_high,
    )
    partial = target.with_name(f".{target.name}.partial-{socket.gethostname()}-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    start_s = time.perf_counter()
    logger.info(
        "base model: training %s for %d supervised steps (once, then cached)",
        target,
        prepare.sft_steps,
    )
    try:
        _write_task(task, prepare, partial)
        from rollverify.toy.supervised import train_base_model

        report = train_base_model(task, prepare, partial)
        report["seconds"] = round(time.perf_counter() - start_s, 1)
        (partial / REPORT_FILE).write_text(json.dumps(report, indent=2) + "\n")
        try:
            partial.rename(target)
        except OSError:
            if not is_prepared(prepare):  # Else another process or machine was first.
                raise
    except OSError as error:
        raise ConfigError(
            f"prepare.cache_dir '{prepare.cache_dir}' cannot be written ({error.strerror}); "
            "choose another with --prepare.cache-dir"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    logger.info("base model: %s ready after %.0f s", target, report["seconds"])
    return target


def _write_task(task: "PermutationChain", prepare: PrepareConfig, folder: Path) -> None:
    from rollverify.data.prompts import write_jsonl
    from rollverify.toy.tokenizer import save_tokenizer

    folder.mkdir(parents=True)
    save_tokenizer(folder)
    write_jsonl(folder / TRAIN_FILE, task.train_problems(prepare.num_train_problems))
    write_jsonl(folder / TEST_FILE, task.test_problems(prepare.num_test_problems))


def main(argv: Sequence[str]) -> int:
    """Prepare the base model of a command line's config; return the exit code."""
    set_defaults()
    init_logger(rank=0)
    try:
        loaded, _ = resolve(argv)
        if loaded.config.model.path == "":
            prepare_base_model(loaded.config.prepare)
    except RollVerifyError as error:
        sys.stderr.write(f"error: {error}\n")
        return exit_code(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
