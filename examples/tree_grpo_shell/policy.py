"""A small policy: a softmax over ten commands, linear in the words that the agent saw last."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
from boxwood import search

import plan
import tasks

Array = npt.NDArray[np.float64]

# Token ids below this are words of an observation, those from here on are commands.
FIRST_COMMAND = plan.FEATURES


def words(line: str) -> list[int]:
    """The tokens of a line: its words, hashed."""
    return [zlib.crc32(word.encode()) % plan.FEATURES for word in re.findall("[a-z]+", line.lower())]


def features(context_ids: Iterable[int]) -> Array:
    """How often each word is there, scaled to length 1, and a 1 behind it."""
    counts = np.zeros(plan.FEATURES + 1)
    for token in context_ids:
        counts[token] += 1.0
    counts /= max(float(np.linalg.norm(counts)), 1.0)
    counts[-1] = 1.0
    return counts


class Policy:
    """The weights, how an action is sampled, and one step of learning.

    Attributes:
        weights: One row a command, one column a feature.
        version: How many steps it has learned.
    """

    def __init__(self) -> None:
        self.weights: Array = np.zeros((len(tasks.ACTIONS), plan.FEATURES + 1))
        self.version = 0

    def probabilities(self, x: Array) -> Array:
        """Of each command."""
        logits = self.weights @ x
        odds = np.exp(logits - logits.max())
        return np.asarray(odds / odds.sum())

    def act(self, line: str, seed: int, *, last: bool, cost: float = 0.0) -> search.Action:
        """Samples what is done after a line was seen; with the same seed and weights the same.

        Args:
            line: The line.
            seed: The seed.
            last: Whether it is the episode's last turn.
            cost: Seconds that the command takes longer.
        """
        context = words(line)
        p = self.probabilities(features(context))
        action = int(np.random.default_rng(seed).choice(len(p), p=p))
        return search.Action(
            tasks.command(action, cost),
            token_ids=[FIRST_COMMAND + action],
            logprobs=[float(np.log(p[action]))],
            context_ids=context,
            policy_version=str(self.version),
            stop=last,
            text=tasks.ACTIONS[action],
        )

    def learn(self, rows: Sequence[search.Trajectory], rate: float) -> None:
        """One step along the policy gradient: the mean over sampled tokens, by their loss weights."""
        gradient = np.zeros_like(self.weights)
        total = 0.0
        for row in rows:
            for span in row.spans:
                x = features(row.token_ids[span.start : span.action])
                for i in range(span.action, span.end):
                    slope = -self.probabilities(x)
                    slope[row.token_ids[i] - FIRST_COMMAND] += 1.0
                    gradient += row.loss_mask[i] * row.advantages[i] * np.outer(slope, x)
                    total += row.loss_mask[i]
        if total:
            self.weights = self.weights + rate * gradient / total
        self.version += 1
