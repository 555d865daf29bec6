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


def word_tokenizer(texts: Iterable[str], max_length: int) -> CLIPTokenizer:
    """Trains merges on `texts` until no pair is left to merge; pads and truncates to `max_length` tokens."""
    shell = CLIPTokenizer(vocab={START: 0, END: 1}, merges=[])
    learner = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    learner.normalizer = shell.backend_tokenizer.normalizer
    learner.pre_tokenizer = shell.backend_tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=1_000_000,
        min_frequency=1,
        special_tokens=[START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    learner.train_from_iterator(sorted(set(texts)), trainer)
    vocab, merges = learner.get_vocab(), merges_of(learner)
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab.setdefault(letter + "</w>", len(vocab))  # the last byte of an unknown word
    kind: Any = CLIPTokenizer  # takes pairs; annotated as strings
    return kind(vocab=vocab, merges=merges, model_max_length=max_length)


def merges_of(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    return [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
