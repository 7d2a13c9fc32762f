"""The manifest's keys, from the JSON Schema that ``nvgemm-aot schema`` prints."""

from __future__ import annotations

import json
from typing import Any

from click.testing import CliRunner

from nvgemm_aot.cli.main import main

from .tables import table


def section() -> str:
    """A table for the manifest and one for each object in it, then the schema itself."""
    text = CliRunner().invoke(main, ["schema"], catch_exceptions=False).stdout
    schema = json.loads(text)
    parts = [_object("Manifest", schema)]
    parts += [_object(name, one) for name, one in schema["$defs"].items() if "properties" in one]
    parts.append(f'??? note "The JSON Schema"\n\n    ```json\n{_indented(text)}\n    ```')
    return "\n\n".join(parts)


def _object(name: str, schema: dict[str, Any]) -> str:
    required = schema.get("required", ())
    rows = [
        (f"`{key}`", _type(one), _also(one, key in required))
        for key, one in schema["properties"].items()
    ]
    description = schema.get("description", "")
    return f"## {name}\n\n{description}\n\n" + table(("key", "values", ""), rows)


def _also(schema: dict[str, Any], required: bool) -> str:
    parts = [schema.get("description", "")]
    if "default" in schema:
        parts.append(f"Default: `{json.dumps(schema['default'])}`.")
    if required:
        parts.append("Required.")
    return " ".join(filter(None, parts))


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(_type, schema["anyOf"])))
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "array":
        inner = _type(schema["items"]) if isinstance(schema.get("items"), dict) else ""
        if inner.startswith("`"):
            return "a list of these"
        return f"a list of {inner or 'values'}"
    limits = [
        f"{words} {schema[key]}"
        for key, words in (("minimum", "from"), ("maximum", "to"))
        if key in schema
    ]
    return " ".join([str(schema.get("type", "any")), *limits])


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.rstrip().splitlines())
