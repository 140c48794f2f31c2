"""What follows from each SQLSTATE: none is left to chance, and a mistake of ours stays one."""

from __future__ import annotations

from collections import Counter

import asyncpg
import pytest

from vaultevents.core.errors import DatabaseUnavailable, DatabaseUnusable
from vaultevents.store.sqlstates import VERDICTS, translated, verdict

pytestmark = pytest.mark.unit

KNOWN = asyncpg.exceptions._base.PostgresMessageMeta._message_map  # every SQLSTATE of the driver, with its exception

RETRIED_CLASSES = {"08", "40", "53", "57", "58", "72", "F0", "XX"}
RETRIED_CODES = {"25006", "25P03", "25P04", "55000", "55006", "55P03"}
SENTENCE_CLASSES = {"26", "28", "3D", "3F"}
SENTENCE_CODES = {"42501", "42703", "42883", "42P01", "42P05"}
OURS = {  # a statement, a value or a rule of this service is wrong
    *(
        "01",
        "02",
        "03",
        "09",
        "10",
        "0B",
        "0F",
        "0L",
        "0P",
        "0Z",
        "20",
        "21",
        "22",
        "23",
        "24",
        "25",
        "27",
        "2B",
        "2D",
        "2F",
    ),
    *("34", "38", "39", "3B", "42", "44", "54", "55", "HV", "P0", "00"),
}


def kind(error: asyncpg.PostgresError) -> str:
    match translated(error):
        case DatabaseUnavailable():
            return "retried"
        case DatabaseUnusable():
            return "sentence"
    return "bug"


def expected(code: str) -> str:
    if code in RETRIED_CODES or code[:2] in RETRIED_CLASSES:
        return "retried"
    return "sentence" if code in SENTENCE_CODES or code[:2] in SENTENCE_CLASSES else "bug"


CODES = sorted(code for code in KNOWN if code is not None and len(code) == 5)


def test_the_driver_knows_the_appendix_of_the_manual() -> None:
    assert len(CODES) > 200
    assert {code[:2] for code in CODES} - {"0A"} <= RETRIED_CLASSES | SENTENCE_CLASSES | OURS


def test_each_sqlstate_is_retried_ends_with_a_sentence_or_is_a_bug() -> None:
    found = {code: kind(KNOWN[code]("something happened")) for code in CODES if code[:2] != "0A"}
    assert found == {code: expected(code) for code in found}
    print(dict(Counter(found.values())))


@pytest.mark.parametrize("code", ["42601", "23505", "22012", "P0001", "25P02", "54001", "0A000", "55P02"])
def test_a_mistake_of_ours_is_a_bug(code: str) -> None:
    assert translated(KNOWN[code]("something happened")) is None


def test_a_plan_of_before_a_migration_is_made_again() -> None:
    assert isinstance(translated(asyncpg.InvalidCachedStatementError("cached plan")), DatabaseUnavailable)


def test_a_code_that_no_driver_knows_goes_by_its_class() -> None:
    assert (verdict("57P99"), verdict("40ZZZ"), verdict("42ZZZ"), verdict("99999"), verdict("")) == (
        *("retry", "retry", "bug", "bug", "bug"),
    )


@pytest.mark.parametrize("code", sorted(SENTENCE_CODES | {"28000", "28P01", "3D000", "3F000", "26000"}))
def test_a_sentence_says_what_happened_and_what_to_do(code: str) -> None:
    text = str(translated(KNOWN[code]("it went wrong\nat length")))
    assert text.startswith("the database refuses this (it went wrong): ")
    assert any(word in text for word in ("correct ", "grant ", "restore ", "connect to "))


@pytest.mark.parametrize("error", [OSError("gone"), TimeoutError(), asyncpg.InterfaceError("connection is closed")])
def test_a_lost_connection_is_retried(error: Exception) -> None:
    assert isinstance(translated(error), DatabaseUnavailable)


@pytest.mark.parametrize("error", [ValueError("no"), DatabaseUnusable("said"), KeyError("x")])
def test_what_is_no_error_of_the_driver_passes(error: Exception) -> None:
    assert translated(error) is None


def test_no_code_is_listed_beside_its_class_with_the_same_verdict() -> None:
    assert all(VERDICTS.get(code[:2]) != found for code, found in VERDICTS.items() if len(code) == 5)
