"""The character tokenizer, alone and through transformers."""

import json
import os
import random

import pytest
from tokenizers import Tokenizer

from rollverify.toy.task import PermutationChain
from rollverify.toy.tokenizer import CHARACTERS, EOS_ID, PAD_ID, build_tokenizer, save_tokenizer


@pytest.fixture
def tokenizer():
    return build_tokenizer()


def test_each_character_is_one_token_and_nothing_is_added(tokenizer):
    assert len(CHARACTERS) == len(set(CHARACTERS)) == 78
    assert tokenizer.get_vocab_size() == 80
    for character in CHARACTERS:
        assert len(tokenizer.encode(character).ids) == 1
    assert tokenizer.encode("Fk12=").tokens == ["F", "k", "1", "2", "="]
    assert tokenizer.encode("").ids == []


def test_lp07_ordinary_ids_survive_decode_and_encode(tokenizer):
    stream = random.Random(0)
    for _ in range(50):
        ids = [stream.randrange(2, 80) for _ in range(40)]
        assert tokenizer.encode(tokenizer.decode(ids)).ids == ids
    text = "  two  spaces\n\nand lines \n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_unknown_character_raises(tokenizer):
    with pytest.raises(Exception, match="UNK"):
        tokenizer.encode("Fé2=")


def test_response_tokens_are_its_characters(tokenizer):
    chain = PermutationChain()
    problem = chain.train_problems(1)[0]
    response = chain.true_response(problem)
    assert len(tokenizer.encode(response).ids) == len(response)


def test_saved_files_load_as_a_plain_tokenizer(tokenizer, tmp_path):
    save_tokenizer(tmp_path / "model")
    save_tokenizer(tmp_path / "model")  # writing over an older copy is fine
    loaded = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    assert loaded.to_str() == tokenizer.to_str()
    names = ["special_tokens_map.json", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(os.listdir(tmp_path / "model")) == names
    special = json.loads((tmp_path / "model" / names[0]).read_text())
    assert special == {"eos_token": "<eos>", "pad_token": "<pad>"}


def test_transformers_loads_it_and_round_trips(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    save_tokenizer(tmp_path)
    loaded = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    assert (loaded.pad_token_id, loaded.eos_token_id, loaded.bos_token_id) == (PAD_ID, EOS_ID, None)
    assert len(loaded) == 80
    text = "Fk12=\n11c\n 0q. ok\n"
    ids = loaded(text)["input_ids"]
    assert ids == build_tokenizer().encode(text).ids
    assert loaded.decode(ids) == text
    assert loaded.decode([*ids, EOS_ID, PAD_ID], skip_special_tokens=True) == text
