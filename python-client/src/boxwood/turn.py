"""What runs in a turn: commands as messages, their output, and turns of several commands."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from . import _wire, errors
from ._proto import boxwood_pb2 as pb
from .errors import CommandFailed
from .records import CommandResult, Turn

if TYPE_CHECKING:
    from ._channel import Caller
    from .node import Node
    from .sandbox import Sandbox

Command: TypeAlias = "str | bytes | Sequence[str | bytes]"
Ack = Literal["recorded", "captured"]
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
) -> pb.Command:
    """Writes a Command message; see `Sandbox.run` for the arguments."""
    message = pb.Command(deadline_ns=ns(timeout), output_limit=output_limit)
    if cwd:
        message.cwd = cwd
    if user:
        message.user = user
    if env:
        message.env.update(env)
    if stdin:
        message.stdin = as_bytes(stdin)
    if isinstance(command, (str, bytes)):
        message.shell = as_bytes(command)
    else:
        message.argv.extend(as_bytes(argument) for argument in command)
    return message


def ack_message(ack: Ack) -> pb.Ack.ValueType:
    """Writes what a turn's reply waits for."""
    if ack not in ("recorded", "captured"):
        raise errors.invalid(f'ack must be "recorded" or "captured", not {ack!r}')
    return pb.ACK_CAPTURED if ack == "captured" else pb.ACK_RECORDED


class Relay:
    """Hands output on to the callbacks, each byte at most once over retries of a call."""

    def __init__(self, on_stdout: OnOutput | None, on_stderr: OnOutput | None) -> None:
        self._out, self._err = on_stdout, on_stderr
        self._muted = False

    def restart(self) -> None:
        """The stream begins anew: what was handed on isn't handed on again."""
        self._muted = True

    def __call__(self, event: pb.TurnEvent) -> None:
        """Takes one event."""
        if self._muted:
            return
        if event.stdout and self._out is not None:
            self._out(event.stdout)
        if event.stderr and self._err is not None:
            self._err(event.stderr)


def last_event(
    caller: Caller, method: str, request: Any, relay: Relay, *, timeout: float, retry: bool = True
) -> pb.TurnEvent:
    """Makes the call of a command and hands its output on; returns the event with the outcome."""
    if request.result_only:
        return caller.only_event(method, request, timeout=timeout, retry=retry)
    events = caller.stream(
        method, request, timeout=timeout, retry=retry, on_restart=relay.restart if retry else None
    )
    outcome: pb.TurnEvent | None = None
    with contextlib.closing(events):  # type: ignore[type-var]
        for event in events:
            if event.HasField("result") or event.HasField("command"):
                outcome = event
            else:
                relay(event)
    if outcome is None:
        raise errors.from_detail("INTERNAL", f"the stream of {method} ended without its outcome", None)
    return outcome


class OpenTurn:
    """A turn between its begin and its end: commands and transfers go through it.

    Attributes:
        id: The turn's id.
        sandbox: The sandbox that runs it.
    """

    def __init__(self, sandbox: Sandbox, turn_id: str) -> None:
        self.id = turn_id
        self.sandbox = sandbox
        self._over = False
        self._result: Turn | None = None

    def __repr__(self) -> str:
        return f"<OpenTurn {self.id} of {self.sandbox.id}{', over' if self._over else ''}>"

    @property
    def result(self) -> Turn:
        """The finished turn; there after the block."""
        if self._result is None:
            raise errors.invalid("the turn has no result yet", "read it after the `with` block")
        return self._result

    @property
    def node(self) -> Node:
        """The node that the turn became; there after the block."""
        return self.result.node

    def exec(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: str | bytes | None = None,
        timeout: float | None = None,
        on_stdout: OnOutput | None = None,
        on_stderr: OnOutput | None = None,
        output_limit: int = 0,
        check: bool = False,
    ) -> CommandResult:
        """Runs one command of the turn; see `Sandbox.run` for the arguments.

        It is sent once only: a command has no key that could guard a repetition.
        """
        self._alive()
        request = pb.ExecRequest(
            turn_id=self.id,
            command=command_message(command, cwd, env, user, stdin, timeout, output_limit),
            result_only=on_stdout is None and on_stderr is None,
        )
        limit = LONGEST_TURN if timeout is None else timeout + MARGIN
        event = last_event(
            self.sandbox._client._caller,
            "Exec",
            request,
            Relay(on_stdout, on_stderr),
            timeout=limit,
            retry=False,
        )
        result = _wire.command_result(event.command)
        if check and not result.ok:
            raise CommandFailed(result)
        return result

    def read_file(self, path: str) -> bytes:
        """Reads a whole file, as the turn sees it now."""
        self._alive()
        return self.sandbox._read_file(path, self.id)

    def write_file(self, path: str, content: str | bytes, *, mode: int = 0o644, append: bool = False) -> None:
        """Writes a file; see `Sandbox.write_file`."""
        self._alive()
        self.sandbox._write_file(path, content, mode, append, self.id)

    def upload(self, local: str | os.PathLike[str], remote: str, *, timeout: float = 3600.0) -> None:
        """Copies a local file or folder into the sandbox; see `Sandbox.upload`."""
        self._alive()
        self.sandbox._upload(local, remote, self.id, timeout)

    def download(
        self,
        remote: str,
        local: str | os.PathLike[str],
        *,
        unsafe: Literal["raise", "skip"] = "raise",
        timeout: float = 3600.0,
    ) -> list[str]:
        """Copies a file or a folder's content out; see `Sandbox.download`."""
        self._alive()
        return self.sandbox._download(remote, local, self.id, unsafe, timeout)

    def _alive(self) -> None:
        if self._over:
            raise errors.invalid("this turn is over", "begin another with sandbox.turn()")
