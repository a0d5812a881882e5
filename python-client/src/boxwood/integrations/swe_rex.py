"""A deployment and a runtime of SWE-ReX over one sandbox, which can be forked with its sessions.

    deployment = BoxwoodDeployment(image="task:7")
    await deployment.start()
    await deployment.runtime.create_session(CreateBashSessionRequest())
    await deployment.runtime.run_in_session(BashAction(command="cd /repo && . env/bin/activate"))
    others = await deployment.fork(4)       # four started deployments, in /repo, with that environment

No server runs in the sandbox and no port is opened. A session is no live shell: each action is a turn
of its own, a bash that reads what the session's last action left (folder, variables, functions,
aliases, options, umask) and writes it when it ends. So a session is a file, is saved with the node and
forks with it.

What forks: all files, sessions, and processes where the node's process half could be saved. What
sessions can't do: interactive programs, `expect`, jobs by number, descriptors that stay open.
"""

from __future__ import annotations

import logging
import posixpath
import shlex
from pathlib import Path
from typing import Any

from swerex.deployment.abstract import AbstractDeployment
from swerex.deployment.hooks.abstract import CombinedDeploymentHook, DeploymentHook
from swerex.exceptions import (
    BashIncorrectSyntaxError,
    CommandTimeoutError,
    DeploymentNotStartedError,
    NonZeroExitCodeError,
    SessionDoesNotExistError,
    SessionExistsError,
    SwerexException,
)
from swerex.runtime.abstract import (
    AbstractRuntime,
    Action,
    BashInterruptAction,
    BashObservation,
    CloseBashSessionResponse,
    CloseResponse,
    CloseSessionRequest,
    CloseSessionResponse,
    Command,
    CommandResponse,
    CreateBashSessionResponse,
    CreateSessionRequest,
    CreateSessionResponse,
    IsAliveResponse,
    Observation,
    ReadFileRequest,
    ReadFileResponse,
    UploadRequest,
    UploadResponse,
    WriteFileRequest,
    WriteFileResponse,
)

import boxwood
from boxwood import aio

# Where sessions are kept in a sandbox, and the most of their output that is.
SESSIONS = "/var/lib/boxwood-sessions"
OUTPUT = 1 << 20

# $1: the session's file, $2: the action. The action runs in this shell itself, so that what it sets
# is there to be written; a trap writes it even where the action exits.
STEP = r"""
__boxwood_file=$1
__boxwood_save() {
  local __boxwood_status=$? __boxwood_name
  trap - EXIT
  {
    for __boxwood_name in $(compgen -v); do
      case $__boxwood_name in
      BASH* | __boxwood_* | EUID | UID | PPID | SHELLOPTS | SHLVL | FUNCNAME | GROUPS) ;;
      DIRSTACK | PIPESTATUS) ;;
      LINENO | RANDOM | SRANDOM | SECONDS | EPOCH* | _ | COMP_* | HISTCMD | OPTIND) ;;
      *) declare -p "$__boxwood_name" ;;
      esac
    done
    declare -f
    alias -p
    shopt -p
    set +o
    umask -p
    printf 'cd -- %q\n' "$PWD"
  } >"$__boxwood_file.new" 2>/dev/null && mv "$__boxwood_file.new" "$__boxwood_file"
  exit "$__boxwood_status"
}
shopt -s expand_aliases
[ ! -s "$__boxwood_file" ] || . "$__boxwood_file" 2>/dev/null
trap __boxwood_save EXIT
exec 2>&1
eval "$2"
__boxwood_save
"""


