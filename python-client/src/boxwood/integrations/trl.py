"""TRL's two ways into its GRPOTrainer: environments whose tool is a shell, and rollouts that branch.

    GRPOTrainer(..., environment_factory=environment_factory(Task("task:7", grader)))
    GRPOTrainer(..., reward_funcs=tree_reward, rollout_func=BranchingRollout(Task("task:7", grader)))

What forks: with `BranchingRollout` each group is a tree, whose branches start from real forks of the
nodes. What doesn't: environments; TRL's own loop over tools is a line from begin to end. Advantages
are TRL's: those of plain GRPO over the leaves' rewards, each leaf a rollout of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import queue
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeAlias

try:
    import trl  # noqa: F401  # pyright: ignore[reportUnusedImport]
except ImportError as error:
    raise ImportError("boxwood.integrations.trl needs TRL: pip install 'boxwood[trl]'") from error

import boxwood
from boxwood import aio, search
from boxwood.errors import InfrastructureError, invalid

from ..search._types import number as number_of
from ._branching import (
    Chat,
    Messages,
    Row,
    Shell,
    Strategy,
    Task,
    fenced,
    no_row,
    open_search,
    row,
    shown,
    together,
    tree_grpo,
)

if TYPE_CHECKING:
    from trl import GRPOTrainer

__all__ = [
    "BranchingRollout",
    "GradedShellEnvironment",
    "Shell",
    "ShellEnvironment",
    "Task",
    "environment_factory",
    "fenced",
    "shown",
    "tree_grpo",
    "tree_reward",
]

Ids: TypeAlias = Sequence[int]
Generate: TypeAlias = Callable[
    [Any, "list[list[int]]", "list[search.History]"], "tuple[Sequence[Ids], Sequence[Sequence[float]] | None]"
]
"""Trainer, prompts and their histories, to the sampled tokens and log-probabilities of each."""


class ShellEnvironment:
    """An environment of TRL: one sandbox an episode, and a shell as its tool.

    TRL shows the model what a tool raises, also where the host failed. Such an episode has no reward
    then, so that TRL gives it no advantage.

    Args:
        task: The task, or what makes it of a row of the dataset, given its columns by name.
        address: The daemon; None as for `boxwood.connect`.
    """

    def __init__(self, task: Task | Callable[..., Task], address: str | None = None) -> None:
        self._given, self._address = task, address
        self._task: Task | None = None
        self._tree: boxwood.Tree | None = None
        self._failed = False
        self._close: Callable[[], object] = lambda: None

    def reset(self, **columns: Any) -> None:
        """Begins an episode in a fresh sandbox; the one before is released."""
        self._close()
        self._task = task = self._given if isinstance(self._given, Task) else self._given(**columns)
        client = boxwood.connect(self._address)
        try:
            self._tree = client.create_tree(
                image=task.image,
                setup=task.setup,
                cwd=task.cwd,
                turn_timeout=task.turn_timeout,
                lease=task.lease,
            )
        except BaseException:
            client.close()
            raise
        self._failed = False
        self._close = weakref.finalize(self, _close, client, self._tree)

    def bash(self, command: str) -> str:
        """Runs a command in the shell of the machine. Each command is run by a fresh bash.

        Args:
            command: The command.

        Returns:
            Its output and, where it isn't 0, its exit code.
        """
        if self._tree is None:
            raise invalid("there is no episode", "call reset first")
        try:
            turn = self._tree.sandbox.run(command)
        except boxwood.InvalidArgument as error:  # the model's doing: a NUL byte, say
            return shown(search.Seen(refused=error.message))
        except InfrastructureError:
            self._failed = True
            raise
        self._failed = self._failed or turn.sandbox_lost
        return shown(
            search.Seen(turn.stdout.text, turn.stderr.text, turn.exit_code, timed_out=turn.timed_out)
        )


class GradedShellEnvironment(ShellEnvironment):
    """A `ShellEnvironment` that rewards its episode by its task's `boxwood.Grader`."""

    def get_reward(self) -> float | None:
        """The reward of the episode; None, of which TRL makes no advantage, where the host failed."""
        if self._tree is None or self._task is None or self._failed:
            return None
        if not isinstance(self._task.grader, boxwood.Grader):
            raise invalid("an environment's task is graded by a boxwood.Grader")
        try:
            graded = self._tree.sandbox.head.evaluate(self._task.grader)
        except (InfrastructureError, boxwood.NodeWithheld):
            return None
        return 0.0 if graded.problem else graded.rewards["reward"]


