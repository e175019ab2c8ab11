"""The configuration: what fits is kept as it is, and what does not is said in one line that helps."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel

from metagrpo.trainer.config import Config, Section, dump_config, load_config, parse_config
from metagrpo.trainer.errors import ConfigError
from metagrpo.trainer.setup import check_names

RECIPES = Path(__file__).parents[2] / "recipes"
SMALL: dict[str, Any] = {"model": {"path": "m"}, "data": {"source": "d.jsonl"}}


def recipe(folder: Path, raw: Any) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(raw if isinstance(raw, str) else yaml.safe_dump(raw), encoding="utf-8")
    return path


def error_of(raw: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config({**SMALL, **raw})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_defaults_that_were_agreed() -> None:
    config = parse_config(SMALL)
    assert (config.loss.beta, config.loss.loss_type) == (0.0, "dapo")
    assert (config.loss.epsilon, config.loss.epsilon_high) == (0.2, 0.28)
    assert (config.rollout.num_generations, config.rollout.temperature) == (8, 1.0)
    assert (config.rollout.top_p, config.rollout.top_k) == (1.0, 0)
    assert config.lora.enabled


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"modle": {}}, "unknown key modle, did you mean model?"),
        ({"train": {"learnin_rate": 1}}, "unknown key train.learnin_rate, did you mean train.learning_rate?"),
        (
            {"eval": {"data": {"source": "x", "sizes": 1}}},
            "unknown key eval.data.sizes, did you mean eval.data.size?",
        ),
        (
            {"reward": {"functions": [{"path": "a"}, {"path": "b", "wieght": 2}]}},
            "unknown key reward.functions.1.wieght, did you mean reward.functions.1.weight?",
        ),
        # The nearest one is named even where nothing is near.
        ({"zzz": 1}, "unknown key zzz, did you mean "),
    ],
)
def test_an_unknown_key_names_the_nearest(raw: dict[str, Any], message: str) -> None:
    assert error_of(raw).startswith(message)


def test_every_error_is_told_at_once() -> None:
    message = error_of({"train": {"step": 1}, "rollout": {"num_generations": 0}})
    assert "unknown key train.step, did you mean train.steps?" in message
    assert "rollout.num_generations: " in message


@pytest.mark.parametrize("missing", ["model", "data"])
def test_a_section_that_is_required(missing: str) -> None:
    with pytest.raises(ConfigError, match=f"^{missing} is required$"):
        parse_config({name: section for name, section in SMALL.items() if name != missing})


def test_a_key_that_is_required() -> None:
    assert error_of({"model": {}}) == "model.path is required"
    assert error_of({"reward": {"functions": [{"weight": 1}]}}) == "reward.functions.0.path is required"


@pytest.mark.parametrize(
    ("raw", "key"),
    [
        ({"train": {"steps": "many"}}, "train.steps"),
        ({"train": {"steps": 1.5}}, "train.steps"),
        ({"train": {"steps": 0}}, "train.steps"),
        ({"train": {"learning_rate": -1e-5}}, "train.learning_rate"),
        ({"train": {"learning_rate": float("nan")}}, "train.learning_rate"),
        ({"train": {"learning_rate": float("inf")}}, "train.learning_rate"),
        ({"train": {"lr_scheduler_type": "cosin"}}, "train.lr_scheduler_type"),
        ({"train": 5}, "train"),
        ({"lora": {"enabled": "perhaps"}}, "lora.enabled"),
        ({"lora": {"target_modules": 3}}, "lora.target_modules"),
        ({"model": {"path": None}}, "model.path"),
        ({"reward": {"functions": []}}, "reward.functions"),
        ({"reward": {"functions": "math"}}, "reward.functions"),
        ({"rollout": {"temperature": 0}}, "rollout.temperature"),
        ({"loss": {"rollout_cap": 1.0}}, "loss.rollout_cap"),
        ({"loss": {"options": {"a": "b"}}}, "loss.options.a"),
        ({"method": {"name": "gpro"}}, "method.name"),
        ({"log": {"backends": ["wandb", "mlflow"]}}, "log.backends.1"),
    ],
)
def test_a_value_that_does_not_fit_is_told_by_its_key(raw: dict[str, Any], key: str) -> None:
    message = error_of(raw)
    assert message.startswith(key) and len(message) > len(key) + 10


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"train": {"prompts_per_step": 8, "minibatches": 3}}, ["train.minibatches 3", "train.prompts_per_step 8"]),
        (
            {"method": {"baseline": "leave_one_out"}, "rollout": {"num_generations": 1}},
            ["leave_one_out", "rollout.num_generations"],
        ),
        ({"loss": {"beta": 0.1}, "lora": {"enabled": False}}, ["loss.beta", "lora.enabled"]),
        ({"rollout": {"top_p": 0.9}}, ["rollout", "top_p", "ratio"]),
        ({"rollout": {"top_k": 50}}, ["rollout", "top_k", "ratio"]),
        ({"rollout": {"save": "a", "replay": "b"}}, ["rollout", "save", "replay"]),
    ],
)
def test_fields_that_contradict_each_other(raw: dict[str, Any], words: list[str]) -> None:
    message = error_of(raw)
    assert all(word in message for word in words), message


def test_fields_that_only_look_contradictory() -> None:
    parse_config({**SMALL, "train": {"prompts_per_step": 6, "minibatches": 3}})
    parse_config({**SMALL, "method": {"baseline": "leave_one_out"}, "rollout": {"num_generations": 2}})
    parse_config({**SMALL, "loss": {"beta": 0.1}})
    parse_config({**SMALL, "lora": {"enabled": False}})


def test_overrides(tmp_path: Path) -> None:
    path = recipe(tmp_path, {**SMALL, "train": {"steps": 3, "seed": 4}, "loss": None})
    config = load_config(
        path,
        [
            "train.steps=7",
            "train.learning_rate=1e-4",  # which YAML 1.1 takes for a string
            "train.weight_decay=1.0e-2",
            "lora.enabled=false",
            "lora.target_modules=[q_proj, v_proj]",
            "eval.data.source=reasoning_gym:chain_sum",
            "eval.data.options={min_terms: 2}",
            "data.system_prompt='a=b: c'",
            "loss.epsilon_high=null",
            "data.max_prompt_length=",
        ],
    )
    assert config.data.system_prompt == "a=b: c"
    assert (config.train.steps, config.train.seed) == (7, 4)
    assert (config.train.learning_rate, config.train.weight_decay) == (1e-4, 0.01)
    assert config.lora.enabled is False and config.lora.target_modules == ["q_proj", "v_proj"]
    assert config.eval.data is not None
    assert (config.eval.data.source, config.eval.data.options) == ("reasoning_gym:chain_sum", {"min_terms": 2})
    assert config.loss.epsilon_high is None and config.data.max_prompt_length is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps", "an override is key.sub=value, got 'train.steps'"),
        ("=3", "an override is key.sub=value, got '=3'"),
        ("train.steps=[1", "the value of train.steps is not valid YAML: '[1'"),
        ("model.path.name=x", "cannot set model.path.name: path is a value, not a section"),
        ("train.stepz=3", "unknown key train.stepz, did you mean train.steps?"),
        ("trian.steps=3", "unknown key trian, did you mean train?"),
        ("train=3", "train: "),
    ],
)
def test_an_override_that_does_not_fit(override: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(recipe(tmp_path, SMALL), [override])
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no mapping"),
        ("- a\n- b\n", "holds no mapping"),
        ("model: {path: [}", "is not valid YAML"),
        ("1: 2\nmodel: {path: m}\ndata: {source: d}", "1"),
    ],
)
def test_a_recipe_that_is_none(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(recipe(tmp_path, text), [])
    assert "\n" not in str(caught.value)


def test_a_recipe_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the recipe .*no\.yaml: No such file"):
        load_config(tmp_path / "no.yaml", [])
    with pytest.raises(ConfigError, match=r"cannot read the recipe .*: Is a directory"):
        load_config(tmp_path, [])


def test_a_recipe_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "weights.yaml"
    path.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ConfigError, match=r"weights\.yaml is not UTF-8"):
        load_config(path, [])


def test_what_is_written_down_reads_back_equal(tmp_path: Path) -> None:
    config = parse_config(
        {
            "model": {"path": "ü/m", "revision": "1.0"},
            "data": {"source": "d.jsonl", "options": {"a": [1, None, "b"]}, "system_prompt": "one\ntwo: 'three'"},
            "reward": {"functions": [{"path": "math"}, {"path": "f.py:g", "weight": 0.1, "options": {"x": True}}]},
            "rollout": {"save": "some/folder"},
            "loss": {"epsilon_high": None, "options": {"tau": 1e-5}},
            "train": {"learning_rate": 1e-6, "adam_epsilon": 1e-8, "output_dir": "out/run"},
            "eval": {"data": {"source": "reasoning_gym:chain_sum"}},
            "log": {"backends": ["tensorboard"]},
        }
    )
    text = dump_config(config)
    assert load_config(recipe(tmp_path, text), []) == config
    assert dump_config(load_config(recipe(tmp_path, text), [])) == text
    assert "ü/m" in text and text.index("model:") < text.index("lora:") < text.index("checkpoint:")


def sections(model: type[BaseModel]) -> set[type[BaseModel]]:
    """A section and all within it."""
    found = {model}
    for field in model.model_fields.values():
        for candidate in (field.annotation, *get_args(field.annotation)):
            if isinstance(candidate, type) and issubclass(candidate, Section):
                found |= sections(candidate)
    return found


def test_every_field_is_described() -> None:
    found = sections(Config)
    assert len(found) == 14
    for section in found:
        assert section.__doc__
        for name, field in section.model_fields.items():
            assert field.description and field.description.strip().endswith("."), f"{section.__name__}.{name}"


def test_every_recipe_parses() -> None:
    recipes = sorted(RECIPES.rglob("*.yaml"))
    assert recipes
    for path in recipes:
        config = load_config(path, [])
        check_names(config)
        assert parse_config(yaml.safe_load(dump_config(config))) == config
