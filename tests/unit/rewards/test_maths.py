r"""The maths reward with real workers: CASES section 10 and RW01 to RW09."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rollverify.data.prompts import Prompt
from rollverify.rewards.maths import MathReward
from rollverify.rewards.pool import Reply

FOLDER = Path(__file__).parent
TRIPLES = [json.loads(one) for one in (FOLDER / "maths_triples.jsonl").read_text().splitlines()]
GOLDEN = [json.loads(one) for one in (FOLDER / "maths_answers.jsonl").read_text().splitlines()]
FORMS = [json.loads(one) for one in (FOLDER / "maths_forms.jsonl").read_text().splitlines()]
TIME_OUT_S = 2.0

HOSTILE = [r"10^{10^{10}}", r"\sum_{k=1}^{10^9}\frac{1}{k^{3}+\sin k}", "(" * 900 + "1" + ")" * 900]
"""One number that C code computes, one loop in Python, one formula that the parser chews on."""


@pytest.fixture(scope="module")
def reward():
    reward = MathReward(time_out_s=TIME_OUT_S, num_workers=1)
    yield reward
    reward.close()


@pytest.fixture(autouse=True)
def _fresh_counts(reward):
    reward.take_counts()


def pair(gold, response):
    return Prompt(prompt_id="p", text=r"Put the answer in \boxed{}.", answer=gold), response


def boxed(answer):
    return rf"\boxed{{{answer}}}"


def wrong_in(reward, rows):
    """Rows (id, gold, response, expected) that are graded otherwise."""
    scores = reward.score_all([pair(gold, response) for _, gold, response, _ in rows])
    return [(*row, score) for row, score in zip(rows, scores, strict=True) if score != row[3]]


def test_every_triple_is_right(reward):
    rows = [(t["id"], t["gold"], t["answer"], float(t["expected"])) for t in TRIPLES]
    assert wrong_in(reward, rows) == []
    assert reward.take_counts() == {"error": 0, "timeout": 0, "gold_unreadable": 0}


def with_left_right(answer):
    for bracket in ("(", "[", r"\{"):
        answer = answer.replace(bracket, rf"\left{bracket}")
    for bracket in (")", "]", r"\}"):
        answer = answer.replace(bracket, rf"\right{bracket}")
    return answer


@pytest.mark.parametrize(
    "change",
    [lambda a: f"{a}.", lambda a: f"${a}$", with_left_right],
    ids=["period", "dollars", "left_right"],
)
def test_triples_keep_their_verdict_in_other_spellings(reward, change):
    rows = []
    for t in TRIPLES:
        answer = t["answer"][t["answer"].rindex("box") :].partition("{")[2].rpartition("}")[0]
        rows.append((t["id"], t["gold"], boxed(change(answer)), float(t["expected"])))
    assert wrong_in(reward, rows) == []


def test_golden_answers_get_their_scores(reward):
    rows = [(i, g["gold"], g["response"], float(g["score"])) for i, g in enumerate(GOLDEN)]
    assert wrong_in(reward, rows) == []


@pytest.mark.parametrize("kind", sorted({form["kind"] for form in FORMS}))
def test_every_form_of_answer_is_read_as_it_is_meant(reward, kind):
    """F04: words, order, units and ranges make no answer right, other spellings none wrong."""
    forms = [form for form in FORMS if form["kind"] == kind]
    rows = [(i, f["gold"], boxed(f["answer"]), float(f["right"])) for i, f in enumerate(forms)]
    assert wrong_in(reward, rows) == []


def test_a_gold_with_words_between_values_is_readable(reward):
    golds = [r"17\text{ if }x>0\text{, else }18", r"5\text{ feet }6\text{ inches}", "CAB", "10-15"]
    assert reward.unreadable([pair(gold, "")[0] for gold in golds]) == []


POLICY = [
    (r"28\%", "28", 1.0),
    (r"28\%", "0.28", 1.0),
    ("33.3", r"\frac{100}{3}", 1.0),
    ("33.3", "33.33", 0.0),
    ("1/3", "0.333333", 1.0),
    ("1/3", "0.33333", 0.0),
    ("35", r"35 \text{ cm}", 1.0),
    ("2", r"2 \text{ million}", 0.0),
    ("12,10,6", "6, 10, 12", 1.0),
    ("(1,2)", "1,2", 1.0),
    ("(1,2)", "(2,1)", 0.0),
    (r"\{1,2\}", "1,2", 1.0),
    ("7", "5, 6, 7", 0.0),
    (r"\pm 3", "3", 0.0),
    ("52_8", "52", 1.0),
    ("[1,2]", "(1,2)", 0.0),
    ("5", "x = 5", 1.0),
    ("x = 5", "y = 5", 0.0),
    ("8", r"2\frac{2}{3}", 0.0),
    ("3.14", r"\pi", 1.0),
    ("(3,\\infty)", "x>3", 1.0),
    ("3", r"3\text{i}", 0.0),
]
"""The table of docs/rewards.md, and more."""


def test_matters_of_policy_are_as_documented(reward):
    rows = [(i, gold, boxed(answer), score) for i, (gold, answer, score) in enumerate(POLICY)]
    assert wrong_in(reward, rows) == []


def test_small_numbers_differ_inside_a_pair(reward):
    """The kind of M29: 1/2004! and 1/2006! are both 0 to 15 digits, their ratio is 2006 * 2005."""
    assert reward(*pair(r"(1,\frac{1}{2004!})", boxed(r"(1,\frac{1}{2006!})"))) == 0.0


def test_grading_works_in_a_thread(reward):
    """CASES RW01: 1.0, here and by a worker."""
    golds, answers = ("1/3", r"\frac{\sqrt{3}}{3}"), (r"\frac{1}{3}", r"\frac{1}{\sqrt{3}}")
    questions = [pair(gold, boxed(answer)) for gold, answer in zip(golds, answers, strict=True)]
    with ThreadPoolExecutor(1) as threads:
        assert [threads.submit(reward, *one).result() for one in questions] == [1.0, 1.0]


@pytest.mark.parametrize("gold", ["", "see figure", r"\frac{1"])
@pytest.mark.parametrize("answer", ["5", "see figure"])
def test_unreadable_gold_never_scores_and_is_counted(reward, gold, answer):
    """CASES RW03."""
    assert reward(*pair(gold, boxed(answer))) == 0.0
    assert reward.take_counts()["gold_unreadable"] == 1


def test_unreadable_gold_is_found_ahead(reward):
    golds = ["5", "see figure", r"\sqrt{17}", r"\frac{1", "12:00", r"\text{east}", ""]
    prompts = [pair(gold, "")[0] for gold in golds]
    assert reward.unreadable(prompts) == [1, 3, 6]


@pytest.mark.parametrize(("response", "score"), [("the answer is 5", 0.0), (r"\boxed{5}", 1.0)])
def test_the_box_of_the_prompt_is_not_read(reward, response, score):
    """CASES RW05."""
    assert reward(*pair("5", response)) == score


def test_an_answer_line_with_a_box_is_read_once(reward):
    """CASES RW09."""
    assert reward(*pair("5", r"Answer: \boxed{5}")) == 1.0


@pytest.mark.parametrize(
    ("gold", "answer", "score"),
    [(r"\sqrt{17}", r"\sqrt{17}", 1.0), (r"1-\sqrt{2}", "1", 0.0), (r"4\sqrt{17}", "4", 0.0)],
)
def test_gold_is_read_as_a_whole(reward, gold, answer, score):
    """CASES RW07."""
    assert reward(*pair(gold, boxed(answer))) == score


def test_hostile_answers_cost_their_time_out_each_and_poison_nothing(reward):
    """Three answers, 2 s each; one more second for each on a busy machine."""
    questions = [pair(r"\sqrt{17}+1", boxed(one)) for one in HOSTILE]
    reward(*pair("x+1", boxed("1 + x")))  # the worker may have to start
    start = time.monotonic()
    assert reward.score_all(questions) == [0.0] * len(HOSTILE)
    assert time.monotonic() - start < len(HOSTILE) * (TIME_OUT_S + 1.0)
    assert reward.take_counts()["timeout"] == len(HOSTILE)
    assert reward(*pair(r"\frac{x+2}{7}", boxed(r"\frac{x}{7}+\frac{2}{7}"))) == 1.0


@pytest.mark.parametrize("part", [r"\text{", "}", r"\bf ", r"\text{a}", r"5\text{", "1 or ", "√("])
def test_broken_spellings_are_graded_like_any_other(reward, part):
    """All that is read in the trainer's own process must neither raise nor take long."""
    broken = rf"\text{{{part * 100}"
    start = time.process_time()
    assert reward(*pair(r"5\text{ feet }6\text{ inches}", boxed(broken + "}"))) == 0.0
    assert reward(*pair(broken, boxed("17"))) == 0.0
    assert time.process_time() - start < 1


