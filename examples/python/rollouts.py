"""A group of rollouts in one loop: as each child becomes ready, a policy drives it."""

import asyncio

import boxwood
import boxwood.aio
from boxwood.demo import image


async def rollout(sandbox: boxwood.aio.Sandbox, number: int) -> float | None:
    """Three turns; None if the host failed, which is no reward of 0."""
    try:
        async with sandbox:
            for step in range(3):
                command = f"echo {number}.{step} >> /tmp/log; cat /tmp/log"  # what a policy would say
                turn = await sandbox.run(command, timeout=30, policy_version="v1")
            reward = float(len(turn.stdout.text.split()))
            await turn.node.annotate(reward=reward)
            return reward
    except boxwood.InfrastructureError as error:
        print(f"rollout {number} leaves its group: {error}")
        return None


async def main(address: str) -> None:
    async with (
        boxwood.aio.connect(address) as client,
        client.create_tree(image="boxwood/demo:latest") as tree,
    ):
        start = (await tree.sandbox.run("echo start > /tmp/log")).node
        running = []
        async for child in start.fork(6, replace_failed=True):
            if isinstance(child, boxwood.aio.Sandbox):
                running.append(asyncio.create_task(rollout(child, len(running))))
        rewards = await asyncio.gather(*running)
        print("rewards", rewards)
        print(await tree.show())


with boxwood.local() as blocking:
    image(blocking)
    asyncio.run(main(blocking.address))
