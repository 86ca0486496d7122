"""Run the studies of the paper.

A study stores its result rows below `<out>`; all runs, also those that only compared settings, are
logged in `<out>/log/runs.jsonl`, from which an interrupted call resumes.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..data import load_dataset
from .reproduce_settings import ReproduceSettings
from .run_configs import Execution
from .studies import Study


def reproduce(
    studies: Sequence[Study], settings: ReproduceSettings, out: Path, execution: Execution
) -> list[str]:
    """Run what is missing of the studies; return a message for every dataset that cannot be
    loaded."""
    errors: dict[str, str] = {}  # by dataset; "": it can be loaded
    for study in studies:
        print(f"{study.name}: {study.title}", flush=True)
        available = []
        for dataset in study.datasets(settings):
            source = study.dataset_prefix + dataset
            if source not in errors:
                errors[source] = ""
                try:
                    load_dataset(source, execution.data_dir)
                except (ImportError, RuntimeError) as error:
                    errors[source] = str(error)
            if not errors[source]:
                available.append(dataset)
        study.run(replace(settings, datasets=available), out, execution)
    return [error for error in errors.values() if error]
