"""Trees: all nodes grown from one start state."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING

from .. import _tar, errors
from .._channel import new_key
from .._draw import Drawing, table
from .._proto import boxwood_pb2 as pb
from ..records import CaptureStatus, Verdict
from . import node as nodes
from ._face import consume
from .node import Node

if TYPE_CHECKING:
    from .client import Client
    from .sandbox import Sandbox

# One watch call lasts this long; the next goes on from its last index.
_WATCH = 3600.0


@dataclasses.dataclass(frozen=True)
class TreeChange:
    """One change of a tree; exactly one of the three is set.

    Attributes:
        index: Grows; `Tree.watch(after=index)` goes on behind it.
        node: A node as it is now.
        removed_node_id: A node that was pruned.
        tree: The tree's record changed, for example it was closed.
    """

    index: int
    node: Node | None = None
    removed_node_id: str | None = None
    tree: Tree | None = None


class Tree:
    """A tree. As a context manager it is closed at the end.

    Attributes:
        id: Its id.
        root_id: Its root node.
        image: The digest of its image.
        labels: Its labels.
        created_at: When it was made, ns since the epoch.
        closed: Whether it was closed, as far as this handle knows.
        node_count: Nodes when it was read.
        checkpoint_count: Checkpoints when it was read.
        sandbox: The live sandbox that `create_tree` made; None otherwise.
        setup_cached: Whether the set-up's result was there already.
    """

    id: str
    root_id: str
    image: str
    labels: Mapping[str, str]
    created_at: int
    closed: bool
    node_count: int
    checkpoint_count: int

    def __init__(
        self,
        client: Client,
        message: pb.Tree,
        *,
        sandbox: Sandbox | None = None,
        root: Node | None = None,
        setup_cached: bool = False,
    ) -> None:
        self._client = client
        self._sandbox = sandbox
        self._root = root
        self.setup_cached = setup_cached
        self.id, self.root_id, self.image = message.id, message.root_id, message.image
        self.labels, self.created_at, self.closed = dict(message.labels), message.created_at, message.closed
        self.node_count, self.checkpoint_count = message.node_count, message.checkpoint_count

    def __repr__(self) -> str:
        return f"<Tree {self.id}, {self.node_count} nodes{', closed' if self.closed else ''}>"

    async def __aenter__(self) -> Tree:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        await self.close()

    @property
    async def root(self) -> Node:
        """Its root node."""
        if self._root is None:
            self._root = await self._client.node(self.root_id)
        return self._root

    @property
    def sandbox(self) -> Sandbox:
        """The live sandbox that it was made with.

        Raises:
            InvalidArgument: It was made with `with_sandbox=False`, or read by `Client.tree`.
        """
        if self._sandbox is None:
            raise errors.invalid("this tree's handle has no sandbox", "fork one: root.fork()")
        return self._sandbox

    def nodes(
        self,
        *,
        under: Node | str | None = None,
        capture: Iterable[CaptureStatus | str] = (),
        verdict: Iterable[Verdict | str] = (),
        labels: Mapping[str, str] | None = None,
        depth: int | None = None,
        leaves_only: bool = False,
        brief: bool = False,
        limit: int = 0,
    ) -> AsyncIterator[Node]:
        """Reads its nodes, streamed.

        Args:
            under: Only this node and what lies below it.
            capture: Only nodes with one of these.
            verdict: Only nodes with one of these.
            labels: Only nodes with all of these.
            depth: Only nodes at this level; the root is at 0.
            leaves_only: Only nodes without children.
            brief: Leave observations and effects out.
            limit: At most so many; 0: all.
        """
        request = pb.ListNodesRequest(
            tree_id=self.id,
            under=under.id if isinstance(under, Node) else under or "",
            capture=[pb.CaptureStatus.Value(f"CAPTURE_STATUS_{str(word).upper()}") for word in capture],
            verdict=[pb.Verdict.Value(f"VERDICT_{str(word).upper()}") for word in verdict],
            labels=labels or {},
            depth=depth,
            leaves_only=leaves_only,
            brief=brief,
            limit=limit,
        )
        return self._client._list_nodes(request)

    async def watch(self, after: int = 0, *, timeout: float | None = None) -> AsyncIterator[TreeChange]:
        """Gives every change once, in order; goes on by itself over restarts of the daemon.

        Args:
            after: Changes after this index; 0: from the start.
            timeout: Seconds until it ends, quietly; None: it ends when the loop is left.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            left = _WATCH if until is None else min(_WATCH, until - time.monotonic())
            if left <= 0:
                return
            events = self._client._caller.stream(
                "WatchTree", pb.WatchTreeRequest(tree_id=self.id, after_index=after), timeout=left
            )
            came = False
            try:
                async with contextlib.aclosing(events):
                    async for event in events:
                        came = True
                        after = event.index
                        yield self._change(event)
                return  # the daemon ended it
            except errors.DeadlineExceeded:
                continue
            except errors.ResourceExhausted as error:
                if error.reason != "watch_behind":  # cut for being slow: what was missed comes again
                    raise
            except errors.Unavailable:
                if not came:  # the call itself has tried for a while: the daemon stays away
                    raise

    def _change(self, event: pb.TreeEvent) -> TreeChange:
        which = event.WhichOneof("change")
        if which == "node":
            return TreeChange(event.index, node=nodes.from_message(self._client, event.node))
        if which == "removed_node_id":
            return TreeChange(event.index, removed_node_id=event.removed_node_id)
        return TreeChange(event.index, tree=Tree(self._client, event.tree))

    async def show(self) -> str:
        """Draws it as text: a line a node, with verdict, shared checkpoint, rewards."""
        below: dict[str, list[Node]] = {}
        async for node in self.nodes():
            below.setdefault(node.parent_id, []).append(node)
        lines = [f"tree {self.id}"]
        # Not recursive: a tree may be thousands of turns deep.
        roots = sorted(below.get("", []), key=lambda n: n.ordinal)
        stack = [(node, "", number == 0) for number, node in enumerate(reversed(roots))]
        while stack:
            node, indent, last = stack.pop()
            lines.append(f"{indent}{'└─ ' if last else '├─ '}{_line(node)}")
            children = sorted(below.get(node.id, []), key=lambda n: n.ordinal)
            indent += "   " if last else "│  "
            stack.extend((child, indent, number == 0) for number, child in enumerate(reversed(children)))
        return "\n".join(lines)

    async def plot(self, *, under: Node | str | None = None) -> Drawing:
        """Draws it: a `Drawing`, which a notebook shows, and which can be saved as SVG or for Graphviz.

        Args:
            under: Only this node and what lies below it.
        """
        return Drawing(self.id, [node async for node in self.nodes(under=under)])

    def _repr_html_(self) -> str:
        rows = [
            ("root", self.root_id),
            ("image", self.image),
            ("nodes", self.node_count),
            ("checkpoints", self.checkpoint_count),
            ("labels", ", ".join(f"{k}={v}" for k, v in sorted(self.labels.items()))),
            ("state", "closed" if self.closed else "open"),
        ]
        return table(f"Tree {self.id}, as it was when it was read", rows)

    async def export(
        self,
        path: str | os.PathLike[str],
        *,
        under: Node | str | None = None,
        with_secrets: bool = False,
        timeout: float = 3600.0,
    ) -> int:
        """Writes it with its saved states as one archive, which `Client.import_tree` reads on any host.

        Args:
            path: The archive; it is there once it is whole.
            under: Only this node and what lies below it, which becomes a root.
            with_secrets: Carry what was saved of processes that were given secrets, too
                (`Node.may_hold_secrets`); else such nodes arrive withheld.
            timeout: Seconds.

        Returns:
            The archive's bytes.
        """
        return await consume(
            self.export_chunks(under=under, with_secrets=with_secrets, timeout=timeout),
            lambda chunks: _tar.save(chunks, path),
        )

    async def export_chunks(
        self, *, under: Node | str | None = None, with_secrets: bool = False, timeout: float = 3600.0
    ) -> AsyncIterator[bytes]:
        """As `export`, as the chunks of bytes that the archive is."""
        request = pb.ExportTreeRequest(
            tree_id=self.id,
            node_id=under.id if isinstance(under, Node) else under or "",
            with_secrets=with_secrets,
        )
        stream = self._client._caller.stream("ExportTree", request, timeout=timeout)
        async with contextlib.aclosing(stream):
            async for message in stream:
                yield message.data

    async def close(self) -> None:
        """Releases its sandboxes and refuses new work on it; its nodes stay readable. Again: does nothing."""
        if self.closed:
            return
        await self._client._caller.unary(
            "CloseTree", pb.CloseTreeRequest(tree_id=self.id, idempotency_key=new_key())
        )
        self.closed = True
        for sandbox in list(self._client._owned):
            if sandbox.tree_id == self.id:
                sandbox.released = True

    async def reopen(self) -> None:
        """Takes new work on it again after `close`: its nodes can be forked."""
        await self._client._caller.unary("OpenTree", pb.OpenTreeRequest(tree_id=self.id))
        self.closed = False


def _line(node: Node) -> str:
    text = node.action.text.splitlines()[0] if node.action.text else "(root)" if node.is_root else "..."
    parts = [node.id, text if len(text) <= 50 else text[:47] + "..."]
    if not node.is_root:
        parts.append(str(node.verdict))
    if node.capture is CaptureStatus.WITHHELD:
        parts.append(f"withheld: {node.withheld_reason}")
    elif node.checkpoint_node_id and node.checkpoint_node_id != node.id:
        parts.append(f"shares {node.checkpoint_node_id}")
    else:
        parts.append(str(node.capture))
    parts += [f"{name}={value:g}" for name, value in sorted(node.rewards.items())]
    if node.visits:
        parts.append(f"value={node.value:g} visits={node.visits}")
    return "  ".join(parts)
