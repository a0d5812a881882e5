"""Rows of verl's agent loop that are leaves of one tree of real sandboxes."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not installed: make test-adapters")

import hydra
import tinymodel
from conftest import defined_by_the_page, pinned, same_signatures
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import (
    AgentLoopBase,
    AgentLoopOutput,
    DictConfigWrap,
    ToolListWrap,
    _agent_loop_registry,
    register,
)
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

import boxwood
from boxwood.integrations.verl import BranchingAgentLoop, Task


@register("shell")
class ShellLoop(BranchingAgentLoop):
    seed = 1

    def task(self, row: Any) -> Task:
        grader = boxwood.Grader("w=$(cat /work/word); [[ $w == *a* && $w != *b* ]]")
        return Task(
            row["extra_info"]["image"], grader, setup=["mkdir -p /work; touch /work/word"], cwd="/work"
        )


class Scripted(LLMServerClient):
    """A server that says two letters and an end."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(OmegaConf.create({}), None)
        self.tokenizer, self.asked = tokenizer, []

    async def generate(
        self, request_id: Any, *, prompt_ids: Any, sampling_params: Any, **_: Any
    ) -> TokenOutput:
        self.asked.append((request_id, sampling_params))
        done = self.tokenizer.decode(prompt_ids).count("printf ") == 2
        letter = random.Random(len(self.asked)).choice("ab")
        ids = tinymodel.spoken(self.tokenizer, "Done." if done else tinymodel.letters([letter]))
        return TokenOutput(token_ids=ids, log_probs=[-0.5] * len(ids))


def rows(server: Scripted, image: str, uids: list[str], **sampling: Any) -> list[AgentLoopOutput]:
    """Runs a batch as verl's worker does: an object and a task for each row."""
    config = OmegaConf.create(
        {"actor_rollout_ref": {"rollout": {"prompt_length": 100, "response_length": 400}}, "data": {}}
    )

    async def batch() -> list[AgentLoopOutput]:
        made = [
            hydra.utils.instantiate(
                config=_agent_loop_registry["shell"],
                trainer_config=DictConfigWrap(config=config),
                server_manager=server,
                tokenizer=server.tokenizer,
                processor=None,
                hf_model_type="qwen2",
                dataset_cls=RLHFDataset,
                data_config=DictConfigWrap(config.data),
                tools=ToolListWrap([]),
            )
            for _ in uids
        ]
        assert all(type(loop) is ShellLoop for loop in made)
        kwargs = [
            {
                "raw_prompt": [{"role": "user", "content": "Write."}],
                "extra_info": {"image": image},
                "uid": uid,
                "index": n,
                "priority": n,
            }
            for n, uid in enumerate(uids)
        ]
        tasks = [
            asyncio.create_task(loop.run({"temperature": 1.0, "logprobs": True, **sampling}, **row))
            for loop, row in zip(made, kwargs, strict=True)
        ]
        return await asyncio.gather(*tasks)

    return asyncio.run(batch())


def test_the_contract() -> None:
    pinned("verl", "0.9.1")
    assert issubclass(BranchingAgentLoop, AgentLoopBase)
    assert BranchingAgentLoop.__abstractmethods__ == {"task"}
    same_signatures(BranchingAgentLoop, AgentLoopBase, ["run", "__init__"])
    loop = defined_by_the_page("verl")["ShellLoop"]
    assert loop.task(None, {"extra_info": {"image": "task:7"}}).image == "task:7"
    assert not loop.__abstractmethods__
    register("shell")(ShellLoop)  # the example took its name


def test_rows_of_a_prompt_are_one_tree(image: str) -> None:
    server = Scripted(tinymodel.tokenizer())
    made = rows(server, image, ["p", "p", "p", "p", "q", "q"])
    assert ShellLoop._groups == {}
    assert [out.extra_fields["boxwood_tree_id"] for out in made] == ["0", "1", "0", "1", "0", "1"]
    assert len({out.extra_fields["boxwood_node_id"] for out in made}) == 6
    for out in made:
        assert out.num_turns == 6
        known = zip(out.response_logprobs, out.response_mask, strict=True)
        assert {logprob for logprob, mask in known if mask} == {-0.5}
        said, told = (
            server.tokenizer.decode(
                [t for t, m in zip(out.response_ids, out.response_mask, strict=True) if m == which]
            )
            for which in (1, 0)
        )
        word = "".join(part[0] for part in said.split("printf ")[1:])
        # Each branch saw its own past, and is graded by it.
        assert told == "".join(
            f"\n<|im_start|>user\n{word[:n]}<|im_end|>\n<|im_start|>assistant\n" for n in (1, 2)
        )
        assert out.reward_score == float("b" not in word)
        tensors = out.as_dict()
        assert tensors["rm_scores"].sum() == out.reward_score
    # A request id stands for all that share their first turn; a sampled turn was never asked for twice.
    assert len({request for request, _ in server.asked}) <= 6
    assert 6 * 3 - 2 * 2 <= len(server.asked) <= 6 * 3


def test_what_the_host_loses_is_no_reward(image: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_host(place: Any) -> float:
        raise boxwood.InfrastructureError("gone")

    monkeypatch.setattr(
        ShellLoop, "task", lambda self, row: Task(image, no_host, setup=["mkdir -p /work"], cwd="/work")
    )
    with pytest.raises(boxwood.InfrastructureError, match="lost 3 times"):
        rows(Scripted(tinymodel.tokenizer()), image, ["p", "p"])
    assert ShellLoop._groups == {}


def test_a_missing_image_is_named(image: str) -> None:
    with pytest.raises(boxwood.NotFound, match="not:there"):
        rows(Scripted(tinymodel.tokenizer()), "not:there", ["p", "p", "p"])
    assert ShellLoop._groups == {}