def _close(client: boxwood.Client, tree: boxwood.Tree) -> None:
    try:
        tree.close()
    finally:
        client.close()


def environment_factory(
    task: Task | Callable[..., Task], *, graded: bool = True, address: str | None = None
) -> Callable[[], ShellEnvironment]:
    """What the trainer's argument `environment_factory` takes. It can be pickled if the task can.

    Args:
        task: The task, or what makes it of a row of the dataset, given its columns by name.
        graded: Whether the environment owns the reward, by the task's grader.
        address: The daemon; None as for `boxwood.connect`.
    """
    return functools.partial(GradedShellEnvironment if graded else ShellEnvironment, task, address)


def tree_reward(
    completions: Sequence[Any], boxwood_reward: Sequence[float | None], **_: Any
) -> list[float | None]:
    """A reward function of TRL that hands on what `BranchingRollout` found; None where the host failed."""
    return list(boxwood_reward)


def by_trainer(
    trainer: Any, prompts: list[list[int]], histories: list[search.History]
) -> tuple[Sequence[Ids], Sequence[Sequence[float]] | None]:
    """Samples as the trainer itself does for a turn: with vLLM, or the model at hand."""
    if trainer.accelerator.num_processes > 1:
        raise invalid(
            "the trainer's own generation wants as many calls in each of its processes; branches differ",
            "pass generate=..., such as a client of your vLLM server",
        )
    ids, logprobs = trainer._generate_single_turn(prompts, None, {}, 1)
    return ids, logprobs


