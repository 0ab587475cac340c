"""The character tokenizer of the self-made tasks, as a folder other libraries load.

One token per character of `CHARACTERS`; another one is an error, never a silent unknown token.
"""

import json
import os
import string
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from rollverify.files import write_atomic

PAD_TOKEN = "<pad>"
EOS_TOKEN = "<eos>"
PAD_ID = 0
EOS_ID = 1

CHARACTERS = (
    "\n" + " " + "=+-*/.,:;?!()'" + string.digits + string.ascii_uppercase + string.ascii_lowercase
)
"""78 characters; with the two special tokens the vocabulary has 80 entries, a multiple of 16."""


def build_tokenizer() -> Tokenizer:
    """Character-level tokenizer of 80 entries; ids 0 and 1 are `<pad>` and `<eos>`."""
    vocabulary = {PAD_TOKEN: PAD_ID, EOS_TOKEN: EOS_ID}
    for character in CHARACTERS:
        vocabulary[character] = len(vocabulary)
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([PAD_TOKEN, EOS_TOKEN])
    return tokenizer


def save_tokenizer(folder: str | os.PathLike[str]) -> None:
    """Write `tokenizer.json` and its two side files into a folder, made if missing."""
    special = {"eos_token": EOS_TOKEN, "pad_token": PAD_TOKEN}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        **special,
    }
    contents = {
        "tokenizer.json": build_tokenizer().to_str(pretty=True),
        "tokenizer_config.json": json.dumps(config, indent=2),
        "special_tokens_map.json": json.dumps(special, indent=2),
    }
    for name, content in contents.items():
        write_atomic(Path(folder) / name, content + "\n")
