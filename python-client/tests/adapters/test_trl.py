"""TRL's own GRPOTrainer takes a step: in environments with a tool, and with groups that are trees."""

from __future__ import annotations

import inspect
import pickle
import random
import typing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="TRL is not installed: make test-adapters")

import tinymodel
from conftest import defined_by_the_page, pinned
from datasets import Dataset
from transformers.utils import get_json_schema
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.grpo_trainer import EnvironmentFactory, RolloutFunc, _SupportsReset

import boxwood
from boxwood import search
from boxwood.integrations.trl import (
    BranchingRollout,
    GradedShellEnvironment,
    ShellEnvironment,
    Task,
    environment_factory,
    tree_reward,
)

GRADER = boxwood.Grader("w=$(cat /work/word); [[ $w == *a* && $w != *b* ]]")


def task(image: str, **more: Any) -> Task:
    return Task(image, GRADER, setup=["mkdir -p /work; touch /work/word"], cwd="/work", **more)


def trainer(folder: Path, kind: type[GRPOTrainer] = GRPOTrainer, tokenizer: Any = None, **more: Any) -> Any:
    tokenizer = tokenizer or tinymodel.tokenizer()
    config = GRPOConfig(
        str(folder),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=400,
        max_steps=1,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        bf16=False,
    )
    rows = [{"prompt": [{"role": "user", "content": f"Write {word}."}], "word": word} for word in ("a", "aa")]
    return kind(
        model=tinymodel.model(tokenizer),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        **more,
    )


def test_the_contract() -> None:
    pinned("trl", "1.16.0")
    arguments, _ = typing.get_args(RolloutFunc)
    assert list(inspect.signature(BranchingRollout.__call__).parameters) == ["self", "prompts", "trainer"]
    assert len(arguments) == 2
    assert typing.get_args(EnvironmentFactory)[0] == []
    reset, wanted = (inspect.signature(kind.reset) for kind in (ShellEnvironment, _SupportsReset))
    assert [p.kind for p in reset.parameters.values()] == [p.kind for p in wanted.parameters.values()]
    # What it calls of the trainer's.
    own = inspect.signature(GRPOTrainer._generate_single_turn)
    assert list(own.parameters)[:5] == [
        "self",
        "prompt_ids",
        "images",
        "multimodal_fields",
        "num_generations",
    ]
    schema = get_json_schema(ShellEnvironment(task("i")).bash)["function"]
    assert (schema["name"], list(schema["parameters"]["properties"])) == ("bash", ["command"])
    assert defined_by_the_page("TRL")["tree_reward"] is tree_reward


def test_an_environment(image: str) -> None:
    env = pickle.loads(pickle.dumps(environment_factory(task(image))))()
    assert isinstance(env, GradedShellEnvironment)
    assert env.get_reward() is None
    with pytest.raises(boxwood.InvalidArgument, match="reset"):
        env.bash("true")
    for _ in range(2):  # an episode sees nothing of the one before
        env.reset(prompt="")
        assert env.get_reward() == 0.0
        assert env.bash("printf a >> word; cat word") == "a"
        assert env.bash("exit 3") == "Exit code 3."
        assert "NUL" in env.bash("a\0b")
        assert env.get_reward() == 1.0
    env._close()
    with pytest.raises(boxwood.BoxwoodError):
        env.bash("true")


def test_the_trainer_takes_a_step_with_environments(image: str, tmp_path: Path) -> None:
    from trl.chat_template_utils import qwen3_chat_template

    class Scripted(GRPOTrainer):
        """Its model's words are written here; all else is TRL's."""

        def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
            said = [self.processing_class.decode(ids) for ids in prompt_ids]
            call = '<tool_call>\n{{"name": "bash", "arguments": {{"command": "printf {} >> word; cat word"}}}}\n</tool_call>'
            words = [
                "Done." if "<tool_response>" in text else call.format("ab"[n % 2])
                for n, text in enumerate(said)
            ]
            return [tinymodel.spoken(self.processing_class, w) for w in words], None

    seen: list[str] = []

    def made(**row: Any) -> Task:
        seen.append(row["word"])
        return task(image)

    own = trainer(
        tmp_path,
        Scripted,
        tinymodel.tokenizer(qwen3_chat_template),
        environment_factory=environment_factory(made),
    )
    own.train()
    assert sorted(seen) == ["a"] * 4 + ["aa"] * 4
    logged = own.state.log_history[0]
    assert logged["tools/call_frequency"] == 1.0
    assert logged["tools/failure_frequency"] == 0.0
    assert logged["rewards/GradedShellEnvironment/mean"] == 0.5
    for env in own.environments:
        env._close()


