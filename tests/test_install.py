"""What was installed is what is in the repository, and it works by itself."""

import json
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FEWSTEP = Path(sysconfig.get_path("scripts")) / "fewstep"


def run(*command, cwd, **kwargs):
    return subprocess.run([str(c) for c in command], cwd=cwd, capture_output=True, text=True, timeout=300, **kwargs)


def editable():
    origin = distribution("fewstep").read_text("direct_url.json")
    return bool(origin) and json.loads(origin).get("dir_info", {}).get("editable", False)


def test_wheel_contents_are_the_files_in_git(tmp_path):
    tracked = run("git", "ls-files", "-co", "--exclude-standard", cwd=ROOT)
    if tracked.returncode:
        pytest.skip("not a git checkout: nothing to compare the wheel with")
    export = tmp_path / "source"
    for name in tracked.stdout.splitlines():
        if (ROOT / name).is_file():
            (export / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, export / name)
    built = run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, export, cwd=tmp_path)
    assert built.returncode == 0, built.stderr
    inside = {n for n in zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist() if ".dist-info/" not in n}
    libraries = ("accel/", "schedulers/", "distill/", "serving/", "benchmarks/")
    files = {n for n in tracked.stdout.splitlines() if n.startswith(libraries) and (ROOT / n).is_file()}
    expected = {
        "fewstep/" + n.removeprefix("accel/_umbrella/") for n in files if not n.startswith("benchmarks/results/")
    }
    cards = {"zoo", "data"}  # folders whose README is a card that ships
    expected -= {n for n in expected if n.endswith("README.md") and not cards & set(n.split("/"))}
    assert inside == expected


def test_the_installed_command_generates_a_picture(tmp_path):
    """In a folder of the user's own that has packages of our folders' names."""
    for name in ("schedulers", "accel", "serving", "benchmarks"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('the folder of the user was imported')")
    command = [FEWSTEP, "generate", "red apple, noto style", "--recipe", "plain", "--steps", 2, "--json"]
    done = run(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (tmp_path / report["files"][0]).stat().st_size > 500 and report["nfe"] == 4


def test_users_folders_do_not_break_the_import(tmp_path):
    (tmp_path / "schedulers").mkdir()
    (tmp_path / "schedulers" / "__init__.py").write_text("mine = True")
    code = "import schedulers, fewstep; from fewstep import Recipe; assert schedulers.mine; print(Recipe())"
    done = run(sys.executable, "-c", code, cwd=tmp_path)
    assert done.stdout == "Recipe()\n", done.stderr


def test_help_and_version_do_not_wait_for_torch(tmp_path):
    code = "import sys; sys.argv = ['fewstep', '--help']; from fewstep.accel.cli import main; main(); "
    code += "assert 'torch' not in sys.modules and 'diffusers' not in sys.modules"
    done = run(sys.executable, "-c", code, cwd=tmp_path)
    assert done.returncode == 0 and "sweep" in done.stdout, done.stderr
    assert run(FEWSTEP, "--version", cwd=tmp_path).stdout.startswith("fewstep 0.")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], "known: demo"),
        (["generate", "x", "--model", "no/such/model"], "embedded model"),
        (["generate", "x", "--recipe", "no-such-preset", "--steps", "1"], "known: exact"),
        (["generate", "x", "--dtype", "int3"], "float32"),
        (["generate", "x", "--device", "toaster"], "no device of torch"),
        (["generate", "x", "--out", "/proc/x"], "/proc/x"),
        (["train", "autoencoder", "none.toml"], "no configuration file"),
    ],
)
def test_bad_input_is_one_line_and_no_traceback(arguments, words, tmp_path):
    done = run(FEWSTEP, *arguments, cwd=tmp_path, env={"HF_HUB_OFFLINE": "1", "PATH": ""})
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert words in done.stderr.replace("\n", " ")
    assert not list(tmp_path.iterdir())
