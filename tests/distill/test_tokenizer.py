"""Known words stay whole, unknown ones are spelled out."""

import json
import subprocess
import sys

from fewstep.distill.tokenizer import word_tokenizer


def test_the_tokenizer_keeps_known_words_whole_and_loses_no_unknown_one():
    tokenizer = word_tokenizer(["red apple, noto style", "green tree"], max_length=12)
    pieces = tokenizer.tokenize("red apple, noto style green tree")
    assert [p.removesuffix("</w>") for p in pieces] == ["red", "apple", ",", "noto", "style", "green", "tree"]
    assert tokenizer.decode(tokenizer("zebra é").input_ids, skip_special_tokens=True).replace(" ", "") == "zebraé"
    assert len(tokenizer("red " * 50, truncation=True).input_ids) == 12


def test_the_tokenizer_survives_saving(tmp_path):
    from transformers import CLIPTokenizer

    tokenizer = word_tokenizer(["red apple, noto style"], max_length=12)
    tokenizer.save_pretrained(tmp_path)
    assert CLIPTokenizer.from_pretrained(tmp_path)("a red apple").input_ids == tokenizer("a red apple").input_ids


def test_every_process_gives_the_same_ids():
    """A resumed training builds its tokenizer anew and must read the ids that it learnt."""
    code = (
        "import json; from fewstep.distill.tokenizer import word_tokenizer; "
        "print(json.dumps(word_tokenizer(['red apple, noto style', 'green tree', 'zoo'], 12).get_vocab()))"
    )
    vocab = word_tokenizer(["zoo", "green tree", "red apple, noto style", "zoo"], max_length=12).get_vocab()
    for _ in range(2):
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert json.loads(other.stdout) == vocab
    assert sorted(vocab.values()) == list(range(len(vocab)))
