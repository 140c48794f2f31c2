"""A DNS server on loopback: it answers, refuses, fails or is silent, as its table says."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Callable
from ipaddress import ip_address
from typing import Literal, cast

Answer = tuple[str, ...] | Literal["silent", "unknown", "failure"]
Table = Callable[[str], Answer]

AAAA = 28
_CODES = {"failure": 2, "unknown": 3}


class NameServer(asyncio.DatagramProtocol):
    """Answers A and AAAA queries by `table`, and keeps the names that it was asked for."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.asked: list[str] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.DatagramTransport, transport)

    @property
    def address(self) -> str:
        host, port = self.transport.get_extra_info("sockname")
        return f"{host}:{port}"

    def datagram_received(self, data: bytes, sender: tuple[str, int]) -> None:
        labels, position = [], 12
        while length := data[position]:
            labels.append(data[position + 1 : position + 1 + length].decode())
            position += 1 + length
        question, (kind,) = data[12 : position + 5], struct.unpack_from("!H", data, position + 1)
        name = ".".join(labels).lower()
        self.asked.append(name)
        answer = self.table(name)
        if answer == "silent":
            return
        addresses = [] if isinstance(answer, str) else [ip_address(text) for text in answer]
        records = [found.packed for found in addresses if (found.version == 6) == (kind == AAAA)]
        code = _CODES.get(answer, 0) if isinstance(answer, str) else 0
        head = data[:2] + struct.pack("!HHHHH", 0x8180 | code, 1, len(records), 0, 0)
        body = b"".join(struct.pack("!HHHIH", 0xC00C, kind, 1, 60, len(packed)) + packed for packed in records)
        self.transport.sendto(head + question + body, sender)


@contextlib.asynccontextmanager
async def name_server(table: Table) -> AsyncIterator[NameServer]:
    transport, server = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: NameServer(table), local_addr=("127.0.0.1", 0)
    )
    try:
        yield server
    finally:
        transport.close()
