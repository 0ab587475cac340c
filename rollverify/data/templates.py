"""Wordings put around a problem, and the model's own chat template around that."""

from functools import cache
from pathlib import Path
from typing import Any

from rollverify.errors import ConfigError, DataError

SLOT = "{prompt}"
"""Where the problem goes."""

TEMPLATES = {
    "none": SLOT,
    "boxed": SLOT + "\n\nPlease reason step by step, and put your final answer within \\boxed{}.",
    "answer_line": (
        "Solve the following math problem step by step. The last line of your response should be "
        "of the form Answer: $Answer (without quotes) where $Answer is the answer to the problem."
        f'\n\n{SLOT}\n\nRemember to put your answer on its own line after "Answer:".'
    ),
}
"""Template by the name it has in `data.template`; "answer_line" is that of DAPO-Math-17k."""


def fill(template: str, problem: str) -> str:
    """The template with the problem in its slot; all other braces are left alone."""
    return template.replace(SLOT, problem)


def unfill(template: str, text: str) -> str:
    """The problem in a text that the template was put around; other texts as they are."""
    if template == SLOT:
        return text
    before, _, after = template.partition(SLOT)
    is_worded = text.startswith(before) and text.endswith(after)
    if not is_worded or len(text) < len(before) + len(after):
        return text
    return text[len(before) : len(text) - len(after)]


class ChatTemplate:
    """Turns a prompt into the user's message of a conversation that the model answers next."""

    def __init__(self, tokenizer: Any, *, system_prompt: str = "") -> None:
        """Take a tokenizer of transformers that has a chat template; "" sends no system message."""
        self._tokenizer = tokenizer
        self._special = [token for token in tokenizer.all_special_tokens if token]
        self._head = [{"role": "system", "content": system_prompt}] if system_prompt else []

    def turn_end(self) -> str | None:
        """The special token that ends the model's own message; None if the template puts none."""
        mark = "the answer"
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": mark}]
        try:
            text = self._tokenizer.apply_chat_template([*self._head, *messages], tokenize=False)
        except Exception:  # such a template has no turns after the user's
            return None
        after = text.rpartition(mark)[2].lstrip()
        found = [token for token in self._special if after.startswith(token)]
        return max(found, key=len, default=None)

    def render(self, text: str) -> str:
        """Text of the conversation up to where the response begins, special tokens included.

        A text that holds a special token, which would end the message early, is a DataError.
        """
        for token in self._special:
            if token in text:
                raise DataError(
                    f"the prompt holds the special token {token!r}; with data.chat_template the "
                    "template puts those, so take it out"
                )
        try:
            conversation = self._tokenizer.apply_chat_template(
                [*self._head, {"role": "user", "content": text}],
                tokenize=False,
                add_generation_prompt=True,
            )
        except Exception as error:  # what a template raises is up to its author
            reason = (str(error).splitlines() or [""])[0][:200]
            raise DataError(
                f"the chat template cannot be applied ({reason}); remove data.system_prompt or set "
                "data.chat_template = false"
            ) from error
        if text.strip() not in conversation:
            raise DataError(
                "the model's chat template leaves the prompt out; correct it in the model folder "
                "or set data.chat_template = false"
            )
        return conversation


@cache
def read_chat_template(folder: Path, system_prompt: str) -> ChatTemplate:
    """The chat template of a Hugging Face model folder; a ConfigError if it has none."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # of a damaged folder it raises whatever its parsing trips over
        reason = (str(error).splitlines() or [""])[0][:200]
        raise ConfigError(
            f"data.chat_template: transformers cannot read the tokenizer of '{folder}' ({reason})"
        ) from error
    if not tokenizer.chat_template:
        raise ConfigError(
            "data.chat_template is on, but the model's tokenizer has no chat template; set "
            "data.chat_template = false and word the prompt with data.template"
        )
    return ChatTemplate(tokenizer, system_prompt=system_prompt)
