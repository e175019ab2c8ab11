"""The run directory: who may write in it, what lies where, and writes that are whole or absent."""

from __future__ import annotations

import errno
import fcntl
import importlib.metadata
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from metagrpo.trainer.config import Config, dump_config
from metagrpo.trainer.errors import ConfigError, RunError

FOLDERS = ("rollouts", "checkpoints", "logs", "eval", "report")
# config.yaml is no sign of a run that has begun: a dry run writes it too.
RESULTS = ("env.json", "metrics.jsonl", *FOLDERS)
LOCK = ".lock"

DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO})
RECORDED_VARIABLES = ("CUDA_", "HIP_", "ROCR_", "NCCL_", "OMP_", "MKL_", "PYTORCH_", "TORCH_", "METAGRPO_")
RECORDED_PACKAGES = ("metagrpo", "torch", "transformers", "peft", "datasets", "safetensors", "numpy", "triton")


class RunDirectory:
    """The paths of a run; :meth:`create` makes one and holds it against other processes.

    ``RunDirectory(path)`` alone only names the paths, for readers.

    Attributes:
        path: the directory itself.
        config: ``config.yaml``, the resolved configuration.
        env: ``env.json``, see :func:`environment`.
        metrics: ``metrics.jsonl``, a line a step.
        rollouts, checkpoints, logs, eval, report: the folders.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.env = path / "env.json"
        self.metrics = path / "metrics.jsonl"
        self.rollouts = path / "rollouts"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.eval = path / "eval"
        self.report = path / "report"
        self._lock: int | None = None

    @classmethod
    def create(cls, path: Path, resume: bool = False, overwrite: bool = False) -> RunDirectory:
        """Make the directory and its folders, and lock it until :meth:`close` or the end of the process.

        ``overwrite`` deletes the results of the run that lies there, and nothing else in the directory.

        Raises:
            ConfigError: a run lies there and neither flag is given; there is none to resume; both flags are
                given; another process writes there (its pid is named); the directory is somebody else's, or
                cannot be made.
        """
        cls.check(path, resume=resume, overwrite=overwrite)
        run = cls(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            run._lock = _acquire(path / LOCK)
            if overwrite:
                for name in RESULTS:
                    _remove(path / name)
            for name in FOLDERS:
                (path / name).mkdir(exist_ok=True)
        except OSError as error:
            run.close()
            raise ConfigError(f"cannot use {path} as the run's directory: {error.strerror}") from error
        except ConfigError:
            run.close()
            raise
        return run

    @classmethod
    def check(cls, path: Path, resume: bool = False, overwrite: bool = False) -> None:
        """Refuse what :meth:`create` would refuse, before anything slow is done; nothing is written.

        Raises:
            ConfigError: see :meth:`create`.
        """
        if resume and overwrite:
            raise ConfigError("--resume and --overwrite exclude each other")
        if holder := _holder(path / LOCK):
            raise ConfigError(f"{path} is in use by process {holder}")
        found = [name for name in RESULTS if (path / name).exists()]
        is_run = (path / "env.json").exists() or (path / LOCK).exists()
        if resume and not is_run:
            raise ConfigError(f"there is no run to resume in {path}")
        if found and not is_run:
            raise ConfigError(f"{path} holds {', '.join(found)} but is not a run: set another train.output_dir")
        if found and not (resume or overwrite):
            raise ConfigError(f"{path} holds a run: pass --resume or --overwrite, or set another train.output_dir")

    def record(self, config: Config) -> None:
        """Write ``config.yaml`` and ``env.json``.

        Raises:
            RunError: the disk refuses.
        """
        write_text(self.config, dump_config(config))
        write_text(self.env, json.dumps(environment(), indent=2, ensure_ascii=False) + "\n")

    def rollout_file(self, step: int) -> Path:
        """``rollouts/step_000123.jsonl``."""
        return self.rollouts / f"step_{step:06d}.jsonl"

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            _held.discard(self._lock)
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def environment() -> dict[str, Any]:
    """What a run's numbers depend on beside its configuration: versions, commit, machine, variables.

    Variables are taken by a list of prefixes, so that no token or password is written down.
    """
    import psutil
    import torch

    packages = {}
    for name in RECORDED_PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "git": _git_commit(),
        "host": platform.node(),
        "cpu": {
            "name": _cpu_name(),
            "cores": len(os.sched_getaffinity(0)),
            "torch_threads": torch.get_num_threads(),
            "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        },
        "gpus": [{"name": gpu.name, "memory_gb": round(gpu.total_memory / 1e9, 1)} for gpu in gpus],
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "env": {key: value for key, value in sorted(os.environ.items()) if key.startswith(RECORDED_VARIABLES)},
    }


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a full, read-only or failing disk under ``path`` into one line.

    Raises:
        RunError: in place of an error of the disk; any other exception goes through.
    """
    try:
        yield
    except Exception as error:
        number = error.errno if isinstance(error, OSError) else _rust_errno(error)
        if number is None or number not in DISK_ERRORS:
            raise
        raise RunError(f"cannot write {path}: {os.strerror(number)}") from error


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file: a reader, now or after a crash, sees the old file or the new one, whole.

    Raises:
        RunError: the disk is full or read-only; nothing is left behind.
    """
    _write_bytes(path, text.encode())


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a JSON object a line, as :func:`write_text` does; NaN and infinities become null."""
    _write_bytes(path, b"".join(_json_line(row) for row in rows))


