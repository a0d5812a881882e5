"""SWE-ReX's deployment and runtime over a sandbox, with sessions that fork."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import ClassVar

import pytest

pytest.importorskip("swerex", reason="swe-rex is not installed: make test-adapters")

from conftest import pinned, same_signatures
from swerex import exceptions
from swerex.deployment.abstract import AbstractDeployment
from swerex.deployment.hooks.abstract import DeploymentHook
from swerex.runtime.abstract import (
    AbstractRuntime,
    BashAction,
    BashInterruptAction,
    CloseBashSessionRequest,
    Command,
    CreateBashSessionRequest,
    ReadFileRequest,
    UploadRequest,
    WriteFileRequest,
)

import boxwood
from boxwood import aio
from boxwood.integrations.swe_rex import BoxwoodDeployment, BoxwoodRuntime


async def run(runtime: BoxwoodRuntime, command: str, **options: object) -> str:
    return (await runtime.run_in_session(BashAction(command=command, **options))).output


async def started(image: str) -> BoxwoodDeployment:
    deployment = BoxwoodDeployment(image=image)
    await deployment.start()
    await deployment.runtime.create_session(CreateBashSessionRequest())
    return deployment


def test_the_contract() -> None:
    pinned("swe-rex", "1.4.0")
    assert issubclass(BoxwoodRuntime, AbstractRuntime)
    assert issubclass(BoxwoodDeployment, AbstractDeployment)
    assert not BoxwoodRuntime.__abstractmethods__
    assert not BoxwoodDeployment.__abstractmethods__
    same_signatures(BoxwoodRuntime, AbstractRuntime, sorted(AbstractRuntime.__abstractmethods__))
    same_signatures(BoxwoodDeployment, AbstractDeployment, sorted(AbstractDeployment.__abstractmethods__))


def test_an_episode(base_image: str) -> None:
    """What an agent's tools lean on between actions is there, and in each fork as it was at its point."""

    async def main() -> None:
        deployment = await started(base_image)
        try:
            runtime = deployment.runtime
            await run(runtime, "mkdir -p '/work/a b' && cd '/work/a b'")
            assert await run(runtime, "pwd") == "/work/a b\n"
            await run(
                runtime,
                "export WORD='two\nlines' SUM=1; list=(x 'y z'); greet() { echo hello $1; }; alias hi='greet you'",
            )
            await run(runtime, "umask 077; set -o pipefail; shopt -s nullglob; readonly FIXED=yes")
            said = await run(
                runtime,
                'echo "$WORD"; echo ${#list[@]} "${list[1]}"; hi; umask; echo *none; echo $FIXED $SUM',
            )
            assert said == "two\nlines\n2 y z\nhello you\n0077\n\nyes 1\n"
            assert await run(runtime, "false | true", check="ignore") == ""
            others = await deployment.fork(3)
            for number, other in enumerate(others):
                await run(other.runtime, f"SUM=$((SUM + {number})); echo $SUM > sum")
            await run(runtime, "cd /; SUM=gone; unset -f greet")
            for number, other in enumerate(others):
                assert await run(other.runtime, "pwd; cat sum; hi") == f"/work/a b\n{1 + number}\nhello you\n"
                await other.stop()
                await other.stop()
            assert await run(runtime, "echo $SUM; pwd") == "gone\n/\n"
        finally:
            await deployment.stop()
        with pytest.raises(exceptions.DeploymentNotStartedError):
            _ = deployment.runtime

    asyncio.run(main())


