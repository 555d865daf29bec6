"""`fewstep train`: the command line of the trainers."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Train the embedded models or your own.")
Config = Annotated[Path, typer.Argument(help="TOML file with the sections [train], [data], [model]")]
Overrides = Annotated[list[str] | None, typer.Argument(help="section.key=value, for instance train.steps=1000")]


@app.command()
def autoencoder(config: Config, overrides: Overrides = None) -> None:
    """Train an AutoencoderKL; resumes from the newest checkpoint in train.out."""
    from .autoencoder import AutoencoderConfig, AutoencoderTask
    from .config import read
    from .data import DataConfig, EmojiData
    from .trainer import TrainConfig, train

    settings = read(config, overrides or (), train=TrainConfig, data=DataConfig, model=AutoencoderConfig)
    task = AutoencoderTask(settings["model"], EmojiData(settings["data"]))
    typer.echo(f"saved {train(task, settings['train'], settings['model'])}")


@app.command()
def base(config: Config, overrides: Overrides = None) -> None:
    """Train a text-to-image model and its text encoder on an autoencoder's latents; resumes in train.out."""
    from .config import read
    from .data import DataConfig, EmojiData
    from .families import CONFIGS, task_of
    from .trainer import TrainConfig, train

    settings = read(config, overrides or (), train=TrainConfig, data=DataConfig, model=CONFIGS)
    task = task_of(settings["model"], EmojiData(settings["data"]))
    typer.echo(f"saved {train(task, settings['train'], settings['model'])}")


@app.command()
def judge(config: Config, overrides: Overrides = None) -> None:
    """Train the judge of generated pictures, a classifier of group and style; resumes in train.out."""
    from .config import read
    from .data import DataConfig, EmojiData
    from .judge import JudgeConfig, JudgeTask
    from .trainer import TrainConfig, train

    settings = read(config, overrides or (), train=TrainConfig, data=DataConfig, model=JudgeConfig)
    task = JudgeTask(settings["model"], EmojiData(settings["data"]))
    typer.echo(f"saved {train(task, settings['train'], settings['model'])}")


@app.command()
def decoder(config: Config, overrides: Overrides = None) -> None:
    """Distil an autoencoder's decoder into a small one, for TinyDecoder; resumes in train.out."""
    from .config import read
    from .data import DataConfig, EmojiData
    from .decoder import DecoderConfig, DecoderTask
    from .trainer import TrainConfig, train

    settings = read(config, overrides or (), train=TrainConfig, data=DataConfig, model=DecoderConfig)
    task = DecoderTask(settings["model"], EmojiData(settings["data"]))
    typer.echo(f"saved {train(task, settings['train'], settings['model'])}")
