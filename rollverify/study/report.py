"""Writes the report of a study: report.md with plots, runs.csv, tables.csv, report.json.

Everything in it comes from run folders, but for what each arm changes (the study file) and on what
machine the runs were made (the study's own log of its starts).
"""

import dataclasses
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path

from rollverify.errors import ConfigError
from rollverify.metrics.statistics import spread
from rollverify.study.claims import judge
from rollverify.study.definition import Study
from rollverify.study.figures import FIGURES
from rollverify.study.plan import changed_by
from rollverify.study.report_tables import all_tables
from rollverify.study.results import Results, at_equal_cost
from rollverify.study.tables import Table, to_csv, to_markdown

REPORT_FILE = "report.md"
NEEDS_MATPLOTLIB = (
    "plots need matplotlib: pip install matplotlib (the extra 'study'), or leave them out with "
    "--no-plots"
)


def check_plots() -> None:
    """Refuse to begin where plots could not be drawn at the end.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(NEEDS_MATPLOTLIB)


def write_report(
    results: Results, folder: Path, *, starts: Sequence[dict[str, str]], plots: bool
) -> Path:
    """Write the report.

    Args:
        results: of the study.
        folder: takes the files; made if missing.
        starts: when, where and how the study was run, one entry per start.
        plots: whether to draw.

    Returns:
        The Markdown file.

    Raises:
        ConfigError: plots are asked for and matplotlib is missing, or the folder cannot be written.
    """
    tables = all_tables(results)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        images: list[Path] = []
        if plots:
            check_plots()
            from rollverify.study.plots import draw_all

            images = draw_all(results, folder)
        file = folder / REPORT_FILE
        file.write_text(markdown(results, tables, starts, images), encoding="utf-8")
        (folder / "runs.csv").write_text(to_csv(run_rows(results)), encoding="utf-8")
        (folder / "tables.csv").write_text(to_csv(table_rows(tables)), encoding="utf-8")
        text = json.dumps(values(results, tables, starts), indent=1, allow_nan=False)
        (folder / "report.json").write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"report folder {folder} cannot be written ({error.strerror})") from error
    return file


def markdown(
    results: Results,
    tables: Sequence[Table],
    starts: Sequence[dict[str, str]],
    images: Sequence[Path],
) -> str:
    """The report as Markdown text."""
    study = results.study
    parts = [f"# {study.name}\n", study.question + "\n", _missing_part(results)]
    parts += [to_markdown(table) for table in tables]
    if images:
        parts.append("## Plots\n")
        parts += [f"![{one.stem.replace('_', ' ')}]({one.name})\n" for one in images]
    parts += [arms_part(study), _starts_part(starts)]
    return "\n".join(part for part in parts if part)


def arms_part(study: Study) -> str:
    """What each arm changes against the baseline, and how the baseline is made."""
    base = next((arm for arm in study.arms if arm.name == study.baseline), study.arms[0])
    files = " ".join(f"--config {file}" for file in base.config_files)
    settings = ", ".join(f"{key} = {value}" for key, value in base.settings.items()) or "none"
    lines = ["## Arms\n", f"- **{base.label}**: `{files}`; settings over the files: {settings}"]
    for arm in study.arms:
        if arm is not base:
            changes = "; ".join(f"`{line}`" for line in changed_by(arm, base)) or "nothing"
            lines.append(f"- **{arm.label}** changes {changes}")
    return "\n".join(lines) + "\n"


def run_rows(results: Results) -> list[list[object]]:
    """One row per run with every figure, header first; None where data are missing."""
    names = [f"{name} ({figure.unit})" for name, figure in FIGURES.items()]
    rows: list[list[object]] = [["arm", "seed", *names, "missing"]]
    for arm in results.arms:
        for index, record in enumerate(arm.records):
            figures = [arm.figures[name][index] for name in FIGURES]
            rows.append([arm.name, record.seed, *figures, "; ".join(record.missing)])
    return rows


def table_rows(tables: Sequence[Table]) -> list[list[str]]:
    """All tables below each other, each row with its table's title."""
    return [[table.title, *row] for table in tables for row in table.rows]


def values(
    results: Results, tables: Sequence[Table], starts: Sequence[dict[str, str]]
) -> dict[str, object]:
    """Everything as JSON values."""
    study = results.study
    equal = {str(ratio): at_equal_cost(results, ratio) for ratio in (*study.ratios, None)}
    return {
        "study": study.name,
        "question": study.question,
        "missing": results.missing,
        "starts": list(starts),
        "claims": [judge(claim, results)._asdict() for claim in study.claims],
        "cost_fit": results.fit._asdict() if results.fit else None,
        "arms": {
            arm.name: {
                "label": arm.label,
                "seeds": [record.seed for record in arm.records],
                "figures": {name: list(found) for name, found in arm.figures.items()},
                "spreads": {
                    name: found._asdict() if (found := spread(arm.values(name))) else None
                    for name in FIGURES
                },
                "work": found._asdict() if (found := arm.work()) else None,
            }
            for arm in results.arms
        },
        "equal_cost": {
            "seconds" if ratio == "None" else ratio: dataclasses.asdict(found) if found else None
            for ratio, found in equal.items()
        },
        "tables": {table.title: [list(row) for row in table.rows] for table in tables},
        "figures": {name: [one.unit, one.meaning] for name, one in FIGURES.items()},
    }


def _missing_part(results: Results) -> str:
    if not results.missing:
        return ""
    lines = [f"- {line}" for line in results.missing]
    head = "## Missing data\n\nThese runs are in no mean that needs what they lack:\n"
    return head + "\n" + "\n".join(lines) + "\n"


def _starts_part(starts: Sequence[dict[str, str]]) -> str:
    lines = [f"- {', '.join(f'{key}: {value}' for key, value in one.items())}" for one in starts]
    return "## Run here\n\n" + ("\n".join(lines) or "- not known") + "\n"
