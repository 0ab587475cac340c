"""The permutation chain: table, problems, split, length distribution, demonstrations."""

import math
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import pytest

from rollverify.errors import ConfigError
from rollverify.toy.task import FUNCTION_NAMES, STATE_NAMES, TEST_FRAC, PermutationChain, side_of


@pytest.fixture(scope="module")
def chain():
    return PermutationChain(seed=3)


def triple_of(text):
    """The (function, state, count) that a prompt text states."""
    return FUNCTION_NAMES.index(text[0]), STATE_NAMES.index(text[-2]), int(text[1:-2])


def steps_of(text, response):
    """(state before, state after) of every step that a response shows."""
    lines = (text + response).splitlines()  # the prompt ends with a line of the same form
    return list(pairwise(STATE_NAMES.index(line[-1]) for line in lines))


def test_table_rows_are_permutations(chain):
    assert len(chain.table) == 8
    assert all(sorted(row) == list(range(24)) for row in chain.table)
    assert len(set(chain.table)) == 8


def test_prompt_text_states_function_count_and_state(chain):
    assert chain.prompt_text(5, 10, 12) == "F12k\n"
    assert chain.prompt_text(0, 1, 2) == "A02b\n"
    assert PermutationChain(max_steps=7).prompt_text(0, 1, 2) == "A2b\n"
    assert triple_of("F12k\n") == (5, 10, 12)


def test_true_response_follows_the_table_by_hand():
    chain = PermutationChain(num_functions=1, num_states=3, max_steps=9, noisy_entry_frac=1.0)
    object.__setattr__(chain, "table", ((1, 2, 0),))  # a -> b -> c -> a
    problem = next(p for p in chain.train_problems(99) if p.count == 4)
    # four steps round a cycle of three end one further: a->b, b->c, c->a
    path = {"a": "bcab", "b": "cabc", "c": "abca"}[problem.text[-2]]
    assert chain.true_response(problem) == "3{}\n2{}\n1{}\n0{}\n".format(*path)
    assert problem.answer == "0" + path[-1]


def test_answer_is_the_last_line_of_the_true_response(chain):
    for problem in chain.train_problems(200) + chain.test_problems(50):
        lines = chain.true_response(problem).splitlines()
        assert triple_of(problem.text) == (problem.function, problem.state, problem.count)
        assert [int(line[:-1]) for line in lines] == list(range(problem.count - 1, -1, -1))
        assert lines[-1] == problem.answer


def test_train_and_test_problems_are_disjoint(chain):
    train = {p.text for p in chain.train_problems(4096)}
    test = [p.text for p in chain.test_problems(256)]
    demonstrated = {text for text, _ in chain.demonstrations(5000, seed=1)}
    assert not train & set(test)
    assert not demonstrated & set(test)
    assert len(set(test)) == 256


def test_split_is_fixed_for_all_seeds_and_sizes():
    one = {p.text for p in PermutationChain(seed=1).train_problems(2000)}
    other = {p.text for p in PermutationChain(seed=2, num_functions=9).test_problems(200)}
    assert not one & other
    # recorded sides: a change of the hash would mix the sets of older checkpoints
    assert [side_of(0, 0, n) for n in range(2, 10)] == SIDES_OF_FIRST_PROBLEMS


SIDES_OF_FIRST_PROBLEMS = ["train"] * 5 + ["test"] * 2 + ["train"]


def test_split_gives_the_test_side_its_share():
    triples = [(f, s, n) for f in range(8) for s in range(24) for n in range(2, 81)]
    share = sum(side_of(*t) == "test" for t in triples) / len(triples)
    # binomial, 8 * 24 * 79 = 15,168 draws: sd = sqrt(.25 * .75 / 15168) = .0035; 4 sd = .014
    assert share == pytest.approx(TEST_FRAC, abs=0.014)


def test_train_problems_repeat_only_when_their_count_is_used_up(chain):
    problems = chain.train_problems(4096)
    assert len({p.prompt_id for p in problems}) == 4096
    used = Counter((p.function, p.state, p.count) for p in problems)
    for count in (2, 5, 8, 30):
        pool = [(f, s) for f in range(8) for s in range(24) if side_of(f, s, count) == "train"]
        times = [used[f, s, count] for f, s in pool]
        assert max(times) - min(times) <= 1
    assert len({p.text for p in problems[:1024]}) == 1024


def test_too_many_test_problems_are_refused(chain):
    with pytest.raises(ConfigError, match=r"num_test_problems = 2000: only \d+ distinct"):
        chain.test_problems(2000)


