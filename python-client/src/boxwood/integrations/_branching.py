"""What the trainers' adapters share: tasks, chats that act in a shell, and the rows of a group."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from boxwood import Grader, aio, search
from boxwood.errors import invalid
from boxwood.records import File

T = TypeVar("T")
Messages: TypeAlias = "str | Sequence[Mapping[str, Any]]"
Sample: TypeAlias = Callable[
    [list[int], int, search.History], Awaitable["tuple[Sequence[int], Sequence[float] | None]"]
]
"""An LLM: the tokens so far, how many it may sample, and the history, to tokens and log-probabilities."""

FENCE = re.compile(r"```(?:bash|sh)\n(.*?)\n?```", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Task:
    """What an episode is about.

    Attributes:
        image: An image of the daemon, its name or digest.
        grader: What rewards an ended episode.
        setup: Commands and files that prepare the image, run once for all episodes that ask for the same.
        cwd: Where commands run; the image's default if None.
        turn_timeout: Seconds that a command may take.
        lease: Seconds that a sandbox lives without a call.
    """

    image: str
    grader: search.Reward | Grader
    setup: Sequence[str | File | tuple[str, bytes]] = ()
    cwd: str | None = None
    turn_timeout: float = 60.0
    lease: float = 3600.0


def fenced(text: str) -> str | None:
    """The command of a message: its first block that is fenced as bash; None if there is none."""
    found = FENCE.search(text)
    return found[1] if found else None


def shown(seen: search.Seen) -> str:
    """A turn's result as a model is shown it."""
    if seen.refused:
        return f"The command was refused: {seen.refused}"
    parts = [seen.stdout, seen.stderr]
    if seen.timed_out:
        parts.append("The command took too long and was killed.")
    elif seen.exit_code:
        parts.append(f"Exit code {seen.exit_code}.")
    return "\n".join(part.rstrip("\n") for part in parts if part) or "No output."


@dataclasses.dataclass(frozen=True)
class Shell:
    """How a chat is a session in a shell.

    Attributes:
        act: The command that a message of the model means; None ends the episode.
        observe: A turn's result, as the content of the message that answers it.
        role: That message's role.
    """

    act: Callable[[str], str | None] = fenced
    observe: Callable[[search.Seen], str] = shown
    role: str = "user"


