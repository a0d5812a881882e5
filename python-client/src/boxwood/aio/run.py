"""Runs: all trees of one training run, with attempts that end each other."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from .._channel import new_key
from .._proto import boxwood_pb2 as pb
from .sandbox import Sandbox

if TYPE_CHECKING:
    from .client import Client


class Run:
    """One attempt of a training run, of `Client.open_run`. As a context manager it is closed at the end.

    What is made and called through `client` belongs to the attempt. Once a newer attempt is open, its
    calls are refused as ``attempt_superseded``, also those that were on their way.

    Attributes:
        name: The run's name.
        attempt: Its number, from 1.
        client: Makes the attempt's calls; `close` closes it.
        adopted: Live sandboxes of the attempt before, if it was opened with `adopt`.
        released: How many sandboxes of the attempt before were released.
        closed: Whether it was closed, as far as this handle knows.
    """

    name: str
    attempt: int
    client: Client
    adopted: list[Sandbox]
    released: int
    closed: bool

    def __init__(self, client: Client, name: str, reply: pb.OpenRunResponse) -> None:
        self.name, self.attempt, self.released, self.closed = name, reply.attempt, reply.released, False
        self.client = client
        self.adopted = [Sandbox(client, m, owned=True) for m in reply.adopted]

    def __repr__(self) -> str:
        return f"<Run {self.name}/{self.attempt}{', closed' if self.closed else ''}>"

    async def __aenter__(self) -> Run:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self, *, close_trees: bool = False) -> None:
        """Releases its sandboxes and closes its client; its nodes stay readable. Again: does nothing.

        Args:
            close_trees: Close its trees, too.

        Raises:
            FailedPrecondition: There is a newer attempt.
        """
        if self.closed:
            return
        self.closed = True
        try:
            await self.client._caller.unary(
                "CloseRun",
                pb.CloseRunRequest(
                    name=self.name, attempt=self.attempt, close_trees=close_trees, idempotency_key=new_key()
                ),
            )
        finally:
            for sandbox in list(self.client._owned):
                sandbox.released = True
            await self.client.close()
