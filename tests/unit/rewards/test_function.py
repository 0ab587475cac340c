"""The contract of a user's own reward, as a user writes one, and all that one may do wrong."""

import sys

import pytest

from rollverify.data.prompts import Prompt
from rollverify.errors import ConfigError, RewardError, exit_code
from rollverify.rewards import make_reward

PROMPT = Prompt(
    prompt_id="q7",
    text="<user>Name a bird.</user>",
    problem="Name a bird.",
    answer="owl",
    columns={"prompt": "as read", "kind": "animals", "weights": [0.5, 2]},
)

REWARD = '''
def score(response: str, row: dict) -> float:
    """Longer is better, if it names the answer."""
    if row["answer"] not in response:
        return 0.0
    return min(len(response.split()) / 8, 1.0) * row["weights"][1]
'''

FORMS = """
from fractions import Fraction
import json
import beside

class Judge:
    def __init__(self):
        self.num_calls = 0
    def __call__(self, response, row):
        self.num_calls += 1
        return beside.ONE * self.num_calls
    def same_row(self, response, row):
        return json.loads(response) == row

judge = Judge()

def number(response, row):
    if response == "numpy":
        import numpy
        return numpy.float32(0.5)
    return {"int": 3, "bool": True, "fraction": Fraction(1, 4)}[response]
"""

BAD = """
import os, sys, time

class Tensor:
    def __repr__(self):
        return "tensor([1.,\\n        2.])"

def score(response, row):
    if response == "raise":
        return 1 / 0
    if response == "library":
        return os.fspath(None)
    if response == "sys.exit":
        sys.exit(3)
    if response == "os._exit":
        os._exit(0)
    if response == "hang":
        time.sleep(600)
    return {"none": None, "nan": float("nan"), "inf": float("inf"), "text": "1.0",
            "list": [1.0], "tensor": Tensor(), "huge": 10**400}.get(response, 0.5)
"""

UNUSABLE = """
def two(response): return 0.0
async def later(response, row): return 0.0
number = 5
class Needs:
    def __init__(self, name): self.name = name
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("user")
    files = {"mine": REWARD, "forms": FORMS, "bad": BAD, "unusable": UNUSABLE}
    files |= {"broken": "import json\nraise OSError('no\\nkey')", "quits": "exit()"}
    for name, text in files.items():
        (folder / f"{name}_rewards.py").write_text(text)
    (folder / "beside.py").write_text("ONE = 1")
    return folder


@pytest.fixture
def made():
    rewards = []

    def make(name, time_out_s=30.0):
        rewards.append(make_reward(name, time_out_s=time_out_s, num_workers=1))
        return rewards[-1]

    yield make
    for reward in rewards:
        reward.close()


@pytest.mark.parametrize("is_module", [True, False], ids=["module", "file"])
def test_a_function_scores_with_the_whole_row(folder, made, monkeypatch, is_module):
    """5 of 8 words times the row's 2."""
    monkeypatch.syspath_prepend(folder)
    reward = made("mine_rewards:score" if is_module else f"{folder}/mine_rewards.py:score")
    assert reward(PROMPT, "an owl is a bird") == 1.25
    assert reward.score_all([(PROMPT, "a cat"), (PROMPT, "owl")]) == [0.0, 0.25]
    assert reward.take_counts() == {"error": 0, "timeout": 0, "gold_unreadable": 0}
    assert "mine_rewards" not in sys.modules  # this process never ran the user's code
    assert reward.num_threads == 1 and not reward.has_answers


def test_a_file_by_its_path_from_the_working_folder(folder, made, monkeypatch):
    monkeypatch.chdir(folder.parent)
    assert made(f"{folder.name}/mine_rewards.py:score")(PROMPT, "owl") == 0.25


@pytest.mark.parametrize("name", ["judge", "Judge"])
def test_an_object_or_a_class_may_be_called(folder, made, name):
    reward = made(f"{folder}/forms_rewards.py:{name}")
    assert [reward(PROMPT, "") for _ in range(3)] == [1.0, 2.0, 3.0]


def test_the_row_is_the_columns_and_what_the_run_made_of_them(folder, made):
    row = (
        '{"prompt": "Name a bird.", "kind": "animals", "weights": [0.5, 2], "answer": "owl", '
        '"id": "q7"}'
    )
    assert made(f"{folder}/forms_rewards.py:judge.same_row")(PROMPT, row) == 1.0


def test_any_finite_number_is_a_score(folder, made):
    reward = made(f"{folder}/forms_rewards.py:number")
    kinds = ("int", "bool", "fraction", "numpy")
    assert [reward(PROMPT, kind) for kind in kinds] == [3.0, 1.0, 0.25, 0.5]


@pytest.fixture(scope="module")
def bad(folder):
    reward = make_reward(f"{folder}/bad_rewards.py:score", time_out_s=1.0, num_workers=1)
    yield reward
    reward.close()


@pytest.mark.parametrize(
    ("response", "said"),
    [
        ("raise", r"ZeroDivisionError: division by zero \(.*bad_rewards\.py:10\)"),
        ("library", r"TypeError: expected str, .* \(.*bad_rewards\.py:12\)"),
        ("sys.exit", r"SystemExit: 3 \(.*bad_rewards\.py:14\)"),
        ("os._exit", "its process ended"),
        ("none", r"it returned None \(NoneType\)"),
        ("nan", r"it returned nan \(float\)"),
        ("inf", r"it returned inf \(float\)"),
        ("text", r"it returned '1\.0' \(str\)"),
        ("list", r"it returned \[1\.0\] \(list\)"),
        ("tensor", r"it returned tensor\(\[1\., 2\.\]\) \(Tensor\)"),
        ("huge", "OverflowError: int too large to convert to float"),
    ],
)
def test_what_is_no_score_is_one_line_and_ends_the_run(bad, response, said):
    want = rf"^reward '.*/bad_rewards\.py:score', prompt 'q7': {said}; it must return a finite n"
    with pytest.raises(RewardError, match=want) as caught:
        bad(PROMPT, response)
    assert "\n" not in str(caught.value) and exit_code(caught.value) == 2
    assert bad(PROMPT, "fine") == 0.5


def test_a_hang_scores_0_and_is_counted_with_a_warning(bad, caplog):
    assert bad(PROMPT, "hang") == 0.0
    assert bad(PROMPT, "fine") == 0.5
    assert bad.take_counts()["timeout"] == 1
    assert "bad_rewards.py:score' took over 1 s for prompt 'q7'; it scores 0" in caplog.text


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_such_module:score", "ModuleNotFoundError: No module named 'no_such"),
        ("{}/nowhere.py:score", "FileNotFoundError: .*nowhere.py"),
        ("{}/mine_rewards.py:scores", "AttributeError: .* 'scores'"),
        ("{}/broken_rewards.py:score", r"OSError: no key \(.*_rewards\.py:2\)"),
        ("{}/quits_rewards.py:score", "SystemExit"),
        ("{}/unusable_rewards.py:Needs", "TypeError: .* 'name'"),
        ("{}/unusable_rewards.py:number", "TypeError: 5 is not a callable object"),
        ("{}/unusable_rewards.py:later", "TypeError: it is async"),
        ("{}/unusable_rewards.py:two", "TypeError: too many positional arguments"),
    ],
)
def test_what_cannot_be_called_is_refused_at_the_start(folder, name, said):
    with pytest.raises(
        ConfigError, match=rf"^data\.reward = '.*' cannot be used: {said}"
    ) as caught:
        make_reward(name.format(folder), time_out_s=5.0, num_workers=1)
    assert "\n" not in str(caught.value)
