"""A CLIP tokenizer in which every known word is one token, and any other word falls into pieces.

Word-level would turn a plural or a typing error into <unk>; byte-pair merges trained until each word of the captions is
whole keep the short sequences and lose nothing. It is a stock `CLIPTokenizer`, so stock diffusers loads it.
"""

import json
from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import CLIPTokenizer

START, END = "<|startoftext|>", "<|endoftext|>"
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
# While merges are learnt, the last letter of a word is a letter of its own from the private area. The trainer's suffix
# for it would do, but numbers those letters differently in every process, and a resumed run would read other ids.
LAST = {letter: chr(0xE000 + place) for place, letter in enumerate(LETTERS)}
SPELLED = str.maketrans({last: f"{letter}</w>" for letter, last in LAST.items()})


def word_tokenizer(texts: Iterable[str], max_length: int) -> CLIPTokenizer:
    """Trains merges on `texts` until no pair is left to merge; pads and truncates to `max_length` tokens.

    The same texts give the same ids, in any order and in any process.
    """
    learner = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=1_000_000,
        min_frequency=1,
        special_tokens=[START, END],
        initial_alphabet=[*LETTERS, *LAST.values()],
        show_progress=False,
    )
    learner.train_from_iterator((word[:-1] + LAST[word[-1]] for word in words_of(texts)), trainer)
    vocab = {token.translate(SPELLED): place for token, place in learner.get_vocab().items()}
    merges = [(left.translate(SPELLED), right.translate(SPELLED)) for left, right in merges_of(learner)]
    kind: Any = CLIPTokenizer  # takes pairs; annotated as strings
    return kind(vocab=vocab, merges=merges, model_max_length=max_length)


def words_of(texts: Iterable[str]) -> list[str]:
    """The words of all different texts, as CLIP cuts them, in letters that stand for bytes."""
    clip = CLIPTokenizer(vocab={START: 0, END: 1}, merges=[]).backend_tokenizer
    normal = [clip.normalizer.normalize_str(text) for text in sorted(set(texts))]
    return [word for text in normal for word, _ in clip.pre_tokenizer.pre_tokenize_str(text)]


def merges_of(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    return [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
