"""What is built and installed, and that our folder ``kernels`` and Hugging Face's package of that name get along."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = {
    "metagrpo": "metagrpo",
    "kernels": "metagrpo/kernels",
    "trainer": "metagrpo/trainer",
    "bench": "metagrpo/bench",
}
BUILD = """
import sys
from setuptools import build_meta
print(getattr(build_meta, sys.argv[1])(sys.argv[2]))
"""


def python(*arguments: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run this interpreter; its path is what it would be without us, unless ``PYTHONPATH`` is given."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=cwd,
        env={**variables, **environment},
    )


def build(kind: str, source: Path, target: Path) -> Path:
    """Call the build backend, as pip and build do, in an environment that has what it needs."""
    target.mkdir(exist_ok=True)
    result = python("-c", BUILD, f"build_{kind}", target, cwd=source)
    assert result.returncode == 0, result.stdout + result.stderr
    return target / result.stdout.splitlines()[-1]


def wheel_names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def module_names() -> set[str]:
    """Every module of the tree, under its installed name."""
    names = set()
    for folder, package in SOURCES.items():
        for path in (ROOT / folder).rglob("*.py"):
            names.add(str(PurePosixPath(package) / path.relative_to(ROOT / folder).as_posix()))
    return names


@pytest.fixture(scope="module")
def artefacts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the sdist of a copy of the tree, so that nothing is left in this one."""
    folder = tmp_path_factory.mktemp("packaging")
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "outputs", "shared", "*.so")
    shutil.copytree(ROOT, folder / "tree", ignore=ignored)
    return build("wheel", folder / "tree", folder / "out"), build("sdist", folder / "tree", folder / "out")


