"""Where a chat template ends the model's own message: what a chat model stops at."""

import pytest

from rollverify.data.templates import ChatTemplate

CHATML = "".join(
    [
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    ]
)
LLAMA = "".join(
    [
        "{% for m in messages %}<|start|>{{ m.role }}<|end|>\n\n{{ m.content | trim }}<|eot_id|>",
        "{% endfor %}",
    ]
)


class JinjaTokenizer:
    """Renders a template as transformers does."""

    def __init__(self, template: str, special: list[str]) -> None:
        self.template, self.all_special_tokens = template, special

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt=False):
        from jinja2 import Template

        assert not tokenize
        return Template(self.template).render(
            messages=messages, add_generation_prompt=add_generation_prompt
        )


@pytest.mark.parametrize(
    ("template", "special", "end"),
    [
        (CHATML, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], "<|im_end|>"),
        (LLAMA, ["<|eot_id|>", "<|eot_id|><|x|>", "<|start|>"], "<|eot_id|>"),
        ("{{ messages[0].content }}", ["<eos>"], None),  # leaves the model's own message out
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", ["<eos>"], None),
        ("{{ 1 / 0 }}", ["<eos>"], None),
    ],
)
def test_the_token_after_the_answer(template: str, special: list[str], end: str | None) -> None:
    assert ChatTemplate(JinjaTokenizer(template, special)).turn_end() == end
