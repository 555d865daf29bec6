"""The judge learns, is saved whole, and is trained on pictures of which only the look was changed."""

from dataclasses import replace
from importlib.resources import files

import pytest
import torch

from fewstep.accel.errors import InvalidConfig
from fewstep.distill.config import read
from fewstep.distill.data import GROUPS, DataConfig
from fewstep.distill.judge import Judge, JudgeConfig, JudgeTask, augment, blurred, load, save
from fewstep.distill.trainer import TrainConfig, seeded

CONFIG = JudgeConfig(widths=(8, 16), dropout=0.0)
STILL = replace(CONFIG, shift=0.0, zoom=0.0, blur=1e-3, noise=0.0, tint=0.0)


@pytest.fixture
def task(data):
    torch.manual_seed(0)
    return JudgeTask(CONFIG, data)


def test_the_loss_falls_and_the_labels_are_learnt(task):
    """One flat colour a picture: the toy pictures of one split differ in nothing else."""
    optimizer, batch = torch.optim.AdamW(task.parameters(), 1e-2), task.batch(torch.arange(16), seeded(0))
    batch["images"] = torch.rand(16, 3, 1, 1, generator=seeded(1)).expand(16, 3, 64, 64) * 2 - 1
    losses = []
    for _ in range(150):
        loss, logs = task(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert logs["group_accuracy"] > 0.9 and logs["style_accuracy"] > 0.9


def test_labels_are_those_of_the_pictures(task):
    places = torch.from_numpy(task.data.train)[torch.arange(10)]
    wanted = task.batch(torch.arange(10), seeded(0))
    for place, group, style in zip(places, wanted["group"], wanted["style"], strict=True):
        assert task.data.group[task.data.concept[place]] == GROUPS[group]
        assert task.data.caption(place).endswith(f"{task.data.styles[style]} style")


def test_validation_is_the_share_of_right_verdicts(task):
    found = task.eval().validate()
    assert set(found) == {"group_held_out", "style_held_out"}
    logits = task.judge(task.data.images(task.data.test))
    right = logits["style"].argmax(dim=1) == torch.from_numpy(task.data.style[task.data.test])
    assert found["style_held_out"] == pytest.approx(right.float().mean().item())


def test_a_saved_judge_is_the_same_judge(task, tmp_path):
    task(task.batch(torch.arange(16), seeded(0)))  # the normalisation has statistics now
    task.save(tmp_path / "judge")
    again, images = load(tmp_path / "judge"), torch.rand(4, 3, 64, 64, generator=seeded(2))
    assert again.config["groups"] == list(GROUPS) and again.config["styles"] == task.data.styles
    assert not again.training and not any(p.requires_grad for p in again.parameters())
    for name, value in task.judge.eval()(images).items():
        torch.testing.assert_close(again(images)[name], value, rtol=1e-2, atol=1e-2)  # saved in half precision
    save(again, tmp_path / "twice")
    for name, value in load(tmp_path / "twice")(images).items():
        assert torch.equal(value, again(images)[name])
    with pytest.raises(InvalidConfig, match="no judge at nowhere; train one"):
        load(tmp_path.relative_to(tmp_path) / "nowhere")


def test_a_verdict_does_not_depend_on_batch_mates():
    torch.manual_seed(0)
    judge, images = Judge((8, 16), ("a", "b"), ("c", "d")).eval(), torch.rand(5, 3, 64, 64, generator=seeded(0))
    torch.testing.assert_close(judge(images)["group"][3:4], judge(images[3:4])["group"], rtol=1e-5, atol=1e-6)


def test_without_changes_a_picture_is_itself_or_its_mirror_image():
    images = torch.rand(32, 3, 16, 16, generator=seeded(0)) * 2 - 1
    changed = augment(images, STILL, seeded(1))
    same = (changed - images).abs().amax(dim=(1, 2, 3)) < 1e-4
    mirrored = (changed - images.flip(-1)).abs().amax(dim=(1, 2, 3)) < 1e-4
    assert (same ^ mirrored).all() and same.any() and mirrored.any()


@pytest.mark.parametrize("change", ["shift", "zoom", "blur", "noise", "tint"])
def test_each_change_changes_pictures_within_their_range(change):
    images = torch.rand(8, 3, 16, 16, generator=seeded(0)) * 2 - 1
    one = replace(STILL, **{change: getattr(CONFIG, change)})
    still, changed = (augment(images, config, seeded(1)) for config in (STILL, one))
    assert (changed - still).abs().mean() > 1e-3 and changed.abs().max() <= 1
    assert torch.equal(changed, augment(images, one, seeded(1)))


def test_blur_keeps_flat_pictures_and_softens_edges():
    edge = torch.zeros(1, 3, 9, 9)
    edge[..., 4:] = 1
    soft = blurred(edge, 1.0)
    torch.testing.assert_close(blurred(torch.ones(1, 3, 9, 9), 1.0), torch.ones(1, 3, 9, 9))
    assert soft.diff(dim=-1).max() < 0.5 and (soft.diff(dim=-1) >= 0).all()


def test_the_shipped_configuration_is_valid():
    file = files("fewstep.distill") / "configs" / "emoji-judge.toml"
    assert read(str(file), train=TrainConfig, data=DataConfig, model=JudgeConfig)["model"].widths
