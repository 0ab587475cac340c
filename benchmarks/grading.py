r"""Speed of the maths reward: `python -m benchmarks.grading`.

Graded are responses to made-up problems whose answers are those of competitions, four in five a
plain number, or to a file's (`--problems math500:FILE`). Each problem gets responses that are
right, right in another spelling, and wrong. The other side calls math-verify directly on the same
pairs, in its process, without limits. Both sides run in fresh processes, with one worker:
it or its caller works at a time, so answers per second are those of one core. Hostile answers are
timed one by one.
"""

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.isolated import answer, child_task, measure, report
from rollverify.data.prompts import Prompt, read_prompt_set
from rollverify.data.sources import resolve_source

TARGET = 500.0
"""Answers per second and core."""

TIME_OUT_S = 2.0
HOSTILE = (
    r"10^{10^{10}}",
    r"\sum_{k=1}^{10^9}\frac{1}{k^{3}+\sin k}",
    "(" * 900 + "1" + ")" * 900,
    r"9^{9^{9^{9}}} \cdot 0",
    r"\frac{(10^7)!}{(10^7-1)!}",
)


def made_up_golds(number: int) -> list[str]:
    """Answers of the usual kinds, reproducible."""
    rng = random.Random(0)

    def formula() -> str:
        a, b, c = (rng.randrange(2, 40) for _ in range(3))
        return rng.choice(
            (
                rf"{a}\sqrt{{{b}}}",
                rf"\frac{{{a}\pi}}{{{b}}}",
                rf"\left( {a}, -{b} \right)",
                rf"(-\infty,{a})\cup({a + b},\infty)",
                rf"{a}x^2 - {b}x + {c}",
                rf"\frac{{{a} + \sqrt{{{b}}}}}{{{c}}}",
                rf"{a}, {a + b}, {a + b + c}",
            )
        )

    def plain() -> str:
        whole, below = rng.randrange(-50, 2000), rng.randrange(2, 50)
        return rng.choice(
            (f"{whole}", f"{whole}", f"{whole}", f"{whole / 100}", rf"\frac{{{whole}}}{{{below}}}")
        )

    return [formula() if rng.random() < 0.2 else plain() for _ in range(number)]


def make_responses(golds: list[str], per_problem: int) -> list[tuple[str, str]]:
    """(gold, response) pairs in the order in which groups come back."""
    rng = random.Random(1)
    pairs = []
    for gold in golds:
        other = golds[rng.randrange(len(golds))]
        spellings = (gold, gold.replace(r"\frac", r"\dfrac") + ".", other)
        for sample in range(per_problem):
            said = spellings[sample % len(spellings)]
            pairs.append((gold, rf"We add both sides, so it is $\boxed{{{said}}}$."))
    return pairs


def pairs_of(task: dict[str, Any]) -> list[tuple[str, str]]:
    """Responses to the problems of a task: "problems", "number" and "responses"."""
    golds = made_up_golds(task["number"])
    if task["problems"]:
        source = resolve_source(task["problems"], use="test", setting="--problems")
        golds = [one.answer for one in read_prompt_set(source).prompts][: task["number"]]
    return make_responses(golds, task["responses"])


def grade_with_reward(pairs: list[tuple[str, str]]) -> dict[str, Any]:
    """Seconds of all pairs and of each hostile answer, and how many are right."""
    from rollverify.rewards.maths import MathReward

    reward = MathReward(time_out_s=TIME_OUT_S, num_workers=1)
    prompts = [Prompt(prompt_id="p", text="", answer=gold) for gold, _ in pairs]
    reward(Prompt(prompt_id="p", text="", answer="x+1"), r"\boxed{1+x}")  # Starts the worker.
    start = time.perf_counter()
    scores = [reward(prompt, text) for prompt, (_, text) in zip(prompts, pairs, strict=True)]
    seconds = time.perf_counter() - start
    hostile = []
    for text in HOSTILE:
        start = time.perf_counter()
        reward(Prompt(prompt_id="p", text="", answer="x+1"), rf"\boxed{{{text}}}")
        hostile.append(time.perf_counter() - start)
    reward.close()
    return {"seconds": seconds, "right": sum(scores), "hostile_s": hostile}


def grade_directly(pairs: list[tuple[str, str]]) -> dict[str, Any]:
    """The same by math-verify alone; what it raises counts as wrong."""
    from math_verify import parse, verify

    no_limit: dict[str, Any] = {"parsing_timeout": None}

    def is_right(gold: str, text: str) -> bool:
        try:
            found = parse(text, **no_limit)
            return verify(parse(f"${gold}$", **no_limit), found, timeout_seconds=None)
        except Exception:  # Whatever SymPy raises.
            return False

    is_right("x+1", r"\boxed{1+x}")
    start = time.perf_counter()
    num_right = sum(is_right(gold, text) for gold, text in pairs)
    return {"seconds": time.perf_counter() - start, "right": num_right}


def main() -> None:
    """Measure both sides in turns and print."""
    task = child_task()
    if task is not None:
        pairs = pairs_of(task)
        answer((grade_with_reward if task["side"] == "reward" else grade_directly)(pairs))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--problems", default="", help="file or PRESET:FILE; default: made up")
    parser.add_argument("--number", type=int, default=500, help="problems used")
    parser.add_argument("--responses", type=int, default=8, help="to each problem")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    task = {key: getattr(options, key) for key in ("problems", "number", "responses")}
    pairs = pairs_of(task)
    found: dict[str, list[dict[str, Any]]] = {"reward": [], "math-verify": []}
    for _ in range(options.repeats):
        for side, results in found.items():
            results.append(measure("benchmarks.grading", task | {"side": side}))
    rates = {
        side: [len(pairs) / one["seconds"] for one in results] for side, results in found.items()
    }
    medians = {side: statistics.median(values) for side, values in rates.items()}
    slowest = max(second for one in found["reward"] for second in one["hostile_s"])
    rows = [["graded", "answers/s", "lowest", "right"]]
    for side, results in found.items():
        rates_of = rates[side]
        right = f"{results[0]['right']:.0f} of {len(pairs)}"
        rows.append([side, f"{medians[side]:,.0f}", f"{min(rates_of):,.0f}", right])
    rows.append(["target", f"{TARGET:,.0f}", "", ""])
    rows.append(["ratio", f"{medians['reward'] / medians['math-verify']:.2f}", "", ""])
    rows.append([f"slowest hostile answer, limit {TIME_OUT_S:g} s", f"{slowest:.2f} s", "", ""])
    report(rows, {"rates": rates, "found": found}, options.output)


if __name__ == "__main__":
    main()
