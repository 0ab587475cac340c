"""The tables of a report, and how a number, a spread and an interval look in a cell."""

import math
import statistics
from dataclasses import dataclass

from rollverify.metrics.statistics import Interval, Spread, difference, spread, wilson
from rollverify.study.claims import judge
from rollverify.study.cost_model import break_even, cost
from rollverify.study.figures import FIGURES, num_problems
from rollverify.study.results import ArmResult, Results, at_equal_cost

NOTHING = "–"  # noqa: RUF001 (a dash is what a reader expects in an empty cell)

_FORMATS = {"share": ".3f", "reward": ".3f", "nats": ".3f", "1": ".2g", "steps": ".2f", "s": ",.1f"}
"""By unit; everything else is a whole number."""

OFF_POLICY = ("ops_mean", "ops_peak", "staleness_mean", "acceptance", "cuts_segment")
OFF_POLICY += ("cuts_token", "switched_at")
DECODING = ("decode_steps", "slot_steps", "idle_slot_steps")
TOKENS = ("tokens_generated", "tokens_trained", "tokens_regenerated", "tokens_prefilled")
TOKENS += ("scoring_tokens",)
SECONDS = ("generation_s", "scoring_s", "train_s", "sync_s", "evaluation_s", "method_s")
PER_RUN = ("mean_at_k", "greedy", "entropy", "ops_mean", "decode_steps", "slot_steps", "method_s")


@dataclass(slots=True, frozen=True)
class Table:
    """Cells under a title, with a note that says how to read them."""

    title: str
    note: str
    rows: list[list[str]]
    """The first is the header."""

    def markdown(self) -> str:
        """The table with its title as a heading of the second level."""
        rule = ["---", *["---:"] * (len(self.rows[0]) - 1)]
        rows = [[cell.replace("|", "\\|") for cell in row] for row in self.rows]
        lines = [f"| {' | '.join(row)} |" for row in (rows[0], rule, *rows[1:])]
        return "\n".join([f"## {self.title}", "", self.note, "", *lines]) + "\n"


def number(value: float | None, unit: str, sign: str = "") -> str:
    """A number with as many digits as its unit deserves."""
    return NOTHING if value is None else format(value, sign + _FORMATS.get(unit, ",.0f"))


def spread_cell(found: Spread | None, unit: str, planned: int) -> str:
    """Mean and standard deviation over seeds, and how many of the planned ones there are."""
    if found is None:
        return NOTHING
    text = number(found.mean, unit)
    if found.std is not None:
        text += f" ± {number(found.std, unit)}"
    return text if found.num == planned else f"{text} ({found.num} of {planned})"


def interval_cell(found: Interval | None, unit: str, sign: str = "") -> str:
    """An interval in brackets."""
    if found is None:
        return NOTHING
    return f"[{number(found.low, unit, sign)}, {number(found.high, unit, sign)}]"


def all_tables(results: Results) -> list[Table]:
    """Every table, in the order of the report."""
    return [
        *([claims_table(results)] if results.study.claims else []),
        accuracy_table(results),
        equal_cost_table(results),
        figures_table(
            results,
            "How off-policy",
            OFF_POLICY,
            "OPS is |p / p_when_sampled - 1|, mean over a trained response's tokens.",
        ),
        figures_table(results, "Decoding", DECODING, "Engine steps and slots of a whole run."),
        relative_cost_table(results),
        figures_table(results, "Tokens", TOKENS, "Response tokens of a whole run."),
        seconds_table(results),
        runs_table(results),
    ]


def claims_table(results: Results) -> Table:
    """What was expected before the runs, and what came out."""
    words = {True: "held", False: "**did not hold**", None: "not decided"}
    verdicts = [judge(claim, results) for claim in results.study.claims]
    rows = [[verdict.text, words[verdict.held], verdict.detail] for verdict in verdicts]
    note = (
        "Written into the study file before the runs. *Clearly below*: every seed below every seed "
        "of the other arm. *Within the spread*: the mean not below the lowest seed of the other."
    )
    return Table("Expected and found", note, [["expected", "came out", "numbers"], *rows])


def accuracy_table(results: Results) -> Table:
    """Accuracy after the last step, so at equal updates."""
    rows = [["arm", "mean@k", "95 % of the mean", "seeds", "against the baseline", "greedy"]]
    rows[0] += ["cut at the limit", "entropy", "reward"]
    for arm in results.arms:
        found = arm.spread("mean_at_k")
        interval = interval_cell(found.interval if found else None, "share")
        seeds = " / ".join(number(value, "share") for value in arm.figures["mean_at_k"])
        others = [_cell(arm, name) for name in ("greedy", "truncated", "entropy", "reward")]
        against = _against(results, arm)
        rows.append([arm.label, _cell(arm, "mean_at_k"), interval, seeds, against, *others])
    keys = ("evaluation.samples_per_problem", "evaluation.temperature")
    tested = {
        (num_problems(record), *(record.setting(key) for key in keys))
        for arm in results.arms
        for record in arm.records
        if record.config
    }
    tests = ", ".join(
        f"k = {k} samples at temperature {temperature:g} of {num} held-out problems"
        for num, k, temperature in sorted(tested)
    )
    note = (
        f"After the last step: {tests}. ± is the standard deviation over "
        "seeds; the interval is Student's, over seeds, and the difference to the baseline Welch's. "
        "Entropy (nats) and reward are means of the last 5 steps."
    )
    return Table("Accuracy at equal updates", note, rows)


