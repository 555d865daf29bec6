"""A configuration that cannot be read is refused before anything is loaded, in words that name what is known."""

from dataclasses import dataclass

import pytest

from fewstep.accel.errors import InvalidConfig
from fewstep.distill.config import Families, read


@dataclass(frozen=True, kw_only=True)
class Model:
    width: int
    rate: float = 0.5
    sizes: tuple[int, ...] = (1, 2)
    name: str = "x"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text("[model]\nwidth = 3\nrate = 1\nsizes = [4, 5]\n")
    return path


def test_sections_become_dataclasses(file):
    assert read(file, model=Model) == {"model": Model(width=3, rate=1.0, sizes=(4, 5))}


def test_overrides_win_and_bare_words_are_strings(file):
    found = read(file, ["model.width=7", "model.sizes=[9]", "model.name=runs/a"], model=Model)["model"]
    assert found == Model(width=7, rate=1.0, sizes=(9,), name="runs/a")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.widht=3", "unknown key of .model.: widht; known: name, rate, sizes, width"),
        ("modle.width=3", "unknown section: modle; known: model"),
        ("width=3", "section.key=value"),
        ("model.width=wide", "model.width must be of type int"),
        ("model.sizes=3", "tuple"),
    ],
)
def test_mistakes_are_named(file, override, words):
    with pytest.raises(InvalidConfig, match=words):
        read(file, [override], model=Model)


def test_missing_keys_files_and_bad_toml(tmp_path):
    (tmp_path / "empty.toml").write_text("")
    (tmp_path / "bad.toml").write_text("[model")
    for name, words in (("empty", "lacks width"), ("bad", "not valid TOML"), ("none", "no configuration file")):
        with pytest.raises(InvalidConfig, match=words):
            read(tmp_path / f"{name}.toml", model=Model)


@pytest.mark.parametrize("name", ["emoji-autoencoder", "emoji-autoencoder-decoder", "emoji-unet", "emoji-dit"])
def test_the_shipped_configurations_are_valid(name):
    from importlib.resources import files

    from fewstep.distill.autoencoder import AutoencoderConfig
    from fewstep.distill.data import DataConfig
    from fewstep.distill.families import CONFIGS
    from fewstep.distill.trainer import TrainConfig

    model = AutoencoderConfig if "autoencoder" in name else CONFIGS
    read(str(files("fewstep.distill") / "configs" / f"{name}.toml"), train=TrainConfig, data=DataConfig, model=model)


def test_a_family_chooses_the_kind_of_its_section(tmp_path):
    families = Families(plain=Model, other=Model)
    file = tmp_path / "c.toml"
    for given, words in (('family = "odd"', "plain, other; got odd"), ("width = 3", "plain, other; got None")):
        file.write_text(f"[model]\n{given}\n")
        with pytest.raises(InvalidConfig, match=words):
            read(file, model=families)
