"""Which datasets, models and splits `metselect reproduce` runs, and how they are trained."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..config import SELECTOR_TITLES, Config
from . import paper


@dataclass(frozen=True)
class ReproduceSettings:
    """The settings that all studies share; a study may use a part of the datasets."""

    datasets: Sequence[str] = paper.DATASETS
    backbones: Sequence[str] = ("gcn", "gat", "gin")
    selectors: Sequence[str] = tuple(name for name in SELECTOR_TITLES if "jknet" not in name)
    splits: int = 10
    recipe: Config = Config()  # noqa: RUF009  frozen

    def narrowed(self, splits: int | None = None, **names: list[str] | None) -> "ReproduceSettings":
        """Return a copy with the datasets, backbones and selectors that the user named; None keeps
        the default."""
        changes = {"splits": splits} if splits else {}
        for field, values in names.items():
            if values:
                check_names(field, values, getattr(FULL, field))
                changes[field] = tuple(dict.fromkeys(values))
        return replace(self, **changes)


def check_names(field: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Raise ValueError for a name that is not known."""
    for name in names:
        if name not in known:
            raise ValueError(f"{name!r} is not one of the {field}: {', '.join(known)}")


FULL = ReproduceSettings()
QUICK = ReproduceSettings(
    datasets=("cora", "wisconsin", "texas"),
    backbones=("gcn",),
    selectors=("final", "metselect", "metselect-paper"),
    splits=3,
    recipe=Config(epochs=100, patience=25),
)