def script(trainer: Any, prompts: list[list[int]], histories: list[search.History]) -> Any:
    """Two letters, each drawn by the place's seed, and an end."""
    drawn = [random.Random(history.seed).choice("ab") for history in histories]
    words = [
        "Done." if len(h.steps) == 2 else tinymodel.letters([letter])
        for h, letter in zip(histories, drawn, strict=True)
    ]
    ids = [tinymodel.spoken(trainer.processing_class, word) for word in words]
    return ids, [[-0.5] * len(each) for each in ids]


def test_the_trainer_takes_a_step_with_trees(image: str, tmp_path: Path) -> None:
    kept: dict[str, Any] = {}

    class Kept(BranchingRollout):
        def __call__(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
            kept.update(super().__call__(prompts, trainer), prompts=prompts)
            return {k: v for k, v in kept.items() if k != "prompts"}

    own = trainer(tmp_path, reward_funcs=tree_reward, rollout_func=Kept(task(image), generate=script, seed=1))
    before = [p.detach().clone() for p in own.model.parameters()]
    own.train()
    assert len(kept["prompt_ids"]) == 8
    assert len(set(kept["boxwood_node_id"])) == 8
    tokenizer = own.processing_class
    groups = [kept["prompts"][0], kept["prompts"][4]]
    assert groups[0] != groups[1]
    shared = 0
    for n in range(8):
        assert tokenizer.decode(kept["prompt_ids"][n]) == (
            f"<|im_start|>user\n{groups[n // 4][0]['content']}<|im_end|>\n<|im_start|>assistant\n"
        )
        ids, mask, known = (kept[key][n] for key in ("completion_ids", "env_mask", "logprobs"))
        assert len(ids) == len(mask) == len(known)
        assert {k for k, m in zip(known, mask, strict=True) if m} == {-0.5}
        # What the sandbox said is that of this branch, and is masked.
        said = tokenizer.decode([t for t, m in zip(ids, mask, strict=True) if m])
        word = "".join(part[0] for part in said.split("printf ")[1:])
        told = tokenizer.decode([t for t, m in zip(ids, mask, strict=True) if not m])
        turn = "\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
        assert told == "".join(turn.format(word[: i + 1]) for i in range(len(word)))
        assert kept["boxwood_reward"][n] == float("a" in word and "b" not in word)
        shared += any(kept["boxwood_tree_id"][n] == kept["boxwood_tree_id"][m] for m in range(n // 4 * 4, n))
    assert shared == 4  # two trees of two in each group
    # The model's weights were moved by it if, and only if, rewards differ within a group.
    differ = any(len(set(kept["boxwood_reward"][g : g + 4])) > 1 for g in (0, 4))
    assert differ
    assert any((a != b.detach()).any() for a, b in zip(before, own.model.parameters(), strict=True))


def test_the_trainers_own_generation(image: str, tmp_path: Path) -> None:
    own = trainer(tmp_path, reward_funcs=tree_reward, rollout_func=BranchingRollout(task(image)))
    prompts = [[{"role": "user", "content": "Write."}]] * 3
    given = own.rollout_func(prompts, own)
    assert given["logprobs"] is None
    assert [len(ids) <= 400 for ids in given["completion_ids"]] == [True] * 3
    assert all(set(mask) == {1} for mask in given["env_mask"])  # noise has no command
    assert given["boxwood_reward"] == [0.0] * 3


def test_what_fails(image: str, tmp_path: Path) -> None:
    own = trainer(
        tmp_path, reward_funcs=tree_reward, rollout_func=BranchingRollout(task("not:there"), generate=script)
    )
    prompts = [[{"role": "user", "content": "Write."}]] * 2
    with pytest.raises(boxwood.NotFound, match="not:there"):
        own.rollout_func(prompts, own)

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    own.rollout_func = BranchingRollout(task(image), generate=interrupted)
    with pytest.raises(KeyboardInterrupt):
        own.rollout_func(prompts, own)

    async def no_host(place: search.Place) -> float:
        raise boxwood.InfrastructureError("gone")

    own.rollout_func = BranchingRollout(
        Task(image, no_host, setup=["mkdir -p /work"], cwd="/work"), generate=script
    )
    given = own.rollout_func(prompts, own)
    assert given["boxwood_reward"] == [None, None]
    assert given["env_mask"] == [[0], [0]]
    assert tree_reward([], **{k: given[k] for k in ("boxwood_reward", "boxwood_node_id")}) == [None, None]
