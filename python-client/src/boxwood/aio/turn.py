"""Turns: what they answered, those of several commands, and how a command's output is handed on."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from .. import _wire, errors
from .._command import LONGEST_TURN, MARGIN, Command, OnOutput, command_message
from .._proto import boxwood_pb2 as pb
from ..errors import CommandFailed
from ..records import CommandResult, Effect, Observation, Observed, Timings, TurnStatus, Verdict
from ._face import settle

if TYPE_CHECKING:
    from ._face import Caller
    from .node import Node
    from .sandbox import Sandbox


@dataclasses.dataclass(frozen=True, repr=False)
class Turn(Observed):
    """One turn: what it answered, and the node that it became.

    Attributes:
        node: The node, durable. A scratch sandbox's turns have a node without an id.
        timings: Where the time went.
        sandbox_lost: Whether the sandbox died in the turn.
        session_ended: Whether the shell of a session that the turn used is gone: it
            exited, or could be stopped in no other way.
    """

    node: Node
    timings: Timings
    sandbox_lost: bool = False
    session_ended: bool = False

    @property
    def observation(self) -> Observation:  # type: ignore[override]
        """What the command answered."""
        return self.node.observation

    @property
    def status(self) -> TurnStatus:  # type: ignore[override]
        """How the turn ended."""
        return self.node.turn_status

    @property
    def verdict(self) -> Verdict:
        """What the turn changed."""
        return self.node.verdict

    @property
    def effects(self) -> tuple[Effect, ...]:
        """The first effects; `node.effect_count` counts them all."""
        return self.node.effects

    def __repr__(self) -> str:
        how = str(self.status) if self.status is not TurnStatus.COMPLETED else f"exit {self.exit_code}"
        ms = self.timings.total * 1e3
        return f"<Turn {self.node.id or 'scratch'} {how}, verdict {self.verdict}, {ms:.1f} ms>"

    def _repr_html_(self) -> str:
        return self.node._repr_html_()


class Relay:
    """Hands output on to the callbacks, each byte at most once over retries of a call."""

    def __init__(self, on_stdout: OnOutput | None, on_stderr: OnOutput | None) -> None:
        self._out, self._err = on_stdout, on_stderr
        self._muted = False

    def restart(self) -> None:
        """The stream begins anew: what was handed on isn't handed on again."""
        self._muted = True

    async def __call__(self, event: pb.TurnEvent) -> None:
        """Takes one event."""
        if self._muted:
            return
        if event.stdout and self._out is not None:
            await settle(self._out(event.stdout))
        if event.stderr and self._err is not None:
            await settle(self._err(event.stderr))


async def last_event(
    caller: Caller, method: str, request: Any, relay: Relay, *, timeout: float, retry: bool = True
) -> pb.TurnEvent:
    """Makes the call of a command and hands its output on; returns the event with the outcome."""
    if request.result_only:
        return await caller.only_event(method, request, timeout=timeout, retry=retry)
    events = caller.stream(
        method, request, timeout=timeout, retry=retry, on_restart=relay.restart if retry else None
    )
    outcome: pb.TurnEvent | None = None
    async with contextlib.aclosing(events):
        async for event in events:
            if event.HasField("result") or event.HasField("command"):
                outcome = event
            else:
                await relay(event)
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

    async def exec(
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
        output_limit: int = 0,
        check: bool = False,
    ) -> CommandResult:
        """Runs one command of the turn; see `Sandbox.run` for the arguments.

        It is sent once only: a command has no key that could guard a repetition.
        """
        self._alive()
        request = pb.ExecRequest(
            turn_id=self.id,
            command=command_message(command, cwd, env, user, stdin, timeout, output_limit, secret_env),
            result_only=on_stdout is None and on_stderr is None,
        )
        limit = LONGEST_TURN if timeout is None else timeout + MARGIN
        event = await last_event(
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

    async def read_file(self, path: str) -> bytes:
        """Reads a whole file, as the turn sees it now."""
        self._alive()
        return await self.sandbox._read_file(path, self.id)

    async def write_file(
        self, path: str, content: str | bytes, *, mode: int = 0o644, append: bool = False
    ) -> None:
        """Writes a file; see `Sandbox.write_file`."""
        self._alive()
        await self.sandbox._write_file(path, content, mode, append, self.id)

    async def upload(self, local: str | os.PathLike[str], remote: str, *, timeout: float = 3600.0) -> None:
        """Copies a local file or folder into the sandbox; see `Sandbox.upload`."""
        self._alive()
        await self.sandbox._upload(local, remote, self.id, timeout)

    async def download(
        self,
        remote: str,
        local: str | os.PathLike[str],
        *,
        unsafe: Literal["raise", "skip"] = "raise",
        timeout: float = 3600.0,
    ) -> list[str]:
        """Copies a file or a folder's content out; see `Sandbox.download`."""
        self._alive()
        return await self.sandbox._download(remote, local, self.id, unsafe, timeout)

    def _alive(self) -> None:
        if self._over:
            raise errors.invalid("this turn is over", "begin another with sandbox.turn()")
