"""Advantages over the leaves of a tree: pure functions, each with its source.

An estimator takes the graded leaves of one group and gives, for each leaf in order, one number for
each turn of its path (the root, which is no turn, left out). All tokens of a turn get its number.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from ._types import Place

Estimator: TypeAlias = Callable[[Sequence[Place]], "list[list[float]]"]

Weights = Literal["split", "path", "once"]

# What is added to a standard deviation before it divides.
EPSILON = 1e-6


def normalised(rewards: Sequence[float], *, scale: bool = True) -> list[float]:
    """Rewards less their mean, over their sample standard deviation (n - 1) plus 1e-6.

    A group of one has nothing to be compared with: 0.

    Args:
        rewards: The rewards of a group.
        scale: False leaves the division out.
    """
    n = len(rewards)
    if n < 2:
        return [0.0] * n
    mean = math.fsum(rewards) / n
    if not scale:
        return [r - mean for r in rewards]
    deviation = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (n - 1))
    return [(r - mean) / (deviation + EPSILON) for r in rewards]


def grpo(leaves: Sequence[Place], *, scale: bool = True) -> list[list[float]]:
    """Each rollout against its whole group, the same for all its turns.

    GRPO: DeepSeekMath, arXiv 2402.03300, section 4.1. Without scale: Dr. GRPO, arXiv 2503.20783.
    """
    return _flat(leaves, normalised(_rewards(leaves), scale=scale))


def tree_grpo(leaves: Sequence[Place], *, scale: bool = True) -> list[list[float]]:
    """Each rollout against the others of its tree, plus against all of its group.

    Tree-GRPO, arXiv 2509.21240, section "Tree-based Group Relative Policy Optimization": the sum of
    the intra-tree and the inter-tree advantage. Two cases that the sum leaves open: a tree of one
    rollout has an intra-tree advantage of 0, and a group of one tree has no inter-tree advantage,
    which would be the same comparison a second time. So both a star from one root and a group of
    chains give GRPO.
    """
    rewards = _rewards(leaves)
    trees: dict[str, list[int]] = {}
    for i, leaf in enumerate(leaves):
        trees.setdefault(leaf.tree, []).append(i)
    total = normalised(rewards, scale=scale) if len(trees) > 1 else [0.0] * len(rewards)
    for members in trees.values():
        inner = normalised([rewards[i] for i in members], scale=scale)
        for i, advantage in zip(members, inner, strict=True):
            total[i] += advantage
    return _flat(leaves, total)


def spo(leaves: Sequence[Place]) -> list[list[float]]:
    """What each turn gained: the value after it less the value before it.

    The value of a place is the mean over its children's values, that of a leaf its reward: each child
    is one sample of what follows. SPO, arXiv 2505.23564, section on tree-based segment advantages,
    with turns as segments; a segment of several turns without a branch has its gain on the first.
    """
    values = _values(leaves, by_child=True)
    return [[values[b] - values[a] for a, b in _steps(leaf)] for leaf in leaves]


def treerl(leaves: Sequence[Place]) -> list[list[float]]:
    """Gain over the root plus gain over the parent, over the square root of the leaves below.

    The value of a place is the mean reward of the leaves below it. TreeRL, arXiv 2506.11902, section
    on process supervision from tree search.
    """
    values = _values(leaves, by_child=False)
    below = _below(leaves)
    return [
        [
            ((values[b] - values[leaf.path[0]]) + (values[b] - values[a])) / math.sqrt(below[b])
            for a, b in _steps(leaf)
        ]
        for leaf in leaves
    ]


def loss_weights(leaves: Sequence[Place], rule: Weights) -> list[list[float]]:
    """For each leaf and turn of its path, what the loss of its tokens counts there."""
    if rule not in ("split", "path", "once"):
        raise ValueError(f'weights must be "split", "path" or "once", not {rule!r}')
    if rule == "path":
        return [[1.0] * leaf.depth for leaf in leaves]
    if rule == "split":
        below = _below(leaves)
        return [[1.0 / below[place] for place in leaf.path[1:]] for leaf in leaves]
    seen: set[Place] = set()
    result: list[list[float]] = []
    for leaf in leaves:
        result.append([0.0 if place in seen else 1.0 for place in leaf.path[1:]])
        seen.update(leaf.path)
    return result


def shared_means(leaves: Sequence[Place], advantages: list[list[float]]) -> list[list[float]]:
    """Each turn with the mean of the advantages that it has in all the trajectories that share it."""
    sums: dict[Place, float] = {}
    for leaf, row in zip(leaves, advantages, strict=True):
        for place, advantage in zip(leaf.path[1:], row, strict=True):
            sums[place] = sums.get(place, 0.0) + advantage
    below = _below(leaves)
    return [[sums[place] / below[place] for place in leaf.path[1:]] for leaf in leaves]


def _rewards(leaves: Sequence[Place]) -> list[float]:
    rewards = [leaf.reward for leaf in leaves if leaf.reward is not None]
    if len(rewards) != len(leaves):
        raise ValueError("advantages are made of graded leaves only")
    return rewards


def _flat(leaves: Sequence[Place], advantages: list[float]) -> list[list[float]]:
    return [[advantage] * leaf.depth for leaf, advantage in zip(leaves, advantages, strict=True)]


def _steps(leaf: Place) -> list[tuple[Place, Place]]:
    return list(itertools.pairwise(leaf.path))


def _below(leaves: Sequence[Place]) -> dict[Place, int]:
    """How many of the leaves lie at or below each place."""
    count: dict[Place, int] = {}
    for leaf in leaves:
        for place in leaf.path:
            count[place] = count.get(place, 0) + 1
    return count


def _values(leaves: Sequence[Place], *, by_child: bool) -> dict[Place, float]:
    _rewards(leaves)
    below = _below(leaves)
    values: dict[Place, float] = {}
    # Children before parents: a longer path first.
    for place in sorted(below, key=lambda p: -p.depth):
        if place.reward is not None and place.ended:
            values[place] = place.reward
            continue
        children = [child for child in place.children if child in below]
        weights = [1.0 if by_child else float(below[child]) for child in children]
        values[place] = math.fsum(w * values[c] for w, c in zip(weights, children, strict=True)) / math.fsum(
            weights
        )
    return values
