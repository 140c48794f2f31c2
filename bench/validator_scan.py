"""The cost of finding the validators of a vault among 1.1 million: `python3 dev.py bench validator-scan --json`.

A server process makes the answers and serves them on loopback. Two fresh reader processes take turns reading the same
bytes over the same kind of connection: `BeaconChain.scan`, and the floor, which reads and forgets. Seconds are the best
of each one's rounds; the peak of memory is that of the whole reader process; a step is the CPU time of one callback of
the event loop. The last line is the result; without `--json` a table stands before it.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from _machine import peak_mb
from _result import print_result

VALIDATORS = 1_100_000
OURS_EVERY = 11_000
ROUNDS = 3
VAULT = bytes.fromhex("1111aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa2222")
ROOTS = 8192
FAR = 2**64 - 1
GOAL = {"peak_mb": 80.0, "step_ms": 20.0, "time_x_floor": 4.0}


def credentials(index: int) -> bytes:
    address = VAULT if index % OURS_EVERY == 0 else struct.pack("<QQI", index * 0x9E3779B97F4A7C15 % 2**64, index, 7)
    return b"\x01" + bytes(11) + address


def pubkey(index: int) -> bytes:
    return struct.pack("<6Q", *((index + turn) * 0x9E3779B97F4A7C15 % 2**64 for turn in range(6)))


def json_record(index: int) -> str:
    return (
        f'{{"index":"{index}","balance":"32001081775","status":"active_ongoing","validator":{{"pubkey":"0x'
        f'{pubkey(index).hex()}","withdrawal_credentials":"0x{credentials(index).hex()}",'
        '"effective_balance":"32000000000","slashed":false,"activation_eligibility_epoch":"312004",'
        f'"activation_epoch":"{312_010 + index % 9}","exit_epoch":"{FAR}","withdrawable_epoch":"{FAR}"}}}}'
    )


def json_body() -> Iterator[bytes]:
    yield b'{"execution_optimistic":false,"finalized":true,"data":['
    for first in range(0, VALIDATORS, 1000):
        text = ",".join(json_record(index) for index in range(first, min(VALIDATORS, first + 1000)))
        yield ("," if first else "").encode() + text.encode()
    yield b"]}"


def ssz_body() -> Iterator[bytes]:
    size = 264 + 64 * ROOTS + 8 + 2_000_000  # all that stands before the validators
    end = size + 121 * VALIDATORS
    yield bytes(264 + 64 * ROOTS) + struct.pack("<II", size, end) + bytes(2_000_000)
    for first in range(0, VALIDATORS, 1000):
        yield b"".join(
            pubkey(index)
            + credentials(index)
            + struct.pack("<Q?QQQQ", 32 * 10**9, False, 312_004, 312_010 + index % 9, FAR, FAR)
            for index in range(first, min(VALIDATORS, first + 1000))
        )
    yield bytes(9 * VALIDATORS)  # balances and the beginning of what follows


def serve() -> None:
    """Answers one request a connection; the large bodies are made before, so that their making is not measured."""
    small = {
        "/eth/v1/node/syncing": {"head_slot": "88", "sync_distance": "0", "is_syncing": False},
        "/eth/v1/config/spec": {"SLOTS_PER_HISTORICAL_ROOT": str(ROOTS)},
    }
    large = {
        "/eth/v1/beacon/states/finalized/validators": ("application/json", list(json_body())),
        "/eth/v2/debug/beacon/states/finalized": ("application/octet-stream", list(ssz_body())),
    }
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], sum(map(len, large["/eth/v1/beacon/states/finalized/validators"][1])), flush=True)
    while True:
        connection, _ = listener.accept()
        with connection:
            path = connection.recv(65536).split(b" ")[1].decode()
            kind, body = large.get(path) or ("application/json", [json.dumps({"data": small[path]}).encode()])
            head = (
                f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\neth-consensus-version: fulu\r\n"
                f"content-length: {sum(map(len, body))}\r\nconnection: close\r\n\r\n"
            )
            try:
                connection.sendall(head.encode())
                for part in body:
                    connection.sendall(part)
            except ConnectionError:
                continue  # the reader has seen enough


class Steps:
    """The longest callback of the event loop so far, in CPU time."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        handle: Any = asyncio.Handle
        run: Callable[[asyncio.Handle], None] = handle._run

        def timed(this: asyncio.Handle) -> None:
            before = time.thread_time()
            run(this)
            self.longest_s = max(self.longest_s, time.thread_time() - before)

        handle._run = timed


