"""Settings: the file, the environment over it, and one sentence for each way to get them wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vaultevents import config
from vaultevents.core.errors import ConfigError
from vaultevents.core.retries import SCHEDULE_S

pytestmark = pytest.mark.integration

SHIPPED = Path(__file__).resolve().parents[2] / "config"
MINIMAL = 'network = "devnet"\nchain_id = 1337\n'
VAULT = "0x889edC2eDab5f40e902b864aD4d7AdE8E412F9B1"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.upper().startswith("VAULTEVENTS_"):
            monkeypatch.delenv(name)


def write(directory: Path, text: str) -> Path:
    path = directory / "vaultevents.toml"
    path.write_text(text)
    return path


def problem(directory: Path, text: str) -> str:
    """The sentence for a file."""
    with pytest.raises(ConfigError) as caught:
        config.load(write(directory, text))
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize(("network", "chain_id"), [("devnet", 31337), ("hoodi", 560048), ("mainnet", 1)])
def test_the_files_that_are_shipped_are_right(network: str, chain_id: int) -> None:
    settings = config.load(SHIPPED / f"{network}.toml")
    assert (settings.network, settings.chain_id) == (network, chain_id)
    assert (settings.contracts.core_withdrawal_queue is None) == (network == "devnet")


@pytest.mark.parametrize("network", ["devnet", "hoodi", "mainnet"])
def test_every_default_that_a_shipped_file_shows_is_the_default(tmp_path: Path, network: str) -> None:
    """Lines such as `# batch_size = 100` may be uncommented without changing anything; examples are marked by words."""
    examples = (
        *("data_dir", "database_url", "master_key_file", "allow", "ca_file", "proxy_url", "plain_signature_header"),
        *(
            "certificate_file",
            "key_file",
            "public_origin",
            "trusted_proxies",
            "operator_secret_file",
            "webhook_url",
            "ask = ",
            "deposits_from_block",
        ),
    )
    shown = []
    for line in (SHIPPED / f"{network}.toml").read_text().splitlines():
        plain = line.removeprefix("# ")
        is_setting = plain != line and " = " in plain and plain.split(" = ")[0].isidentifier()
        shown.append(plain if is_setting and not plain.startswith(examples) else line)
    assert config.load(write(tmp_path, "\n".join(shown))) == config.load(SHIPPED / f"{network}.toml")


@pytest.mark.parametrize("network", ["devnet", "hoodi", "mainnet"])
def test_a_shipped_file_shows_every_setting(network: str) -> None:
    text = (SHIPPED / f"{network}.toml").read_text()
    tables = {name: info.annotation for name, info in config.Settings.model_fields.items()}
    for name, table in tables.items():
        if not (isinstance(table, type) and issubclass(table, config.Section)):
            assert name in text or name == "master_key"  # a secret: the environment's alone
        elif name != "contracts" or network != "devnet":
            assert [key for key in table.model_fields if f"{key} = " not in text] == []


def test_a_mistyped_key_is_refused_with_the_name_that_was_meant(tmp_path: Path) -> None:
    assert problem(tmp_path, MINIMAL + "databse_schema = 'x'\n") == (
        f"{tmp_path}/vaultevents.toml: the key 'databse_schema' is not known: did you mean 'database_schema'?"
    )
    assert "'delivery.concurency' is not known: did you mean 'concurrency'?" in problem(
        tmp_path, MINIMAL + "[delivery]\nconcurency = 5\n"
    )
    assert "the key 'frobnicate' is not known: remove it" in problem(tmp_path, MINIMAL + "frobnicate = 1\n")


def test_a_key_in_the_wrong_table_is_reported_with_its_place(tmp_path: Path) -> None:
    assert "'urls' is not known: it belongs under [execution]" in problem(tmp_path, MINIMAL + "urls = []\n")
    assert "'log.data_dir' is not known: it belongs above the first [table]" in problem(
        tmp_path, MINIMAL + "[log]\ndata_dir = '/x'\n"
    )


def test_a_key_that_would_be_an_argument_of_the_reader_is_only_an_unknown_key(tmp_path: Path) -> None:
    assert "the key '_env_prefix' is not known" in problem(tmp_path, MINIMAL + "_env_prefix = 'X_'\n")
    assert "the key '_env_file' is not known" in problem(tmp_path, MINIMAL + "_env_file = 'secrets'\n")


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    assert "'chain_id' is missing: add it" in problem(tmp_path, 'network = "devnet"\n')
    assert "'network' is missing" in problem(tmp_path, "")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (MINIMAL.replace("1337", '"many"'), "'chain_id' should be a valid integer"),
        (MINIMAL.replace("1337", "true"), "'chain_id' should not be true or false"),
        (MINIMAL.replace("devnet", "ropsten"), "'network' should be 'devnet', 'hoodi' or 'mainnet'"),
        ("execution = 5\n" + MINIMAL, "'execution' should be a table: write [execution]"),
        (MINIMAL + "[execution]\nurls = 5\n", "'execution.urls' should be a list"),
        (MINIMAL + "[execution]\nurls = [5]\n", "'execution.urls' should be a valid string"),
        (MINIMAL + "[execution]\nurls = ['ws://node']\n", "a node's URL begins with http:// or https://"),
        (MINIMAL + "[execution]\nwebsocket_urls = ['http://n']\n", "a WebSocket's URL begins with ws:// or wss://"),
        (MINIMAL + "[execution]\nwebsocket_urls = ['ws://']\n", "a WebSocket's URL has a host, and a port from 1 to"),
        (MINIMAL + "[execution]\nurls = ['http://h:x/k3y']\n", "a node's URL has a host, and a port from 1 to 65535"),
        (MINIMAL + "[execution]\nurls = ['http://[::1']\n", "a node's URL has a host, and a port from 1 to 65535"),
        (
            MINIMAL + "[execution]\nurls = ['http://one', 'http://two']\nagreement = 3\n",
            "the key 'execution.agreement' is not known: remove it: every node is asked, and one honest node suffices",
        ),
        (
            MINIMAL + "[execution]\nsuspicion_share = 0.5\n",
            "remove it: blocks with events are proven by their receipts now",
        ),
        (MINIMAL + "[execution]\nask = 0\n", "'execution.ask' should be greater than or equal to 1"),
        (MINIMAL + "[execution]\nblooms_per_day = -1\n", "should be greater than or equal to 0"),
        (MINIMAL + "[execution]\ncompleteness = 'most'\n", "'execution.completeness' should be 'union' or 'receipts'"),
        (MINIMAL + "[execution]\npoll_interval_s = 0\n", "'execution.poll_interval_s' should be greater than 0"),
        (MINIMAL + "[execution]\npoll_interval_s = inf\n", "'execution.poll_interval_s' should be a finite number"),
        (MINIMAL + "[execution]\npoll_interval_s = true\n", "'execution.poll_interval_s' should not be true or false"),
        (MINIMAL + "[execution]\nheaders = 'some'\n", "'execution.headers' should be 'every' or 'edges'"),
        (MINIMAL + "[delivery]\nports = [70000]\n", "'delivery.ports' should be less than"),
        (MINIMAL + "[delivery]\nallow = [5]\n", "'delivery.allow' should be a text"),
        (MINIMAL + "[delivery]\nallow = ['10.0.0.0/99']\n", "'10.0.0.0/99' is not a network"),
        (MINIMAL + "[delivery]\ndeny = ['lan']\n", "'lan' is not a network"),
        (MINIMAL + "[delivery]\nschedule = '5x'\n", "'5x' is not a retry delay"),
        (MINIMAL + "[delivery]\nschedule = [-5]\n", "'delivery.schedule' should be greater than 0"),
        (MINIMAL + "[delivery]\nschedule = []\n", "'delivery.schedule' should have at least 1 item"),
        (MINIMAL + "[delivery]\nschedule = 5\n", "'delivery.schedule' should be a list"),
        (MINIMAL + "[delivery]\nplain_signature_header = 'Host'\n", "'Host' cannot be the plain signature header"),
        (MINIMAL + "[delivery]\ntimeout_s = 20\nlease_s = 20\n", "lease_s (20 s) must exceed timeout_s (20 s)"),
        (MINIMAL + "[delivery]\nca_file = 5\n", "'delivery.ca_file' is not a valid path"),
        (MINIMAL + "data_dir = '~nobody-of-this-name/x'\n", "'data_dir': there is no home directory"),
        (MINIMAL + "data_dir = ''\n", "'data_dir' is empty: give it a value or remove it"),
        (MINIMAL + "database_url = ''\n", "'database_url' is empty: give it a value or remove it"),
        (MINIMAL + "[log]\nlevel = 'loud'\n", "'log.level' should be 'debug', 'info', 'warning' or 'error'"),
        (MINIMAL + "chain_id = 1\n", "is not valid TOML"),
    ],
)
def test_a_wrong_value_is_one_sentence_with_its_key(tmp_path: Path, text: str, sentence: str) -> None:
    assert sentence in problem(tmp_path, text)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (f"'{VAULT.replace('edC', 'eDc')}'", "wrong checksum (EIP-55)"),
        ("'0x1234'", "is not an address: expected 0x and 40 hexadecimal digits"),
        ("5", "should be a text"),
    ],
)
def test_a_bad_address_is_refused_wherever_it_stands(tmp_path: Path, value: str, sentence: str) -> None:
    one = problem(tmp_path, f"{MINIMAL}[contracts]\ncore_withdrawal_queue = {value}\n")
    assert "'contracts.core_withdrawal_queue'" in one
    assert sentence in one
    several = problem(tmp_path, f"{MINIMAL}[contracts]\nlazy_oracles = ['{VAULT}', {value}]\n")
    assert "'contracts.lazy_oracles'" in several
    assert sentence in several


def test_a_network_has_its_own_chain_id(tmp_path: Path) -> None:
    assert "'mainnet' is chain 1, and chain_id says 560048" in problem(
        tmp_path, 'network = "mainnet"\nchain_id = 560048\n'
    )


def test_what_cannot_be_read_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"there is no configuration file .*: make one with 'vaultevents init'"):
        config.load(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match=r"cannot read the configuration file .*: Is a directory"):
        config.load(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b'network = "\xe9"\n')
    with pytest.raises(ConfigError, match="is not valid TOML"):
        config.load(tmp_path / "latin.toml")
    monkeypatch.setenv("VAULTEVENTS_CONFIG", "")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"there is no configuration file vaultevents\.toml"):
        config.load()


def test_the_environment_stands_above_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = MINIMAL + "[execution]\nurls = ['http://file']\nbatch_size = 7\n[delivery]\nallow = ['10.0.0.0/8']\n"
    monkeypatch.setenv("VAULTEVENTS_CHAIN_ID", "99")
    monkeypatch.setenv("VAULTEVENTS_EXECUTION__URLS", "http://one/key, http://two")
    monkeypatch.setenv("VAULTEVENTS_DATABASE_URL", "postgresql://me:word@host/db")
    monkeypatch.setenv("VAULTEVENTS_DELIVERY__SCHEDULE", "1s, 2m")
    monkeypatch.setenv("VAULTEVENTS_DELIVERY__PORTS", "443,9443")
    monkeypatch.setenv("VAULTEVENTS_DELIVERY__DENY", "192.168.0.0/16")
    monkeypatch.setenv("VAULTEVENTS_CONTRACTS__LAZY_ORACLES", VAULT)
    settings = config.load(write(tmp_path, text))
    assert settings.chain_id == 99
    assert [url.get_secret_value() for url in settings.execution.urls] == ["http://one/key", "http://two"]
    assert settings.execution.batch_size == 7, "what the environment does not name stays as the file says"
    assert settings.database_url is not None
    assert settings.database_url.get_secret_value() == "postgresql://me:word@host/db"
    assert settings.delivery.schedule == (1, 120)
    assert settings.delivery.ports == {443, 9443}
    assert [str(network) for network in settings.delivery.deny] == ["192.168.0.0/16"]
    assert settings.contracts.lazy_oracles == (bytes.fromhex(VAULT[2:]),)


def test_an_empty_variable_is_as_if_it_were_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Container tools set variables to nothing where the operator gave none."""
    monkeypatch.setenv("VAULTEVENTS_DATABASE_URL", "")
    monkeypatch.setenv("VAULTEVENTS_EXECUTION__URLS", "")
    settings = config.load(write(tmp_path, MINIMAL + "[execution]\nurls = ['http://file']\n"))
    assert settings.database_url is None
    assert len(settings.execution.urls) == 1


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("VAULTEVENTS_DATABSE_URL", "did you mean VAULTEVENTS_DATABASE_URL?"),
        ("VAULTEVENTS_DELIVERY__CONCURENCY", "did you mean VAULTEVENTS_DELIVERY__CONCURRENCY?"),
        ("VAULTEVENTS_EXECUTION_URLS", "did you mean VAULTEVENTS_EXECUTION__URLS?"),
        ("vaultevents_databse_url", "did you mean VAULTEVENTS_DATABASE_URL?"),
        ("VAULTEVENTS_XYZZY", "remove it"),
        ("VAULTEVENTS_EXECUTION__", "is not known"),
        ("VAULTEVENTS_EXECUTION__URLS__0", "is not known"),
        ("VAULTEVENTS_EXECUTION", "is a table: set its parts, such as VAULTEVENTS_EXECUTION__URLS"),
    ],
)
def test_an_unknown_variable_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, sentence: str
) -> None:
    monkeypatch.setenv(name, "whatever")
    found = problem(tmp_path, MINIMAL)
    assert f"the environment variable {name}" in found
    assert sentence in found
    assert "whatever" not in found


