"""The pool, with real processes: whatever a function does to its process costs its own sample and no other."""

import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from metagrpo.trainer.config import RewardConfig
from metagrpo.trainer.errors import ConfigError, RunError
from metagrpo.trainer.rewards import RewardPool, grader, pool

GRADERS = Path(__file__).with_name("graders.py")


def config(*functions, workers=2, timeout=20.0):
    """A config of functions of graders.py: names, or mappings with ``path`` and more."""
    entries = [entry if isinstance(entry, dict) else {"path": entry} for entry in functions]
    for entry in entries:
        entry["path"] = f"{GRADERS}:{entry['path']}"
    return RewardConfig.model_validate({"functions": entries, "workers": workers, "timeout": timeout})


def grade(pool, completions, **columns):
    return pool.score(
        [f"prompt {index}" for index in range(len(completions))],
        completions,
        [[index] * len(completion) for index, completion in enumerate(completions)],
        columns,
    )


def descendants():
    return psutil.Process().children(recursive=True)


def wait_for_end(number):
    """Until the process is gone, or dead and not yet reaped."""
    deadline = time.monotonic() + 20
    while psutil.pid_exists(number) and psutil.Process(number).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"process {number} is alive"
        time.sleep(0.02)


@pytest.fixture
def no_process_left():
    before = {process.pid for process in descendants()}
    yield
    left = [process for process in descendants() if process.pid not in before]
    assert left == []  # zombies are listed too


@pytest.fixture(scope="module")
def shared():
    """One pool for the failures that need no short timeout."""
    with RewardPool(config("sometimes", "length")) as opened:
        yield opened


@pytest.mark.parametrize(
    ("bad", "status", "message"),
    [
        ("raise", "error", "KeyError: 'missing key' (graders.py:"),
        ("unprintable", "error", "Unprintable: (its message cannot be printed)"),
        ("sys_exit", "error", "SystemExit: 1"),
        ("nan", "error", "ValueError: returned nan"),
        ("inf", "error", "ValueError: returned inf"),
        ("string", "error", "TypeError: returned a str, not a number"),
        ("nested", "error", "TypeError: returned a list, not a number"),
        ("none", "none", None),
        pytest.param("exit", "error", "its process exited with code 3", marks=pytest.mark.fault),
        pytest.param("kill", "error", "its process was killed by SIGKILL", marks=pytest.mark.fault),
        pytest.param("segfault", "error", "its process was killed by SIGSEGV", marks=pytest.mark.fault),
    ],
)
@pytest.mark.parametrize("position", [0, 9, 19])
def test_a_bad_sample_costs_itself_alone(shared, bad, status, message, position):
    completions = ["fine"] * 20
    completions[position] = bad
    result = grade(shared, completions)

    assert result.status["sometimes"] == ["ok"] * position + [status] + ["ok"] * (19 - position)
    assert result.values["sometimes"] == [7.0] * position + [None] + [7.0] * (19 - position)
    assert result.values["length"] == [float(len(completion)) for completion in completions]
    # 7 + 4 of each good sample; the bad one keeps what the other function gave it.
    assert result.reward == [11.0] * position + [float(len(bad))] + [11.0] * (19 - position)
    assert result.metrics() == {
        "reward/timeout_frac": 0.0,
        "reward/error_frac": 1 / 40 if status == "error" else 0.0,
        "reward/none_frac": 1 / 40 if status == "none" else 0.0,
    }
    assert list(result.errors) == (["sometimes"] if message else [])
    assert result.errors.get("sometimes", "").startswith(message or "")


@pytest.mark.fault
def test_a_hang_is_killed_and_the_rest_goes_on(no_process_left):
    completions = ["a", "hang", "b", "spin", "c", "d", "kill", "e"]
    with RewardPool(config("sometimes", workers=2, timeout=2.0)) as opened:
        result = grade(opened, completions)
        assert result.status["sometimes"] == ["ok", "timeout", "ok", "timeout", "ok", "ok", "error", "ok"]
        assert result.errors["sometimes"] == "no answer within 2 s"
        assert result.metrics()["reward/timeout_frac"] == 2 / 8
        assert math.isnan(result.reward[1])
        again = grade(opened, ["x"] * 8)
        assert again.reward == [7.0] * 8
        assert again.errors == {}


