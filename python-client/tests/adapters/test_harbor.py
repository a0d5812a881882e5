"""Harbor's own trial in a sandbox: its oracle agent solves a task, its verifier grades it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

pytest.importorskip("harbor", reason="harbor is not installed: make test-adapters")

from conftest import REPOSITORY, pinned, same_signatures
from harbor.environments.base import BaseEnvironment
from harbor.models.task.config import EnvironmentConfig as TaskEnvironment
from harbor.models.trajectories import Trajectory
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
from harbor.models.trial.paths import TrialPaths
from harbor.trial.trial import Trial

import boxwood
from boxwood.integrations.harbor import BoxwoodEnvironment

PATH = "boxwood.integrations.harbor:BoxwoodEnvironment"


def task(folder: Path, image: str, solution: str) -> Path:
    for name, content in {
        "task.toml": f'version = "1.0"\n[environment]\ndocker_image = "{image}"\nworkdir = "/app"\n[agent]\ntimeout_sec = 60\n[verifier]\ntimeout_sec = 60\n',
        "instruction.md": "Write 42 to /app/answer.",
        "environment/notes": "a loose file of the environment",
        "solution/solve.sh": f"#!/bin/bash\n{solution}\n",
        "tests/test.sh": '#!/bin/bash\n[ "$(cat /app/answer)" = 42 ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n',
    }.items():
        path = folder / "task" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder / "task"


def environment(folder: Path, **config: object) -> BoxwoodEnvironment:
    (folder / "environment").mkdir(exist_ok=True)
    options = config.pop("options", {})
    return BoxwoodEnvironment(
        environment_dir=folder / "environment",
        environment_name="t",
        session_id="t__1",
        trial_paths=TrialPaths(folder / "trial"),
        task_env_config=TaskEnvironment(**config),
        **options,
    )


def test_the_contract() -> None:
    pinned("harbor", "0.26.0")
    assert issubclass(BoxwoodEnvironment, BaseEnvironment)
    assert not BoxwoodEnvironment.__abstractmethods__
    names = sorted(BaseEnvironment.__abstractmethods__ | {"capabilities", "resource_capabilities"})
    same_signatures(BoxwoodEnvironment, BaseEnvironment, names)


@pytest.mark.parametrize(
    ("solution", "reward"), [("echo 42 > answer; cat notes", 1.0), ("echo 41 > answer", 0.0)]
)
def test_a_trial(base_image: str, tmp_path: Path, solution: str, reward: float) -> None:
    async def main() -> None:
        trial = await Trial.create(
            TrialConfig(
                task=TaskConfig(path=task(tmp_path, base_image, solution)),
                trials_dir=tmp_path / "trials",
                agent=AgentConfig(name="oracle"),
                environment=EnvironmentConfig(import_path=PATH),
            )
        )
        result = await trial.run()
        assert result.exception_info is None, result.exception_info
        assert result.verifier_result is not None
        assert result.verifier_result.rewards == {"reward": reward}

    asyncio.run(main())
    with boxwood.connect() as client:
        assert not client.sandboxes()


def test_what_we_write_as_atif_is_a_trajectory() -> None:
    written = REPOSITORY / "internal" / "trajectory" / "testdata" / "atif-written.json"
    read = Trajectory.model_validate_json(written.read_text())
    assert [s.is_copied_context for s in read.steps] == [True, True, None, None, None, None]
    assert read.steps[2].extra == {"boxwood": {"node": "nd_3", "verdict": "none", "exit_code": 1}}


def test_an_environment_forks(base_image: str, tmp_path: Path) -> None:
    async def main() -> None:
        env = environment(
            tmp_path,
            docker_image=base_image,
            workdir="/work",
            cpus=0.5,
            memory_mb=512,
            env={"FROM_TASK": "yes"},
        )
        await env.start(force_build=False)
        try:
            said = await env.exec(
                "pwd; echo $FROM_TASK $OWN; id -u; echo err >&2; exit 3", env={"OWN": "mine"}, user=65534
            )
            assert (said.stdout, said.stderr, said.return_code) == ("/work\nyes mine\n65534\n", "err\n", 3)
            with pytest.raises(RuntimeError, match="timed out after 1 seconds"):
                await env.exec("sleep 100", timeout_sec=1)
            source = tmp_path / "up"
            (source / "sub").mkdir(parents=True)
            (source / "sub" / "file").write_text("content")
            await env.upload_dir(source, "/work/up")
            await env.upload_file(source / "sub" / "file", "/made/for/it")
            assert await env.is_dir("/work/up/sub")
            assert await env.is_file("/made/for/it")
            others = await env.fork(3)
            for number, other in enumerate(others):
                await other.exec(f"echo {number} > /work/own; ln -s /etc/passwd /work/up/out")
            await env.exec("echo parent > /work/own")
            for number, other in enumerate(others):
                await other.download_file("/work/own", tmp_path / "down" / "own")
                assert (tmp_path / "down" / "own").read_text() == f"{number}\n"
                await other.download_dir("/work/up", tmp_path / f"down{number}")
                assert [p.name for p in (tmp_path / f"down{number}").rglob("*")] == ["sub", "file"]
                await other.stop(delete=True)
            # Two commands at once: the second waits for the first.
            both = await asyncio.gather(env.exec("sleep 0.2; echo one"), env.exec("echo two"))
            assert [r.stdout for r in both] == ["one\n", "two\n"]
            found = await env.evaluate(boxwood.Grader("grep -q parent /work/own"))
            assert found.reward == 1.0
        finally:
            await env.stop(delete=True)
            await env.stop(delete=True)

    asyncio.run(main())


def test_what_it_refuses(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs a ready image"):
        environment(tmp_path)
    with pytest.raises(ValueError, match="Unknown option 'colour'"):
        environment(tmp_path, docker_image="x", options={"colour": "red"})
    environment(tmp_path, options={"image": "x"})
    (tmp_path / "environment" / "docker-compose.yaml").write_text("services: {}\n")
    with pytest.raises(ValueError, match="docker-compose file is not supported"):
        environment(tmp_path, docker_image="x")
