"""Describe the API: OpenAPI 3.1 from routes and models, and one page without scripts or assets (rule A19)."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from vaultevents.api.models import ProblemBody
from vaultevents.api.problems import CODES

_INTRODUCTION = """
Every request carries an API key (`x-api-key`) and a JWT that is signed with the key's RSA private key
(`Authorization: Bearer …`, RS256). Its claims: `iat` and `exp` (seconds; a token is accepted for 30 s after `iat`),
`url` (the path that is requested), `body` (base64 of the request body; absent or empty without one) and `nonce` (a
random integer). A token is good for one request. Changes of webhooks also need `X-MFA-Code`.
"""


def describe(app: FastAPI) -> bytes:
    """The OpenAPI document as JSON."""
    document = get_openapi(title="vaultevents API", version=app.version, description=_INTRODUCTION, routes=app.routes)
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    problem = ProblemBody.model_json_schema(by_alias=True, ref_template="#/components/schemas/{model}")
    schemas.update(problem.pop("$defs", {}))
    schemas["ProblemBody"] = problem
    schemas["ProblemBody"]["properties"]["code"]["enum"] = list(CODES)
    components["securitySchemes"] = {
        "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        "token": {"type": "http", "scheme": "bearer", "bearerFormat": "JWT"},
    }
    document["security"] = [{"apiKey": [], "token": []}]
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def page(description: bytes) -> bytes:
    """The same for people: one page of HTML."""
    document = json.loads(description)
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>vaultevents API</title><style>{_STYLE}</style>",
        f"<h1>vaultevents API {_text(document['info']['version'])}</h1><p>{_text(document['info']['description'])}</p>",
        '<p>For machines: <a href="/v1/openapi.json">/v1/openapi.json</a> (OpenAPI 3.1).</p>',
        *_operations(document),
        "<h2>Objects</h2>",
        *(_object(name, schema) for name, schema in document["components"]["schemas"].items()),
        "<h2>Errors</h2><table><tr><th>code<th>status<th>meaning</tr>",
        *(
            f"<tr id={code}><td><code>{code}</code><td>{status}<td>{_text(title)}</tr>"
            for code, (status, title) in CODES.items()
        ),
        "</table></html>",
    ]
    return "\n".join(parts).encode()


_STYLE = (
    "body{font:16px/1.5 system-ui;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse}td,th{border:1px solid #ccc;padding:.2rem .6rem;text-align:left;vertical-align:top}"
)


def _operations(document: Mapping[str, Any]) -> Iterator[str]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"<h2><code>{method.upper()} {_text(path)}</code></h2><p>{_text(operation['summary'])}."
            yield f" {_text(operation.get('description', ''))}</p>"
            rows = [
                (parameter["name"], parameter["in"], parameter.get("description", ""), parameter.get("required", False))
                for parameter in operation.get("parameters", ())
            ]
            if rows:
                yield "<table><tr><th>parameter<th>in<th>meaning</tr>"
                for name, place, meaning, required in rows:
                    needed = " (required)" if required else ""
                    yield f"<tr><td><code>{_text(name)}</code><td>{_text(place)}{needed}<td>{_text(meaning)}</tr>"
                yield "</table>"
            if (body := operation.get("requestBody")) is not None:
                yield f"<p>Body: {_kind(body['content']['application/json']['schema'])}</p>"
            for status, answer in operation["responses"].items():
                if status < "300":
                    schema = answer.get("content", {}).get("application/json", {}).get("schema")
                    yield f"<p>Answer: {status}{', ' + _kind(schema) if schema else ', nothing'}</p>"


def _object(name: str, schema: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><td><code>{_text(field)}</code><td>{_kind(facts)}<td>{_text(facts.get('description', ''))}</tr>"
        for field, facts in schema.get("properties", {}).items()
    )
    return (
        f"<h3 id={_text(name)}>{_text(name)}</h3><p>{_text(schema.get('description', ''))}</p>"
        f"<table><tr><th>field<th>type<th>meaning</tr>{rows}</table>"
    )


def _kind(schema: Mapping[str, Any]) -> str:
    """A JSON schema in a few words."""
    if "$ref" in schema:
        name = _text(schema["$ref"].rpartition("/")[2])
        return f"<a href=#{name}>{name}</a>"
    if "anyOf" in schema:
        return " or ".join(_kind(option) for option in schema["anyOf"])
    if schema.get("type") == "array":
        return f"list of {_kind(schema['items'])}"
    if "enum" in schema:
        return "one of " + ", ".join(f"<code>{_text(value)}</code>" for value in schema["enum"])
    return _text(schema.get("format") or schema.get("type", "anything"))


def _text(text: object) -> str:
    return html.escape(" ".join(str(text).split()))
