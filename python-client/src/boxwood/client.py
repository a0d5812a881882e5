# Written by scripts/gen-sync.py from aio/client.py: edit that.
"""The client: one daemon, and all that it has."""

from __future__ import annotations

import contextlib
import os
import warnings
import weakref
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

from . import _tar, _wire, errors, grading
from . import node as nodes
from . import stats as _stats
from ._channel import new_key, resolve
from ._command import MARGIN, CapturePolicy, ns, policy_message
from ._face import Caller, consume, pieces, reader
from ._proto import boxwood_pb2 as pb
from .errors import ForkError
from .fork import Children, Forks
from .grading import Evaluation, Grader
from .images import Images
from .node import Node
from .records import Annotation, File, Image, Info, Limits, Pruned, Table
from .run import Run
from .sandbox import Sandbox
from .tree import Tree

if TYPE_CHECKING:
    import datetime

    import pandas
    import polars
    import pyarrow

SetupStep: TypeAlias = "str | File | tuple[str, bytes]"
Rule = Literal["sum", "mean", "max", "discounted"]


def connect(address: str | None = None, *, timeout: float = 30.0) -> Client:
    """Makes a client. Nothing is sent before its first call.

    Args:
        address: A unix socket's path, or "host:port". None means ``$BOXWOOD_ADDRESS``,
            else ``/run/boxwood/boxwood.sock``. Who it is that calls, over TCP, is said by
            ``$BOXWOOD_TOKEN`` or by the certificate and key in ``$BOXWOOD_CERT`` and
            ``$BOXWOOD_KEY``; ``$BOXWOOD_CA`` is the authority that signed the daemon's certificate.
        timeout: Seconds that a call may take where it says nothing else.
    """
    return Client(address, timeout=timeout)