def equal_cost_table(results: Results) -> Table:
    """Accuracy of each arm at the cost of the cheapest, by the model and by the clock."""
    measures: dict[str, float | None] = {f"c1/c0 = {r:g}": r for r in results.study.ratios}
    measures["this machine's seconds"] = None
    compared = {name: at_equal_cost(results, ratio) for name, ratio in measures.items()}
    rows = [["arm"]]
    for name, equal in compared.items():
        rows[0].append(f"{name}, at the cost of {equal.cheapest}" if equal else name)
    for arm in results.arms:
        found = [equal.accuracies[arm.name] if equal else [] for equal in compared.values()]
        cells = [spread_cell(spread(values), "share", len(arm.records)) for values in found]
        rows.append([arm.label, *cells])
    note = (
        "mean@k when an arm has cost as much as the cheapest arm of its column in all, linear "
        "between evaluations: decoding alone by the cost model, and everything but evaluation, "
        "checkpoints and scoring that only measures by the clock."
    )
    return Table("Accuracy at equal cost", note, rows)


def figures_table(results: Results, title: str, names: tuple[str, ...], note: str) -> Table:
    """Some figures of every arm, mean and standard deviation over seeds."""
    meanings = "; ".join(f"{FIGURES[name].label}: {FIGURES[name].meaning}" for name in names)
    rows = [["arm", *map(_header, names)]]
    rows += [[arm.label, *(_cell(arm, name) for name in names)] for arm in results.arms]
    return Table(title, f"{note} {meanings[0].upper()}{meanings[1:]}.", rows)


def seconds_table(results: Results) -> Table:
    """Wall time of this machine by what it was spent on."""
    note = "Seconds of this machine for a whole run, whatever else ran on it."
    table = figures_table(results, "Wall time here", SECONDS, note)
    base = results.baseline.spread("method_s") if results.baseline else None
    table.rows[0].append("times the baseline")
    for arm, row in zip(results.arms, table.rows[1:], strict=True):
        own = arm.spread("method_s")
        row.append(f"{own.mean / base.mean:.2f}" if own and base and base.mean else NOTHING)
    return table


def relative_cost_table(results: Results) -> Table:
    """Cost of decoding over that of the baseline, by the cost model."""
    fit, base = results.fit, results.baseline.work() if results.baseline else None
    ratios = {f"c1/c0 = {ratio:g}": ratio for ratio in (0.0, *results.study.ratios)}
    if fit and fit.ratio is not None and fit.c1_s > 0:
        ratios[f"fitted, {fit.ratio:.2g}"] = fit.ratio
    ratios["slot-steps alone"] = math.inf
    rows = [["arm", *ratios, "even with the baseline at"]]
    for arm in results.arms:
        work = arm.work()
        cells = [NOTHING] * (len(ratios) + 1)
        if work and base:
            even = break_even(work, base)
            cells = [f"{cost(base, ratio) / cost(work, ratio):.2f} x" for ratio in ratios.values()]
            cells.append(f"c1/c0 = {even:.2g}" if even else NOTHING)
        rows.append([arm.label, *cells])
    return Table("Cost of decoding by the model", _cost_note(results), rows)


def _cost_note(results: Results) -> str:
    text = (
        "A decode step takes t = c0 + c1 * active sequences, so a run costs decode steps * c0 + "
        "slot-steps * c1; put in a machine's two numbers. Cells: cost of the baseline over that of "
        "the arm, so above 1 the arm is cheaper. "
    )
    fit = results.fit
    if fit is None:
        return text + "Nothing was fitted: the phases do not differ in active sequences."
    return text + (
        f"Fitted to the {fit.num_phases} phases measured here: c0 = {1000 * fit.c0_s:.3g} ms, "
        f"c1 = {1000 * fit.c1_s:.3g} ms, residual {1000 * fit.residual_s:.2g} ms "
        f"({100 * fit.residual_frac:.0f} % of a mean step)."
        + ("" if fit.ratio is not None else " c0 is not positive: the fit means nothing.")
    )


def runs_table(results: Results) -> Table:
    """One row per run."""
    rows = [["run", "folder", *map(_header, PER_RUN), "95 % of mean@k", "data"]]
    for arm in results.arms:
        for index, record in enumerate(arm.records):
            values = {name: arm.figures[name][index] for name in PER_RUN}
            accuracy, problems = values["mean_at_k"], num_problems(record)
            interval = wilson(accuracy, problems) if accuracy is not None and problems else None
            rows.append(
                [
                    f"{arm.label}, seed {record.seed}",
                    f"`{record.folder.name}`" if record.folder else NOTHING,
                    *(number(value, FIGURES[name].unit) for name, value in values.items()),
                    interval_cell(interval, "share"),
                    "incomplete" if record.missing else "complete",
                ]
            )
    note = (
        "The interval is Wilson's for as many trials as there are test problems: samples of one "
        "problem are not independent, so it is rather too wide."
    )
    return Table("Runs", note, rows)


def _against(results: Results, arm: ArmResult) -> str:
    base = results.baseline
    ours, theirs = arm.values("mean_at_k"), base.values("mean_at_k") if base else []
    if arm is base or not ours or not theirs:
        return NOTHING
    gap = number(statistics.fmean(ours) - statistics.fmean(theirs), "share", "+")
    interval = difference(ours, theirs)
    return f"{gap} {interval_cell(interval, 'share', '+')}" if interval else gap


def _cell(arm: ArmResult, name: str) -> str:
    return spread_cell(arm.spread(name), FIGURES[name].unit, len(arm.records))


def _header(name: str) -> str:
    figure = FIGURES[name]
    has_unit = figure.unit in ("tokens", "s", "nats", "steps")
    return f"{figure.label} ({figure.unit})" if has_unit else figure.label
