"""CIDs against those of the published IPFS importer, and texts that are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vaultevents.core.cid import Cid, CidUnsupported, file_cid, matches, parse_cid
from vaultevents.core.units import Hash32

pytestmark = pytest.mark.unit

VECTORS = json.loads(Path(__file__).parents[1].joinpath("data/report/cid-vectors.json").read_text())
SMALL = [file for file in VECTORS["files"] if file["bytes"] <= 2_500_000]
TEXTS = VECTORS["texts"]
HELLO = "QmT78zSuBmuS4z925WZfrqQ1qHaJ56DQaTfyMUF7F8ff5o"


def content(size: int) -> bytes:
    return (bytes(range(251)) * (size // 251 + 1))[:size]


@pytest.mark.parametrize("file", SMALL, ids=[str(file["bytes"]) for file in SMALL])
def test_a_file_has_the_cid_that_ipfs_gives_it(file: dict[str, object]) -> None:
    size = file["bytes"]
    assert isinstance(size, int)
    assert str(file_cid(content(size))) == file["cid"]


def test_the_vectors_stand_on_both_sides_of_a_chunk() -> None:
    assert [file["bytes"] for file in SMALL] == [0, 1, 262_143, 262_144, 262_145, 524_288, 524_289, 2_500_000]


def test_a_cid_known_to_everyone() -> None:
    assert str(file_cid(b"hello world\n")) == HELLO
    assert matches(parse_cid(HELLO), b"hello world\n")
    assert not matches(parse_cid(HELLO), b"hello world")


def test_all_forms_of_one_cid_are_the_same() -> None:
    forms = [parse_cid(TEXTS[form]) for form in ("v0", "v1_base32", "v1_base58")]
    assert forms[0] == forms[1] == forms[2] == file_cid(content(1))
    assert {str(cid) for cid in forms} == {TEXTS["v0"]}


@pytest.mark.parametrize("digest", [bytes(32), bytes(31) + b"\x01", b"\xff" * 32])
def test_the_text_of_an_extreme_digest_reads_back(digest: bytes) -> None:
    cid = Cid(Hash32(digest))
    assert len(str(cid)) == 46
    assert parse_cid(str(cid)) == cid


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Qm",
        HELLO[:-1],
        HELLO + "o",
        HELLO + "\n",
        " " + HELLO,
        "Qm" + "z" * 44,  # beyond 34 bytes
        "Qm" + "1" * 44,  # another hash than sha2-256 with 32 bytes
        HELLO.replace("T", "0"),
        HELLO.replace("T", "l"),
        HELLO.replace("T", "/"),
        HELLO.replace("T", "\u0422"),
        "../" + HELLO[3:],
        HELLO.lower(),
        f"/ipfs/{HELLO}",
        f"ipfs://{HELLO}",
        TEXTS["raw_codec"],
        TEXTS["v1_base32"].upper(),
        TEXTS["v1_base32"][:-1],
        TEXTS["v1_base32"][:-1] + "v",  # the same bytes with a stray bit
        TEXTS["v1_base32"] + "a",
        TEXTS["v1_base32"] + "======",
        TEXTS["v1_base58"] + "1",
        "z1" + TEXTS["v1_base58"][1:],
        "b" + "a" * 58,
        "b" * 100_000,
        "z" * 100_000,
        "k51qzi5uqu5dlvj2baxnqndepeb86cbk3ng7n3i46uzyxzyqj2xjonzllnv0v8",  # a name of IPNS
    ],
)
def test_any_other_text_is_refused(text: str) -> None:
    with pytest.raises(CidUnsupported) as refused:
        parse_cid(text)
    assert isinstance(refused.value, ValueError)
    assert "CID" in str(refused.value)
