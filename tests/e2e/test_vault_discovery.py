"""Vaults discovered, registered and added by the commands, on a real EVM; the receiver beside the service."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from command_line import CommandLine
from contracts_fixtures import Protocol, running_protocol
from timeouts import until
from vaultevents.core.units import checksum
from vaultevents.store.postgres.embedded import ServerAddress

pytestmark = [pytest.mark.e2e, pytest.mark.anvil]

CONFIG = Path(__file__).resolve().parents[2] / "config" / "devnet.toml"


@pytest.fixture(scope="module")
def protocol(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Protocol]:
    with running_protocol(tmp_path_factory.mktemp("anvil")) as protocol:
        yield protocol


@pytest.fixture
def home(tmp_path: Path, data_dir: Path, server: ServerAddress, protocol: Protocol) -> Path:
    text = CONFIG.read_text().replace("http://127.0.0.1:8545", protocol.chain.url)
    database = f'data_dir = "{data_dir}"\ndatabase_schema = "t_{uuid4().hex}"'
    text = text.replace('# data_dir = "/var/lib/vaultevents"', database)
    contracts = f'lido_locator = "0x{protocol.locator.hex()}"\nwrapper_factory = "0x{protocol.wrapper_factory.hex()}"'
    (tmp_path / "vaultevents.toml").write_text(f"{text}\n[contracts]\n{contracts}\n")
    return tmp_path


async def test_from_discovery_to_a_verified_webhook(home: Path, protocol: Protocol) -> None:
    single, pool = protocol.create_vault(operator=protocol.chain.accounts[6]), protocol.create_pool()
    protocol.chain.finalize()
    shell = CommandLine.of(home)
    assert pool.queue is not None
    try:
        for account in ("acme", "zeta"):
            (await shell.run("account", "add", account)).ok()
        named = (checksum(pool.vault), "--start-block", "creation", "--json")
        added = (await shell.run("vault", "add", "zeta", "pool", *named)).ok().json
        assert (added["creationBlock"], added["withdrawalQueueAddress"]) == (pool.block, checksum(pool.queue))
        assert added["spans"] == [{"firstBlock": pool.block, "lastBlock": None}]
        register = ("--register", "acme", "--start-block", "creation")
        first = (await shell.run("vault", "discover", *register, "--json")).ok().json
        assert [vault["registrations"] for vault in first["vaults"]] == [
            [{"accountId": "acme", "id": f"0x{single.vault.hex()}"}],
            [{"accountId": "acme", "id": f"0x{pool.vault.hex()}"}, {"accountId": "zeta", "id": "pool"}],
        ]
        operator = ("--node-operator", f"0x{protocol.chain.accounts[6].hex()}")
        again = (await shell.run("vault", "discover", *register, *operator)).ok().stdout.splitlines()
        assert again[1].split()[-2:] == [str(single.block), f"acme/0x{single.vault.hex()}"]
        assert again[2:] == ["Account acme now has 1 of these 1 vaults."]
        vaults = (await shell.run("vault", "list", "--json")).ok().json["vaults"]
        assert [vault["withdrawalQueueAddress"] is None for vault in vaults] == [False, True, False]

        running = await shell.start("run", "--listen", "acme")
        await until(lambda: running.stdout_so_far.count("verified: ") == 2)
        ended = (await running.end()).ok()
        assert f'"staking_vault_id":"0x{pool.vault.hex()}"' in ended.stdout
        assert (await shell.run("webhook", "list", "acme", "--json")).ok().json == {"webhooks": []}
    finally:
        await shell.kill_all()


async def test_a_vault_is_added_offline_only_unchecked(home: Path, protocol: Protocol) -> None:
    shell = CommandLine.of(home)
    (await shell.run("account", "add", "acme")).ok()
    nowhere = {"VAULTEVENTS_EXECUTION__URLS": "http://127.0.0.1:9"}
    vault = ("vault", "add", "acme", "one", checksum(protocol.hub), "--start-block", "1")
    error = (await shell.run(*vault, **nowhere)).error
    assert "cannot be reached" in error
    assert "to add the vault without asking, give --unchecked and a --start-block number" in error
    (await shell.run(*vault, "--unchecked", **nowhere)).ok()
