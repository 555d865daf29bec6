"""Known words stay whole, unknown ones are spelled out."""

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
