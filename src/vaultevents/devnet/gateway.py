"""An IPFS gateway on loopback that can answer in every wrong way."""

from __future__ import annotations

import asyncio
import gzip
import ssl
from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from urllib.parse import unquote

from aiohttp import web

from vaultevents.devnet.loopback import LoopbackServer

_CHUNK = bytes(64 * 1024)
_ENDLESS_BYTES = 10 * 2**30
_GATEWAY_PATH, _KUBO_PATH = "/ipfs/", "/api/v0/cat"
_WEB_PAGE = "<!doctype html><title>Gateway</title><h1>Please verify that you are human</h1>"


class Trouble(StrEnum):
    """One way in which a gateway fails."""

    MISSING = "missing"  # 404
    HTTP_429 = "http_429"
    HTTP_500 = "http_500"
    HANG = "hang"  # no answer at all
    DRIP = "drip"  # one byte in each tenth of a second
    HTML = "html"  # a web page with status 200
    TRUNCATED = "truncated"  # the first half, as if it were all
    CUT_OFF = "cut_off"  # the connection closes in the middle of the file
    WRONG_FILE = "wrong_file"  # another one of the files, or one byte more
    ENDLESS = "endless"  # 10 GiB without an announced length
    GZIP_BOMB = "gzip_bomb"  # 10 MB that expand to 10 GiB
    REDIRECT = "redirect"  # to `Gateway.redirect_to`


class Gateway:
    """Serves `files` by CID: `GET /ipfs/{cid}` as gateways do, `POST /api/v0/cat?arg={cid}` as a Kubo node does.

    `trouble` strikes every request, `troubles` those for a CID; both, and `files`, may be changed while it runs.
    `calls` counts requests by CID, `paths` lists the raw path and query of each.
    """

    def __init__(self, files: Mapping[str, bytes], tls: ssl.SSLContext | None = None) -> None:
        self.files = files
        self.trouble: Trouble | None = None
        self.troubles: dict[str, Trouble] = {}
        self.redirect_to = ""
        self.calls: Counter[str] = Counter()
        self.paths: list[str] = []
        self._server = LoopbackServer(self._answer, tls)

    async def start(self, port: int = 0) -> str:
        """Listen, on a free port unless one is named; returns the origin."""
        return await self._server.start(port)

    async def stop(self) -> None:
        """Stop listening and close all connections."""
        await self._server.stop()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self.paths.append(request.raw_path)
        cid = _asked(request)
        if cid is None:
            return web.Response(status=405 if request.path == _KUBO_PATH else 404, text="no such route")
        self.calls[cid] += 1
        trouble = self.troubles.get(cid, self.trouble)
        content = self.files.get(cid)
        if trouble is Trouble.MISSING or (content is None and trouble is None):
            return web.Response(status=404, text=f"failed to resolve /ipfs/{cid}: no link")
        return await self._deliver(request, cid, content or b"", trouble)

    async def _deliver(
        self, request: web.BaseRequest, cid: str, content: bytes, trouble: Trouble | None
    ) -> web.StreamResponse:
        match trouble:
            case Trouble.HTTP_429:
                return web.Response(status=429, text="too many requests", headers={"Retry-After": "60"})
            case Trouble.HTTP_500:
                return web.Response(status=500, text="internal server error")
            case Trouble.HANG:
                await asyncio.Event().wait()
            case Trouble.DRIP:
                return await _drip(request, content)
            case Trouble.HTML:
                return web.Response(text=_WEB_PAGE, content_type="text/html")
            case Trouble.TRUNCATED:
                return _file(content[: len(content) // 2])
            case Trouble.CUT_OFF:
                return await _cut_off(request, content)
            case Trouble.WRONG_FILE:
                return _file(self._other_than(cid, content))
            case Trouble.ENDLESS:
                return await _repeat(request, _CHUNK, _ENDLESS_BYTES // len(_CHUNK), {})
            case Trouble.GZIP_BOMB:
                bomb = _gzip_member()
                return await _repeat(request, bomb, _ENDLESS_BYTES // 2**20, {"Content-Encoding": "gzip"})
            case Trouble.REDIRECT:
                return web.Response(status=302, headers={"Location": self.redirect_to})
        return _file(content)

    def _other_than(self, cid: str, content: bytes) -> bytes:
        return next((other for name, other in self.files.items() if name != cid), content + b" ")


def _asked(request: web.BaseRequest) -> str | None:
    """The CID that a request names; None for another route."""
    if request.method == "POST" and request.path == _KUBO_PATH:
        return request.query.get("arg")
    if request.method == "GET" and request.path.startswith(_GATEWAY_PATH):
        return unquote(request.path.removeprefix(_GATEWAY_PATH))
    return None


def _file(content: bytes) -> web.Response:
    return web.Response(body=content, content_type="application/json")


@cache
def _gzip_member() -> bytes:
    """1 MiB of zeros; any number of members in a row are a gzip stream (RFC 1952, section 2.2)."""
    return gzip.compress(bytes(2**20), mtime=0)


async def _repeat(request: web.BaseRequest, piece: bytes, times: int, headers: Mapping[str, str]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/json", **headers})
    await response.prepare(request)
    for _ in range(times):
        await response.write(piece)
    return response


async def _drip(request: web.BaseRequest, content: bytes) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": str(len(content))})
    await response.prepare(request)
    for at in range(len(content)):
        await response.write(content[at : at + 1])
        await asyncio.sleep(0.1)
    return response


async def _cut_off(request: web.BaseRequest, content: bytes) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": str(len(content))})
    await response.prepare(request)
    await response.write(content[: len(content) // 2])
    if request.transport is not None:
        request.transport.close()
    return response
