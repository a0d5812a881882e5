"""The connection: addresses, one lazy channel a process, deadlines, retries, translated errors.

All that knows grpc lies here; the rest of the package says a method's name, a
request and a time limit. An asyncio face needs this module again over grpc.aio
and nothing else of it.
"""

from __future__ import annotations

import atexit
import errno
import os
import random
import socket
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import grpc

from . import errors
from ._proto import boxwood_pb2 as pb
from ._proto import boxwood_pb2_grpc

DEFAULT_SOCKET = "/run/boxwood/boxwood.sock"
MAX_MESSAGE = 16 << 20

# How long a call that lost its daemon tries again: a restart of the daemon takes
# well under this, and a batch should not hang on one that stays away.
RETRY_FOR = 10.0

T = TypeVar("T")


def resolve(address: str | None) -> str:
    """Turns what a person writes into a grpc target.

    Args:
        address: A socket's path (also ``unix:PATH``), or ``host:port``. None means
            ``$BOXWOOD_ADDRESS``, else ``/run/boxwood/boxwood.sock``.
    """
    address = address or os.environ.get("BOXWOOD_ADDRESS") or DEFAULT_SOCKET
    if address.startswith("unix:"):
        path = address[len("unix:") :]
        return "unix:" + ("/" + path.lstrip("/") if path.startswith("//") else os.path.abspath(path))
    if "/" in address or ":" not in address:
        return "unix:" + os.path.abspath(os.path.expanduser(address))
    return address


def new_key() -> str:
    """A fresh idempotency key, or a request's id."""
    return os.urandom(16).hex()


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
        options: list[tuple[str, Any]] = [
            ("grpc.max_send_message_length", MAX_MESSAGE),
            ("grpc.max_receive_message_length", MAX_MESSAGE),
            # A restarted daemon is found again at once, and not after grpc's seconds.
            ("grpc.initial_reconnect_backoff_ms", 50),
            ("grpc.min_reconnect_backoff_ms", 50),
            ("grpc.max_reconnect_backoff_ms", 500),
            ("grpc.enable_retries", 0),
            # Clients of one process don't share a connection: closing one is its own affair.
            ("grpc.use_local_subchannel_pool", 1),
            # No pings to estimate a bandwidth that a socket of this host doesn't limit: each
            # wakes threads on both sides in the middle of a turn.
            ("grpc.http2.bdp_probe", 0),
            ("grpc.http2.lookahead_bytes", 1 << 20),
        ]
        if target.startswith("unix:"):
            options.append(("grpc.default_authority", "localhost"))
        self.channel = grpc.insecure_channel(target, options=options)
        self.stub = boxwood_pb2_grpc.BoxwoodStub(self.channel)
        self.was_connected = False
        self._single: dict[str, Any] = {}

    def single(self, method: str, request: Any) -> Any:
        """A stream method whose answer is known to be one TurnEvent, as a unary callable.

        The two are the same on the wire, but grpc reads a stream in a thread of its own
        and in three steps: that costs about as much as the whole rest of a call.
        """
        call = self._single.get(method)
        if call is None:
            call = self._single[method] = self.channel.unary_unary(
                f"/boxwood.v1.Boxwood/{method}",
                request_serializer=type(request).SerializeToString,
                response_deserializer=pb.TurnEvent.FromString,
            )
        return call


