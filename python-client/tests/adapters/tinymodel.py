"""A tokenizer of single bytes and a model of a few thousand random weights, made on the spot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer(template: str = CHATML) -> Any:
    """One token for each byte, and the special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(
        [AddedToken(t, special=True) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=template
    )


def model(of: Any) -> Any:
    """A model for that tokenizer."""
    config = Qwen2Config(
        vocab_size=len(of),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        eos_token_id=of.eos_token_id,
        pad_token_id=of.pad_token_id,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config)


def spoken(of: Any, text: str) -> list[int]:
    """What a model samples that says this and ends."""
    return [*of(text, add_special_tokens=False)["input_ids"], of.eos_token_id]


def letters(path: Sequence[str]) -> str:
    """The message that writes the next letter of a word."""
    return f"I write.\n```bash\nprintf {path[-1]} >> /work/word; cat /work/word\n```"
