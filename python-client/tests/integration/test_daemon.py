"""The package against a real daemon: each call once, and what it promises."""

from __future__ import annotations

import datetime
import io
import os
import pickle
import runpy
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

import boxwood
from boxwood import CaptureStatus, TurnStatus, Verdict

from .conftest import REPOSITORY

pytestmark = pytest.mark.integration


def test_info(client: boxwood.Client) -> None:
    info = client.info()
    assert info.version
    assert info.kernel == os.uname().release
    assert info.pool_bytes_total > info.pool_bytes_used > 0


def test_images(client: boxwood.Client, image: str, tmp_path: Path) -> None:
    assert any(image in i.names or image == i.digest for i in client.images.list())
    (tmp_path / "root" / "etc").mkdir(parents=True)
    (tmp_path / "root" / "etc" / "mine").write_text("x")
    steps: list[boxwood.ImportProgress] = []
    made = client.images.import_(tmp_path / "root", "boxwood-test/gone:latest", on_progress=steps.append)
    assert steps
    client.images.remove(made)
    assert made.digest not in [i.digest for i in client.images.list()]
    with pytest.raises(boxwood.NotFound):
        client.images.remove("boxwood-test/gone:latest")
    with pytest.raises(boxwood.BoxwoodError) as caught:
        client.images.import_(tmp_path / "none")
    assert isinstance(caught.value, boxwood.ClientError)


def test_an_image_in_use_stays(client: boxwood.Client, image: str, tree: boxwood.Tree) -> None:
    with pytest.raises(boxwood.FailedPrecondition):
        client.images.remove(image)


def test_a_turn(sandbox: boxwood.Sandbox, tree: boxwood.Tree) -> None:
    turn = sandbox.run(
        "echo out; echo err >&2; echo x > /tmp/made; exit 3",
        labels={"a": "b"},
        payload=b"\0p",
        policy_version="v1",
    )
    assert (turn.stdout, turn.stderr, turn.exit_code) == (b"out\n", b"err\n", 3)
    assert turn.status is TurnStatus.COMPLETED
    assert turn.verdict is Verdict.FILES
    assert any(effect.path == "/tmp/made" for effect in turn.effects)
    assert turn.node.parent_id == tree.root_id
    assert turn.node.labels == {"a": "b"}
    assert turn.node.policy_version == "v1"
    assert turn.node.payload() == b"\0p"
    assert turn.node.refresh().observation == turn.observation
    assert turn.timings.total > 0
    assert sandbox.head == turn.node


def test_a_turn_without_effect_saves_nothing(sandbox: boxwood.Sandbox) -> None:
    first = sandbox.run("echo x > /tmp/made", ack="captured")
    assert first.node.captured
    second = sandbox.run("cat /tmp/made; ls / > /dev/null")
    assert second.verdict is Verdict.NONE, second.node.reasons
    assert second.node.wait_captured().checkpoint_id == first.node.checkpoint_id


def test_arguments(sandbox: boxwood.Sandbox) -> None:
    assert sandbox.run(["printf", "%s|", "a b", b"\xff"]).stdout == b"a b|\xff|"
    turn = sandbox.run("cat; echo $X; pwd; id -u", cwd="/tmp", env={"X": "y"}, stdin="in\n", user="65534")
    assert turn.stdout.text.splitlines() == ["in", "y", "/tmp", "65534"]
    assert sandbox.run(["/no/such/program"]).exit_code != 0


def test_no_device_of_the_host_is_there(sandbox: boxwood.Sandbox) -> None:
    """GPUs, for one: /dev holds what any container has, and nothing else."""
    usual = "null zero full random urandom tty ptmx pts shm mqueue fd stdin stdout stderr console core"
    found = set(sandbox.run("ls -A /dev", check=True).stdout.text.split())
    assert "null" in found
    assert found <= set(usual.split())


def test_signals_and_deadlines(sandbox: boxwood.Sandbox) -> None:
    killed = sandbox.run(["bash", "-c", "kill -9 $$"])
    assert (killed.exit_code, killed.signal) == (-1, 9)
    late = sandbox.run("sleep 600 & sleep 600", timeout=0.3)
    assert late.timed_out
    assert sandbox.run("true", check=True).ok
    with pytest.raises(boxwood.CommandFailed):
        sandbox.run("false", check=True)


