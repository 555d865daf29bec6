"""The base models that `fewstep train base` knows: a name in a configuration's [model], its settings, its task."""

from pathlib import Path

from .base import BaseConfig, BaseTask
from .config import Families
from .data import EmojiData
from .transformer import TransformerConfig, TransformerTask
from .unet import UnetConfig, UnetTask

CONFIGS = Families(unet=UnetConfig, transformer=TransformerConfig)
TASKS: dict[type, type[BaseTask]] = {UnetConfig: UnetTask, TransformerConfig: TransformerTask}


def task_of(config: BaseConfig, data: EmojiData) -> BaseTask:
    """The task of these settings, its weights drawn or, with `start`, taken from there."""
    task = TASKS[type(config)](config, data)
    if config.start:
        task.start_from(Path(config.start))
    return task
