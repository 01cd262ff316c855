"""The mini models' tokenizer: byte-level BPE, every digit its own token, Kimi's chat tokens.

    tokenizer = train_tokenizer(texts)
    save_tokenizer(tokenizer, folder)        # tokenizer.json, tokenizer_config.json with a chat template

Single digits cost longer prompts and buy arithmetic that a small model can learn.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 2048
BOS, EOS, PAD, IM_END = "[BOS]", "[EOS]", "[PAD]", "<|im_end|>"
SPECIAL_TOKENS = [BOS, EOS, PAD, "<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", IM_END]
BOS_ID, EOS_ID, PAD_ID, IM_END_ID = (SPECIAL_TOKENS.index(token) for token in (BOS, EOS, PAD, IM_END))

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_{{ message['role'] }}|>{{ message['role'] }}<|im_middle|>{{ message['content'] }}<|im_end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Learn the merges from `texts`; the vocabulary has `VOCAB_SIZE` entries at most."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, *, max_length: int) -> None:
    """Write the two files that transformers' AutoTokenizer reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "additional_special_tokens": SPECIAL_TOKENS[3:],
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
