"""Exceptions: one class a gRPC code, and beside it whose failure it is.

Every failed call raises a `BoxwoodError`. Its class follows the gRPC code:

===================  =======================  ==========================================
gRPC code            exception                what it means
===================  =======================  ==========================================
INVALID_ARGUMENT     `InvalidArgument`        the request can never work
OUT_OF_RANGE         `InvalidArgument`        the same
NOT_FOUND            `NotFound`               no such node, sandbox, tree, image, file
ALREADY_EXISTS       `AlreadyExists`          made before, and differently
FAILED_PRECONDITION  `FailedPrecondition`     not in this state; the hint says which
..node_withheld      `NodeWithheld`           the node can't be restored exactly
ABORTED              `Busy`                   another turn runs in that sandbox
RESOURCE_EXHAUSTED   `ResourceExhausted`      pool, memory, slots; see `retry_after`
UNAVAILABLE          `Unavailable`            the daemon starts, stops or went away
..no connection      `ConnectionFailed`       no daemon, no socket, no permission
DEADLINE_EXCEEDED    `DeadlineExceeded`       the call's deadline passed
CANCELLED            `Cancelled`              somebody cancelled the call
DATA_LOSS            `DataLoss`               what was saved isn't what is there
UNIMPLEMENTED        `Unsupported`            this host or this daemon can't
PERMISSION_DENIED    `PermissionDenied`       not allowed
UNAUTHENTICATED      `PermissionDenied`       the same
INTERNAL, UNKNOWN    `InternalError`          a defect or a broken host
===================  =======================  ==========================================

and it is an instance of exactly one of these as well, by the origin which the
daemon names (without one, by the code):

- `ClientError`: the request or its caller;
- `InfrastructureError`: the host or the engine. Never a reward of 0: drop the
  rollout from its group instead;
- `AgentError`: what ran in the sandbox.

A command that exits with a status other than 0 is an observation, no exception;
`run(check=True)` turns it into `CommandFailed`. A turn that reached its deadline
is an observation too (`Turn.timed_out`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from ._proto import boxwood_pb2 as pb
from ._proto import status_pb2
from ._version import __version__

if TYPE_CHECKING:
    from .records import Observed

Origin = Literal["client", "infrastructure", "agent"]


class BoxwoodError(Exception):
    """A call failed.

    Attributes:
        message: One line for a person.
        code: The gRPC code's name, such as ``"NOT_FOUND"``.
        reason: A short stable code in lower case, such as ``"pool_full"``; may be empty.
        hint: What the caller can do; may be empty.
        origin: Whose failure it is.
        retryable: Whether the same request may work later.
        retry_after: Seconds after which a retry makes sense; 0 if unknown.
        request_id: Names the call in the daemon's log.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str = "UNKNOWN",
        reason: str = "",
        hint: str = "",
        origin: Origin = "client",
        retryable: bool = False,
        retry_after: float = 0.0,
        request_id: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.reason = reason
        self.hint = hint
        self.origin: Origin = origin
        self.retryable = retryable
        self.retry_after = retry_after
        self.request_id = request_id

    def __str__(self) -> str:
        text = self.message
        if self.hint:
            text += f" (hint: {self.hint})"
        if self.request_id:
            text += f" [request {self.request_id}]"
        return text

    def _fields(self) -> dict[str, Any]:
        return {
            "code": self.code,
            "reason": self.reason,
            "hint": self.hint,
            "origin": self.origin,
            "retryable": self.retryable,
            "retry_after": self.retry_after,
            "request_id": self.request_id,
        }

    # The raised class is made on the fly, so pickle is told how to make it again.
    def __reduce__(self) -> Any:
        base = getattr(type(self), "_named", type(self))
        return _rebuild, (base, self.message, self._fields(), self.__dict__)


class ClientError(BoxwoodError):
    """The request or its caller is at fault."""


class InfrastructureError(BoxwoodError):
    """The host or the engine is at fault: never a reward of 0."""


class AgentError(BoxwoodError):
    """What ran in the sandbox is at fault."""


class InvalidArgument(BoxwoodError):
    """The request can never work."""


class NotFound(BoxwoodError):
    """No such node, sandbox, tree, image or file."""


class AlreadyExists(BoxwoodError):
    """It was made before, and differently."""


class FailedPrecondition(BoxwoodError):
    """Not in this state; the hint says in which."""


class NodeWithheld(FailedPrecondition):
    """The node can't be restored exactly, so it isn't restored at all.

    A fork with `replay` makes it again; one whose turns can't be run again is refused
    with the reason ``"not_repeatable"``.

    Attributes:
        nearest_node_id: The nearest node above it that can be forked; empty: none.
        nearest_turns: How many turns would have to be run again from there.
    """

    nearest_node_id: str = ""
    nearest_turns: int = 0


