"""Tree search over real sandboxes: strategies, advantages, trajectories.

    from boxwood import search

    async def policy(history):                 # an LLM call that keeps its tokens
        return search.Action("make test", token_ids=[...], logprobs=[...])

    grader = boxwood.Grader("make check", image="task:7", paths=["/work/src"])

    async with search.Search(search.Sandboxes(tree), policy, grader, name="step 3", seed=1) as s:
        result = await search.tree_grpo(s, trees=2, expand=2, rounds=1)
    rows = result.trajectories(search.tree_grpo_advantages)

A strategy is an async function of a `Search`: `grpo`, `tree_grpo`, `arpo`, `spo_tree`, `beam`,
`best_first`, `mcts`, or your own over the same few verbs. Advantages are pure functions:
`grpo_advantages`, `tree_grpo_advantages`, `spo_advantages`, `treerl_advantages`.
"""

from ._advantages import Estimator, Weights
from ._advantages import grpo as grpo_advantages
from ._advantages import spo as spo_advantages
from ._advantages import tree_grpo as tree_grpo_advantages
from ._advantages import treerl as treerl_advantages
from ._sandboxes import Sandboxes
from ._search import GroupLost, Result, Search
from ._strategies import arpo, beam, best_first, grpo, mcts, spo_tree, tree_grpo
from ._trajectory import Span, Trajectory
from ._types import Action, History, Place, Policy, Ran, Reward, Rollout, Seen, Status, Step

__all__ = [
    "Action",
    "Estimator",
    "GroupLost",
    "History",
    "Place",
    "Policy",
    "Ran",
    "Result",
    "Reward",
    "Rollout",
    "Sandboxes",
    "Search",
    "Seen",
    "Span",
    "Status",
    "Step",
    "Trajectory",
    "Weights",
    "arpo",
    "beam",
    "best_first",
    "grpo",
    "grpo_advantages",
    "mcts",
    "spo_advantages",
    "spo_tree",
    "tree_grpo",
    "tree_grpo_advantages",
    "treerl_advantages",
]
