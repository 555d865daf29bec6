"""The base models that `fewstep train base` knows: a name in a configuration's [model], its settings, its task."""

from .base import BaseTask
from .config import Families
from .transformer import TransformerConfig, TransformerTask
from .unet import UnetConfig, UnetTask

CONFIGS = Families(unet=UnetConfig, transformer=TransformerConfig)
TASKS: dict[type, type[BaseTask]] = {UnetConfig: UnetTask, TransformerConfig: TransformerTask}
