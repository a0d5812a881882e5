"""Grading: what is run to reward a node, out of the reach of the agent that made it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from . import _wire, errors
from ._channel import new_key
from ._command import command_message
from ._proto import boxwood_pb2 as pb
from .records import File, Image, Limits, Observation, Observed, TurnStatus

if TYPE_CHECKING:
    from ._command import Command


class Named(Protocol):
    """Something with an id: a node of either face."""

    @property
    def id(self) -> str:
        """Its id."""
        ...


@dataclasses.dataclass(frozen=True)
class Grader:
    """How a node is graded.

    With `image` or `node` the command runs in a fresh sandbox, which gets of the graded node what lies at
    `paths` and nothing else: no program, start file, process or test there is the agent's. With
    neither it runs in a scratch fork of the graded node, where all of that is: that is for
    agents which don't cheat. The code that is tested runs beside the tests in either.

    Attributes:
        command: A string for ``bash -lc``, or arguments.
        image: The fresh sandbox's image, its name or digest.
        node: A node for it to stand at in its place, or its id, such as the root of a tree
            whose set-up has what the grader needs. Quicker than an image.
        paths: What is copied from the graded node, to the same places: absolute, none below another.
        files: What the agent must not see, written last: `File`, or a pair of path and content.
        rewards_file: Read when the command has ended: a JSON object of numbers, or one number. None:
            the reward is 1.0 if the command exits with 0, else 0.0; note that code which is
            tested in the grader's own process can end it with 0.
        timeout: Seconds that the command may take.
        cwd: Its working folder.
        env: Its environment beside the default.
        user: Whom it runs as.
        limits: The sandboxes' limits.
    """

    command: Command
    image: Image | str | None = None
    node: Named | str | None = None
    paths: Sequence[str] = ()
    files: Sequence[File | tuple[str, bytes]] = ()
    rewards_file: str | None = None
    timeout: float = 300.0
    cwd: str | None = None
    env: Mapping[str, str] | None = None
    user: str | None = None
    limits: Limits | None = None

    def __post_init__(self) -> None:
        if self.image is not None and self.node is not None:
            raise errors.invalid("a grader has an image or a node, not both")


@dataclasses.dataclass(frozen=True)
class Evaluation(Observed):
    """What a grader came to. A failure of the host is an exception, never one of these.

    Attributes:
        rewards: Named rewards; empty if the command gave none.
        observation: What the command answered.
        status: ``completed`` or ``timed_out``.
        problem: Why there are no rewards; empty if there are.
        missing: Those of the paths that the node lacks.
        seconds: Wall time of the command.
    """

    rewards: Mapping[str, float]
    observation: Observation
    status: TurnStatus
    problem: str
    missing: tuple[str, ...]
    seconds: float

    @property
    def reward(self) -> float | None:
        """The reward that is called ``"reward"``; None if there is none."""
        return self.rewards.get("reward")


def request(node_id: str, grader: Grader, key: str | None) -> pb.EvaluateRequest:
    """Writes an EvaluateRequest."""
    files = [file if isinstance(file, File) else File(*file) for file in grader.files]
    message = pb.Grader(
        paths=grader.paths,
        files=[pb.FileToWrite(path=file.path, content=file.content, mode=file.mode) for file in files],
        command=command_message(grader.command, grader.cwd, grader.env, grader.user, None, grader.timeout, 0),
        rewards_file=grader.rewards_file or "",
        limits=_wire.limits_message(grader.limits),
    )
    if grader.image is not None:
        message.image = grader.image.digest if isinstance(grader.image, Image) else grader.image
    elif grader.node is not None:
        message.node_id = grader.node if isinstance(grader.node, str) else grader.node.id
    return pb.EvaluateRequest(node_id=node_id, grader=message, idempotency_key=key or new_key())


def evaluation(m: pb.EvaluateResponse) -> Evaluation:
    """Reads an EvaluateResponse."""
    return Evaluation(
        rewards=dict(m.rewards),
        observation=_wire.observation(m.observation),
        status=_wire.turn_status(m.status),
        problem=m.problem,
        missing=tuple(m.missing),
        seconds=m.wall_ns / 1e9,
    )
