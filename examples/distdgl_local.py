"""DistDGL on one machine without ssh: partition a dataset, start a server and two trainers.

    python examples/distdgl_local.py [--dataset NAME] [--trainers 2] [-- flags of `metselect train`]

On several machines the same processes are started, a server and some trainers on each; see
docs/scaling.md. What a trainer or a server needs to know is in its environment.
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

METSELECT = [sys.executable, "-m", "metselect_dgl"]


def free_port() -> int:
    with socket.socket() as it:
        it.bind(("127.0.0.1", 0))
        return it.getsockname()[1]


def start(folder: Path, trainers: int, flags: list[str]) -> dict[str, subprocess.Popen]:
    """The server, and once it listens, the trainers. Nobody else may connect to the server's port:
    it would count as a trainer."""
    ip_config = folder / "ip_config.txt"
    ip_config.write_text(f"127.0.0.1 {free_port()}\n")
    train = [*METSELECT, "train", "--partitions", folder, "--ip-config", ip_config, *flags]
    common = {key: value for key, value in os.environ.items() if not key.startswith("DGL_")} | {
        "DGLBACKEND": "pytorch",
        "DGL_NUM_CLIENT": str(trainers),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    server = {
        "DGL_ROLE": "server",
        "DGL_SERVER_ID": "0",
        "DGL_NUM_SERVER": "1",  # of every machine
        "DGL_IP_CONFIG": str(ip_config),
        "DGL_CONF_PATH": str(folder / "graph.json"),
    }
    log = folder / "server.log"
    with open(log, "w") as file:
        processes = {"server": subprocess.Popen(train, env=common | server, stdout=file)}
    while "waiting for connections" not in log.read_text():
        if processes["server"].poll() is not None:
            sys.exit("the server ended before it listened")
        time.sleep(0.1)
    group = {
        "DGL_DIST_MODE": "distributed",
        "WORLD_SIZE": str(trainers),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    for rank in range(trainers):
        processes[f"trainer {rank}"] = subprocess.Popen(
            train, env=common | group | {"RANK": str(rank)}
        )
    return processes


def wait(processes: dict[str, subprocess.Popen]) -> int:
    """Until all have ended; if one fails, the others are ended too: they would wait for it. By
    SIGTERM, on which a server gives its shared memory back."""
    while any(each.poll() is None for each in processes.values()):
        failed = [name for name, each in processes.items() if each.poll()]
        if failed:
            print(f"{failed[0]} failed; ending the others", file=sys.stderr)
            for each in processes.values():
                if each.poll() is None:
                    each.terminate()
            time.sleep(3)
            for each in processes.values():
                if each.poll() is None:
                    each.kill()
        time.sleep(0.1)
    return max(abs(each.returncode) for each in processes.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="hop_chain")
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/distdgl"))
    parser.add_argument("flags", nargs="*", help="more flags of `metselect train`, after --")
    args = parser.parse_args()
    flags = ["--batch-size", "200", "--epochs", "10", "--out", args.out, *args.flags]
    with tempfile.TemporaryDirectory() as folder:
        cut = [*METSELECT, "partition", "--dataset", args.dataset, "--out", folder]
        subprocess.run(cut, check=True, stdout=subprocess.DEVNULL)
        return wait(start(Path(folder), args.trainers, flags))


if __name__ == "__main__":
    sys.exit(main())
