"""The reference of every configuration field, made from the fields themselves."""

from __future__ import annotations

from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from metagrpo.trainer.config import Config, DataSource, RewardFunction, Section


def config_markdown() -> str:
    """``docs/config.md``: a table a section, with each field's type, default and docstring."""
    sections: list[tuple[str, Any]] = [(name, field.annotation) for name, field in Config.model_fields.items()]
    sections += [("reward.functions[]", RewardFunction), ("eval.data", DataSource)]
    parts = [
        "# Configuration\n\n"
        "<!-- Made by metagrpo.trainer.reference.config_markdown from the fields' docstrings. -->\n\n"
        "A recipe is YAML with these sections; `section.field=value` on the command line overrides it. An unknown "
        "key is an error that names the nearest one.\n"
    ]
    for name, section in sections:
        parts.append(
            f"\n## {name}\n\n{_one_line(section.__doc__)}\n\n| field | type | default | |\n|---|---|---|---|\n"
        )
        for field_name, field in section.model_fields.items():
            cells = (f"`{field_name}`", f"`{_type(field)}`", _default(field), _one_line(field.description))
            parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return "".join(parts)


def _one_line(text: str | None) -> str:
    return " ".join((text or "").replace("``", "`").split())


def _type(field: FieldInfo) -> str:
    annotation: Any = field.annotation
    text = (
        annotation.__name__
        if isinstance(annotation, type) and not hasattr(annotation, "__args__")
        else str(annotation)
    )
    return text.replace("typing.", "").replace("metagrpo.trainer.config.", "").replace("pathlib.", "")


def _default(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True, validated_data={})
    if default is PydanticUndefined:
        return "required"
    if isinstance(default, Section):
        default = default.model_dump(mode="json", exclude_defaults=True)
    if isinstance(default, list):
        default = [item.model_dump(exclude_defaults=True) if isinstance(item, Section) else item for item in default]
    return f"`{'null' if default is None else str(default).lower() if isinstance(default, bool) else default}`"
