"""The exact-answer reward: which responses earn 1, and where it may be called."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from rollverify.data.prompts import Prompt, load_prompts, write_jsonl
from rollverify.errors import DataError
from rollverify.rewards import exact_answer
from rollverify.toy.task import PermutationChain
from rollverify.toy.tokenizer import EOS_ID, build_tokenizer


def prompt(answer="0k", text="Fk2="):
    return Prompt(prompt_id="p", text=text, answer=answer)


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("1c\n0k\n", 1.0),
        ("0k\n", 1.0),
        ("1c\n 0k \n\n", 1.0),
        ("1c\r\n0k\r\n", 1.0),
        ("1c\n0k", 0.0),  # cut by the length limit before the newline
        ("1c\n0k\n1", 0.0),  # went on after the answer line, then cut
        ("1c\n0k\n0c\n", 0.0),  # the last line counts
        ("0k\n1c\n", 0.0),
        ("2c\n1k\n", 0.0),  # right state, but the counter is not at 0
        ("11c\n10k\n", 0.0),  # ends with the same two characters
        ("1c\nk\n", 0.0),
        ("1c\n0K\n", 0.0),
        ("1c\n0k.\n", 0.0),
        ("0k 0k\n", 0.0),
        ("", 0.0),
        ("\n", 0.0),
    ],
)
def test_only_a_finished_last_line_equal_to_the_answer_scores(response, score):
    assert exact_answer(prompt(), response) == score


def test_any_one_line_answer_works():
    assert exact_answer(prompt("the answer is 42"), "so\nthe answer is 42\n") == 1.0
    assert exact_answer(prompt("42"), "the answer is 42\n") == 0.0
    assert exact_answer(prompt("0.5"), "1/2\n") == 0.0


@pytest.mark.parametrize("answer", ["", "  \n", "two\nlines"])
def test_rw03_unreadable_answer_raises_and_never_scores(answer):
    for response in ("", "\n", "two\nlines\n", "anything\n"):
        with pytest.raises(DataError, match=r"prompt 'p': answer .* is not one line of text"):
            exact_answer(prompt(answer), response)
    with pytest.raises(DataError):
        exact_answer.check(prompt(answer))


def test_rw05_text_of_the_prompt_is_not_scored():
    with_answer = prompt("0k", text="example:\n0k\n")
    assert exact_answer(with_answer, "the answer is k\n") == 0.0
    assert exact_answer(with_answer, "\n") == 0.0


def test_rw01_it_works_in_a_thread():
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(exact_answer, prompt(), "0k\n").result() == 1.0


def test_rw09_true_responses_score_through_the_whole_pipeline(tmp_path):
    chain, tokenizer = PermutationChain(), build_tokenizer()
    problems = chain.test_problems(100)
    write_jsonl(tmp_path / "test.jsonl", problems)
    for problem, loaded in zip(problems, load_prompts(tmp_path / "test.jsonl"), strict=True):
        ids = [*tokenizer.encode(chain.true_response(problem)).ids, EOS_ID]
        text = tokenizer.decode(ids, skip_special_tokens=True)
        assert exact_answer(loaded, text) == 1.0
        cut = tokenizer.decode(ids[:-2])  # without the last newline and the end of sequence
        assert exact_answer(loaded, cut) == 0.0


def test_wrong_demonstrations_score_zero():
    chain = PermutationChain(noisy_entry_frac=1.0, noise_low=1.0, noise_high=1.0)
    by_text = {problem.text: problem for problem in chain.train_problems(3000)}
    pairs = [(by_text[t], r) for t, r in chain.demonstrations(500, 0) if t in by_text]
    scores = [exact_answer(problem, response) for problem, response in pairs]
    expected = [float(response.splitlines()[-1] == p.answer) for p, response in pairs]
    # a wrong chain ends at the right state about once in 24 times
    assert scores == expected
    assert 0 < sum(scores) / len(scores) < 0.15
