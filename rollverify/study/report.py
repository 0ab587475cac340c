"""Writes the report of a study: report.md with plots, runs.csv, tables.csv, report.json."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollverify.errors import ConfigError
from rollverify.study.claims import judge
from rollverify.study.figures import FIGURES
from rollverify.study.plan import changed_by
from rollverify.study.results import ArmResult, Results, at_equal_cost
from rollverify.study.study_file import Study
from rollverify.study.tables import Table, all_tables


def write_report(
    results: Results, folder: Path, *, starts: Sequence[dict[str, str]], plots: bool
) -> Path:
    """Write the report into a folder, made if missing; return the Markdown file.

    `starts` says when, where and how the study was run. Plots need matplotlib.
    """
    tables = all_tables(results)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        images: list[Path] = []
        if plots:
            from rollverify.study.plots import draw_all

            images = draw_all(results, folder)
        file = folder / "report.md"
        file.write_text(markdown(results, tables, starts, images), encoding="utf-8")
        _write_csv(folder / "runs.csv", run_rows(results))
        rows = [[table.title, *row] for table in tables for row in table.rows]
        _write_csv(folder / "tables.csv", rows)
        text = json.dumps(_values(results, tables, starts), indent=1, allow_nan=False)
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
    parts = [f"# {results.study.name}\n", results.study.question + "\n"]
    if results.missing:
        head = "## Missing data\n\nThese runs are in no mean that needs what they lack:\n"
        parts += [head, _bullets(results.missing)]
    parts += [table.markdown() for table in tables]
    if images:
        parts.append("## Plots\n")
        parts += [f"![{image.stem.replace('_', ' ')}]({image.name})\n" for image in images]
    lines = [", ".join(f"{key}: {value}" for key, value in start.items()) for start in starts]
    parts += ["## Arms\n", _bullets(_arm_lines(results.study))]
    parts += ["## Run here\n", _bullets(lines or ["not known"])]
    return "\n".join(parts)


def _bullets(lines: Sequence[str]) -> str:
    return "".join(f"- {line}\n" for line in lines)


def _arm_lines(study: Study) -> list[str]:
    """How the baseline is made, and what each other arm changes against it."""
    base = next((arm for arm in study.arms if arm.name == study.baseline), study.arms[0])
    files = " ".join(f"--config {file}" for file in study.files_of(base))
    settings = ", ".join(f"{key} = {value}" for key, value in study.settings_of(base).items())
    lines = [f"**{base.label}**: `{files}`; settings over the files: {settings or 'none'}"]
    for arm in study.arms:
        if arm is not base:
            changes = "; ".join(f"`{line}`" for line in changed_by(study, arm, base)) or "nothing"
            lines.append(f"**{arm.label}** changes {changes}")
    return lines


def _write_csv(file: Path, rows: Sequence[Sequence[object]]) -> None:
    with file.open("w", encoding="utf-8", newline="") as out:
        csv.writer(out, lineterminator="\n").writerows(rows)


def run_rows(results: Results) -> list[list[object]]:
    """One row per run with every figure, header first; None where data are missing."""
    names = [f"{name} ({figure.unit})" for name, figure in FIGURES.items()]
    rows: list[list[object]] = [["arm", "seed", *names, "missing"]]
    for arm in results.arms:
        for record, *figures in zip(arm.records, *arm.figures.values(), strict=True):
            rows.append([arm.name, record.seed, *figures, "; ".join(record.missing)])
    return rows


def _values(
    results: Results, tables: Sequence[Table], starts: Sequence[dict[str, str]]
) -> dict[str, object]:
    study = results.study
    equal = {str(ratio): at_equal_cost(results, ratio) for ratio in study.ratios}
    equal["seconds"] = at_equal_cost(results, None)
    return {
        "study": study.name,
        "question": study.question,
        "missing": results.missing,
        "starts": list(starts),
        "claims": [judge(claim, results)._asdict() for claim in study.claims],
        "cost_fit": _as_dict(results.fit),
        "arms": {arm.name: _arm_values(arm) for arm in results.arms},
        "equal_cost": {name: _as_dict(found) for name, found in equal.items()},
        "tables": {table.title: table.rows for table in tables},
        "figures": {name: [figure.unit, figure.meaning] for name, figure in FIGURES.items()},
    }


def _arm_values(arm: ArmResult) -> dict[str, object]:
    return {
        "label": arm.label,
        "seeds": [record.seed for record in arm.records],
        "figures": arm.figures,
        "spreads": {name: _as_dict(arm.spread(name)) for name in FIGURES},
        "work": _as_dict(arm.work()),
    }


def _as_dict(found: Any) -> dict[str, object] | None:
    return None if found is None else found._asdict()
