"""What the asyncio face does in its own way: calls over grpc.aio, and the few acts that wait.

Its twin is `boxwood._face`. Everything else of this package is the source of the
blocking face, which scripts/gen-sync.py writes: the same code without `async` and
`await`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import sys
import weakref
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Generator,
    Iterator,
)
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from .. import errors, stats
from .._channel import QUIET, Attempts, credentials, options
from .._proto import boxwood_pb2 as pb
from .._proto import boxwood_pb2_grpc

if TYPE_CHECKING:
    import pyarrow

T = TypeVar("T")
P = ParamSpec("P")

# Who has channels in this process, and whether a fork found one: grpc's asyncio side
# can't be used in such a child, where it would hang.
_callers: weakref.WeakSet[Caller] = weakref.WeakSet()
_broken_by_fork = False


def _after_fork() -> None:
    global _broken_by_fork
    _broken_by_fork = _broken_by_fork or any(caller.connected for caller in list(_callers))
    _callers.clear()


os.register_at_fork(after_in_child=_after_fork)


class Connection:
    """One loop's channel and stubs."""

    def __init__(self, target: str) -> None:
        shown = credentials(target)
        self.channel = (
            grpc.aio.secure_channel(target, shown, options=options(target))
            if shown
            else grpc.aio.insecure_channel(target, options=options(target))
        )
        self.stub: Any = boxwood_pb2_grpc.BoxwoodStub(self.channel)
        self.was_connected = False
        self._single: dict[str, Any] = {}

    def single(self, method: str, request: Message) -> Any:
        """A stream method whose answer is known to be one TurnEvent, as a unary callable."""
        if method not in self._single:
            self._single[method] = self.channel.unary_unary(
                f"/boxwood.v1.Boxwood/{method}",
                request_serializer=type(request).SerializeToString,
                response_deserializer=pb.TurnEvent.FromString,
            )
        return self._single[method]