def test_output_streams(sandbox: boxwood.Sandbox) -> None:
    pieces: list[bytes] = []
    first = threading.Event()

    def on_stdout(piece: bytes) -> None:
        pieces.append(piece)
        if not first.is_set():
            first.set()
            os.write(write, b"go")

    # What ends the command is a cancel, which is sent only after its first line had come.
    read, write = os.pipe()
    turns: list[boxwood.Turn] = []
    thread = threading.Thread(
        target=lambda: turns.append(sandbox.run("echo first; sleep 600", on_stdout=on_stdout))
    )
    thread.start()
    assert os.read(read, 2) == b"go"
    assert sandbox.cancel()
    thread.join(60)
    os.close(read)
    os.close(write)
    assert b"".join(pieces) == b"first\n" == turns[0].stdout
    assert turns[0].status is TurnStatus.CANCELLED
    assert not sandbox.cancel()


def test_output_is_bounded_and_need_not_be_text(sandbox: boxwood.Sandbox) -> None:
    turn = sandbox.run("head -c 5000000 /dev/zero | tr '\\0' x; printf '\\xff\\0'", output_limit=1000)
    assert len(turn.stdout) == 1000
    assert turn.stdout.omitted == 5_000_002 - 1000
    assert turn.stdout.endswith(b"x\xff\0")
    assert "bytes left out" in turn.text
    seen = bytearray()
    sandbox.run("head -c 20000000 /dev/zero", on_stdout=seen.extend)
    assert len(seen) == 20_000_000


def test_several_commands_as_one_turn(sandbox: boxwood.Sandbox, tree: boxwood.Tree, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("up")
    with sandbox.turn(labels={"kind": "edit"}) as t:
        t.write_file("/tmp/a", "alpha")
        assert t.read_file("/tmp/a") == b"alpha"
        t.upload(tmp_path / "file", "/tmp/b")
        assert t.exec("cat /tmp/a /tmp/b").stdout == b"alphaup"
        t.download("/tmp/b", tmp_path / "down")
        with pytest.raises(boxwood.Busy):
            sandbox.run("true")
    assert (tmp_path / "down").read_text() == "up"
    assert t.node.depth == 1
    assert t.node.labels["kind"] == "edit"
    assert t.node.verdict is Verdict.FILES
    assert len(tree.root.children()) == 1


def test_an_exception_cancels_a_turn(sandbox: boxwood.Sandbox, tree: boxwood.Tree) -> None:
    with pytest.raises(KeyError), sandbox.turn() as t:
        t.exec("sleep 600 &")
        raise KeyError("mine")
    assert sandbox.run("true", busy_wait=30).ok
    assert TurnStatus.CANCELLED in [n.turn_status for n in tree.nodes()]


def test_a_callback_that_raises_cancels_a_turn(sandbox: boxwood.Sandbox) -> None:
    def stop(_: bytes) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError):
        sandbox.run("echo x; sleep 600", on_stdout=stop)
    assert sandbox.run("true", busy_wait=30).ok


def test_files(sandbox: boxwood.Sandbox) -> None:
    turn = sandbox.write_file("/tmp/a", "text", mode=0o600)
    assert turn.verdict is Verdict.FILES
    sandbox.write_file("/tmp/a", b"\xff", mode=0o600, append=True)
    assert sandbox.read_file("/tmp/a") == b"text\xff"
    assert sandbox.run("stat -c %a /tmp/a").stdout == b"600\n"
    big = os.urandom(9_000_000)
    sandbox.write_file("/tmp/big", big)
    assert sandbox.read_file("/tmp/big") == big
    with pytest.raises(boxwood.NotFound):
        sandbox.read_file("/no/such")


