"""How much of the paper `metselect reproduce` runs, and with which settings."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..config import Config
from . import paper

STUDIES = {
    "accuracy": "Table 2",
    "time": "Table 3",
    "self-loops": "Table 4",
    "aggregation": "Table 5",
    "depth": "figure: accuracy against depth",
    "attack": "figure: accuracy under Mettack, on the public poisoned graphs",
    "fresh-attack": "the same on graphs poisoned here",
}


@dataclass(frozen=True)
class Scope:
    """The studies, and the datasets, models and runs of each."""

    studies: Sequence[str] = tuple(STUDIES)
    datasets: Sequence[str] = paper.DATASETS
    backbones: Sequence[str] = ("gcn", "gat", "gin")
    selectors: Sequence[str] = (
        "final",
        "ndls",
        "attn",
        "metselect",
        "metselect-paper",
        "metselect-max",
    )
    splits: int = 10
    # The same for every model: at most 200 epochs, every fifth judged on the validation nodes.
    recipe: Config = Config(epochs=200, patience=50, validate_every=5)  # noqa: RUF009  frozen
    depths: Sequence[int] = (2, 4, 8, 16, 32, 64, 128)
    depth_splits: int = 3
    attacked: Sequence[str] = ("cora", "citeseer")
    rates: Sequence[int] = (0, 5, 10, 15, 20)
    seeds: int = 5

    def narrowed(self, **asked) -> "Scope":
        """With what the user asked for in place of the default; None: not asked."""
        for name in ("datasets", "backbones", "selectors", "studies"):
            known = getattr(FULL, name)
            for value in asked[name] or ():
                if value not in known:
                    raise ValueError(f"{value!r} is not one of the {name}: {', '.join(known)}")
        once = {
            name: tuple(dict.fromkeys(value)) if isinstance(value, list) else value
            for name, value in asked.items()
            if value
        }
        return replace(self, **once)


FULL = Scope()
QUICK = Scope(
    studies=("accuracy", "time", "self-loops", "depth", "attack"),
    datasets=("cora", "wisconsin", "texas"),
    backbones=("gcn",),
    selectors=("final", "metselect", "metselect-paper"),
    splits=3,
    recipe=replace(FULL.recipe, epochs=100, patience=25),
    depths=(2, 16),
    depth_splits=1,
    attacked=("cora",),
    rates=(0, 20),
    seeds=2,
)
