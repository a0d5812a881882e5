# Written by scripts/gen-sync.py from aio/sandbox.py: edit that.
"""Sandboxes: live, isolated process trees that stand at a node."""

from __future__ import annotations

import contextlib
import os
import posixpath
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from . import _tar, _wire, errors
from . import node as nodes
from ._channel import new_key
from ._command import (
    LONGEST_TURN,
    MARGIN,
    PIECE,
    Ack,
    Command,
    OnOutput,
    ack_message,
    as_bytes,
    command_message,
    node_message,
    ns,
)
from ._face import consume, pieces
from ._proto import boxwood_pb2 as pb
from .errors import BoxwoodError, CommandFailed
from .session import Session
from .turn import OpenTurn, Relay, Turn, last_event

if TYPE_CHECKING:
    from .client import Client
    from .fork import Children
    from .node import Node
    from .records import ReplayedTurn


def _known_to_daemon(error: BaseException) -> bool:
    """Whether the daemon itself failed the call; a deadline of this side it may not know."""
    return isinstance(error, BoxwoodError) and not (
        isinstance(error, errors.DeadlineExceeded) and not error.reason
    )


class _Cancelling:
    """A block in which whatever this side breaks off ends on the other side as well."""

    __slots__ = ("_sandbox",)

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if error is not None and not _known_to_daemon(error):
            self._sandbox._cancel_quietly()