class Caller:
    """Makes calls to one daemon.

    A channel belongs to the process and the loop that made it: a copy in another
    process, and another loop, make their own at their first call.
    """

    def __init__(self, target: str, timeout: float, run: str = "") -> None:
        self.target = target
        self.timeout = timeout
        self.run = run  # "name/attempt"
        self.closed = False
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Connection] = (
            weakref.WeakKeyDictionary()
        )
        self._cleaning: set[asyncio.Task[Any]] = set()

    def __getstate__(self) -> dict[str, Any]:
        return {"target": self.target, "timeout": self.timeout, "run": self.run, "closed": self.closed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def _attempts(self, method: str, timeout: float | None, retry: bool) -> Attempts:
        return Attempts(self.target, method, self.timeout if timeout is None else timeout, retry, self.run)

    @property
    def connected(self) -> bool:
        """Whether there is a channel, whichever process made it."""
        return bool(self._by_loop)

    def is_open(self) -> bool:
        """Whether this process has a channel."""
        return self._pid == os.getpid() and self.connected

    async def close(self) -> None:
        """Closes this process's channels; calls after that are refused."""
        self.closed = True
        here = asyncio.get_running_loop()
        for loop, connection in self._take_all():
            if loop is here:
                await connection.channel.close()
            elif loop.is_running():
                asyncio.run_coroutine_threadsafe(connection.channel.close(), loop)

    def abandon(self) -> None:
        """Refuses calls from now on and leaves the channels to the collector: nothing can be awaited here."""
        self.closed = True
        for loop, connection in self._take_all():
            if loop.is_running():
                loop.call_soon_threadsafe(loop.create_task, connection.channel.close())

    def _take_all(self) -> list[tuple[asyncio.AbstractEventLoop, Connection]]:
        mine = list(self._by_loop.items()) if self._pid == os.getpid() else []
        self._by_loop.clear()
        return [(loop, connection) for loop, connection in mine if not loop.is_closed()]

    async def unary(
        self, method: str, request: Any, *, timeout: float | None = None, retry: bool = True
    ) -> Any:
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
                reply = await getattr(connection.stub, method)(sent, **attempts.next())
            except grpc.RpcError as failure:
                await self._wait(attempts, connection, failure)
            except asyncio.CancelledError:
                self._refuse_if_closed()
                raise
            else:
                connection.was_connected = True
                return reply

    async def only_event(
        self, method: str, request: Any, *, timeout: float | None = None, retry: bool = True
    ) -> pb.TurnEvent:
        """Calls a method that streams TurnEvents with a request that asks for the result only."""
        attempts = self._attempts(method, timeout, retry)
        while True:
            connection = self._connection()
            try:
                event: pb.TurnEvent = await connection.single(method, request)(request, **attempts.next())
            except grpc.RpcError as failure:
                await self._wait(attempts, connection, failure)
            except asyncio.CancelledError:
                self._refuse_if_closed()
                raise
            else:
                connection.was_connected = True
                return event

    async def stream(
        self,
        method: str,
        request: Any,
        *,
        timeout: float | None = None,
        retry: bool = True,
        on_restart: Callable[[], None] | None = None,
    ) -> AsyncGenerator[Any, None]:
        """Calls a method that answers with a stream; closing the iterator cancels the call.

        A retry yields from the start. Once a message was yielded there is none,
        unless `on_restart` is there to tell the caller that the stream begins anew.
        """
        attempts = self._attempts(method, timeout, retry)
        yielded = False
        while True:
            connection = self._connection()
            call = getattr(connection.stub, method)(request, **attempts.next())
            try:
                async for message in call:
                    connection.was_connected = True
                    yielded = True
                    yield message
                connection.was_connected = True
                return
            except grpc.RpcError as failure:
                await self._wait(attempts, connection, failure, on_restart is not None or not yielded)
                if yielded and on_restart is not None:
                    on_restart()
            except asyncio.CancelledError:
                self._refuse_if_closed()
                raise
            finally:
                call.cancel()

    async def quietly(self, method: str, request: Any) -> Any:
        """Makes a call that cleans up behind an exception: briefly, and None if it fails.

        It is made even if the task that waits for it is cancelled once more.
        """
        task = asyncio.ensure_future(self.unary(method, request, timeout=QUIET))
        self._cleaning.add(task)
        task.add_done_callback(self._cleaning.discard)
        try:
            return await asyncio.shield(task)
        except errors.BoxwoodError:
            return None

    def _connection(self) -> Connection:
        if self.closed:
            raise errors.closed()
        if _broken_by_fork:
            raise errors.unsupported(
                "this process was forked while its parent used boxwood.aio, which grpc doesn't survive",
                'start such processes with "spawn" or "forkserver", or fork before the first call',
            )
        if self._pid != os.getpid():
            self._start()
        loop = asyncio.get_running_loop()
        connection = self._by_loop.get(loop)
        if connection is None:
            for other in list(self._by_loop):
                if other.is_closed():  # what is left of an asyncio.run() that closed nothing
                    self._by_loop.pop(other, None)
            connection = self._by_loop[loop] = Connection(self.target)
            _callers.add(self)
        return connection

    def _refuse_if_closed(self) -> None:
        """Tells a call that closing the client cancelled from one whose task was cancelled."""
        task = asyncio.current_task()
        cancelled = sys.version_info >= (3, 11) and task is not None and task.cancelling() > 0
        if self.closed and not cancelled:
            raise errors.closed() from None

    async def _wait(
        self, attempts: Attempts, connection: Connection, failure: grpc.RpcError, again: bool = True
    ) -> None:
        if self.closed:
            raise errors.closed() from None
        pause, connection.was_connected = attempts.failed(failure, connection.was_connected, again)
        await asyncio.sleep(pause)


async def pieces(items: Iterator[T]) -> AsyncIterator[T]:
    """The items of an iterator that reads files; each is read in a thread."""
    end = object()
    while (item := await asyncio.to_thread(next, items, end)) is not end:
        yield item  # type: ignore[misc]


async def consume(chunks: AsyncIterator[bytes], read: Callable[[Iterator[bytes]], T]) -> T:
    """What `read` makes of a stream, in a thread; it has ended when this returns or is cancelled."""
    loop = asyncio.get_running_loop()
    waiting: asyncio.Future[bytes | None] | None = None
    stopped = False

    async def following() -> bytes | None:
        nonlocal waiting
        if stopped:
            raise asyncio.CancelledError
        waiting = asyncio.ensure_future(anext(chunks, None))
        return await waiting

    def pulled() -> Iterator[bytes]:
        while (chunk := asyncio.run_coroutine_threadsafe(following(), loop).result()) is not None:
            yield chunk

    work = loop.run_in_executor(None, lambda: read(pulled()))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        stopped = True
        if waiting is not None:
            waiting.cancel()
        await asyncio.wait([work])
        work.exception()  # it was told to end, and how it did is of no interest
        raise
    finally:
        if isinstance(chunks, AsyncGenerator):
            await chunks.aclose()


async def reader(chunks: AsyncIterator[bytes]) -> pyarrow.RecordBatchReader:
    """The batches of a stream of Arrow IPC bytes, all of which are there first: reading them can't await."""
    return stats.reader([chunk async for chunk in chunks])


async def settle(value: object) -> None:
    """What a callback returned: awaited, if it can be."""
    if inspect.isawaitable(value):
        await value


class _Entered(Protocol):
    async def __aenter__(self) -> Any: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None: ...


E_co = TypeVar("E_co", bound=_Entered, covariant=True)


class Pending(Coroutine[Any, Any, E_co], Generic[E_co]):
    """What a call will answer: ``await`` it, or enter it at once by ``async with``."""

    def __init__(self, call: Coroutine[Any, Any, E_co]) -> None:
        self._call = call

    def __await__(self) -> Generator[Any, Any, E_co]:
        return self._call.__await__()

    def send(self, value: Any) -> Any:
        """As of any coroutine."""
        return self._call.send(value)

    def throw(self, kind: Any, value: Any = None, where: Any = None) -> Any:
        """As of any coroutine."""
        return self._call.throw(kind if value is None else value)

    def close(self) -> None:
        """As of any coroutine."""
        self._call.close()

    async def __aenter__(self) -> E_co:
        self._entered = await self._call
        await self._entered.__aenter__()
        return self._entered

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        await self._entered.__aexit__(kind, error, where)


def pending(call: Callable[P, Coroutine[Any, Any, E_co]]) -> Callable[P, Pending[E_co]]:
    """Lets the answer of a call be awaited or entered."""

    @functools.wraps(call)
    def made(*args: P.args, **kwargs: P.kwargs) -> Pending[E_co]:
        return Pending(call(*args, **kwargs))

    return made
