# Written by scripts/gen-sync.py from aio/node.py: edit that.
"""Nodes: the turns of a tree, and what can be done with one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from . import _wire
from ._draw import table
from ._proto import boxwood_pb2 as pb
from .grading import Evaluation, Grader
from .records import (
    Action,
    CaptureStatus,
    Effect,
    Limits,
    Observation,
    ProcessKind,
    Pruned,
    TurnStatus,
    Verdict,
    annotation,
)

if TYPE_CHECKING:
    from .client import Client
    from .errors import ForkError
    from .fork import Children
    from .sandbox import Sandbox


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Node:
    """A turn boundary of a tree, as it was when it was read. Equal to any other reading of it.

    Attributes:
        id: Its id.
        tree_id: Its tree.
        parent_id: The node before it; empty for the root.
        depth: Its distance from the root.
        ordinal: Its place among its parent's children, from 0.
        action: What ran.
        observation: What it answered; empty in a brief listing.
        turn_status: How the turn ended.
        verdict: What changed, by halves.
        external: Whether something left the sandbox.
        reasons: Why the verdict is what it is.
        effects: The first effects; empty in a brief listing.
        effect_count: How many there are.
        checkpoint_id: The checkpoint that a fork uses; empty while pending or withheld.
        checkpoint_node_id: The node that this checkpoint was made for.
        process_kind: The kind of the saved process half.
        may_hold_secrets: Its processes were given secrets (`Sandbox.run`), which what was
            saved of them may hold. An archive of the tree has it only if that is asked for.
        capture: How far the capture is.
        withheld_reason: Why it can't be restored exactly.
        rewards: Rewards by name.
        value: Value that backups carry up.
        visits: Visits that backups count.
        labels: The trainer's own words.
        policy_version: Which policy acted.
        payload_digest: sha256 of the payload in hex, empty if there is none.
        payload_bytes: Its size.
        started_at: When the turn began, ns.
        ended_at: When its observation was complete, ns.
        frozen_at: When the checkpoint's state was frozen, ns; 0 if shared.
        survivors_ran: Whether processes of earlier turns ran in between.
        pinned: Whether it is kept from pruning.
        modify_index: Grows with every change.
        sandbox_id: The sandbox that ran the turn.
        replay_of: The node whose turn was run again here, by a fork with `replay`; empty: none.
    """

    id: str
    tree_id: str
    parent_id: str
    depth: int
    ordinal: int
    action: Action
    observation: Observation
    turn_status: TurnStatus
    verdict: Verdict
    external: bool
    reasons: tuple[str, ...]
    effects: tuple[Effect, ...]
    effect_count: int
    checkpoint_id: str
    checkpoint_node_id: str
    process_kind: ProcessKind
    may_hold_secrets: bool
    capture: CaptureStatus
    withheld_reason: str
    rewards: Mapping[str, float]
    value: float
    visits: int
    labels: Mapping[str, str]
    policy_version: str
    payload_digest: str
    payload_bytes: int
    started_at: int
    ended_at: int
    frozen_at: int
    survivors_ran: bool
    pinned: bool
    modify_index: int
    sandbox_id: str
    replay_of: str
    _client: Client

    if not TYPE_CHECKING:  # or a misspelt name would pass for a field

        def __getattr__(self, name: str) -> Any:
            """Reads the fields out of the message, when the first of them is asked for."""
            fields = self.__dict__
            # Two threads may both come here; they find the same.
            if (message := fields.get("_message")) is not None:
                fields.update(_read(message))
                fields["_message"] = None
            if name in fields:
                return fields[name]
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        if (message := state.pop("_message", None)) is not None:
            state.update(_read(message))
        return state

    def __eq__(self, other: object) -> bool:
        return self.id == other.id if isinstance(other, Node) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        rewards = "".join(f", {name} {value:g}" for name, value in sorted(self.rewards.items()))
        what = self.action.text.splitlines()[0][:40] if self.action.text else "root"
        return (
            f"<Node {self.id} depth {self.depth} {what!r}, verdict {self.verdict}, {self.capture}{rewards}>"
        )

    def _repr_html_(self) -> str:
        rows = [
            ("action", self.action.text[:400]),
            ("turn", "" if self.is_root else f"{self.turn_status}, exit {self.observation.exit_code}"),
            ("output", self.observation.stdout.text[:2000]),
            ("errors", self.observation.stderr.text[:2000]),
            ("verdict", "" if self.is_root else str(self.verdict)),
            ("effects", "\n".join(str(effect) for effect in self.effects[:20])),
            ("capture", f"{self.capture} {self.withheld_reason}".strip()),
            ("rewards", ", ".join(f"{k} {v:g}" for k, v in sorted(self.rewards.items()))),
            ("value", f"{self.value:g} of {self.visits} visits" if self.visits else ""),
            ("labels", ", ".join(f"{k}={v}" for k, v in sorted(self.labels.items()))),
        ]
        return table(f"Node {self.id}, depth {self.depth}", rows)

    @property
    def is_root(self) -> bool:
        """Whether it is its tree's root."""
        return not self.parent_id

    @property
    def captured(self) -> bool:
        """Whether it can be forked without waiting."""
        return self.capture in (CaptureStatus.CAPTURED, CaptureStatus.PROVEN)

    def refresh(self) -> Node:
        """Reads it again."""
        return self._client.node(self.id)

    def parent(self) -> Node | None:
        """The node before it; None for the root."""
        return self._client.node(self.parent_id) if self.parent_id else None

    def children(self, *, brief: bool = False) -> list[Node]:
        """The nodes that follow it, in order.

        Args:
            brief: Leave observations and effects out.
        """
        below = self._client._list_nodes(
            pb.ListNodesRequest(tree_id=self.tree_id, under=self.id, brief=brief)
        )
        return sorted([n for n in below if n.parent_id == self.id], key=lambda n: n.ordinal)

    def path(self) -> list[Node]:
        """All nodes from the root to this one, both included; one call a node."""
        nodes: list[Node] = [self]
        while (before := nodes[-1].parent()) is not None:
            nodes.append(before)
        return nodes[::-1]

    def fork(
        self,
        n: int = 1,
        *,
        scratch: bool = False,
        min_ready: int = 0,
        replace_failed: bool = False,
        deadline: float | None = None,
        labels: Mapping[str, str] | None = None,
        lease: float | None = None,
        limits: Limits | None = None,
        seed: int = 0,
        same_seed: bool = False,
        replay: bool = False,
        secret_env: Mapping[str, str] | None = None,
        idempotency_key: str | None = None,
    ) -> Children:
        """Makes n live sandboxes that stand at this node, all from one checkpoint.

        Waits for the node's capture if it is pending. Each child succeeds or fails
        alone: the list has one item a child, in order, a `Sandbox` or a `ForkError`.

        Args:
            n: How many, 1 to 1024.
            scratch: Their turns write no nodes.
            min_ready: Below this many ready children the others are released and the
                call fails; 0: no bound.
            replace_failed: Try a child that failed for a retryable reason once more.
            deadline: Seconds for the whole call; the client's timeout if None.
            labels: The sandboxes' labels.
            lease: Seconds that a child lives without a call; the tree's default if None.
            limits: The children's limits.
            seed: Each child's environment gets a BOXWOOD_SEED made from it; 0: none.
            same_seed: All children of a node get the same BOXWOOD_SEED.
            replay: A withheld node isn't refused. Each child is made from the nearest node
                above it that can be restored, and the turns from there run again in it, as
                they were asked for. They make nodes of their own (`Node.replay_of`), at the last
                of which the child stands; `Sandbox.replayed` says of each whether the
                same came of it. Choose a `deadline` that they fit into.
            secret_env: Secrets that sessions of the node were given, by name, for a daemon
                that was stopped since and has forgotten them (reason "secret_unknown").
            idempotency_key: Repeating a call with the same key gives the same children.

        Raises:
            NodeWithheld: The node can't be restored exactly, or (with `replay`) a turn on the
                way to it can't be run again; nothing has run then.
            ResourceExhausted: Fewer than `min_ready` children found room.
        """
        return self._client._fork_one(
            self,
            n,
            scratch=scratch,
            min_ready=min_ready,
            replace_failed=replace_failed,
            deadline=deadline,
            labels=labels,
            lease=lease,
            limits=limits,
            seed=seed,
            same_seed=same_seed,
            replay=replay,
            secret_env=secret_env,
            idempotency_key=idempotency_key,
        )

    def fork_iter(
        self,
        n: int = 1,
        *,
        scratch: bool = False,
        min_ready: int = 0,
        replace_failed: bool = False,
        deadline: float | None = None,
        labels: Mapping[str, str] | None = None,
        lease: float | None = None,
        limits: Limits | None = None,
        seed: int = 0,
        same_seed: bool = False,
        replay: bool = False,
        secret_env: Mapping[str, str] | None = None,
        idempotency_key: str | None = None,
    ) -> Iterator[Sandbox | ForkError]:
        """As `fork`, but gives each child as soon as it is ready.

        Leaving the loop early cancels the rest; children that were ready but not yet
        given end with their lease.
        """
        return self._client._fork_iter(
            {self: n},
            scratch=scratch,
            min_ready=min_ready,
            replace_failed=replace_failed,
            deadline=deadline,
            labels=labels,
            lease=lease,
            limits=limits,
            seed=seed,
            same_seed=same_seed,
            replay=replay,
            secret_env=secret_env,
            idempotency_key=idempotency_key,
        )

    def annotate(
        self,
        *,
        reward: float | None = None,
        rewards: Mapping[str, float] | None = None,
        value: float | None = None,
        visits: int | None = None,
        labels: Mapping[str, str] | None = None,
        policy_version: str | None = None,
        payload: bytes | None = None,
    ) -> None:
        """Sets what is given and leaves the rest; durable when it returns.

        Args:
            reward: Short for ``rewards={"reward": x}``.
            rewards: Rewards by name.
            value: The node's value.
            visits: Its visits.
            labels: Labels; an empty value removes one.
            policy_version: Which policy acted.
            payload: Up to 1 MiB of your own bytes, never read by the engine.
        """
        note = annotation(
            reward=reward,
            rewards=rewards,
            value=value,
            visits=visits,
            labels=labels,
            policy_version=policy_version,
            payload=payload,
        )
        self._client.annotate({self: note})

    def wait_captured(self, timeout: float | None = None) -> Node:
        """Waits until it is captured or withheld, and reads it again.

        Args:
            timeout: Seconds; the client's timeout if None.

        Raises:
            DeadlineExceeded: It took longer.
        """
        (node,) = self._client.wait_captured([self], timeout=timeout)
        return node

    def payload(self) -> bytes:
        """Its payload; empty if it has none."""
        return self._client._payload(self.id)

    def evaluate(self, grader: Grader, *, idempotency_key: str | None = None) -> Evaluation:
        """Grades it, out of the agent's reach; nothing of the grading stays in it.

        Args:
            grader: What is run, where, and with which files.
            idempotency_key: Repeating a call with the same key runs nothing twice.

        Raises:
            InfrastructureError: The host is at fault. Never a reward of 0.
            NodeWithheld: The node can't be restored exactly.
        """
        return self._client._evaluate(self.id, grader, idempotency_key)

    def prune(
        self, *, keep_node: bool = False, release_sandboxes: bool = False, states_only: bool = False
    ) -> Pruned:
        """Removes it and all below it, or only their saved states.

        Args:
            keep_node: Remove only what lies below.
            release_sandboxes: Release the sandboxes that stand there.
            states_only: Give up the saved states; the nodes stay, withheld, and say how to make them again.

        Raises:
            FailedPrecondition: A node there is pinned, or a sandbox stands there and
                `release_sandboxes` is false.
        """
        return self._client._prune(self.id, keep_node, release_sandboxes, states_only)

    def pin(self) -> None:
        """Keeps it from being pruned."""
        self._client._pin([self.id], True)

    def unpin(self) -> None:
        """Lets it be pruned again."""
        self._client._pin([self.id], False)