class Client:
    """Speaks to one daemon. As a context manager it is closed at the end.

    Threads may share it. It can be pickled, and used on both sides of a fork: each
    process makes a channel of its own when it first needs one.

    Attributes:
        images: The daemon's images.
    """

    def __init__(self, address: str | None = None, *, timeout: float = 30.0) -> None:
        self._caller = Caller(resolve(address), timeout)
        # Sandboxes that this process made and must release; weak, so that they can warn.
        self._owned: weakref.WeakSet[Sandbox] = weakref.WeakSet()

    def __repr__(self) -> str:
        return f"<Client of {self._caller.target}{', closed' if self._caller.closed else ''}>"

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"_caller": self._caller}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._caller = state["_caller"]
        self._owned = weakref.WeakSet()

    def __del__(self) -> None:
        caller = getattr(self, "_caller", None)
        if caller is not None and not caller.closed and caller.is_open():
            warnings.warn(f"{self!r} was never closed", ResourceWarning, stacklevel=2, source=self)
            caller.abandon()

    @property
    def address(self) -> str:
        """The daemon's address: ``unix:PATH`` or ``host:port``."""
        return self._caller.target

    @property
    def images(self) -> Images:
        """The daemon's images."""
        return Images(self)

    def close(self) -> None:
        """Closes this process's connection; sandboxes live on until their lease ends. Again: does nothing."""
        self._caller.close()

    def info(self) -> Info:
        """Asks for the host: version, kernel, capabilities, pool, limits."""
        return _wire.info(self._caller.unary("GetInfo", pb.GetInfoRequest()))

    def open_run(self, name: str, *, adopt: bool = False, timeout: float = 600.0) -> Run:
        """Begins an attempt of a training run: ends the attempt before it, whose late calls are refused.

        Args:
            name: The run's name, 1 to 128 bytes without a slash.
            adopt: Keep the live sandboxes of the run's trees for this attempt; else they are released.
            timeout: Seconds.
        """
        reply = self._caller.unary(
            "OpenRun", pb.OpenRunRequest(name=name, adopt=adopt, idempotency_key=new_key()), timeout=timeout
        )
        client = Client(self._caller.target, timeout=self._caller.timeout)
        client._caller.run = f"{name}/{reply.attempt}"
        return Run(client, name, reply)

    def create_tree(
        self,
        *,
        image: Image | str | None = None,
        node: Node | str | None = None,
        setup: Iterable[SetupStep] = (),
        user: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        limits: Limits | None = None,
        lease: float | None = None,
        turn_timeout: float | None = None,
        allow_calls: Iterable[str] = (),
        capture: CapturePolicy = "sparse",
        labels: Mapping[str, str] | None = None,
        with_sandbox: bool = True,
        timeout: float = 600.0,
        idempotency_key: str | None = None,
    ) -> Tree:
        """Makes a tree from an image or from a node of another tree.

        Args:
            image: The image, its name or digest. Exactly one of `image` and `node`.
            node: The node.
            setup: Commands (str), files (`File`, or a pair of path and content), in order. Run once
                for each start and set-up, and shared by every tree that asks for the same.
            user: User that commands run as: a name, "uid" or "uid:gid".
            cwd: Their working folder.
            env: Their environment.
            limits: Limits of its sandboxes.
            lease: Seconds that a sandbox of it lives without a call.
            turn_timeout: Seconds that a turn may take which names no timeout.
            allow_calls: What its sandboxes may do beyond the usual: "setuid" (sudo and su for others than
                root), and groups of system calls: "io_uring", "keyring", "userfaultfd", "perf",
                "namespaces". What they open is in docs/SECURITY.md.
            capture: Which turns are captured: "sparse", those that changed something; "full", each, with
                another dump of all that runs, to measure against; "files", as sparse, but processes are
                never saved; "uncaptured", none. Nodes that are left out are withheld.
            labels: Its labels.
            with_sandbox: Make a live sandbox at its root, `tree.sandbox`.
            timeout: Seconds for the call, set-up included.
            idempotency_key: Repeating the call with the same key gives the same tree.

        Raises:
            NotFound: No such image or node.
            FailedPrecondition: A command of the set-up failed; the message has its output.
        """
        if (image is None) == (node is None):
            raise errors.invalid("create_tree needs exactly one of image and node")
        request = pb.CreateTreeRequest(
            setup=[_setup_step(step) for step in setup],
            defaults=pb.Defaults(
                user=user or "",
                cwd=cwd or "",
                env=env or {},
                limits=_wire.limits_message(limits),
                lease_ns=ns(lease),
                turn_deadline_ns=ns(turn_timeout),
                allow_calls=list(allow_calls),
                capture_policy=policy_message(capture),
            ),
            labels=labels or {},
            with_sandbox=with_sandbox,
            idempotency_key=idempotency_key or new_key(),
        )
        if image is not None:
            request.image = image.digest if isinstance(image, Image) else image
        elif node is not None:
            request.node_id = _id(node)
        reply = self._caller.unary("CreateTree", request, timeout=timeout)
        return Tree(
            self,
            reply.tree,
            root=nodes.from_message(self, reply.root),
            sandbox=Sandbox(self, reply.sandbox, owned=True) if reply.HasField("sandbox") else None,
            setup_cached=reply.setup_cached,
        )

    def tree(self, tree_id: str) -> Tree:
        """Reads a tree.

        Raises:
            NotFound: There is none.
        """
        for tree in self.trees():
            if tree.id == tree_id:
                return tree
        raise errors.from_detail("NOT_FOUND", f"there is no tree {tree_id!r}", None)

    def trees(self, labels: Mapping[str, str] | None = None) -> list[Tree]:
        """Reads all trees that have these labels."""
        reply = self._caller.unary("ListTrees", pb.ListTreesRequest(labels=labels or {}))
        return [Tree(self, m) for m in reply.trees]

    def import_tree(
        self,
        path: str | os.PathLike[str],
        *,
        new_ids: bool = False,
        allow_calls: Iterable[str] = (),
        timeout: float = 3600.0,
    ) -> Tree:
        """Makes the tree of an archive that `Tree.export` wrote, here or on another host. It is streamed.

        Args:
            path: The archive, on this process's host.
            new_ids: Give tree, nodes and checkpoints ids of their own, so that a tree can be had twice.
            allow_calls: Groups of system calls (see `create_tree`) that the archive's tree may go
                on allowing its sandboxes; one that allows others is refused.
            timeout: Seconds.

        Raises:
            DataLoss: The archive was cut off or changed; nothing of it is left behind.
            AlreadyExists: The tree is here.
            FailedPrecondition: The image isn't here, or a dump is of another kernel.
        """
        source = Path(path)
        if not source.is_file():
            raise errors.invalid(f"there is no archive {str(source)!r}")
        start = pb.ImportTreeStart(new_ids=new_ids, allow_calls=allow_calls, idempotency_key=new_key())

        def messages() -> Iterator[pb.ImportTreeRequest]:
            yield pb.ImportTreeRequest(start=start)
            for chunk in pieces(_tar.read(source)):
                yield pb.ImportTreeRequest(chunk=chunk)

        reply = self._caller.unary("ImportTree", messages, timeout=timeout)
        return Tree(self, reply.tree)

    def node(self, node_id: str) -> Node:
        """Reads a node.

        Raises:
            NotFound: There is none.
        """
        reply = self._caller.unary("GetNode", pb.GetNodeRequest(node_id=node_id))
        return nodes.from_message(self, reply)

    def sandbox(self, sandbox_id: str) -> Sandbox:
        """Finds a live sandbox; the handle doesn't warn when it is collected.

        Raises:
            NotFound: There is none, or it has ended.
        """
        for sandbox in self.sandboxes():
            if sandbox.id == sandbox_id:
                return sandbox
        raise errors.from_detail("NOT_FOUND", f"there is no live sandbox {sandbox_id!r}", None)

    def sandboxes(self, tree: Tree | str | None = None) -> list[Sandbox]:
        """Finds all live sandboxes, or those of a tree."""
        request = pb.ListSandboxesRequest(tree_id=tree.id if isinstance(tree, Tree) else tree or "")
        reply = self._caller.unary("ListSandboxes", request)
        return [Sandbox(self, m, owned=False) for m in reply.sandboxes]

    def release(self, sandboxes: Iterable[Sandbox]) -> None:
        """Releases many sandboxes in one call."""
        released = list(sandboxes)
        self._caller.unary("Release", _release(released))
        for sandbox in released:
            sandbox.released = True

    def fork(self, wants: Mapping[Node | Sandbox, int], **options: Any) -> Forks:
        """Forks several nodes in one call.

        Args:
            wants: How many children of each node, or of the node that a sandbox stands at.
            **options: As for `Node.fork`.

        Returns:
            The children by what was forked.
        """
        sources = list(wants)
        found: list[dict[int, Sandbox | ForkError]] = [{} for _ in sources]
        results = self._fork_results(wants, **options)
        try:
            for want, number, child in results:
                found[want][number] = child
        except BaseException:
            # What had been made must not wait for its lease.
            ready = [c for children in found for c in children.values() if isinstance(c, Sandbox)]
            if ready:
                self._caller.quietly("Release", _release(ready))
                for sandbox in ready:
                    sandbox.released = True
            raise
        forks = Forks()
        for source, by_number in zip(sources, found, strict=True):
            children = Children(by_number[number] for number in sorted(by_number))
            children._client = self
            forks[source] = children
        return forks

    def _fork_one(self, source: Node | Sandbox, n: int, **options: Any) -> Children:
        forks = self.fork({source: n}, **options)
        return forks[source]

    def _fork_iter(
        self, wants: Mapping[Node | Sandbox, int], **options: Any
    ) -> Iterator[Sandbox | ForkError]:
        with contextlib.closing(self._fork_results(wants, **options)) as results:
            for _, _, child in results:
                yield child

    def _fork_results(
        self,
        wants: Mapping[Node | Sandbox, int],
        *,
        scratch: bool = False,
        min_ready: int = 0,
        replace_failed: bool = False,
        deadline: float | None = None,
        labels: Mapping[str, str] | None = None,
        lease: float | None = None,
        limits: Limits | None = None,
        seed: int = 0,
        same_seed: bool = False,
        replay: bool = False,
        secret_env: Mapping[str, str] | None = None,
        idempotency_key: str | None = None,
    ) -> Generator[tuple[int, int, Sandbox | ForkError], None]:
        """Each child once, as it becomes ready: which want, which child of it, and the child."""
        sources = list(wants)
        request = pb.ForkRequest(
            wants=[
                pb.ForkRequest.Want(sandbox_id=source.id, count=count)
                if isinstance(source, Sandbox)
                else pb.ForkRequest.Want(node_id=source.id, count=count)
                for source, count in wants.items()
            ],
            scratch=scratch,
            labels=labels or {},
            lease_ns=ns(lease),
            limits=_wire.limits_message(limits),
            idempotency_key=idempotency_key or new_key(),
            min_ready=min_ready,
            replace_failed=replace_failed,
            seed=seed,
            same_seed=same_seed,
            replay=replay,
            secret_env=secret_env or {},
        )
        # The key makes a repetition give the same children: those that came already are passed over.
        seen: set[tuple[int, int]] = set()
        stream = self._caller.stream("Fork", request, timeout=deadline, on_restart=lambda: None)
        with contextlib.closing(stream):
            for result in stream:
                place = (int(result.want), int(result.child))
                if place in seen:
                    continue
                seen.add(place)
                if result.HasField("sandbox"):
                    child = Sandbox(self, result.sandbox, owned=True)
                    child.replayed = _wire.replayed(result.replayed)
                    yield (*place, child)
                else:
                    yield (*place, errors.fork_error(result, sources[place[0]].id))

    def annotate(self, notes: Mapping[Node | str, Annotation]) -> None:
        """Annotates many nodes in one transaction; see `Node.annotate`.

        Args:
            notes: For each node or its id, `boxwood.annotation(reward=1.0, ...)`.
        """
        self._caller.unary(
            "Annotate",
            pb.AnnotateRequest(
                annotations=[_wire.annotation_message(_id(node), note) for node, note in notes.items()],
                idempotency_key=new_key(),
            ),
        )

    def backup(
        self, values: Mapping[Node | str, float], *, rule: Rule = "mean", discount: float = 1.0
    ) -> int:
        """Carries leaves' values up their paths, in one transaction.

        Args:
            values: A value for each leaf or its id.
            rule: On each node of a path, with visits += 1: "sum" adds v, "mean" keeps the mean of
                all v seen, "max" the greatest, "discounted" adds v * discount^(distance from the leaf).
            discount: For "discounted".

        Returns:
            How many nodes changed.
        """
        rules = {
            "sum": pb.BackupRequest.SUM,
            "mean": pb.BackupRequest.MEAN,
            "max": pb.BackupRequest.MAX,
            "discounted": pb.BackupRequest.DISCOUNTED,
        }
        if rule not in rules:
            raise errors.invalid(f"rule must be one of {', '.join(rules)}, not {rule!r}")
        reply = self._caller.unary(
            "Backup",
            pb.BackupRequest(
                items=[pb.BackupRequest.Item(node_id=_id(node), value=v) for node, v in values.items()],
                rule=rules[rule],
                discount=discount,
                idempotency_key=new_key(),
            ),
        )
        return int(reply.nodes_changed)

    def wait_captured(self, wanted: Sequence[Node | str], *, timeout: float | None = None) -> list[Node]:
        """Waits until each node is captured or withheld, and reads them again, in order.

        Args:
            wanted: Nodes or their ids.
            timeout: Seconds; the client's timeout if None.

        Raises:
            DeadlineExceeded: It took longer.
        """
        reply = self._caller.unary(
            "WaitCaptured", pb.WaitCapturedRequest(node_ids=[_id(node) for node in wanted]), timeout=timeout
        )
        by_id = {m.id: nodes.from_message(self, m) for m in reply.nodes}
        return [by_id[_id(node)] for node in wanted]

    def tables(self) -> list[Table]:
        """The statistics tables there are."""
        reply = self._caller.unary("ListTables", pb.ListTablesRequest())
        return [_wire.table(m) for m in reply.tables]

    @overload
    def stats(
        self,
        table: str,
        *,
        tree: Tree | str | None = None,
        since: datetime.datetime | None = None,
        until: datetime.datetime | None = None,
        verdicts: Iterable[str] = (),
        to: Literal["arrow"] = "arrow",
    ) -> pyarrow.Table: ...

    @overload
    def stats(
        self,
        table: str,
        *,
        tree: Tree | str | None = None,
        since: datetime.datetime | None = None,
        until: datetime.datetime | None = None,
        verdicts: Iterable[str] = (),
        to: Literal["polars"],
    ) -> polars.DataFrame: ...

    @overload
    def stats(
        self,
        table: str,
        *,
        tree: Tree | str | None = None,
        since: datetime.datetime | None = None,
        until: datetime.datetime | None = None,
        verdicts: Iterable[str] = (),
        to: Literal["pandas"],
    ) -> pandas.DataFrame: ...

    def stats(
        self,
        table: str,
        *,
        tree: Tree | str | None = None,
        since: datetime.datetime | None = None,
        until: datetime.datetime | None = None,
        verdicts: Iterable[str] = (),
        to: _stats.Form = "arrow",
    ) -> _stats.Frame:
        """Reads a statistics table; `boxwood.stats` has what one asks of them first.

        Args:
            table: Its name, one of `tables()`.
            tree: Only rows of this tree.
            since: Only rows from this time on: their ``started_at``, or ``at``. It names its
                time zone.
            until: Only rows before this time.
            verdicts: Only rows with one of these: "none", "files", "process", "both".
            to: What to make of it: "arrow" a `pyarrow.Table`, "polars" a `polars.DataFrame`
                (which needs no pyarrow), "pandas" a `pandas.DataFrame`.

        Raises:
            InvalidArgument: The table has no such column, or a time names no zone.
            NotFound: There is no such table.
            Unsupported: The library is missing.
        """
        _stats.check(to)
        chunks = self.stats_chunks(table, tree=tree, since=since, until=until, verdicts=verdicts)
        return consume(chunks, lambda chunks: _stats.table(chunks, to))

    def stats_reader(
        self,
        table: str,
        *,
        tree: Tree | str | None = None,
        since: datetime.datetime | None = None,
        until: datetime.datetime | None = None,
        verdicts: Iterable[str] = (),
    ) -> pyarrow.RecordBatchReader:
        """As `stats`, batch by batch as they come."""
        _stats.arrow()
        return reader(self.stats_chunks(table, tree=tree, since=since, until=until, verdicts=verdicts))

    def stats_chunks(
        self,
        table: str,
        *,
        tree: Tree | str | None = None,
        since: datetime.datetime | None = None,
        until: datetime.datetime | None = None,
        verdicts: Iterable[str] = (),
    ) -> Iterator[bytes]:
        """As `stats`, as chunks of bytes that together are one Arrow IPC stream; needs no pyarrow."""
        request = pb.ExportStatsRequest(
            table=table,
            tree_id=tree.id if isinstance(tree, Tree) else tree or "",
            since=_wire.moment(since),
            until=_wire.moment(until),
            verdicts=list(verdicts),
        )
        stream = self._caller.stream("ExportStats", request, timeout=3600.0)
        with contextlib.closing(stream):
            for message in stream:
                yield message.data

    def _list_nodes(self, request: pb.ListNodesRequest) -> Iterator[Node]:
        stream = self._caller.stream("ListNodes", request, timeout=3600.0)
        with contextlib.closing(stream):
            for message in stream:
                yield nodes.from_message(self, message)

    def _payload(self, node_id: str) -> bytes:
        reply = self._caller.unary("GetPayload", pb.GetPayloadRequest(node_id=node_id))
        return bytes(reply.payload)

    def _evaluate(self, node_id: str, grader: Grader, key: str | None) -> Evaluation:
        reply = self._caller.unary(
            "Evaluate", grading.request(node_id, grader, key), timeout=grader.timeout + 2 * MARGIN
        )
        return grading.evaluation(reply)

    def _prune(self, node_id: str, keep_node: bool, release_sandboxes: bool, states_only: bool) -> Pruned:
        reply = self._caller.unary(
            "Prune",
            pb.PruneRequest(
                node_id=node_id,
                keep_node=keep_node,
                release_sandboxes=release_sandboxes,
                states_only=states_only,
                idempotency_key=new_key(),
            ),
        )
        return Pruned(reply.nodes, reply.checkpoints, reply.freed_bytes)

    def _pin(self, node_ids: list[str], pin: bool) -> None:
        if pin:
            self._caller.unary("Pin", pb.PinRequest(node_ids=node_ids))
        else:
            self._caller.unary("Unpin", pb.UnpinRequest(node_ids=node_ids))


def _release(sandboxes: Iterable[Sandbox]) -> pb.ReleaseRequest:
    return pb.ReleaseRequest(sandbox_ids=[s.id for s in sandboxes], idempotency_key=new_key())


def _id(node: Node | str) -> str:
    return node if isinstance(node, str) else node.id


def _setup_step(step: SetupStep) -> pb.SetupStep:
    if isinstance(step, str):
        return pb.SetupStep(command=step)
    file = step if isinstance(step, File) else File(*step)
    return pb.SetupStep(file=pb.FileToWrite(path=file.path, content=file.content, mode=file.mode))
