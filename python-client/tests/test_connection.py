"""Connections: addresses, deadlines, retries, pickling, fork(), closing."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

import boxwood
import boxwood.aio
from boxwood._channel import DEFAULT_SOCKET, resolve
from boxwood._proto import boxwood_pb2_grpc

from fakeserver import FakeDaemon, Fault, fault

TLS = Path(__file__).parent / "tls"


@pytest.mark.parametrize(
    ("address", "target"),
    [
        ("/a/b.sock", "unix:/a/b.sock"),
        ("unix:/a/b.sock", "unix:/a/b.sock"),
        ("unix:///a/b.sock", "unix:/a/b.sock"),
        ("host:7000", "host:7000"),
        ("b.sock", "unix:" + os.path.abspath("b.sock")),
        ("./x:y.sock", "unix:" + os.path.abspath("x:y.sock")),
    ],
)
def test_addresses(address: str, target: str) -> None:
    assert resolve(address) == target


def test_default_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BOXWOOD_ADDRESS", raising=False)
    assert boxwood.connect().address == "unix:" + DEFAULT_SOCKET
    monkeypatch.setenv("BOXWOOD_ADDRESS", "/x.sock")
    assert boxwood.connect().address == "unix:/x.sock"
    assert "/x.sock" in repr(boxwood.connect())


def test_every_call_has_a_deadline_and_an_id(daemon: FakeDaemon, sandbox: boxwood.Sandbox) -> None:
    sandbox.run("true")
    with sandbox.turn() as t:
        t.exec("true")
    sandbox.fork().release()
    assert all(left > 0 for _, _, _, left in daemon.fake.calls)
    ids = [request_id for _, _, request_id, _ in daemon.fake.calls]
    assert len(set(ids)) == len(ids)
    assert all(ids)


def test_mutating_requests_carry_fresh_keys(daemon: FakeDaemon, sandbox: boxwood.Sandbox) -> None:
    sandbox.run("true")
    sandbox.run("true")
    keys = [
        request.idempotency_key
        for _, request, _, _ in daemon.fake.calls
        if hasattr(request, "idempotency_key")
    ]
    assert len(set(keys)) == len(keys) > 3
    assert all(keys)


def test_large_messages(sandbox: boxwood.Sandbox) -> None:
    turn = sandbox.run("head -c 9000000 /dev/zero", output_limit=9_000_000)
    assert len(turn.stdout) == 9_000_000


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_lost_answer_runs_nothing_twice(daemon: FakeDaemon, sandbox: boxwood.Sandbox, when: str) -> None:
    sandbox.run("true")
    daemon.fake.faults["RunTurn"].append((Fault("UNAVAILABLE", "socket closed"), when))
    seen: list[bytes] = []
    turn = sandbox.run("echo x >> log; cat log", on_stdout=seen.append)
    assert turn.stdout == b"x\n"
    assert b"".join(seen) == b"x\n"  # nor is output told twice
    assert len(daemon.fake.named("RunTurn")) == 3
    first, second = (request for _, request, _, _ in daemon.fake.named("RunTurn")[1:])
    assert first == second


def test_a_fork_whose_answer_is_lost_makes_no_children_twice(
    daemon: FakeDaemon, client: boxwood.Client, tree: boxwood.Tree
) -> None:
    daemon.fake.faults["Fork"].append((Fault("UNAVAILABLE", "socket closed"), "after"))
    with tree.root.fork(3) as children:
        assert len({c.id for c in children.ready}) == 3
        assert len(client.sandboxes(tree)) == 4


@pytest.mark.parametrize("method", ["Annotate", "CloseTree", "Rollback", "Upload", "WriteFile", "Prune"])
def test_unary_calls_are_repeated_with_their_key(
    daemon: FakeDaemon, client: boxwood.Client, image: boxwood.Image, method: str, tmp_path: Path
) -> None:
    tree = client.create_tree(image=image)
    node = tree.sandbox.run("true").node
    daemon.fake.faults[method].append((Fault("UNAVAILABLE", "socket closed"), "after"))
    (tmp_path / "file").write_bytes(b"data")
    {
        "Annotate": lambda: node.annotate(reward=1),
        "CloseTree": tree.close,
        "Rollback": lambda: tree.sandbox.rollback(tree.root),
        "Upload": lambda: tree.sandbox.upload(tmp_path / "file", "/work/"),
        "WriteFile": lambda: tree.sandbox.write_file("/work/log", "x", append=True),
        "Prune": lambda: node.prune(release_sandboxes=True),
    }[method]()
    one, two = daemon.fake.named(method)
    assert one[1].idempotency_key == two[1].idempotency_key
    if method == "WriteFile":
        assert tree.sandbox.read_file("/work/log") == b"x"
    tree.close()


def test_exec_is_never_sent_twice(daemon: FakeDaemon, sandbox: boxwood.Sandbox) -> None:
    daemon.fake.faults["Exec"].append((Fault("UNAVAILABLE", "socket closed"), "before"))
    with pytest.raises(boxwood.Unavailable), sandbox.turn() as t:
        t.exec("echo x >> log")
    assert len(daemon.fake.named("Exec")) == 1


def test_other_errors_are_not_retried(daemon: FakeDaemon, client: boxwood.Client) -> None:
    for failure in (fault("ABORTED", "sandbox_busy", "busy", retryable=True), Fault("INTERNAL", "broken")):
        daemon.fake.faults["ListImages"].append((failure, "before"))
        with pytest.raises(boxwood.BoxwoodError):
            client.images.list()
    assert len(daemon.fake.named("ListImages")) == 2


def test_a_daemon_that_says_when_to_come_again(daemon: FakeDaemon, client: boxwood.Client) -> None:
    failure = fault("UNAVAILABLE", "starting", "still starting", retryable=True, retry_after_ns=1_000_000)
    daemon.fake.faults["ListImages"].extend([(failure, "before"), (failure, "before")])
    assert client.images.list() == []


def test_a_restart_between_calls_is_survived(daemon: FakeDaemon, client: boxwood.Client) -> None:
    client.info()
    daemon.stop()
    threading.Timer(0.2, daemon.start).start()
    assert client.info().version == "fake"


def test_a_daemon_that_stays_away(
    daemon: FakeDaemon, client: boxwood.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("boxwood._channel.RETRY_FOR", 0.2)
    client.info()
    daemon.stop()
    with pytest.raises(boxwood.Unavailable):
        client.info()


def test_no_daemon_says_what_to_do(tmp_path: Path) -> None:
    with boxwood.connect(str(tmp_path / "none.sock")) as client:
        with pytest.raises(boxwood.ConnectionFailed, match=r"there is no Boxwood socket at .*boxwood serve"):
            client.info()
    with boxwood.connect("localhost:1") as client:
        with pytest.raises(boxwood.ConnectionFailed, match="no Boxwood daemon answers at localhost:1"):
            client.info()


def test_a_socket_that_nobody_listens_on(tmp_path: Path) -> None:
    import socket

    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as left_over:
        left_over.bind(path)
    with boxwood.connect(path) as client, pytest.raises(boxwood.ConnectionFailed, match="nobody listens"):
        client.info()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_a_socket_without_permission(daemon: FakeDaemon) -> None:
    os.chmod(daemon.socket, 0o600)
    os.chmod(Path(daemon.socket).parent, 0o755)
    program = (
        "import boxwood, os, sys\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "try: boxwood.connect(sys.argv[1]).info()\n"
        "except boxwood.ConnectionFailed as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, daemon.socket], capture_output=True, text=True, timeout=60
    )
    assert "no permission" in done.stdout, done.stderr
    assert "group" in done.stdout


def test_a_deadline_passes(daemon: FakeDaemon, client: boxwood.Client, sandbox: boxwood.Sandbox) -> None:
    # A daemon that never answers: the watch is one that waits for ever by design.
    with pytest.raises(boxwood.DeadlineExceeded):
        list(client._caller.stream("WatchTree", _watch(sandbox.tree_id), timeout=0.1))


def _watch(tree_id: str) -> object:
    from boxwood._proto import boxwood_pb2 as pb

    return pb.WatchTreeRequest(tree_id=tree_id, after_index=10_000)


def test_pickling(client: boxwood.Client, tree: boxwood.Tree, sandbox: boxwood.Sandbox) -> None:
    turn = sandbox.run("echo x > a; echo out")
    for thing in (client, tree, turn, turn.node, client.info(), client.images.list()[0]):
        copy = pickle.loads(pickle.dumps(thing))
        assert type(copy) is type(thing)
    node = pickle.loads(pickle.dumps(turn.node))
    assert node.refresh() == turn.node
    again = pickle.loads(pickle.dumps(turn))
    assert again.stdout == b"out\n"
    assert again.stdout.omitted == 0
    copied = pickle.loads(pickle.dumps(sandbox))
    assert copied.run("cat a").stdout == b"x\n"
    for handle in (node._client, again.node._client, copied._client):
        handle.close()


def test_spawned_processes(sandbox: boxwood.Sandbox) -> None:
    sandbox.run("echo x > a")
    code = (
        "import pickle, sys\n"
        "sandbox = pickle.load(sys.stdin.buffer)\n"
        "print(sandbox.run('cat a').stdout.text, end='')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(sandbox), capture_output=True, timeout=60
    )
    assert done.stdout == b"x\n", done.stderr


def work(sandbox: boxwood.Sandbox, queue: Any) -> None:
    with sandbox._client:
        queue.put(sandbox.run("cat a").stdout)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_processes_of_multiprocessing(sandbox: boxwood.Sandbox, method: str) -> None:
    """As a data loader's or an actor's worker gets a handle."""
    sandbox.run("echo x > a")
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=work, args=(sandbox, queue))
    process.start()
    assert queue.get(timeout=60) == b"x\n"
    process.join(60)
    assert process.exitcode == 0
    queue.close()
    queue.join_thread()


def test_fork_after_use(daemon: FakeDaemon) -> None:
    """A process that used a client forks; both sides go on. In a process of its own: its parent must not
    be a grpc server, which doesn't survive fork()."""
    program = """
import os, sys, boxwood
with boxwood.connect(sys.argv[1]) as client:
    assert client.info().version == "fake"
    children = []
    for _ in range(3):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                assert client.info().version == "fake"
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
    assert client.info().version == "fake"
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert client.info().version == "fake"
print(codes)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, daemon.socket], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "[0, 0, 0]\n", done.stderr


def test_use_after_close(daemon: FakeDaemon, image: boxwood.Image) -> None:
    client = boxwood.connect(daemon.socket)
    tree = client.create_tree(image=image)
    client.close()
    client.close()
    for call in (client.info, tree.close, lambda: tree.sandbox.run("true"), tree.show):
        with pytest.raises(boxwood.FailedPrecondition, match="closed"):
            call()
    tree.sandbox.released = True


def test_close_ends_a_running_watch(client: boxwood.Client, tree: boxwood.Tree, daemon: FakeDaemon) -> None:
    other = boxwood.connect(daemon.socket)
    watch = other.tree(tree.id).watch()
    next(watch)
    threading.Timer(0.05, other.close).start()
    with pytest.raises(boxwood.FailedPrecondition, match="closed"):
        next(watch)


def test_handles_that_nobody_closed_warn(daemon: FakeDaemon, image: boxwood.Image) -> None:
    client = boxwood.connect(daemon.socket)
    client.info()
    with pytest.warns(ResourceWarning, match="never closed"):
        del client
        gc.collect()
    client = boxwood.connect(daemon.socket)
    tree = client.create_tree(image=image)
    with pytest.warns(ResourceWarning, match="never released"):
        tree._sandbox = None
        gc.collect()
    client.close()


def test_handles_that_were_closed_do_not_warn(daemon: FakeDaemon, image: boxwood.Image) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with boxwood.connect(daemon.socket) as client, client.create_tree(image=image) as tree:
            children = tree.root.fork(2)
        del tree, children
        gc.collect()
        boxwood.connect(daemon.socket)  # never used: nothing to close
        gc.collect()


def test_a_daemon_that_is_slow_to_greet(client: boxwood.Client) -> None:
    """Somebody listens, so that a first connection that broke is tried again; nobody does: it isn't."""
    broken = [1]
    client._caller._connection().stub = Broken(client._caller._connection().stub, broken)
    assert client.info().version == "fake"
    assert broken == []


