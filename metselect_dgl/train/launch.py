"""Start the servers and trainers of a DistDGL job on several hosts, by ssh or another command."""

import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from .peers import UNREACHABLE_SECONDS, Host, read_hosts

SSH = "ssh -tt -o BatchMode=yes -o ServerAliveInterval=5 {host}"
LOCAL = "sh -c"
_END_SECONDS = UNREACHABLE_SECONDS + 10  # within which processes end after one of them


@dataclass(frozen=True)
class Start:
    """A process to start: its name, the host, and a line for the shell there."""

    name: str
    host: Host
    line: str

    def command(self, ssh: str | None) -> list[str]:
        """Return the command that starts it: `ssh`, with the host in place of {host}, and the line
        as its last argument. By default a loopback address needs no ssh."""
        if ssh is None:
            ssh = LOCAL if self.host.address.startswith("127.") else SSH
        return [*shlex.split(ssh.format(host=self.host.address)), self.line]


def plan(hosts_file: Path, partitions: Path, trainers: int, flags: list[str]) -> list[Start]:
    """Return the processes of a job with `trainers` on each host; `flags` are those of `metselect
    train`. Files and Python have the same paths on all hosts."""
    hosts, partitions = read_hosts(hosts_file), Path(partitions).resolve()
    ip_config = str(Path(hosts_file).resolve())
    train = [sys.executable, "-m", "metselect_dgl", "train"]
    train += ["--partitions", str(partitions), "--ip-config", ip_config, *flags]
    size = trainers * len(hosts)
    common = {
        "DGLBACKEND": "pytorch",
        "DGL_NUM_CLIENT": size,
        "DGL_NUM_SERVER": 1,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", 1),
    }
    group = {
        "DGL_DIST_MODE": "distributed",
        "WORLD_SIZE": size,
        "MASTER_ADDR": hosts[0].address,
        "MASTER_PORT": hosts[0].port + 2,  # the next one is that of peers.py
    }
    starts = []
    for part, host in enumerate(hosts):
        server = {
            "DGL_ROLE": "server",
            "DGL_SERVER_ID": part,
            "DGL_IP_CONFIG": ip_config,
            "DGL_CONF_PATH": partitions / "graph.json",
        }
        starts.append(Start(f"server {part}", host, shell_line(common | server, train)))
    for rank in range(size):
        line = shell_line(common | group | {"RANK": rank}, train)
        starts.append(Start(f"trainer {rank}", hosts[rank // trainers], line))
    return starts


def shell_line(environment: dict, command: list[str]) -> str:
    """Return a line that runs the command in this folder."""
    settings = [f"{name}={value}" for name, value in environment.items()]
    return f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(['env', *settings, *command])}"


def launch(starts: list[Start], ssh: str | None = None) -> int:
    """Start the processes and wait for them; return the status of the first that failed, or 0.

    When one fails the others end by themselves (see peers.py); after half a minute they are ended.
    """
    processes = {}
    try:
        for start in starts:
            out = subprocess.DEVNULL if start.name.startswith("server") else None
            command = start.command(ssh)
            processes[start.name] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out)
        return wait(processes)
    finally:
        end(processes)


def wait(processes: dict[str, subprocess.Popen]) -> int:
    """Wait for all; after a failure, only as long as the others need to end by themselves."""
    status, deadline = 0, float("inf")
    while any(process.poll() is None for process in processes.values()):
        for name, process in processes.items():
            if process.poll() and not status:
                status, deadline = abs(process.returncode), time.monotonic() + _END_SECONDS
                print(f"metselect: {name} failed; the others end", file=sys.stderr, flush=True)
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return status or max(abs(process.returncode) for process in processes.values())


def end(processes: dict[str, subprocess.Popen]) -> None:
    """End processes that still run. By SIGTERM, on which a server removes its shared memory; on
    hosts behind ssh the connection closes, and the job ends as if a process had failed."""
    for process in processes.values():
        process.terminate()
    for process in processes.values():
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
