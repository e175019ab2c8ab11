"""Checkpoints that are complete or absent, and the tensors and state within them, bit for bit, without pickle."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from metagrpo.trainer.errors import ConfigError, RunError
from metagrpo.trainer.rundir import disk_errors, fsync_path, write_text

MANIFEST = "manifest.json"
LATEST = "latest"
_NAME = re.compile(r"step_(\d{6,})")
_TEMPORARY = ".tmp-"


def save_checkpoint(root: Path, step: int, write: Callable[[Path], None], *, keep_last: int, keep_every: int) -> Path:
    """Write ``root/step_000100``, point ``root/latest`` at it, and delete what is not to be kept.

    ``write`` fills a temporary directory, which gets a manifest (size and BLAKE2b of every file), is forced onto
    the disk and then renamed: a kill at any moment leaves the new checkpoint whole or not at all. One of the same
    step is replaced. The caller holds the run's lock, so every other temporary is a dead writer's and is removed.

    Args:
        root: the run's ``checkpoints`` folder.
        step: number of finished steps.
        write: fills the directory that it is given, sub-directories allowed.
        keep_last: newest checkpoints to keep, at least 1.
        keep_every: also keep those whose step is a multiple of this; 0 keeps none for that reason.

    Raises:
        RunError: the disk is full or read-only; older checkpoints and ``latest`` are as they were.
    """
    final = root / f"step_{step:06d}"
    temporary = root / f"{_TEMPORARY}{final.name}-{os.getpid()}"
    with disk_errors(final):
        root.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(root)
        try:
            temporary.mkdir()
            write(temporary)
            files = _describe(temporary)
            (temporary / MANIFEST).write_text(json.dumps({"step": step, "files": files}, indent=2) + "\n")
            _fsync_tree(temporary)
            if final.exists():
                os.rename(final, root / f"{_TEMPORARY}replaced-{final.name}")
            os.rename(temporary, final)
            fsync_path(root)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        write_text(root / LATEST, final.name + "\n")
        _prune(root, step, keep_last, keep_every)
        _remove_leftovers(root)
    return final


def latest_checkpoint(root: Path) -> Path | None:
    """The newest checkpoint whose files are what its manifest says; ``None`` where none was ever finished.

    A damaged one is passed over with a warning that says what is wrong with it.

    Raises:
        RunError: there are checkpoints and every one is damaged; starting over in silence would be worse.
    """
    found = _checkpoints(root)
    for _, path in sorted(found, reverse=True):
        damage = _damage(path)
        if damage is None:
            return path
        warnings.warn(f"checkpoint {path} is skipped: {damage}", RuntimeWarning, stacklevel=2)
    if found:
        raise RunError(f"every checkpoint in {root} is damaged: delete the folder, or start with --overwrite")
    return None


def checkpoint_at(root: Path, step: int | None) -> Path:
    """The checkpoint of a step, or the newest, for readers.

    Raises:
        ConfigError: there is none.
        RunError: it is damaged.
    """
    if step is None:
        newest = latest_checkpoint(root)
        if newest is None:
            raise ConfigError(f"{root} holds no checkpoint")
        return newest
    path = dict(_checkpoints(root)).get(step)
    if path is None:
        known = ", ".join(str(number) for number, _ in sorted(_checkpoints(root)))
        raise ConfigError(f"{root} holds no checkpoint of step {step}; it has {known or 'none'}")
    damage = _damage(path)
    if damage is not None:
        raise RunError(f"checkpoint {path} is damaged: {damage}")
    return path


def save_state(directory: Path, tensors: Mapping[str, torch.Tensor], meta: Mapping[str, Any]) -> None:
    """Write ``state.safetensors`` and ``state.json`` into a directory.

    Tensors keep their bits, dtype and shape; strides, device and shared storage are not kept. ``meta`` is what
    JSON can hold, with strings as keys; floats keep their bits, NaN and infinities included.
    """
    save_file(_independent(tensors), directory / "state.safetensors")
    (directory / "state.json").write_text(json.dumps(meta))


def load_state(directory: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """What :func:`save_state` wrote; the tensors are on the CPU."""
    return load_file(directory / "state.safetensors"), json.loads((directory / "state.json").read_text())


def _independent(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous CPU tensors, each with a storage of its own, which the file format demands."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    return result


def _checkpoints(root: Path) -> list[tuple[int, Path]]:
    """Step and path of every finished checkpoint."""
    if not root.is_dir():
        return []
    matches = ((_NAME.fullmatch(path.name), path) for path in root.iterdir() if path.is_dir())
    return [(int(match[1]), path) for match, path in matches if match]


def _prune(root: Path, step: int, keep_last: int, keep_every: int) -> None:
    """Later steps are leftovers from before the run was rewound to an older checkpoint: they go too."""
    found = _checkpoints(root)
    newest = sorted((number for number, _ in found if number <= step), reverse=True)[:keep_last]
    for number, path in found:
        on_grid = keep_every > 0 and number % keep_every == 0
        if number > step or not (number in newest or on_grid):
            # Renamed first: a kill during the deletion must not leave half a checkpoint under a checkpoint's name.
            doomed = root / f"{_TEMPORARY}deleted-{path.name}"
            os.rename(path, doomed)
            shutil.rmtree(doomed)


def _remove_leftovers(root: Path) -> None:
    for path in root.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(path)


def _describe(directory: Path) -> dict[str, dict[str, Any]]:
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    return {
        path.relative_to(directory).as_posix(): {"bytes": path.stat().st_size, "blake2b": _digest(path)}
        for path in paths
    }


def _damage(directory: Path) -> str | None:
    """What is wrong with a checkpoint, in words; ``None`` where nothing is."""
    try:
        files = json.loads((directory / MANIFEST).read_text())["files"]
        for name, expected in files.items():
            size = (directory / name).stat().st_size
            if size != expected["bytes"]:
                return f"{name} has {size} bytes instead of {expected['bytes']}"
            if _digest(directory / name) != expected["blake2b"]:
                return f"{name} is corrupt, its checksum differs"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except OSError as error:
        return f"{error.filename} cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is corrupt"
    return None


def _digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=32)
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _fsync_tree(directory: Path) -> None:
    for path in directory.rglob("*"):
        fsync_path(path)
    fsync_path(directory)
