"""The processes of a DistDGL job on one machine: joining, locks, and what is started where."""

import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress

import pytest

from metselect_dgl import cli
from metselect_dgl.train import shared_memory
from metselect_dgl.train.job import interface_of
from metselect_dgl.train.launch import Start, launch, plan
from metselect_dgl.train.peers import Host, Hub, Member, Peer, PeerError, listen, read_hosts

FACTS = {"version": "1", "trainers": 1}
HOSTS = {
    "empty": ("", "must name every host once"),
    "blank-line": ("10.0.0.1\n\n10.0.0.2\n", "'' is not ADDRESS or ADDRESS PORT"),
    "port": ("10.0.0.1 first\n", "'10.0.0.1 first' is not"),
    "three-words": ("10.0.0.1 30050 2\n", "is not ADDRESS"),
    "twice": ("10.0.0.1 30050\n10.0.0.1 30060\n", "one part per host"),
}


@pytest.mark.parametrize(("text", "message"), HOSTS.values(), ids=HOSTS)
def test_a_wrong_file_of_hosts_is_refused(tmp_path, text, message):
    path = tmp_path / "hosts.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_hosts(path)


@pytest.fixture
def host() -> Host:
    """A free port of this machine whose next one is free, too."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as probe, suppress(ValueError):
            port = probe.getsockname()[1]
            listen("127.0.0.1", port + 1).close()
            return Host("127.0.0.1", port)


def peer(name: str, **facts) -> Peer:
    return Peer(name, "127.0.0.1", FACTS | facts)


def outcomes(hub: Hub, members: list[Member], timeout: float = 5) -> list[str]:
    """Return the errors with which the processes join; an empty string for none."""
    errors = {}

    def join(connection) -> None:
        try:
            errors[connection] = connection.join(timeout) or ""
        except (PeerError, ValueError) as error:
            errors[connection] = str(error)

    threads = [threading.Thread(target=join, args=[each]) for each in (hub, *members)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [errors[connection] for connection in (hub, *members)]


def test_all_join_and_finish(host):
    hub = Hub(peer("server 0"), host, {"server 0", "server 1", "trainer 0"})
    server, trainer = (Member(peer(name), host, 5) for name in ("server 1", "trainer 0"))
    assert outcomes(hub, [server, trainer]) == ["", "", ""]
    trainer.leave()
    hub.watch()
    server.watch()  # told that all trainers have finished


def test_a_process_that_exits_ends_the_others(host):
    hub = Hub(peer("server 0"), host, {"server 0", "trainer 0", "trainer 1"})
    first, second = (Member(peer(name), host, 5) for name in ("trainer 0", "trainer 1"))
    assert outcomes(hub, [first, second]) == ["", "", ""]
    second.connection.socket.shutdown(socket.SHUT_RDWR)
    for connection in (hub, first):
        with pytest.raises(PeerError, match=r"trainer 1 on 127.0.0.1 exited; all processes end"):
            connection.watch()


def test_different_facts_are_named_everywhere(host):
    hub = Hub(peer("server 0"), host, {"server 0", "trainer 0"})
    errors = outcomes(hub, [Member(peer("trainer 0", version="2"), host, 5)])
    for error in errors:
        assert "version is '1' in server 0 on 127.0.0.1, but '2' in trainer 0" in error


def test_a_missing_process_is_named_everywhere(host):
    hub = Hub(peer("server 0"), host, {"server 0", "server 1", "trainer 0"})
    errors = outcomes(hub, [Member(peer("server 1"), host, 5)], timeout=0.2)
    assert errors == ["trainer 0 did not join within 0.2 s (--join-timeout)"] * 2


def test_strangers_do_not_count(host):
    """A port scanner, and a trainer of another job."""
    hub = Hub(peer("server 0"), host, {"server 0", "trainer 0"})
    with socket.create_connection((host.address, host.port + 1)) as scanner:
        scanner.sendall(b"GET / HTTP/1.0\r\n\r\n")
    stranger, trainer = Member(peer("trainer 7"), host, 5), Member(peer("trainer 0"), host, 5)
    errors = outcomes(hub, [stranger, trainer])
    assert errors == ["", "server 0 on 127.0.0.1 does not expect trainer 7 on 127.0.0.1", ""]


def test_no_first_server(host):
    with pytest.raises(PeerError, match=r"could not reach server 0 .* within 0.1 s"):
        Member(peer("trainer 0"), host, 0.1)


def test_a_port_in_use(host):
    with listen(*host), pytest.raises(ValueError, match=f"port {host.port} of 127.0.0.1 cannot"):
        listen(*host)


def test_interface_of():
    assert interface_of("127.0.0.1") == "lo"
    with pytest.raises(ValueError, match=r"does not have the address 192.0.2.1"):
        interface_of("192.0.2.1")


RESERVE = """
import sys, time
from pathlib import Path
from metselect_dgl.train import shared_memory
shared_memory.reserve(Path(sys.argv[1]))
print("reserved", flush=True)
time.sleep(99)
"""


def test_one_job_per_machine(tmp_path, monkeypatch):
    """The lock ends with its process; then leftovers of DGL are removed, and nothing else."""
    monkeypatch.setattr(shared_memory, "_WAIT_SECONDS", 0.1)
    names = ["graph", "graph_node_meta", "graphgraph_0_csc_data", "node~_N~feat-kvdata-"]
    command = [sys.executable, "-c", RESERVE, tmp_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"reserved\n"
        for name in [*names, "graphics", "sem.mp-x"]:
            (tmp_path / name).touch()
        with pytest.raises(ValueError, match="another DistDGL job runs on this machine"):
            shared_memory.reserve(tmp_path)
        shared_memory.clean(tmp_path)
        assert len(os.listdir(tmp_path)) == 6
        other.send_signal(signal.SIGKILL)
    shared_memory.clean(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["graphics", "sem.mp-x"]
    descriptor = shared_memory.lock(tmp_path)
    assert descriptor is not None
    os.close(descriptor)


@pytest.fixture
def hosts_file(tmp_path):
    path = tmp_path / "hosts.txt"
    path.write_text("10.0.0.1 31000\n10.0.0.2\n")
    return path


def test_what_is_started_where(hosts_file, tmp_path):
    starts = plan(hosts_file, tmp_path, 2, ["--batch-size", "9"])
    assert [(start.name, start.host.address) for start in starts] == [
        ("server 0", "10.0.0.1"),
        ("server 1", "10.0.0.2"),
        ("trainer 0", "10.0.0.1"),
        ("trainer 1", "10.0.0.1"),
        ("trainer 2", "10.0.0.2"),
        ("trainer 3", "10.0.0.2"),
    ]
    for start in starts:
        assert "DGL_NUM_CLIENT=4 DGL_NUM_SERVER=1" in start.line
        assert start.line.endswith("--batch-size 9")
    assert "MASTER_ADDR=10.0.0.1 MASTER_PORT=31002 RANK=3" in starts[-1].line
    assert starts[0].command(None)[0] == "ssh" and starts[0].command(None)[-2] == "10.0.0.1"
    assert starts[0].command("on {host} run") == ["on", "10.0.0.1", "run", starts[0].line]


def test_print_starts_nothing(hosts_file, tmp_path, capsys):
    given = ["launch", "--hosts", hosts_file, "--partitions", tmp_path, "--print", "--"]
    assert cli.main([*map(str, given), "--lr", "0.1"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("# ") == 4 and "# trainer 1 on 10.0.0.2\n" in printed


def test_launch_ends_what_does_not_end_by_itself(monkeypatch, capsys):
    monkeypatch.setattr("metselect_dgl.train.launch._END_SECONDS", 0.2)
    host = Host("127.0.0.1", 0)
    starts = [Start("server 0", host, "exec sleep 99"), Start("trainer 0", host, "exit 3")]
    assert launch(starts) == 3
    assert "trainer 0 failed; the others end" in capsys.readouterr().err
    assert launch([Start("trainer 0", host, "exit 0")]) == 0
