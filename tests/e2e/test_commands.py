"""Every command as a user runs it, against a chain of the devnet and the embedded database."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
import time
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from command_line import CommandLine, Ended, Place, asking, place
from timeouts import WAIT_TIMEOUT_S, until
from vaultevents.devnet.faults import Fault
from vaultevents.devnet.receivers import Hang, always
from vaultevents.devnet.simulation import Simulation
from vaultevents.store.postgres.embedded import ServerAddress

pytestmark = pytest.mark.e2e

VAULT = "0x5FbDB2315678afecb367f032d93F642f64180aa3"
QUEUE = "0xe7f1725E7734CE288F8367e1Bb143E90bb3F0512"


@pytest.fixture
async def here(tmp_path: Path, data_dir: Path, server: ServerAddress) -> AsyncIterator[Place]:
    simulation = Simulation(3)
    simulation.history(20, 30)
    async with place(tmp_path, data_dir, simulation) as found:
        yield found


def names_in(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


async def test_init_writes_a_file_that_check_reads(tmp_path: Path) -> None:
    shell = CommandLine.of(tmp_path).freshly()
    said = (await shell.run("init", "--network", "mainnet")).ok().stdout
    assert "vaultevents check" in said
    assert tomllib.loads((tmp_path / "vaultevents.toml").read_text())["network"] == "mainnet"

    again = await shell.run("init")
    assert again.error == (
        "vaultevents.toml is already there: edit it, name another file with --config, or write over it (--force)"
    )
    assert "mainnet" in (tmp_path / "vaultevents.toml").read_text()

    assert (await shell.run("init", "--force", "--json")).ok().json == {"path": "vaultevents.toml", "network": "hoodi"}
    assert tomllib.loads((tmp_path / "vaultevents.toml").read_text())["network"] == "hoodi"

    (await shell.run("init", VAULTEVENTS_CONFIG="other.toml")).ok()
    assert sorted(names_in(tmp_path)) == ["other.toml", "vaultevents.toml"]


async def test_check_says_what_answers_and_what_does_not(here: Place) -> None:
    (vault, *_) = here.simulation.registrations
    address = "0x" + vault.address.hex()
    sockets = f'websocket_urls = ["{here.url.replace("http", "ws")}/key"]'
    here.configure(execution=f'{sockets}\n[contracts]\nlido_locator = "{address}"')
    good = (await here.run("check")).ok()
    *found, verdict = good.stdout.splitlines()
    lines = {line[2:].split("#")[0].split(": ")[0]: line for line in reversed(found)}
    expected = {"delivery.ca_file", "database", "node http://127.0.0.1", "websocket ws://127.0.0.1"}
    assert lines.keys() >= {*expected, "contracts.lido_locator", "master key", "api", "disk", "trust", "off"}
    assert all(line.startswith("✓ ") for subject, line in lines.items() if subject != "resolver")
    assert verdict.startswith("Everything that is configured works.")
    number = here.simulation.chain.finalized_number
    assert f"chain {here.simulation.chain.chain_id} with block 0 " in lines["node http://127.0.0.1"]
    assert f"its finalized block is {number}" in lines["node http://127.0.0.1"]
    assert f"chain {here.simulation.chain.chain_id}, announces new heads" in lines["websocket ws://127.0.0.1"]

    here.configure(
        execution=f'audit_blocks_per_s = 0\n[contracts]\nlido_locator = "{address}"\nwrapper_factory = "{VAULT}"'
    )
    bad = await here.run("check", "--json")
    assert (bad.code, bad.words) == (1, [])
    assert bad.json["ok"] is False
    assert [check["what"] for check in bad.json["checks"] if not check["ok"]] == ["contracts.wrapper_factory"]
    (broken,) = [check for check in bad.json["checks"] if not check["ok"]]
    assert broken["detail"] == f"{VAULT} has no code on this chain"
    assert (broken["result"], broken["advice"]) == ("failed", "Correct the address")
    assert (bad.json["failed"], bad.json["verdict"].split(" of ")[0]) == (1, "1")
    assert "execution.audit_blocks_per_s is 0" in bad.stdout

    here.config.write_text(here.config.read_text().replace(str(here.receivers.ca_path), "absent.pem"))
    text = (await here.run("check")).stdout
    assert f"✗ delivery.ca_file: delivery.ca_file {here.home}/absent.pem cannot be used (No such file" in text
    assert "). Name the certificate of the receivers' authority.\n" in text
    assert "2 of " in text.splitlines()[-1]
    plain = (await here.shell.freshly().run("check", PYTHONIOENCODING="ascii")).stdout
    assert plain.isascii()
    assert "FAIL delivery.ca_file: " in plain
    assert "ok   database: " in plain


async def test_check_distinguishes_nodes(here: Place) -> None:
    await here.node.stop()
    here.config.write_text(here.config.read_text().replace(here.url, f'{here.url}/key", "{here.url}'))
    socket = f"{here.url.replace('http', 'ws')}/key"
    done = await here.run("check", "--json", VAULTEVENTS_EXECUTION__WEBSOCKET_URLS=socket)
    first, second = [check for check in done.json["checks"] if check["what"].startswith("node ")]
    assert first["what"] != second["what"]
    assert "/key" not in done.stdout + done.stderr
    assert done.code == 1
    assert first["detail"] == "cannot be reached (ClientConnectorError)"
    (announcing,) = [check for check in done.json["checks"] if check["what"].startswith("websocket ws://127.0.0.1#")]
    assert (announcing["ok"], announcing["detail"]) == (False, first["detail"])


async def test_check_beside_a_running_service(here: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    here.configure(api=f"port = {port}")
    running = await here.shell.start("run")
    await running.said('"api_listens"')
    beside = (await here.run("check", "--json")).ok()
    (await running.end()).ok()
    (api,) = [found for found in beside.json["checks"] if found["what"] == "api"]
    assert api["detail"] == f"127.0.0.1 port {port} is served by a vaultevents that runs"
    assert [line["event"] for line in beside.logs][:1] == ["check_started"]


async def test_status_before_anything_was_read(here: Place) -> None:
    found = await here.status()
    assert found["network"] == "devnet"
    assert found["head"] == here.simulation.chain.finalized_number
    assert (found["accounts"], found["vaults"], found["webhooks"], found["events"]) == (0, 0, 0, 0)
    assert (found["cursors"], found["deliveries"]) == ([], {})
    text = (await here.run("status")).ok().stdout
    assert "no stream has been read yet: start 'vaultevents run'" in text
    await here.node.stop()
    alone = await here.status()
    assert alone["head"] is None
    assert "cannot be reached" in alone["head_problem"]


async def test_accounts(here: Place) -> None:
    assert "no accounts yet" in (await here.run("account", "list")).ok().stdout
    assert (await here.run("account", "add", "acme", "--name", "ACME [red]:fire:", "--json")).ok().json == {
        "id": "acme",
        "name": "ACME [red]:fire:",
    }
    (await here.run("account", "add", "zeta")).ok()
    (acme, zeta) = (await here.run("account", "list", "--json")).ok().json["accounts"]
    assert (acme["id"], acme["name"], zeta["name"]) == ("acme", "ACME [red]:fire:", "zeta")
    assert "ACME [red]:fire:" in (await here.run("account", "list")).ok().stdout
    assert "there is already an account 'acme'" in (await here.run("account", "add", "acme")).error


async def test_vaults(here: Place) -> None:
    head = here.simulation.chain.finalized_number
    assert head is not None
    (await here.run("account", "add", "acme")).ok()
    assert "no vaults yet" in (await here.run("vault", "list")).ok().stdout

    first = (await here.run("vault", "add", "acme", "one", VAULT, "--queue", QUEUE, "--unchecked", "--json")).ok().json
    assert first == {
        "accountId": "acme",
        "id": "one",
        "address": VAULT,
        "withdrawalQueueAddress": QUEUE,
        "spans": [{"firstBlock": head + 1, "lastBlock": None}],
        "backfills": [],
    }
    created = "0x" + here.simulation.registrations[0].address.hex()
    second = (await here.run("vault", "add", "acme", "two", created, "--start-block", "creation", "--json")).ok()
    assert second.json["spans"] == [{"firstBlock": 1, "lastBlock": None}]
    (note,) = second.json["notes"]
    assert note.startswith("contracts.lido_locator is not set, so it is only known that there is a contract")
    earlier = (await here.run("vault", "add", "acme", "one", VAULT, "--start-block", "5", "--unchecked", "--json")).ok()
    assert earlier.json["spans"] == [{"firstBlock": 5, "lastBlock": None}]
    assert (
        "is already registered like this" in (await here.run("vault", "add", "acme", "one", VAULT, "--unchecked")).error
    )

    listed = (await here.run("vault", "list", "acme", "--json")).ok().json["vaults"]
    assert [item["id"] for item in listed] == ["one", "two"]
    table = (await here.run("vault", "list")).ok().stdout.splitlines()
    assert table[0].split() == ["account", "vault", "address", "queue", "blocks"]
    assert table[1].split() == ["acme", "one", VAULT, QUEUE, "5.."]

    removed = (await here.run("vault", "remove", "acme", "one", "--json")).ok().json
    assert removed["spans"] == [{"firstBlock": 5, "lastBlock": head}]
    assert "no vault 'one' that is registered now" in (await here.run("vault", "remove", "acme", "one")).error


async def test_the_protocols_own_queue_is_refused(here: Place) -> None:
    here.configure(execution=f'[contracts]\ncore_withdrawal_queue = "{QUEUE}"')
    (await here.run("account", "add", "acme")).ok()
    done = await here.run("vault", "add", "acme", "one", VAULT, "--queue", QUEUE.lower(), "--start-block", "1")
    assert "is the protocol's own withdrawal queue" in done.error
    assert (await here.run("vault", "list", "--json")).ok().json == {"vaults": []}


async def test_webhooks(here: Place) -> None:
    (await here.run("account", "add", "acme")).ok()
    (await here.run("vault", "add", "acme", "one", VAULT, "--start-block", "1", "--unchecked")).ok()
    assert "no webhooks yet" in (await here.run("webhook", "list", "acme")).ok().stdout
    filters = ["--event-type", "funding_received", "--event-type", "withdrawal_claimed", "--vault", "one"]
    url = "https://hooks.example/in?token=1"
    added = (await here.run("webhook", "add", "acme", url, *filters, "--json")).ok().json
    secret = added.pop("secretToken")
    assert secret.startswith("whsec_")
    assert added == {
        "id": added["id"],
        "url": url,
        "eventTypes": ["funding_received", "withdrawal_claimed"],
        "stakingVaultIds": ["one"],
        "active": True,
    }
    people = (await here.run("webhook", "add", "acme", "https://[2606:4700::1]:8443/a")).ok().stdout.splitlines()
    assert people[-1].startswith("whsec_")

    everything = await here.run("webhook", "list", "acme", "--json")
    assert {webhook["url"] for webhook in everything.ok().json["webhooks"]} == {url, "https://[2606:4700::1]:8443/a"}
    table = (await here.run("webhook", "list", "acme")).ok()
    assert url in table.stdout
    assert "https://[2606:4700::1]:8443/a" in table.stdout
    assert "whsec_" not in everything.stdout + table.stdout + table.stderr

    assert (await here.run("webhook", "remove", "acme", added["id"], "--json")).ok().json == {
        "id": added["id"],
        "removed": True,
    }
    assert "has no webhook" in (await here.run("webhook", "remove", "acme", added["id"])).error
    assert len((await here.run("webhook", "list", "acme", "--json")).ok().json["webhooks"]) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_run_ends_cleanly_on_a_signal(here: Place, number: signal.Signals) -> None:
    """The attempt that is under way is finished first."""
    hook = (await here.subscribed())["acme"]
    hook.behaviour = always(Hang())
    here.configure(delivery="timeout_s = 1.0")
    running = await here.shell.start("run")
    await hook.arrivals(1)
    ended = (await running.end(number)).ok()
    assert ended.stdout == ""
    assert [line["left"] for line in ended.logs if line["event"] == "dispatch_drained"] == [0]
    assert "timeout" in [line.get("error") for line in ended.logs]


async def test_run_ends_at_once_on_a_second_signal(here: Place) -> None:
    hook = (await here.subscribed())["acme"]
    hook.behaviour = always(Hang())
    running = await here.shell.start("run")
    await hook.arrivals(1)
    running.send_signal(signal.SIGINT)
    await running.said('"stopping"')
    ended = await running.end(signal.SIGINT)
    assert ended.code == -signal.SIGINT
    assert ended.words == []


async def test_run_that_is_stopped_while_it_starts_ends_with_0(here: Place) -> None:
    here.node.faults.rates[Fault.HANG] = 1.0
    running = await here.shell.freshly().start("run")
    await until(lambda: here.node.exchanges > 0)
    began_at_s = time.monotonic()
    (await running.end()).ok()
    assert time.monotonic() - began_at_s < 28, "it does not wait for the node, which has 30 s to answer"


async def test_roles_can_be_split(here: Place, server: ServerAddress) -> None:
    hook = (await here.subscribed())["acme"]
    watcher = await here.shell.start("run", "--only", "watch")
    async with asking(server, here.schema) as connection:
        async with asyncio.timeout(WAIT_TIMEOUT_S):
            while not await connection.fetchval("select count(*) from events"):
                await asyncio.sleep(0.05)
    (await watcher.end()).ok()
    assert hook.ledger == []
    here.config.write_text(here.config.read_text().replace(f'"{here.url}"', ""))
    dispatcher = await here.shell.start("run", "--only", "dispatch")
    await hook.arrivals(1)
    (await dispatcher.end()).ok()
    assert (await here.run("run", "--only", "sleep")).code == 2


async def test_logs_are_json_in_a_pipe_and_text_when_asked_for(here: Place) -> None:
    running = await here.shell.freshly().start("run")
    await running.said("started")
    ended = (await running.end()).ok()
    assert ended.stdout == ""
    assert all(json.loads(line)["level"] for line in ended.stderr.splitlines())
    here.configure(log='format = "text"')
    running = await here.shell.start("run")
    await running.said("started")
    assert (await running.end()).logs == []


async def test_a_reader_that_leaves_is_no_error(here: Place) -> None:
    process = await asyncio.create_subprocess_shell(
        "python -m vaultevents status | true; exit ${PIPESTATUS[0]}",
        executable="/bin/bash",
        cwd=here.home,
        env=here.shell.environment | {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"},
        stderr=asyncio.subprocess.PIPE,
    )
    _, stderr = await process.communicate()
    assert b"Traceback" not in stderr
    assert b"Exception" not in stderr
    assert b"error" not in stderr


async def test_settings_from_the_environment_reach_the_commands(here: Place) -> None:
    here.config.write_text(here.config.read_text().replace(here.url, "http://127.0.0.1:1"))
    assert (await here.run("status", "--json", VAULTEVENTS_EXECUTION__URLS=here.url)).ok().json["head"] is not None


async def test_sigterm_ends_any_command_with_its_own_code(here: Place) -> None:
    (await here.run("status")).ok()  # which makes the key file, and says so
    here.node.faults.rates[Fault.HANG] = 1.0
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        ended = await ended_while_it_waits(here, number)
        assert (ended.code, ended.stdout, ended.stderr) == (code, "", "")


async def ended_while_it_waits(here: Place, number: signal.Signals) -> Ended:
    """Signal a `status` that waits for the node; start another if its 5 s for the node were over before it ended.

    An answer on stdout shows that they were, whatever the exit code: the signal came while it was written.
    """
    async with asyncio.timeout(2 * WAIT_TIMEOUT_S):
        while True:
            before = here.node.exchanges
            running = await here.shell.freshly().start("status")
            while here.node.exchanges == before and running.process.returncode is None:
                await asyncio.sleep(0.005)
            ended = await running.end(number)
            if not ended.stdout:
                return ended
