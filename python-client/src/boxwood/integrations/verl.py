"""An agent loop of verl whose rows are leaves of one tree of real sandboxes for each prompt.

    @register("shell")                       # verl's; the dataset's agent_name, or default_agent_loop
    class ShellLoop(BranchingAgentLoop):
        def task(self, row):
            return Task(row["extra_info"]["image"], grader)

verl asks for one output a row, so the rows of a prompt (those with one ``uid`` in one worker) meet in
a search: the first `trees` of them run from the root, each of the others branches from a random
place of one of those. That is Tree-GRPO with one round, whatever `rollout.n` is.

What forks: files, and processes where the node's process half could be saved; the request id is that
of the branch, so that verl's sticky routing finds the prefix. What doesn't: rows of a prompt
that verl gives to several workers form a tree in each. Advantages are verl's: each leaf counts as a rollout.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

try:
    from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
except ImportError as error:
    raise ImportError("boxwood.integrations.verl needs verl: pip install 'boxwood[verl]'") from error

from boxwood import aio, search
from boxwood.errors import InfrastructureError

from ..search._types import number as number_of
from ._branching import Chat, Row, Shell, Task, fenced, open_search, row, shown

__all__ = ["BranchingAgentLoop", "Shell", "Task", "fenced", "shown"]


class BranchingAgentLoop(AgentLoopBase):
    """A loop for a shell as the only tool. A subclass gives the task, and may set what is below.

    A rollout that the host loses is run again from the root, `attempts` times in all; then the loop
    raises `InfrastructureError`. verl would make a reward of anything that is returned.

    Attributes:
        shell: What the model's messages mean, and how it is shown a turn.
        trees: How many rows of a prompt run from the root.
        max_turns: An episode that reaches this depth is graded as it is.
        attempts: How often a row is tried.
        concurrency: How many turns and gradings may run at once in a worker.
        seed: Makes where rows branch, together with the prompt's uid.
        address: The daemon; None as for `boxwood.connect`.
    """

    shell: ClassVar[Shell] = Shell()
    trees: ClassVar[int] = 2
    max_turns: ClassVar[int] = 8
    attempts: ClassVar[int] = 3
    concurrency: ClassVar[int] = 16
    seed: ClassVar[int] = 0
    address: ClassVar[str | None] = None

    _groups: ClassVar[dict[Any, _Group]] = {}
    _slots: ClassVar[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]] = (
        weakref.WeakKeyDictionary()
    )

    @abstractmethod
    def task(self, row: Mapping[str, Any]) -> Task:
        """The task of a row of the dataset."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """One row: a leaf of the tree that the rows of its prompt share; see verl's `AgentLoopBase`.

        Raises:
            InfrastructureError: The host lost it again and again.
        """
        begun = time.monotonic()
        uid = kwargs.get("uid")
        # Rows that are sampled otherwise (a greedy baseline) are no part of the group.
        key = (type(self), uid if uid is not None else object(), repr(sorted(sampling_params.items())))
        group = self._groups.get(key)
        if group is None:
            opening = self._open(sampling_params, str(uid), kwargs)
            group = self._groups[key] = _Group(self.trees, opening, lambda: self._groups.pop(key))
        async with group:
            made = await group.row(self.attempts)
        return self._output(made, time.monotonic() - begun, bool(sampling_params.get("logprobs")))

    @contextlib.asynccontextmanager
    async def _open(self, sampling_params: dict[str, Any], uid: str, kwargs: Mapping[str, Any]) -> Any:
        async def sample(ids: list[int], room: int, history: search.History) -> Any:
            # The server bounds it by the same lengths; what goes beyond the room is cut.
            output = await self.server_manager.generate(
                request_id=history.affinity_key,
                prompt_ids=ids,
                sampling_params=dict(sampling_params),
                priority=int(kwargs.get("priority", 0)),
            )
            return output.token_ids, output.log_probs

        chat = Chat(self.tokenizer, self.shell, self.apply_chat_template_kwargs)
        policy = chat.policy(list(kwargs["raw_prompt"]), sample, self.rollout_config.response_length)
        slots = self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.concurrency))
        async with (
            aio.connect(self.address) as client,
            open_search(
                client,
                self.task(kwargs),
                policy,
                seed=number_of(self.seed, uid),
                concurrency=slots,
                max_turns=self.max_turns,
                group=uid,
            ) as s,
        ):
            yield s

    def _output(self, made: Row, seconds: float, logprobs: bool) -> AgentLoopOutput:
        return AgentLoopOutput(
            prompt_ids=made.prompt_ids,
            response_ids=made.response_ids,
            response_mask=made.mask,
            response_logprobs=made.logprobs if logprobs else None,
            reward_score=made.reward,
            num_turns=2 * made.turns,
            # Its turns and its samples alternate, and it may have waited for the row that it branched from.
            metrics=AgentLoopMetrics(generate_sequences=seconds),
            extra_fields={
                "turn_scores": [],
                "tool_rewards": [],
                "boxwood_node_id": made.node_id,
                "boxwood_tree_id": made.tree_id,
            },
        )


class _Group:
    """The rows of one prompt: the first opens their search, the last that leaves closes it."""

    def __init__(
        self,
        trees: int,
        opening: contextlib.AbstractAsyncContextManager[search.Search],
        forget: Callable[[], object],
    ) -> None:
        self._trees, self._opening, self._forget = trees, opening, forget
        self._joined = self._active = 0
        self._opened: asyncio.Task[search.Search] | None = None
        self._first: list[asyncio.Task[tuple[search.Place, list[search.Place]]]] = []

    async def __aenter__(self) -> None:
        self._active += 1

    async def __aexit__(self, *_: object) -> None:
        self._active -= 1
        if self._active:
            return
        self._forget()  # a row that comes now begins another
        if self._opened is None:
            return
        for task in (self._opened, *self._first):
            task.cancel()
        await asyncio.gather(self._opened, *self._first, return_exceptions=True)
        if not self._opened.cancelled() and self._opened.exception() is None:
            await self._opening.__aexit__(None, None, None)

    async def row(self, attempts: int) -> Row:
        if self._opened is None:
            self._opened = asyncio.ensure_future(self._opening.__aenter__())
        number, self._joined = self._joined, self._joined + 1
        tree = str(number % self._trees)
        if number < self._trees:
            self._first.append(asyncio.ensure_future(self._grow(number)))
        # One row that is given up leaves the others what it began.
        s = await asyncio.shield(self._opened)
        end, candidates = await asyncio.shield(self._first[number % self._trees])
        if number >= self._trees:
            # Rows wake in the order in which they came, so that names of places don't depend on time.
            place = s.random("branch", number).choice(candidates).child(tree)
            end = await s.finish(place)
        for _ in range(attempts - 1):
            if end.reward is not None:
                break
            end = await s.finish(s.root.child(tree))
        if end.reward is None:
            raise InfrastructureError(
                f"a rollout of prompt {s.group} was lost {attempts} times: {end.status}"
            )
        return row(end, s.group)

    async def _grow(self, number: int) -> tuple[search.Place, list[search.Place]]:
        """The first rollout of a tree, and where others can branch off: its places and the root."""
        assert self._opened is not None
        s = await asyncio.shield(self._opened)
        end = await s.finish(s.root.child(str(number)))
        return end, [s.root, *await s.settle(end.path[1:])]
