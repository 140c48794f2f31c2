"""Secrets at rest open only where they belong, and never print themselves."""

from __future__ import annotations

import base64
import copy
import logging
import pickle
import traceback

import pytest

from vaultevents.core.errors import ConfigError
from vaultevents.core.sealing import (
    HashKey,
    MasterKey,
    SealBroken,
    Secret,
    keyed_hash,
    open_sealed,
    parse_master_key,
    seal,
)

pytestmark = pytest.mark.unit

RAW = bytes(range(32))
KEY = MasterKey(RAW)
NONCE = bytes(range(12))
CANARY = "whsec_canary"


def test_what_is_sealed_opens_again() -> None:
    blob = seal(KEY, Secret(CANARY), "webhook-1", NONCE)
    assert open_sealed(KEY, blob, "webhook-1").reveal() == CANARY
    assert CANARY.encode() not in blob
    assert blob.startswith(NONCE)
    assert len(blob) == 12 + len(CANARY) + 16


def test_a_ciphertext_moved_to_another_row_does_not_open() -> None:
    one = seal(KEY, Secret("one"), "webhook-1", NONCE)
    two = seal(KEY, Secret("two"), "webhook-2", NONCE[::-1])
    for blob, aad in ((one, "webhook-2"), (two, "webhook-1"), (one, "")):
        with pytest.raises(SealBroken):
            open_sealed(KEY, blob, aad)


def test_any_flipped_bit_or_missing_byte_is_noticed() -> None:
    blob = seal(KEY, Secret(CANARY), "webhook-1", NONCE)
    for position in range(len(blob)):
        flipped = blob[:position] + bytes([blob[position] ^ 1]) + blob[position + 1 :]
        with pytest.raises(SealBroken):
            open_sealed(KEY, flipped, "webhook-1")
    for length in range(len(blob)):
        with pytest.raises(SealBroken):
            open_sealed(KEY, blob[:length], "webhook-1")


def test_another_master_key_does_not_open_and_has_another_id() -> None:
    other = MasterKey(RAW[::-1])
    blob = seal(KEY, Secret(CANARY), "webhook-1", NONCE)
    with pytest.raises(SealBroken) as broken:
        open_sealed(other, blob, "webhook-1")
    assert other.id in str(broken.value)
    assert other.id != KEY.id


def test_a_key_opens_what_the_one_before_it_sealed_and_seals_with_itself() -> None:
    newer = MasterKey(RAW[::-1], KEY)
    newest = MasterKey(bytes(32), newer)
    assert [record.id for record in newest.known] == [newest.id, newer.id, KEY.id]
    for former in (KEY, newer):
        assert open_sealed(newest, seal(former, Secret(CANARY), "webhook-1", NONCE), "webhook-1").reveal() == CANARY
    blob = seal(newest, Secret(CANARY), "webhook-1", NONCE)
    assert open_sealed(MasterKey(bytes(32)), blob, "webhook-1").reveal() == CANARY
    for former in (KEY, newer):
        with pytest.raises(SealBroken):
            open_sealed(former, blob, "webhook-1")


def test_the_key_id_is_stable_and_reports_nothing() -> None:
    assert MasterKey(RAW).id == KEY.id
    assert len(KEY.id) == 16
    assert KEY.id not in RAW.hex()
    assert repr(KEY) == f"MasterKey(id={KEY.id})"


@pytest.mark.parametrize(
    "text",
    [
        RAW.hex(),
        RAW.hex().upper(),
        base64.b64encode(RAW).decode(),
        base64.b64encode(RAW).decode().rstrip("="),
        base64.urlsafe_b64encode(RAW).decode(),
        f"  {RAW.hex()}\n",
    ],
)
def test_a_master_key_in_each_form(text: str) -> None:
    assert parse_master_key(text).id == KEY.id


def test_both_alphabets_of_base64_are_one_key() -> None:
    raw = b"\xff\xfe\xfb" * 10 + b"\xff\xef"
    plain, url_safe = base64.b64encode(raw).decode(), base64.urlsafe_b64encode(raw).decode()
    assert plain != url_safe
    assert parse_master_key(plain).id == parse_master_key(url_safe).id == MasterKey(raw).id


@pytest.mark.parametrize("text", ["", "hunter2", RAW.hex()[:-2], RAW.hex() + "00", base64.b64encode(RAW[:31]).decode()])
def test_a_bad_master_key_is_refused_without_repeating_it(text: str) -> None:
    with pytest.raises(ConfigError, match="openssl rand -base64 32") as refused:
        parse_master_key(text)
    assert not text or text not in str(refused.value)


def test_keyed_hashes_depend_on_key_and_text() -> None:
    key = HashKey(RAW)
    assert keyed_hash(key, "a") == keyed_hash(HashKey(RAW), "a")
    assert len({keyed_hash(key, "a"), keyed_hash(key, "b"), keyed_hash(HashKey(RAW[::-1]), "a")}) == 3
    assert len(keyed_hash(key, "a")) == 32


def test_a_hash_key_has_32_bytes_and_is_never_shown() -> None:
    assert RAW.hex() not in repr(HashKey(RAW))
    with pytest.raises(ValueError, match="32 bytes"):
        HashKey(RAW[:16])


def test_wrong_lengths_are_bugs() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        MasterKey(bytes(16))
    with pytest.raises(ValueError, match="12 bytes"):
        seal(KEY, Secret("x"), "w", bytes(16))


def test_a_secret_never_prints_itself(caplog: pytest.LogCaptureFixture) -> None:
    secret = Secret(CANARY)
    with caplog.at_level(logging.INFO):
        logging.getLogger("t").info("%s %r %s", secret, secret, {"token": [secret]})
    try:
        raise RuntimeError(secret)
    except RuntimeError:
        shown = traceback.format_exc()
    texts = [f"{secret}", f"{secret!r}", f"{secret:>40}", "%s" % secret, str([secret]), caplog.text, shown]  # noqa: UP031
    assert not any("canary" in text for text in texts)
    assert "***" in texts[0]
    assert secret.reveal() == CANARY, "the negative control: it is in there"


def test_a_secret_is_a_value() -> None:
    assert Secret("a") == Secret("a")
    assert Secret("a") != Secret("b")
    assert Secret("a") != "a"
    assert len({Secret("a"), Secret("a")}) == 1
    assert copy.deepcopy(Secret("a")) == Secret("a")
    assert not Secret("")
    with pytest.raises(TypeError):
        pickle.dumps(Secret("a"))