def test_a_wrong_value_from_the_environment_names_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VAULTEVENTS_CHAIN_ID", "many")
    assert problem(tmp_path, MINIMAL).startswith("the environment variable VAULTEVENTS_CHAIN_ID should be a valid int")
    monkeypatch.delenv("VAULTEVENTS_CHAIN_ID")
    monkeypatch.setenv("VAULTEVENTS_DELIVERY__ALLOW", "10.0.0.0/8, lan")
    assert "the environment variable VAULTEVENTS_DELIVERY__ALLOW: 'lan' is not" in problem(tmp_path, MINIMAL)


def test_relative_paths_count_from_the_file_that_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    text = MINIMAL + "data_dir = 'data'\nmaster_key_file = '~/key'\n[delivery]\nca_file = '../ca.pem'\n"
    path = write(tmp_path, text)
    settings = config.load(path)
    assert settings.directory == settings.data_dir == tmp_path / "data"
    assert settings.master_key_file == Path("/home/me/key")
    assert settings.delivery.ca_file == tmp_path / "../ca.pem"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert config.load(Path("../vaultevents.toml")).directory.resolve() == tmp_path / "data"
    monkeypatch.setenv("VAULTEVENTS_DATA_DIR", "here")
    assert config.load(path).directory == tmp_path / "elsewhere" / "here", "a variable counts from where one stands"


