"""The training loop: early stopping, and checkpoints that resume to the last bit."""

import copy
import dataclasses
import json
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import dgl
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .. import __version__
from ..atomic_file import write_atomic
from ..checks import NotFiniteError
from ..config import Config
from ..data import NodeDataset
from ..functional import Moments
from ..nn import LayerSelect, Selection, layer_source
from . import checkpoint
from .batches import MiniBatches, WholeGraph
from .distributed import SINGLE, ProcessGroup
from .evaluate import accuracy, layer_report, scores

CHECKPOINT = "checkpoint.pt"
RESULTS = ("config.yaml", "metrics.json", "history.json", "predictions.npz", "layers.png")


@dataclass
class Progress:
    """The progress of training: epoch, best model and history."""

    epoch: int = 0
    best_epoch: int = -1
    best_accuracy: float = -1.0
    best_loss: float = float("inf")
    best_model: dict = field(default_factory=dict)
    history: list = field(default_factory=list)
    seconds: float = 0.0
    diverged: bool = False


@dataclass
class Run:
    """A trained model, its selection for every node, and the figures."""

    config: Config
    model: LayerSelect
    selection: Selection
    metrics: dict


def _on_gpu(config: Config) -> bool:
    return torch.device(config.device).type != "cpu"


def prepare(config: Config, data: NodeDataset) -> NodeDataset:
    """Return the data as the model sees it: normalised, on its device."""
    if _on_gpu(config) and not torch.cuda.is_available():
        raise ValueError(f"device is {config.device!r}, but torch sees no GPU; use --device cpu")
    normalize = config.row_normalize
    if normalize is None:
        normalize = (data.feat >= 0).all()
    return (data.row_normalized() if normalize else data).to(config.device)


def run_facts(config: Config, data: NodeDataset) -> dict:
    """Return what must be equal in all processes that train one model."""
    versions = {"version": __version__, "torch": torch.__version__, "dgl": dgl.__version__}
    return {**versions, **dataclasses.asdict(config), "data": data.fingerprint()}


