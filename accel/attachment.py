"""A recipe on a target: applied whole or not at all, opened for each call, taken off without a trace."""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import RLock
from typing import Any

import torch
from torch import nn

from . import anatomy
from .errors import Unsupported
from .patches import Dispatcher, Patches
from .recipe import Recipe
from .run import Row, Run, entered, open_run, rows_of_branches
from .target import Target
from .view import lock_of, make_view, settle, view_class

BARE_PIPELINE = "this pipeline was called directly and runs plain: call the AcceleratedPipeline made from it"
BARE_LOOP = "this denoiser was called outside of a run and works plain: open `with fewstep.run(scheduler):`"


class Attachment:
    """What `AcceleratedPipeline` and `accelerate` hold: the recipe, its patches, and the calls in flight."""

    def __init__(self, target: Target, recipe: Recipe, keep_original: bool = True) -> None:
        self.target, self.recipe, self.keep_original = target, recipe, keep_original
        self.lock, self.calls, self.exclusive = RLock(), 0, False
        self.attached = False
        self.attach()

    @property
    def pipe(self) -> Any:
        return self.target.pipe

    # ------------------------------------------------------------------------------------ attach and detach

    def attach(self) -> None:
        """Applies the recipe; if a technique refuses or fails, everything is taken back first."""
        for module in self.target.denoisers.values():
            refuse_compiled(module)
        for technique in self.recipe.techniques:
            technique.check(self.target)
        self.patches = Patches(self, self.keep_original)
        try:
            for technique in self.recipe.techniques:
                technique.apply(self.target, self.patches)
            self.observe()
            for function in self.patches.ready:
                function()
        except BaseException:
            self.patches.keep_original, self.patches.freed = True, None
            self.patches.undo()
            raise
        self.structure = self.look()
        self.attached = True
        if self.pipe is not None:
            self.view_class = view_class(type(self.pipe), self.patches.methods, lock_of(self.pipe))

    def detach(self) -> None:
        with self.lock:
            if self.calls:
                raise Unsupported(f"{self.calls} call(s) are in progress: detach when they have ended")
            if self.attached:
                self.patches.undo()
                self.attached = False

    @contextmanager
    def set_aside(self) -> Generator[None]:
        """The plain pipeline, for as long as the block runs; as it is if its originals were freed."""
        if self.patches.freed:
            yield
            return
        self.detach()
        try:
            yield
        finally:
            self.attach()

    def look(self) -> tuple[Any, ...]:
        """What the recipe was applied to: the denoisers and the adapters on them. Other parts are met at each call."""
        denoisers = anatomy.denoisers(self.pipe) if self.pipe is not None else self.target.denoisers
        return tuple((n, id(m), tuple(getattr(m, "peft_config", None) or ())) for n, m in denoisers.items())

    def refresh(self) -> None:
        """Attaches anew if the user put in another denoiser or adapters since."""
        found = self.look()
        if found != self.structure and not self.calls:
            if self.patches.freed and [part[:2] for part in found] == [part[:2] for part in self.structure]:
                self.structure = found  # new adapters on weights that cannot be put back: what is attached stays
            else:
                self.renew()
        self.patches.recheck()

    def renew(self) -> None:
        """Off the parts that were, on the parts that are. A denoiser that was replaced needs no originals back."""
        self.patches.freed = None
        self.detach()
        self.target = Target.of_pipeline(self.pipe) if self.pipe is not None else self.target
        self.attach()

    # ------------------------------------------------------------------------------------ one call

    @contextmanager
    def open_call(self, kwargs: dict[str, Any]) -> Generator[tuple[Any, Run]]:
        """The view and the Run of one call of the pipeline."""
        exclusive = needs_the_model_alone(self.target, kwargs)
        with self.lock:
            if self.calls and (exclusive or self.exclusive):
                raise Unsupported(
                    "a call with an offloaded model, a LoRA scale or PAG changes the shared model while it runs: "
                    "wait for the other call to end, or use one pipeline a thread"
                )
            self.refresh()
            view, pairs = make_view(self.pipe, self.view_class, self.patches.components)
            self.calls, self.exclusive = self.calls + 1, exclusive
        run = Run(self, getattr(view, "scheduler", None) or (pairs[0][0] if pairs else None))
        run.slot("schedulers", list).extend(copied for copied, _ in pairs)
        run.slot("view", lambda: view)
        start_memory()
        try:
            with entered(run):
                yield view, run
        finally:
            end_memory(run)
            release_decoder(run)
            run.forget()
            with self.lock:
                settle(view, self.pipe, pairs)
                self.calls -= 1

    # ------------------------------------------------------------------------------------ what is observed

    def observe(self) -> None:
        """Wraps, outermost, what the report and the rows are read from."""
        for module in self.target.denoisers.values():
            self.patches.wrap_forward(module, observer(module))
            if hasattr(module, "cache_context"):
                self.patches.wrap_method(module, "cache_context", named_context)
            Dispatcher.on(module, "forward").bare_warning = BARE_LOOP if self.pipe is None else BARE_PIPELINE
        if self.pipe is None:
            return
        if hasattr(type(self.pipe), "encode_prompt"):
            self.patches.wrap_method(self.pipe, "encode_prompt", timed_text)
        if hasattr(type(self.pipe), "prepare_latents"):
            self.patches.wrap_method(self.pipe, "prepare_latents", counted_images)
        for decoder in self.target.decoders.values():
            if hasattr(decoder, "decode"):
                self.patches.wrap_method(decoder, "decode", decoding(lock_of(self.pipe)))
        if hasattr(type(self.pipe), "upcast_vae"):
            self.patches.wrap_method(self.pipe, "upcast_vae", holding(lock_of(self.pipe)))


