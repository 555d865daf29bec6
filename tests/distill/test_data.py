"""The split of the emoji set."""


def test_the_split_keeps_each_concept_in_training(data):
    assert len(data.concept) == 36 and len(data.test) == 7 and len(data.train) == 29
    assert not set(data.test) & set(data.train)
    assert set(data.concept[data.test]) <= set(data.concept[data.train])
    assert data.caption(5) == "thing1 of kind, twemoji style"
