"""Rows of a Hugging Face dataset, by its name; the one module here that may use a network.

It says what it is about to ask for before it does, and how to stay offline instead. What the rows
mean is decided in `columns.py`. `datasets` is imported only here, when a hub dataset is asked for.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rollverify.data.row_files import PlacedRow, top_columns
from rollverify.errors import DataError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class HubDataset:
    """One split of a dataset on the hub."""

    name: str
    """"owner/name"."""
    subset: str = ""
    """Its configuration; "" takes the only one."""
    split: str = "train"
    """Name of the split."""
    revision: str = ""
    """Branch, tag or commit; "" takes the newest."""

    def __str__(self) -> str:
        """Name with everything that is set, for messages."""
        parts = [f"subset {self.subset}"] * bool(self.subset) + [f"split {self.split}"]
        parts += [f"revision {self.revision}"] * bool(self.revision)
        return f"{self.name} ({', '.join(parts)})"


def read_hub_rows(
    dataset: HubDataset,
    columns: Sequence[str],
    *,
    local_form: str,
    load: Callable[..., Any] | None = None,
) -> Iterator[PlacedRow]:
    """Rows of a dataset in order.

    Args:
        dataset: which one.
        columns: names that will be asked for, see `row_files.read_rows`.
        local_form: the setting that reads the same from a file, for messages.
        load: `datasets.load_dataset`, or what stands in for it.

    Yields:
        Each row.

    Raises:
        DataError: one line with what to do, if `datasets` is not installed or the dataset cannot
            be had.
    """
    load = load or _import_load_dataset(dataset, local_form)
    logger.info(
        "asking the Hugging Face hub for %s, unless it is in its cache; to stay offline set %s",
        dataset,
        local_form,
    )
    try:
        table = load(
            dataset.name,
            dataset.subset or None,
            split=dataset.split,
            revision=dataset.revision or None,
        )
        names = list(table.column_names)
        table = table.select_columns(top_columns(columns, names) or names)
    except Exception as error:  # the hub's client raises a great many classes, of several libraries
        reason = (str(error).splitlines() or [""])[0][:200]
        raise DataError(
            f"cannot get the dataset {dataset} from the Hugging Face hub "
            f"({type(error).__name__}: {reason}); check its name and the network, or set "
            f"{local_form}"
        ) from error
    for number, row in enumerate(table, start=1):
        place = f"{dataset}, row {number}"
        yield PlacedRow(place=place, number=number, values=row, columns=names)


def _import_load_dataset(dataset: HubDataset, local_form: str) -> Callable[..., Any]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DataError(
            f"reading {dataset} from the Hugging Face hub needs `datasets`, which is not "
            f"installed; run pip install 'rollverify[data]', or set {local_form}"
        ) from error
    return load_dataset