def test_count_probabilities_are_the_clipped_log_normal(chain):
    chances = chain.count_probabilities()
    assert list(chances) == list(range(2, 81))
    assert sum(chances.values()) == pytest.approx(1.0, abs=1e-12)

    def below(x):  # P(log-normal < x), median 8, sigma .9
        return 0.5 * (1 + math.erf(math.log(x / 8) / (0.9 * math.sqrt(2))))

    assert chances[2] == pytest.approx(below(2.5))  # all that rounds to 2 or less
    assert chances[8] == pytest.approx(below(8.5) - below(7.5))
    assert chances[80] == pytest.approx(1 - below(79.5))


@pytest.mark.parametrize("side", ["train", "test"])
def test_problem_counts_follow_the_log_normal(chain, side):
    num = {"train": 4096, "test": 256}[side]
    counts = [p.count for p in getattr(chain, f"{side}_problems")(num)]
    # share of counts <= 8 is P(X < 8.5) = Phi(ln(8.5 / 8) / .9) = Phi(.0674) = .527;
    # its sd is at most .5 / sqrt(num): .0078 and .031; 4 sd:
    assert sum(c <= 8 for c in counts) / num == pytest.approx(0.527, abs=4 * 0.5 / num**0.5)
    # the sample median has sd sqrt(pi / 2) * .9 / sqrt(num) in ln n: .0176 and .0705;
    # 4 sd, and half a step for the rounding to whole counts:
    tolerance = 4 * math.sqrt(math.pi / 2) * 0.9 / num**0.5 + 0.5 / 8
    assert abs(math.log(sorted(counts)[num // 2] / 8)) < tolerance
    assert min(counts) == 2 and max(counts) > 60


def test_noisy_entries_have_the_asked_share_and_range(chain):
    assert len(chain.noise) == 48  # 0.25 * 8 * 24
    assert all(0.3 <= entry.probability <= 0.7 for entry in chain.noise.values())
    for (function, state), entry in chain.noise.items():
        assert entry.wrong_state != chain.table[function][state]
        assert 0 <= entry.wrong_state < 24


def test_demonstrations_show_each_entry_with_its_own_noise(chain):
    shown, wrong = Counter(), Counter()
    for text, response in chain.demonstrations(20_000, seed=0):
        function = triple_of(text)[0]
        for before, after in steps_of(text, response):
            shown[function, before] += 1
            if after != chain.table[function][before]:
                assert after == chain.noise[function, before].wrong_state
                wrong[function, before] += 1
    assert set(wrong) == set(chain.noise)
    for entry, noise in chain.noise.items():
        # binomial with n = shown >= 100: sd <= .5 / sqrt(n); 48 entries, so 4.5 sd
        assert shown[entry] >= 100
        share = wrong[entry] / shown[entry]
        assert share == pytest.approx(noise.probability, abs=4.5 * 0.5 / shown[entry] ** 0.5)


def test_demonstrations_count_down_to_zero(chain):
    for text, response in chain.demonstrations(300, seed=5):
        count = triple_of(text)[2]
        assert [int(x[:-1]) for x in response.splitlines()] == list(range(count - 1, -1, -1))
        assert response.endswith("\n")


def test_demonstrations_without_noise_are_true():
    chain = PermutationChain(noisy_entry_frac=0.0)
    for text, response in chain.demonstrations(100, seed=0):
        function = triple_of(text)[0]
        assert all(chain.table[function][a] == b for a, b in steps_of(text, response))


def test_everything_is_a_function_of_the_seed():
    one, same, other = (PermutationChain(seed=seed) for seed in (7, 7, 8))
    assert one.table == same.table != other.table
    assert one.noise == same.noise != other.noise
    assert one.train_problems(64) == same.train_problems(128)[:64] != other.train_problems(64)
    assert one.demonstrations(20, 1) == same.demonstrations(40, 1)[:20]
    assert one.demonstrations(20, 1) != one.demonstrations(20, 2)


def test_longest_lengths_bound_all_texts(chain):
    longest = max(chain.train_problems(4096), key=lambda p: p.count)
    assert longest.count == 80 and len(longest.text) == len("A80a\n") == 5
    # 80 lines of 4 characters (two digits, state, newline)
    assert len(chain.true_response(longest)) == 80 * 4


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_functions", 27),
        ("num_states", 1),
        ("median_steps", 0.0),
        ("sigma", 0.0),
        ("min_steps", 0),
        ("max_steps", 1),
        ("noisy_entry_frac", 1.5),
        ("noise_low", -0.1),
        ("noise_high", 0.2),
    ],
)
def test_setting_out_of_range_is_named(name, value):
    with pytest.raises(ConfigError, match=rf"prepare\.{name} must be .*got {value}"):
        PermutationChain(**{name: value})


def test_tasks_import_without_torch():
    code = (
        "import sys; import rollverify.toy.task, rollverify.toy.tokenizer; "
        "bad = {'torch', 'torchdata', 'torchtitan', 'vllm', 'transformers'} & set(sys.modules); "
        "sys.exit(repr(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
