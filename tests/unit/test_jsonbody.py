"""JSON that can be read in one way only."""

from __future__ import annotations

import time
from decimal import Decimal

import pytest

from vaultevents.core.errors import InputError
from vaultevents.core.jsonbody import JsonMalformed, JsonValue, parse_json, same_value

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        (b"{}", {}),
        (b" \t\r\n[1, -0, 12345678901234567890123] \n", [1, 0, 12345678901234567890123]),
        (b"[0.1, 1e2, -1.50E-3, 1e-0999]", [Decimal("0.1"), Decimal(100), Decimal("-0.0015"), Decimal("1e-999")]),
        (b'[true, false, null, "", "a"]', [True, False, None, "", "a"]),
        ('"\u00e9\U0001f600\u2028\x7f"'.encode(), "\u00e9\U0001f600\u2028\x7f"),
        (rb'"\u00e9\ud83d\uDE00\/\\\"\b\f\n\r\t\u0000"', '\u00e9\U0001f600/\\"\b\f\n\r\t\0'),
        (rb'"\\ud800"', "\\ud800"),
        (b'{"a":{"a":1},"b":[{"a":2},{"a":3}]}', {"a": {"a": 1}, "b": [{"a": 2}, {"a": 3}]}),
        (b"[" * 32 + b"]" * 32, None),
        (b'["' + b"[" * 100 + rb"\"{{{" + b'"]', ["[" * 100 + '"{{{']),
        (b"[" + b",".join([b"[]"] * 100) + b"]", [[]] * 100),
        (b"9" * 128, int("9" * 128)),
    ],
)
def test_good_json_is_read_exactly(raw: bytes, value: JsonValue) -> None:
    read = parse_json(raw)
    assert value is None or read == value
    assert value is None or same_value(read, value)


def test_a_number_is_an_int_only_when_written_as_one() -> None:
    read = parse_json(b"[1, 1.0, 1e0, true]")
    assert isinstance(read, list)
    assert [type(item) for item in read] == [int, Decimal, Decimal, bool]


