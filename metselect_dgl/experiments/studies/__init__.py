"""The studies that `metselect reproduce` runs.

To add one, add an entry to the list below, with a class of its own if no present one fits: the
command line, the runs and the results page iterate over the list.
"""

from .. import paper
from .accuracy import AllBackbones, SelectorTable
from .curves import Attack, Depth, FreshAttack
from .epoch_time import EpochTime
from .study import FULL, QUICK, ReproduceSettings, StoredResults, Study, check_names

__all__ = ["FULL", "QUICK", "STUDIES", "ReproduceSettings", "StoredResults", "Study", "check_names"]

_STUDIES = [
    AllBackbones("accuracy", "Table 2: accuracy"),
    EpochTime("time", "Table 3: time of a training epoch", "variations"),
    SelectorTable(
        "self-loops",
        "Table 4: GCN with self-loops",
        "variations",
        gcn_only=True,
        selectors=("final", "metselect", "metselect-paper"),
        self_loop=True,
        printed=paper.SELF_LOOPS,
        printed_delta=paper.SELF_LOOPS_DELTA_MAX,
    ),
    SelectorTable(
        "aggregation",
        "Table 5: layer aggregation (GCN)",
        part_of_quick=False,
        gcn_only=True,
        selectors=tuple(paper.AGGREGATION),
        printed=paper.AGGREGATION,
        printed_delta=paper.AGGREGATION_DELTA_MAX,
        gain_of="jknet-metselect",
        note="Layers 0, 1 and 2 of JKNet-MetSelect are JKNet-LSTM, -Cat and -Max.",
    ),
    Depth("depth", "Accuracy against depth", "variations"),
    Attack("attack", "Mettack, public poisoned graphs"),
    FreshAttack("fresh-attack", "Mettack, graphs poisoned here", "variations", part_of_quick=False),
]
STUDIES: dict[str, Study] = {study.name: study for study in _STUDIES}