@pytest.mark.fault
def test_every_sample_bad(no_process_left):
    with RewardPool(config("sometimes", workers=1)) as opened:
        result = grade(opened, ["exit"] * 5)
        assert result.status["sometimes"] == ["error"] * 5
        assert all(math.isnan(reward) for reward in result.reward)
        assert result.metrics() == {"reward/timeout_frac": 0.0, "reward/error_frac": 1.0, "reward/none_frac": 0.0}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("bare", "TypeError: returned NoneType, not a list of 1 numbers"),
        ("number", "TypeError: returned float, not a list of 1 numbers"),
        ("short", "ValueError: returned 0 values for 1 completions"),
        ("long", "ValueError: returned more values for 1 completions"),
        ("text", "TypeError: returned a str, not a number"),
    ],
)
def test_wrong_return(kind, message):
    with RewardPool(config("whole_return", workers=1)) as opened:
        result = grade(opened, ["ok", kind, "ok"])
    assert result.values["whole_return"] == [1.0, None, 1.0]
    assert result.status["whole_return"] == ["ok", "error", "ok"]
    assert result.errors["whole_return"] == message


def test_an_endless_return_is_cut_off():
    with RewardPool(config("endless", workers=1)) as opened:
        assert grade(opened, ["a"]).errors["endless"] == "ValueError: returned more values for 1 completions"


def test_a_huge_message_is_cut_short(shared):
    result = grade(shared, ["huge", "fine"])
    assert result.status["sometimes"] == ["error", "ok"]
    assert len(result.errors["sometimes"]) < 2_000


def test_huge_output_goes_through(capfd):
    with RewardPool(config("chatter", workers=1)) as opened:
        assert grade(opened, ["a", "b"]).reward == [1.0, 1.0]
    printed = capfd.readouterr()
    assert printed.out.count("to stdout") == 20_000
    assert printed.err.count("to stderr") == 2


def test_booleans_and_integers_are_numbers(shared):
    assert grade(shared, ["bool", "fine"]).values["sometimes"] == [1.0, 7.0]


def test_order_and_pairing():
    count = 1_000
    with RewardPool(config("echo", "tokens", workers=3)) as opened:
        for shift in (0, 5_000):  # a second batch takes nothing from the first
            numbers = [shift + index for index in range(count)]
            result = opened.score(
                [f"p{n}" for n in numbers], [f"c{n}" for n in numbers], [[n] for n in numbers], {"number": numbers}
            )
            assert result.errors == {}
            assert result.values["echo"] == [float(n) for n in numbers]
            assert result.reward == [n + 1.0 for n in numbers]


def test_weights_and_missing_values():
    functions = [{"path": "length", "weight": 0.5}, {"path": "sometimes", "weight": -2.0}]
    with RewardPool(config(*functions)) as opened:
        result = grade(opened, ["four", "none", "raise"])
    # 0.5 * 4 - 2 * 7; then 0.5 * 4 and 0.5 * 5 alone: what is not scored leaves the sum, it is no zero.
    assert result.reward == [-12.0, 2.0, 2.5]


def test_nothing_scored_is_nan():
    with RewardPool(config("sometimes")) as opened:
        result = grade(opened, ["none", "fine"])
    assert math.isnan(result.reward[0])
    assert result.reward[1] == 7.0


def test_chat_messages_reach_the_function():
    prompts = [[{"role": "user", "content": "?"}]] * 3
    completions = [[{"role": "assistant", "content": "a"}]] * 3
    with RewardPool(config("length")) as opened:
        assert opened.score(prompts, completions, [[1]] * 3, {}).reward == [1.0] * 3  # one message each


