"""Reward 1 when a response ends with the expected answer line, else 0.

It compares text and does no mathematics: "0.5" and "1/2" differ. It uses no signal, thread or
shared state, so it may be called from any thread.
"""

from rollverify.data.prompts import Prompt
from rollverify.errors import DataError


def exact_answer(prompt: Prompt, response_text: str) -> float:
    r"""1.0 if the last line of the response equals the prompt's answer, else 0.0.

    The rule, for any JSON-lines file with "answer" strings:

    - the last line counts, and only if a newline ends it: an unfinished last line (a response cut
      by the length limit) scores 0 even if its text agrees so far;
    - blank lines at the end, and spaces around line and answer, are ignored;
    - the whole line must agree, case included: answer "00k" refuses "100k", "00k." and "00K";
    - the prompt's own text is never read.

    For the permutation chain the answer is the whole last line, e.g. "00k": the countdown must have
    reached 0 *and* the state must be right.

    Args:
        prompt: its `answer` is the expected last line.
        response_text: decoded response tokens alone, without special tokens.

    Returns:
        0.0 or 1.0.

    Raises:
        DataError: if the answer is blank or longer than one line, so that no response could be
            right; call with an empty response to check an answer ahead of time.

    Source:
        Our choice: the paper's rewards are verifiable but not specified.

    Example:
        answer "00k": "01c\n00k\n" -> 1.0; "01c\n00k" -> 0.0; "02c\n01k\n" -> 0.0.
    """
    answer = prompt.answer.strip()
    if not answer or "\n" in answer:
        raise DataError(
            f"prompt {prompt.prompt_id!r}: answer {prompt.answer[:40]!r} is not one line of text; "
            "correct the answer in the data file or drop the prompt"
        )
    return 1.0 if answer_of(response_text) == answer else 0.0


def answer_of(response_text: str) -> str | None:
    r"""The line that `exact_answer` compares: the last one, if a newline ends it.

    Args:
        response_text: decoded response tokens alone, without special tokens.

    Returns:
        The line without spaces around it; None where the last line is unfinished or there is none.

    Example:
        "01c\n00k\n" -> "00k"; "01c\n00k" -> None.
    """
    body = response_text.rstrip()
    if not body or "\n" not in response_text[len(body) :]:
        return None
    return body[body.rfind("\n") + 1 :].strip()
