"""Trees, nodes and forks."""

from __future__ import annotations

import copy
import dataclasses
import threading
from pathlib import Path

import pytest

import boxwood
from boxwood import CaptureStatus, Verdict
from boxwood._proto import boxwood_pb2 as pb

from fakeserver import FakeDaemon, fault


def test_images(client: boxwood.Client, image: boxwood.Image, tmp_path: object) -> None:
    steps: list[boxwood.ImportProgress] = []
    again = client.images.import_(f"{tmp_path}/root", "other:latest", on_progress=steps.append)
    assert [s.step for s in steps] == ["reading", "done"]
    assert "other:latest" in repr(again)
    assert image.digest in [i.digest for i in client.images.list()]
    client.create_tree(image="other:latest", with_sandbox=False)
    with pytest.raises(boxwood.FailedPrecondition) as caught:
        client.images.remove(again)
    assert caught.value.reason == "image_in_use"
    with pytest.raises(boxwood.InvalidArgument):
        client.images.import_("/no/such/folder")


def test_info(client: boxwood.Client) -> None:
    info = client.info()
    assert info.version == "fake"
    assert [(c.name, c.available) for c in info.capabilities] == [("btrfs", True), ("criu", None)]


def test_create_tree_with_setup(client: boxwood.Client, image: boxwood.Image) -> None:
    setup = ["echo one > work/one", ("/work/two", b"two"), boxwood.File("/work/three", b"3", 0o755)]
    with client.create_tree(image=image, setup=setup, cwd="/work", env={"A": "b"}) as tree:
        assert tree.sandbox.run("cat one two; ./three 2>&1; echo $A").stdout.text.startswith("one\ntwo")
        assert not tree.setup_cached
    with client.create_tree(image=image, setup=setup) as tree:
        assert tree.setup_cached
    with pytest.raises(boxwood.FailedPrecondition, match="nope"):
        client.create_tree(image=image, setup=["echo nope >&2; false"])
    with pytest.raises(boxwood.InvalidArgument, match="exactly one"):
        client.create_tree()
    with pytest.raises(boxwood.NotFound):
        client.create_tree(image="missing:latest")


def test_a_tree_from_a_node(client: boxwood.Client, sandbox: boxwood.Sandbox) -> None:
    node = sandbox.run("echo x > made").node
    with client.create_tree(node=node) as other:
        assert other.sandbox.run("cat made").stdout == b"x\n"
        assert other.root.is_root


def test_finding_things_again(client: boxwood.Client, tree: boxwood.Tree, sandbox: boxwood.Sandbox) -> None:
    assert client.tree(tree.id).root == tree.root
    assert client.sandbox(sandbox.id).head_id == sandbox.head_id
    assert client.node(tree.root_id).children() == []
    assert [t.id for t in client.trees()] == [tree.id]
    assert client.trees({"no": "such"}) == []
    for lookup in (client.tree, client.sandbox, client.node):
        with pytest.raises(boxwood.NotFound):
            lookup("nothing")
    with pytest.raises(boxwood.InvalidArgument, match="fork one"):
        _ = client.tree(tree.id).sandbox


def test_walking_a_tree(tree: boxwood.Tree, sandbox: boxwood.Sandbox) -> None:
    first = sandbox.run("echo 1 > a").node
    second = sandbox.run("cat a").node
    sandbox.rollback(first)
    third = sandbox.run("echo 3 > a").node
    assert second.path() == [tree.root, first, second]
    assert first.children() == [second, third]
    assert third.parent() == first
    assert tree.root.parent() is None
    assert set(tree.nodes(leaves_only=True)) == {second, third}
    assert list(tree.nodes(verdict=[Verdict.NONE], under=first)) == [second]
    assert list(tree.nodes(verdict=["files"], capture=["captured"])) == [first, third]
    assert list(tree.nodes(depth=0)) == [tree.root]
    assert list(tree.nodes(depth=2, capture=["captured"])) == [second, third]
    assert len(list(tree.nodes(limit=2))) == 2
    assert next(iter(tree.nodes(brief=True, under=second))).observation.stdout == b""
    assert first.captured


