"""A batch of SkyRL whose groups are trees of real sandboxes."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

pytest.importorskip("skyrl", reason="SkyRL is not installed: make test-adapters")

import tinymodel
from conftest import defined_by_the_page, pinned, same_signatures
from skyrl.backends.skyrl_train.inference_servers.base import InferenceEngineInput
from skyrl.train.config import GeneratorConfig, SamplingParams
from skyrl.train.generators.base import GeneratorInput, GeneratorInterface, GeneratorOutput
from skyrl.train.generators.utils import prepare_generator_input
from skyrl.train.utils.trainer_utils import validate_generator_output

import boxwood
from boxwood.integrations.skyrl import BranchingGenerator, Task


class Scripted:
    """A server that says two letters and an end."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.asked = tokenizer, 0

    async def generate(self, input_batch: InferenceEngineInput, model: str | None = None) -> Any:
        self.asked += 1
        (ids,) = input_batch["prompt_token_ids"]
        done = self.tokenizer.decode(ids).count("printf ") == 2
        text = "Done." if done else tinymodel.letters([random.Random(self.asked).choice("ab")])
        sampled = tinymodel.spoken(self.tokenizer, text)
        return {
            "responses": [text],
            "response_ids": [sampled],
            "stop_reasons": ["stop"],
            "response_logprobs": [[-0.5] * len(sampled)],
        }


def task(extras: Any) -> Task:
    grader = boxwood.Grader("w=$(cat /work/word); [[ $w == *a* && $w != *b* ]]")
    return Task(extras["image"], grader, setup=["mkdir -p /work; touch /work/word"], cwd="/work")


def batch(image: str, *uids: str) -> GeneratorInput:
    prompts = [
        {
            "prompt": [{"role": "user", "content": f"Write {uid}."}],
            "env_class": None,
            "env_extras": {"image": image},
            "uid": uid,
        }
        for uid in uids
    ]
    sampling = {"max_tokens": 100, "logprobs": 1}
    return prepare_generator_input(prompts, 4, sampling, "none", "train", 7)[0]


def generated(made: Any, of: GeneratorInput) -> tuple[Scripted, GeneratorOutput]:
    server = Scripted(tinymodel.tokenizer())
    config = GeneratorConfig(
        max_turns=4, max_input_length=400, sampling_params=SamplingParams(max_generate_length=100, logprobs=1)
    )
    generator = BranchingGenerator(config, server, server.tokenizer, made)
    output = asyncio.run(generator.generate(of))
    validate_generator_output(len(of["prompts"]), output)
    assert set(output) == set(GeneratorOutput.__annotations__)
    return server, output


def test_the_contract() -> None:
    pinned("skyrl", "0.3.0")
    assert issubclass(BranchingGenerator, GeneratorInterface)
    assert not BranchingGenerator.__abstractmethods__
    same_signatures(BranchingGenerator, GeneratorInterface, ["generate"])
    with pytest.raises(boxwood.InvalidArgument, match="step-wise"):
        BranchingGenerator(GeneratorConfig(step_wise_trajectories=True), None, None, task)
    assert defined_by_the_page("SkyRL")["task"]({"image": "task:7"}).image == "task:7"


def test_groups_are_trees(image: str) -> None:
    server, output = generated(task, batch(image, "p", "q"))
    assert len({metrics["boxwood_node_id"] for metrics in output["env_metrics"]}) == 8
    for n in range(8):
        prompt = server.tokenizer.decode(output["prompt_token_ids"][n])
        assert f"Write {'pq'[n // 4]}." in prompt
        mask, known = output["loss_masks"][n], output["rollout_logprobs"][n]
        assert {logprob for logprob, m in zip(known, mask, strict=True) if m} == {-0.5}
        said, told = (
            server.tokenizer.decode(
                [t for t, m in zip(output["response_ids"][n], mask, strict=True) if m == which]
            )
            for which in (1, 0)
        )
        word = "".join(part[0] for part in said.split("printf ")[1:])
        # Each branch saw its own past, and is graded by it.
        assert told == "".join(
            f"\n<|im_start|>user\n{word[:k]}<|im_end|>\n<|im_start|>assistant\n" for k in (1, 2)
        )
        assert output["rewards"][n] == float("b" not in word)
    assert output["stop_reasons"] == ["stop"] * 8
    trees = [metrics["boxwood_tree_id"] for metrics in output["env_metrics"]]
    assert [sorted(trees[:4]), sorted(trees[4:])] == [["0", "0", "1", "1"]] * 2
    assert server.asked <= 8 * 3


def test_a_group_that_the_host_lost_is_masked(image: str) -> None:
    async def no_host(place: Any) -> float:
        raise boxwood.InfrastructureError("gone")

    def made(extras: Any) -> Task:
        return Task(extras["image"], no_host, setup=["mkdir -p /work"], cwd="/work")

    _, output = generated(made, batch(image, "p"))
    assert output["stop_reasons"] == ["error"] * 4
    assert output["loss_masks"] == [[0]] * 4
    assert output["rewards"] == [0.0] * 4
    with pytest.raises(boxwood.NotFound, match="not:there"):
        generated(task, batch("not:there", "p"))
