"""Step-up with one-time codes: TOTP of RFC 6238 (SHA-1, 6 digits, steps of 30 s) and its lock (rule A15).

That a step is accepted once, and how many failures there were, is for the database to say.
"""

from __future__ import annotations

import base64
import hmac
import re
from typing import Final

import pyotp

from vaultevents.core.sealing import Secret

SEED_BYTES: Final = 20
STEP_S: Final = 30
LOCK_AFTER: Final = 5
GUESSES_AFTER_LOCK: Final = 3
FIRST_LOCK_S: Final = 900
LONGEST_LOCK_S: Final = 86_400

_CODE = re.compile(r"[0-9]{6}")


def new_seed(random_bytes: bytes) -> Secret:
    """The seed of an account in base32, as authenticator apps take it, made of 20 random bytes."""
    if len(random_bytes) != SEED_BYTES:
        raise ValueError(f"a seed is made of {SEED_BYTES} random bytes, got {len(random_bytes)}")
    return Secret(base64.b32encode(random_bytes).decode("ascii"))


def is_code(text: str) -> bool:
    """Report whether `text` has the form of a code: six ASCII digits."""
    return _CODE.fullmatch(text) is not None


def matching_step(seed: Secret, code: str, now_s: float) -> int | None:
    """The step (Unix time / 30 s) that `code` belongs to: the present one, the one before or the one after.

    The newest if several fit, `None` if none does or `code` is not six ASCII digits. All three are always compared, in
    constant time.
    """
    if not is_code(code):
        return None
    codes = pyotp.HOTP(seed.reveal())
    present = int(now_s // STEP_S)
    matching = None
    for step in (present - 1, present, present + 1):
        if hmac.compare_digest(codes.at(step), code):
            matching = step
    return matching


def lock_s(failures: int) -> int | None:
    """Seconds for which the account is locked when its wrong codes since the last success reach `failures`.

    The fifth locks for 15 minutes, from then on every third for twice as long as the time before, 24 h at most; `None`
    for the others. So 23 guesses fit in a day, and with three valid codes of 10^6 they hit with less than 0.01 %.
    """
    locks, guesses = divmod(failures - LOCK_AFTER, GUESSES_AFTER_LOCK)
    if locks < 0 or guesses:
        return None
    doublings = min(locks, LONGEST_LOCK_S.bit_length())
    return min(FIRST_LOCK_S << doublings, LONGEST_LOCK_S)


def otpauth_uri(seed: Secret, account_id: str, issuer: str = "vaultevents") -> Secret:
    """What an authenticator app reads from a QR code. It holds the seed, so it is as secret."""
    return Secret(pyotp.TOTP(seed.reveal(), interval=STEP_S).provisioning_uri(name=account_id, issuer_name=issuer))