class BranchingRollout:
    """A `rollout_func` whose groups are trees: forks of real sandboxes in place of rollouts from the start.

    The prompts of a group are one search; its leaves are the group's completions. Sampling
    is called in the trainer's thread, with all prompts that wait at that moment.

    Its result has, beside what TRL asks for, ``env_mask`` (0 for what the sandbox said) and for reward
    functions ``boxwood_reward``, ``boxwood_node_id`` and ``boxwood_tree_id``. What the host lost is one
    token with mask 0 and the reward None, of which `tree_reward` and TRL make an advantage of 0.

    Args:
        task: The task, or what makes it of a prompt.
        generate: Samples; as the trainer does if None.
        strategy: Grows so many leaves; two trees of Tree-GRPO if None.
        shell: What the model's messages mean, and how it is shown a turn.
        max_turns: An episode that reaches this depth is graded as it is.
        concurrency: How many turns and gradings may run at once.
        seed: Makes where trees branch, together with the trainer's step.
        address: The daemon; None as for `boxwood.connect`.
    """

    def __init__(
        self,
        task: Task | Callable[[Messages], Task],
        *,
        generate: Generate | None = None,
        strategy: Strategy = tree_grpo,
        shell: Shell | None = None,
        max_turns: int = 8,
        concurrency: int = 16,
        seed: int = 0,
        address: str | None = None,
    ) -> None:
        self._task, self._generate, self._strategy = task, generate or by_trainer, strategy
        self._shell, self._max_turns, self._seed = shell or Shell(), max_turns, seed
        self._concurrency, self._address = concurrency, address
        # TRL names functions.
        self.__name__ = type(self).__name__

    def __call__(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        """One completion for each prompt, in their order; see TRL's `RolloutFunc`.

        Raises:
            NotFound: A task's image isn't there.
        """
        whole: Any = trainer
        each = whole.num_generations if whole.model.training else whole.num_generations_eval
        asked = _Asked(functools.partial(self._generate, trainer))
        groups: list[tuple[Any, int]] = []
        for prompt in prompts:
            if groups and groups[-1][0] == prompt and groups[-1][1] < each:
                groups[-1] = (prompt, groups[-1][1] + 1)
            else:
                groups.append((prompt, 1))
        tokenizer = getattr(whole.processing_class, "tokenizer", whole.processing_class)
        chat = Chat(tokenizer, self._shell, whole.chat_template_kwargs)
        room, step = int(whole.max_completion_length), int(whole.state.global_step)
        # The search has a loop of its own, since a notebook's thread has one that runs.
        with ThreadPoolExecutor(1, "boxwood-rollout") as thread:
            running = thread.submit(asyncio.run, self._groups(groups, chat, asked, room, step))
            rows = asked.serve(running)
        return {
            "prompt_ids": [r.prompt_ids for r in rows],
            "completion_ids": [r.response_ids for r in rows],
            "logprobs": [r.logprobs for r in rows] if asked.logprobs else None,
            "env_mask": [r.mask for r in rows],
            "boxwood_reward": [r.reward for r in rows],
            "boxwood_node_id": [r.node_id for r in rows],
            "boxwood_tree_id": [r.tree_id for r in rows],
        }

    async def _groups(
        self, groups: Sequence[tuple[Any, int]], chat: Chat, asked: _Asked, room: int, step: int
    ) -> list[Row]:
        asked.begin()
        slots = asyncio.Semaphore(self._concurrency)
        async with aio.connect(self._address) as client:

            async def grow(number: int, prompt: Any, n: int) -> list[Row]:
                task = self._task if isinstance(self._task, Task) else self._task(prompt)
                policy = chat.policy(prompt, asked.sample, room)
                options = {"concurrency": slots, "max_turns": self._max_turns, "group": f"{step}.{number}"}
                seed = number_of(self._seed, step, number)
                async with open_search(client, task, policy, seed=seed, **options) as s:
                    result = await self._strategy(s, n)
                    rows = [row(leaf, s.group) for leaf in result.leaves[:n]]
                filler = chat.tokenizer.eos_token_id
                return rows + [no_row(chat.prompt(prompt), filler)] * (n - len(rows))

            made = await together(grow(number, *group) for number, group in enumerate(groups))
            return [r for rows in made for r in rows]


class _Asked:
    """Carries samples from the search's loop to the thread that the trainer's model is used in."""

    def __init__(self, generate: Callable[..., Any]) -> None:
        self._generate = generate
        self._waiting: queue.SimpleQueue[_Wanted | None] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._search: asyncio.Task[Any] | None = None
        self._given_up = False
        self.logprobs = True  # whether whoever samples tells them

    def begin(self) -> None:
        """Called in the search's task."""
        self._loop, self._search = asyncio.get_running_loop(), asyncio.current_task()
        if self._given_up:
            raise asyncio.CancelledError

    async def sample(
        self, ids: list[int], room: int, history: search.History
    ) -> tuple[Ids, Sequence[float] | None]:
        """One sample; see `Sample`."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.put(_Wanted(ids, history, future))
        return await future

    def serve(self, running: Future[list[Row]]) -> list[Row]:
        """Samples what is asked for, all that waits at once, until the search ends; gives its result."""
        running.add_done_callback(lambda _: self._waiting.put(None))
        try:
            while True:
                batch = [self._waiting.get()]
                while not self._waiting.empty():
                    batch.append(self._waiting.get())
                wanted = [w for w in batch if w is not None]
                if len(wanted) < len(batch):
                    return running.result()
                ids, logprobs = self._generate([w.ids for w in wanted], [w.history for w in wanted])
                self.logprobs = self.logprobs and logprobs is not None
                each = [None] * len(wanted) if logprobs is None else logprobs
                for w, sampled, known in zip(wanted, ids, each, strict=True):
                    w.future.get_loop().call_soon_threadsafe(_deliver, w.future, (list(sampled), known))
        except BaseException:
            self._given_up = True
            if self._loop is not None and self._search is not None:
                with contextlib.suppress(RuntimeError):  # it has ended
                    self._loop.call_soon_threadsafe(self._search.cancel)
            raise


@dataclasses.dataclass(frozen=True)
class _Wanted:
    ids: list[int]
    history: search.History
    future: asyncio.Future[Any]


def _deliver(future: asyncio.Future[Any], what: Any) -> None:
    if not future.done():
        future.set_result(what)