def append_jsonl(path: Path, row: Mapping[str, Any]) -> None:
    """Append a JSON object as one line in one ``write``, so that a kill leaves all of it or nothing.

    Raises:
        RunError: the disk is full or read-only; the file is as it was.
    """
    line = _json_line(row)
    with disk_errors(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            try:
                written = os.write(descriptor, line)
                while written < len(line):  # only a disk about to be full takes part of a line
                    written += os.write(descriptor, line[written:])
            except OSError:
                os.ftruncate(descriptor, size)
                raise
        finally:
            os.close(descriptor)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file, none where there is no file; a last line without its newline is torn, and left out.

    Raises:
        RunError: another line is not JSON.
    """
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise RunError(f"{path}, line {number} is not JSON") from error
    return rows


def rewind_jsonl(path: Path, step: int) -> None:
    """Keep the rows of steps before ``step``, and no torn last line."""
    if path.exists():
        write_jsonl(path, [row for row in read_jsonl(path) if row["step"] < step])


def fsync_path(path: Path) -> None:
    """Force a file's bytes, or a directory's names, onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_bytes(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    with disk_errors(path):
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            fsync_path(path.parent)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise


def _json_line(row: Mapping[str, Any]) -> bytes:
    text = json.dumps(_without_nan(row), ensure_ascii=False, allow_nan=False)
    # A lone surrogate has no UTF-8; backslashreplace writes it as the escape that JSON has for it.
    return text.encode("utf-8", "backslashreplace") + b"\n"


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return value


def _rust_errno(error: Exception) -> int | None:
    """The errno in the text of an exception of safetensors or tokenizers, which are Rust and raise no OSError."""
    match = re.search(r"(?:os error |Os \{ code: )(\d+)", str(error))
    return int(match[1]) if match else None


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


_held: set[int] = set()


def _close_in_child() -> None:
    """A forked child shares the lock and would hold it beyond its parent's death."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


def _holder(path: Path) -> str | None:
    """The process that holds a lock, where one does."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(descriptor, 32, 0).decode().strip()
    finally:
        os.close(descriptor)
    return None


def _acquire(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(descriptor, 32, 0).decode().strip()
        os.close(descriptor)
        raise ConfigError(f"{path.parent} is in use by process {holder}") from error
    except OSError:
        os.close(descriptor)
        raise
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    _held.add(descriptor)
    return descriptor


def _git_commit() -> dict[str, Any] | None:
    """Commit of the working directory, and whether tracked files differ from it; None outside a repository."""
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
        status = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if commit.returncode or status.returncode:
        return None
    return {"commit": commit.stdout.strip(), "modified": bool(status.stdout.strip())}


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
