"""The tables of a report, from the results of a study. Writes no files."""

import math
import statistics

from rollverify.metrics.statistics import difference, spread, wilson
from rollverify.study.claims import judge
from rollverify.study.cost_model import break_even, cost
from rollverify.study.figures import FIGURES
from rollverify.study.phases import num_problems
from rollverify.study.results import ArmResult, Results, at_equal_cost
from rollverify.study.tables import NOTHING, Table, interval_cell, number, spread_cell

OFF_POLICY = ("ops_mean", "ops_peak", "staleness_mean", "acceptance", "cuts_segment")
OFF_POLICY += ("cuts_token", "switched_at")
DECODING = ("decode_steps", "slot_steps", "idle_slot_steps")
TOKENS = ("tokens_generated", "tokens_trained", "tokens_regenerated", "tokens_prefilled")
TOKENS += ("scoring_tokens",)
SECONDS = ("generation_s", "scoring_s", "train_s", "sync_s", "evaluation_s", "method_s")
PER_RUN = ("mean_at_k", "greedy", "entropy", "ops_mean", "decode_steps", "slot_steps", "method_s")


def all_tables(results: Results) -> list[Table]:
    """Every table, in the order of the report."""
    tables = [
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
    return [claims_table(results), *tables] if results.study.claims else tables


def claims_table(results: Results) -> Table:
    """What was expected before the runs, and what came out."""
    words = {True: "held", False: "**did not hold**", None: "not decided"}
    rows = [["expected", "came out", "numbers"]]
    for claim in results.study.claims:
        verdict = judge(claim, results)
        rows.append([verdict.text, words[verdict.held], verdict.detail])
    note = (
        "Written into the study file before the runs. *Clearly below*: every seed below every seed "
        "of the other arm. *Within the spread*: the mean not below the lowest seed of the other."
    )
    return Table(title="Expected and found", rows=rows, note=note)


def accuracy_table(results: Results) -> Table:
    """Accuracy after the last step, so at equal updates."""
    rows = [["arm", "mean@k", "95 % of the mean", "seeds", "against the baseline", "greedy"]]
    rows[0] += ["cut at the limit", "entropy", "reward"]
    for arm in results.arms:
        found = arm.spread("mean_at_k")
        rows.append(
            [
                arm.label,
                _cell(arm, "mean_at_k"),
                interval_cell(found.interval if found else None, "share"),
                " / ".join(number(value, "share") for value in arm.figures["mean_at_k"]),
                _against(results, arm),
                *(_cell(arm, name) for name in ("greedy", "truncated", "entropy", "reward")),
            ]
        )
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
    return Table(title="Accuracy at equal updates", rows=rows, note=note)


def equal_cost_table(results: Results) -> Table:
    """Accuracy of each arm at the cost of the cheapest, by the model and by the clock."""
    measures: list[tuple[str, float | None]] = [
        (f"c1/c0 = {ratio:g}", ratio) for ratio in results.study.ratios
    ]
    measures.append(("this machine's seconds", None))
    compared = [(name, at_equal_cost(results, ratio)) for name, ratio in measures]
    header = ["arm"]
    for name, found in compared:
        header.append(f"{name}, at the cost of {found.cheapest}" if found else name)
    rows = [header]
    for arm in results.arms:
        cells = [arm.label]
        for _, found in compared:
            values = found.accuracies.get(arm.name, ()) if found else ()
            cells.append(spread_cell(spread(values), "share", len(arm.records)))
        rows.append(cells)
    note = (
        "mean@k when an arm has cost as much as the cheapest arm of its column in all, linear "
        "between evaluations: decoding alone by the cost model, and everything but evaluation, "
        "checkpoints and scoring that only measures by the clock."
    )
    return Table(title="Accuracy at equal cost", rows=rows, note=note)


def figures_table(results: Results, title: str, names: tuple[str, ...], note: str) -> Table:
    """Some figures of every arm, mean and standard deviation over seeds."""
    meanings = "; ".join(f"{FIGURES[name].label}: {FIGURES[name].meaning}" for name in names)
    rows = [["arm", *(_header(name) for name in names)]]
    rows += [[arm.label, *(_cell(arm, name) for name in names)] for arm in results.arms]
    return Table(title=title, rows=rows, note=f"{note} {meanings[0].upper()}{meanings[1:]}.")


def seconds_table(results: Results) -> Table:
    """Wall time of this machine by what it was spent on."""
    note = "Seconds of this machine for a whole run, whatever else ran on it."
    table = figures_table(results, "Wall time here", SECONDS, note)
    base = results.baseline.spread("method_s") if results.baseline else None
    rows = [[*table.rows[0], "times the baseline"]]
    for arm, row in zip(results.arms, table.rows[1:], strict=True):
        own = arm.spread("method_s")
        factor = f"{own.mean / base.mean:.2f}" if own and base and base.mean else NOTHING
        rows.append([*row, factor])
    return Table(title=table.title, rows=rows, note=table.note)


def relative_cost_table(results: Results) -> Table:
    """Cost of decoding over that of the baseline, by the cost model."""
    fit, base = results.fit, results.baseline.work() if results.baseline else None
    ratios = [(f"c1/c0 = {ratio:g}", ratio) for ratio in (0.0, *results.study.ratios)]
    if fit and fit.ratio is not None and fit.c1_s > 0:
        ratios.append((f"fitted, {fit.ratio:.2g}", fit.ratio))
    rows = [["arm", *(name for name, _ in ratios), "slot-steps alone", "even with the baseline at"]]
    for arm in results.arms:
        work = arm.work()
        if work is None or base is None:
            rows.append([arm.label, *[NOTHING] * (len(ratios) + 2)])
            continue
        cells = [f"{cost(base, r) / cost(work, r):.2f} x" for _, r in [*ratios, ("", math.inf)]]
        even = break_even(work, base)
        rows.append([arm.label, *cells, f"c1/c0 = {even:.2g}" if even else NOTHING])
    return Table(title="Cost of decoding by the model", rows=rows, note=_cost_note(results))


def runs_table(results: Results) -> Table:
    """One row per run."""
    rows = [["run", "folder", *(_header(name) for name in PER_RUN), "95 % of mean@k", "data"]]
    for arm in results.arms:
        for index, record in enumerate(arm.records):
            values = {name: arm.figures[name][index] for name in PER_RUN}
            accuracy, problems = values["mean_at_k"], num_problems(record)
            interval = wilson(accuracy, problems) if accuracy is not None and problems else None
            rows.append(
                [
                    f"{arm.label}, seed {record.seed}",
                    f"`{record.folder.name}`" if record.folder else NOTHING,
                    *(number(values[name], FIGURES[name].unit) for name in PER_RUN),
                    interval_cell(interval, "share"),
                    "incomplete" if record.missing else "complete",
                ]
            )
    note = (
        "The interval is Wilson's for as many trials as there are test problems: samples of one "
        "problem are not independent, so it is rather too wide."
    )
    return Table(title="Runs", rows=rows, note=note)


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


def _against(results: Results, arm: ArmResult) -> str:
    base = results.baseline
    if base is None or arm is base:
        return NOTHING
    ours, theirs = arm.values("mean_at_k"), base.values("mean_at_k")
    if not ours or not theirs:
        return NOTHING
    gap = f"{statistics.fmean(ours) - statistics.fmean(theirs):+.3f}"
    interval = difference(ours, theirs)
    return f"{gap} {interval_cell(interval, 'share', sign=True)}" if interval else gap


def _cell(arm: ArmResult, name: str) -> str:
    return spread_cell(arm.spread(name), FIGURES[name].unit, len(arm.records))


def _header(name: str) -> str:
    figure = FIGURES[name]
    units = {"tokens": " (tokens)", "s": " (s)", "nats": " (nats)", "steps": " (steps)"}
    return figure.label + units.get(figure.unit, "")
