"""Train a model on the whole graph, in mini-batches or on partitions, and load it again."""

from ..optional import needs_dgl

with needs_dgl(__name__):
    from .loop import Run, TrainingLoop, load_checkpoint, prepare
    from .run import load_run, run_loop, train

__all__ = ["Run", "TrainingLoop", "load_checkpoint", "load_run", "prepare", "run_loop", "train"]