def test_show(tree: boxwood.Tree, sandbox: boxwood.Sandbox) -> None:
    first = sandbox.run("echo 1 > a").node
    sandbox.run("cat a")
    sandbox.rollback(tree.root)
    last = sandbox.run("echo 2 > b").node
    last.annotate(reward=0.5, value=1, visits=2)
    lines = tree.show().splitlines()
    assert lines[0] == f"tree {tree.id}"
    assert lines[2].startswith(f"   ├─ {first.id}  echo 1 > a  files")
    assert lines[3].startswith("   │  └─ ")
    assert lines[3].endswith(f"shares {first.id}")
    assert lines[4].startswith("   └─ ")
    assert lines[4].endswith("reward=0.5  value=1 visits=2")


def test_show_of_a_deep_tree(daemon: FakeDaemon, tree: boxwood.Tree) -> None:
    node = daemon.fake.get(tree.root_id)
    for _ in range(1500):
        node = daemon.fake.new_node(tree.id, node, daemon.fake.folder, verdict=pb.VERDICT_NONE)
    assert len(tree.show().splitlines()) == 1502


def test_annotations(client: boxwood.Client, sandbox: boxwood.Sandbox) -> None:
    node = sandbox.run("true").node
    node.annotate(reward=1.0, rewards={"style": 0.5}, labels={"a": "b"}, payload=b"p", policy_version="v1")
    node = node.refresh()
    assert node.rewards == {"reward": 1.0, "style": 0.5}
    assert (node.value, node.visits, node.policy_version) == (0, 0, "v1")
    node.annotate(value=0.0, visits=0, labels={"a": ""})
    assert node.refresh().labels == {}
    assert node.payload() == b"p"
    other = sandbox.run("true").node
    client.annotate({node: boxwood.annotation(reward=2.0), other.id: boxwood.annotation(value=3.0)})
    assert node.refresh().rewards["reward"] == 2.0
    assert other.refresh().value == 3.0
    with pytest.raises(boxwood.NotFound):
        client.annotate({"nothing": boxwood.annotation(value=1.0)})


def test_backup(client: boxwood.Client, tree: boxwood.Tree, sandbox: boxwood.Sandbox) -> None:
    middle = sandbox.run("true").node
    leaf = sandbox.run("true").node
    assert client.backup({leaf: 1.0}) == 3
    assert client.backup({leaf.id: 0.0}, rule="mean") == 3
    assert (tree.root.refresh().value, middle.refresh().visits) == (0.5, 2)
    client.backup({leaf: 1.0}, rule="discounted", discount=0.5)
    assert tree.root.refresh().value == 0.75
    with pytest.raises(boxwood.InvalidArgument, match="rule"):
        client.backup({leaf: 1.0}, rule="median")  # type: ignore[arg-type]


def test_prune_and_pin(tree: boxwood.Tree, sandbox: boxwood.Sandbox) -> None:
    first = sandbox.run("echo 1 > a").node
    second = sandbox.run("echo 2 > a").node
    with pytest.raises(boxwood.FailedPrecondition, match="stands there"):
        first.prune()
    sandbox.rollback(tree.root)
    second.pin()
    with pytest.raises(boxwood.FailedPrecondition, match="pinned"):
        first.prune()
    second.unpin()
    assert first.prune(keep_node=True).nodes == 1
    assert first.prune().nodes == 1
    with pytest.raises(boxwood.NotFound):
        first.refresh()


def test_states_alone_are_pruned(tree: boxwood.Tree, sandbox: boxwood.Sandbox) -> None:
    node = sandbox.run("echo 1 > a").node
    sandbox.rollback(tree.root)
    assert node.prune(states_only=True).nodes == 1
    node = node.refresh()
    assert node.capture is CaptureStatus.WITHHELD
    assert node.withheld_reason.startswith("evicted")


def test_a_watch_that_was_cut_goes_on(
    daemon: FakeDaemon, tree: boxwood.Tree, sandbox: boxwood.Sandbox
) -> None:
    daemon.fake.faults["WatchTree"].append(
        (fault("RESOURCE_EXHAUSTED", "watch_behind", "4096 events behind"), 1)
    )
    nodes = [tree.root, *(sandbox.run("true").node for _ in range(3))]
    watch = tree.watch()
    assert [next(watch).node for _ in nodes] == nodes
    daemon.fake.faults["WatchTree"].append((fault("RESOURCE_EXHAUSTED", "other", "no"), 1))
    with pytest.raises(boxwood.ResourceExhausted):
        list(tree.watch(timeout=5))


