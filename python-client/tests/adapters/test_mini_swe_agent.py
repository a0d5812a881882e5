"""mini-swe-agent's own agent in a sandbox, and four of it from one point."""

from __future__ import annotations

import pytest

pytest.importorskip("minisweagent", reason="mini-swe-agent is not installed: make test-adapters")

import minisweagent
from conftest import pinned, same_signatures
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments import get_environment
from minisweagent.environments.docker import DockerEnvironment, DockerEnvironmentConfig
from minisweagent.models.test_models import DeterministicModel, make_output

import boxwood
from boxwood.integrations.mini_swe_agent import BoxwoodEnvironment, branch

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat /work/answer"


def agent(image: str, *commands: str, **config: object) -> DefaultAgent:
    model = DeterministicModel(outputs=[make_output(c, [{"command": c}], cost=0.1) for c in commands])
    env = BoxwoodEnvironment(image=image, setup=["mkdir -p /work"], cwd="/work", **config)
    return DefaultAgent(model, env, system_template="You act.", instance_template="Task: {{task}}")


def test_the_contract() -> None:
    pinned("mini-swe-agent", "2.4.6")
    assert minisweagent.Environment in BoxwoodEnvironment.__mro__
    same_signatures(
        BoxwoodEnvironment, minisweagent.Environment, ["execute", "get_template_vars", "serialize"]
    )
    same_signatures(
        BoxwoodEnvironment, DockerEnvironment, ["execute", "get_template_vars", "serialize", "cleanup"]
    )
    ours = BoxwoodEnvironment.__init__.__kwdefaults__["config_class"].model_fields
    # What the Docker environment's configuration has means the same here, but for what only Docker has.
    assert set(DockerEnvironmentConfig.model_fields) - set(ours) == {
        "executable",
        "run_args",
        "container_timeout",
        "pull_timeout",
    }


def test_an_episode(image: str) -> None:
    episode = agent(
        image, "echo 4 > answer; pwd", "echo out; echo err >&2; exit 3", "echo 2 >> answer", SUBMIT
    )
    try:
        result = episode.run("write 42")
        assert result == {"exit_status": "Submitted", "submission": "4\n2\n"}
        assert len(list(episode.env._tree.nodes())) == 1 + 4
        saved = episode.save(None)
        assert saved["info"]["boxwood"]["node_id"] == episode.env.node_id
        assert saved["info"]["config"]["environment"]["image"] == image
    finally:
        episode.env.cleanup()


def test_what_execute_gives(image: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORWARDED", "here")
    env = get_environment(
        {
            "environment_class": "boxwood.integrations.mini_swe_agent.BoxwoodEnvironment",
            "image": image,
            "env": {"OWN": "mine"},
            "forward_env": ["FORWARDED", "NOT_SET"],
        }
    )
    assert isinstance(env, BoxwoodEnvironment)
    try:
        both = env.execute({"command": "echo out; echo err >&2; echo $OWN $FORWARDED; exit 3"})
        assert both["output"] == "out\nerr\nmine here\n"
        assert (both["returncode"], both["exception_info"]) == (3, "")
        assert both["extra"] == {"node_id": env.node_id, "verdict": "none"}
        slow = env.execute({"command": "echo begun; sleep 100"}, timeout=0.3)
        assert (slow["returncode"], slow["output"]) == (-1, "begun\n")
        assert "longer than 0.3 s" in slow["exception_info"]
        bad = env.execute({"command": "a\0b"})
        assert bad["returncode"] == -1
        assert "NUL" in bad["exception_info"]
        assert env.execute({"command": "pwd"}, "/usr")["output"] == "/usr\n"
        assert env.get_template_vars(more=1)["more"] == 1
    finally:
        env.cleanup()
    with pytest.raises(boxwood.BoxwoodError):
        env.execute({"command": "true"})


def test_agents_branch(image: str) -> None:
    first = agent(image, "echo 4 > answer", "echo 2 >> answer", SUBMIT)
    try:
        first.extra_template_vars = {"task": "write 42"}
        first.step()
        others = branch(first, 3)
        assert len({other.env.sandbox.id for other in others}) == 3
        for number, other in enumerate(others):
            assert other.messages == first.messages
            other.model = DeterministicModel(
                outputs=[make_output(c, [{"command": c}]) for c in (f"echo {number} >> answer", SUBMIT)]
            )
            other.step()
            with pytest.raises(minisweagent.exceptions.Submitted) as done:
                other.step()
            assert done.value.messages[0]["extra"]["submission"] == f"4\n{number}\n"
        # The one that they came from goes on as if they weren't there, and the node is graded.
        first.step()
        found = first.env.evaluate(boxwood.Grader("[ $(tr -d '\\n' < /work/answer) = 42 ]"))
        assert found.reward == 1.0
        apart = boxwood.Grader("read a < /work/answer; [ $a = 4 ]", image=image, paths=["/work"])
        assert others[1].env.evaluate(apart).reward == 1.0
        for other in others:
            other.env.cleanup()
    finally:
        first.env.cleanup()
