"""Wordings around a problem, taking them off again, and the model's chat template."""

import json

import pytest

from rollverify.config.rules import TEMPLATE_NAMES
from rollverify.data.templates import TEMPLATES, ChatTemplate, fill, read_chat_template, unfill
from rollverify.errors import ConfigError, DataError
from rollverify.toy.tokenizer import save_tokenizer

CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_names_of_the_config_are_those_that_there_are():
    assert sorted(TEMPLATE_NAMES) == sorted(["auto", *TEMPLATES])


def test_braces_of_problem_and_template_are_left_alone():
    assert fill(TEMPLATES["boxed"], "f(x) = {prompt}, \\frac{1}{2}") == (
        "f(x) = {prompt}, \\frac{1}{2}\n\n"
        "Please reason step by step, and put your final answer within \\boxed{}."
    )
    assert fill(TEMPLATES["none"], "{x}") == "{x}"


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_was_put_around_a_problem_is_taken_off_again(name):
    assert unfill(TEMPLATES[name], fill(TEMPLATES[name], "1 + 1")) == "1 + 1"


@pytest.mark.parametrize("text", ["1 + 1", "ab", "aba", "a: x", "x :b"])
def test_a_text_without_the_whole_wording_stays_as_it_is(text):
    assert unfill("ab{prompt}ba", text) == text  # of "aba" the "b" cannot be in both parts


class FakeTokenizer:
    """Has a chat template that refuses system messages."""

    chat_template = "..."
    all_special_tokens = ("<eos>", "")

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt):
        assert add_generation_prompt and not tokenize
        if messages[0]["role"] == "system":
            raise ValueError("no system\nmessages")
        return "<user>" + messages[0]["content"] + "<assistant>"


def test_a_special_token_in_a_problem_is_refused():
    chat = ChatTemplate(FakeTokenizer())
    assert chat.render("1 + 1") == "<user>1 + 1<assistant>"
    with pytest.raises(DataError, match="holds the special token '<eos>'"):
        chat.render("1 + 1<eos>")


def test_a_template_that_refuses_the_conversation_is_one_line():
    with pytest.raises(DataError, match=r"\(no system\); remove data\.system_prompt"):
        ChatTemplate(FakeTokenizer(), system_prompt="Be brief.").render("1 + 1")


class DeafTokenizer(FakeTokenizer):
    """Its template forgets the message."""

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt):
        return "<user><assistant>"


def test_a_template_that_leaves_the_problem_out_is_refused():
    with pytest.raises(DataError, match=r"leaves the prompt out.*data\.chat_template = false"):
        ChatTemplate(DeafTokenizer()).render("1 + 1")


def test_a_tokenizer_config_of_another_kind_is_one_line(tmp_path):
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ConfigError, match="transformers cannot read the tokenizer of"):
        read_chat_template(tmp_path, "")


def test_a_folder_gives_its_own_template(tmp_path):
    save_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": CHAT}))
    assert read_chat_template(tmp_path, "").render("1 + 1") == "<user>1 + 1<assistant>"
    chat = read_chat_template(tmp_path, "Brief.")
    assert chat.render("1 + 1") == "<system>Brief.<user>1 + 1<assistant>"


def test_a_folder_without_chat_template_is_named(tmp_path):
    save_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match=r"has no chat template; set data\.chat_template = false"):
        read_chat_template(tmp_path, "")
