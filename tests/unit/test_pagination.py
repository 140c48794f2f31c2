"""A page's cursor opens for the account and the list it was made for, and for nothing else (rules A2 and T8)."""

from __future__ import annotations

import re
import string

import pytest

from vaultevents.core.errors import InputError
from vaultevents.core.pagination import CursorUnknown, decode_cursor, encode_cursor
from vaultevents.core.sealing import HashKey

pytestmark = pytest.mark.unit

KEY = HashKey(bytes(range(32)))
POSITION = "1.4711.99"
CURSOR = encode_cursor(KEY, "acme", "events", POSITION)
URL_SAFE = string.ascii_letters + string.digits + "-_"


def refusal(cursor: str, account_id: str = "acme", kind: str = "events", key: HashKey = KEY) -> str:
    with pytest.raises(CursorUnknown) as caught:
        decode_cursor(key, account_id, kind, cursor)
    return str(caught.value)


@pytest.mark.parametrize("position", [POSITION, "", "v-1", "2026-01-01T00:00:00.000001+00:00 wh-1", "ü€😀", "a" * 5000])
def test_a_cursor_leads_back_to_its_position(position: str) -> None:
    cursor = encode_cursor(KEY, "acme", "events", position)
    assert decode_cursor(KEY, "acme", "events", cursor) == position
    assert re.fullmatch(r"[A-Za-z0-9_-]+", cursor)  # nothing that a URL would have to escape


def test_the_same_place_has_the_same_cursor() -> None:
    assert encode_cursor(KEY, "acme", "events", POSITION) == CURSOR


def test_a_cursor_is_good_for_one_account_one_list_and_one_key() -> None:
    assert decode_cursor(KEY, "acme", "events", CURSOR) == POSITION
    assert refusal(CURSOR, account_id="globex")
    assert refusal(CURSOR, kind="webhooks")
    assert refusal(CURSOR, key=HashKey(bytes(32)))


def test_names_that_run_into_each_other_are_distinguished() -> None:
    assert refusal(encode_cursor(KEY, "ab", "c", POSITION), account_id="a", kind="bc")
    assert refusal(encode_cursor(KEY, "a", "b", "c1"), account_id="a", kind="b1")


def test_any_altered_or_missing_character_is_noticed() -> None:
    for place, was in enumerate(CURSOR):
        for other in set(URL_SAFE) - {was}:  # also those that differ only in bits that base64 throws away
            assert refusal(CURSOR[:place] + other + CURSOR[place + 1 :])
    for length in range(len(CURSOR)):
        assert refusal(CURSOR[:length])


@pytest.mark.parametrize(
    "cursor",
    [
        *("", "A", "=", "====", "not a cursor", "é", "\ud800", "\0", "%00", "A" * 22, "A" * 10_000, POSITION),
        *(CURSOR + "=", CURSOR + "==", CURSOR + "\n", " " + CURSOR, CURSOR + "A", CURSOR * 2),
        "_" * 40,  # a position that is not UTF-8
    ],
)
def test_what_is_no_cursor_is_refused_like_a_foreign_one(cursor: str) -> None:
    assert refusal(cursor) == refusal(CURSOR, account_id="globex")


def test_both_alphabets_of_base64_do_not_make_two_cursors() -> None:
    positions = (str(number) for number in range(1000))
    cursor = next(found for position in positions if "-" in (found := encode_cursor(KEY, "acme", "events", position)))
    assert refusal(cursor.replace("-", "+"))


def test_the_refusal_says_what_to_do_and_quotes_nothing() -> None:
    assert issubclass(CursorUnknown, InputError)
    sentence = refusal(CURSOR, account_id="globex")
    assert "Link header" in sentence
    assert CURSOR not in sentence
    assert POSITION not in sentence