class Busy(BoxwoodError):
    """Another turn runs in that sandbox; try again when it is over, or pass `busy_wait`."""


class ResourceExhausted(BoxwoodError):
    """The pool, memory or slots are used up; `retry_after` says when to try again."""


class Unavailable(BoxwoodError):
    """The daemon is starting, stopping, or went away in the call."""


class ConnectionFailed(Unavailable, ConnectionError):
    """No connection to a daemon: not running, no socket there, or no permission."""


class DeadlineExceeded(BoxwoodError, TimeoutError):
    """The call's deadline passed."""


class Cancelled(BoxwoodError):
    """The call was cancelled."""


class DataLoss(BoxwoodError):
    """What was saved isn't what is there; nothing was restored from it."""


class Unsupported(BoxwoodError):
    """This host, or this version of the daemon, can't do that."""


class PermissionDenied(BoxwoodError):
    """Not allowed."""


class InternalError(BoxwoodError):
    """A defect or a broken host."""


class UnsafeEntry(BoxwoodError):
    """A download held a path, link or device that would reach outside its target."""


class CommandFailed(Exception):
    """A command failed and `check=True` had been asked for. Not a `BoxwoodError`: the engine did its work.

    Attributes:
        result: The turn, or the command's result inside a `Sandbox.turn()`.
    """

    def __init__(self, result: Observed) -> None:
        how = "timed out" if result.timed_out else f"exited with {result.exit_code}"
        if not result.timed_out and result.signal:
            how = f"was ended by signal {result.signal}"
        tail = result.stderr.text.strip().splitlines()
        super().__init__(f"the command {how}" + (f": {tail[-1]}" if tail else ""))
        self.result = result

    def __reduce__(self) -> Any:
        return type(self), (self.result,)


class ForkError(BoxwoodError):
    """One child of a fork that did not become ready; an item of `Children`, seldom raised.

    Attributes:
        child: Its place among the children asked for, from 0.
        node_id: The node that was forked, or the sandbox's id where a sandbox was.
        error: The same failure as the class that a single call would have raised.
    """

    def __init__(
        self, message: str, *, child: int = 0, node_id: str = "", error: BoxwoodError, **fields: Any
    ):
        super().__init__(message, **fields)
        self.child = child
        self.node_id = node_id
        self.error = error

    def __reduce__(self) -> Any:
        return _rebuild_fork, (self.message, self.child, self.node_id, self.error, self._fields())


_BY_CODE: dict[str, type[BoxwoodError]] = {
    "INVALID_ARGUMENT": InvalidArgument,
    "OUT_OF_RANGE": InvalidArgument,
    "NOT_FOUND": NotFound,
    "ALREADY_EXISTS": AlreadyExists,
    "FAILED_PRECONDITION": FailedPrecondition,
    "ABORTED": Busy,
    "RESOURCE_EXHAUSTED": ResourceExhausted,
    "UNAVAILABLE": Unavailable,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "CANCELLED": Cancelled,
    "DATA_LOSS": DataLoss,
    "UNIMPLEMENTED": Unsupported,
    "PERMISSION_DENIED": PermissionDenied,
    "UNAUTHENTICATED": PermissionDenied,
    "INTERNAL": InternalError,
    "UNKNOWN": InternalError,
}
_BY_REASON: dict[str, type[BoxwoodError]] = {"node_withheld": NodeWithheld, "not_repeatable": NodeWithheld}
_INFRASTRUCTURE = {
    "RESOURCE_EXHAUSTED",
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "DATA_LOSS",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNKNOWN",
}
_RETRYABLE = {"ABORTED", "RESOURCE_EXHAUSTED", "UNAVAILABLE"}
_ORIGINS: dict[int, Origin] = {
    pb.Error.ORIGIN_CLIENT: "client",
    pb.Error.ORIGIN_INFRASTRUCTURE: "infrastructure",
    pb.Error.ORIGIN_AGENT: "agent",
}
_MIXINS: dict[Origin, type[BoxwoodError]] = {
    "client": ClientError,
    "infrastructure": InfrastructureError,
    "agent": AgentError,
}
_CODES = {code.value[0]: code.name for code in grpc.StatusCode}


_made: dict[tuple[type[BoxwoodError], Origin], type[BoxwoodError]] = {}


def _class(base: type[BoxwoodError], origin: Origin) -> type[BoxwoodError]:
    """The class that is both what failed and whose failure it is."""
    if (base, origin) not in _made:
        namespace = {"__doc__": base.__doc__, "__module__": base.__module__, "_named": base}
        _made[base, origin] = type(base.__name__, (base, _MIXINS[origin]), namespace)
    return _made[base, origin]


