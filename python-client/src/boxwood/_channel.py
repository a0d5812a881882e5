"""The connection's rules: addresses, options, deadlines, what is tried again, what a failure means.

They hold for both faces of the package, `boxwood` and `boxwood.aio`; each has a
`_face` module that makes calls by them.
"""

from __future__ import annotations

import errno
import os
import random
import socket
import time
from pathlib import Path
from typing import Any

import grpc

from . import errors

DEFAULT_SOCKET = "/run/boxwood/boxwood.sock"
MAX_MESSAGE = 16 << 20

# How long a call that lost its daemon tries again: a restart of the daemon takes
# well under this, and a batch should not hang on one that stays away.
RETRY_FOR = 10.0

# Seconds for the calls that clean up behind an exception, which they must not hold up long.
QUIET = 10.0


def resolve(address: str | None) -> str:
    """Turns what a person writes into a grpc target.

    Args:
        address: A socket's path (also ``unix:PATH``), or ``host:port``. None means
            ``$BOXWOOD_ADDRESS``, else ``/run/boxwood/boxwood.sock``.
    """
    address = address or os.environ.get("BOXWOOD_ADDRESS") or DEFAULT_SOCKET
    if address.startswith("unix:"):
        path = address[len("unix:") :]
        return "unix:" + ("/" + path.lstrip("/") if path.startswith("//") else os.path.abspath(path))
    if "/" in address or ":" not in address:
        return "unix:" + os.path.abspath(os.path.expanduser(address))
    return address


def new_key() -> str:
    """A fresh idempotency key, or a request's id."""
    return os.urandom(16).hex()


def options(target: str) -> list[tuple[str, Any]]:
    """The options of a channel."""
    chosen: list[tuple[str, Any]] = [
        ("grpc.max_send_message_length", MAX_MESSAGE),
        ("grpc.max_receive_message_length", MAX_MESSAGE),
        # A restarted daemon is found again at once, and not after grpc's seconds.
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.min_reconnect_backoff_ms", 50),
        ("grpc.max_reconnect_backoff_ms", 500),
        ("grpc.enable_retries", 0),
        # Clients of one process don't share a connection: closing one is its own affair.
        ("grpc.use_local_subchannel_pool", 1),
        # No pings to estimate a bandwidth that a socket of this host doesn't limit: each
        # wakes threads on both sides in the middle of a turn.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", 1 << 20),
    ]
    if target.startswith("unix:"):
        chosen.append(("grpc.default_authority", "localhost"))
    return chosen


def credentials(target: str) -> grpc.ChannelCredentials | None:
    """What a channel shows of itself, by the environment; None: nothing, as on a socket of this host.

    ``BOXWOOD_CA`` names the certificate of the authority that signed the daemon's, ``BOXWOOD_CERT`` and
    ``BOXWOOD_KEY`` a certificate of one's own. With any of them, or a ``BOXWOOD_TOKEN``, TCP is TLS.
    """
    named = [os.environ.get(name) for name in ("BOXWOOD_CA", "BOXWOOD_KEY", "BOXWOOD_CERT")]
    if target.startswith("unix:") or not (any(named) or os.environ.get("BOXWOOD_TOKEN")):
        return None
    try:
        ca, key, cert = (Path(name).read_bytes() if name else None for name in named)
    except OSError as error:
        raise errors.invalid(
            f"a certificate or key can't be read: {error}",
            "BOXWOOD_CA, BOXWOOD_CERT and BOXWOOD_KEY name their files",
        ) from None
    return grpc.ssl_channel_credentials(ca, key, cert)


class Attempts:
    """One call: how long it has, and after a failure whether it is made again.

    Args:
        target: The daemon's address.
        method: The call's name in the service.
        timeout: Seconds over all attempts.
        retry: False for what must not be sent twice.
        run: "name/attempt" that it is of; empty: of none.
    """

    __slots__ = ("_method", "_number", "_retry", "_run", "_target", "_until", "deadline", "request_id")

    def __init__(self, target: str, method: str, timeout: float, retry: bool, run: str) -> None:
        now = time.monotonic()
        self.deadline = now + timeout
        self.request_id = ""
        self._until = now + RETRY_FOR
        self._target, self._method = target, method
        self._retry, self._run = retry, run
        self._number = 0

    def next(self) -> dict[str, Any]:
        """The arguments of the next attempt: seconds that are left, and an id of its own."""
        self.request_id = new_key()
        metadata: tuple[tuple[str, str], ...] = (("x-request-id", self.request_id),)
        if self._run:
            metadata += (("x-boxwood-run", self._run),)
        if token := os.environ.get("BOXWOOD_TOKEN"):
            metadata += (("authorization", f"Bearer {token}"),)
        return {"timeout": max(self.deadline - time.monotonic(), 0.001), "metadata": metadata}

    def failed(self, failure: grpc.RpcError, was_connected: bool, again: bool = True) -> tuple[float, bool]:
        """Raises what the failure means, or says when to try again.

        Args:
            failure: What grpc raised.
            was_connected: Whether this channel ever reached a daemon.
            again: False if this failure came too late in the call for another attempt.

        Returns:
            Seconds to wait, and whether a daemon was reached.
        """
        error = errors.from_rpc(failure, self.request_id)
        was_connected = was_connected or bool(error.reason)
        if error.code == "UNIMPLEMENTED" and not error.reason:  # grpc's own: there is no such method
            raise errors.unknown_call(self._method, self.request_id) from None
        if error.code != "UNAVAILABLE":
            raise error from None
        if not error.reason:  # grpc's own: the daemon never said a word
            if not was_connected:
                error, listening = self._no_connection(error.message)
                if not listening:
                    raise error from None
            error.hint = error.hint or "the daemon went away in the call: see its log"
        self._number += 1
        pause = error.retry_after or min(0.05 * 2 ** (self._number - 1), 1.0) * random.uniform(0.7, 1.3)
        if not (self._retry and again) or time.monotonic() + pause > min(self._until, self.deadline):
            raise error from None
        return pause, was_connected

    def _no_connection(self, grpc_says: str) -> tuple[errors.BoxwoodError, bool]:
        """Says in one line what stands between this process and a daemon, and whether one listens.

        One that listens may only have had no time to greet: a host can be that busy.
        """
        if not self._target.startswith("unix:"):
            error = errors.connection_failed(
                f"no Boxwood daemon answers at {self._target}: {grpc_says}",
                "check the address and that `boxwood serve` listens on TCP there",
                self.request_id,
            )
            return error, False
        listening = False
        path = self._target[len("unix:") :]
        message, hint = f"no Boxwood daemon answers on {path}: {grpc_says}", "see the daemon's log"
        try:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(2)
                probe.connect(path)
                listening = True
        except OSError as problem:
            if problem.errno in (errno.EACCES, errno.EPERM):
                message = f"no permission to open the Boxwood socket {path}"
                hint = "join the socket's group, or have it mounted with a mode that lets you in"
            elif problem.errno == errno.ENOENT:
                message = f"there is no Boxwood socket at {path}"
                hint = (
                    "start one with `boxwood serve`, or name another with connect(PATH) or $BOXWOOD_ADDRESS"
                )
            elif problem.errno == errno.ECONNREFUSED:
                message = f"nobody listens on the Boxwood socket {path}"
                hint = "the daemon has ended: start it again with `boxwood serve`"
            else:
                message = f"can't open the Boxwood socket {path}: {problem}"
        return errors.connection_failed(message, hint, self.request_id), listening
