"""The reports in docs/results: their tables follow from the figures in their report.json."""

import json
from pathlib import Path

import pytest
from unit.study.folders import study

from rollverify.study.cost_model import CostFit, Work
from rollverify.study.records import RunRecord
from rollverify.study.results import ArmResult, Results
from rollverify.study.tables import all_tables

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = sorted(file.parent for file in (ROOT / "docs/results").glob("*/report.json"))
EVALUATION = {"num_problems": 256, "samples_per_problem": 8, "temperature": 1.0}


class Committed(ArmResult):
    """An arm whose work was written down; its run folders are gone."""

    def work(self):
        return Work(**self.records[0].config["work"])


def arm_from(name, arm, folders):
    config = {"evaluation": EVALUATION, "work": arm["work"]}
    runs = [
        RunRecord(
            arm=name, seed=seed, folder=folders[f"{arm['label']}, seed {seed}"], config=config
        )
        for seed in arm["seeds"]
    ]
    return Committed(name, arm["label"], runs, arm["figures"])


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_tables_of_a_committed_report_come_out_the_same(folder):
    values = json.loads((folder / "report.json").read_text())
    folders = {row[0]: Path(row[1].strip("`")) for row in values["tables"]["Runs"][1:]}
    arms = [arm_from(name, arm, folders) for name, arm in values["arms"].items()]
    made = Results(study(seeds=[0, 1, 2]), arms, CostFit(**values["cost_fit"]))
    tables = {table.title: table.markdown() for table in all_tables(made)}
    del tables["Accuracy at equal cost"]  # needs the evaluations on the way
    text = (folder / "report.md").read_text()
    assert len(tables) == 7 and all(table in text for table in tables.values())
