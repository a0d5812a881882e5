"""Commands as messages, and the limits of calls that run them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

from . import errors
from ._proto import boxwood_pb2 as pb

Command: TypeAlias = "str | bytes | Sequence[str | bytes]"
Ack = Literal["recorded", "captured"]
CapturePolicy = Literal["sparse", "full", "files", "uncaptured"]
OnOutput = Callable[[bytes], object]

# A transfer's piece, and the most that one ReadFile or WriteFile takes.
PIECE = 4 << 20

# A turn whose deadline is the tree's default is bounded by the daemon; this only
# bounds a daemon that stopped answering.
LONGEST_TURN = 24 * 3600.0

# What a call may take beyond the turn's own deadline: waiting for the earlier
# capture, the kill, the record.
MARGIN = 60.0


def as_bytes(value: str | bytes) -> bytes:
    """Text as UTF-8; what `exact_text` gave goes back to its own bytes."""
    return value if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape")


def ns(seconds: float | None) -> int:
    """Seconds as nanoseconds; None is 0, the daemon's default."""
    return 0 if seconds is None else max(round(seconds * 1e9), 1)


def command_message(
    command: Command,
    cwd: str | None,
    env: Mapping[str, str] | None,
    user: str | None,
    stdin: str | bytes | None,
    timeout: float | None,
    output_limit: int,
    secret_env: Mapping[str, str] | None = None,
) -> pb.Command:
    """Writes a Command message; see `Sandbox.run` for the arguments."""
    message = pb.Command(deadline_ns=ns(timeout), output_limit=output_limit)
    if cwd:
        message.cwd = cwd
    if user:
        message.user = user
    if env:
        message.env.update(env)
    if secret_env:
        message.secret_env.update(secret_env)
    if stdin:
        message.stdin = as_bytes(stdin)
    if isinstance(command, (str, bytes)):
        message.shell = as_bytes(command)
    else:
        message.argv.extend(as_bytes(argument) for argument in command)
    return message


_POLICIES = {
    "sparse": pb.CAPTURE_POLICY_SPARSE,
    "full": pb.CAPTURE_POLICY_FULL,
    "files": pb.CAPTURE_POLICY_FILES,
    "uncaptured": pb.CAPTURE_POLICY_UNCAPTURED,
}


def policy_message(capture: CapturePolicy) -> pb.CapturePolicy.ValueType:
    """Writes which turns of a tree are captured."""
    if capture not in _POLICIES:
        raise errors.invalid(f'capture must be "sparse", "full", "files" or "uncaptured", not {capture!r}')
    return _POLICIES[capture]


def ack_message(ack: Ack) -> pb.Ack.ValueType:
    """Writes what a turn's reply waits for."""
    if ack not in ("recorded", "captured"):
        raise errors.invalid(f'ack must be "recorded" or "captured", not {ack!r}')
    return pb.ACK_CAPTURED if ack == "captured" else pb.ACK_RECORDED


def node_message(
    labels: Mapping[str, str] | None, policy_version: str, payload: bytes
) -> pb.NodeInput | None:
    """Writes what a turn's node is born with; None: nothing."""
    if labels or policy_version or payload:
        return pb.NodeInput(labels=labels or {}, policy_version=policy_version, payload=payload)
    return None
