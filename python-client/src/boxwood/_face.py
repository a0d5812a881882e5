"""What the blocking face does in its own way: calls, and the few acts that wait.

Its twin is `boxwood.aio._face`; everything else of this face is generated from
`boxwood.aio` by scripts/gen-sync.py. The channel is grpc's blocking one and no loop
in a thread: a call would be handed over to that thread and back, which costs more
than all else that this package does in a turn.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from google.protobuf.message import Message

from . import errors, stats
from ._channel import QUIET, Attempts, credentials, options
from ._proto import boxwood_pb2 as pb
from ._proto import boxwood_pb2_grpc

if TYPE_CHECKING:
    import pyarrow

T = TypeVar("T")

# Channels still open when the interpreter ends: grpc may hang there when one is
# closed by the garbage collector, or never.
_open: weakref.WeakSet[Caller] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for caller in list(_open):
        caller.disconnect()


class Connection:
    """One process's channel and stubs."""

    def __init__(self, target: str) -> None:
        shown = credentials(target)
        self.channel = (
            grpc.secure_channel(target, shown, options=options(target))
            if shown
            else grpc.insecure_channel(target, options=options(target))
        )
        self.stub: Any = boxwood_pb2_grpc.BoxwoodStub(self.channel)
        self.was_connected = False
        self._single: dict[str, Any] = {}

    def single(self, method: str, request: Message) -> Any:
        """A stream method whose answer is known to be one TurnEvent, as a unary callable.

        The two are the same on the wire, but grpc reads a stream in a thread of its own
        and in three steps: that costs about as much as the whole rest of a call.
        """
        if method not in self._single:
            self._single[method] = self.channel.unary_unary(
                f"/boxwood.v1.Boxwood/{method}",
                request_serializer=type(request).SerializeToString,
                response_deserializer=pb.TurnEvent.FromString,
            )
        return self._single[method]


class Caller:
    """Makes calls to one daemon.

    The channel is made at the first call and kept by process id: a forked or
    unpickled copy makes its own. Channels inherited over fork() are left alone,
    since closing one would need threads that exist in the parent only.
    """

    def __init__(self, target: str, timeout: float, run: str = "") -> None:
        self.target = target
        self.timeout = timeout
        self.run = run  # "name/attempt"
        self.closed = False
        self._by_pid: dict[int, Connection] = {}

    def __getstate__(self) -> dict[str, Any]:
        kept = {"target": self.target, "timeout": self.timeout, "run": self.run, "closed": self.closed}
        return {**kept, "_by_pid": {}}

    def _attempts(self, method: str, timeout: float | None, retry: bool) -> Attempts:
        return Attempts(self.target, method, self.timeout if timeout is None else timeout, retry, self.run)

    def is_open(self) -> bool:
        """Whether this process has a channel."""
        return os.getpid() in self._by_pid

    def close(self) -> None:
        """Closes this process's channel; calls after that are refused."""
        self.closed = True
        self.disconnect()

    def abandon(self) -> None:
        """As `close`, where nobody could wait."""
        self.close()

    def disconnect(self) -> None:
        """Closes this process's channel; the next call makes another."""
        connection = self._by_pid.pop(os.getpid(), None)
        if connection is not None:
            connection.channel.close()

    def unary(self, method: str, request: Any, *, timeout: float | None = None, retry: bool = True) -> Any:
        """Calls a method that answers once.

        Args:
            method: Its name in the service.
            request: The message, or for a client stream a function that makes the
                iterator of messages anew for each attempt.
            timeout: Seconds over all attempts.
            retry: False for what must not be sent twice.
        """
        attempts = self._attempts(method, timeout, retry)
        while True:
            connection = self._connection()
            sent = request() if callable(request) else request
            try:
                reply = getattr(connection.stub, method)(sent, **attempts.next())
            except grpc.RpcError as failure:
                self._wait(attempts, connection, failure)
            else:
                connection.was_connected = True
                return reply

    def only_event(
        self, method: str, request: Any, *, timeout: float | None = None, retry: bool = True
    ) -> pb.TurnEvent:
        """Calls a method that streams TurnEvents with a request that asks for the result only."""
        attempts = self._attempts(method, timeout, retry)
        while True:
            connection = self._connection()
            try:
                event: pb.TurnEvent = connection.single(method, request)(request, **attempts.next())
            except grpc.RpcError as failure:
                self._wait(attempts, connection, failure)
            else:
                connection.was_connected = True
                return event

    def stream(
        self,
        method: str,
        request: Any,
        *,
        timeout: float | None = None,
        retry: bool = True,
        on_restart: Callable[[], None] | None = None,
    ) -> Generator[Any, None, None]:
        """Calls a method that answers with a stream; closing the iterator cancels the call.

        A retry yields from the start. Once a message was yielded there is none,
        unless `on_restart` is there to tell the caller that the stream begins anew.
        """
        attempts = self._attempts(method, timeout, retry)
        yielded = False
        while True:
            connection = self._connection()
            try:
                call = getattr(connection.stub, method)(request, **attempts.next())
            except BaseException:
                self._give_up_on(connection)
                raise
            try:
                for message in call:
                    connection.was_connected = True
                    yielded = True
                    yield message
                connection.was_connected = True
                return
            except grpc.RpcError as failure:
                self._wait(attempts, connection, failure, on_restart is not None or not yielded)
                if yielded and on_restart is not None:
                    on_restart()
            finally:
                call.cancel()

    def quietly(self, method: str, request: Any) -> Any:
        """Makes a call that cleans up behind an exception: briefly, and None if it fails."""
        try:
            return self.unary(method, request, timeout=QUIET)
        except errors.BoxwoodError:
            return None

    def _connection(self) -> Connection:
        if self.closed:
            raise errors.closed()
        pid = os.getpid()
        connection = self._by_pid.get(pid)
        if connection is None:
            # setdefault is atomic: of two threads that come here at once, one wins.
            made = Connection(self.target)
            connection = self._by_pid.setdefault(pid, made)
            _open.add(self)
            if connection is not made:
                made.channel.close()
        return connection

    def _give_up_on(self, connection: Connection) -> None:
        """Drops a channel on which the making of a stream was broken off, as Ctrl-C may do anywhere.

        grpc may have noted the call then and not have started the thread that would end it: no later
        stream of that channel would be answered, and closing it would wait for ever. That wait is
        left to a thread of its own, which holds up nobody's exit.
        """
        if self._by_pid.get(os.getpid()) is connection:
            del self._by_pid[os.getpid()]
        threading.Thread(target=connection.channel.close, daemon=True, name="boxwood-close").start()

    def _wait(
        self, attempts: Attempts, connection: Connection, failure: grpc.RpcError, again: bool = True
    ) -> None:
        if self.closed:
            raise errors.closed() from None
        pause, connection.was_connected = attempts.failed(failure, connection.was_connected, again)
        time.sleep(pause)


def pieces(items: Iterator[T]) -> Iterator[T]:
    """The items of an iterator that reads files."""
    return items


def consume(chunks: Iterator[bytes], read: Callable[[Iterator[bytes]], T]) -> T:
    """What `read` makes of a stream."""
    return read(chunks)


def reader(chunks: Iterator[bytes]) -> pyarrow.RecordBatchReader:
    """The batches of a stream of Arrow IPC bytes, as they come."""
    return stats.reader(chunks)


def settle(value: object) -> None:
    """What a callback returned; nothing here waits for it."""