def test_folders_there_and_back(sandbox: boxwood.Sandbox, tmp_path: Path) -> None:
    here = tmp_path / "here"
    (here / "sub" / "empty").mkdir(parents=True)
    (here / "sub" / "data").write_bytes(os.urandom(3_000_000))
    (here / "tool").write_text("#!/bin/bash\necho ran\n")
    (here / "tool").chmod(0o755)
    (here / "link").symlink_to("sub/data")
    sandbox.upload(here, "/tmp/new")
    assert sandbox.run("/tmp/new/tool").stdout == b"ran\n"
    sandbox.download("/tmp/new", tmp_path / "back")
    assert (tmp_path / "back/sub/data").read_bytes() == (here / "sub/data").read_bytes()
    assert os.readlink(tmp_path / "back/link") == "sub/data"
    assert {p.name for p in (tmp_path / "back").iterdir()} == {"sub", "tool", "link"}
    assert (tmp_path / "back/sub/empty").is_dir()
    sandbox.download("/tmp/new/tool", tmp_path / "tool")
    assert (tmp_path / "tool").read_text().startswith("#!/bin/bash")
    # A folder that holds one file of its own name is a folder still.
    sandbox.run("mkdir /tmp/same; echo x > /tmp/same/same", check=True)
    sandbox.download("/tmp/same", tmp_path / "same")
    assert (tmp_path / "same" / "same").read_text() == "x\n"


def test_a_hostile_folder_is_not_unpacked(sandbox: boxwood.Sandbox, tmp_path: Path) -> None:
    sandbox.run("mkdir /tmp/h; ln -s /etc/passwd /tmp/h/link; echo x > /tmp/h/good", check=True)
    with pytest.raises(boxwood.UnsafeEntry):
        sandbox.download("/tmp/h", tmp_path / "h")
    assert not (tmp_path / "h").exists()
    assert len(sandbox.download("/tmp/h", tmp_path / "h", unsafe="skip")) == 1
    assert [p.name for p in (tmp_path / "h").iterdir()] == ["good"]


def test_setup_is_run_once(client: boxwood.Client, image: str) -> None:
    setup = [f"echo {os.getpid()} > /tmp/one", boxwood.File("/tmp/two", b"two", 0o600)]
    with client.create_tree(image=image, setup=setup, env={"A": "b"}, cwd="/tmp") as tree:
        text = tree.sandbox.run("cat one two; echo; echo $A; pwd").stdout.text
        assert text.splitlines() == [str(os.getpid()), "two", "b", "/tmp"]
        assert not tree.setup_cached
        assert tree.root.is_root
    with client.create_tree(image=image, setup=setup, env={"A": "b"}, cwd="/tmp", with_sandbox=False) as tree:
        assert tree.setup_cached
    with pytest.raises(boxwood.BoxwoodError, match="nope"):
        client.create_tree(image=image, setup=["echo nope >&2; false"])
    with pytest.raises(boxwood.NotFound):
        client.create_tree(image="boxwood-test/none:latest")


def test_a_tree_that_is_not_captured(client: boxwood.Client, image: str) -> None:
    with client.create_tree(image=image, capture="uncaptured") as tree:
        node = tree.sandbox.run("echo x > /tmp/made").node
        assert node.capture is CaptureStatus.WITHHELD
        with pytest.raises(boxwood.FailedPrecondition, match="uncaptured"):
            node.fork(1)


def test_a_tree_from_a_node(client: boxwood.Client, sandbox: boxwood.Sandbox) -> None:
    node = sandbox.run("echo x > /tmp/made").node
    node.wait_captured()
    with client.create_tree(node=node) as other:
        assert other.sandbox.run("cat /tmp/made").stdout == b"x\n"


def test_finding_things_again(client: boxwood.Client, tree: boxwood.Tree, sandbox: boxwood.Sandbox) -> None:
    assert client.tree(tree.id).root == tree.root
    assert client.sandbox(sandbox.id).head_id == sandbox.head_id
    assert tree.id in [t.id for t in client.trees()]
    assert [s.id for s in client.sandboxes(tree)] == [sandbox.id]
    for lookup in (client.tree, client.sandbox, client.node):
        with pytest.raises(boxwood.ClientError):
            lookup("nothing")


def test_fork_of_a_past_node(sandbox: boxwood.Sandbox) -> None:
    node = sandbox.run("echo base > /tmp/a").node
    sandbox.run("rm /tmp/a; echo later > /tmp/b")
    with node.fork(8, labels={"g": "1"}, min_ready=8) as children:
        assert children.failed == []
        for number, child in enumerate(children.ready):
            assert child.head_id == node.id
            child.run(f"echo {number} >> /tmp/a; touch /tmp/mine{number}", check=True)
        for number, child in enumerate(children.ready):
            seen = child.run("cat /tmp/a; ls /tmp").stdout.text.split()
            assert seen == ["base", str(number), "a", f"mine{number}"]
        assert len({child.hostname for child in children.ready}) == 8
        assert len({child.generation for child in children.ready}) == 8
    assert len(node.children()) == 9
    with pytest.raises(boxwood.ClientError):
        children.ready[0].run("true")


