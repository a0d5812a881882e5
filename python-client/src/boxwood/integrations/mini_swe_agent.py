"""An environment of mini-swe-agent whose actions are turns, and that can be forked.

    agent = DefaultAgent(model, BoxwoodEnvironment(image="task:7", cwd="/repo"), ...)
    agent.run("fix the tests")
    for other in branch(agent, 4):          # four agents at the same point of the same episode
        other.step()

By mini-swe-agent's configuration:

    environment_class: boxwood.integrations.mini_swe_agent.BoxwoodEnvironment

What forks: all files, and processes where the node's process half could be saved. What doesn't: the
agent's own Python objects (`branch` copies its messages and shares its model), and connections to the
outside.
"""

from __future__ import annotations

import copy
import os
import platform
from typing import Any, TypeVar

import minisweagent
from minisweagent.exceptions import Submitted
from minisweagent.utils.serialize import recursive_merge
from pydantic import BaseModel

import boxwood

SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"

AgentT = TypeVar("AgentT")


class BoxwoodEnvironmentConfig(BaseModel):
    """What an environment is made from; names are those of mini-swe-agent's other environments."""

    image: str
    """An image of the daemon, its name or digest."""
    cwd: str = "/"
    """Where commands run."""
    env: dict[str, str] = {}
    """Their environment."""
    forward_env: list[str] = []
    """Variables of this process that they get, where they are set; `env` wins."""
    timeout: float = 30
    """Seconds that a command may take."""
    interpreter: list[str] = ["bash", "-lc"]
    """What runs a command, which is its last argument."""
    setup: list[str] = []
    """Commands that prepare the image, run once for all environments that ask for the same."""
    address: str | None = None
    """The daemon; None as for `boxwood.connect`."""
    lease: float = 7200
    """Seconds that the sandbox lives without a command."""
    output_limit: int = 1 << 20
    """Bytes of output that are kept of a command, half of them its head and half its tail."""


class BoxwoodEnvironment(minisweagent.Environment):
    """Runs mini-swe-agent's actions as turns of one sandbox.

    A failure of the host is raised, as a `boxwood.InfrastructureError`: it ends the run and is not
    shown to the model as an observation.

    Attributes:
        config: Its configuration.
        sandbox: The sandbox.
        node_id: The node at which it stands.
    """

    def __init__(self, *, config_class: type[BaseModel] = BoxwoodEnvironmentConfig, **kwargs: Any) -> None:
        self.config: Any = config_class(**kwargs)
        self._client = boxwood.connect(self.config.address)
        try:
            tree = self._client.create_tree(
                image=self.config.image, setup=self.config.setup, lease=self.config.lease
            )
        except BaseException:
            self._client.close()
            raise
        self.sandbox = tree.sandbox
        self._tree: boxwood.Tree | None = tree  # whose it is to close

    @property
    def node_id(self) -> str:
        """The node at which it stands."""
        return self.sandbox.head_id

    def execute(
        self, action: dict[str, Any], cwd: str = "", *, timeout: float | None = None
    ) -> dict[str, Any]:
        """Runs an action as one turn.

        Returns:
            ``output`` (both streams in order), ``returncode``, ``exception_info``; in ``extra`` the
            node's id and the turn's verdict.

        Raises:
            Submitted: The command said that the task is done.
        """
        command, limit = action.get("command", ""), timeout or self.config.timeout
        forwarded = {name: os.environ[name] for name in self.config.forward_env if name in os.environ}
        output: dict[str, Any]
        try:
            turn = self.sandbox.run(
                ["/bin/sh", "-c", 'exec "$@" 2>&1', "sh", *self.config.interpreter, command],
                cwd=cwd or self.config.cwd,
                env={**forwarded, **self.config.env},
                timeout=limit,
                output_limit=self.config.output_limit,
            )
        except boxwood.InvalidArgument as error:  # the model's doing: a NUL byte, a folder that isn't there
            return {
                "output": "",
                "returncode": -1,
                "exception_info": f"An error occurred while executing the command: {error.message}",
                "extra": {"exception_type": type(error).__name__, "exception": error.message},
            }
        extra = {"node_id": turn.node.id, "verdict": str(turn.verdict)}
        output = {
            "output": turn.stdout.text,
            "returncode": turn.exit_code,
            "exception_info": "",
            "extra": extra,
        }
        if turn.timed_out:
            output["returncode"] = -1
            output["exception_info"] = f"The command took longer than {limit:g} s and was killed"
            extra["exception_type"] = "TimeoutExpired"
        self._check_finished(output)
        return output

    def _check_finished(self, output: dict[str, Any]) -> None:
        lines = output["output"].lstrip().splitlines(keepends=True)
        if lines and lines[0].strip() == SUBMIT and output["returncode"] == 0:
            submission = "".join(lines[1:])
            raise Submitted(
                {
                    "role": "exit",
                    "content": submission,
                    "extra": {"exit_status": "Submitted", "submission": submission},
                }
            )

    def get_template_vars(self, **kwargs: Any) -> dict[str, Any]:
        """What prompts may name."""
        return recursive_merge(self.config.model_dump(), platform.uname()._asdict(), kwargs)

    def serialize(self) -> dict[str, Any]:
        """What a trajectory tells of it: its configuration, and where it stands."""
        return {
            "info": {
                "config": {
                    "environment": self.config.model_dump(mode="json"),
                    "environment_type": f"{type(self).__module__}.{type(self).__name__}",
                },
                "boxwood": {"tree_id": self.sandbox.tree_id, "node_id": self.node_id},
            }
        }

    def fork(self, n: int) -> list[BoxwoodEnvironment]:
        """Environments that stand at the node where this one stands, all from one checkpoint.

        Raises:
            NodeWithheld: The node can't be restored exactly.
        """
        made: list[BoxwoodEnvironment] = []
        for child in self.sandbox.fork(n, min_ready=n, replace_failed=True, lease=self.config.lease).ready:
            other = copy.copy(self)
            other.sandbox, other._tree = child, None
            made.append(other)
        return made

    def evaluate(self, grader: boxwood.Grader) -> boxwood.Evaluation:
        """Grades the node at which it stands; see `boxwood.Node.evaluate`."""
        return self._client.node(self.node_id).evaluate(grader)

    def cleanup(self) -> None:
        """Releases the sandbox; the one that others were forked from closes the tree, and theirs with it."""
        if self._tree is not None:
            self._tree.close()
            self.sandbox.released = True
            self._client.close()
            self._tree = None
        else:
            self.sandbox.release()


def branch(agent: AgentT, n: int) -> list[AgentT]:
    """Agents at the same point of the same episode, each with an environment of its own.

    Args:
        agent: An agent that has `env` (a `BoxwoodEnvironment`) and `messages`, such as mini-swe-agent's
            `DefaultAgent`. Its model is shared.
        n: How many.
    """
    made: list[AgentT] = []
    whole: Any = agent
    for env in whole.env.fork(n):
        other: Any = copy.copy(whole)
        other.env, other.messages = env, copy.deepcopy(whole.messages)
        other.extra_template_vars = dict(whole.extra_template_vars)
        made.append(other)
    return made
