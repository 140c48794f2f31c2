"""One-time codes against RFC 6238, and what the lock leaves to a guesser."""

from __future__ import annotations

from urllib.parse import parse_qs, urlsplit

import pytest

from vaultevents.core.sealing import Secret
from vaultevents.core.totp import lock_s, matching_step, new_seed, otpauth_uri

pytestmark = pytest.mark.unit

RFC_KEY = b"12345678901234567890"
SEED = Secret("GEZDGNBVGY3TQOJQGEZDGNBVGY3TQOJQ")
VECTORS = [
    (59, 1, "287082"),
    (1111111109, 37037036, "081804"),
    (1111111111, 37037037, "050471"),
    (1234567890, 41152263, "005924"),
    (2000000000, 66666666, "279037"),
    (20000000000, 666666666, "353130"),
]
STEP, CODE = 41152263, "005924"
DAY_S = 86_400


def test_a_seed_is_base32_of_its_20_bytes() -> None:
    assert new_seed(RFC_KEY) == SEED
    for size in (0, 16, 19, 21):
        with pytest.raises(ValueError, match="20 random bytes"):
            new_seed(bytes(size))


@pytest.mark.parametrize(("now_s", "step", "code"), VECTORS)
def test_the_published_vectors(now_s: int, step: int, code: str) -> None:
    assert matching_step(SEED, code, now_s) == step
    assert matching_step(SEED, code, now_s + 0.999) == step
    assert matching_step(new_seed(bytes(20)), code, now_s) is None, "another seed"


@pytest.mark.parametrize(("offset", "found"), [(-2, False), (-1, True), (0, True), (1, True), (2, False)])
def test_a_code_is_good_one_step_early_and_late(offset: int, found: bool) -> None:
    for now_s in ((STEP + offset) * 30, (STEP + offset) * 30 + 29.999):
        assert matching_step(SEED, CODE, now_s) == (STEP if found else None)


@pytest.mark.parametrize(
    "code",
    [
        *("", "5924", "05924", "0005924", "005925", " 005924", "005924 ", "005 924", "005924\n", "+05924", "-05924"),
        *(
            "00592a",
            "005924\u00e9",
            "0x5924",
            "\u0660\u0660\u0665\u0669\u0662\u0664",
            "\uff10\uff10\uff15\uff19\uff12\uff14",
            "00592\u00b2",
        ),
    ],
)
def test_only_the_six_ascii_digits_are_a_code(code: str) -> None:
    assert matching_step(SEED, CODE, STEP * 30) == STEP
    assert matching_step(SEED, code, STEP * 30) is None


def test_where_two_steps_share_a_code_the_newest_counts() -> None:
    twin = new_seed((312_559).to_bytes(20, "big"))  # found by search: its steps 100 and 101 show the same code
    assert [matching_step(twin, "491141", step * 30) for step in range(98, 104)] == [None, 100, 101, 101, 101, None]


def test_the_lock_begins_at_five_and_doubles_every_three() -> None:
    locks = {failures: lock_s(failures) for failures in range(32)}
    assert {failures: seconds for failures, seconds in locks.items() if seconds is not None} == {
        5: 900,
        8: 1_800,
        11: 3_600,
        14: 7_200,
        17: 14_400,
        20: 28_800,
        23: 57_600,
        26: 86_400,
        29: 86_400,
    }
    assert lock_s(5 + 3 * 10**12) == DAY_S


def guess_times(days: int) -> list[float]:
    """When a tireless guesser, wrong each time, gets its guesses in: all at once, as soon as a lock ends."""
    now_s, failures, times = 0.0, 0, []
    while now_s < days * DAY_S:
        failures += 1
        times.append(now_s)
        now_s += lock_s(failures) or 0
    return times


def test_guessing_for_a_day_hits_with_less_than_a_hundredth_of_a_percent() -> None:
    times = guess_times(days=30)
    most = max(sum(start <= at_s < start + DAY_S for at_s in times) for start in times)
    assert most == 23
    assert 1 - (1 - 3 / 10**6) ** most < 0.01 / 100
    assert 1 - (1 - 3 / 10**6) ** 35 > 0.01 / 100, "five guesses after each unlock would be too many"


def test_the_uri_for_an_app_holds_all_it_needs_and_does_not_print() -> None:
    uri = otpauth_uri(SEED, "acme-1")
    assert "GEZD" not in f"{uri} {uri!r}"
    parts = urlsplit(uri.reveal())
    assert (parts.scheme, parts.netloc, parts.path) == ("otpauth", "totp", "/vaultevents:acme-1")
    query = parse_qs(parts.query)
    assert query["secret"] == [SEED.reveal()]
    assert query["issuer"] == ["vaultevents"]
    assert query.keys() <= {"secret", "issuer"}, "the rest is what apps take for granted: SHA1, 6 digits, 30 s"
    assert parse_qs(urlsplit(otpauth_uri(SEED, "a", "Example Ltd").reveal()).query)["issuer"] == ["Example Ltd"]
