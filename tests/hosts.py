"""Hosts on one machine: network namespaces with their own /dev/shm, connected by a bridge.

They need root and iproute2. Nothing in them can be reached from outside of them.
"""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

INTERFACE = "eth0"


def unavailable() -> str:
    """Return why hosts cannot be made here, or an empty string."""
    missing = [tool for tool in ("ip", "unshare", "nsenter") if shutil.which(tool) is None]
    if missing:
        return f"{missing[0]} is not installed (iproute2, util-linux)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"metselect-{os.getpid()}-probe"
    probe = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if probe.returncode == 0:
        ip("netns", "del", name)
    return probe.stderr.strip()


def alone() -> list[str]:
    """Return a prefix that runs a command on a host of its own, without a network; nothing where
    hosts cannot be made."""
    line = 'mount -t tmpfs tmpfs /dev/shm && ip link set lo up && exec "$@"'
    enter = ["unshare", "--net", "--mount", "sh", "-c", line, "sh"]
    return [] if unavailable() else enter


def ip(*arguments: object) -> str:
    """Run iproute2's command and return its output."""
    command = ["ip", *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@dataclass(frozen=True)
class NamespaceHost:
    """A network namespace; `pid` is of the process that keeps it and its /dev/shm."""

    name: str
    address: str
    pid: int

    def run(self, line: str) -> None:
        """Run a line of shell on the host."""
        enter = ["nsenter", f"--target={self.pid}", "--net", "--mount", "sh", "-c", line]
        subprocess.run(enter, check=True, capture_output=True)

    def link(self, state: str) -> None:
        """Set the link `up` or `down`."""
        ip("-n", self.name, "link", "set", INTERFACE, state)

    def received(self) -> int:
        """Return the bytes that the interface has received."""
        (link,) = json.loads(ip("-n", self.name, "-s", "-j", "link", "show", INTERFACE))
        return link["stats64"]["rx"]["bytes"]

    def shared_memory(self) -> list[str]:
        """Return the names in /dev/shm."""
        return os.listdir(f"/proc/{self.pid}/root/dev/shm")

    def processes(self) -> dict[int, str]:
        """Return the processes on the host: `server 0`, `trainer 1` or the command, by pid."""
        found = {}
        for pid in map(int, ip("netns", "pids", self.name).split()):
            try:
                variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
                command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
            except OSError:  # it has exited
                continue
            given = dict(variable.partition("=")[::2] for variable in variables)
            if "DGL_SERVER_ID" in given:
                command = f"server {given['DGL_SERVER_ID']}"
            elif "RANK" in given:
                command = f"trainer {given['RANK']}"
            if pid != self.pid and command:  # not a zombie
                found[pid] = command
        return found

    def kill(self, name: str) -> None:
        """Send SIGKILL to a process by its name in `processes`."""
        for pid, process in self.processes().items():
            if process == name:
                return os.kill(pid, signal.SIGKILL)
        raise AssertionError(f"{name} does not run on {self.address}: {self.processes()}")


class Network(list):
    """The hosts. `ssh` is the command that runs a line of shell on {host}."""

    ssh: str


@contextmanager
def network(count: int, folder: Path) -> Iterator[Network]:
    """Make hosts 10.77.0.1, 10.77.0.2, ...; at the end remove them and what runs on them."""
    hosts, switch = Network(), f"metselect-{os.getpid()}-switch"
    hosts.ssh = f"{folder}/{{host}}"
    with ExitStack() as cleanup:
        add_namespace(switch, cleanup)
        ip("-n", switch, "link", "add", "name", "bridge0", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge0", "up")
        for number in range(1, count + 1):
            name, address = f"metselect-{os.getpid()}-{number}", f"10.77.0.{number}"
            add_namespace(name, cleanup)
            peer = ("peer", "name", f"port{number}", "netns", switch)
            ip("-n", name, "link", "add", "name", INTERFACE, "type", "veth", *peer)
            ip("-n", switch, "link", "set", f"port{number}", "master", "bridge0", "up")
            ip("-n", name, "addr", "add", f"{address}/24", "dev", INTERFACE)
            ip("-n", name, "link", "set", INTERFACE, "up")
            ip("-n", name, "link", "set", "lo", "up")
            line = "mount -t tmpfs tmpfs /dev/shm && echo ready && exec sleep infinity"
            keep = ["ip", "netns", "exec", name, "unshare", "--mount", "sh", "-c", line]
            keeper = subprocess.Popen(keep, stdout=subprocess.PIPE)
            host = NamespaceHost(name, address, keeper.pid)
            cleanup.callback(end, host, keeper)
            assert keeper.stdout.readline() == b"ready\n"
            script = folder / address
            script.write_text(
                f'#!/bin/sh\nexec nsenter --target={host.pid} --net --mount sh -c "$1"'
            )
            script.chmod(0o755)
            hosts.append(host)
        yield hosts


def add_namespace(name: str, cleanup: ExitStack) -> None:
    ip("netns", "add", name)
    cleanup.callback(ip, "netns", "del", name)


def end(host: NamespaceHost, keeper: subprocess.Popen) -> None:
    """End all processes on a host."""
    for pid in host.processes():
        os.kill(pid, signal.SIGKILL)
    keeper.kill()
    keeper.wait()


def wait_until(condition, seconds: float, what: str) -> None:
    """Wait for a condition; raise an error after `seconds`."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, f"{what} took more than {seconds} s"
        time.sleep(0.05)