def test_a_withheld_node_is_replayed(client: boxwood.Client, sandbox: boxwood.Sandbox) -> None:
    before = sandbox.run("echo before > /tmp/a").node
    # Nothing can be mounted at /run/box any more, so that it can't be restored.
    sandbox.run("mv /run /gone; echo moved")
    [withheld] = client.wait_captured([sandbox.head_id])
    with pytest.raises(boxwood.NodeWithheld) as caught:
        withheld.fork()
    assert (caught.value.nearest_node_id, caught.value.nearest_turns) == (before.id, 1)
    with withheld.fork(replay=True, deadline=60) as children:
        [child] = children.ready
        [turn] = child.replayed
        assert (turn.node_id, turn.same_output, turn.same_exit) == (withheld.id, True, True)
        assert child.head_id == turn.replay_id != withheld.id
        assert child.head.replay_of == withheld.id
        assert child.run("ls -d /gone; cat /tmp/a", check=True).stdout == b"/gone\nbefore\n"


def test_secrets_reach_processes_and_no_node(sandbox: boxwood.Sandbox) -> None:
    secret = {"TOKEN": "a-token-of-31337"}
    turn = sandbox.run('echo "${#TOKEN} $TOKEN"', secret_env=secret, check=True)
    assert turn.stdout == b"16 [secret TOKEN]\n"
    main = sandbox.session(secret_env=secret)
    assert main.run('mine="x$TOKEN"; echo ${#TOKEN}', check=True).stdout.split() == [b"16"]
    with sandbox.fork() as children:
        [child] = children.ready
        assert child.session().run("echo ${#mine} $mine", check=True).stdout.split(b" ", 1)[0] == b"17"
    with pytest.raises(boxwood.InvalidArgument) as refused:
        sandbox.run(["echo", "a-token-of-31337"])
    assert refused.value.reason == "secret_in_argv"


def test_scratch_forks_write_no_nodes(sandbox: boxwood.Sandbox, tree: boxwood.Tree) -> None:
    sandbox.run("echo x > /tmp/a")
    before = len(list(tree.nodes()))
    with sandbox.fork(scratch=True) as children:
        turn = children.ready[0].run("cat /tmp/a; echo y > /tmp/b", check=True)
        assert turn.stdout == b"x\n"
        assert turn.node.id == ""
    assert len(list(tree.nodes())) == before


def test_fork_iter_and_many(client: boxwood.Client, sandbox: boxwood.Sandbox) -> None:
    one = sandbox.run("echo 1 > /tmp/a").node
    two = sandbox.run("echo 2 > /tmp/a").node
    for child in one.fork_iter(3, lease=30, seed=7):
        assert isinstance(child, boxwood.Sandbox)
        assert child.run("cat /tmp/a; echo $BOXWOOD_SEED").stdout.text.split()[0] == "1"
        child.release()
    with client.fork({one: 2, two: 2, sandbox: 1}) as forks:
        assert [c.run("cat /tmp/a").stdout for c in forks.ready] == [b"1\n"] * 2 + [b"2\n"] * 3


def test_rollback(sandbox: boxwood.Sandbox, tree: boxwood.Tree) -> None:
    generation = sandbox.generation
    node = sandbox.run("echo x > /tmp/a").node
    sandbox.run("rm -rf /etc /tmp/a")
    sandbox.rollback(node)
    assert sandbox.generation != generation
    assert sandbox.run("cat /tmp/a; ls /etc").stdout.startswith(b"x\n")
    sandbox.rollback(tree.root)
    assert not sandbox.run("cat /tmp/a").ok


def test_renew_and_release(client: boxwood.Client, tree: boxwood.Tree) -> None:
    child = tree.root.fork().ready[0]
    before = child.lease_until
    child.renew(7200)
    assert child.lease_until > before
    child.release()
    child.release()
    assert child.id not in [s.id for s in client.sandboxes(tree)]


