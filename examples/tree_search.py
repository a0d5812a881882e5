"""Tree-GRPO over real sandboxes: guess a secret word, one letter a turn. tree_search.py [IMAGE]."""

import asyncio
import random
import sys

import boxwood
from boxwood import aio, search

TEST = """
secret=cab right=0
for i in 0 1 2; do [ "${1:i:1}" != "${secret:i:1}" ] || ((++right)); done
echo ".$((right * 3))"
"""


async def policy(history: search.History) -> search.Action:
    """Stands for a model: samples a letter, and gives its token and log-probability."""
    token = random.Random(history.seed).randrange(3)
    return search.Action(
        f"printf {'abc'[token]} >> /work/guess",
        token_ids=[token],
        logprobs=[-1.0986],
        policy_version="step 0",
        stop=len(history.steps) == 2,
    )


async def main(image: str) -> None:
    """Searches one tree and prints its trajectories."""
    grader = boxwood.Grader(
        "bash /grading/test.sh $(cat /work/guess) > /grading/reward",
        image=image,
        paths=["/work/guess"],
        files=[("/grading/test.sh", TEST.encode())],
        rewards_file="/grading/reward",
    )
    async with (
        aio.connect() as client,
        client.create_tree(image=image, setup=["mkdir /work"], with_sandbox=False) as tree,
        search.Search(search.Sandboxes(tree), policy, grader, name="step 0", seed=1) as s,
    ):
        result = await search.tree_grpo(s, trees=2, expand=3, rounds=2)
    for row in result.trajectories(search.tree_grpo_advantages):
        guess = "".join("abc"[token] for token in row.token_ids)
        print(f"tree {row.tree_id}: {guess}, reward {row.reward:.2f}, advantage {row.advantages[-1]:+.2f}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "boxwood/base:latest"))
