"""JSON as a request or a token carries it (RFC 8259), read strictly and exactly (rule A11).

Other parsers take the last of two equal names, round numbers to doubles and read NaN. Where a signature covers one text
and a handler acts on another, each of these lets two readers of the same bytes see different things.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from json import JSONDecodeError, JSONDecoder
from typing import Final, NoReturn, TypeAlias

from vaultevents.core.errors import InputError

MAX_BODY_BYTES: Final = 16 * 1024
"""The largest body of a request to the HTTP API."""

JsonValue: TypeAlias = "bool | int | Decimal | str | list[JsonValue] | dict[str, JsonValue] | None"

MAX_DEPTH: Final = 32
MAX_NUMBER_CHARS: Final = 128
MAX_EXPONENT_DIGITS: Final = 3  # so that no later sum or comparison has to write out 1e999999999
_SHOWN_CHARS: Final = 40

_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"?|[\[\]{}]', re.DOTALL)
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


class JsonMalformed(InputError):
    """Bytes that are not JSON in UTF-8, or leave room for two readings. Quotes at most one short name of them."""


def parse_json(raw: bytes) -> JsonValue:
    """The one value that `raw` stands for; raises `JsonMalformed`.

    UTF-8 without byte order mark, no name twice in an object, no NaN or infinity, no lone surrogate, at most 32 levels.
    A number without fraction and exponent is an `int`, any other a `Decimal`: exact, of at most 128 characters, its
    exponent of at most three digits.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise JsonMalformed("the JSON is not UTF-8: send it in this encoding") from None
    if text.startswith("\ufeff"):
        raise JsonMalformed("the JSON begins with a byte order mark: send it without")
    if text.count("[") + text.count("{") > MAX_DEPTH and _is_deep(text):
        raise JsonMalformed(f"the JSON is nested too deep: at most {MAX_DEPTH} levels are read")
    try:
        value: JsonValue = _DECODER.decode(text)
    except JSONDecodeError as error:
        problem = error.msg[:1].lower() + error.msg[1:].rstrip(" :")
        raise JsonMalformed(f"the JSON has an error in line {error.lineno}, column {error.colno}: {problem}") from None
    if _SURROGATE_ESCAPE.search(raw) and any(_is_broken(text) for text in _texts(value)):
        raise JsonMalformed("the JSON holds half of a surrogate pair: send both halves, or the character itself")
    return value


def same_value(one: JsonValue, other: JsonValue) -> bool:
    """Whether two parsed texts say the same: order within objects is free, 100 is 1e2 and `true` is not 1."""
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and one.keys() == other.keys()
            and all(same_value(value, other[name]) for name, value in one.items())
        )
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(same_value, one, other))
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _is_deep(text: str) -> bool:
    depth = 0
    for found in _STRING_OR_BRACKET.finditer(text):
        if found[0] in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                return True
        elif found[0] in "]}":
            depth -= 1
    return False


def _object(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    names = dict(pairs)
    if len(names) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise JsonMalformed(f"the JSON names {twice[:_SHOWN_CHARS]!a} twice in one object: send each name once")
    return names


def _whole(digits: str) -> int:
    _check_length(digits)
    return int(digits)


def _decimal(digits: str) -> Decimal:
    _check_length(digits)
    exponent = digits.lower().partition("e")[2].lstrip("+-0")
    if len(exponent) > MAX_EXPONENT_DIGITS:
        raise JsonMalformed(f"the JSON has a number whose exponent has more than {MAX_EXPONENT_DIGITS} digits")
    return Decimal(digits)


def _check_length(digits: str) -> None:
    if len(digits) > MAX_NUMBER_CHARS:
        raise JsonMalformed(f"the JSON has a number of {len(digits)} characters: at most {MAX_NUMBER_CHARS} are read")


def _no_constant(name: str) -> NoReturn:
    raise JsonMalformed(f"the JSON holds {name}, which is no number in JSON: send a number or null")


_DECODER: Final = JSONDecoder(
    object_pairs_hook=_object, parse_int=_whole, parse_float=_decimal, parse_constant=_no_constant
)


def _texts(value: JsonValue) -> Iterator[str]:
    """Every text within `value`, names included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, dict):
        for name, item in value.items():
            yield name
            yield from _texts(item)


def _is_broken(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False