def test_annotate_and_backup(client: boxwood.Client, tree: boxwood.Tree, sandbox: boxwood.Sandbox) -> None:
    middle, leaf = sandbox.run("true").node, sandbox.run("true").node
    leaf.annotate(reward=1.0, rewards={"style": 0.5}, labels={"a": "b"}, payload=b"p" * 1000)
    leaf.annotate(labels={"a": ""})
    assert leaf.refresh().rewards == {"reward": 1.0, "style": 0.5}
    assert leaf.refresh().labels == {}
    assert leaf.payload() == b"p" * 1000
    client.annotate(
        {middle: boxwood.annotation(value=0.0, visits=0), leaf.id: boxwood.annotation(reward=2.0)}
    )
    assert client.backup({leaf: 1.0}, rule="mean") == 3
    client.backup({leaf: 0.0}, rule="mean")
    assert (middle.refresh().value, tree.root.refresh().visits) == (0.5, 2)
    with pytest.raises(boxwood.ClientError):
        client.annotate({leaf: boxwood.annotation(payload=bytes((1 << 20) + 1))})


def test_walking_and_showing(tree: boxwood.Tree, sandbox: boxwood.Sandbox) -> None:
    first = sandbox.run("echo 1 > /tmp/a").node
    second = sandbox.run("cat /tmp/a").node
    sandbox.rollback(first)
    third = sandbox.run("echo 3 > /tmp/a").node
    assert second.path() == [tree.root, first, second]
    assert first.children() == [second, third]
    assert set(tree.nodes(leaves_only=True)) == {second, third}
    assert list(tree.nodes(verdict=["none"], under=first)) == [second]
    assert len(list(tree.nodes(limit=2))) == 2
    assert not next(iter(tree.nodes(brief=True, under=second))).observation.stdout
    lines = tree.show().splitlines()
    assert len(lines) == 5
    assert f"shares {first.id}" in tree.show()


def test_wait_captured(client: boxwood.Client, sandbox: boxwood.Sandbox) -> None:
    a, b = sandbox.run("echo a > /tmp/a").node, sandbox.run("echo b > /tmp/b").node
    assert [n.id for n in client.wait_captured([b, a], timeout=60)] == [b.id, a.id]
    assert b.wait_captured(60).captured


def test_survivors_are_withheld_and_say_why(sandbox: boxwood.Sandbox) -> None:
    node = sandbox.run("sleep 600 > /dev/null 2>&1 &").node.wait_captured(60)
    assert node.verdict in (Verdict.PROCESS, Verdict.BOTH)
    if node.capture is CaptureStatus.WITHHELD:
        assert node.withheld_reason
        with pytest.raises(boxwood.NodeWithheld):
            node.fork(min_ready=1)


def test_prune_and_pin(tree: boxwood.Tree, sandbox: boxwood.Sandbox) -> None:
    first = sandbox.run("echo 1 > /tmp/a").node
    second = sandbox.run("echo 2 > /tmp/a").node
    with pytest.raises(boxwood.FailedPrecondition):
        first.prune()
    sandbox.rollback(tree.root)
    second.pin()
    with pytest.raises(boxwood.FailedPrecondition):
        first.prune()
    second.unpin()
    assert first.prune(keep_node=True).nodes == 1
    assert first.prune().nodes == 1
    with pytest.raises(boxwood.NotFound):
        first.refresh()


def test_a_new_attempt_takes_over_a_run(client: boxwood.Client, image: str, tmp_path: Path) -> None:
    first = client.open_run("test-run")
    tree = first.client.create_tree(image=image)
    old = tree.sandbox
    old.run("echo kept > /tmp/a", ack="captured")
    with client.open_run("test-run", adopt=True) as second:
        assert second.attempt == first.attempt + 1
        with pytest.raises(boxwood.FailedPrecondition) as late:
            old.run("true")
        assert late.value.reason == "attempt_superseded"
        old.released = True
        (adopted,) = second.adopted
        assert adopted.id == old.id
        node = adopted.run("cat /tmp/a; echo more >> /tmp/a", ack="captured").node

        # The tree as an archive, made once more from it; then only its states go.
        path = tmp_path / "tree.archive"
        tree = second.client.tree(tree.id)
        assert tree.export(path) == path.stat().st_size
        with pytest.raises(boxwood.AlreadyExists):
            second.client.import_tree(path)
        with second.client.import_tree(path, new_ids=True) as twin:
            (leaf,) = twin.nodes(leaves_only=True)
            with leaf.fork(1, min_ready=1) as children:
                assert children.ready[0].run("cat /tmp/a").text == "kept\nmore\n"
        adopted.rollback(tree.root)
        assert node.prune(states_only=True).nodes == 1
        node = node.refresh()
        assert node.withheld_reason.startswith("evicted")
        second.close(close_trees=True)
    assert client.tree(tree.id).closed
    with pytest.raises(boxwood.FailedPrecondition):
        first.close()