class BoxwoodRuntime(AbstractRuntime):
    """SWE-ReX's verbs as turns of one sandbox. Each is a node, but for `read_file` and `is_alive`.

    Args:
        sandbox: The sandbox; the deployment releases it.
        sessions: The sessions that are open in it.
    """

    def __init__(
        self,
        sandbox: aio.Sandbox,
        *,
        sessions: set[str] | None = None,
        logger: logging.Logger | None = None,
    ) -> None:
        self.sandbox = sandbox
        self.sessions = sessions or set()
        self.logger = logger or logging.getLogger("boxwood.swe_rex")

    @property
    def node_id(self) -> str:
        """The node at which it stands."""
        return self.sandbox.head_id

    async def is_alive(self, *, timeout: float | None = None) -> IsAliveResponse:
        """Whether the sandbox lives."""
        try:
            await self.sandbox.renew()
        except boxwood.BoxwoodError as error:
            return IsAliveResponse(is_alive=False, message=str(error))
        return IsAliveResponse(is_alive=True)

    async def create_session(self, request: CreateSessionRequest) -> CreateSessionResponse:
        """Opens a session, and reads its start files in it."""
        if request.session in self.sessions:
            raise SessionExistsError(f"session {request.session} already exists")
        self.sessions.add(request.session)
        sources = " ; ".join(f"source {shlex.quote(path)}" for path in request.startup_source)
        turn = await self._step(request.session, sources or ":", max(request.startup_timeout, 10.0))
        if turn.timed_out:
            self.sessions.discard(request.session)
            raise CommandTimeoutError(f"the start files took longer than {request.startup_timeout} s")
        return CreateBashSessionResponse(output=turn.stdout.text)

    async def run_in_session(self, action: Action) -> Observation:
        """Runs an action in a session, as one turn."""
        self._known(action.session)
        if isinstance(action, BashInterruptAction):
            # An action that passed its time was killed with all that it started: nothing is left.
            return BashObservation(exit_code=0)
        if action.is_interactive_command or action.is_interactive_quit or action.expect:
            raise SwerexException("sessions of Boxwood run no interactive programs")
        checked = await self.sandbox.run(["bash", "-n", "-c", action.command])
        if checked.exit_code != 0:
            raise BashIncorrectSyntaxError(
                f"the command {action.command!r} is no bash: {checked.stderr.text}",
                extra_info={"bash_stdout": checked.stdout.text, "bash_stderr": checked.stderr.text},
            )
        turn = await self._step(action.session, action.command, action.timeout)
        if turn.timed_out:
            raise CommandTimeoutError(
                f"timeout after {action.timeout} seconds while running command {action.command!r}"
            )
        output = turn.stdout.text
        if action.check == "raise" and turn.exit_code != 0:
            text = f"Command {action.command!r} failed with exit code {turn.exit_code}. Output:\n{output!r}"
            raise NonZeroExitCodeError(f"{action.error_msg}: {text}" if action.error_msg else text)
        return BashObservation(output=output, exit_code=None if action.check == "ignore" else turn.exit_code)

    async def close_session(self, request: CloseSessionRequest) -> CloseSessionResponse:
        """Forgets a session."""
        self._known(request.session)
        await self.sandbox.run(["rm", "-f", self._file(request.session)])
        self.sessions.discard(request.session)
        return CloseBashSessionResponse()

    async def execute(self, command: Command) -> CommandResponse:
        """Runs a command outside of the sessions, as one turn."""
        text = command.command
        argv = list(text) if isinstance(text, list) else [text]
        if command.shell:
            argv = ["/bin/sh", "-c", *argv]
        if command.merge_output_streams:
            argv = ["/bin/sh", "-c", 'exec "$@" 2>&1', "sh", *argv]
        turn = await self.sandbox.run(
            argv, timeout=command.timeout, env=command.env, cwd=command.cwd, output_limit=OUTPUT
        )
        if turn.timed_out:
            raise CommandTimeoutError(f"Timeout ({command.timeout}s) exceeded while running command")
        made = CommandResponse(stdout=turn.stdout.text, stderr=turn.stderr.text, exit_code=turn.exit_code)
        if command.check and turn.exit_code != 0:
            said = (
                f"Command {text!r} failed with exit code {turn.exit_code}. "
                f"Stdout:\n{made.stdout!r}\nStderr:\n{made.stderr!r}"
            )
            raise NonZeroExitCodeError(f"{command.error_msg}: {said}" if command.error_msg else said)
        return made

    async def read_file(self, request: ReadFileRequest) -> ReadFileResponse:
        """Reads a file; no turn."""
        try:
            content = await self.sandbox.read_file(request.path)
        except boxwood.NotFound as error:
            raise FileNotFoundError(request.path) from error
        return ReadFileResponse(
            content=content.decode(request.encoding or "utf-8", request.errors or "strict")
        )

    async def write_file(self, request: WriteFileRequest) -> WriteFileResponse:
        """Writes a file, and its missing folders."""
        async with self.sandbox.turn() as turn:
            await turn.exec(["mkdir", "-p", "--", posixpath.dirname(request.path) or "/"], check=True)
            await turn.write_file(request.path, request.content)
        return WriteFileResponse()

    async def upload(self, request: UploadRequest) -> UploadResponse:
        """Copies a local file or folder into the sandbox."""
        await self.sandbox.upload(Path(request.source_path), request.target_path)
        return UploadResponse()

    async def close(self) -> CloseResponse:
        """Closes the sessions; the deployment ends the sandbox."""
        self.sessions.clear()
        return CloseResponse()

    def _known(self, session: str) -> None:
        if session not in self.sessions:
            raise SessionDoesNotExistError(f"session {session!r} does not exist")

    def _file(self, session: str) -> str:
        return f"{SESSIONS}/{session.encode().hex()}"

    async def _step(self, session: str, command: str, timeout: float | None) -> aio.Turn:
        step = f"mkdir -p {SESSIONS} || exit\n{STEP}"
        return await self.sandbox.run(
            ["bash", "-c", step, "bash", self._file(session), command], timeout=timeout, output_limit=OUTPUT
        )