def _make(base: type[BoxwoodError], message: str, **fields: Any) -> BoxwoodError:
    return _class(base, fields["origin"])(message, **fields)


def _rebuild(
    base: type[BoxwoodError], message: str, fields: dict[str, Any], state: dict[str, Any]
) -> BoxwoodError:
    error = _make(base, message, **fields)
    error.__dict__.update(state)
    return error


def _rebuild_fork(
    message: str, child: int, node_id: str, error: BoxwoodError, fields: dict[str, Any]
) -> ForkError:
    return ForkError(message, child=child, node_id=node_id, error=error, **fields)


def invalid(message: str, hint: str = "") -> BoxwoodError:
    """An argument that this package refuses before any call."""
    return _make(
        InvalidArgument, message, code="INVALID_ARGUMENT", reason="bad_argument", hint=hint, origin="client"
    )


def unsupported(message: str, hint: str = "") -> BoxwoodError:
    """Something that is missing on this side."""
    return _make(
        Unsupported, message, code="UNIMPLEMENTED", reason="missing_here", hint=hint, origin="client"
    )


def unknown_call(method: str, request_id: str) -> BoxwoodError:
    """A call that the daemon has never heard of."""
    return _make(
        Unsupported,
        f"this daemon doesn't know {method}: it is older than this package ({__version__})",
        code="UNIMPLEMENTED",
        reason="unknown_call",
        hint="Client.info().version names the daemon's version: bring it up to date",
        origin="infrastructure",
        request_id=request_id,
    )


def closed() -> BoxwoodError:
    """A call on a client that was closed."""
    return _make(
        FailedPrecondition,
        "this client is closed",
        code="FAILED_PRECONDITION",
        reason="client_closed",
        hint="make another with boxwood.connect()",
        origin="client",
    )


def unsafe_entry(message: str) -> BoxwoodError:
    """An entry of a download that was refused."""
    return _make(
        UnsafeEntry,
        message,
        code="DATA_LOSS",
        reason="unsafe_entry",
        hint='pass unsafe="skip" to leave such entries out',
        origin="agent",
    )


def connection_failed(message: str, hint: str, request_id: str) -> BoxwoodError:
    """No connection; the message says why as far as this side can see."""
    return _make(
        ConnectionFailed,
        message,
        code="UNAVAILABLE",
        reason="no_connection",
        hint=hint,
        origin="infrastructure",
        retryable=True,
        request_id=request_id,
    )


def from_detail(code: str, message: str, detail: pb.Error | None, request_id: str = "") -> BoxwoodError:
    """Makes the exception for a status and the Error message that came with it, if one did."""
    base = _BY_CODE.get(code, InternalError)
    origin: Origin = "infrastructure" if code in _INFRASTRUCTURE or code not in _BY_CODE else "client"
    if detail is None:
        return _make(
            base, message, code=code, origin=origin, retryable=code in _RETRYABLE, request_id=request_id
        )
    reason_class = _BY_REASON.get(detail.reason, base)
    if issubclass(reason_class, base):
        base = reason_class
    error = _make(
        base,
        message,
        code=code,
        reason=detail.reason,
        hint=detail.hint,
        origin=_ORIGINS.get(detail.origin, origin),
        retryable=detail.retryable,
        retry_after=detail.retry_after_ns / 1e9,
        request_id=detail.request_id or request_id,
    )
    if isinstance(error, NodeWithheld):
        error.nearest_node_id, error.nearest_turns = detail.nearest_node_id, detail.nearest_turns
    return error


def fork_error(result: pb.ForkResult, node_id: str) -> ForkError:
    """The failure of one child."""
    detail = result.error
    error = from_detail(_CODES.get(result.code, "UNKNOWN"), result.message or detail.reason, detail)
    return ForkError(error.message, child=result.child, node_id=node_id, error=error, **error._fields())


def detail_of(call: grpc.RpcError) -> pb.Error | None:
    """Finds the Error message in a failed call's status details."""
    trailers = getattr(call, "trailing_metadata", lambda: None)() or ()
    for key, value in trailers:
        if key != "grpc-status-details-bin":
            continue
        try:
            status = status_pb2.Status.FromString(value)
            for item in status.details:
                if item.Is(pb.Error.DESCRIPTOR):
                    return pb.Error.FromString(item.value)
        except DecodeError:  # a proxy's; the code and message still say what happened
            return None
    return None


def from_rpc(call: grpc.RpcError, request_id: str) -> BoxwoodError:
    """Translates what grpc raised."""
    code, message = "UNKNOWN", str(call)
    if isinstance(call, (grpc.Call, grpc.aio.AioRpcError)):
        code, message = call.code().name, call.details() or message
    return from_detail(code, message, detail_of(call), request_id)