def test_watch(tree: boxwood.Tree, sandbox: boxwood.Sandbox) -> None:
    node = sandbox.run("echo x > /tmp/a", ack="captured").node
    last = 0
    for change in tree.watch(timeout=60):
        assert change.index >= last
        last = change.index
        if change.node == node and change.node.captured:
            break
    else:
        pytest.fail("the watch ended before the node was seen as captured")
    node.annotate(reward=1.0)
    for change in tree.watch(after=last, timeout=60):
        assert change.index > last
        if change.node is not None and change.node.rewards:
            break
    else:
        pytest.fail("the watch did not go on from its index")


def test_statistics(client: boxwood.Client, tree: boxwood.Tree, sandbox: boxwood.Sandbox) -> None:
    pytest.importorskip("pyarrow")
    sandbox.run("echo x > /tmp/a", ack="captured")
    sandbox.fork(2).release()
    names = [t.name for t in client.tables()]
    assert {"turns", "nodes", "forks", "captures"} <= set(names)
    for name in names:
        assert client.stats(name).num_columns > 0
    assert client.stats("turns", tree=tree).num_rows == 1
    now = datetime.datetime.now(datetime.timezone.utc)
    assert client.stats("turns", tree=tree, since=now).num_rows == 0
    assert client.stats("turns", tree=tree, until=now, verdicts=["files"]).num_rows == 1
    assert client.stats("turns", tree=tree, verdicts=["none", "process"]).num_rows == 0
    with pytest.raises(boxwood.InvalidArgument, match="have no verdict"):
        client.stats("forks", verdicts=["none"])
    with client.stats_reader("nodes", tree=tree) as reader:
        assert sum(batch.num_rows for batch in reader) == 2
    data = b"".join(client.stats_chunks("turns", tree=tree))
    polars = pytest.importorskip("polars")
    assert polars.read_ipc_stream(io.BytesIO(data)).height == 1
    duckdb = pytest.importorskip("duckdb")
    turns = client.stats("turns", tree=tree)
    assert duckdb.sql("select count(*) from turns").fetchall() == [(1,)]
    assert turns.num_rows == 1


def test_a_repeated_key_runs_nothing_twice(sandbox: boxwood.Sandbox, tree: boxwood.Tree) -> None:
    one = sandbox.run("echo x >> /tmp/log", idempotency_key="k1-" + sandbox.id)
    two = sandbox.run("echo x >> /tmp/log", idempotency_key="k1-" + sandbox.id)
    assert one.node == two.node
    assert sandbox.read_file("/tmp/log") == b"x\n"
    with pytest.raises(boxwood.ClientError):
        sandbox.run("echo other", idempotency_key="k1-" + sandbox.id)


def test_errors_carry_their_request(client: boxwood.Client) -> None:
    with pytest.raises(boxwood.BoxwoodError) as caught:
        client.create_tree(image="boxwood-test/none:latest")
    assert len(caught.value.request_id) == 32
    assert caught.value.reason
    assert isinstance(caught.value, boxwood.ClientError)


def test_closing_a_tree(client: boxwood.Client, image: str) -> None:
    tree = client.create_tree(image=image)
    sandbox = tree.sandbox
    node = sandbox.run("echo x").node
    tree.close()
    tree.close()
    assert node.refresh().observation.stdout == b"x\n"
    with pytest.raises(boxwood.ClientError):
        sandbox.run("true")
    with pytest.raises(boxwood.ClientError):
        tree.root.fork(min_ready=1)
    assert client.tree(tree.id).closed


