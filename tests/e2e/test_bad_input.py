"""Wrong input and wrong surroundings: one clear sentence and exit code 1 (2 for usage), no traceback, nothing lost."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from command_line import CommandLine, Door, Place, asking, delivered, place, wanted
from timeouts import until
from vaultevents.devnet.chain import Chain
from vaultevents.devnet.execution import ExecutionServer
from vaultevents.devnet.simulation import Simulation
from vaultevents.store.postgres.embedded import EmbeddedPostgres, ServerAddress

pytestmark = pytest.mark.e2e

VAULT = "0x5FbDB2315678afecb367f032d93F642f64180aa3"


@pytest.fixture
async def here(tmp_path: Path, data_dir: Path, server: ServerAddress) -> AsyncIterator[Place]:
    simulation = Simulation(4)
    simulation.history(20, 30)
    async with place(tmp_path, data_dir, simulation) as found:
        yield found


async def everything(server: ServerAddress, here: Place) -> dict[str, Any]:
    """All rows that matter."""
    async with asking(server, here.schema) as connection:
        return {
            table: [tuple(row) for row in await connection.fetch(f"select * from {table} order by 1, 2")]
            for table in ("accounts", "vaults", "vault_spans", "webhooks", "webhook_secrets", "events", "deliveries")
        } | {"live": await connection.fetchval("select position from cursors where kind = 'live'")}


async def run_to_the_head(here: Place) -> None:
    """Registers, reads and delivers all there is, and stops."""
    hooks = await here.subscribed()
    running = await here.shell.start("run")
    await until(lambda: all(delivered(hook).keys() >= wanted(here.simulation, name) for name, hook in hooks.items()))
    (await running.end()).ok()


async def test_a_wrong_config_key(here: Place) -> None:
    here.configure(delivery="concurency = 5")
    done = await here.run("run")
    assert done.error == "vaultevents.toml: the key 'delivery.concurency' is not known: did you mean 'concurrency'?"


async def test_an_unknown_variable(here: Place) -> None:
    done = await here.run("status", VAULTEVENTS_DATABSE_URL="postgresql://me:s3cret@host/db")
    assert "the environment variable VAULTEVENTS_DATABSE_URL is not known: did you mean" in done.error
    assert "s3cret" not in done.stdout + done.stderr


async def test_no_configuration_at_all(tmp_path: Path) -> None:
    done = await CommandLine.of(tmp_path).run("run")
    assert done.error == (
        "there is no configuration file vaultevents.toml: make one with 'vaultevents init', or name it with --config"
    )


async def test_vaults_that_cannot_be(here: Place) -> None:
    (await here.run("account", "add", "acme")).ok()
    for arguments, sentence in (
        (["acme", "one", VAULT[:-1]], "is not an address: expected 0x and 40 hexadecimal digits"),
        (["acme", "one", VAULT.replace("5FbDB", "5fbDB")], "has a wrong checksum (EIP-55)"),
        (["acme", "one", VAULT, "--queue", "0xnothing"], "is not an address"),
        (["acme", "vault_1", VAULT], "'vault_1' cannot be a vault id: use 1 to 64 letters, digits and hyphens"),
        (["acme", "vault.1", VAULT], "'vault.1' cannot be a vault id"),
        (["nobody", "one", VAULT], "there is no account 'nobody': add it with 'vaultevents account add nobody'"),
        (["acme", "one", VAULT, "--start-block", str(2**63)], "is not a block: give a number, 'now' or 'creation'"),
        (["acme", "one", VAULT, "--start-block", "creation"], "has no code at the finalized block"),
        (["acme", "one", VAULT, "--start-block", "creation", "--unchecked"], "has no code at the finalized block"),
        (["acme", "one", VAULT], "it is an account, or a contract of another chain or of a later block"),
    ):
        options = [] if "--start-block" in arguments else ["--start-block", "1"]
        assert sentence in (await here.run("vault", "add", *arguments, *options)).error
    assert (await here.run("vault", "list", "--json")).json == {"vaults": []}


async def test_webhooks_that_cannot_be(here: Place) -> None:
    here.config.write_text(here.config.read_text().replace("127.0.0.0/8:*", "127.0.0.1/32:9443"))
    (await here.run("account", "add", "acme")).ok()
    for arguments, sentence in (
        (["http://hooks.example/"], "write https://host/path"),
        (["https://10.0.0.1/"], "is not a public address"),
        (["https://hooks.example/", "--event-type", "vault_exploded"], "'vault_exploded' is not an event type"),
        (["https://hooks.example/", "--vault", "one"], "account 'acme' has no vault 'one'"),
    ):
        assert sentence in (await here.run("webhook", "add", "acme", *arguments)).error


async def test_an_account_id_or_name_that_cannot_be(here: Place) -> None:
    assert "'a.b' cannot be an account id" in (await here.run("account", "add", "a.b")).error
    assert "cannot be printed" in (await here.run("account", "add", "acme", "--name", "a\x1b[2J")).error
    assert "cannot be an account id" in (await here.run("account", "add", "\u00fc")).error
    assert "is not UTF-8" in (await here.run("account", "add", os.fsdecode(b"\xff"))).error


async def test_wrong_usage(here: Place) -> None:
    listening = ["run", "--listen", "acme", "--dispatchers", "2"]
    for arguments in (["frobnicate"], ["run", "--frobnicate"], ["vault", "add", "acme"], listening):
        done = await here.shell.freshly().run(*arguments)
        assert (done.code, done.stdout) == (2, "")
        assert "Traceback" not in done.stderr
        assert "Error: " in done.stderr


async def test_a_node_of_another_chain(here: Place, server: ServerAddress) -> None:
    await run_to_the_head(here)
    before = await everything(server, here)
    other = ExecutionServer(Chain(99, chain_id=5))
    try:
        url = await other.start()
        for command in ("run", "replay --from-block 0 --to-block 0"):
            done = await here.run(*command.split(), VAULTEVENTS_EXECUTION__URLS=url)
            assert "chain" in done.error
            assert "5" in done.error
        done = await here.run("run", VAULTEVENTS_EXECUTION__URLS=url, VAULTEVENTS_CHAIN_ID="5")
        assert done.error == (
            f"this database belongs to chain {here.simulation.chain.chain_id}, and the configuration says 5: "
            "use the configuration of that chain, or another database (or data_dir)"
        )
    finally:
        await other.stop()
    twin = ExecutionServer(Chain(98, chain_id=here.simulation.chain.chain_id))  # the same id, another block 0
    try:
        url = await twin.start()
        done = await here.run("run", VAULTEVENTS_EXECUTION__URLS=url)
        assert "belongs to another network" in done.error
        check = await here.run("check", "--json", VAULTEVENTS_EXECUTION__URLS=url)
        assert [one["what"].split("#")[0] for one in check.json["checks"] if not one["ok"]] == ["node http://127.0.0.1"]
    finally:
        await twin.stop()
    assert await everything(server, here) == before


async def test_no_node_is_configured(here: Place) -> None:
    here.config.write_text(here.config.read_text().replace(f'"{here.url}"', ""))
    assert "execution.urls is empty: name the URL of your execution node" in (await here.run("run")).error
    assert "✗ node: execution.urls is empty" in (await here.run("check")).stdout


async def test_a_node_that_is_down_at_the_start(here: Place) -> None:
    await here.node.stop()
    done = await here.run("run")
    assert "cannot be reached (ClientConnectorError): see that the node runs, or name another one" in done.error


async def test_a_node_that_goes_and_returns(here: Place, server: ServerAddress) -> None:
    door = Door(here.url)
    here.url = await door.open()
    here.configure()
    hook = (await here.subscribed())["acme"]
    running = await here.shell.start("run")
    await until(lambda: delivered(hook).keys() >= wanted(here.simulation, "acme"))
    await door.shut()
    await running.said("stream_waits")
    before = await everything(server, here)
    for _ in range(6):
        here.simulation.step()
    await running.said("stream_waits", times=2)
    assert await everything(server, here) == before
    assert running.process.returncode is None
    await door.open()
    await until(lambda: delivered(hook).keys() >= wanted(here.simulation, "acme"))
    (await running.end()).ok()
    await door.shut()


@pytest.mark.parametrize("serve", ["on", "off"])
async def test_run_opens_the_ports_of_the_api_and_the_console_and_no_other(here: Place, serve: str) -> None:
    """The embedded database listens on a Unix socket."""
    here.configure(api=f'port = 0\nserve = "{serve}"')
    running = await here.shell.start("run")
    for event in (*(("api_listens",) if serve == "on" else ()), "console_listens"):
        await running.said(f'"{event}"')
    process = psutil.Process(running.pid)
    postmaster = [one for one in psutil.process_iter(["name", "cmdline"]) if is_server_of(one, here.data_dir)]
    assert postmaster
    family = [process, *process.children(recursive=True), *postmaster]
    open_ports = [link for one in family for link in one.net_connections("tcp") if link.status == psutil.CONN_LISTEN]
    ended = (await running.end()).ok()
    reported = {line["event"]: line["url"] for line in ended.logs if line["event"].endswith(("_listens", "_listen"))}
    assert reported.keys() == ({"api_listens", "console_listens"} if serve == "on" else {"console_listens"})
    assert sorted(reported.values()) == sorted(f"http://{link.laddr.ip}:{link.laddr.port}" for link in open_ports)
    assert all(url.startswith("http://127.0.0.1:") for url in reported.values())


async def test_a_port_in_use_is_one_sentence(here: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        here.configure(api=f"port = {port}")
        ended = await here.run("run")
    assert (ended.code, ended.error.count("\n")) == (1, 0)
    assert f"the API cannot listen on 127.0.0.1 port {port} (Address already in use)" in ended.error
    assert "api.port" in ended.error


async def test_an_argument_that_is_no_text(here: Place) -> None:
    reported = (await here.shell.freshly().run("webhook", "remove", "acme", "wh-\udcff")).error
    assert reported == r"the argument 'wh-\udcff' is not UTF-8: write it in this encoding"


async def test_only_an_api_that_is_off_is_refused(here: Place) -> None:
    here.configure(api='serve = "off"')
    assert 'api.serve is "off"' in (await here.run("run", "--only", "api")).error


def is_server_of(process: psutil.Process, data_dir: Path) -> bool:
    return process.info["name"] == "postgres" and any(str(data_dir) in part for part in process.info["cmdline"] or [])


async def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = await CommandLine.of(tmp_path).run("listen", "--secret", "whsec_" + "QUJD" * 8, "--port", str(port))
    assert f"cannot listen on port {port}" in done.error
    assert "in use" in done.error
    assert "choose another port" in done.error


async def test_a_database_of_a_newer_schema(here: Place, server: ServerAddress) -> None:
    await run_to_the_head(here)
    async with asking(server, here.schema) as connection:
        await connection.execute("insert into migrations (number, name, sha256) values (99, '0099_later.sql', '\\x00')")
    before = await everything(server, here)
    for command in ("run", "status"):
        done = await here.run(command)
        assert "this database was made by a newer vaultevents (it has the migration 0099_later.sql" in done.error
        assert "nothing was changed" in done.error
    assert await everything(server, here) == before
    assert (await here.run("check")).code == 1


async def test_databases_that_cannot_be_used(here: Place) -> None:
    key = "0" * 64
    url = "postgresql://me:s3cret@127.0.0.1:1/db"
    unreachable = await here.run("status", VAULTEVENTS_DATABASE_URL=url, VAULTEVENTS_MASTER_KEY=key)
    assert "cannot reach the database" in unreachable.error
    assert "start it, or fix database_url" in unreachable.error
    nonsense = await here.run("status", VAULTEVENTS_DATABASE_URL="postgresql://me:s3/cret@host:x/db")
    assert "database_url cannot be understood" in nonsense.error
    assert "cret" not in unreachable.stderr + nonsense.stderr
    schema = await here.run("status", VAULTEVENTS_DATABASE_SCHEMA="Robert'); drop")
    assert "cannot be a schema name" in schema.error


async def test_a_master_key_that_is_not_the_right_one(here: Place, server: ServerAddress) -> None:
    await here.subscribed()
    before = await everything(server, here)
    wrong = await here.run("run", VAULTEVENTS_MASTER_KEY="11" * 32)
    assert "secrets in this database are sealed with the master key" in wrong.error
    short = await here.run("run", VAULTEVENTS_MASTER_KEY="s3cret")
    assert "the master key must be 32 bytes in base64 or hex" in short.error
    assert "s3cret" not in short.stderr
    here.configure(top='master_key_file = "absent.key"')
    assert f"the master key file {here.home}/absent.key is missing: restore it" in (await here.run("run")).error
    (here.home / "broken.key").write_text("not a key")
    here.configure(top='master_key_file = "broken.key"')
    assert f"{here.home}/broken.key holds no master key" in (await here.run("run")).error
    assert await everything(server, here) == before


async def test_a_key_file_that_is_lost_is_not_replaced(here: Place) -> None:
    """A new one could open nothing, and would stand in the way of the old one when that is restored."""
    await here.subscribed()
    key_file, kept = here.data_dir / "master.key", here.home / "master.key"
    key_file.rename(kept)
    try:
        assert "master.key is missing: restore it from its copy" in (await here.run("status")).error
        assert not key_file.exists()
    finally:
        kept.rename(key_file)
    (await here.run("status")).ok()


async def test_database_url_needs_a_key(here: Place, server: ServerAddress) -> None:
    done = await here.run("status", VAULTEVENTS_DATABASE_URL=server.dsn)
    assert "database_url needs a master key" in done.error
    assert server.password not in done.stderr
    (await here.run("status", VAULTEVENTS_DATABASE_URL=server.dsn, VAULTEVENTS_MASTER_KEY="22" * 32)).ok()


async def test_files_that_are_not_what_they_should_be(here: Place) -> None:
    (here.home / "ca.txt").write_text("no certificate")
    text = here.config.read_text()
    here.config.write_text(text.replace(str(here.receivers.ca_path), "ca.txt"))
    assert "delivery.ca_file" in (found := (await here.run("run")).error)
    assert "it holds no PEM certificate" in found
    here.config.write_text(text.replace(str(here.receivers.ca_path), "absent.pem"))
    assert "No such file or directory" in (await here.run("run")).error
    here.config.write_text(text.replace(str(here.data_dir), str(here.config)))
    assert "choose another" in (await here.run("run")).error
    here.configure(execution='head = "latest"')
    assert "execution.head: 'latest' is not a head: write finalized, safe, or latest-N" in (await here.run("run")).error
    here.configure()
    here.config.write_text(here.config.read_text().replace(here.url, f'{here.url}", "{here.url}'))
    assert "the same execution node URL is configured twice" in (await here.run("run")).error


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
async def test_an_answer_that_cannot_be_written(here: Place) -> None:
    (await here.run("account", "list")).ok()  # makes the key file of this database and reports it
    process = await asyncio.create_subprocess_shell(
        f"exec {sys.executable} -m vaultevents account add acme > /dev/full",
        cwd=here.home,
        env=here.shell.environment,
        stderr=asyncio.subprocess.PIPE,
    )
    _, stderr = await process.communicate()
    assert process.returncode == 1
    assert stderr.decode().startswith("error: the work is done, but its answer cannot be written (No space left")
    assert stderr.count(b"\n") == 1
    assert [account["id"] for account in (await here.run("account", "list", "--json")).json["accounts"]] == ["acme"]


@pytest.fixture
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """90 MB: enough for a new database, and soon full."""
    place = tmp_path_factory.mktemp("disk")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=90m", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(disk: Path) -> Path:
    path = disk / "filling"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        while True:
            os.write(descriptor, bytes(4096))
    except OSError:
        return path
    finally:
        os.close(descriptor)


async def test_no_disk_at_the_first_start(tmp_path: Path, small_disk: Path) -> None:
    filling = fill(small_disk)
    async with place(tmp_path, small_disk / "data", Simulation(4)) as here:
        for _ in range(2):
            assert "no disk space left for the database" in (await here.run("status")).error
        shell = CommandLine.of(small_disk)
        assert "cannot write vaultevents.toml (No space left on device)" in (await shell.run("init")).error
        filling.unlink()
        (await here.run("status")).ok()


async def test_no_disk_while_running(tmp_path: Path, small_disk: Path) -> None:
    """It says so and waits; the cursor does not move; with room again it goes on, and nothing is lost."""
    simulation = Simulation(4, events_per_block=40)
    simulation.history(5, 30)
    async with place(tmp_path, small_disk / "data", simulation) as here:
        hooks = await here.subscribed()
        here.configure(execution="span_blocks = 1")
        running = await here.shell.start("run")
        await until(lambda: all(delivered(hook).keys() >= wanted(simulation, name) for name, hook in hooks.items()))
        filling = fill(small_disk)
        while not (text := running.stderr_so_far).count("No space left on device"):
            simulation.step()
            await asyncio.sleep(0.02)
        assert '"stream_waits"' in text
        with EmbeddedPostgres(small_disk / "data" / "postgres") as address:
            async with asking(address, here.schema) as connection:
                position = await connection.fetchval("select position from cursors where kind = 'live'")
                stored = await connection.fetchval("select count(*) from events")
            assert position < (simulation.chain.finalized_number or 0)
            assert stored == len(simulation.expected(through=position))
            blocked = await here.run("account", "add", "later")
            assert blocked.code == 0 or "No space left on device" in blocked.error
        filling.unlink()
        await until(lambda: all(delivered(hook).keys() >= wanted(simulation, name) for name, hook in hooks.items()))
        ended = (await running.end()).ok()
        assert "Traceback" not in ended.stderr