def test_the_default_directory_is_one_per_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert config.load(write(tmp_path, MINIMAL)).directory == tmp_path / "vaultevents" / "devnet"


def test_values_given_by_the_program_never_mix_with_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VAULTEVENTS_DATABASE_URL", "postgresql://operator@production/db")
    monkeypatch.setenv("VAULTEVENTS_DEMO_DATABASE_URL", "postgresql://operator@production/db")
    monkeypatch.setenv("VAULTEVENTS_CHAIN_ID", "1")
    settings = config.given({"network": "devnet", "chain_id": 1337}, "demo")
    assert (settings.database_url, settings.chain_id) == (None, 1337)
    assert settings.delivery.schedule == SCHEDULE_S


def test_settings_cannot_be_changed(tmp_path: Path) -> None:
    settings: Any = config.load(write(tmp_path, MINIMAL))
    with pytest.raises(ValueError, match="frozen"):
        settings.chain_id = 5
    with pytest.raises(ValueError, match="frozen"):
        settings.delivery.concurrency = 5


SECRET = "s3cr3t-word"


def test_secrets_are_in_no_repr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VAULTEVENTS_MASTER_KEY", SECRET)
    monkeypatch.setenv("VAULTEVENTS_DATABASE_URL", f"postgresql://me:{SECRET}@host/db")
    monkeypatch.setenv("VAULTEVENTS_EXECUTION__URLS", f"https://host/{SECRET}")
    settings = config.load(write(tmp_path, MINIMAL))
    for text in (repr(settings), str(settings), repr(settings.execution), settings.model_dump_json()):
        assert SECRET not in text


