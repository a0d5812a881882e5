"""Boxwood on a Ray cluster: each node's daemon, forks where the checkpoint is, and nodes that go.

    hosts = boxwood.ray.survey()                      # the driver: which nodes have a daemon

    @ray.remote(num_cpus=0)
    def grow(task):                                   # runs on a node that has one
        with boxwood.ray.connect() as client:         # that node's own
            tree = client.create_tree(image=task)
            boxwood.ray.keep(tree)                    # others find it
            return tree.id

    tree_id = boxwood.ray.run(grow, "task:7", key="task 7, step 3")
    fork.options(scheduling_strategy=boxwood.ray.near(tree_id)).remote(tree_id)

A daemon is reached through a socket of its own host, so what uses a tree must run where its
checkpoints are: `near` says where that is. Which host a key belongs to is decided by
rendezvous hashing over the hosts that there are: it stays where it is while others come and go.
A registry, a named actor of the cluster, knows the hosts and where trees are.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ActorUnschedulableError,
    NodeDiedError,
    TaskUnschedulableError,
    WorkerCrashedError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from . import errors
from .client import Client
from .client import connect as _connect
from .tree import Tree

NAME, NAMESPACE = "boxwood-hosts", "boxwood"

# What ray raises when the node on which something ran, or was to run, is gone.
LOST = (
    ActorDiedError,
    ActorUnavailableError,
    ActorUnschedulableError,
    NodeDiedError,
    TaskUnschedulableError,
    WorkerCrashedError,
)


@dataclasses.dataclass(frozen=True)
class Host:
    """A node of the cluster with a daemon.

    Attributes:
        node_id: Ray's id of the node, in hex.
        address: The daemon's address, as processes of that node reach it.
    """

    node_id: str
    address: str


class _Registry:
    """Which nodes have a daemon, and on which of them a tree is."""

    def __init__(self) -> None:
        self._hosts: dict[str, Host] = {}
        self._trees: dict[str, str] = {}

    def join(self, host: Host) -> None:
        self._hosts[host.node_id] = host

    def leave(self, node_id: str) -> None:
        self._hosts.pop(node_id, None)

    def hosts(self) -> list[Host]:
        return sorted(self._hosts.values(), key=lambda host: host.node_id)

    def keep(self, tree_id: str, node_id: str) -> None:
        self._trees[tree_id] = node_id

    def where(self, tree_id: str) -> str | None:
        return self._trees.get(tree_id)


def survey(*, timeout: float = 60.0) -> list[Host]:
    """Looks on every node of the cluster for a daemon, and registers those that answer.

    Args:
        timeout: Seconds to wait for the nodes.

    Returns:
        All hosts, by node id. A node without a daemon isn't one.
    """
    looks = [
        _look.options(scheduling_strategy=_at(node["NodeID"])).remote()
        for node in ray.nodes()
        if node["Alive"]
    ]
    done, late = ray.wait(looks, num_returns=len(looks), timeout=timeout) if looks else ([], [])
    for look in late:
        ray.cancel(look, force=True)
    for look in done:
        try:
            ray.get(look)
        except LOST:  # it went while we looked
            continue
    return hosts()


def hosts() -> list[Host]:
    """The registered hosts whose nodes are alive, by node id."""
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    registered: list[Host] = ray.get(_registry().hosts.remote())
    return [host for host in registered if host.node_id in alive]


def join(address: str | None = None) -> Host:
    """Registers the daemon of the node that this process runs on.

    Args:
        address: Its address; None as for `boxwood.connect`.

    Raises:
        ConnectionFailed: No daemon answers there.
    """
    with _connect(address) as client:
        client.info()
        host = Host(_here(), client.address)
    ray.get(_registry().join.remote(host))
    return host


def connect(*, timeout: float = 30.0) -> Client:
    """A client of the daemon of the node that this process runs on.

    Args:
        timeout: As for `boxwood.connect`.

    Raises:
        ConnectionFailed: The node has none.
    """
    here = _here()
    known = [host for host in ray.get(_registry().hosts.remote()) if host.node_id == here]
    return _connect((known or [join()])[0].address, timeout=timeout)


def keep(tree: Tree) -> None:
    """Tells the cluster that a tree is on the node that this process runs on."""
    ray.get(_registry().keep.remote(tree.id, _here()))


def near(what: Host | Tree | str) -> NodeAffinitySchedulingStrategy:
    """The scheduling strategy for what forks a tree's nodes, or must run on a host.

    Args:
        what: A host, or a tree that was kept, or its id.

    Raises:
        NotFound: Nobody kept such a tree, or its node is gone, and its checkpoints with it.
    """
    if isinstance(what, Host):
        return _at(what.node_id)
    tree_id = what if isinstance(what, str) else what.id
    node_id = ray.get(_registry().where.remote(tree_id))
    if node_id is None:
        raise errors.from_detail("NOT_FOUND", f"no node of the cluster has kept tree {tree_id}", None)
    if not any(node["NodeID"] == node_id and node["Alive"] for node in ray.nodes()):
        raise errors.from_detail("NOT_FOUND", f"tree {tree_id} was on node {node_id}, which is gone", None)
    return _at(node_id)


def choose(key: str, among: Sequence[Host] | None = None) -> Host:
    """The host that a key belongs to: rendezvous hashing, so others' coming and going moves few keys.

    Args:
        key: Any words, such as a task's name.
        among: The hosts; all that are alive if None.

    Raises:
        Unavailable: There is none.
    """
    among = hosts() if among is None else among
    if not among:
        raise errors.from_detail("UNAVAILABLE", "no node of the cluster has a daemon", None)
    return max(among, key=lambda host: hashlib.sha256(f"{key}/{host.node_id}".encode()).digest())


def run(function: Any, *arguments: Any, key: str, attempts: int = 3) -> Any:
    """Runs a remote function on the host of a key, and on the next one if that node is lost.

    Only the loss of a node (or of the worker on it) leads to another attempt: what the function raises is
    raised. It must bear being run again; give its calls idempotency keys, or let it begin a tree of its own.

    Args:
        function: What ``@ray.remote`` made.
        *arguments: Its arguments.
        key: Decides the host.
        attempts: How often, at most.
    """
    failed: list[str] = []
    for attempt in range(1, attempts + 1):
        host = choose(key, [host for host in hosts() if host.node_id not in failed])
        try:
            return ray.get(function.options(scheduling_strategy=near(host), max_retries=0).remote(*arguments))
        except LOST:
            if attempt == attempts:
                raise
            if _gone(host.node_id):
                failed.append(host.node_id)
                ray.get(_registry().leave.remote(host.node_id))
    raise AssertionError("unreachable")


def _gone(node_id: str, *, within: float = 15.0) -> bool:
    """Whether a node is dead: the cluster notices a while after what ran there failed."""
    until = time.monotonic() + within
    while any(node["NodeID"] == node_id and node["Alive"] for node in ray.nodes()):
        if time.monotonic() > until:
            return False
        time.sleep(0.2)
    return True


def _at(node_id: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)


def _here() -> str:
    return str(ray.get_runtime_context().get_node_id())


def _registry() -> Any:
    # It outlives the driver that made it. If its node goes it is made again, empty: hosts join anew
    # at the next survey or connect, and trees are unknown until somebody keeps them again.
    return (
        ray.remote(_Registry)
        .options(
            name=NAME,
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=-1,
        )
        .remote()
    )


@ray.remote(num_cpus=0, max_retries=0)
def _look() -> None:
    try:
        join()
    except errors.ConnectionFailed:
        return