def observer(module: nn.Module) -> Callable[..., Any]:
    """Counts evaluations, and says which rows a call of this denoiser holds when a technique asks."""

    def around(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        run = open_run()
        rows = count_rows(run, module, args, kwargs)
        run.begin_call(lambda: describe_rows(run, rows), anatomy.timestep_of(module, args, kwargs))
        now = time.perf_counter()
        first = run.slot("denoise_start", lambda: now)
        output = inner(*args, **kwargs)
        run.report.denoiser_calls += 1
        run.report.nfe += rows
        run.report.denoise_s = time.perf_counter() - first
        run.call_of_step += 1
        return output

    return around


def count_rows(run: Run, module: nn.Module, args: Any, kwargs: Any) -> int:
    try:
        return anatomy.rows_of(module, args, kwargs)
    except Unsupported as error:
        run.report.note(str(error))
        return 1


def describe_rows(run: Run, rows: int) -> tuple[Row, ...]:
    """Evidence for the guidance branches, in order: cache_context, the table by pipeline class, the latents' batch."""
    if run.context in anatomy.CONTEXTS:
        return rows_of_branches(run, (anatomy.CONTEXTS[run.context],), rows)
    view = run.slot("view", lambda: None)
    if view is None:
        return declared_rows(run, run.slot("branches", lambda: None) or ("cond",) * rows)
    factor = rows // images_of(run, view, rows)
    branches = anatomy.branches(view, factor, run.call_of_step)
    if branches is None:
        run.report.note(f"guidance branches of {type(view).__name__} are not known: its rows are taken for one branch")
        branches, factor = ("cond",), 1
    return rows_of_branches(run, branches, rows // factor)


def declared_rows(run: Run, branches: Sequence[str]) -> tuple[Row, ...]:
    """Rows of the user's own loop: the k-th row of a branch is image k."""
    images = [branches[:i].count(branch) for i, branch in enumerate(branches)]
    return tuple(Row(0, image, branch, run.step, run.sigma) for image, branch in zip(images, branches, strict=True))


def images_of(run: Run, view: Any, rows: int) -> int:
    """The latents' batch: as prepared or seen at the last step, else from the guidance that the call asked for."""
    if run.images is not None and rows % run.images == 0:
        return run.images
    guided = getattr(view, "do_classifier_free_guidance", None)
    if guided is None:
        return rows
    counts = [n for n in (3, 2) if anatomy.branches(view, n) is not None and rows % n == 0]
    return rows // counts[-1] if guided and counts else rows


@contextmanager
def named_context(inner: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Generator[None]:
    run = open_run()
    before, run.context = run.context, name
    try:
        with inner(name, *args, **kwargs):
            yield
    finally:
        run.context = before


def counted_images(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The latents' batch, known before the first step: some pipelines tell their guidance to nobody."""
    output, run = inner(*args, **kwargs), open_run()
    latents = output[0] if isinstance(output, tuple) else output
    if run.images is None and isinstance(latents, torch.Tensor):
        run.images = len(latents)
    return output


def timed_text(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    start = time.perf_counter()
    try:
        return inner(*args, **kwargs)
    finally:
        open_run().report.text_s += time.perf_counter() - start


def holding(lock: Any) -> Callable[..., Any]:
    """Takes the decoder's lock and keeps it until the call ends: the pipeline casts its decoder back after decoding."""

    def around(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        held = open_run().slot("held_locks", list)
        lock.acquire()
        held.append(lock)
        return inner(*args, **kwargs)

    return around


def decoding(lock: Any) -> Callable[..., Any]:
    hold = holding(lock)

    def around(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return hold(inner, *args, **kwargs)
        finally:
            open_run().report.decode_s += time.perf_counter() - start

    return around


def release_decoder(run: Run) -> None:
    for lock in run.slot("held_locks", list):
        lock.release()


def start_memory() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):  # Linux: the process's high-water mark counts from here; elsewhere from its start
        Path("/proc/self/clear_refs").write_text("5")


def end_memory(run: Run) -> None:
    if torch.cuda.is_available():
        run.report.peak_bytes = torch.cuda.max_memory_allocated()
        return
    with suppress(ImportError):  # Windows has no such module
        import resource

        run.report.peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def needs_the_model_alone(target: Target, kwargs: dict[str, Any]) -> bool:
    scales = [kwargs.get(n) or {} for n in ("cross_attention_kwargs", "joint_attention_kwargs", "attention_kwargs")]
    offloaded = any(hasattr(module, "_hf_hook") for module in target.denoisers.values())
    swaps_processors = hasattr(target.pipe, "pag_attn_processors")  # on the shared denoiser, for the length of a call
    return offloaded or swaps_processors or any("scale" in scale for scale in scales)


def refuse_compiled(module: nn.Module) -> None:
    if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
        raise Unsupported(
            f"{type(module).__name__} was compiled already, so nothing inside it can be changed: remove "
            "torch.compile and add CompileBlocks() to the recipe"
        )
