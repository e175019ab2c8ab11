"""From a path in the config to a function, and what is said where that fails."""

import subprocess
import sys

import pytest

from metagrpo.trainer.config import RewardFunction
from metagrpo.trainer.errors import ConfigError
from metagrpo.trainer.rewards.load import BUILTIN, Contract, RewardSpec, contract, load, resolve


def spec_of(path, **options):
    (spec,) = resolve([RewardFunction(path=path, options=options)])
    return spec


@pytest.mark.parametrize("name", BUILTIN)
def test_builtin(name):
    spec = spec_of(name)
    assert spec.name == name
    assert callable(load(spec))


def test_builtin_contracts():
    def of(name, **options):
        return contract(spec_of(name, **options), load(spec_of(name)))

    assert of("math") == Contract(False, frozenset({"answer"}), None)
    assert of("last_number") == Contract(False, frozenset({"answer"}), None)
    assert of("reasoning_gym") == Contract(False, frozenset({"answer", "task", "metadata"}), None)
    assert of("length_penalty", max_length=10, buffer=2) == Contract(False, frozenset(), None)
    assert of("length_penalty").required == {"max_length", "buffer"}


def test_import_path():
    spec = spec_of("json.decoder:JSONDecoder", a=1)
    assert spec == RewardSpec("JSONDecoder", "json.decoder:JSONDecoder", {"a": 1})
    assert load(spec).__name__ == "JSONDecoder"


def test_file_path_is_made_absolute_and_imported_once(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("calls = []\ndef f(**columns): return calls\ndef g(**columns): return calls")
    monkeypatch.chdir(tmp_path)
    first, second = resolve([RewardFunction(path="mine.py:f"), RewardFunction(path="mine.py:g")])
    assert first.target == f"{tmp_path}/mine.py:f"
    monkeypatch.chdir("/")
    assert load(first)() is load(second)()


def test_equal_names_get_a_suffix(tmp_path):
    (tmp_path / "a.py").touch()
    file = tmp_path / "a.py"
    paths = ["math", "os.path:math", f"{file}:f", "json:f", "re:f", "re:f_2"]
    specs = resolve([RewardFunction(path=path) for path in paths])
    assert [spec.name for spec in specs] == ["math", "math_2", "f", "f_2", "f_3", "f_2_2"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("maths", "did you mean math\\?"),
        ("lastnumber", "did you mean last_number\\?"),
        (":f", "is no built-in"),
        ("module:", "is no built-in"),
        ("nowhere/to_be_found.py:f", r"there is no file .*nowhere/to_be_found.py"),
    ],
)
def test_a_path_that_does_not_resolve(path, message):
    with pytest.raises(ConfigError, match=message):
        resolve([RewardFunction(path=path)])


def test_no_functions():
    with pytest.raises(ConfigError, match="empty"):
        resolve([])


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_package_of_ours.rewards:f", "No module named .* is given as path/to/file.py:function"),
        ("json:lodas", "json has no function lodas, did you mean loads"),
        ("math_module_free:f", "ModuleNotFoundError"),
    ],
)
def test_a_function_that_does_not_load(path, message):
    with pytest.raises(ConfigError, match=message):
        load(spec_of(path))


def test_an_option_that_the_function_does_not_take(tmp_path):
    (tmp_path / "r.py").write_text("def f(prompts, completions, completion_ids, known=1): ...")
    spec = spec_of(f"{tmp_path}/r.py:f", unknown=2)
    with pytest.raises(ConfigError, match=r"unexpected keyword argument 'unknown'.*its options \(unknown\)"):
        contract(spec, load(spec))


def test_an_option_may_not_replace_the_completions():
    spec = spec_of("math", completions=["x"])
    with pytest.raises(ConfigError, match="multiple values"):
        contract(spec, load(spec))


def test_the_package_imports_neither_torch_nor_sympy():
    code = (
        "import sys, metagrpo.trainer.rewards; print(sorted({'torch', 'transformers', 'sympy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
