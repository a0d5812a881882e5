# Written by scripts/gen-sync.py from aio/session.py: edit that.
"""Sessions: shells that live on between turns, and in every fork."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ._channel import new_key
from ._command import (
    LONGEST_TURN,
    MARGIN,
    Ack,
    OnOutput,
    ack_message,
    as_bytes,
    node_message,
    ns,
)
from ._proto import boxwood_pb2 as pb
from .turn import Relay, Turn, last_event

if TYPE_CHECKING:
    from .sandbox import Sandbox


class Session:
    """A shell of a sandbox: what is set in one turn is there in the next, and in every fork.

    Made by `Sandbox.session`. The handle is good for its sandbox only; a child's is
    had from the child, by the same name.

    Attributes:
        name: Its name, the same in every fork.
        pid: The shell's process id in the sandbox, the same in every fork.
        tty: Whether its output is a terminal.
    """

    def __init__(self, sandbox: Sandbox, message: pb.Session) -> None:
        self._sandbox = sandbox
        self.name = message.name
        self.pid = message.pid
        self.tty = message.tty

    def __repr__(self) -> str:
        return f"<Session {self.name} of {self._sandbox.id}>"

    def run(
        self,
        text: str | bytes,
        *,
        keys: str | bytes | None = None,
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
        """Runs text in the shell as one turn: any number of lines, here-documents included.

        Args:
            text: What the shell is given.
            keys: Typed into its terminal while the text runs; for a session with one only.
            timeout: Seconds until it is interrupted. What that doesn't end is killed, at last
                the shell: see `Turn.session_ended`.
            on_stdout: Gets output as it comes. If it raises, the turn is cancelled.
            on_stderr: Gets error output as it comes. With a terminal, all is output.
            ack: As for `Sandbox.run`.
            labels: The node's labels.
            policy_version: Which policy acted.
            payload: The node's payload, up to 1 MiB.
            output_limit: Bytes kept of each stream, half head and half tail; 0: 64 KiB.
            busy_wait: Seconds to wait while another turn runs here.
            check: Raise `CommandFailed` unless it exits with 0 in time.
            idempotency_key: As for `Sandbox.run`.

        Returns:
            The turn, its node durable.

        Raises:
            NotFound: The session has ended.
            Busy: Another turn runs here.
            CommandFailed: Only with `check`.
        """
        request = pb.RunTurnRequest(
            sandbox_id=self._sandbox.id,
            command=pb.Command(
                session=self.name,
                shell=as_bytes(text),
                stdin=as_bytes(keys or b""),
                deadline_ns=ns(timeout),
                output_limit=output_limit,
            ),
            ack=ack_message(ack),
            idempotency_key=idempotency_key or new_key(),
            node=node_message(labels, policy_version, payload),
            busy_wait_ns=round(busy_wait * 1e9),
            result_only=on_stdout is None and on_stderr is None,
        )
        limit = LONGEST_TURN if timeout is None else timeout + busy_wait + MARGIN
        with self._sandbox._cancelling():
            event = last_event(
                self._sandbox._client._caller, "RunTurn", request, Relay(on_stdout, on_stderr), timeout=limit
            )
        return self._sandbox._turn(event.result, check)

    def interrupt(self) -> bool:
        """Sends SIGINT to what runs in its foreground, as ^C does; the turn goes on.

        A command that is just being started may miss it, as it may miss ^C.

        Returns:
            Whether something ran.
        """
        reply = self._sandbox._client._caller.unary(
            "Interrupt", pb.InterruptRequest(sandbox_id=self._sandbox.id, session=self.name)
        )
        return bool(reply.was_running)

    def close(self) -> Turn:
        """Ends it with all that it has started, as a turn.

        Raises:
            NotFound: It has ended already.
        """
        reply = self._sandbox._client._caller.unary(
            "CloseSession",
            pb.CloseSessionRequest(sandbox_id=self._sandbox.id, name=self.name, idempotency_key=new_key()),
        )
        return self._sandbox._made(reply.result if reply.HasField("result") else None)