def test_other_processes(sandbox: boxwood.Sandbox) -> None:
    sandbox.run("echo x > /tmp/a")
    program = "import pickle, sys; print(pickle.load(sys.stdin.buffer).run('cat /tmp/a').stdout)"
    done = subprocess.run(
        [sys.executable, "-c", program], input=pickle.dumps(sandbox), capture_output=True, timeout=60
    )
    assert done.stdout == b"b'x\\n'\n", done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_an_unprivileged_user_needs_only_the_socket(socket_path: str, image: str) -> None:
    """Nobody, in an otherwise empty folder, with no group but the socket's and no capability."""
    group = os.stat(socket_path).st_gid
    folder = Path(tempfile.mkdtemp(prefix="bw-nobody-"))
    try:
        folder.chmod(0o755)
        shutil.copytree(Path(boxwood.__file__).parent, folder / "boxwood")
        # The socket alone is "mounted": a path that this user can reach.
        link = folder / "boxwood.sock"
        link.touch()
        subprocess.run(["mount", "--bind", socket_path, str(link)], check=True)
        try:
            program = (
                "import os, sys, boxwood\n"
                "os.setgroups([]); os.setgid(int(sys.argv[3])); os.setuid(65534)\n"
                "with boxwood.connect(sys.argv[1]) as client, client.create_tree(image=sys.argv[2]) as tree:\n"
                "    node = tree.sandbox.run('echo x > /tmp/a', check=True).node\n"
                "    with node.fork(2, min_ready=2) as children:\n"
                "        print([child.run('cat /tmp/a').stdout.text.strip() for child in children.ready])\n"
            )
            done = subprocess.run(
                [sys.executable, "-c", program, str(link), image, str(group)],
                cwd="/",
                capture_output=True,
                text=True,
                timeout=120,
            )
            assert done.stdout == "['x', 'x']\n", done.stderr
        finally:
            subprocess.run(["umount", str(link)], check=True)
    finally:
        shutil.rmtree(folder)


def test_quickstart(
    socket_path: str, image: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOXWOOD_ADDRESS", socket_path)
    monkeypatch.setenv("BOXWOOD_IMAGE", image)
    runpy.run_path(str(REPOSITORY / "examples" / "quickstart.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("files")
    assert sum("reward=" in line for line in lines) == 8


def test_search_fix(client: boxwood.Client, base_image: str) -> None:
    search = runpy.run_path(str(REPOSITORY / "examples" / "search_fix" / "search.py"))
    lines: list[str] = []
    search["main"](client, base_image, lines.append)
    assert lines[-1].startswith("solved by")


def test_a_session_lives_on(socket_path: str, image: str) -> None:
    """What is set in a shell is there in the next turn, in forks and after a rollback."""
    with (
        boxwood.connect(socket_path, timeout=60) as client,
        client.create_tree(image=image, lease=600) as tree,
    ):
        shell = tree.sandbox.session("main")
        turn = shell.run('cd /tmp; x=5\nf() {\n  echo "f $x"\n}', ack="captured", check=True)
        assert turn.node.captured
        assert turn.node.process_kind is boxwood.ProcessKind.SHELLS
        assert any(
            e.kind is boxwood.EffectKind.PROCESS_CHANGED and "function f" in e.detail for e in turn.effects
        )
        assert shell.run("x=6; f; pwd").stdout == b"f 6\n/tmp\n"
        with turn.node.fork(3, min_ready=3) as children:
            for child in children.ready:
                other = child.session("main")
                assert other.pid == shell.pid
                assert other.run("f; pwd").stdout == b"f 5\n/tmp\n"
        tree.sandbox.rollback(turn.node)
        assert tree.sandbox.session().run("f").stdout == b"f 5\n"
        late = shell.run("sleep 100; echo no", timeout=0.3)
        assert late.timed_out
        assert not late.session_ended
        assert late.stdout == b""
        assert not shell.interrupt()
        typed = tree.sandbox.session("term", tty=True).run('read -r a; echo "got $a"', keys="hello\n")
        assert typed.stdout.endswith(b"got hello\r\n")
        assert [s.name for s in tree.sandbox.sessions()] == ["main", "term"]
        shell.close()
        with pytest.raises(boxwood.NotFound):
            shell.run("true")
        assert tree.sandbox.session("term").run("exit 3").session_ended