class BoxwoodDeployment(AbstractDeployment):
    """One sandbox of an image, with a runtime of SWE-ReX.

    Args:
        image: An image of the daemon, its name or digest.
        setup: Commands that prepare it, run once for all deployments that ask for the same.
        address: The daemon; None as for `boxwood.connect`.
        cwd: Where commands and sessions begin.
        lease: Seconds that the sandbox lives without a call.
        logger: Gets what happens.
    """

    def __init__(
        self,
        *,
        image: str,
        setup: list[str] | None = None,
        address: str | None = None,
        cwd: str = "/",
        lease: float = 7200.0,
        logger: logging.Logger | None = None,
    ) -> None:
        self.logger = logger or logging.getLogger("boxwood.swe_rex")
        self._made_from: dict[str, Any] = {"image": image, "setup": setup or [], "cwd": cwd, "lease": lease}
        self._address = address
        self._hooks = CombinedDeploymentHook()
        self._client: aio.Client | None = None
        self._tree: aio.Tree | None = None
        self._runtime: BoxwoodRuntime | None = None

    def add_hook(self, hook: DeploymentHook) -> None:
        """Tells the hook of each step."""
        self._hooks.add_hook(hook)

    async def is_alive(self, *, timeout: float | None = None) -> IsAliveResponse:
        """Whether the sandbox lives."""
        return await self.runtime.is_alive(timeout=timeout)

    async def start(self) -> None:
        """Makes the sandbox. Again: does nothing."""
        if self._runtime is not None:
            return
        self._hooks.on_custom_step("Starting sandbox")
        self._client = aio.connect(self._address)
        try:
            self._tree = await self._client.create_tree(**self._made_from)
        except BaseException:
            await self._client.close()
            raise
        self._runtime = BoxwoodRuntime(self._tree.sandbox, logger=self.logger)

    async def stop(self) -> None:
        """Ends the sandbox. The one that others were forked from ends theirs as well. Again: does nothing."""
        runtime, self._runtime = self._runtime, None
        if runtime is None:
            return
        if self._tree is not None and self._client is not None:
            await self._tree.close()
            runtime.sandbox.released = True
            await self._client.close()
        else:
            await runtime.sandbox.release()

    @property
    def runtime(self) -> BoxwoodRuntime:
        """The runtime.

        Raises:
            DeploymentNotStartedError: It was not started.
        """
        if self._runtime is None:
            raise DeploymentNotStartedError
        return self._runtime

    async def fork(self, n: int) -> list[BoxwoodDeployment]:
        """Started deployments that stand where this one stands, with its sessions, all from one checkpoint.

        Raises:
            NodeWithheld: The node can't be restored exactly.
        """
        runtime = self.runtime
        children = await runtime.sandbox.fork(
            n, min_ready=n, replace_failed=True, lease=self._made_from["lease"]
        )
        made: list[BoxwoodDeployment] = []
        for child in children.ready:
            other = BoxwoodDeployment(**self._made_from, address=self._address, logger=self.logger)
            other._runtime = BoxwoodRuntime(child, sessions=set(runtime.sessions), logger=self.logger)
            made.append(other)
        return made

    async def evaluate(self, grader: boxwood.Grader) -> boxwood.Evaluation:
        """Grades the node where it stands; see `boxwood.Node.evaluate`."""
        node = await self.runtime.sandbox.head
        return await node.evaluate(grader)

    def __del__(self) -> None:
        """Nothing: a sandbox that nobody stopped ends with its lease."""
