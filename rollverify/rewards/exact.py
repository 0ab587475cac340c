"""Reward 1 when a response ends with the expected answer line, else 0; it does no mathematics."""

from rollverify.data.prompts import Prompt
from rollverify.errors import DataError
from rollverify.rewards.reward import Reward


class ExactAnswer(Reward):
    r"""1.0 if the last line of the response equals the prompt's answer, else 0.0.

    Only a last line that a newline ends counts, so a cut response scores 0. Blank lines at the end,
    and spaces around line and answer, are ignored; the rest must agree, case included.

    Example:
        answer "00k": "01c\n00k\n" -> 1.0; "01c\n00k" -> 0.0; "02c\n01k\n" -> 0.0.
    """

    has_answers = True

    def __call__(self, prompt: Prompt, response_text: str) -> float:
        """Score a response; raises a DataError as `check` does."""
        self.check(prompt)
        return float(self.answer_of(response_text) == prompt.answer.strip())

    def check(self, prompt: Prompt) -> None:
        """Raise a DataError if the answer is not one line, so that no response could be right."""
        answer = prompt.answer.strip()
        if not answer or "\n" in answer:
            raise DataError(
                f"prompt {prompt.prompt_id!r}: answer {prompt.answer[:40]!r} is not one line of "
                "text; correct the answer in the data file or drop the prompt"
            )

    def answer_of(self, response_text: str) -> str | None:
        r"""The last line if a newline ends it: "01c\n00k\n" -> "00k"; "01c\n00k" -> None."""
        body = response_text.rstrip()
        if not body or "\n" not in response_text[len(body) :]:
            return None
        return body[body.rfind("\n") + 1 :].strip()


exact_answer = ExactAnswer()
