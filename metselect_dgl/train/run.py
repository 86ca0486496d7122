"""Train a model from its settings, and load a trained one."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from tqdm import tqdm

from .. import ops
from ..atomic_file import only_writer
from ..config import Config
from ..data import NodeDataset, load_dataset
from ..nn import LayerSelect
from . import checkpoint
from .distributed import SINGLE, ProcessGroup
from .loop import CHECKPOINT, RESULTS, Run, TrainingLoop, check_data, load_checkpoint, prepare


def train(
    config: Config,
    data: NodeDataset,
    out: Path | None = None,
    *,
    progress: bool = True,
    checkpoint_every: int = 20,
    group: ProcessGroup = SINGLE,
    keep_memory: bool = False,
    overwrite: bool = False,
) -> Run | None:
    """Train one model; with `out`, leave checkpoints and results there and resume from them, or
    with `overwrite` remove them first.

    With a `batch_size` in the settings it is trained in mini-batches, by all processes of the
    `group` together; the first process returns the result, the others None. With `keep_memory`,
    this process keeps freed memory for the next epoch, which is faster.
    """
    if keep_memory:
        ops.keep_freed_memory()
    loop = TrainingLoop(config, prepare(config, data), out, group)
    with run_folder(out, group, overwrite):
        run_loop(loop, progress=progress and group.rank == 0, checkpoint_every=checkpoint_every)
        return loop.result() if group.rank == 0 else None


@contextmanager
def run_folder(out: Path | None, group: ProcessGroup, overwrite: bool = False) -> Iterator[None]:
    """Let the first process alone write to the folder of a run; with `overwrite`, remove the
    checkpoint and the results in it first."""
    with only_writer(out) if out is not None and group.rank == 0 else nullcontext():
        if overwrite and out is not None and group.rank == 0:
            for name in (CHECKPOINT, *RESULTS):
                (Path(out) / name).unlink(missing_ok=True)
        group.broadcast(None)  # no process looks for a checkpoint before it is removed
        yield


def run_loop(loop: TrainingLoop, *, progress: bool = True, checkpoint_every: int = 20) -> None:
    """Run the epochs of a loop, from its checkpoint if it has one, to the end."""
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
            shown = {"loss": f"{record['loss']:.3f}"} if "loss" in record else {}
            if "val_accuracy" in record:
                shown["val"] = f"{100 * record['val_accuracy']:.1f}"
            bar.set_postfix(shown, refresh=False)
            if loop.state.epoch % checkpoint_every == 0 or loop.finished():
                loop.save()


def load_run(out: Path, data_dir: str | None = None) -> tuple[Config, LayerSelect, NodeDataset]:
    """Return settings and best model of the run in `out`, and the data as the model sees it."""
    path = Path(out) / CHECKPOINT
    saved = load_checkpoint(path)
    with checkpoint.reading(path):
        config, best = Config(**saved["config"]), saved["progress"]["best_model"]
    data = prepare(config, load_dataset(config.dataset, data_dir, seed=config.seed))
    check_data(saved, data, path)
    model = config.build(data.feat.shape[1], data.n_classes).to(config.device)
    checkpoint.load_weights(model, best, path)
    return config, model.eval(), data