class Broken:
    """A stub whose first calls find a connection that breaks in its greeting."""

    def __init__(self, stub: Any, times: list[int]) -> None:
        self._stub, self._times = stub, times

    def __getattr__(self, name: str) -> Any:
        if self._times:
            self._times.pop()
            return refused
        return getattr(self._stub, name)


class Refused(grpc.RpcError, grpc.Call):
    """What grpc raises then."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "tcp handshaker shutdown"

    def trailing_metadata(self) -> None:
        return None

    initial_metadata = is_active = time_remaining = cancel = add_callback = trailing_metadata


def refused(*_: Any, **__: Any) -> None:
    raise Refused


@pytest.fixture
def over_tls(daemon: FakeDaemon) -> Iterator[tuple[str, list[str]]]:
    """An address at which the fake answers over TLS, and the tokens that it was shown."""
    shown: list[str] = []

    class Seen(grpc.ServerInterceptor):  # type: ignore[misc]
        def intercept_service(self, continuation: Any, details: Any) -> Any:
            shown.extend(value for key, value in details.invocation_metadata if key == "authorization")
            return continuation(details)

    server = grpc.server(ThreadPoolExecutor(4), interceptors=[Seen()])
    boxwood_pb2_grpc.add_BoxwoodServicer_to_server(daemon.fake, server)  # type: ignore[no-untyped-call]
    pair = (TLS / "daemon.key").read_bytes(), (TLS / "daemon.crt").read_bytes()
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    server.start()
    yield f"127.0.0.1:{port}", shown
    server.stop(0).wait(10)


def test_a_token_goes_over_tls(over_tls: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    address, shown = over_tls
    monkeypatch.setenv("BOXWOOD_CA", str(TLS / "daemon.crt"))
    monkeypatch.setenv("BOXWOOD_TOKEN", "a token")
    with boxwood.connect(address) as client:
        client.info()
    assert shown == ["Bearer a token"]

    async def asynchronously() -> None:
        async with boxwood.aio.connect(address) as client:
            await client.info()

    asyncio.run(asynchronously())
    assert shown == ["Bearer a token"] * 2


def test_a_token_goes_to_no_stranger(
    over_tls: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, shown = over_tls
    monkeypatch.setenv("BOXWOOD_TOKEN", "a token")  # and nobody knows who signed that certificate
    with boxwood.connect(address, timeout=2.0) as client, pytest.raises(boxwood.BoxwoodError):
        client.info()
    assert shown == []


def test_a_certificate_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOXWOOD_CA", "/nowhere/ca.pem")
    with boxwood.connect("127.0.0.1:1") as client, pytest.raises(boxwood.InvalidArgument, match="nowhere"):
        client.info()