def test_how_actions_fail(base_image: str) -> None:
    async def main() -> None:
        deployment = await started(base_image)
        try:
            runtime = deployment.runtime
            with pytest.raises(exceptions.NonZeroExitCodeError, match=r"because: .*exit code 3"):
                await run(runtime, "echo x; exit 3", error_msg="because")
            silent = await runtime.run_in_session(
                BashAction(command="KEPT=1; echo err >&2; exit 4", check="silent")
            )
            assert (silent.output, silent.exit_code) == ("err\n", 4)
            assert (
                await runtime.run_in_session(BashAction(command="false", check="ignore"))
            ).exit_code is None
            # An action that exits ends itself and not the session.
            assert await run(runtime, "echo $KEPT") == "1\n"
            with pytest.raises(exceptions.BashIncorrectSyntaxError):
                await run(runtime, "if then")
            with pytest.raises(exceptions.CommandTimeoutError):
                await run(runtime, "sleep 100", timeout=0.3)
            assert (await runtime.run_in_session(BashInterruptAction())).exit_code == 0
            with pytest.raises(exceptions.SwerexException, match="interactive"):
                await run(runtime, "python3", is_interactive_command=True)
            with pytest.raises(exceptions.SessionExistsError):
                await runtime.create_session(CreateBashSessionRequest())
            with pytest.raises(exceptions.SessionDoesNotExistError):
                await run(runtime, "true", session="other")
            await runtime.create_session(CreateBashSessionRequest(session="other"))
            assert await run(runtime, "echo ${KEPT-unset}", session="other") == "unset\n"
            await runtime.close_session(CloseBashSessionRequest(session="other"))
            with pytest.raises(exceptions.SessionDoesNotExistError):
                await runtime.close_session(CloseBashSessionRequest(session="other"))
        finally:
            await deployment.stop()

    asyncio.run(main())


def test_commands_and_files(base_image: str, tmp_path: Path) -> None:
    class Hook(DeploymentHook):
        steps: ClassVar[list[str]] = []

        def on_custom_step(self, message: str) -> None:
            self.steps.append(message)

    async def main() -> None:
        deployment = BoxwoodDeployment(image=base_image)
        deployment.add_hook(Hook())
        await deployment.start()
        try:
            runtime = deployment.runtime
            assert Hook.steps
            assert await deployment.is_alive()
            done = await runtime.execute(Command(command=["sh", "-c", "echo out; echo err >&2; exit 5"]))
            assert (done.stdout, done.stderr, done.exit_code) == ("out\n", "err\n", 5)
            merged = await runtime.execute(
                Command(
                    command="echo out; echo err >&2; echo $X; pwd",
                    shell=True,
                    merge_output_streams=True,
                    env={"X": "y"},
                    cwd="/usr",
                )
            )
            assert merged.stdout == "out\nerr\ny\n/usr\n"
            with pytest.raises(exceptions.NonZeroExitCodeError):
                await runtime.execute(Command(command="false", shell=True, check=True))
            with pytest.raises(exceptions.CommandTimeoutError):
                await runtime.execute(Command(command="sleep 100", shell=True, timeout=0.3))
            await runtime.write_file(WriteFileRequest(path="/new/folder/file", content="täxt"))
            assert (await runtime.read_file(ReadFileRequest(path="/new/folder/file"))).content == "täxt"
            with pytest.raises(FileNotFoundError):
                await runtime.read_file(ReadFileRequest(path="/no/such"))
            with pytest.raises(UnicodeDecodeError):
                await runtime.read_file(ReadFileRequest(path="/new/folder/file", encoding="ascii"))
            (tmp_path / "sub").mkdir()
            (tmp_path / "sub" / "inner").write_text("x")
            await runtime.upload(UploadRequest(source_path=str(tmp_path), target_path="/up"))
            await runtime.upload(
                UploadRequest(source_path=str(tmp_path / "sub" / "inner"), target_path="/one")
            )
            shown = await runtime.execute(Command(command="cat /up/sub/inner /one", shell=True))
            assert shown.stdout == "xx"
            found = await deployment.evaluate(boxwood.Grader("[ $(cat /one) = x ]"))
            assert found.reward == 1.0
            await runtime.close()
        finally:
            await deployment.stop()
        async with aio.connect() as client:
            assert not await client.sandboxes()

    asyncio.run(main())