def test_archives(
    daemon: FakeDaemon, client: boxwood.Client, tree: boxwood.Tree, sandbox: boxwood.Sandbox, tmp_path: Path
) -> None:
    node = sandbox.run("true").node
    path = tmp_path / "tree.archive"
    assert tree.export(path, under=node) == path.stat().st_size
    assert path.read_bytes() == f"archive of {tree.id} {node.id}".encode()
    assert b"".join(tree.export_chunks()) == f"archive of {tree.id} ".encode()
    with pytest.raises(boxwood.AlreadyExists):
        client.import_tree(path)
    twin = client.import_tree(path, new_ids=True)
    assert twin.id != tree.id
    assert twin.image == tree.image
    daemon.fake.faults["ExportTree"].append((fault("DATA_LOSS", "state_lost", "no"), 1))
    with pytest.raises(boxwood.DataLoss):
        tree.export(tmp_path / "other")
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == [
        path.name
    ]  # nothing of the one that failed
    path.write_bytes(b"something else")
    with pytest.raises(boxwood.DataLoss):
        client.import_tree(path)
    with pytest.raises(boxwood.InvalidArgument, match="there is no archive"):
        client.import_tree(tmp_path / "nothing")


def test_wait_captured(client: boxwood.Client, sandbox: boxwood.Sandbox) -> None:
    a, b = sandbox.run("true").node, sandbox.run("true").node
    assert client.wait_captured([a, b.id], timeout=5) == [a, b]
    assert a.wait_captured(5).capture is CaptureStatus.CAPTURED


def test_watch_goes_on_over_a_restart(
    daemon: FakeDaemon, tree: boxwood.Tree, sandbox: boxwood.Sandbox
) -> None:
    watch = tree.watch()
    root = next(watch)
    assert root.node == tree.root
    node = sandbox.run("true").node
    assert next(watch).node == node
    daemon.stop()
    daemon.start()
    sandbox.run("true")
    change = next(watch)
    assert change.node is not None
    assert change.node.parent_id == node.id
    change.node.labels  # noqa: B018 - a record like any other
    sandbox.rollback(tree.root)
    node.prune()
    assert {next(watch).removed_node_id, next(watch).removed_node_id} == {node.id, change.node.id}
    tree.close()
    assert next(watch).tree is not None
    watch.close()  # type: ignore[attr-defined]
    assert list(tree.watch(after=10_000, timeout=0.05)) == []


def test_children_are_independent(sandbox: boxwood.Sandbox) -> None:
    node = sandbox.run("echo base > a").node
    sandbox.run("rm a")
    with node.fork(4, labels={"group": "g"}) as children:
        assert [type(c) for c in children] == [boxwood.Sandbox] * 4
        for number, child in enumerate(children.ready):
            assert child.head_id == node.id
            assert child.labels == {"group": "g"}
            child.run(f"echo {number} >> a; touch mine{number}")
        for number, child in enumerate(children.ready):
            assert child.run("cat a; ls").stdout.text.splitlines()[:3] == ["base", str(number), "a"]
    assert all(child.released for child in children.ready)
    assert len(node.children()) == 5
    assert "4 ready" in repr(children)


def test_fork_of_a_sandbox_and_scratch(sandbox: boxwood.Sandbox, tree: boxwood.Tree) -> None:
    sandbox.run("echo x > a")
    before = len(list(tree.nodes()))
    with sandbox.fork(scratch=True) as children:
        turn = children.ready[0].run("cat a")
        assert turn.stdout == b"x\n"
        assert turn.node.id == ""
        assert "scratch" in repr(turn)
        assert children.ready[0].scratch
    assert len(list(tree.nodes())) == before


def test_a_child_may_fail_alone(daemon: FakeDaemon, tree: boxwood.Tree) -> None:
    daemon.fake.failing_children[1] = fault(
        "RESOURCE_EXHAUSTED", "pool_full", "no room", retryable=True, origin=pb.Error.ORIGIN_INFRASTRUCTURE
    )
    with tree.root.fork(3) as children:
        assert len(children.ready) == 2
        (failed,) = children.failed
        assert children[1] is failed
        assert (failed.child, failed.node_id, failed.reason) == (1, tree.root.id, "pool_full")
        assert isinstance(failed.error, boxwood.ResourceExhausted)
        assert isinstance(failed.error, boxwood.InfrastructureError)
    with pytest.raises(boxwood.ResourceExhausted) as caught:
        tree.root.fork(3, min_ready=3)
    assert caught.value.retry_after == 0.5
    with tree.root.fork(3, replace_failed=True) as children:
        assert len(children.ready) == 3


