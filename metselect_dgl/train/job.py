"""Join a DistDGL job: checks on each host, then between all processes, before DGL connects."""

import fcntl
import hashlib
import json
import os
import signal
import socket
import struct
from pathlib import Path

import dgl
import torch

from .. import __version__
from . import shared_memory
from .peers import Host, Hub, Member, Peer, listen, read_hosts, watch

_SIOCGIFADDR = 0x8915  # ioctl: the IPv4 address of an interface


def digest(folder: Path) -> str:
    """Return a digest of the files of one part."""
    content = hashlib.sha256()
    for path in sorted(Path(folder).iterdir()):
        of_file = hashlib.sha256()
        with open(path, "rb") as file:
            while chunk := file.read(2**20):
                of_file.update(chunk)
        content.update(of_file.digest())
    return content.hexdigest()[:16]


def check_clients(environment, parts: int) -> None:
    """Raise an error for a wrong DGL_NUM_CLIENT: servers wait for exactly so many, for ever."""
    clients, samplers = environment.get("DGL_NUM_CLIENT"), environment.get("DGL_NUM_SAMPLER", "0")
    if clients is None:
        raise ValueError(
            "DGL_NUM_CLIENT is not set; set it for servers and trainers to the number of trainers, "
            "times 1 + DGL_NUM_SAMPLER"
        )
    if int(clients) % parts:
        raise ValueError(f"DGL_NUM_CLIENT is {clients}, no multiple of the {parts} partitions")
    if environment.get("DGL_ROLE") != "server":
        expected = int(environment.get("WORLD_SIZE", 1)) * (1 + int(samplers))
        if int(clients) != expected:
            raise ValueError(
                f"DGL_NUM_CLIENT is {clients}, but there are {expected} clients (WORLD_SIZE times "
                "1 + DGL_NUM_SAMPLER); the servers would wait for ever"
            )


def join(about: dict, folder: Path, ip_config: str, timeout: float) -> Hub | Member:
    """Wait until all servers and trainers have started with the same partitions and versions; from
    then on this process ends if another one exits."""
    hosts = read_hosts(ip_config)
    if len(hosts) != len(about.get("parts", [])):
        raise ValueError(f"{ip_config} has {len(hosts)} hosts; `metselect partition` one part each")
    samplers = int(os.environ.get("DGL_NUM_SAMPLER", 0))
    n_trainers = int(os.environ["DGL_NUM_CLIENT"]) // (1 + samplers)
    serves = os.environ.get("DGL_ROLE") == "server"
    number = int(os.environ["DGL_SERVER_ID"] if serves else os.environ.get("RANK", 0))
    part = number if serves else number * len(hosts) // n_trainers
    facts = {
        "version": __version__,
        "torch": torch.__version__,
        "dgl": dgl.__version__,
        "trainers": n_trainers,
        "hosts": " ".join(f"{host.address}:{host.port}" for host in hosts),
        "partitions": hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16],
    }
    own = Peer(f"{'server' if serves else 'trainer'} {number}", hosts[part].address, facts)
    if own.name == "server 0":
        names = [f"server {i}" for i in range(len(hosts))]
        names += [f"trainer {i}" for i in range(n_trainers)]
        connection = Hub(own, hosts[0], set(names))
    else:
        connection = Member(own, hosts[0], timeout)
    if serves:
        prepare_server(hosts[part], folder / f"part{part}", about["parts"][part])
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(own.host))
    connection.join(timeout)
    watch(connection, end_server if serves else end_trainer)
    return connection


def prepare_server(host: Host, part: Path, expected: str) -> None:
    """Check what a server needs: shared memory, its port and the right part."""
    shared_memory.reserve()
    listen(*host).close()  # DGL would wait for ever on a port in use
    if digest(part) != expected:
        raise ValueError(f"{part} is not the part that metselect.json describes; copy it again")
    dgl.distributed.rpc.register_sig_handler()  # removes the shared memory on SIGTERM
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # ssh closed: it ends with the trainers


def interface_of(address: str) -> str:
    """Return the name of the network interface with this IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # it has none
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    raise ValueError(f"this machine does not have the address {address}; see the file of hosts")


def end_server() -> None:
    """End this process; DGL's signal handler removes its shared memory."""
    os.kill(os.getpid(), signal.SIGTERM)


def end_trainer() -> None:
    """End this process, and remove the shared memory of a server that was killed."""
    shared_memory.clean()
    os._exit(1)