def from_message(client: Client, m: pb.Node) -> Node:
    """Reads a Node message: at once who it is, the rest when it is asked for.

    Most nodes of a rollout are looked at by few fields, or by their id alone, and all
    fields together cost about as much as the call that brought them.
    """
    node = object.__new__(Node)
    node.__dict__.update(id=m.id, _client=client, _message=m)
    return node


def _read(m: pb.Node) -> dict[str, Any]:
    return {
        "tree_id": m.tree_id,
        "parent_id": m.parent_id,
        "depth": m.depth,
        "ordinal": m.ordinal,
        "action": Action(m.action.text.decode("utf-8", "replace"), tuple(m.action.argv), m.action.steps),
        "observation": _wire.observation(m.observation),
        "turn_status": _wire.turn_status(m.turn_status),
        "verdict": _wire.verdict(m.verdict),
        "external": m.external,
        "reasons": tuple(m.reasons),
        "effects": _wire.effects(m.effects),
        "effect_count": m.effect_count,
        "checkpoint_id": m.checkpoint_id,
        "checkpoint_node_id": m.checkpoint_node_id,
        "process_kind": _wire.process_kind(m.process_kind),
        "may_hold_secrets": m.may_hold_secrets,
        "capture": _wire.capture_status(m.capture),
        "withheld_reason": m.withheld_reason,
        "rewards": dict(m.rewards),
        "value": m.value,
        "visits": m.visits,
        "labels": dict(m.labels),
        "policy_version": m.policy_version,
        "payload_digest": m.payload_digest,
        "payload_bytes": m.payload_bytes,
        "started_at": m.started_at,
        "ended_at": m.ended_at,
        "frozen_at": m.frozen_at,
        "survivors_ran": m.survivors_ran,
        "pinned": m.pinned,
        "modify_index": m.modify_index,
        "sandbox_id": m.sandbox_id,
        "replay_of": m.replay_of,
    }