@pytest.mark.parametrize(
    ("raw", "reported"),
    [
        (b"", "error in line 1, column 1"),
        (b" ", "error in line 1"),
        (b"{} {}", "column 4: extra data"),
        (b'{"a":1,}', "error"),
        (b"[1,]", "error"),
        (b"{'a':1}", "error"),
        (b"{a:1}", "error"),
        (b"[1 2]", "error"),
        (b'{"a" 1}', "error"),
        (b"// x\n1", "error"),
        (b"01", "error"),
        (b"+1", "error"),
        (b"1.", "error"),
        (b".5", "error"),
        (b"1e", "error"),
        (b"-", "error"),
        (b"0x1", "error"),
        (b"1_000", "error"),
        ("\u0661".encode(), "error"),
        (b"True", "error"),
        (b"nul", "error"),
        (b'"a', "error"),
        (b'"a\nb"', "error"),
        (b'"a\x00b"', "error"),
        (rb'"\x41"', "error"),
        (rb'"\u12g4"', "error"),
        (rb'"\u+123"', "error"),
        ("\u00a01".encode(), "error"),
        (b"\xc2\xa0", "error"),
        (b"NaN", "NaN"),
        (b"[Infinity]", "Infinity"),
        (b'{"a":-Infinity}', "-Infinity"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
        ("{}".encode("utf-16"), "not UTF-8"),
        (b'"\xe9"', "not UTF-8"),
        (b'"\xed\xa0\x80"', "not UTF-8"),
        (b'"\xc0\xaf"', "not UTF-8"),
        (rb'"\ud800"', "surrogate"),
        (rb'["\udc00\ud800"]', "surrogate"),
        (rb'{"\uD83D":1}', "surrogate"),
        (rb'{"a":[{"b":"\udfff"}]}', "surrogate"),
        (b'{"a":1,"a":1}', "'a' twice"),
        (rb'{"a":1,"\u0061":2}', "'a' twice"),
        (b'[{"x":{"b":1,"c":2,"b":3}}]', "'b' twice"),
        (b"[" * 33 + b"]" * 33, "at most 32 levels"),
        (b'{"a":' * 33 + b"1" + b"}" * 33, "at most 32 levels"),
        (b"[" * 1_000_000, "at most 32 levels"),
        (b"9" * 129, "129 characters"),
        (b"[-" + b"9" * 100_000 + b"]", "100001 characters"),
        (b"0." + b"1" * 127, "129 characters"),
        (b"1e1000", "exponent"),
        (b"1E-1000", "exponent"),
        (b"1e999999999", "exponent"),
    ],
)
def test_what_can_be_read_in_two_ways_or_none_is_refused(raw: bytes, reported: str) -> None:
    with pytest.raises(JsonMalformed, match=reported) as refused:
        parse_json(raw)
    assert isinstance(refused.value, InputError)
    assert len(str(refused.value)) < 160
    assert str(refused.value).isascii()


def test_a_message_quotes_little_of_what_was_sent() -> None:
    secret = "whsec_" + "s" * 1000
    for text in (f'{{"{secret}":1,"{secret}":2}}', f'{{"a":"{secret}"', f'"{secret}" "{secret}"', f"{secret}"):
        with pytest.raises(JsonMalformed) as refused:
            parse_json(text.encode())
        assert "s" * 60 not in str(refused.value)


@pytest.mark.parametrize(
    "raw",
    [
        b"1e999999999",
        b"-" + b"9" * 60_000,
        b"[" * 60_000,
        b'{"a":' * 10_000,
        b'"' + b"\\" * 60_001,
        b'"' + rb"\ud800" * 10_000 + b'"',
        b"[" + b'"' * 60_000,
        b"[" + b"1e999," * 10_000 + b"1]",
        b"{" + b",".join(b'"%d":1' % number for number in range(6_000)) + b',"0":1}',
    ],
)
def test_hostile_json_costs_little(raw: bytes) -> None:
    began = time.process_time()
    with pytest.raises(JsonMalformed):
        value = parse_json(raw)
        assert same_value(value, parse_json(raw)), "costs little too"
        raise JsonMalformed("read")
    assert time.process_time() - began < 0.2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b'{"a":1,"b":[true,null]}', b' { "b" : [ true , null ] , "a" : 1 } '),
        (b"100", b"1e2"),
        (b"0.50", b"5E-1"),
        (b"-0", b"0.0"),
        (b"1e999", b"10e998"),
        (b"9007199254740993", b"9007199254740993.0"),
        (b'"\\u00e9\\/"', '"\u00e9/"'.encode()),
        (b"[]", b"[ ]"),
    ],
)
def test_other_spellings_are_the_same_value(one: bytes, other: bytes) -> None:
    assert same_value(parse_json(one), parse_json(other))
    assert same_value(parse_json(other), parse_json(one))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b"1", b"true"),
        (b"0", b"false"),
        (b"1.0", b"true"),
        (b"null", b"false"),
        (b"null", b"0"),
        (b'""', b"null"),
        (b'"1"', b"1"),
        (b"[]", b"{}"),
        (b"[1,2]", b"[2,1]"),
        (b"[1]", b"[1,1]"),
        (b"[[1]]", b"[1]"),
        (b'{"a":1}', b'{"a":1,"b":null}'),
        (b'{"a":null}', b'{"b":null}'),
        (b'{"a":{"b":1}}', b'{"a":{"b":true}}'),
        (b"9007199254740993", b"9007199254740992"),
        (b"9007199254740993", b"9007199254740992.0"),
        (b"0.1", b"0.1000000000000000055511151231257827021181583404541015625"),
        (b"1e999", b"1e998"),
        ('"\u00e9"'.encode(), '"e\u0301"'.encode()),
        (b'"a"', b'"A"'),
        (b'"a"', b'"a "'),
    ],
)
def test_other_values_are_not(one: bytes, other: bytes) -> None:
    assert not same_value(parse_json(one), parse_json(other))
    assert not same_value(parse_json(other), parse_json(one))