@pytest.mark.parametrize(
    "text",
    [
        f"database_url = ['{SECRET}']\n",
        f"database_url = {{ {SECRET} = 1 }}\n",
        f"master_key = ['{SECRET}']\n",
        f"[execution]\nurls = ['{SECRET}']\n",
        f"[execution]\nurls = [['{SECRET}']]\n",
        f"[execution]\nurls = 'wss://host/{SECRET}'\n",
        f"database_url = '{SECRET}\n",
    ],
)
def test_secrets_are_in_no_message(tmp_path: Path, text: str) -> None:
    assert SECRET not in problem(tmp_path, MINIMAL + text)


FILES = """
import resource, sys
from vaultevents.daemon import _files_allow
hard = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
files = _files_allow(*map(int, sys.argv[2:]))
print(files.attempts, files.connections, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(
    ("hard", "wanted", "found"),
    [
        (8192, (4096, 1000), "4096 1000 5608"),
        (4096, (4096, 1000), "2688 896 4096"),  # what remains is for the database, the nodes and the process
        (1024, (0, 1000), "0 512 1024"),
        (1024, (4096, 0), "512 0 1024"),
        (600, (4096, 1000), "66 22 600"),
    ],
)
def test_descriptors_are_divided_between_deliveries_and_the_api(hard: int, wanted: tuple[int, int], found: str) -> None:
    command = [sys.executable, "-c", FILES, str(hard), *map(str, wanted)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert shown[-1] == found


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "console.example"])
def test_a_console_beyond_loopback_needs_tls_or_a_proxy(tmp_path: Path, host: str) -> None:
    text = f'network = "devnet"\nchain_id = 5\n[console]\nhost = "{host}"\n'
    sentence = problem(tmp_path, text)
    assert f"the console would send its login unencrypted from {host}" in sentence
    for more in (
        'trusted_proxies = ["10.0.0.2/32"]',
        'certificate_file = "a.pem"\nkey_file = "a.key"',
        'serve = "off"',
    ):
        assert config.load(write(tmp_path, text + more)).console.host == host
    assert "give both or none" in problem(tmp_path, f'{text}certificate_file = "a.pem"')


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost"])
def test_a_console_on_loopback_needs_none(tmp_path: Path, host: str) -> None:
    settings = config.load(write(tmp_path, f'network = "devnet"\nchain_id = 5\n[console]\nhost = "{host}"'))
    assert not settings.console.needs_proxy
