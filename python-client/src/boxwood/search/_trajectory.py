"""Trajectories: what a trainer takes from a search."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from ._advantages import Estimator, Weights, loss_weights, shared_means
from ._types import Place, Status


@dataclasses.dataclass(frozen=True)
class Span:
    """Where the tokens of one turn lie in a trajectory.

    Two trajectories whose spans begin with the same node ids share these tokens, at the same offsets.

    Attributes:
        node_id: The turn's node; empty if it was lost.
        start: Offset of its first context token.
        action: Offset of its first sampled token.
        end: Offset after its last token.
    """

    node_id: str
    start: int
    action: int
    end: int


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """One path from the root to a leaf, as a row of training data.

    All sequences that have "per token" below are as long as `token_ids`. Sampled tokens are those of
    `Action.token_ids`, all others are context.

    How tokens that k trajectories of a search share are weighed, `weights`:

    - ``"split"``: 1/k in each, so that each sampled token counts once in all;
    - ``"once"``: 1 in the first of them and 0 in the others, with the mean of their advantages there
      (ARPO's hard estimation): for trainers whose loss masks are 0 or 1. The sum over trajectories of
      mask times advantage is that of ``"split"`` for each token;
    - ``"path"``: 1 in each, k in all, as if every leaf were a rollout of its own; what the
      published Tree-GRPO code does.

    Attributes:
        node_ids: The nodes, the root first.
        token_ids: All tokens, context and sampled, as the policy gave them.
        loss_mask: Per token: 0 for context, else its weight.
        logprobs: Per token: the sampled token's log-probability; 0.0 for context.
        policy_versions: Per token: which policy sampled it; empty for context.
        advantages: Per token: its turn's advantage; 0.0 for context.
        group_id: Which group it was compared with.
        tree_id: Which tree of the group.
        status: How its episode ended.
        reward: Its reward; None where something was lost.
        rewards: All its named rewards.
        spans: Where the turns lie.
    """

    node_ids: tuple[str, ...]
    token_ids: tuple[int, ...]
    loss_mask: tuple[float, ...]
    logprobs: tuple[float, ...]
    policy_versions: tuple[str, ...]
    advantages: tuple[float, ...]
    group_id: str
    tree_id: str
    status: Status
    reward: float | None
    rewards: Mapping[str, float]
    spans: tuple[Span, ...]

    @property
    def prompt_length(self) -> int:
        """How many tokens come before the first sampled one."""
        return self.spans[0].action if self.spans else 0


def trajectories(
    leaves: Sequence[Place], group: str, estimator: Estimator | None, weights: Weights
) -> list[Trajectory]:
    """Makes one trajectory for each leaf; without an estimator they have no part in the loss."""
    if estimator is None:
        advantages = [[0.0] * leaf.depth for leaf in leaves]
        masks = advantages
    else:
        advantages, masks = estimator(leaves), loss_weights(leaves, weights)
        if weights == "once":
            advantages = shared_means(leaves, advantages)
    return [_one(leaf, group, row, mask) for leaf, row, mask in zip(leaves, advantages, masks, strict=True)]


def _one(leaf: Place, group: str, advantages: Sequence[float], masks: Sequence[float]) -> Trajectory:
    token_ids: list[int] = []
    loss_mask: list[float] = []
    logprobs: list[float] = []
    versions: list[str] = []
    per_token: list[float] = []
    spans: list[Span] = []
    path = leaf.path
    for place, advantage, mask in zip(path[1:], advantages, masks, strict=True):
        action = place.action
        if action is None:  # it was lost before the policy was asked
            continue
        start, context, sampled = len(token_ids), len(action.context_ids), len(action.token_ids)
        token_ids += [*action.context_ids, *action.token_ids]
        loss_mask += [0.0] * context + [mask] * sampled
        logprobs += [0.0] * context + list(action.logprobs)
        versions += [""] * context + [action.policy_version] * sampled
        per_token += [0.0] * context + [advantage] * sampled
        spans.append(Span(place.node_id, start, start + context, start + context + sampled))
    return Trajectory(
        node_ids=tuple(place.node_id for place in path if place.node_id),
        token_ids=tuple(token_ids),
        loss_mask=tuple(loss_mask),
        logprobs=tuple(logprobs),
        policy_versions=tuple(versions),
        advantages=tuple(per_token),
        group_id=group,
        tree_id=leaf.tree,
        status=leaf.status,
        reward=leaf.reward if leaf.ended else None,
        rewards=dict(leaf.rewards),
        spans=tuple(spans),
    )