async def scan(url: str, ssz: bool, steps: Steps) -> dict[str, float]:
    from vaultevents.chain.beacon.client import BeaconChain, BeaconOptions
    from vaultevents.core.units import Address

    async with BeaconChain([url], BeaconOptions(ssz=ssz)) as chain:
        await asyncio.sleep(0)  # a step of its own for what was until here: the imports
        steps.longest_s = 0.0
        begin, cpu = time.perf_counter(), time.process_time()
        found = await chain.scan(frozenset({Address(VAULT)}))
        seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
        assert found.count == VALIDATORS, found.count
        assert [record.index for record in found.records] == list(range(0, VALIDATORS, OURS_EVERY))
        assert all(record.pubkey == pubkey(record.index) for record in found.records)
        assert (chain.counters.scanned_bytes < 200e6) == ssz
    return {"seconds": seconds, "cpu": cpu}


async def read(url: str, ssz: bool) -> dict[str, float]:
    from vaultevents.chain.upstream.http import Deadlines, new_session

    kind = "v2/debug/beacon/states/finalized" if ssz else "v1/beacon/states/finalized/validators"
    async with new_session(Deadlines()) as session:
        begin, cpu = time.perf_counter(), time.process_time()
        async with session.get(f"{url}/eth/{kind}") as response:
            while await response.content.readany():
                pass
        return {"seconds": time.perf_counter() - begin, "cpu": time.process_time() - cpu}


def measure(what: str, url: str, form: str) -> None:
    """What a reader process does: one reading, printed as JSON."""
    steps, ssz = Steps(), form == "ssz"
    reported = asyncio.run(scan(url, ssz, steps) if what == "scan" else read(url, ssz))
    print(json.dumps(reported | {"peak_mb": peak_mb(), "step_ms": steps.longest_s * 1000}))


def best(what: str, url: str, form: str) -> dict[str, float]:
    """One reading in a fresh process."""
    done = subprocess.run([sys.executable, __file__, what, url, form], check=True, capture_output=True, text=True)
    reported: dict[str, float] = json.loads(done.stdout)
    return reported


def compare(url: str) -> dict[str, Any]:
    figures: dict[str, float] = {"validators": VALIDATORS}
    floor: dict[str, float] = {}
    ratio: dict[str, float] = {}
    for form in ("json", "ssz"):
        rounds = [(best("scan", url, form), best("read", url, form)) for _ in range(ROUNDS)]
        scans, reads = [one for one, _ in rounds], [one for _, one in rounds]
        figures |= {
            f"{form}_s": min(one["seconds"] for one in scans),
            f"{form}_cpu_s": min(one["cpu"] for one in scans),
        }
        figures |= {f"{form}_{key}": max(one[key] for one in scans) for key in ("peak_mb", "step_ms")}
        floor |= {f"{form}_s": min(one["seconds"] for one in reads), f"{form}_cpu_s": min(one["cpu"] for one in reads)}
        floor |= {f"{form}_peak_mb": max(one["peak_mb"] for one in reads)}
        ratio[f"{form}_time_x"] = figures[f"{form}_s"] / floor[f"{form}_s"]
    ok = all(
        figures[f"{form}_peak_mb"] <= GOAL["peak_mb"]
        and figures[f"{form}_step_ms"] <= GOAL["step_ms"]
        and ratio[f"{form}_time_x"] <= GOAL["time_x_floor"]
        for form in ("json", "ssz")
    )
    rounded = [{key: round(value, 3) for key, value in part.items()} for part in (figures, floor, ratio)]
    reported = dict(zip(("figures", "floor", "ratio"), rounded, strict=True))
    return {"bench": "validator-scan", **reported, "goal": GOAL, "ok": ok}


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["serve"]:
        serve()
    if arguments[:1] in (["scan"], ["read"]):
        measure(*arguments)
        return 0
    with subprocess.Popen([sys.executable, __file__, "serve"], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            port, size = server.stdout.readline().split()
            result = compare(f"http://127.0.0.1:{port}")
        finally:
            server.kill()
    result["figures"]["json_body_mb"] = round(int(size) / 1e6, 1)
    return print_result(result, as_json="--json" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
