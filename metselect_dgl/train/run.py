"""Train a model, on the whole graph or in mini-batches, and read it back."""

from pathlib import Path

from tqdm import tqdm

from .. import ops
from ..config import Config
from ..data import NodeDataset, load_dataset
from ..nn import LayerSelect
from . import checkpoint
from .distributed import ALONE, Team
from .loop import Run, TrainingLoop, check_data, load_checkpoint, prepare
from .minibatch import BatchLoop

__all__ = [
    "Run",
    "TrainingLoop",
    "load_checkpoint",
    "load_run",
    "make_loop",
    "prepare",
    "run_loop",
    "train",
]


def train(
    config: Config,
    data: NodeDataset,
    out: Path | None = None,
    *,
    progress: bool = True,
    checkpoint_every: int = 20,
    team: Team = ALONE,
    keep_memory: bool = False,
) -> Run | None:
    """Train one model; with `out`, leave checkpoints and results there and resume from them.

    With a `batch_size` in the settings it is done in mini-batches, by all processes of the `team`
    together; the result is that of the first one, the others get None.

    With `keep_memory` the process keeps freed memory for the next epoch, which is faster.
    """
    if keep_memory:
        ops.keep_freed_memory()
    loop = make_loop(config, prepare(config, data), out, team)
    run_loop(loop, progress=progress and team.rank == 0, checkpoint_every=checkpoint_every)
    return loop.result() if team.rank == 0 else None


def run_loop(loop: TrainingLoop, *, progress: bool = True, checkpoint_every: int = 20) -> None:
    """From its checkpoint, if it has one, to the end."""
    loop.resume()
    config = loop.config
    bar = tqdm(
        total=config.epochs,
        initial=loop.state.epoch,
        desc=f"{config.dataset} {config.backbone}+{config.selector}",
        unit="epoch",
        disable=not progress,
    )
    with bar:
        while not loop.finished():
            record = loop.epoch()
            bar.update()
            bar.set_postfix(_shown(record), refresh=False)
            if loop.state.epoch % checkpoint_every == 0 or loop.finished():
                loop.save()


def make_loop(config: Config, data: NodeDataset, out: Path | None, team: Team) -> TrainingLoop:
    """On the whole graph or, with a batch size, in mini-batches."""
    if config.batch_size is not None:
        return BatchLoop(config, data, out, team)
    if team.size > 1:
        raise ValueError(f"{team.size} processes train in mini-batches; give a --batch-size")
    return TrainingLoop(config, data, out)


def _shown(record: dict) -> dict[str, str]:
    """What the bar says of an epoch."""
    shown = {"loss": f"{record['loss']:.3f}"} if "loss" in record else {}
    if "val_accuracy" in record:
        shown["val"] = f"{100 * record['val_accuracy']:.1f}"
    return shown


def load_run(out: Path, data_dir: str | None = None) -> tuple[Config, LayerSelect, NodeDataset]:
    """The best model of the run in `out`, with the data as that model sees it."""
    path = Path(out) / "checkpoint.pt"
    saved = load_checkpoint(path)
    with checkpoint.reading(path):
        config, best = Config(**saved["config"]), saved["progress"]["best_model"]
    data = prepare(config, load_dataset(config.dataset, data_dir, seed=config.seed))
    check_data(saved, data, path)
    model = config.build(data.feat.shape[1], data.n_classes).to(config.device)
    checkpoint.load_weights(model, best, path)
    return config, model.eval(), data
