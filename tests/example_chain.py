"""Run a chain with the contracts of the protocol on anvil's usual port, and fund a vault: `dev.py anvil`."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from http.client import HTTPException

import pytest
from eth_utils.address import to_checksum_address

import contracts_fixtures
import evm
from timeouts import WAIT_TIMEOUT_S

PORT = 8545
FUNDED_EVERY_S = 3
FUNDED_WEI = 10**17
NEXT = """\
A vault of the factory {factory} is funded every {every} s. In another terminal:

  python3 dev.py init --network devnet
  python3 dev.py account add acme
  python3 dev.py vault discover --factory {factory} --register acme --start-block creation
  python3 dev.py run --listen acme
"""


class TimedChain(evm.Chain):
    """A chain that also mines by the clock, so that blocks on demand have its time, too."""

    __slots__ = ()

    def mine(self, blocks: int = 1) -> None:
        """Add blocks with the time of the clock."""
        for _ in range(blocks):
            self.rpc("evm_mine")


def main() -> int:
    """Run until Ctrl-C or SIGTERM."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        evm.compiled()
        program = evm.anvil_path()
    except pytest.skip.Exception as missing:
        print(f"error: {missing}", file=sys.stderr)
        return 1
    options = ["--port", str(PORT), "--block-time", "1", "--slots-in-an-epoch", "1", "--silent"]
    process = subprocess.Popen([program, *options], stdin=subprocess.DEVNULL)
    try:
        chain = TimedChain(PORT, _accounts(process))
        protocol = contracts_fixtures.deploy_protocol(chain)
        created = protocol.create_vault()
        print(NEXT.format(factory=to_checksum_address(protocol.factory), every=FUNDED_EVERY_S), flush=True)
        while process.poll() is None:
            chain.submit(created.dashboard, value_wei=FUNDED_WEI)
            time.sleep(FUNDED_EVERY_S)
    except KeyboardInterrupt:
        return 0
    finally:
        process.terminate()
        process.wait()
    return 1


def _accounts(process: subprocess.Popen[bytes]) -> tuple[bytes, ...]:
    """Wait for anvil; return its rich accounts."""
    limit = time.monotonic() + WAIT_TIMEOUT_S
    while time.monotonic() < limit and process.poll() is None:
        try:
            accounts = evm.Chain(PORT, ()).rpc("eth_accounts")
        except (OSError, HTTPException):
            time.sleep(0.05)
            continue
        return tuple(bytes.fromhex(account[2:]) for account in accounts)
    sys.exit(f"error: anvil does not start on port {PORT}: see its message above, or free the port")


if __name__ == "__main__":
    sys.exit(main())