def test_fork_iter_gives_children_as_they_come(tree: boxwood.Tree) -> None:
    for child in tree.root.fork_iter(3):
        assert isinstance(child, boxwood.Sandbox)
        child.release()
        child.release()


def test_fork_of_several_nodes(client: boxwood.Client, sandbox: boxwood.Sandbox, tree: boxwood.Tree) -> None:
    first = sandbox.run("echo 1 > a").node
    sandbox.run("echo 2 > a")
    with client.fork({first: 2, sandbox: 1}) as forks:
        assert [c.run("cat a").stdout for c in forks[first].ready] == [b"1\n", b"1\n"]
        assert forks[sandbox].ready[0].run("cat a").stdout == b"2\n"
        assert len(forks.ready) == 3
        assert forks.failed == []
    assert [s.id for s in client.sandboxes(tree)] == [sandbox.id]


def test_a_fork_that_breaks_off_leaves_no_sandbox(daemon: FakeDaemon, tree: boxwood.Tree) -> None:
    daemon.fake.faults["Fork"].append((fault("INTERNAL", "broken", "broke in the middle"), 2))
    before = set(daemon.fake.boxes)
    with pytest.raises(boxwood.InternalError):
        tree.root.fork(3)
    # The two that the client had heard of are released; the third it never knew.
    assert len(set(daemon.fake.boxes) - before) == 1


def test_a_withheld_node_is_not_restored(daemon: FakeDaemon, sandbox: boxwood.Sandbox) -> None:
    node = sandbox.run("true").node
    daemon.fake.nodes[node.id].capture = pb.CAPTURE_STATUS_WITHHELD
    daemon.fake.nodes[node.id].withheld_reason = "a server survives"
    with pytest.raises(boxwood.NodeWithheld, match="a server survives") as caught:
        node.fork()
    assert isinstance(caught.value, boxwood.FailedPrecondition)
    assert node.refresh().capture is CaptureStatus.WITHHELD


def test_rollback_in_place(sandbox: boxwood.Sandbox, tree: boxwood.Tree) -> None:
    generation = sandbox.generation
    sandbox.run("rm -rf work")
    assert sandbox.rollback(tree.root) is sandbox
    assert sandbox.generation != generation
    assert sandbox.run("cat work/start").stdout == b"start\n"
    sandbox.rollback(tree.root.id)
    assert sandbox.head_id == tree.root_id


def test_renew_and_release(client: boxwood.Client, tree: boxwood.Tree) -> None:
    child = tree.root.fork().ready[0]
    child.renew(60)
    assert child.lease_until > 0
    child.release()
    child.release()
    with pytest.raises(boxwood.NotFound):
        child.run("true")


def test_threads_share_a_client(tree: boxwood.Tree) -> None:
    with tree.root.fork(8) as children:
        texts: dict[str, str] = {}

        def work(child: boxwood.Sandbox, number: int) -> None:
            texts[child.id] = child.run(f"echo {number}").stdout.text

        threads = [threading.Thread(target=work, args=(c, n)) for n, c in enumerate(children.ready)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [texts[c.id] for c in children.ready] == [f"{n}\n" for n in range(8)]


def test_a_node_is_read_when_it_is_looked_at(tree: boxwood.Tree) -> None:
    node = tree.sandbox.run("echo x").node
    with pytest.raises(AttributeError, match="no attribute 'verdikt'"):
        node.verdikt  # type: ignore[attr-defined] # noqa: B018
    assert node.observation.stdout == b"x\n"
    assert {f.name for f in dataclasses.fields(node)} <= set(dir(node))
    unread = tree.sandbox.run("echo y").node
    assert dataclasses.replace(unread, depth=7).observation.stdout == b"y\n"
    assert copy.copy(tree.sandbox.run("echo z").node).observation.stdout == b"z\n"
    with pytest.raises(dataclasses.FrozenInstanceError):
        unread.depth = 3  # type: ignore[misc]
