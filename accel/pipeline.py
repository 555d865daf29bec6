"""`AcceleratedPipeline`: any diffusers pipeline, with a recipe on it, still of its own class."""

import functools
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from .attachment import Attachment
from .errors import InvalidRecipe, Unsupported
from .presets import PRESETS, preset
from .recipe import Recipe
from .run import Report
from .target import Target
from .zoo.embedded import load

RECIPE_FILE = "recipe.json"


@dataclass(frozen=True)
class Result:
    """What a call gave, and what it did for it."""

    output: Any
    report: Report


class AcceleratedPipeline:
    """`AcceleratedPipeline(pipe, recipe)` behaves as `pipe` does, faster.

    The object's class is a subclass of the pipeline's own, of the same name, and it shares the pipeline's attributes:
    what is set on one is seen on the other. Calling the wrapped pipeline itself runs it plain.

    `recipe`: a `Recipe`, the name of a preset, or the path of a recipe.json.
    `keep_original=False`, the default of `from_pretrained`, frees weights that a technique replaced; `detach` then
    refuses, and `save_pretrained` saves the weights as they are.
    Techniques of the stage CAST (`Bfloat16`, `ChannelsLast`) change the shared weights until `detach`, for
    calls of the wrapped pipeline too; what is written to the weights meanwhile is lost then.
    Raises `Unsupported` if a technique cannot work on this pipeline; the pipeline is then as it was.
    """

    __slots__ = ("attachment",)
    attachment: Attachment

    def __new__(cls, pipe: Any, recipe: Recipe | str | Path, *, keep_original: bool = True) -> Self:
        if isinstance(pipe, AcceleratedPipeline):
            raise Unsupported("this pipeline is accelerated already: detach() it, or add the recipes together")
        attachment = Attachment(Target.of_pipeline(pipe), resolve(recipe, pipe), keep_original)
        self: Any = object.__new__(accelerated_class(type(pipe)))
        self.__dict__ = vars(pipe)
        object.__setattr__(self, "attachment", attachment)
        return self

    @classmethod
    def from_pretrained(
        cls, path: str | Path, recipe: Recipe | str | Path | None = None, *, keep_original: bool = False, **kwargs: Any
    ) -> Self:
        """`DiffusionPipeline.from_pretrained(path, **kwargs)` with `recipe`, or else the folder's own recipe.json.

        `path` may also name an embedded model, `emoji-unet`.
        """
        if recipe is None:
            recipe = Path(path) / RECIPE_FILE
            if not recipe.exists():
                raise Unsupported(f"{path} holds no {RECIPE_FILE}: name a recipe, for instance recipe='exact'")
        recipe = known(recipe)  # before any weight is read
        return cls(load(path, **kwargs), recipe, keep_original=keep_original)

    def run(self, *args: Any, **kwargs: Any) -> Result:
        """Calls the pipeline; gives its output and the report of the call."""
        pipe = self.attachment.pipe
        if not self.attachment.attached:
            raise Unsupported("this AcceleratedPipeline was detached: call the pipeline that detach() returned")
        given = inspect.signature(type(pipe).__call__).bind_partial(pipe, *args, **kwargs).arguments
        kwargs = {k: v for k, v in self.attachment.recipe.defaults.items() if k not in given} | kwargs
        with self.attachment.open_call(kwargs) as (view, run):
            output = view(*args, **kwargs)
        return Result(output, run.report)

    def detach(self) -> Any:
        """Takes the recipe off and returns the original pipeline."""
        self.attachment.detach()
        return self.attachment.pipe

    @property
    def recipe(self) -> Recipe:
        return self.attachment.recipe

    def explain(self) -> str:
        """The techniques in the order in which they are applied, what each owns and promises."""
        lines = [f"{type(self).__name__} with {len(self.recipe.techniques)} techniques, innermost first"]
        for technique in self.recipe.techniques:
            owned = ", ".join(sorted(map(str, technique.claims))) or "nothing alone"
            lines.append(f"  {technique.stage.name.lower():10s} {technique}: owns {owned}; {technique.fidelity.value}")
        lines += [f"  call default {name}={value!r}" for name, value in self.recipe.defaults.items()]
        return "\n".join(lines)

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """A stock diffusers folder of the plain pipeline, and the recipe beside it."""
        with self.attachment.set_aside():
            self.attachment.pipe.save_pretrained(save_directory, **kwargs)
        self.recipe.save(Path(save_directory) / RECIPE_FILE)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise Unsupported(
            "an accelerated pipeline cannot be pickled or deep-copied: its modules are the plain one's. Copy "
            "what detach() returns, or use save_pretrained and from_pretrained"
        )


@functools.cache
def accelerated_class(cls: type) -> type:
    """A subclass of `cls` with its name and signatures, as diffusers' from_pipe and save_pretrained read them."""

    @functools.wraps(cls.__init__)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        """The parts are those of the wrapped pipeline."""

    @functools.wraps(cls.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs).output

    body: dict[str, Any] = {"__init__": init, "__call__": call, "__module__": __name__, "__doc__": cls.__doc__}
    body |= {"__slots__": (), "from_pipe": cls.from_pipe}  # what from_pipe makes is of the plain class
    return type(cls.__name__, (AcceleratedPipeline, cls), body)


def known(recipe: Any) -> Recipe | str:
    """A recipe, a file's recipe, or the name of a preset: what can be told before a model is loaded.

    Raises `InvalidRecipe` for anything else.
    """
    if isinstance(recipe, Recipe) or (isinstance(recipe, str) and recipe in PRESETS):
        return recipe
    if recipe == "plain":
        return Recipe()
    if isinstance(recipe, Path) or (isinstance(recipe, str) and recipe.endswith(".json")):
        return Recipe.load(recipe)
    raise InvalidRecipe(
        f"{recipe!r} is no recipe: give Recipe(...), a preset (known: {', '.join(PRESETS)}), plain, or a recipe.json"
    )


def resolve(recipe: Recipe | str | Path, pipe: Any) -> Recipe:
    found = known(recipe)
    return found if isinstance(found, Recipe) else preset(found, Target.of_pipeline(pipe))