def test_options_are_bound_and_win_over_a_column():
    with RewardPool(config({"path": "scaled", "options": {"factor": 3.0}})) as opened:
        assert grade(opened, ["ab", "abc"]).reward == [6.0, 9.0]
        assert grade(opened, ["ab"], factor=[100.0]).reward == [6.0]


def test_batched_function_sees_the_whole_batch():
    completions = ["a" * length for length in range(1, 101)]
    with RewardPool(config("centred", "length")) as opened:
        result = grade(opened, completions)
    assert result.values["centred"] == [length - 50.5 for length in range(1, 101)]  # the mean of 1 … 100


@pytest.mark.fault
def test_batched_failure_costs_the_batch():
    with RewardPool(config("centred_fragile", "length")) as opened:
        result = grade(opened, ["a", "exit", "b"])
        assert result.status == {"centred_fragile": ["error"] * 3, "length": ["ok"] * 3}
        assert result.reward == [1.0, 4.0, 1.0]
        assert grade(opened, ["a", "none"]).status["centred_fragile"] == ["ok", "none"]


def test_no_samples(shared):
    result = grade(shared, [])
    assert result.reward == []
    assert result.metrics() == {"reward/timeout_frac": 0.0, "reward/error_frac": 0.0, "reward/none_frac": 0.0}


def test_unequal_lengths_are_refused(shared):
    with pytest.raises(ValueError, match="2 answer for 1 completions"):
        grade(shared, ["a"], answer=["x", "y"])


def test_workers_live_on_between_batches():
    with RewardPool(config("pid", workers=2)) as opened:
        seen = {value for _ in range(5) for value in grade(opened, ["a"] * 50).values["pid"]}
    assert len(seen) <= 2


@pytest.mark.parametrize(("function", "replaced"), [("leak", True), ("pid", False)])
def test_a_worker_that_leaks_is_replaced(monkeypatch, function, replaced):
    monkeypatch.setattr(pool, "MAX_GROWTH", 16 << 20)
    with RewardPool(config(function, workers=1)) as opened:
        first, second, third = (grade(opened, ["a"]).reward for _ in range(3))
    assert first == second
    assert (third != second) == replaced


def test_ctrl_c_in_a_terminal_does_not_reach_the_workers():
    with RewardPool(config("pid", workers=1)) as opened:
        (number,) = grade(opened, ["a"]).reward
        assert os.getsid(int(number)) == int(number)


@pytest.mark.fault
def test_a_worker_killed_while_idle_costs_nothing():
    others = descendants()
    with RewardPool(config("length", workers=2)) as opened:
        for process in set(descendants()) - set(others):
            process.kill()
            wait_for_end(process.pid)
        result = grade(opened, ["abc"] * 40)
    assert result.status["length"] == ["ok"] * 40


def test_closed_pool_refuses(no_process_left):
    opened = RewardPool(config("length"))
    with pytest.raises(RuntimeError, match="closed"):
        grade(opened, ["a"])
    with opened:
        grade(opened, ["a"])
    opened.close()
    with pytest.raises(RuntimeError, match="closed"):
        grade(opened, ["a"])


@pytest.mark.fault
def test_an_interrupt_closes_the_pool(no_process_left):
    def interrupt(*_):
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, interrupt)
    try:
        with RewardPool(config("sometimes", timeout=60.0)) as opened:
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            with pytest.raises(KeyboardInterrupt):
                grade(opened, ["hang"])
            with pytest.raises(RuntimeError, match="closed"):
                grade(opened, ["fine"])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


@pytest.mark.fault
def test_what_a_function_started_dies_with_it(tmp_path):
    with RewardPool(config("child", timeout=1.0)) as opened:
        assert grade(opened, ["a"], directory=[str(tmp_path)]).status["child"] == ["timeout"]
    wait_for_end(int((tmp_path / "pid").read_text()))


