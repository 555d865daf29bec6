"""`fewstep doctor`: what this machine has, and which techniques can run on it."""

import importlib.util
import json
import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer

PACKAGES = ("torch", "diffusers", "transformers", "accelerate", "peft", "tensorboard", "efficientnet_lite_pytorch")


def doctor(as_json: Annotated[bool, typer.Option("--json", help="print as JSON")] = False) -> None:
    """Say what this machine has, and which techniques can run on it."""
    from rich.console import Console
    from rich.table import Table

    facts, verdicts = machine(), techniques()
    if as_json:
        typer.echo(json.dumps({"machine": facts, "techniques": verdicts}, indent=1))
        return
    console = Console()
    table = Table("machine", "", show_header=False)
    for name, value in facts.items():
        table.add_row(name, str(value))
    console.print(table)
    table = Table("technique", "on the embedded model, here")
    for name, verdict in verdicts.items():
        table.add_row(name, verdict)
    console.print(table)


def machine() -> dict[str, Any]:
    import torch

    return {
        "python": platform.python_version(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "bfloat16": "native" if native_bfloat16() else "emulated: slower than float32",
        "device": best_device(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "compiler": shutil.which(os.environ.get("CXX", "g++")) or "none: CompileBlocks cannot run",
        **{name: installed(name) for name in PACKAGES},
    }


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "installed" if importlib.util.find_spec(package) else "not installed"


def native_bfloat16() -> bool:
    """Whether matrix products in bfloat16 have instructions of their own here."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def best_device() -> str:
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None else "cpu"


def techniques() -> dict[str, str]:
    """Each technique tried on a small Stable Diffusion pipeline: "yes", or why not."""
    from . import catalog
    from .errors import FewstepError
    from .pipeline import AcceleratedPipeline
    from .recipe import Recipe
    from .zoo.tiny import tiny

    verdicts: dict[str, str] = {}
    for name in catalog.TECHNIQUES:
        try:
            AcceleratedPipeline(tiny("sd"), Recipe(catalog.example(name))).detach()
            verdicts[name] = "yes, experimental" if name in catalog.EXPERIMENTAL else "yes"
        except FewstepError as error:
            verdicts[name] = str(error)
    return verdicts