class Sandbox:
    """A live sandbox. Its head is the node that it stands at.

    As a context manager it is released at the end. A handle that this process made
    (by `create_tree` or `fork`) and that is collected without a release warns
    (ResourceWarning); the sandbox itself ends with its lease. Pickling a handle
    hands that duty on to who unpickles it.

    Attributes:
        id: Its id.
        tree_id: Its tree.
        head_id: The node it stands at, as far as this handle knows.
        generation: New with every fork and rollback.
        scratch: Whether its turns write no nodes.
        lease_until: When it ends without a call, ns since the epoch.
        labels: Its labels.
        hostname: Its host name.
        released: Whether it was released through this handle.
        replayed: The turns that were run again to make it, by a fork with `replay`.
    """

    id: str
    tree_id: str
    head_id: str
    generation: str
    scratch: bool
    lease_until: int
    labels: Mapping[str, str]
    hostname: str
    replayed: tuple[ReplayedTurn, ...] = ()

    def __init__(self, client: Client, message: pb.Sandbox, *, owned: bool) -> None:
        self._client = client
        self._owned = owned
        self.released = False
        self._take(message)
        if owned:
            client._owned.add(self)

    def _take(self, m: pb.Sandbox) -> None:
        self.id, self.tree_id, self.head_id = m.id, m.tree_id, m.head_id
        self.generation, self.scratch = m.generation, m.scratch
        self.lease_until, self.labels, self.hostname = m.lease_until, dict(m.labels), m.hostname

    def __repr__(self) -> str:
        state = ", released" if self.released else ", scratch" if self.scratch else ""
        return f"<Sandbox {self.id} at {self.head_id}{state}>"

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.release()

    def __getstate__(self) -> dict[str, Any]:
        self._owned = False
        return dict(self.__dict__)

    def __del__(self) -> None:
        if getattr(self, "_owned", False) and not self.released:
            warnings.warn(
                f"{self!r} was never released; it lives until its lease ends",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    @property
    def head(self) -> Node:
        """The node that it stands at, read now."""
        return self._client.node(self.head_id)

    def run(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        secret_env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: str | bytes | None = None,
        timeout: float | None = None,
        on_stdout: OnOutput | None = None,
        on_stderr: OnOutput | None = None,
        ack: Ack = "recorded",
        labels: Mapping[str, str] | None = None,
        policy_version: str = "",
        payload: bytes = b"",
        output_limit: int = 0,
        busy_wait: float = 0.0,
        check: bool = False,
        idempotency_key: str | None = None,
    ) -> Turn:
        r"""Runs one command as one turn.

        Args:
            command: A string for ``bash -lc``, or the arguments as a list.
            cwd: Working folder; the tree's default if None.
            env: Environment beside the tree's default.
            secret_env: Environment whose values (8 bytes to 32 KiB each) are recorded nowhere.
                Where output, effects and the like of this tree's turns would show one, they
                have ``[secret NAME]``; a command that names one is refused. The turn can't
                be run again by a fork with `replay`.
            user: A name, "uid" or "uid:gid" of the sandbox.
            stdin: Its input, up to 4 MiB.
            timeout: Seconds until all that it started is killed (`Turn.timed_out`); the
                tree's default if None.
            on_stdout: Gets output as it comes. If it raises, the turn is cancelled.
            on_stderr: Gets error output as it comes.
            ack: "recorded" returns once the node is durable and leaves the capture to the
                time until the next turn; "captured" waits for it.
            labels: The node's labels.
            policy_version: Which policy acted.
            payload: The node's payload, up to 1 MiB.
            output_limit: Bytes kept of each stream, half head and half tail; 0: 64 KiB.
            busy_wait: Seconds to wait while another turn runs here.
            check: Raise `CommandFailed` unless it exits with 0 in time.
            idempotency_key: Made up if None. Repeating a call with the same key answers
                from the log and runs nothing twice, also after a restart of either side.

        Returns:
            The turn, its node durable.

        Raises:
            Busy: Another turn runs here.
            CommandFailed: Only with `check`.
            KeyboardInterrupt: Ctrl-C; the turn was cancelled first.
        """
        request = pb.RunTurnRequest(
            sandbox_id=self.id,
            command=command_message(command, cwd, env, user, stdin, timeout, output_limit, secret_env),
            ack=ack_message(ack),
            idempotency_key=idempotency_key or new_key(),
            node=node_message(labels, policy_version, payload),
            busy_wait_ns=round(busy_wait * 1e9),
            result_only=on_stdout is None and on_stderr is None,
        )
        limit = LONGEST_TURN if timeout is None else timeout + busy_wait + MARGIN
        with self._cancelling():
            event = last_event(
                self._client._caller, "RunTurn", request, Relay(on_stdout, on_stderr), timeout=limit
            )
        return self._turn(event.result, check)

    def _turn(self, result: pb.TurnResult, check: bool = False) -> Turn:
        turn = Turn(
            nodes.from_message(self._client, result.node),
            _wire.timings(result.timings),
            result.sandbox_lost,
            result.session_ended,
        )
        if turn.node.id:
            self.head_id = turn.node.id
        if turn.sandbox_lost:
            self.released = True
        m = result.node
        if check and (m.turn_status != pb.TURN_STATUS_COMPLETED or m.observation.exit_code):
            raise CommandFailed(turn)
        return turn

    def _cancelling(self) -> _Cancelling:
        return _Cancelling(self)

    def _cancel_quietly(self) -> None:
        self._client._caller.quietly("CancelTurn", pb.CancelTurnRequest(sandbox_id=self.id))

    @contextlib.contextmanager
    def turn(
        self,
        *,
        timeout: float | None = None,
        ack: Ack = "recorded",
        labels: Mapping[str, str] | None = None,
        policy_version: str = "",
        payload: bytes = b"",
        busy_wait: float = 0.0,
    ) -> Generator[OpenTurn, None]:
        """Several commands and transfers as one turn.

        ``with sandbox.turn() as t:`` gives an `OpenTurn`; after the block, `t.node` and
        `t.result` are there. An exception in the block cancels the turn.

        Args:
            timeout: Seconds for the whole turn.
            ack: As for `run`.
            labels: The node's labels.
            policy_version: Which policy acted.
            payload: The node's payload, up to 1 MiB.
            busy_wait: Seconds to wait while another turn runs here.
        """
        end = pb.EndTurnRequest(
            node=pb.NodeInput(labels=labels or {}, policy_version=policy_version, payload=payload),
            ack=ack_message(ack),
            idempotency_key=new_key(),
        )
        caller = self._client._caller
        begin = pb.BeginTurnRequest(
            sandbox_id=self.id,
            deadline_ns=ns(timeout),
            idempotency_key=new_key(),
            busy_wait_ns=round(busy_wait * 1e9),
        )
        try:
            begun = caller.unary("BeginTurn", begin, timeout=caller.timeout + busy_wait + MARGIN)
        except BaseException as error:
            if not _known_to_daemon(error):
                # Whether it was begun only its key can tell; a turn that nobody ends would hold the sandbox.
                begun = caller.quietly("BeginTurn", begin)
                if begun is not None:
                    self._cancel_quietly()
                    end.turn_id = begun.turn_id
                    caller.quietly("EndTurn", end)
            raise
        opened = OpenTurn(self, begun.turn_id)
        end.turn_id = begun.turn_id
        try:
            yield opened
        except BaseException:
            opened._over = True
            self._cancel_quietly()
            # A cancelled turn is ended like any: what it did until then is a node.
            result = caller.quietly("EndTurn", end)
            if result is not None:
                self._turn(result)
            raise
        opened._over = True
        with self._cancelling():
            opened._result = self._turn(caller.unary("EndTurn", end, timeout=caller.timeout + MARGIN))

    def read_file(self, path: str) -> bytes:
        """Reads a whole file; it is no turn and changes nothing.

        Raises:
            NotFound: There is none.
        """
        return self._read_file(path, "")

    def write_file(self, path: str, content: str | bytes, *, mode: int = 0o644, append: bool = False) -> Turn:
        """Writes a file, as a turn of its own.

        Args:
            path: Where; its folder must exist.
            content: What. Beyond 4 MiB it goes as an upload, which can't append.
            mode: Permission bits, also where the file was there already.
            append: Add to what is there.
        """
        return self._made(self._write_file(path, content, mode, append, ""))

    def upload(self, local: str | os.PathLike[str], remote: str, *, timeout: float = 3600.0) -> Turn:
        """Copies a local file or folder into the sandbox, as a turn of its own.

        Streamed, so size doesn't matter. Owners are left out, links are kept as links.

        Args:
            local: A file, or a folder whose content is copied.
            remote: For a folder: the folder to copy into, made if missing. For a file: its
                new path, or with a slash at its end the folder to put it in.
            timeout: Seconds.
        """
        return self._made(self._upload(local, remote, "", timeout))

    def download(
        self,
        remote: str,
        local: str | os.PathLike[str],
        *,
        unsafe: Literal["raise", "skip"] = "raise",
        timeout: float = 3600.0,
    ) -> list[str]:
        """Copies a file or a folder's content out of the sandbox; it is no turn.

        What the sandbox sends is not trusted: entries that would reach outside of
        `local` (absolute or climbing links and paths) and devices are refused, and
        nothing is put in place before all of it has arrived.

        Args:
            remote: A file or folder.
            local: Where a file goes (its new path, or an existing folder), or the folder that
                a folder's content goes into.
            unsafe: "raise" refuses the whole, "skip" leaves such entries out.
            timeout: Seconds.

        Returns:
            The entries left out.

        Raises:
            UnsafeEntry: An entry was refused.
        """
        return self._download(remote, local, "", unsafe, timeout)

    def sessions(self) -> list[Session]:
        """Its sessions: shells that live on between turns."""
        reply = self._client._caller.unary("ListSessions", pb.ListSessionsRequest(sandbox_id=self.id))
        return [Session(self, message) for message in reply.sessions]

    def session(
        self,
        name: str = "main",
        *,
        tty: bool = False,
        rows: int = 24,
        cols: int = 80,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        secret_env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> Session:
        """The session of a name; one that isn't there is opened, which is a turn.

        Args:
            name: 1 to 63 printable characters without spaces and slashes.
            tty: Whether its output is a terminal; else a pipe each.
            rows: Of the terminal.
            cols: Of the terminal.
            cwd: The folder that it starts in; the tree's default if None.
            env: Environment beside the tree's default.
            secret_env: As for `run`. The session's forks have it, too.
            user: A name, "uid" or "uid:gid" of the sandbox.

        All but the name are for a session that is opened.
        """
        for one in self.sessions():
            if one.name == name:
                return one
        reply = self._client._caller.unary(
            "OpenSession",
            pb.OpenSessionRequest(
                sandbox_id=self.id,
                name=name,
                tty=tty,
                rows=rows,
                cols=cols,
                cwd=cwd or "",
                user=user or "",
                env=dict(env or {}),
                secret_env=dict(secret_env or {}),
                idempotency_key=new_key(),
            ),
            timeout=self._client._caller.timeout + MARGIN,
        )
        self._made(reply.result if reply.HasField("result") else None)
        return Session(self, reply.session)

    def cancel(self) -> bool:
        """Kills all that the running turn started; its node is marked cancelled.

        Returns:
            Whether one was running.
        """
        reply = self._client._caller.unary("CancelTurn", pb.CancelTurnRequest(sandbox_id=self.id))
        return bool(reply.was_running)

    def fork(self, n: int = 1, **options: Any) -> Children:
        """Forks the node that it stands at; see `Node.fork` for the options."""
        return self._client._fork_one(self, n, **options)

    def rollback(self, node: Node | str) -> Sandbox:
        """Puts it back to a node, in place: same id, new generation.

        Args:
            node: A node of its tree, or its id.

        Returns:
            This sandbox.
        """
        reply = self._client._caller.unary(
            "Rollback",
            pb.RollbackRequest(
                sandbox_id=self.id,
                node_id=node if isinstance(node, str) else node.id,
                idempotency_key=new_key(),
            ),
            timeout=self._client._caller.timeout + MARGIN,
        )
        self._take(reply.sandbox)
        return self

    def renew(self, lease: float | None = None) -> None:
        """Lets it live on.

        Args:
            lease: Seconds from now without a call; its lease as before if None.
        """
        reply = self._client._caller.unary(
            "Renew", pb.RenewRequest(sandbox_ids=[self.id], lease_ns=ns(lease))
        )
        for message in reply.sandboxes:
            self._take(message)

    def release(self) -> None:
        """Ends it; its nodes stay. Again: does nothing."""
        if not self.released:
            self._client.release([self])

    def _made(self, result: pb.TurnResult | None) -> Turn:
        if result is None:
            raise errors.from_detail("INTERNAL", "the daemon made no turn of the transfer", None)
        return self._turn(result)

    def _read_file(self, path: str, turn_id: str) -> bytes:
        content = bytearray()
        while True:
            reply = self._client._caller.unary(
                "ReadFile",
                pb.ReadFileRequest(
                    sandbox_id=self.id, path=path, offset=len(content), limit=PIECE, turn_id=turn_id
                ),
            )
            content += reply.content
            if not reply.content or len(content) >= reply.size:
                return bytes(content)

    def _write_file(
        self, path: str, content: str | bytes, mode: int, append: bool, turn_id: str
    ) -> pb.TurnResult | None:
        data = as_bytes(content)
        if len(data) > PIECE:
            if append:
                raise errors.invalid("append takes up to 4 MiB", "append in pieces")
            folder, name = posixpath.split(path)
            return self._send(lambda: _tar.pack_bytes(name, data, mode), folder or ".", turn_id, 3600.0)
        reply = self._client._caller.unary(
            "WriteFile",
            pb.WriteFileRequest(
                sandbox_id=self.id,
                path=path,
                content=data,
                mode=mode,
                append=append,
                turn_id=turn_id,
                idempotency_key=new_key(),
            ),
            # Inside a turn an appended piece must not be sent twice; as a turn of its own the key guards it.
            retry=not (append and turn_id),
        )
        return reply.result if reply.HasField("result") else None

    def _upload(
        self, local: str | os.PathLike[str], remote: str, turn_id: str, timeout: float
    ) -> pb.TurnResult | None:
        source = Path(local)
        if not source.exists():
            raise errors.invalid(f"there is no {str(source)!r} to upload")
        if source.is_dir():
            return self._send(lambda: _tar.pack(source), remote, turn_id, timeout)
        folder, name = posixpath.split(remote)
        return self._send(lambda: _tar.pack(source, name or source.name), folder or ".", turn_id, timeout)

    def _send(
        self, pack: Callable[[], Iterator[bytes]], folder: str, turn_id: str, timeout: float
    ) -> pb.TurnResult | None:
        start = pb.UploadStart(sandbox_id=self.id, path=folder, turn_id=turn_id, idempotency_key=new_key())
        problem: list[Exception] = []

        def messages() -> Iterator[pb.UploadRequest]:
            yield pb.UploadRequest(start=start)
            try:
                for chunk in pieces(pack()):
                    yield pb.UploadRequest(chunk=chunk)
            except Exception as error:
                problem.append(error)  # grpc would only say that the iterator failed
                raise

        try:
            reply = self._client._caller.unary("Upload", messages, timeout=timeout)
        except BaseException:
            if problem:
                raise problem[0] from None
            raise
        return reply.result if reply.HasField("result") else None

    def _download(
        self,
        remote: str,
        local: str | os.PathLike[str],
        turn_id: str,
        unsafe: Literal["raise", "skip"],
        timeout: float,
    ) -> list[str]:
        stream = self._client._caller.stream(
            "Download", pb.DownloadRequest(sandbox_id=self.id, path=remote, turn_id=turn_id), timeout=timeout
        )
        with contextlib.closing(stream):
            return consume(
                (message.chunk for message in stream),
                lambda chunks: _tar.unpack(chunks, remote, Path(local), unsafe),
            )
