"""An environment of Harbor over one sandbox, which can be forked. Needs Python 3.12, as Harbor does.

    harbor run --env boxwood.integrations.harbor:BoxwoodEnvironment --path tasks/hello-world -a oracle

Or in a trial's configuration, so also through SkyRL's Harbor generator:

    EnvironmentConfig(import_path="boxwood.integrations.harbor:BoxwoodEnvironment")

A task needs an image that the daemon has: its ``docker_image`` under the same name, or the option
``image``. Build and save it with docker or buildah, and bring it in by ``boxwood image import``.
Tasks of several containers (compose) are refused.

What forks: all files, and processes where the node's process half could be saved. What doesn't:
Harbor's own agent objects; `fork` is for who drives an environment itself. Sandboxes have no
network, also for tasks that allow one.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, ClassVar

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
from harbor.environments.options import EnvironmentOptions
from harbor.models.trial.config import ResourceMode
from pydantic import Field

import boxwood
from boxwood import aio

# What is kept of a command's output, and how long one waits for another that runs.
OUTPUT = 1 << 20
WAIT = 3600.0


class BoxwoodOptions(EnvironmentOptions):
    """Keyword arguments of the environment."""

    image: str | None = None
    """An image of the daemon in place of the task's ``docker_image``."""
    setup: list[str] = Field(default_factory=list)
    """Commands that prepare the image, run once for all trials that ask for the same."""
    address: str | None = None
    """The daemon; None as for `boxwood.connect`."""
    lease: float = 7200.0
    """Seconds that a sandbox lives without a command."""


class BoxwoodEnvironment(BaseEnvironment):
    """Runs a trial in one sandbox; each command and each transfer into it is a turn.

    One turn runs at a time: a command waits for one that was begun before it.
    """

    options_model: ClassVar[type[EnvironmentOptions] | None] = BoxwoodOptions
    options: BoxwoodOptions

    _client: aio.Client | None = None
    _tree: aio.Tree | None = None
    _sandbox: aio.Sandbox | None = None

    @staticmethod
    def type() -> str:
        """Its name."""
        return "boxwood"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        """No network at all, no compose, no mounts of the host."""
        return EnvironmentCapabilities(disable_internet=True)

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        """Limits of CPU and memory, also of parts of a core."""
        return EnvironmentResourceCapabilities(cpu_limit=True, memory_limit=True, fractional_cpus=True)

    @property
    def sandbox(self) -> aio.Sandbox:
        """The sandbox; there once it was started."""
        if self._sandbox is None:
            raise RuntimeError("the environment was not started")
        return self._sandbox

    def _validate_definition(self) -> None:
        if any((self.environment_dir / f"docker-compose.{ending}").exists() for ending in ("yaml", "yml")):
            raise ValueError("boxwood runs one container: a docker-compose file is not supported")
        if not self._image:
            raise ValueError(
                "boxwood needs a ready image: set [environment].docker_image in task.toml or the option"
                " image. To use a Dockerfile, build and save it, then run `boxwood image import`"
            )

    @property
    def _image(self) -> str | None:
        return self.options.image or self.task_env_config.docker_image

    def _limits(self) -> boxwood.Limits:
        limit: dict[str, Any] = {"target": ResourceMode.LIMIT, "auto_mode": ResourceMode.LIMIT}
        cpus, memory = (self._resource_policy_value(which, **limit) for which in ("cpu", "memory"))
        return boxwood.Limits(
            cpus=float(cpus or 0),
            memory_bytes=int(memory or 0) << 20,
            disk_bytes=int(self._effective_storage_mb or 0) << 20,
        )

    async def start(self, force_build: bool) -> None:
        """Makes the sandbox and the folders that Harbor wants in it."""
        if not self._network_disabled:
            self.logger.warning("the task may use the network, but sandboxes of boxwood have none")
        self._client = aio.connect(self.options.address)
        try:
            self._tree = await self._client.create_tree(
                image=self._image,
                setup=self.options.setup,
                limits=self._limits(),
                lease=self.options.lease,
                labels={"harbor.session": self.session_id},
            )
            self._sandbox = self._tree.sandbox
            if workdir := self.task_env_config.workdir:
                await self._sandbox.run(["mkdir", "-p", workdir], check=True)
            await self.ensure_dirs(self._mount_targets(writable_only=True))
            await self._upload_environment_dir_after_start()
        except BaseException:
            await self.stop(delete=True)
            raise

    async def stop(self, delete: bool) -> None:
        """Ends the sandbox; without `delete` it lives on until its lease ends. Again: does nothing."""
        sandbox, self._sandbox = self._sandbox, None
        tree, self._tree = self._tree, None
        client, self._client = self._client, None
        if sandbox is not None:
            if not delete:
                sandbox.released = True
            elif tree is not None:
                await tree.close()
                sandbox.released = True
            else:
                await sandbox.release()
        if client is not None:
            await client.close()

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Runs a command as one turn.

        Raises:
            RuntimeError: It took longer than `timeout_sec`; all that it started was killed.
            boxwood.InfrastructureError: The host is at fault.
        """
        who = self._resolve_user(user)
        turn = await self.sandbox.run(
            ["bash", "-c", command],
            cwd=cwd or self.task_env_config.workdir,
            env=self._merge_env(env),
            user=None if who is None else str(who),
            timeout=timeout_sec,
            busy_wait=WAIT,
            output_limit=OUTPUT,
        )
        if turn.timed_out:
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds")
        return ExecResult(stdout=turn.stdout.text, stderr=turn.stderr.text, return_code=turn.exit_code)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """Copies a file in, and makes its folder."""
        await self.sandbox.upload(source_path, target_path)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """Copies a folder's content in."""
        await self.sandbox.upload(source_dir, target_dir)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """Copies a file out; no turn."""
        target = Path(target_path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(await self.sandbox.read_file(source_path))

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Copies a folder's content out, but for links that lead outside of it and devices; no turn."""
        Path(target_dir).mkdir(parents=True, exist_ok=True)
        for entry in await self.sandbox.download(source_dir, target_dir, unsafe="skip"):
            self.logger.warning("left out of %s: %s", source_dir, entry)

    async def fork(self, n: int) -> list[BoxwoodEnvironment]:
        """Started environments that stand where this one stands, all from one checkpoint.

        They end with this one, whose connection they share.

        Raises:
            NodeWithheld: The node can't be restored exactly.
        """
        made: list[BoxwoodEnvironment] = []
        children = await self.sandbox.fork(n, min_ready=n, replace_failed=True, lease=self.options.lease)
        for child in children.ready:
            other = copy.copy(self)
            other._client, other._tree, other._sandbox = None, None, child
            made.append(other)
        return made

    async def evaluate(self, grader: boxwood.Grader) -> boxwood.Evaluation:
        """Grades the node where it stands; see `boxwood.Node.evaluate`."""
        node = await self.sandbox.head
        return await node.evaluate(grader)
