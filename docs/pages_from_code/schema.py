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
        kinds = list(dict.fromkeys(map(_type, schema["anyOf"])))
        return " or ".join(
            "a list of these" if kind == f"a list of {kinds[0]}" else kind for kind in kinds
        )
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"a list of {_type(schema.get('items', {}))}"
    if schema.get("type") == "integer":
        least, most = schema.get("minimum"), schema.get("maximum")
        return f"{least}" if least == most else f"{least} to {most}"
    return str(schema.get("type", "any"))


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.rstrip().splitlines())
