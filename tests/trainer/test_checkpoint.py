"""Checkpoints: bit for bit, complete or absent, the right ones kept."""

import ctypes
import errno
import json
import os
import resource
import signal
import struct
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metagrpo.trainer.checkpoint import latest_checkpoint, load_state, save_checkpoint, save_state
from metagrpo.trainer.errors import RunError


def writer(text: str) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        (directory / "adapter").mkdir()
        (directory / "adapter" / "weights.bin").write_text(text * 1000)
        (directory / "state.json").write_text(text)

    return write


def save(root: Path, step: int, keep_last: int = 9, keep_every: int = 0) -> Path:
    return save_checkpoint(root, step, writer(f"weights of {step}"), keep_last=keep_last, keep_every=keep_every)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_state_comes_back_bit_for_bit(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(-(2**63), 2**63 - 1, (6, 8), generator=generator)  # NaN payloads and -0 among them
    base = torch.randn(10, 10, generator=generator)
    tensors = {
        "int64": patterns,
        "bfloat16": patterns.view(torch.bfloat16),
        "float16": patterns.view(torch.float16),
        "float32": patterns.view(torch.float32),
        "float64": patterns.view(torch.float64),
        "bool": patterns > 0,
        "uint8": torch.get_rng_state(),
        "0-d": torch.tensor(-0.0, dtype=torch.bfloat16),
        "0-d int": torch.tensor(2**62 + 1),
        "empty": torch.empty(0, 3),
        "base": base,
        "base again": base,
        "transposed": base.t(),
        "row": base[3],
        "column": base[:, 3],
        "expanded": torch.tensor([1.5]).expand(4, 5),
        "parameter": torch.nn.Parameter(base[2:5]),
    }
    meta = {"step": 2**60 + 1, "lr": 0.1 + 0.2, "best": float("-inf"), "nested": [{"name": "ü"}, None, True]}
    save_state(tmp_path, tensors, meta)
    loaded, loaded_meta = load_state(tmp_path)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape, name
        assert bits(loaded[name]) == bits(tensor.detach()), name
    assert loaded_meta == meta
    assert struct.pack("d", loaded_meta["lr"]) == struct.pack("d", 0.1 + 0.2)
    assert not any(b"pickle" in path.read_bytes() for path in tmp_path.iterdir())


def test_loaded_tensors_are_independent(tmp_path: Path) -> None:
    shared = torch.zeros(3)
    save_state(tmp_path, {"a": shared, "b": shared}, {})
    loaded, _ = load_state(tmp_path)
    loaded["a"].add_(1)
    assert loaded["b"].tolist() == [0.0, 0.0, 0.0]


def test_optimizer_state_continues_bitwise(tmp_path: Path) -> None:
    def steps(parameter: torch.nn.Parameter, optimizer: torch.optim.Optimizer, count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            (parameter.sin() ** 2).sum().backward()
            optimizer.step()

    straight = torch.nn.Parameter(torch.arange(7.0))
    optimizer = torch.optim.AdamW([straight], lr=0.1)
    steps(straight, optimizer, 2)
    state = optimizer.state[straight]
    save_state(tmp_path, {"parameter": straight, **state}, {})
    steps(straight, optimizer, 2)

    loaded, _ = load_state(tmp_path)
    resumed = torch.nn.Parameter(loaded.pop("parameter"))
    optimizer = torch.optim.AdamW([resumed], lr=0.1)
    optimizer.state[resumed] = loaded
    steps(resumed, optimizer, 2)
    assert bits(resumed.detach()) == bits(straight.detach())


def test_a_checkpoint_is_what_write_wrote_and_latest_names_it(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoints", 100)
    assert path == tmp_path / "checkpoints" / "step_000100"
    assert (path / "adapter" / "weights.bin").read_text() == "weights of 100" * 1000
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step_000100\n"
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["step"] == 100
    assert {name: file["bytes"] for name, file in manifest["files"].items()} == {
        "adapter/weights.bin": 14_000,
        "state.json": 14,
    }
    assert latest_checkpoint(tmp_path / "checkpoints") == path


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "absent") is None
    (tmp_path / ".tmp-step_000001-1").mkdir()
    assert latest_checkpoint(tmp_path) is None


def test_steps_sort_as_numbers(tmp_path: Path) -> None:
    save(tmp_path, 999_999)
    assert save(tmp_path, 1_000_000).name == "step_1000000"
    assert latest_checkpoint(tmp_path) == tmp_path / "step_1000000"


def test_the_same_step_again_replaces(tmp_path: Path) -> None:
    save(tmp_path, 5)
    path = save_checkpoint(tmp_path, 5, writer("again"), keep_last=1, keep_every=0)
    assert (path / "state.json").read_text() == "again"
    assert names(tmp_path) == ["latest", "step_000005"]


@settings(max_examples=20, deadline=None)
@given(
    gaps=st.lists(st.integers(1, 7), min_size=1, max_size=8),
    keep_last=st.integers(1, 4),
    keep_every=st.sampled_from([0, 3, 5]),
)
def test_what_is_kept(
    tmp_path_factory: pytest.TempPathFactory, gaps: list[int], keep_last: int, keep_every: int
) -> None:
    root = tmp_path_factory.mktemp("keep")
    steps = [sum(gaps[: index + 1]) for index in range(len(gaps))]
    for step in steps:
        save_checkpoint(root, step, lambda _: None, keep_last=keep_last, keep_every=keep_every)
    expected = {step for step in steps if step in steps[-keep_last:] or (keep_every and step % keep_every == 0)}
    assert names(root) == ["latest", *sorted(f"step_{step:06d}" for step in expected)]


def test_a_rewound_run_drops_the_steps_it_has_not_made_again(tmp_path: Path) -> None:
    for step in (50, 100, 150):
        save(tmp_path, step)
    for step in (100, 150):
        (tmp_path / f"step_{step:06d}" / "state.json").write_text("?")
    with pytest.warns(RuntimeWarning):
        assert latest_checkpoint(tmp_path) == tmp_path / "step_000050"
    save(tmp_path, 60, keep_last=2, keep_every=50)
    assert names(tmp_path) == ["latest", "step_000050", "step_000060"]


def truncate(path: Path) -> None:
    os.truncate(path / "adapter" / "weights.bin", 100)


def flip_a_bit(path: Path) -> None:
    file = path / "adapter" / "weights.bin"
    data = bytearray(file.read_bytes())
    data[77] ^= 1
    file.write_bytes(data)


def lose_a_file(path: Path) -> None:
    (path / "state.json").unlink()


def lose_the_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def truncate_the_manifest(path: Path) -> None:
    os.truncate(path / "manifest.json", 40)


@pytest.mark.fault
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (truncate, "adapter/weights.bin has 100 bytes instead of 12000"),
        (flip_a_bit, "adapter/weights.bin is corrupt"),
        (lose_a_file, "state.json is missing"),
        (lose_the_manifest, "manifest.json is missing"),
        (truncate_the_manifest, "manifest.json is corrupt"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(
    tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    good, bad = save(tmp_path, 1), save(tmp_path, 2)
    assert latest_checkpoint(tmp_path) == bad
    damage(bad)
    with pytest.warns(RuntimeWarning, match=f"step_000002 is skipped: {words}"):
        assert latest_checkpoint(tmp_path) == good
    damage(good)
    with pytest.warns(RuntimeWarning), pytest.raises(RunError, match="every checkpoint"):
        latest_checkpoint(tmp_path)


@pytest.mark.fault
def test_kill_9_in_the_middle_of_a_write_leaves_the_previous_one(tmp_path: Path) -> None:
    previous = save(tmp_path, 1)
    code = (
        "import sys; from pathlib import Path; from metagrpo.trainer.checkpoint import save_checkpoint\n"
        "def write(directory):\n"
        "    with open(directory / 'weights.bin', 'wb', buffering=0) as file:\n"
        "        file.write(b'half')\n"
        "        print('writing', flush=True); sys.stdin.read()\n"
        "save_checkpoint(Path(sys.argv[1]), 2, write, keep_last=1, keep_every=0)"
    )
    victim = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert victim.stdout is not None and victim.stdout.readline() == "writing\n"
    victim.send_signal(signal.SIGKILL)
    assert victim.wait() == -signal.SIGKILL
    temporary = f".tmp-step_000002-{victim.pid}"
    assert names(tmp_path) == [temporary, "latest", "step_000001"]
    assert (tmp_path / temporary / "weights.bin").read_bytes() == b"half"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert latest_checkpoint(tmp_path) == previous
    assert (tmp_path / "latest").read_text() == "step_000001\n"
    save(tmp_path, 2)
    assert names(tmp_path) == ["latest", "step_000001", "step_000002"]


@pytest.mark.fault
def test_a_kill_at_any_system_call_that_renames_leaves_a_complete_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dies before the n-th rename, for every n, and looks at what a resume would find."""

    class Killed(BaseException):
        pass

    for fatal in range(1, 5):
        root = tmp_path / str(fatal)
        save(root, 1)
        calls = 0
        replace, rename = os.replace, os.rename

        def dying(function: Callable[..., None], fatal: int = fatal) -> Callable[..., None]:
            def call(*arguments: object) -> None:
                nonlocal calls
                calls += 1
                if calls == fatal:
                    raise Killed
                function(*arguments)

            return call

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", dying(replace))
            patch.setattr(os, "rename", dying(rename))
            died = False
            try:
                save(root, 2, keep_last=1)
            except Killed:
                died = True
        assert died == (fatal <= 3)  # the new checkpoint, latest, the old checkpoint
        found = latest_checkpoint(root)
        assert (root / (root / "latest").read_text().strip()).is_dir()
        assert found is not None and found.name == ("step_000001" if fatal == 1 else "step_000002")


@pytest.mark.fault
def test_a_failing_write_leaves_nothing_behind(tmp_path: Path) -> None:
    save(tmp_path, 1)

    def write(directory: Path) -> None:
        (directory / "half").write_text("half")
        raise ValueError("no weights")

    with pytest.raises(ValueError, match="no weights"):
        save_checkpoint(tmp_path, 2, write, keep_last=1, keep_every=0)
    assert names(tmp_path) == ["latest", "step_000001"]


SAVE_STATE = (
    "import sys, torch; from pathlib import Path; from metagrpo.trainer.errors import RunError\n"
    "from metagrpo.trainer.checkpoint import save_checkpoint, save_state\n"
    "try: save_checkpoint(Path(sys.argv[1]), 2, lambda path: save_state(path, {'w': torch.zeros(500_000)}, {}),"
    " keep_last=1, keep_every=0)\n"
    "except RunError as error: print(error)"
)


@pytest.mark.fault
def test_a_file_that_the_disk_refuses_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    save(tmp_path, 1)

    def set_limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))

    result = subprocess.run(
        [sys.executable, "-c", SAVE_STATE, str(tmp_path)], preexec_fn=set_limit, capture_output=True, text=True
    )
    assert result.stdout == f"cannot write {tmp_path / 'step_000002'}: File too large\n", result.stderr
    assert names(tmp_path) == ["latest", "step_000001"]
    assert latest_checkpoint(tmp_path) == tmp_path / "step_000001"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[tuple[Path, Callable[[], None]]]:
    """A file system of 1 MiB, and a function that makes it read-only; needs the right to mount."""
    libc = ctypes.CDLL(None, use_errno=True)
    point = tmp_path / "disk"
    point.mkdir()
    read_only, remount = 1, 32  # MS_RDONLY, MS_REMOUNT of mount(2)

    def mount(flags: int) -> None:
        if libc.mount(b"tmpfs", str(point).encode(), b"tmpfs", flags, b"size=1m"):
            pytest.skip(f"cannot mount a tmpfs: {os.strerror(ctypes.get_errno())}")

    mount(0)
    yield point, lambda: mount(read_only | remount)
    assert libc.umount(str(point).encode()) == 0


@pytest.mark.fault
def test_a_full_disk_is_one_line_and_leaves_nothing(small_disk: tuple[Path, Callable[[], None]]) -> None:
    root, _ = small_disk
    save(root, 1)
    result = subprocess.run([sys.executable, "-c", SAVE_STATE, str(root)], capture_output=True, text=True)
    assert result.stdout == f"cannot write {root / 'step_000002'}: No space left on device\n", result.stderr
    assert names(root) == ["latest", "step_000001"]
    assert latest_checkpoint(root) == root / "step_000001"


@pytest.mark.fault
def test_a_read_only_disk_is_one_line(small_disk: tuple[Path, Callable[[], None]]) -> None:
    root, make_read_only = small_disk
    save(root, 1)
    make_read_only()
    with pytest.raises(RunError, match=os.strerror(errno.EROFS)):
        save(root, 2)
    assert latest_checkpoint(root) == root / "step_000001"