@pytest.mark.fault
def test_workers_die_with_the_parent(tmp_path):
    script = textwrap.dedent(f"""
        import psutil, time
        from metagrpo.trainer.config import RewardConfig
        from metagrpo.trainer.rewards import RewardPool
        pool = RewardPool(RewardConfig(functions=[{{"path": "{GRADERS}:sometimes"}}], workers=2))
        pool.__enter__()
        print(*(child.pid for child in psutil.Process().children()), flush=True)
        pool.score(["p"], ["spin"], [[1]], {{}})
    """)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        workers = [int(number) for number in parent.stdout.readline().split()]
        assert len(workers) == 2
        parent.kill()
    for number in workers:
        wait_for_end(number)


def test_workers_import_little():
    with RewardPool(config("loaded_modules", workers=1)) as opened:
        assert grade(opened, ["a"]).reward == [0.0]


def test_missing_and_unwanted_columns():
    with RewardPool(config("strict")) as opened:
        assert grade(opened, ["a", "b"], answer=["a", "a"]).reward == [1.0, 0.0]
        with pytest.raises(ConfigError, match=r"reward strict .* does not take other, task: add \*\*kwargs"):
            grade(opened, ["a"], answer=["a"], task=["t"], other=["b"])
    with RewardPool(config("scaled")) as opened, pytest.raises(ConfigError, match="reward scaled needs factor"):
        grade(opened, ["a"], answer=["a"])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_module_of_ours", "importing .* failed: ModuleNotFoundError"),
        ("def f(", "importing .* failed: SyntaxError"),
        ("raise SystemExit(4)", "importing .* failed: SystemExit: 4"),
        ("import os; os._exit(4)", "a reward worker exited with code 4 while it imported .*bad.py:f"),
        ("def g(**columns): ...", "has no function f, did you mean g"),
        ("f = 3", "has no function f"),
        ("def f(completions): ...", "unexpected keyword argument 'prompts'"),
    ],
)
def test_a_function_that_cannot_be_loaded(tmp_path, no_process_left, source, message):
    (tmp_path / "bad.py").write_text(source)
    entry = RewardConfig.model_validate({"functions": [{"path": f"{tmp_path}/bad.py:f"}]})
    with pytest.raises(ConfigError, match=message), RewardPool(entry):
        pass


def test_an_import_that_hangs_has_a_deadline(tmp_path, no_process_left, monkeypatch):
    monkeypatch.setattr(grader, "START_TIMEOUT", 1.0)
    monkeypatch.setattr(pool, "START_TIMEOUT", 1.0)
    (tmp_path / "slow.py").write_text("import time; time.sleep(600)")
    entry = RewardConfig.model_validate({"functions": [{"path": f"{tmp_path}/slow.py:f"}]})
    with (
        pytest.raises(ConfigError, match=r"was not ready after 1 s while it imported .*slow.py:f"),
        RewardPool(entry),
    ):
        pass


@pytest.mark.fault
def test_a_replacement_that_dies_at_its_start_is_replaced(tmp_path, no_process_left):
    starts = tmp_path / "starts"
    starts.mkdir()
    (tmp_path / "frail.py").write_text(
        textwrap.dedent(f"""
            import os, pathlib
            starts = pathlib.Path({str(starts)!r})
            number = len(list(starts.iterdir()))
            (starts / str(number)).touch()
            if number == 1:
                os._exit(5)
            def f(completions, **columns):
                return [1.0] if completions == ["fine"] else os._exit(6)
        """)
    )
    entry = RewardConfig.model_validate({"functions": [{"path": f"{tmp_path}/frail.py:f"}], "workers": 1})
    with RewardPool(entry) as opened:
        result = grade(opened, ["fine", "exit", "fine"])
    assert result.values["f"] == [1.0, None, 1.0]
    assert len(list(starts.iterdir())) == 3


@pytest.mark.fault
def test_a_function_that_is_gone_ends_the_run(tmp_path, no_process_left):
    file = tmp_path / "gone.py"
    file.write_text("import os\ndef f(completions, **columns): os._exit(1)")
    entry = RewardConfig.model_validate({"functions": [{"path": f"{file}:f"}], "workers": 1})
    with RewardPool(entry) as opened:
        file.unlink()
        with pytest.raises(RunError, match=r"importing .* failed: FileNotFoundError"):
            grade(opened, ["a", "b"])
