"""Render docs/reference/settings.md from the descriptions in `vaultevents.config`.

Run `.venv/bin/python tests/settings_reference.py` in the repository to write the page anew.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from vaultevents import config

PAGE: Final = Path(__file__).resolve().parents[1] / "docs" / "reference" / "settings.md"
COMMAND: Final = ".venv/bin/python tests/settings_reference.py"

_HEAD: Final = f"""\
# Settings

All settings of `vaultevents.toml` with type, default and meaning.

*Generated from `src/vaultevents/config.py`. To change this page, edit the descriptions there and
run `{COMMAND}`.*

- `vaultevents init` writes a file that shows every setting.
- Each setting can also come from the environment, which overrides the file. The name of the
  variable is `VAULTEVENTS_` and the setting in upper case, with two underscores after the table:
  `VAULTEVENTS_DELIVERY__CONCURRENCY`. Lists are separated by commas.
- Secrets belong in the environment or in files of mode 0600.
- A relative path in the file is relative to the directory of the file.
- Names that end in `_s` are seconds.
- An unknown key or variable is refused, with the similar name that is known.
"""

_NAMES: Final[dict[Any, str]] = {
    config.Url: "URL",
    config.SocketUrl: "WebSocket URL",
    config.ProxyUrl: "URL",
    config.ContractAddress: "address",
    config.Allowed: "network (with port)",
    config.Cidr: "network (CIDR)",
    config.HeaderName: "header name",
    config.FilePath: "path",
    config.Origin: "origin",
    config.Port: "port",
    SecretStr: "secret",
    str: "text",
    int: "integer",
    float: "number",
}


def render() -> str:
    """Return the page."""
    tables = dict(_tables())
    lines = [_HEAD, "## Above the first table\n", *_rows(config.Settings, set(tables))]
    for name, table in tables.items():
        lines += [f"\n## `[{name}]`\n", f"{table.__doc__}\n", *_rows(table, set())]
    return "\n".join(lines) + "\n"


def _tables() -> Iterator[tuple[str, type[BaseModel]]]:
    for name, field in config.Settings.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, config.Section):
            yield name, field.annotation


def _rows(table: type[BaseModel], left_out: set[str]) -> Iterator[str]:
    yield "| Setting | Type | Default | Meaning |"
    yield "|---|---|---|---|"
    hints = get_type_hints(table, include_extras=True)
    for name, field in table.model_fields.items():
        if name not in left_out:
            kind = ", ".join(filter(None, (_kind(name, hints[name]), _limits(field))))
            yield f"| `{name}` | {kind} | {_default(name, field)} | {field.description} |"


def _kind(name: str, hint: Any) -> str:
    if name == "schedule":
        return "delays"
    if hint in _NAMES:
        return "seconds" if hint is float and name.endswith("_s") and "_per_" not in name else _NAMES[hint]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _kind(name, arguments[0])
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return _kind(name, arguments[0])
    if origin in (tuple, frozenset):
        noun, _, rest = _kind(name, arguments[0]).partition(" (")
        return f"list of {noun}{'es' if noun.endswith('s') else 's'}{rest and f' ({rest}'}"
    raise TypeError(f"the setting {name} has a type without a name: {hint}")


def _limits(field: FieldInfo) -> str:
    signs = {Ge: "≥ {0.ge}", Gt: "> {0.gt}", Le: "≤ {0.le}", Lt: "< {0.lt}", MinLen: "at least {0.min_length}"}
    found = [signs[type(limit)].format(limit) for limit in field.metadata if type(limit) in signs]
    return " to ".join(found).replace("≥ ", "").replace("≤ ", "") if _is_closed(found) else " and ".join(found)


def _is_closed(limits: list[str]) -> bool:
    return [limit[0] for limit in limits] == ["≥", "≤"]


def _default(name: str, field: FieldInfo) -> str:
    value = field.default
    if field.is_required():
        return "required"
    if value is None:
        return "–"
    if name == "schedule":
        return f'`"{", ".join(map(_duration, value))}"`'
    if isinstance(value, str):
        return f'`"{value}"`'
    if isinstance(value, tuple | frozenset):
        return f"`{sorted(value)}`"
    return f"`{value}`"


def _duration(seconds: int) -> str:
    for unit, size in (("h", 3600), ("m", 60)):
        if seconds % size == 0:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
