"""A real Ray cluster of three nodes on this machine, two of them with a daemon of their own."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="ray is not installed: make test-adapters")

import ray
from conftest import pinned
from integration.conftest import REPOSITORY, small_root, wait_for_daemon
from ray.cluster_utils import Cluster

import boxwood
import boxwood.ray


@pytest.fixture(autouse=True)
def address() -> None:
    """Each node has its own; this process is on the node that has none."""
    os.environ.pop("BOXWOOD_ADDRESS", None)


@pytest.fixture(scope="module")
def daemons() -> Iterator[list[str]]:
    running: list[tuple[subprocess.Popen[bytes], Path]] = []
    with tempfile.TemporaryDirectory(prefix="bw-ray-") as top:
        Path(top).chmod(0o755)
        root = Path(top, "root")
        root.mkdir()
        small_root(root)
        try:
            for name in ("a", "b"):
                folder = Path(top, name)
                folder.mkdir()
                flags = [
                    "--state",
                    folder / "state",
                    "--socket",
                    folder / "sock",
                    "--cgroup",
                    f"boxwood-ray-{os.getpid()}-{name}",
                ]
                with open(folder / "log", "wb") as log:
                    process = subprocess.Popen(
                        [REPOSITORY / "bin" / "boxwood", "serve", *map(str, flags), "--pool-size", "2G"],
                        stdout=log,
                        stderr=log,
                    )
                running.append((process, folder / "sock"))
            for process, socket in running:
                wait_for_daemon(process, socket, socket.with_name("log"))
                with boxwood.connect(str(socket)) as client:
                    client.images.import_(root, "small:latest")
            yield [str(socket) for _, socket in running]
        finally:
            for process, _ in running:
                process.terminate()
            for process, _ in running:
                process.wait(60)


@pytest.fixture(scope="module")
def cluster(daemons: list[str]) -> Iterator[tuple[Cluster, dict[str, Any]]]:
    with tempfile.TemporaryDirectory(prefix="r-", ignore_cleanup_errors=True) as folder:
        os.environ.update(RAY_TMPDIR=folder, RAY_USAGE_STATS_ENABLED="0")
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        try:
            nodes = {
                socket: made.add_node(num_cpus=1, env_vars={"BOXWOOD_ADDRESS": socket}) for socket in daemons
            }
            ray.init(address=made.address, log_to_driver=False)
            made.wait_for_nodes()
            yield made, nodes
        finally:
            ray.shutdown()
            made.shutdown()


@ray.remote(num_cpus=0)
def grow(word: str) -> tuple[str, str, str]:
    with boxwood.ray.connect() as client:
        tree = client.create_tree(image="small:latest")
        node = tree.sandbox.run(f"echo {word} > /tmp/word", check=True).node
        tree.sandbox.release()
        boxwood.ray.keep(tree)
        return tree.id, node.id, client.address


@ray.remote(num_cpus=0)
def read(node_id: str) -> tuple[list[str], str]:
    with boxwood.ray.connect() as client, client.node(node_id).fork(3, min_ready=3) as children:
        return [child.run("cat /tmp/word").stdout.text for child in children.ready], client.address


def test_a_cluster(cluster: tuple[Cluster, dict[str, Any]], daemons: list[str]) -> None:
    pinned("ray", "2.60.0")
    made, nodes = cluster
    hosts = boxwood.ray.survey(timeout=120)
    # The head has no daemon, so it is no host.
    assert {host.address for host in hosts} == {f"unix:{socket}" for socket in daemons}
    assert {host.node_id for host in hosts} == {node.node_id for node in nodes.values()}
    assert boxwood.ray.survey(timeout=120) == hosts

    keys = [f"task {number}" for number in range(8)]
    owner = {key: boxwood.ray.choose(key) for key in keys}
    assert set(owner.values()) == set(hosts)

    grown = {key: boxwood.ray.run(grow, f"w{number}", key=key) for number, key in enumerate(keys)}
    for number, key in enumerate(keys):
        tree_id, node_id, address = grown[key]
        assert address == owner[key].address
        # Whoever forks the tree is put where its checkpoints are.
        words, where = ray.get(read.options(scheduling_strategy=boxwood.ray.near(tree_id)).remote(node_id))
        assert (words, where) == ([f"w{number}\n"] * 3, address)
    with pytest.raises(boxwood.NotFound, match="no node of the cluster has kept tree tr_none"):
        boxwood.ray.near("tr_none")

    # One node goes: its keys move to the other, which keeps its own.
    lost, left = hosts
    made.remove_node(
        next(node for node in nodes.values() if node.node_id == lost.node_id), allow_graceful=False
    )
    for number, key in enumerate(keys[:4]):
        assert boxwood.ray.run(grow, f"again{number}", key=key)[2] == left.address
    assert boxwood.ray.hosts() == [left]
    assert all(boxwood.ray.choose(key) == left for key in keys)
    for key in keys:
        if owner[key] == lost:
            with pytest.raises(boxwood.NotFound, match="which is gone"):
                boxwood.ray.near(grown[key][0])
        else:
            assert (
                ray.get(
                    read.options(scheduling_strategy=boxwood.ray.near(grown[key][0])).remote(grown[key][1])
                )[1]
                == left.address
            )


@ray.remote(num_cpus=0, max_retries=0)
def broken() -> None:
    raise ZeroDivisionError


def test_what_a_function_raises_is_raised(cluster: tuple[Cluster, dict[str, Any]]) -> None:
    with pytest.raises(ZeroDivisionError):
        boxwood.ray.run(broken, key="x")
