"""The processes of one DistDGL job: whether all have started, agree and are alive.

Server 0 listens on the port after its own. Every other server and every trainer keeps a connection
to it, on which nothing is sent while the job runs. A connection that closes, or that the kernel
finds dead, ends the processes on all hosts. A message is a line of JSON.
"""

import json
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from .distributed import check_equal, notice

PORT = 30050  # of a line without one, as in DGL
UNREACHABLE_SECONDS = 20  # after which a silent host is given up
_KEEPALIVE = {
    socket.TCP_KEEPIDLE: UNREACHABLE_SECONDS // 4,
    socket.TCP_KEEPINTVL: UNREACHABLE_SECONDS // 4,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 1000 * UNREACHABLE_SECONDS,  # milliseconds
}
_RESUME = "all processes end; the same command resumes from the last checkpoint"


class Host(NamedTuple):
    """A line of DistDGL's ip_config."""

    address: str
    port: int


def read_hosts(path: Path) -> list[Host]:
    """Read a file of lines `ADDRESS [PORT]`, one per host in the order of the parts."""
    hosts = []
    for line in Path(path).read_text().splitlines():
        address, *port = line.split() or [""]
        if not address or len(port) > 1 or not all(text.isdecimal() for text in port):
            raise ValueError(f"{path}: {line!r} is not ADDRESS or ADDRESS PORT")
        hosts.append(Host(address, int(port[0]) if port else PORT))
    if len({host.address for host in hosts}) < len(hosts) or not hosts:
        raise ValueError(f"{path} must name every host once; DistDGL has one part per host")
    return hosts


class PeerError(RuntimeError):
    """Another process of the job exited, cannot be reached or reported an error."""


@dataclass(frozen=True)
class Peer:
    """A process: its name (`server 0`, `trainer 3`), its host, and the facts that must be equal."""

    name: str
    host: str
    facts: dict[str, str]

    def __str__(self) -> str:
        return f"{self.name} on {self.host}"


class Connection:
    """A socket that sends and receives messages."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            connected.setsockopt(socket.IPPROTO_TCP, option, value)
        self.socket, self.lines = connected, connected.makefile("rw", encoding="utf-8")

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, **message) -> None:
        self.lines.write(json.dumps(message) + "\n")
        self.lines.flush()

    def receive(self, sender: object) -> dict:
        """Return the next message of the sender, whose name errors have."""
        try:
            line = self.lines.readline()
        except OSError as error:
            raise PeerError(f"{sender} cannot be reached ({error}); {_RESUME}") from None
        if not line:
            raise PeerError(f"{sender} exited; {_RESUME}")
        message = json.loads(line)
        if "error" in message:
            raise PeerError(message["error"])
        return message


class Hub:
    """Server 0's side of the connections; `expected` are the names of all processes."""

    def __init__(self, own: Peer, host: Host, expected: set[str]) -> None:
        self.own, self.missing = own, expected - {own.name}
        self.peers: dict[Connection, Peer] = {}
        self.listener = listen(host.address, host.port + 1)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ)

    def join(self, timeout: float) -> None:
        """Wait for all processes and compare their facts."""
        end = time.monotonic() + timeout
        try:
            with notice(f"{self.own} is waiting for other processes of the job"):
                while self.missing:
                    if time.monotonic() > end:
                        names = ", ".join(sorted(self.missing))
                        raise PeerError(
                            f"{names} did not join within {timeout:g} s (--join-timeout)"
                        )
                    self._serve(1.0)
            check_equal({str(peer): peer.facts for peer in (self.own, *self.peers.values())})
        except (PeerError, ValueError) as error:
            self._tell(error=str(error))
            raise
        self._tell(go=True)

    def watch(self) -> None:
        """Return when all trainers have finished; if a process exits before, tell the others."""
        try:
            while any(peer.name.startswith("trainer") for peer in self.peers.values()):
                self._serve(None)
        except PeerError as error:
            self._tell(error=str(error))
            raise
        self._tell(finished=True)

    def leave(self) -> None:
        """Do nothing: the hub ends with the last trainer."""

    def _serve(self, timeout: float | None) -> None:
        for key, _ in self.selector.select(timeout):
            if key.fileobj is self.listener:
                self._accept()
                continue
            key.fileobj.receive(self.peers[key.fileobj])  # the only message: it has finished
            self.selector.unregister(key.fileobj)
            del self.peers[key.fileobj]

    def _accept(self) -> None:
        """Add a process; a connection of anything else is closed."""
        connected, _ = self.listener.accept()
        connection = Connection(connected)
        connected.settimeout(5)
        try:
            peer = Peer(**connection.receive("a process"))
            if peer.name not in self.missing:
                connection.send(error=f"{self.own} does not expect {peer}")
                raise ValueError(peer.name)
        except (PeerError, ValueError, TypeError):
            connected.close()
            return
        connected.settimeout(None)
        self.missing.remove(peer.name)
        self.peers[connection] = peer
        self.selector.register(connection, selectors.EVENT_READ)

    def _tell(self, **message) -> None:
        for connection in self.peers:
            with suppress(OSError):  # of the process that exited
                connection.send(**message)


class Member:
    """The connection of every other process to server 0 on the first host."""

    def __init__(self, own: Peer, host: Host, timeout: float) -> None:
        self.own, self.hub, self.finished = own, f"server 0 on {host.address}", False
        end = time.monotonic() + timeout
        with notice(f"{own} is waiting for {self.hub}, port {host.port + 1}"):
            while True:
                try:
                    connected = socket.create_connection((host.address, host.port + 1), timeout=5)
                    break
                except OSError as error:
                    if time.monotonic() > end:
                        text = f"{own} could not reach {self.hub} within {timeout:g} s"
                        raise PeerError(f"{text} ({error})") from None
                    time.sleep(0.2)
        connected.settimeout(None)
        self.connection = Connection(connected)
        self.connection.send(**asdict(own))

    def join(self, timeout: float) -> None:
        """Wait until server 0 has all processes, or reports an error; it keeps the time."""
        with notice(f"{self.own} is waiting for other processes of the job"):
            self.connection.receive(self.hub)

    def watch(self) -> None:
        """Return when all trainers have finished; raise an error if a process exits before."""
        with self.connection.socket:
            try:
                self.connection.receive(self.hub)
            except PeerError:
                if not self.finished:
                    raise

    def leave(self) -> None:
        """Report that this trainer has finished; from now on server 0 may exit."""
        self.finished = True
        self.connection.send(finished=True)


def listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens at this address alone."""
    try:
        return socket.create_server((address, port))
    except OSError as error:
        raise ValueError(
            f"port {port} of {address} cannot be used ({error.strerror}); name another in the file "
            "of hosts, the same on all hosts"
        ) from None


def watch(connection: Hub | Member, end: Callable[[], None]) -> None:
    """Wait in a thread for the end of the job; if a process exits before, print that and call
    `end`, which must end this process even while DGL or gloo waits."""

    def run() -> None:
        try:
            connection.watch()
        except PeerError as error:
            with suppress(OSError):  # the terminal is closed
                print(f"metselect: {error}", file=sys.stderr, flush=True)
            end()

    threading.Thread(target=run, daemon=True).start()
