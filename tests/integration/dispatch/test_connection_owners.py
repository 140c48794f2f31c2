"""A kept connection serves one owner: no answer to one account's POST is taken for the answer to another's."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sender_factories import BODY, HEADERS, NAME, OK, receiving, sender
from vaultevents.devnet.certificates import Authority
from vaultevents.dispatch.sender import Reply

pytestmark = pytest.mark.integration

REFUSED = b"HTTP/1.1 500 Refused\r\nContent-Length: 2\r\n\r\nno"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


async def test_a_late_second_answer_settles_nothing_of_another_owner(authority: Authority) -> None:
    late: list[asyncio.StreamWriter] = []

    async def answer(writer: asyncio.StreamWriter) -> None:
        if writer in late:  # the second request on this connection is answered by what the first one left behind
            writer.write(OK)
        elif not late:
            late.append(writer)
            writer.write(OK)
        else:
            writer.write(REFUSED)

    async with receiving(answer, authority.server(NAME)) as receiver, sender(authority) as sending:
        assert (await sending.send(receiver.url, BODY, HEADERS, "hostile")).status == 200
        for _ in range(6):
            assert (await sending.send(receiver.url, BODY, HEADERS, "good")).status == 500
        assert not sending.try_post(receiver.url, BODY, HEADERS, lambda _: None, "third")
        assert receiver.connections == 2, "one for each owner, kept"
        assert (await sending.send(receiver.url, BODY, HEADERS, "hostile")).status == 200
        assert receiver.connections == 2


async def test_bytes_that_nobody_asked_for_end_an_idle_connection(authority: Authority) -> None:
    async def twice(writer: asyncio.StreamWriter) -> None:
        if receiver.connections == 1:
            writer.write(OK)
            await asyncio.sleep(0.02)
            writer.write(OK)
        else:
            writer.write(REFUSED)

    async with receiving(twice, authority.server(NAME)) as receiver, sender(authority) as sending:
        assert (await sending.send(receiver.url, BODY, HEADERS)).status == 200
        await asyncio.sleep(0.2)
        assert (await sending.send(receiver.url, BODY, HEADERS)).status == 500
        assert receiver.connections == 2


@contextmanager
def answering_twice(authority: Authority, said: threading.Event) -> Iterator[int]:
    """A receiver on a thread, so that it can speak while the event loop does something else."""
    server = socket.create_server(("127.0.0.1", 0))
    context = authority.server(NAME)

    def serve() -> None:
        accepted, _ = server.accept()
        with context.wrap_socket(accepted, server_side=True) as speaking:
            while BODY not in speaking.recv(65536):
                pass
            speaking.sendall(OK)
            said.wait(60)
            speaking.sendall(OK)
            said.clear()
            time.sleep(0.5)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield server.getsockname()[1]
    finally:
        server.close()
        thread.join(60)


def stand_still_while(said: threading.Event) -> None:
    """Keep the event loop from reading until the receiver has said it all."""
    while said.is_set():
        time.sleep(0.01)
    time.sleep(0.05)


async def test_bytes_that_were_not_read_yet_are_not_taken_for_the_next_answer(authority: Authority) -> None:
    said = threading.Event()
    with answering_twice(authority, said) as port:
        async with sender(authority) as sending:
            url = f"https://{NAME}:{port}/"
            assert (await sending.send(url, BODY, HEADERS)).status == 200
            await asyncio.sleep(0.05)
            said.set()
            stand_still_while(said)
            replies: list[Reply] = []
            assert not sending.try_post(url, BODY, HEADERS, replies.append)
            await asyncio.sleep(0.05)
            assert replies == []
