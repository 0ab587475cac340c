"""Prompts become token ids; a long one ends the run or is dropped, and is never cut."""

import logging
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from rollverify.data.encoding import encode_prompts
from rollverify.data.prompts import Prompt, PromptSet
from rollverify.errors import DataError
from rollverify.toy.tokenizer import build_tokenizer


def set_of(*texts):
    return PromptSet(
        prompts=[Prompt(prompt_id=str(i), text=text, answer="0a") for i, text in enumerate(texts)],
        places=[f"set.jsonl:{i}" for i, _ in enumerate(texts, start=1)],
    )


def test_encode_gives_plain_ids_without_bos():
    tokenizer = build_tokenizer()
    found = encode_prompts(set_of("Fk2=", "A"), tokenizer, 4)
    assert [list(text.token_ids) for text in found] == [
        tokenizer.encode("Fk2=").ids,
        tokenizer.encode("A").ids,
    ]
    assert [len(text.token_ids) for text in found] == [4, 1]


def test_a_bos_that_the_text_spells_out_stays_single():
    """LP09: template output "<bos>hi", bos id 1, "hi" id 7: [1, 7]."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "<bos>": 1, "hi": 7}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<bos>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 1)]
    )
    assert tokenizer.encode("hi").ids == [1, 7]  # left to itself it adds one
    (found,) = encode_prompts(set_of("<bos>hi"), tokenizer, 4)
    assert found.token_ids == (1, 7)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "Fk12=",
            r"set\.jsonl:2: the prompt has 5 tokens, more than rollout\.max_prompt_tokens = 4; .*"
            r"data\.long_prompts = 'drop'",
        ),
        ("é", r"set\.jsonl:2: the tokenizer cannot encode the prompt"),
        ("", r"set\.jsonl:2: the prompt gives no token"),
    ],
)
def test_encode_names_the_line_of_a_bad_prompt(text, message):
    with pytest.raises(DataError, match=message) as caught:
        encode_prompts(set_of("Fk2=", text), build_tokenizer(), 4)
    assert "\n" not in str(caught.value)


def test_long_prompts_are_dropped_on_demand_and_counted(caplog):
    caplog.set_level(logging.WARNING, logger="rollverify")
    prompts = set_of("Fk2=", "Fk12=", "A", "Fk123=")
    found = encode_prompts(prompts, build_tokenizer(), 4, long_prompts="drop")
    assert [(text.prompt.text, text.place) for text in found] == [
        ("Fk2=", "set.jsonl:1"),
        ("A", "set.jsonl:3"),
    ]
    (record,) = caplog.records
    assert "2 of 4 prompts have more than 4 tokens" in record.getMessage()
    assert "set.jsonl:2" in record.getMessage()


def test_a_set_of_long_prompts_only_is_an_error():
    with pytest.raises(DataError, match=r"set\.jsonl:1: this and all other prompts have more"):
        encode_prompts(set_of("Fk12=", "Fk13="), build_tokenizer(), 4, long_prompts="drop")


class CountingTokenizer:
    """Tokens of at most 3 characters; remembers what it was asked to encode."""

    def __init__(self):
        self.encoded = []

    def get_vocab(self):
        return {"a": 0, "abc": 1}

    def encode(self, text, add_special_tokens):
        self.encoded.append(text)
        return build_tokenizer().encode("A" * (len(text) // 3), add_special_tokens=False)


def test_a_prompt_of_too_many_characters_is_never_tokenised():
    """F35: 4 tokens hold at most 12 characters; 50 MB would be tokenised for minutes."""
    tokenizer: Any = CountingTokenizer()
    huge = "abc" * 17_000_000
    message = r"set\.jsonl:2: the prompt has 51000000 characters, too many for rollout\.max_prompt_"
    with pytest.raises(DataError, match=message) as caught:
        encode_prompts(set_of("abc" * 4, huge), tokenizer, 4)
    assert "\n" not in str(caught.value)
    found = encode_prompts(set_of("abc" * 4, huge), tokenizer, 4, long_prompts="drop")
    assert [text.place for text in found] == ["set.jsonl:1"]
    assert set(tokenizer.encoded) == {"abc" * 4}
