"""A fork under way: all of its children, or each as it becomes ready."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import TYPE_CHECKING, Any

from ._face import Pending
from .fork import Children

if TYPE_CHECKING:
    from ..errors import ForkError
    from .client import Client
    from .node import Node
    from .sandbox import Sandbox


class Forking(Pending[Children]):
    """What a fork will give: ``await`` all children, enter them, or iterate as they become ready.

    ``await node.fork(8)`` gives `Children`, in order. ``async with node.fork(8) as
    children`` releases them at the end. ``async for child in node.fork(8)`` gives each
    as soon as it is ready, a `Sandbox` or a `ForkError`; leaving the loop early cancels
    the rest.
    """

    def __init__(
        self,
        call: Coroutine[Any, Any, Children],
        each: Callable[[], AsyncIterator[Sandbox | ForkError]],
    ) -> None:
        super().__init__(call)
        self._each = each

    def __aiter__(self) -> AsyncIterator[Sandbox | ForkError]:
        self._call.close()  # the other way to have it, which was never begun
        return self._each()


def forking(
    call: Callable[..., Coroutine[Any, Any, Children]],
) -> Callable[..., Forking]:
    """Lets the children of `Client._fork_one` be awaited, entered or iterated."""

    @functools.wraps(call)
    def made(client: Client, source: Node | Sandbox, n: int, **options: Any) -> Forking:
        return Forking(call(client, source, n, **options), lambda: client._fork_iter({source: n}, **options))

    return made
