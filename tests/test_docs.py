"""The documents say what is true: snippets run, commands parse, links lead somewhere, references are current."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer
import yaml

from metagrpo.trainer.cli import app
from metagrpo.trainer.config import load_config, parse_config
from metagrpo.trainer.reference import config_markdown

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


def snippets(language: str) -> list[tuple[str, str]]:
    """Page name and text of every fenced block in that language."""
    return [
        (page.name, text)
        for page in PAGES
        for kind, text in FENCE.findall(page.read_text(encoding="utf-8"))
        if kind == language
    ]


@pytest.mark.parametrize(("page", "code"), snippets("python"))
def test_python_snippets_run(page: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "snippet"}
    exec(compile(code, page, "exec"), namespace)
    # A reward's own snippet only defines it: call it as the trainer does.
    for name, function in list(namespace.items()):
        if callable(function) and getattr(function, "__module__", None) == "snippet":
            values = function(prompts=["?"], completions=["so it is 7."], completion_ids=[[1, 2, 3]], answer=["7"])  # type: ignore[operator]
            assert values == [1.0], name


def test_recipe_snippets_are_recipes() -> None:
    recipes = [yaml.safe_load(text) for _, text in snippets("yaml")]
    whole = [raw for raw in recipes if "model" in raw]
    assert whole, "no page shows a recipe"
    for raw in whole:
        parse_config(raw)
    for raw in recipes:  # a fragment fits into a whole one
        parse_config({**whole[0], **raw})


def commands() -> list[tuple[str, list[str]]]:
    """Page and arguments of every line of a shell block that calls metagrpo."""
    found = []
    for page, text in snippets("sh"):
        for line in text.splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["metagrpo"]:
                found.append((page, words[1:]))
    return found


@pytest.mark.parametrize(("page", "arguments"), commands())
def test_commands_parse(page: str, arguments: list[str], tmp_path: Path) -> None:
    group = typer.main.get_command(app)
    name, *rest = arguments
    command = group.commands[name]  # type: ignore[attr-defined]
    context = command.make_context(name, list(rest))
    if name == "train":
        recipe = ROOT / str(context.params["recipe"])
        if not recipe.exists():  # the recipe that the page shows
            recipe = tmp_path / "recipe.yaml"
            recipe.write_text(next(text for _, text in snippets("yaml") if "model" in yaml.safe_load(text)))
        load_config(recipe, list(context.params["overrides"] or []))


def test_every_page_is_checked_for_links() -> None:
    broken = [
        f"{page.name}: {target}"
        for page in PAGES
        for target in LINK.findall(page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]
    assert not broken


def test_configuration_reference_is_current() -> None:
    assert (ROOT / "docs" / "config.md").read_text(encoding="utf-8") == config_markdown()


def test_migration_page_names_fields_that_exist() -> None:
    fields = set(
        re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "config.md").read_text(encoding="utf-8"), re.MULTILINE)
    )
    page = (ROOT / "docs" / "migrate.md").read_text(encoding="utf-8")
    ours = re.findall(
        r"`(\w+)\.(\w+)`", "".join(row.rsplit("|", 2)[1] for row in page.splitlines() if row.startswith("|"))
    )
    assert len(ours) > 20
    assert [f"{section}.{name}" for section, name in ours if name not in fields] == []


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").rglob("*.yaml")), ids=lambda path: path.stem)
def test_recipes_parse(recipe: Path) -> None:
    load_config(recipe, [])
