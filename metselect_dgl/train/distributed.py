"""Several processes that train one model: torchrun starts them, torch.distributed connects them."""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

JOIN_TIMEOUT = 600.0  # seconds within which all processes must have started
NOTICE_SECONDS = 60  # after which a process prints that it waits for others
_SIGNAL_SECONDS = 5  # within which torchrun's signal arrives after another process exited


def check_equal(facts: dict[str, dict]) -> None:
    """Raise an error that names the first difference from the first process; `facts` has the
    settings, versions and so on of each process under its name."""
    (first, expected), *others = facts.items()
    for name, value in expected.items():
        for process, given in others:
            if given.get(name) != value:
                raise ValueError(
                    f"{name} is {value!r} in {first}, but {given.get(name)!r} in {process}; start "
                    "all processes with the same settings, versions and data"
                )


@dataclass(frozen=True)
class ProcessGroup:
    """The rank of this process among `size` processes."""

    rank: int = 0
    size: int = 1

    def sum(self, vector: Tensor) -> None:
        """Add a vector up over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(vector)

    def broadcast(self, value: Any) -> Any:
        """Return the value of the first process."""
        box = [value]
        if self.size > 1:
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: Any) -> list:
        """Return, on the first process, the values of all; on others, their own alone."""
        if self.size == 1:
            return [value]
        box = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, box, dst=0)
        return box or [value]

    def check_equal(self, facts: dict) -> None:
        """Raise an error in all processes if their facts differ."""
        box = [None] * self.size
        dist.all_gather_object(box, facts)
        check_equal({f"process {rank}": given for rank, given in enumerate(box)})

    def broadcast_buffers(self, model: nn.Module) -> None:
        """Give every process the buffers of the first one."""
        if self.size > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, src=0)

    def wrap(self, model: nn.Module, unused: bool) -> nn.Module:
        """Return the model whose gradients are the mean over processes; `unused`: some of its
        parameters may get none. Buffers are broadcast at the end of epochs."""
        if self.size == 1:
            return model
        sync = "forward_sync_buffers" if torch.__version__ >= "2.13" else "broadcast_buffers"
        return nn.parallel.DistributedDataParallel(
            model, find_unused_parameters=unused, **{sync: False}
        )


SINGLE = ProcessGroup()


class WorkerExited(RuntimeError):
    """Another process of the group exited, and torchrun ends this one."""


@contextmanager
def notice(text: str) -> Iterator[None]:
    """Print the text if the block takes longer than a minute."""
    options = {"file": sys.stderr, "flush": True}
    timer = threading.Timer(NOTICE_SECONDS, print, [f"metselect: {text}"], options)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _store(rank: int, size: int, limit: timedelta) -> dist.Store:
    """Return torchrun's store, or connect to that of the first process."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if "TORCHELASTIC_RUN_ID" in os.environ or not address.replace(".", "").isdecimal():
        return next(dist.rendezvous("env://", timeout=limit))[0]
    # torch's own socket would listen on all interfaces
    listener = socket.create_server((address, port)).detach() if rank == 0 else None
    options = {"wait_for_workers": False, "master_listen_fd": listener}
    return dist.TCPStore(address, port, size, rank == 0, limit, **options)


def _join(rank: int, size: int, timeout: float) -> dist.Store:
    """Return the store of the processes once all of them are connected to it."""
    limit, missing = timedelta(seconds=timeout), 0
    where = "{MASTER_ADDR}:{MASTER_PORT}".format(**os.environ)
    try:
        with notice(f"process {rank} of {size} is waiting for the others at {where}"):
            store = _store(rank, size, limit)
            store.set(f"joined/{rank}", "")
            for missing in range(size):
                store.wait([f"joined/{missing}"], limit)
    except dist.DistError as error:
        raise RuntimeError(
            f"process {rank}: process {missing} of {size} did not join at {where} within "
            f"{timeout:g} s (--join-timeout): {str(error).splitlines()[0]}"
        ) from error
    return store


@contextmanager
def process_group(
    device: str = "cpu", join_timeout: float = JOIN_TIMEOUT
) -> Iterator[ProcessGroup]:
    """Connect the processes that torchrun started, or return a group of one if it did not; if one
    of them does not join within `join_timeout` seconds, raise an error.

    When a worker exits, torchrun sends SIGTERM to the others: that signal, not the text of an
    error, is what makes this one stop with `WorkerExited`.
    """
    size = int(os.environ.get("WORLD_SIZE", 1))
    if size == 1:
        yield SINGLE
        return
    if "RANK" not in os.environ:
        raise ValueError("WORLD_SIZE is set, but RANK is not; start the processes with torchrun")
    rank = int(os.environ["RANK"])

    def stop(*_) -> None:
        raise WorkerExited(
            f"process {rank}: another of the {size} processes exited; run the same command again: "
            "it resumes from the last checkpoint"
        )

    before = signal.signal(signal.SIGTERM, stop)
    gpu = torch.device(device).type == "cuda"
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # The others wait while the first one validates on the whole graph: no timeout of minutes.
    store, timeout = _join(rank, size, join_timeout), timedelta(days=1)
    backend = "nccl" if gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    try:
        yield ProcessGroup(rank, size)
        dist.barrier()  # nobody leaves before the first one has written its results
    except WorkerExited:
        raise
    except RuntimeError:
        time.sleep(_SIGNAL_SECONDS)  # a broken connection: the signal, if any, follows
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    dist.destroy_process_group()