def test_an_internal_error_is_counted_apart_from_wrong(reward, monkeypatch):
    monkeypatch.setattr(reward._pool, "ask", lambda *_: Reply("error", "ValueError"))
    assert reward(*pair("x+3", boxed("y+3"))) == 0.0
    assert reward.take_counts() == {"error": 1, "timeout": 0, "gold_unreadable": 0}
    monkeypatch.undo()
    assert reward(*pair("x+3", boxed("3+x"))) == 1.0


@pytest.mark.parametrize(
    ("reply", "num_asked"), [(Reply("answer", "right"), 1), (Reply("timeout"), 2)]
)
def test_a_question_is_asked_once_and_again_after_its_first_time_out(
    reward, monkeypatch, reply, num_asked
):
    asked = []
    monkeypatch.setattr(reward._pool, "ask", lambda *question: asked.append(question) or reply)
    question = (f"z+{num_asked}", f"{num_asked}+z")
    scores = [reward(*pair(question[0], boxed(question[1]))) for _ in range(4)]
    assert scores == [float(reply.value == "right")] * 4
    assert asked == [question] * num_asked
    assert reward.take_counts()["timeout"] == 4 * (reply.kind == "timeout")


def test_the_answer_of_a_response_is_its_written_form(reward):
    assert reward.answer_of(r"so $\boxed{\dfrac{1}{2}.}$") == r"\frac{1}{2}"
    assert reward.answer_of("no box") is None


def test_plain_numbers_need_no_process():
    reward = MathReward(time_out_s=1.0, num_workers=1)
    assert reward(*pair("1,000", boxed("1000"))) == 1.0
    assert reward(*pair("7", boxed("8"))) == 0.0
    assert reward._pool._server is None
