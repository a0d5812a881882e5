"""A generator of SkyRL whose groups are trees of real sandboxes.

    class Exp(BasePPOExp):
        def get_generator(self, cfg, tokenizer, inference_engine_client):
            return BranchingGenerator(cfg.generator, inference_engine_client, tokenizer, task)

What forks: files, and processes where the node's process half could be saved; requests of a branch have
one session id, so that the router finds the prefix. What doesn't: step-wise trajectories, images, and
environments of skyrl-gym; the task's sandbox is the environment. Advantages are SkyRL's: each leaf counts as
a rollout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

try:
    from skyrl.backends.skyrl_train.inference_servers.base import InferenceEngineInput
    from skyrl.train.generators.base import GeneratorInput, GeneratorInterface, GeneratorOutput
    from skyrl.train.generators.utils import get_rollout_metrics
except ImportError as error:
    raise ImportError("boxwood.integrations.skyrl needs SkyRL: pip install 'boxwood[skyrl]'") from error

from boxwood import aio, search
from boxwood.errors import invalid

from ..search._types import number as number_of
from ._branching import (
    Chat,
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

__all__ = ["BranchingGenerator", "Shell", "Task", "fenced", "shown", "tree_grpo"]


class BranchingGenerator(GeneratorInterface):
    """Grows one tree for each prompt of a batch; its leaves are the prompt's trajectories.

    If the host loses one of them, the whole group is masked, as SkyRL's Harbor generator does: its stop
    reasons are ``"error"`` and its rewards 0, without a difference that could be learnt from.

    Args:
        generator_cfg: SkyRL's ``generator`` configuration: turns, lengths, template.
        inference_engine_client: What samples.
        tokenizer: The model's tokenizer.
        task: The task, or what makes it of a row's extra columns (``env_extras``).
        shell: What the model's messages mean, and how it is shown a turn.
        strategy: Grows so many leaves; two trees of Tree-GRPO if None.
        concurrency: How many turns and gradings may run at once.
        seed: Makes where trees branch, together with the prompt's id and the trainer's step.
        address: The daemon; None as for `boxwood.connect`.
        policy_model_name: The name of the model on the server; the client's own if None.
    """

    def __init__(
        self,
        generator_cfg: Any,
        inference_engine_client: Any,
        tokenizer: Any,
        task: Task | Callable[[Mapping[str, Any]], Task],
        *,
        shell: Shell | None = None,
        strategy: Strategy = tree_grpo,
        concurrency: int = 16,
        seed: int = 0,
        address: str | None = None,
        policy_model_name: str | None = None,
    ) -> None:
        if generator_cfg.step_wise_trajectories:
            raise invalid(
                "branching has no step-wise trajectories", "set generator.step_wise_trajectories=false"
            )
        self.generator_cfg, self.inference_engine_client = generator_cfg, inference_engine_client
        self._chat = Chat(tokenizer, shell or Shell(), generator_cfg.chat_template_kwargs)
        self._task, self._strategy, self._seed = task, strategy, seed
        self._concurrency, self._address, self._model = concurrency, address, policy_model_name

    async def generate(self, input_batch: GeneratorInput, disable_tqdm: bool = False) -> GeneratorOutput:
        """One trajectory for each prompt, in their order; see SkyRL's `GeneratorInterface`.

        Raises:
            NotFound: A task's image isn't there.
        """
        ids, prompts = input_batch.get("trajectory_ids"), input_batch["prompts"]
        groups: dict[Any, list[int]] = {}
        for n in range(len(prompts)):
            groups.setdefault(n if ids is None else ids[n].instance_id, []).append(n)
        slots = asyncio.Semaphore(self._concurrency)
        async with aio.connect(self._address) as client:
            grown = await together(
                self._grow(client, slots, input_batch, str(name), members) for name, members in groups.items()
            )
        # By the rows' places in the batch.
        rows = [
            made for _, made in sorted((pair for part in grown for pair in part), key=lambda pair: pair[0])
        ]
        responses, masks = [r.response_ids for r in rows], [r.mask for r in rows]
        rewards = [r.reward or 0.0 for r in rows]
        return GeneratorOutput(
            prompt_token_ids=[r.prompt_ids for r in rows],
            response_ids=responses,
            rewards=rewards,
            loss_masks=masks,
            stop_reasons=["error" if r.reward is None else "stop" if r.stopped else "length" for r in rows],
            rollout_metrics=get_rollout_metrics(responses, rewards, loss_masks=masks),
            rollout_logprobs=[r.logprobs for r in rows] if self._logprobs(input_batch) else None,
            trajectory_ids=None,
            trajectory_generation_times=None,
            rollout_expert_indices=None,
            is_last_step=None,
            env_metrics=[{"boxwood_node_id": r.node_id, "boxwood_tree_id": r.tree_id} for r in rows],
            pixel_values=None,
            image_grid_thw=None,
        )

    def _logprobs(self, batch: GeneratorInput) -> bool:
        given = batch.get("sampling_params")
        return (
            self.generator_cfg.sampling_params.logprobs if given is None else given.get("logprobs")
        ) is not None

    async def _grow(
        self,
        client: aio.Client,
        slots: asyncio.Semaphore,
        batch: GeneratorInput,
        name: str,
        members: Sequence[int],
    ) -> list[tuple[int, Row]]:
        async def sample(ids: list[int], room: int, history: search.History) -> Any:
            sampling = dict(batch.get("sampling_params") or {})
            if "max_tokens" in sampling:
                sampling["max_tokens"] = min(sampling["max_tokens"], room)
            asked = InferenceEngineInput(
                prompt_token_ids=[ids], session_ids=[history.affinity_key], sampling_params=sampling
            )
            output = await self.inference_engine_client.generate(asked, model=self._model)
            known = output.get("response_logprobs")
            return output["response_ids"][0], known[0] if known else None

        first, cfg, extras = members[0], self.generator_cfg, batch.get("env_extras")
        task = self._task if isinstance(self._task, Task) else self._task(extras[first] if extras else {})
        prompt, room = batch["prompts"][first], cfg.sampling_params.max_generate_length
        start = self._chat.prompt(prompt)
        if cfg.max_input_length is not None:  # as SkyRL's own: what may be asked with, and one answer
            room += max(0, cfg.max_input_length - len(start))
        metadata = batch.get("batch_metadata")
        seed = number_of(self._seed, metadata.global_step if metadata else 0, name)
        policy = self._chat.policy(prompt, sample, room)
        options = {"concurrency": slots, "max_turns": cfg.max_turns, "group": name}
        async with open_search(client, task, policy, seed=seed, **options) as s:
            result = await self._strategy(s, len(members))
            rows = [row(leaf, name) for leaf in result.leaves[: len(members)]]
        if len(rows) < len(members):
            rows = [no_row(start, self._chat.tokenizer.eos_token_id)] * len(members)
        return list(zip(members, rows, strict=True))