class Chat:
    """A chat in token ids: sampled ones are kept as they are, only what is new is tokenised.

    Args:
        tokenizer: A tokenizer of transformers; with a chat template if prompts are messages.
        shell: What messages mean.
        template: Keyword arguments of the chat template.
    """

    def __init__(self, tokenizer: Any, shell: Shell, template: Mapping[str, Any] | None = None) -> None:
        self.tokenizer, self.shell, self._template = tokenizer, shell, dict(template or {})

    def prompt(self, prompt: Messages) -> list[int]:
        """The tokens that the model starts from."""
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt)["input_ids"])
        return self._tokens(self._text(list(prompt), True))

    def answer(self, step: search.Step, plain: bool) -> list[int]:
        """The tokens between those that the model sampled in a turn and the next that it samples."""
        content = self.shell.observe(step.seen)
        if plain:
            return self._tokens(f"\n{content}\n")
        # The template's text after a model's message, whatever that is.
        talk: list[Mapping[str, Any]] = [
            {"role": "user", "content": "-"},
            {"role": "assistant", "content": "-"},
        ]
        head = self._text(talk, False)
        whole = self._text([*talk, {"role": self.shell.role, "content": content}], True)
        if not whole.startswith(head):
            raise invalid("the chat template rewrites a message once others follow", "give one that doesn't")
        end = self.tokenizer.eos_token
        at = head.rfind(end) if end else -1
        if at < 0:
            return self._tokens(whole[len(head) :])
        ended = bool(step.action.token_ids) and step.action.token_ids[-1] == self.tokenizer.eos_token_id
        return self._tokens(whole[at + len(end) if ended else at :])

    def policy(self, prompt: Messages, sample: Sample, room: int) -> search.Policy:
        """A search's policy that samples at most `room` tokens an episode, those of observations included."""
        start, plain = self.prompt(prompt), isinstance(prompt, str)

        async def act(history: search.History) -> search.Action:
            context = self.answer(history.steps[-1], plain) if history.steps else start
            before = [t for s in history.steps for t in (*s.action.context_ids, *s.action.token_ids)]
            left = room + len(start) - len(before) - len(context)
            if left <= 0:
                return search.Action(stop=True)
            ids, logprobs = await sample([*before, *context], left, history)
            cut = len(ids) > left
            ids = ids[:left]
            text = str(self.tokenizer.decode(ids, skip_special_tokens=True))
            command = None if cut else self.shell.act(text)
            return search.Action(
                command,
                token_ids=ids,
                logprobs=logprobs[:left] if logprobs is not None else [0.0] * len(ids),
                context_ids=context,
                stop=command is None,
                text=text,
            )

        return act

    def _text(self, messages: Sequence[Mapping[str, Any]], ask: bool) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=ask, **self._template
            )
        )

    def _tokens(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


@dataclasses.dataclass(frozen=True)
class Row:
    """One rollout as trainers take it.

    Attributes:
        prompt_ids: The tokens before the first sampled one.
        response_ids: All tokens after them, sampled or not.
        mask: 1 for each of these that was sampled, else 0.
        logprobs: Their log-probabilities; 0.0 for the others.
        reward: The reward; None where none could be had for no fault of the agent's.
        node_id: The node that it ended at; empty if there is none.
        tree_id: Which tree of its group it belongs to.
        turns: How many turns it has.
        stopped: Whether the policy ended it, and not a limit.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    mask: list[int]
    logprobs: list[float]
    reward: float | None
    node_id: str = ""
    tree_id: str = ""
    turns: int = 0
    stopped: bool = False


def row(leaf: search.Place, group: str) -> Row:
    """A graded leaf as a row, in which each sampled token counts: the rule "path" of `Trajectory`."""
    (made,) = search.Result(leaf.path[0], group, (leaf,)).trajectories(search.grpo_advantages, weights="path")
    at = made.prompt_length
    return Row(
        prompt_ids=list(made.token_ids[:at]),
        response_ids=list(made.token_ids[at:]),
        mask=[int(weight) for weight in made.loss_mask[at:]],
        logprobs=list(made.logprobs[at:]),
        reward=made.reward,
        node_id=leaf.node_id,
        tree_id=leaf.tree,
        turns=leaf.depth,
        stopped=leaf.status == "done",
    )


def no_row(prompt_ids: list[int], filler: int) -> Row:
    """What stands for a rollout that the host lost: one token that is not trained on, and no reward."""
    return Row(prompt_ids, [filler], [0], [0.0], None)


Strategy: TypeAlias = Callable[[search.Search, int], Awaitable[search.Result]]


async def tree_grpo(s: search.Search, n: int) -> search.Result:
    """So many leaves by Tree-GRPO: two trees with one round of branches, or one if n is odd or small."""
    trees = 2 if n >= 4 and n % 2 == 0 else 1
    return await search.tree_grpo(s, trees=trees, expand=max(1, n // trees - 1), rounds=int(n > trees))


async def together(work: Iterable[Awaitable[T]]) -> list[T]:
    """Does all of it at once; if one part fails, the others are cancelled and waited for."""
    tasks = [asyncio.ensure_future(part) for part in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def open_search(
    client: aio.Client, task: Task, policy: search.Policy, **options: Any
) -> AsyncIterator[search.Search]:
    """A search in a tree of its own, which is closed at the end; so its seed alone says how it grows."""
    async with (
        client.create_tree(
            image=task.image,
            setup=task.setup,
            cwd=task.cwd,
            turn_timeout=task.turn_timeout,
            lease=task.lease,
            with_sandbox=False,
        ) as tree,
        search.Search(search.Sandboxes(tree), policy, task.grader, name="rollout", **options) as s,
    ):
        yield s