@pytest.fixture(scope="module")
def installed(artefacts: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the wheel is installed into."""
    site = tmp_path_factory.mktemp("site")
    pip = ["-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", "--no-index"]
    result = python(*pip, "--target", site, artefacts[0], cwd=site)
    assert result.returncode == 0, result.stderr
    return site


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_nothing_else(artefacts: tuple[Path, Path]) -> None:
    names = wheel_names(artefacts[0])
    assert {name for name in names if name.endswith(".py")} == module_names()
    assert {name.partition("/")[0] for name in names} == {"metagrpo"}  # no kernels, trainer or tests at the top
    for module in (
        "kernels/losses.py",
        "trainer/rollout/native.py",
        "trainer/rewards/pool.py",
        "trainer/data/order.py",
    ):
        assert f"metagrpo/{module}" in names


@pytest.mark.slow
def test_the_metadata_of_the_wheel(artefacts: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(artefacts[0]) as archive:
        (info,) = {name.partition("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        metadata = archive.read(f"{info}/METADATA").decode()
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
        assert f"{info}/licenses/LICENSE" in archive.namelist()
    head = metadata.partition("\n\n")[0].splitlines()
    required = [line for line in head if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert [line.split(":")[1].split("<")[0].split(">")[0].strip() for line in required] == ["torch"]
    assert "License-Expression: Apache-2.0" in head and "Requires-Python: >=3.10" in head
    assert "metagrpo = metagrpo.trainer.cli:main" in entry_points.splitlines()


@pytest.mark.slow
def test_the_sdist_builds_the_same_wheel(artefacts: tuple[Path, Path], tmp_path: Path) -> None:
    wheel, sdist = artefacts
    with tarfile.open(sdist) as archive:
        for member in archive.getmembers():
            assert member.name.startswith("metagrpo-") and ".." not in member.name
        archive.extractall(tmp_path)
    (source,) = tmp_path.iterdir()
    for name in ("LICENSE", "README.md", "setup.py", "pyproject.toml", "PKG-INFO"):
        assert (source / name).is_file(), name
    assert wheel_names(build("wheel", source, tmp_path / "out")) == wheel_names(wheel)


ELSEWHERE = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", "")]
import metagrpo.kernels, metagrpo.trainer.errors
print(metagrpo.__version__, metagrpo.__file__, metagrpo.kernels.__file__, sep="\\n")
"""


@pytest.mark.slow
def test_the_installed_wheel_is_imported_from_where_it_lies(installed: Path, tmp_path: Path) -> None:
    result = python("-c", ELSEWHERE, cwd=tmp_path, PYTHONPATH=str(installed))
    assert result.returncode == 0, result.stderr
    version, package, kernels = result.stdout.splitlines()
    assert version != "0.0.0"
    assert Path(package) == installed / "metagrpo" / "__init__.py"
    assert Path(kernels) == installed / "metagrpo" / "kernels" / "__init__.py"
    assert (installed / "bin" / "metagrpo").exists()


BLOCKED = """
import sys
third_party = "numpy scipy matplotlib transformers peft datasets accelerate safetensors tokenizers " \\
    "huggingface_hub pydantic yaml typer rich psutil tqdm math_verify reasoning_gym"

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in third_party.split():
            raise ModuleNotFoundError(f"{name} is not installed", name=name)

sys.meta_path.insert(0, Refuse())
import torch
before = set(sys.modules)
import metagrpo.kernels as kernels
loss, _ = kernels.policy_loss(
    kernels.token_logprob(torch.zeros(2, 3, requires_grad=True), torch.tensor([0, 1])), torch.ones(2),
    sequence_ids=torch.zeros(2, dtype=torch.int64), normalizer=torch.tensor(2))
loss.backward()
allowed = {"metagrpo", "torch", "triton", "sympy", "mpmath"}
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(new - allowed - set(sys.stdlib_module_names)))
print(any(name.startswith("metagrpo.trainer") for name in sys.modules))
"""


def test_the_kernels_need_torch_alone(tmp_path: Path) -> None:
    result = python("-c", BLOCKED, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "\nFalse\n"


@pytest.fixture
def fake_kernels(tmp_path: Path) -> Path:
    """A folder with a package ``kernels`` in it, as ``pip install kernels`` leaves it."""
    site = tmp_path / "site"
    (site / "kernels").mkdir(parents=True)
    (site / "kernels" / "__init__.py").write_text(
        "from .layer import Device, use_kernel_forward_from_hub\n__version__ = '9.9'\nget_kernel = None\n"
    )
    (site / "kernels" / "layer.py").write_text(
        "class Device:\n    pass\n\n\ndef use_kernel_forward_from_hub(name):\n    return lambda layer: layer\n"
    )
    (site / "kernels-9.9.dist-info").mkdir()
    (site / "kernels-9.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 9.9\n")
    (site / "kernels-9.9.dist-info" / "RECORD").write_text("kernels/__init__.py,,\nkernels/layer.py,,\n")
    (site / "kernels-9.9.dist-info" / "top_level.txt").write_text("kernels\n")
    return site


WHICH = """
import kernels, kernels.layer
from importlib.metadata import version
import metagrpo.kernels
print(kernels.__version__, version("kernels"), kernels.layer.Device.__module__, kernels.__file__)
print(metagrpo.kernels.__file__)
"""


def test_the_installed_package_of_our_folders_name_is_the_one_that_is_imported(fake_kernels: Path) -> None:
    result = python("-c", WHICH, cwd=ROOT, PYTHONPATH=str(fake_kernels))
    assert result.returncode == 0, result.stderr
    theirs, ours = result.stdout.splitlines()
    assert theirs == f"9.9 9.9 kernels.layer {fake_kernels / 'kernels' / '__init__.py'}"
    assert Path(ours) == ROOT / "kernels" / "__init__.py"


COMMAND = """
import sys
import transformers
from transformers import LlamaForCausalLM
print(LlamaForCausalLM.__name__)
from metagrpo.trainer.cli import main
sys.argv[1:] = ["train", "no.yaml"]
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("has_kernels", [False, True])
def test_transformers_and_the_command_work_from_the_root(has_kernels: bool, fake_kernels: Path) -> None:
    path = {"PYTHONPATH": str(fake_kernels)} if has_kernels else {}
    # The folder's own trainer, transformers and all, down to an error that is ours.
    result = python("-c", COMMAND, cwd=ROOT, **path)
    assert (result.returncode, result.stdout) == (2, "LlamaForCausalLM\n"), result.stderr
    assert result.stderr == "config error: cannot read the recipe no.yaml: No such file or directory\n"
    result = python("-m", "metagrpo.trainer", "--help", cwd=ROOT, **path)
    assert result.returncode == 0 and "export" in result.stdout, result.stderr
    result = python("-m", "pytest", "--version", cwd=ROOT, **path)
    assert result.returncode == 0, result.stderr