class TrainingLoop:
    """One run, epoch by epoch.

    Parameters
    ----------
    config : the settings
    data : the dataset, as `prepare` returns it
    out : folder for checkpoints and results; None: nothing is written
    group : the processes that train together
    make_batches : the class of the batches; by default the whole graph or, with a batch size,
        mini-batches
    """

    def __init__(
        self,
        config: Config,
        data: NodeDataset,
        out: Path | None,
        group: ProcessGroup = SINGLE,
        make_batches: Callable[..., WholeGraph] | None = None,
    ) -> None:
        if config.batch_size is None and group.size > 1:
            raise ValueError(f"{group.size} processes train in mini-batches; give a --batch-size")
        if config.batch_norm and group.size > 1:
            raise ValueError(
                "each process would normalise its part of a batch alone; use one process, or leave "
                "out --batch-norm"
            )
        torch.manual_seed(config.seed)
        self.config, self.data, self.out, self.group = config, data, out and Path(out), group
        self.model = config.build(data.feat.shape[1], data.n_classes).to(config.device)
        if config.batch_size is not None and not self.model.head.layerwise:
            raise ValueError(
                f"selector {config.selector!r} compares whole layers and has no mini-batches; use "
                "final or one of metselect, or leave out the batch size"
            )
        if make_batches is None:
            make_batches = WholeGraph if config.batch_size is None else MiniBatches
        self.batches = make_batches(config, data, self.model.backbone, group)
        if group.size > 1:
            group.check_equal(run_facts(config, data))
        # FinalSelect leaves layer 0 without a gradient; MetSelect's decoders all get one
        self.wrapped = group.wrap(self.model, unused=self.model.head.prototypes is None)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.Adam(trained, lr=config.lr, weight_decay=config.weight_decay)
        self.state = Progress()

    def finished(self) -> bool:
        """Whether patience, divergence or the number of epochs ends training."""
        waited = self.state.epoch - 1 - self.state.best_epoch
        enough = self.state.best_epoch >= 0 and waited >= self.config.patience
        return enough or self.state.diverged or self.state.epoch >= self.config.epochs

    def epoch(self) -> dict:
        """Train for one epoch and, if it is due, evaluate on the validation nodes.

        Where a layer is not finite any more, training ends and the best model is kept; if there is
        none yet, or others would wait for this process, it is an error.
        """
        start, state = time.perf_counter(), self.state
        record = {"epoch": state.epoch}
        try:
            record["loss"] = self.step()
            last = state.epoch + 1 == self.config.epochs
            if last or (state.epoch + 1) % self.config.validate_every == 0:
                record |= self.evaluate()
        except NotFiniteError as error:
            if state.best_epoch < 0 or self.group.size > 1:
                raise
            warnings.warn(f"training diverged in epoch {state.epoch}: {error}", stacklevel=2)
            state.diverged = True
        state.history.append(record)
        state.epoch += 1
        state.seconds += time.perf_counter() - start
        return record

    def step(self) -> float:
        """Take one optimiser step per batch of an epoch; return the mean loss over nodes."""
        self._first_moments()
        self.model.train()
        total = torch.zeros(2, dtype=torch.float64)  # sum of the losses of all nodes, their number
        uneven = self.batches.uneven and self.group.size > 1
        with self.wrapped.join() if uneven else nullcontext():
            for batch in self.batches.epoch(self.state.epoch):
                loss = self.wrapped(batch.graph, batch.feat, batch.labels, batch.index, False).loss
                self.optimizer.zero_grad()
                (batch.weight * loss).backward()
                self.optimizer.step()
                n_nodes = len(batch.labels if batch.index is None else batch.index)
                total += torch.tensor([loss.item() * n_nodes, n_nodes], dtype=torch.float64)
        total = total.to(self.config.device)
        self.group.sum(total)
        self.model.renew_moments(self.group.sum)
        return (total[0] / total[1]).item()

    @torch.no_grad()
    def _first_moments(self) -> None:
        """Before the first epoch of mini-batches, take one pass for the moments to start from."""
        prototypes = self.model.head.prototypes
        if prototypes is None or prototypes.source == "call" or prototypes.valid.any():
            return
        for batch in self.batches.epoch(-1):
            source, index = layer_source(self.model.backbone, batch.graph, batch.feat), batch.index
            labels = batch.labels if index is None else batch.labels[index]
            self.model.head.gather(source.stack(index).stored(), labels)
        self.model.renew_moments(self.group.sum)

    def evaluate(self) -> dict:
        """Return accuracy and loss on the validation nodes, and keep the model if they are the
        best. Training continues with the moments that it had."""
        state, prototypes, record = self.state, self.model.head.prototypes, None
        before = None if prototypes is None else copy.deepcopy(prototypes.state_dict())
        result = self.batches.validate(self.model)
        if self.group.rank == 0:
            selection, labels = result
            val_accuracy = accuracy(selection.logits.argmax(1), labels)
            val_loss = finite_loss(selection.logits, labels)
            record = {"val_accuracy": val_accuracy, "val_loss": val_loss}
            if (val_accuracy, -val_loss) > (state.best_accuracy, -state.best_loss):
                state.best_accuracy, state.best_loss = val_accuracy, val_loss
                state.best_epoch = state.epoch
                state.best_model = {k: v.clone() for k, v in self.model.state_dict().items()}
        if before is not None:
            prototypes.load_state_dict(before)
        self.group.broadcast_buffers(self.model)
        best = record, state.best_accuracy, state.best_loss, state.best_epoch
        best = self.group.broadcast(best)
        record, state.best_accuracy, state.best_loss, state.best_epoch = best
        return record

    def save(self) -> None:
        """Write the checkpoint of this epoch, if there is a folder; only the first process does."""
        if self.out is None or self.group.rank > 0:
            return
        state = {
            "config": dataclasses.asdict(self.config),
            "data": self.data.fingerprint(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": dataclasses.asdict(self.state),
            "random": [torch.get_rng_state(), *torch.cuda.get_rng_state_all()],
        }
        checkpoint.save(state, self.out / CHECKPOINT)

    def resume(self) -> None:
        """Resume from the checkpoint in `out`, if there is one; it must have the same settings. The
        first process reads it for all, whose disks may be others."""
        saved, path = None, self.out and self.out / CHECKPOINT
        if self.group.rank == 0 and path is not None and path.exists():
            saved = load_checkpoint(path)
        saved = self.group.broadcast(saved)
        if saved is None:
            return
        with checkpoint.reading(path):
            old = Config(**saved["config"])
            if old != self.config:
                raise checkpoint.CheckpointError(
                    f"{self.out} holds a run with other settings ({old.differences(self.config)}); "
                    "choose another --out, or --overwrite"
                )
            check_data(saved, self.data, path)
            checkpoint.load_weights(self.model, saved["model"], path)
            self.optimizer.load_state_dict(saved["optimizer"])
            gathered = saved["progress"].pop("gathered", [])  # of a former version
            self.state = Progress(**saved["progress"])
            if gathered:
                parts = [part.to(self.config.device) for part in gathered]
                self.model.head.prototypes.gathered = Moments.of_parts(parts)
            torch.set_rng_state(saved["random"][0])
            if _on_gpu(self.config):
                torch.cuda.set_rng_state_all(saved["random"][1:])

    @torch.no_grad()
    def result(self) -> Run:
        """Return the best epoch's model and its figures, and write them to the folder."""
        self.model.load_state_dict(self.state.best_model)
        self.model.eval()
        val_selection, val_labels = self.batches.validate(self.model)
        selection = self.batches.predict(self.model)
        data, labels, split = self.data, self.data.labels, self.batches.split
        answers = selection.logits.argmax(1)
        backbone, batch_size = self.model.backbone, self.batches.batch_size
        layers = layer_source(backbone, data.graph, data.feat, batch_size).stack(split.test).rows()
        metrics = {
            "config": dataclasses.asdict(self.config),
            "epochs": self.state.epoch,
            "best_epoch": self.state.best_epoch,
            "diverged": self.state.diverged,
            "seconds": self.state.seconds,
            "train": scores(answers[split.train], labels[split.train]),
            "val": scores(val_selection.logits.argmax(1), val_labels),
            "test": scores(answers[split.test], labels[split.test]),
            **layer_report(self.model, selection, data, split.test, layers),
        }
        run = Run(self.config, self.model, selection, metrics)
        if self.out is not None:
            write_results(run, labels, self.state.history, self.out)
        return run


def write_results(run: Run, labels: Tensor, history: list[dict], out: Path) -> None:
    """Write config.yaml, metrics.json, history.json, predictions.npz and layers.png."""
    from ..plots import plot_layers

    texts = {
        "config.yaml": run.config.to_yaml(),
        "metrics.json": json.dumps(run.metrics, indent=1),
        "history.json": json.dumps(history),
    }
    for name, text in texts.items():
        write_atomic(out / name, lambda file, text=text: file.write(text.encode()))
    arrays = {
        "label": labels.cpu().numpy(),
        "prediction": run.selection.logits.argmax(1).cpu().numpy(),
        "layer": run.selection.layer.cpu().numpy(),
        "score": run.selection.score.cpu().numpy(),
    }
    write_atomic(out / "predictions.npz", lambda file: np.savez(file, **arrays))
    plot_layers(run.metrics, out / "layers.png")


def finite_loss(logits: Tensor, labels: Tensor) -> float:
    """Return the cross entropy over the nodes of classes that can be predicted."""
    loss = F.cross_entropy(logits, labels, reduction="none")
    return loss[torch.isfinite(loss)].mean().item()


def load_checkpoint(path: Path) -> dict:
    """Return the parts of a run's checkpoint."""
    return checkpoint.load(path, {"config", "data", "model", "optimizer", "progress", "random"})


def check_data(saved: dict, data: NodeDataset, path: Path) -> None:
    """Raise an error if a checkpoint is of other data."""
    if saved["data"] != data.fingerprint():
        raise checkpoint.CheckpointError(
            f"{path} was trained on other data than {data.name} is now; "
            "choose another --out, or --overwrite"
        )
