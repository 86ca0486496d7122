"""Hosts on one machine: network namespaces with their own /dev/shm, connected by a bridge.

They need root and iproute2. Nothing in them can be reached from outside of them.
"""

import fcntl
import json
import os
import select
import shutil
import signal
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

INTERFACE = "eth0"
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000  # linux/if_tun.h


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
    """The hosts. `ssh` is the command that runs a line of shell on {host}; `switch` has the
    bridge."""

    ssh: str
    switch: str


@contextmanager
def network(count: int, folder: Path) -> Iterator[Network]:
    """Make hosts 10.77.0.1, 10.77.0.2, ...; at the end remove them and what runs on them."""
    hosts, switch = Network(), f"metselect-{os.getpid()}-switch"
    hosts.ssh, hosts.switch = f"{folder}/{{host}}", switch
    with ExitStack() as cleanup:
        add_namespace(switch, cleanup)
        ip("-n", switch, "link", "add", "name", "bridge0", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge0", "up")
        for number in range(1, count + 1):
            name, address = f"metselect-{os.getpid()}-{number}", f"10.77.0.{number}"
            add_namespace(name, cleanup)
            connect(name, address, switch)
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


def connect(name: str, address: str, switch: str) -> None:
    """Connect a host to the bridge by a veth pair."""
    port = f"port{address.rpartition('.')[2]}"
    peer = ("peer", "name", port, "netns", switch)
    ip("-n", name, "link", "add", "name", INTERFACE, "type", "veth", *peer)
    plug(name, address, switch, port)


def plug(name: str, address: str, switch: str, port: str) -> None:
    """Give the interface of a host its address, and its other end to the bridge."""
    ip("-n", switch, "link", "set", port, "master", "bridge0", "up")
    ip("-n", name, "addr", "add", f"{address}/24", "dev", INTERFACE)
    ip("-n", name, "link", "set", INTERFACE, "up")


@contextmanager
def slow_link(network: Network, host: NamespaceHost, delay: float) -> Iterator[None]:
    """Delay every frame from and to a host by `delay` seconds. Kernels without `tc netem` can do
    so, too: a pair of TAP devices replaces the veth pair, and a thread copies the frames."""
    ip("-n", host.name, "link", "del", INTERFACE)
    stop, names = threading.Event(), (f"ms{os.getpid()}a", f"ms{os.getpid()}b")
    descriptors = [tap(name) for name in names]
    try:
        ip("link", "set", names[0], "netns", host.name, "name", INTERFACE)
        ip("link", "set", names[1], "netns", network.switch)
        plug(host.name, host.address, network.switch, names[1])
        copy = threading.Thread(target=relay, args=(*descriptors, delay, stop))
        copy.start()
        yield
    finally:
        stop.set()
        copy.join()
        for descriptor in descriptors:
            os.close(descriptor)  # which removes the device
        connect(host.name, host.address, network.switch)


def tap(name: str) -> int:
    """Make a TAP device and return the file descriptor of its frames."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return descriptor


def relay(one: int, two: int, delay: float, stop: threading.Event) -> None:
    """Copy frames between two devices, each after `delay` seconds."""
    waiting = deque()  # (time to send, target, frame)
    while not stop.is_set():
        ready, _, _ = select.select([one, two], [], [], 0.002 if waiting else 0.1)
        for source in ready:
            frame = os.read(source, 65536)
            waiting.append((time.monotonic() + delay, two if source == one else one, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, target, frame = waiting.popleft()
            with suppress(OSError):  # the device is down
                os.write(target, frame)


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
