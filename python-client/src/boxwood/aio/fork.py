"""The children of forks: ready sandboxes, or what became of them."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from .._draw import table
from ..errors import ForkError
from .sandbox import Sandbox

if TYPE_CHECKING:
    from .client import Client
    from .node import Node


class Children(list["Sandbox | ForkError"]):
    """One item a child, in order: a `Sandbox`, or the `ForkError` that says why there is none.

    As a context manager it releases all ready children at the end.
    """

    _client: Client | None = None

    @property
    def ready(self) -> list[Sandbox]:
        """The live sandboxes."""
        return [child for child in self if isinstance(child, Sandbox)]

    @property
    def failed(self) -> list[ForkError]:
        """What became of the others."""
        return [child for child in self if isinstance(child, ForkError)]

    async def release(self) -> None:
        """Releases all ready children in one call. Again: does nothing."""
        sandboxes = [s for s in self.ready if not s.released]
        if sandboxes and self._client is not None:
            await self._client.release(sandboxes)

    def _repr_html_(self) -> str:
        rows = [
            (str(n), f"{child.id} at {child.head_id}" if isinstance(child, Sandbox) else f"failed: {child}")
            for n, child in enumerate(self)
        ]
        return table(repr(self).strip("<>"), rows)

    async def __aenter__(self) -> Children:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        await self.release()

    def __repr__(self) -> str:
        return f"<Children {len(self.ready)} ready, {len(self.failed)} failed>"


class Forks(dict["Node | Sandbox", Children]):
    """The children of a fork of several nodes, by what was forked.

    As a context manager it releases all ready children at the end.
    """

    @property
    def ready(self) -> list[Sandbox]:
        """All live sandboxes."""
        return [sandbox for children in self.values() for sandbox in children.ready]

    @property
    def failed(self) -> list[ForkError]:
        """What became of the others."""
        return [error for children in self.values() for error in children.failed]

    async def release(self) -> None:
        """Releases all ready children. Again: does nothing."""
        for children in self.values():
            await children.release()

    async def __aenter__(self) -> Forks:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        await self.release()