class Caller:
    """Makes calls to one daemon.

    The channel is made at the first call and kept by process id: a forked or
    unpickled copy makes its own. Channels inherited over fork() are left alone,
    since closing one would need threads that exist in the parent only.
    """

    def __init__(self, target: str, timeout: float) -> None:
        self.target = target
        self.timeout = timeout
        self.closed = False
        self._by_pid: dict[int, Connection] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"target": self.target, "timeout": self.timeout, "closed": self.closed, "_by_pid": {}}

    def is_open(self) -> bool:
        """Whether this process has a channel."""
        return os.getpid() in self._by_pid

    def close(self) -> None:
        """Closes this process's channel; calls after that are refused."""
        self.closed = True
        self.disconnect()

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

        def attempt(call: Any, seconds: float, metadata: Any) -> Any:
            sent = request() if callable(request) else request
            return call(sent, timeout=seconds, metadata=metadata)

        return self._attempts(lambda connection: getattr(connection.stub, method), attempt, timeout, retry)

    def only_event(
        self, method: str, request: Any, *, timeout: float | None = None, retry: bool = True
    ) -> pb.TurnEvent:
        """Calls a method that streams TurnEvents with a request that asks for the result only."""

        def attempt(call: Any, seconds: float, metadata: Any) -> pb.TurnEvent:
            event: pb.TurnEvent = call(request, timeout=seconds, metadata=metadata)
            return event

        return self._attempts(lambda connection: connection.single(method, request), attempt, timeout, retry)

    def stream(
        self,
        method: str,
        request: Any,
        *,
        timeout: float | None = None,
        retry: bool = True,
        on_restart: Callable[[], None] | None = None,
    ) -> Iterator[Any]:
        """Calls a method that answers with a stream; closing the iterator cancels the call.

        A retry yields from the start. Once a message was yielded there is none,
        unless `on_restart` is there to tell the caller that the stream begins anew.
        """
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        until = time.monotonic() + RETRY_FOR
        number = 0
        yielded = False
        while True:
            request_id = new_key()
            connection = self._connection()
            left = max(deadline - time.monotonic(), 0.001)
            call = getattr(connection.stub, method)(
                request, timeout=left, metadata=(("x-request-id", request_id),)
            )
            try:
                for message in call:
                    connection.was_connected = True
                    yielded = True
                    yield message
                connection.was_connected = True
                return
            except grpc.RpcError as failure:
                number += 1
                again = retry and (on_restart is not None or not yielded)
                self._give_up_or_wait(connection, failure, request_id, again, number, min(until, deadline))
                if yielded and on_restart is not None:
                    on_restart()
            finally:
                call.cancel()

    def _attempts(
        self,
        callable_of: Callable[[Connection], Any],
        attempt: Callable[[Any, float, Any], T],
        timeout: float | None,
        retry: bool,
    ) -> T:
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        until = time.monotonic() + RETRY_FOR
        number = 0
        while True:
            request_id = new_key()
            connection = self._connection()
            left = max(deadline - time.monotonic(), 0.001)
            try:
                reply = attempt(callable_of(connection), left, (("x-request-id", request_id),))
            except grpc.RpcError as failure:
                number += 1
                self._give_up_or_wait(connection, failure, request_id, retry, number, min(until, deadline))
            else:
                connection.was_connected = True
                return reply

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

    def _give_up_or_wait(
        self,
        connection: Connection,
        failure: grpc.RpcError,
        request_id: str,
        retry: bool,
        number: int,
        until: float,
    ) -> None:
        """Raises the translated failure, or returns when it is time for another attempt."""
        if self.closed:
            raise errors.closed() from None
        error = errors.from_rpc(failure, request_id)
        if error.reason:
            connection.was_connected = True
        if error.code != "UNAVAILABLE":
            raise error from None
        if not error.reason:  # grpc's own: the daemon never said a word
            if not connection.was_connected:
                raise self._no_connection(request_id, error.message) from None
            error.hint = error.hint or "the daemon went away in the call: see its log"
        pause = error.retry_after or min(0.05 * 2 ** (number - 1), 1.0) * random.uniform(0.7, 1.3)
        if not retry or time.monotonic() + pause > until:
            raise error from None
        time.sleep(pause)

    def _no_connection(self, request_id: str, grpc_says: str) -> errors.BoxwoodError:
        """Says in one line what stands between this process and a daemon."""
        if not self.target.startswith("unix:"):
            return errors.connection_failed(
                f"no Boxwood daemon answers at {self.target}: {grpc_says}",
                "check the address and that `boxwood serve` listens on TCP there",
                request_id,
            )
        path = self.target[len("unix:") :]
        message, hint = f"no Boxwood daemon answers on {path}: {grpc_says}", "see the daemon's log"
        try:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(2)
                probe.connect(path)
        except OSError as problem:
            if problem.errno in (errno.EACCES, errno.EPERM):
                message = f"no permission to open the Boxwood socket {path}"
                hint = "join the socket's group, or have it mounted with a mode that lets you in"
            elif problem.errno == errno.ENOENT:
                message = f"there is no Boxwood socket at {path}"
                hint = (
                    "start one with `boxwood serve`, or name another with connect(PATH) or $BOXWOOD_ADDRESS"
                )
            elif problem.errno == errno.ECONNREFUSED:
                message = f"nobody listens on the Boxwood socket {path}"
                hint = "the daemon has ended: start it again with `boxwood serve`"
            else:
                message = f"can't open the Boxwood socket {path}: {problem}"
        return errors.connection_failed(message, hint, request_id)
