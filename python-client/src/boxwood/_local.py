"""A daemon for this process: the one that runs, or one of its own."""

from __future__ import annotations

import atexit
import os
import re
import select
import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path

from . import errors
from .client import Client, connect

# Seconds that a daemon gets to end its turns and captures.
_STOP = 30.0


class _Daemon:
    """One that this process started; it ends with it, however that ends."""

    def __init__(self, command: list[str], socket: str, folder: Path, scratch: bool) -> None:
        self.socket = socket
        self._folder, self._scratch, self._pid = folder, scratch, os.getpid()
        self._log = folder / "daemon.log"
        with open(self._log, "ab") as log:
            # A session of its own: ^C is for this process, which then ends the daemon. Its standard
            # input is a pipe that nobody writes to: it ends when this process does, also by kill -9.
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True
            )

    def wait_ready(self, timeout: float) -> None:
        """Returns when it answers."""
        out = self._process.stdout
        assert out is not None
        until = time.monotonic() + timeout
        said = b""
        while b"ready" not in said:
            left = until - time.monotonic()
            if left <= 0 or not select.select([out], [], [], left)[0]:
                self.stop()
                raise errors.connection_failed(
                    f"the daemon that was started isn't ready after {timeout:g} s", f"see {self._log}", ""
                )
            piece = os.read(out.fileno(), 4096)
            if not piece:
                raise errors.connection_failed(
                    f"the daemon that was started has ended: {self._last_words()}", "", ""
                )
            said += piece

    def running(self) -> bool:
        """Whether it is there."""
        return self._process.poll() is None

    def stop(self) -> None:
        """Ends it and removes what was only for it. Does nothing in a forked copy of this process."""
        if os.getpid() != self._pid:
            return
        process = self._process
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            process.terminate()
            process.wait(_STOP)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if self._scratch:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _last_words(self) -> str:
        self._process.wait()
        # The last line that isn't indented, with those that belong to it.
        lines = re.split(r"\n(?!\s)", self._log.read_text(errors="replace").strip())
        if self._scratch:
            shutil.rmtree(self._folder, ignore_errors=True)
        return " ".join(lines[-1].split()) or f"exit status {self._process.returncode}"


_lock = threading.Lock()
_daemons: dict[tuple[int, str], _Daemon] = {}


def local(
    state: str | os.PathLike[str] | None = None,
    *,
    cpus: str | None = None,
    memory: str | None = None,
    pool_size: str | None = None,
    timeout: float = 30.0,
    start_timeout: float = 120.0,
) -> Client:
    """Makes a client of this host's daemon, and starts one for this process if none runs.

    Without `state` the daemon at ``$BOXWOOD_ADDRESS``, else at the usual socket, is
    taken if it answers. One that is started ends when this process does; without
    `state` all that it kept is gone then. Processes that name the same `state` share
    one daemon, which ends with the process that started it. It is never started
    without root: where a daemon runs already, none is needed.

    The program is ``$BOXWOOD_BIN``, or the ``boxwood`` of ``$PATH``.

    Args:
        state: The folder that keeps images, trees and states over restarts.
        cpus: The cores of a daemon that is started and of its sandboxes, such as "4-7": what keeps
            them off the trainer's.
        memory: What all its sandboxes together may use, such as "64G".
        pool_size: The size of its pool, such as "100G"; most of the disk if None.
        timeout: Seconds that a call of the client may take where it says nothing else.
        start_timeout: Seconds until a daemon that is started must answer.

    Raises:
        Unsupported: None runs, and there is no root or no program to start one.
        ConnectionFailed: The daemon that was started ended, or didn't answer in time.
    """
    if state is None:
        found = _answering(None, timeout)
        if found is not None:
            return found
    else:
        state = os.path.abspath(os.fspath(state))
        found = _answering(os.path.join(state, "socket"), timeout)
        if found is not None:
            return found
    with _lock:
        key = (os.getpid(), state or "")
        daemon = _daemons.get(key)
        if daemon is None or not daemon.running():
            daemon = _start(state, cpus, memory, pool_size)
            try:
                daemon.wait_ready(start_timeout)
            except errors.ConnectionFailed:
                # Another process may have been first at the same folder.
                found = _answering(daemon.socket, timeout) if state else None
                if found is None:
                    raise
                return found
            _daemons[key] = daemon
            atexit.register(daemon.stop)
    return connect(daemon.socket, timeout=timeout)


def _answering(address: str | None, timeout: float) -> Client | None:
    """A client of the daemon there, if there is one; no permission is for the user to know."""
    client = connect(address, timeout=timeout)
    try:
        client.info()
    except errors.ConnectionFailed as error:
        client.close()
        if "no permission" in error.message:
            raise
        return None
    except BaseException:
        client.close()
        raise
    return client


def _start(state: str | None, cpus: str | None, memory: str | None, pool_size: str | None) -> _Daemon:
    program = os.environ.get("BOXWOOD_BIN") or shutil.which("boxwood")
    if program is None or not os.access(program, os.X_OK):
        where = f"at {program}" if program else "in $PATH"
        raise errors.unsupported(
            f"no daemon runs, and there is no boxwood program {where} to start one",
            "build it with `make build` and name it in $BOXWOOD_BIN, or connect() to a daemon elsewhere",
        )
    if os.geteuid() != 0:
        raise errors.unsupported(
            "no daemon runs, and starting one needs root",
            "have `boxwood serve --socket-group GROUP` started as root, with a group that you are in",
        )
    folder = Path(state) if state else Path(tempfile.mkdtemp(prefix="boxwood-"))
    folder.mkdir(parents=True, exist_ok=True)
    socket = str(folder / "socket")
    command = [program, "serve", "--state", str(folder / "state") if state is None else state]
    command += ["--socket", socket, "--cgroup", f"boxwood-local-{os.getpid()}", "--stop-on-eof"]
    for flag, value in (("--cpus", cpus), ("--memory", memory), ("--pool-size", pool_size)):
        if value:
            command += [flag, value]
    command += ["--log-level", "warn"]
    return _Daemon(command, socket, folder, scratch=state is None)
