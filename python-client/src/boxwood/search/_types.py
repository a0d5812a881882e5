"""What a search speaks of: actions, histories, the places of its tree, and where its turns run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias

from ..errors import invalid
from ..grading import Evaluation, Grader
from ..records import Annotation

Status = Literal["planned", "open", "done", "truncated", "declined", "lost", "withheld", "ungraded"]
"""How far a place is.

``planned``: named, its turn hasn't run yet. ``open``: its turn ran and another may follow. ``done``:
the policy stopped there. ``truncated``: the search's `max_turns` ended it. ``declined``: the policy
gave no action for it. ``lost``: its turn could
not be run, or its sandbox died, for a reason that isn't the agent's. ``withheld``: the node before it
can't be restored exactly, so nothing could be run there. ``ungraded``: it ended, but its reward
could not be found out, for a reason that isn't the agent's.
"""

FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Action:
    """What the policy does in one turn, with the tokens that say so.

    Attributes:
        command: A string for ``bash -lc``, or arguments. None: nothing is run, but the turn is a
            node like any other, so that its tokens are kept.
        token_ids: The tokens that the policy sampled, exactly as it sampled them. They are handed
            through to the trajectory and never made again from text.
        logprobs: One log-probability for each of `token_ids`.
        context_ids: The tokens of the model's prompt that lie between the tokens of the action before
            (or the prompt's start) and `token_ids`: the observation as the policy's template has it.
            They are part of the trajectory with a loss mask of 0.
        policy_version: Which policy sampled it.
        stop: Whether the episode is over after it.
        entropy: Mean entropy in nats of the policy's distribution over the first tokens of the
            action, where it is known; `arpo` branches by it.
        timeout: Seconds that the command may take; the tree's default if None.
        text: The message that the tokens mean, for who shows the history to a chat model.
    """

    command: str | Sequence[str] | None = None
    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    context_ids: Sequence[int] = ()
    policy_version: str = ""
    stop: bool = False
    entropy: float | None = None
    timeout: float | None = None
    text: str = ""

    def __post_init__(self) -> None:
        # Plain numbers, whatever array they came in: they are kept as JSON.
        for name, kind in (("token_ids", int), ("context_ids", int), ("logprobs", float)):
            object.__setattr__(self, name, tuple(kind(v) for v in getattr(self, name)))
        if len(self.token_ids) != len(self.logprobs):
            raise invalid(
                f"an action has {len(self.token_ids)} token ids and {len(self.logprobs)} log-probabilities",
                "give one log-probability for each sampled token",
            )

    @property
    def uncertainty(self) -> float:
        """`entropy`; where that is unknown its estimate by the mean surprisal of the sampled tokens."""
        if self.entropy is not None:
            return self.entropy
        return -sum(self.logprobs) / len(self.logprobs) if self.logprobs else 0.0


@dataclasses.dataclass(frozen=True)
class Seen:
    """What the policy sees of a turn that ran.

    Attributes:
        stdout: Head and tail of the output, as text.
        stderr: Head and tail of the error output, as text.
        exit_code: The exit code, -1 if a signal ended the command.
        timed_out: Whether its deadline ended it.
        refused: Why the command was refused before anything ran (it held a NUL byte, say); empty
            if it ran. That is the policy's doing, and an observation like any other.
    """

    stdout: str = ""
    stderr: str = ""
    exit_code: int = 0
    timed_out: bool = False
    refused: str = ""


@dataclasses.dataclass(frozen=True)
class Step:
    """One turn of a history: what was done, and what came of it."""

    node_id: str
    action: Action
    seen: Seen


@dataclasses.dataclass(frozen=True)
class History:
    """What the policy is asked with.

    Attributes:
        steps: The turns so far, the first one first.
        seed: A number made from the search's seed and the place that is asked for. A policy that
            samples with it makes the whole search repeatable.
        index: The how manieth action at this prefix is wanted, from 0.
        width: How many are wanted from there on. A policy may give one, and is asked again for the
            others with other seeds, or a list of up to that many.
        affinity_key: The same for all histories that share their first turn. An LLM server that
            is chosen by it has the prefix in its cache.
        prefix_id: Names exactly this prefix: the node that it ends at.
        invalidated: Prefixes below this affinity key that were abandoned because their turn was lost
            and run again. A cache that is kept by session must drop what it holds for them; one
            that is kept by the tokens themselves needn't.
    """

    steps: tuple[Step, ...]
    seed: int
    index: int
    width: int
    affinity_key: str
    prefix_id: str
    invalidated: tuple[str, ...] = ()


Policy: TypeAlias = Callable[[History], Awaitable["Action | Sequence[Action]"]]
Reward: TypeAlias = Callable[["Place"], Awaitable["float | Mapping[str, float]"]]


class Place:
    """A place in the search's tree: one turn, between its parent and its children.

    Attributes:
        name: Its path from the root, such as ``"0.2.1"``: made from the order in which the search
            asked, never from the order in which turns ended. The root's is empty.
        parent: The place before it; None for the root.
        tree: Which tree of its group it belongs to; the same as its parent's below the root.
        children: The places after it, by name.
        node_id: The node of the tree; empty until its turn has run.
        action: What the policy did; None for the root.
        seen: What came of it.
        status: How far it is.
        reward: The reward of an ended place; None until it is graded.
        rewards: All its named rewards.
        visits: How often a search passed here.
        value: Mean of the values that were backed up through here.
    """

    def __init__(self, parent: Place | None, name: str, tree: str = "0") -> None:
        self.parent, self.name, self.tree = parent, name, tree
        self.children: list[Place] = []
        self._named = 0
        self.node_id = ""
        self.action: Action | None = None
        self.seen = Seen()
        self.status: Status = "planned"
        self.reward: float | None = None
        self.rewards: dict[str, float] = {}
        self.visits = 0
        self.value = 0.0
        # Nodes of turns that were lost and run again; empty where a try left none.
        self.abandoned: list[str] = []
        # Simulations that passed here and haven't ended.
        self.underway = 0
        # Whether a fork of it can be had: None until its capture was looked at.
        self.forkable: bool | None = None

    def __repr__(self) -> str:
        reward = "" if self.reward is None else f", reward {self.reward:g}"
        return f"<Place {self.name or 'root'} {self.status}{reward}>"

    @property
    def depth(self) -> int:
        """Turns from the root."""
        return len(self.path) - 1

    @property
    def path(self) -> list[Place]:
        """The places from the root to this one, both included."""
        path: list[Place] = [self]
        while path[-1].parent is not None:
            path.append(path[-1].parent)
        return path[::-1]

    @property
    def index(self) -> int:
        """Its place among its siblings, from 0."""
        return int(self.name.rpartition(".")[2] or 0)

    @property
    def branch(self) -> str:
        """The name of the first place below the root on the way here."""
        return self.name.split(".", 1)[0]

    @property
    def ended(self) -> bool:
        """Whether its episode is over and counts: it can be graded."""
        return self.status in ("done", "truncated")

    def child(self, tree: str | None = None) -> Place:
        """Plans one more place after this one. Call it in an order that doesn't depend on time.

        Args:
            tree: Its tree, where it is not that of its parent.
        """
        name = f"{self.name}.{self._named}" if self.name else str(self._named)
        self._named += 1
        made = Place(self, name, self.tree if tree is None else tree)
        self.children.append(made)
        return made

    def walk(self) -> Iterator[Place]:
        """This place and all below it, parents first, in order."""
        yield self
        for child in self.children:
            yield from child.walk()

    def leaves(self) -> list[Place]:
        """The graded ends at or below this place, in order."""
        return [place for place in self.walk() if place.ended and place.reward is not None]

    def back_up(self, value: float) -> None:
        """Counts a value here and on all places above."""
        for place in self.path:
            place.visits += 1
            place.value += (value - place.value) / place.visits


@dataclasses.dataclass(frozen=True)
class Ran:
    """A turn that a `Rollout` ran or found.

    Attributes:
        node_id: Its node.
        parent_id: The node that it started from.
        seen: What came of it.
        lost: Whether the sandbox died in it.
        payload: The node's payload.
        rewards: The node's rewards.
        labels: The node's labels.
    """

    node_id: str
    parent_id: str
    seen: Seen
    lost: bool = False
    payload: bytes = b""
    rewards: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])


class Rollout(Protocol):
    """Where the turns of a search run. `Sandboxes` is the real one."""

    async def resume(self, search: str) -> tuple[str, Sequence[Ran]]:
        """Fences off an earlier attempt of the search that has this name, and finds what it left.

        Returns:
            The node that the search starts from, and the turns that carry the label ``search``,
            none of which is still running.
        """
        ...

    async def prepare(self, node_id: str, count: int) -> None:
        """Says that so many turns will be asked for at this node; a failure shows in the turns."""
        ...

    async def turn(self, node_id: str, action: Action, labels: Mapping[str, str], payload: bytes) -> Ran:
        """Runs an action at a node.

        Raises:
            InfrastructureError: It could not be run.
            NodeWithheld: The node can't be restored exactly.
        """
        ...

    async def forkable(self, node_ids: Sequence[str]) -> Mapping[str, bool]:
        """Waits until it is known of each node whether it can be forked."""
        ...

    async def annotate(self, notes: Mapping[str, Annotation]) -> None:
        """Sets what is given on nodes, durably."""
        ...

    async def evaluate(self, node_id: str, grader: Grader) -> Evaluation:
        """Grades a node.

        Raises:
            InfrastructureError: It could not be graded.
        """
        ...

    async def leave(self, node_id: str) -> None:
        """Says that no turn will follow at this node soon."""
        ...

    async def close(self) -> None:
        """Lets go of all that it holds; nodes stay."""
        ...


def number(*words: object) -> int:
    """A number of 63 bits that depends on the words alone."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, words)).encode()).digest()[:8], "big") >> 1


def pack(action: Action, refused: str) -> bytes:
    """The payload of a node: the action as JSON, whose floats come back bit for bit."""
    # Not asdict: it would copy each token by itself.
    given = {field.name: getattr(action, field.name) for field in dataclasses.fields(action)}
    fields: dict[str, Any] = {k: v for k, v in given.items() if v not in (None, "", (), [])}
    fields["boxwood_search"] = FORMAT
    if action.command is not None and not isinstance(action.command, str):
        fields["command"] = list(action.command)
    if refused:
        fields["refused"] = refused
    return json.dumps(fields, separators=(",", ":")).encode()


def unpack(payload: bytes) -> tuple[Action, str]:
    """The action of a payload, and why it was refused."""
    fields = json.loads(payload)
    if (found := fields.pop("boxwood_search", None)) != FORMAT:
        raise invalid(f"the payload has format {found!r} of boxwood.search, this version reads {FORMAT}")
    refused = fields.pop("refused", "")
    for name in ("token_ids", "logprobs", "context_ids"):
        fields[name] = tuple(fields.get(name, ()))
    return Action(**fields), refused
