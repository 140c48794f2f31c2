"""The reasons of reverts in words; which error has which selector is in integration/chain/test_abis.py."""

from __future__ import annotations

import pytest

from vaultevents.core.reverts import MEANINGS, revert_reason

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("error", MEANINGS)
def test_a_known_error_is_shown_with_its_meaning(error: str) -> None:
    assert revert_reason(error, (1, 2), bytes(68)) == f"{error}: {MEANINGS[error]}"


def test_an_error_without_a_meaning_is_shown_with_its_arguments() -> None:
    assert revert_reason("Panic", (17,), bytes(36)) == "Panic(17)"
    assert revert_reason("Error", ("two\nlines",), bytes(100)) == r"Error('two\nlines')"


def test_what_is_not_known_is_shown_as_it_is() -> None:
    assert revert_reason(None, (), bytes.fromhex("deadbeef00")) == "an unknown error 0xdeadbeef"
    assert revert_reason(None, (), b"") == "no reason given"
