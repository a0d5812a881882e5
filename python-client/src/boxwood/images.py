# Written by scripts/gen-sync.py from aio/images.py: edit that.
"""Images: the read-only root file systems that trees start from."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from . import _wire, errors
from ._channel import new_key
from ._face import settle
from ._proto import boxwood_pb2 as pb
from .records import Image, ImportProgress

if TYPE_CHECKING:
    from .client import Client


class Images:
    """The daemon's images; `Client.images`."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def import_(
        self,
        path: str | os.PathLike[str],
        name: str = "",
        *,
        on_progress: Callable[[ImportProgress], object] | None = None,
        timeout: float = 3600.0,
    ) -> Image:
        """Imports a root file system.

        Args:
            path: A folder, a `docker save` archive or an OCI layout on the daemon's host;
                a relative path is taken from this process's working folder.
            name: The name to give it, "name:tag"; empty keeps the archive's own.
            on_progress: Is told how far it is.
            timeout: Seconds.

        Raises:
            InvalidArgument: It is no image, is cut off, or holds a hostile path, which is named.
        """
        request = pb.ImportImageRequest(
            path=os.path.abspath(os.fspath(path)), name=name, idempotency_key=new_key()
        )
        events = self._client._caller.stream("ImportImage", request, timeout=timeout, on_restart=lambda: None)
        with contextlib.closing(events):
            for event in events:
                if on_progress is not None:
                    settle(on_progress(ImportProgress(event.step, event.done_bytes, event.total_bytes)))
                if event.HasField("image"):
                    return _wire.image(event.image)
        raise errors.from_detail("INTERNAL", "the import ended without an image", None)

    def list(self) -> list[Image]:
        """All images."""
        reply = self._client._caller.unary("ListImages", pb.ListImagesRequest())
        return [_wire.image(m) for m in reply.images]

    def remove(self, image: Image | str) -> int:
        """Removes one.

        Args:
            image: An image, its name or its digest.

        Returns:
            The bytes that this freed.

        Raises:
            FailedPrecondition: A tree stands on it; the message says which.
        """
        name = image.digest if isinstance(image, Image) else image
        reply = self._client._caller.unary(
            "RemoveImage", pb.RemoveImageRequest(image=name, idempotency_key=new_key())
        )
        return int(reply.freed_bytes)
