"""An experiment: one model on one dataset, and the settings to search for it."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from ..config import Config

RUN_FIELDS = ("dataset", "backbone", "selector", "split", "seed")  # of every row of results
# Values to try, by setting: every combination of a group is compared.
SearchGroup = Mapping[str, Sequence]

# Searched for every model, after the groups of its backbone and before those of its selector.
COMMON_SEARCH: Sequence[SearchGroup] = ({"weight_decay": (5e-4, 0.0)}, {"lr": (0.01, 0.03)})
BACKBONE_SEARCH: Mapping[str, SearchGroup] = {"gin": {"batch_norm": (False, True)}}
SELECTOR_SEARCH: Mapping[str, SearchGroup] = {"ndls": {"eps": (0.03, 0.1, 0.3)}}


@dataclass(frozen=True)
class Experiment:
    """A config, the groups of settings to search, and the number of splits and seeds to run."""

    base: Config
    search: Sequence[SearchGroup] = ()
    splits: int = 10
    seeds: int = 1

    def searched(self) -> dict:
        """Return the settings that are searched, with their values in `base`."""
        return {name: getattr(self.base, name) for group in self.search for name in group}


def config_grid(base: Config, values: Mapping[str, Sequence]) -> list[Config]:
    """Return `base` with every combination of the values."""
    configs = []
    for combination in product(*values.values()):
        configs.append(replace(base, **dict(zip(values, combination, strict=True))))
    return configs


def searched_experiment(
    base: Config,
    splits: int,
    seeds: int = 1,
    *,
    first: SearchGroup | None = None,
    fixed: Collection[str] = (),
) -> Experiment:
    """Return an experiment that searches `first`, then the groups of its backbone, of all models
    and of its selector, without the `fixed` settings; it starts from the first values."""
    of_backbone, of_selector = (
        BACKBONE_SEARCH.get(base.backbone),
        SELECTOR_SEARCH.get(base.selector),
    )
    search = []
    for group in (first, of_backbone, *COMMON_SEARCH, of_selector):
        open_settings = {
            name: values for name, values in (group or {}).items() if name not in fixed
        }
        if open_settings:
            search.append(open_settings)
            base = replace(base, **{name: values[0] for name, values in open_settings.items()})
    return Experiment(base, search, splits, seeds)
