"""One JSON-RPC node: batches of calls, answers matched by id, what refusals mean for the next request."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import aiohttp
import msgspec

from vaultevents.chain.execution.rpc_errors import Refusal, backoff_s, classify
from vaultevents.chain.upstream.http import HttpExchange, Request, asked_pause_s, read_body
from vaultevents.chain.upstream.learned_range import LearnedRange
from vaultevents.chain.upstream.node import GarbledAnswer, RateLimited
from vaultevents.chain.upstream.redaction import scrub
from vaultevents.core.errors import NodeFault, RangeTooLarge

FULL_BLOCK_RECEIPTS_BYTES = 400 * 2**10
"""The receipts of a full mainnet block."""
RECEIPTS_BATCH_BYTES = 4 * 2**20
_NO_BATCH_STATUS = frozenset({400, 405, 415, 422, 501})


@dataclass(frozen=True, slots=True)
class Call:
    """One method call."""

    method: str
    params: tuple[Any, ...] = ()

    @property
    def is_log_range(self) -> bool:
        return self.method == "eth_getLogs" and "fromBlock" in self.params[0]


@dataclass(frozen=True, slots=True)
class RpcFailure:
    """An error answer to one call; `message` is scrubbed, `data` is that of a revert where there is any."""

    code: int
    message: str
    data: str = ""

    @property
    def refusal(self) -> Refusal:
        return classify(self.code, self.message)

    def __str__(self) -> str:
        return f"error {self.code} '{self.message}'"


RpcResponse = msgspec.Raw | RpcFailure


class _Split(Enum):
    """Why a batch got no answer as a whole: the node takes fewer calls at once, or all answers are too large."""

    CALLS = "calls"
    BYTES = "bytes"


class _Error(msgspec.Struct):
    code: int = 0
    message: str | None = None
    data: Any = None


class _Reply(msgspec.Struct):
    id: int | str | float | None = None
    result: msgspec.Raw = msgspec.Raw(b"")
    error: _Error | str | None = None


@dataclass(frozen=True, slots=True)
class _Response:
    status: int
    retry_after_s: float
    content: bytes | None  # None when it was more than the cap

    @property
    def pause_s(self) -> float:
        """The pause that a refusal asks for: by its header, else by its body."""
        return self.retry_after_s or backoff_s(self.content or b"")


_REPLIES = msgspec.json.Decoder(list[_Reply] | _Reply)


class RpcNode:
    """One node. `name` is its redacted name, `log_range` what was learned about its eth_getLogs limit."""

    def __init__(
        self, url: str, http: HttpExchange, log_range: LearnedRange, *, answer_bytes: int, batch_size: int
    ) -> None:
        self.name = http.name
        self.client = http.client
        self.log_range = log_range
        self._url = url
        self._http = http
        self._answer_bytes = answer_bytes
        self._batch_size = batch_size
        self._ids = itertools.count(1)
        self._receipts_bytes = float(FULL_BLOCK_RECEIPTS_BYTES)

    @property
    def receipts_at_once(self) -> int:
        """Of how many blocks the receipts are asked for in one batch, by the size of the last ones."""
        return max(1, min(self._batch_size // 2, int(RECEIPTS_BATCH_BYTES / self._receipts_bytes)))

    def learn_receipts_size(self, sizes: Sequence[int]) -> None:
        """Note how many bytes the receipts of some blocks took."""
        if sizes:
            self._receipts_bytes = max(1.0, max(sizes), self._receipts_bytes / 4)

    async def ask(self, calls: Sequence[Call], *, limit_bytes: int | None = None) -> list[RpcResponse]:
        """Return the answers in the order of `calls`, in batches of what the node was seen to take.

        `limit_bytes`: the most that is read of one answer, where it is not the usual limit. Raises `SourceUnavailable`,
        `RangeTooLarge` for one call whose answer (or for a log range, whose batch) is more than is read, `NodeFault`
        for an answer that is not JSON-RPC or does not match the calls.
        """
        answers: list[RpcResponse] = []
        at_most = len(calls)
        while len(answers) < len(calls):
            part = calls[len(answers) : len(answers) + min(at_most, self._batch_size)]
            outcome = await self.client.ask(partial(self._exchange, part, limit_bytes or self._answer_bytes))
            match outcome:
                case _Split.CALLS:
                    self._batch_size = max(1, len(part) // 2)
                case _Split.BYTES:
                    at_most = max(1, len(part) // 2)
                case _:
                    answers += outcome
        return answers

    async def _exchange(self, calls: Sequence[Call], limit_bytes: int) -> list[RpcResponse] | _Split:
        ids = [next(self._ids) for _ in calls]
        payload = [
            {"jsonrpc": "2.0", "id": at, "method": call.method, "params": call.params}
            for at, call in zip(ids, calls, strict=True)
        ]
        self.client.counters.calls += len(calls)
        body = msgspec.json.encode(payload if len(calls) > 1 else payload[0])
        response = await self._http.fetch(Request("POST", self._url, body), partial(self._read, limit_bytes))
        if response.content is None or response.status == 413:
            return self._too_large(calls)
        if response.status == 429:
            raise self._http.status_error(429, "", response.pause_s)
        replies = self._replies(response, batch=len(calls) > 1)
        if isinstance(replies, _Split):
            return replies
        return self._matched(calls, ids, replies, response)

    async def _read(self, limit_bytes: int, response: aiohttp.ClientResponse) -> _Response:
        """The body counts whatever the status is: many nodes answer errors with one of 400 or 500."""
        self._http.check_plain(response)
        return _Response(response.status, asked_pause_s(response), await read_body(response, limit_bytes))

    def _too_large(self, calls: Sequence[Call]) -> _Split:
        if len(calls) > 1 and not any(call.is_log_range for call in calls):
            return _Split.BYTES
        raise RangeTooLarge(self.name, f"its answer to {calls[0].method} is too large")

    def _replies(self, response: _Response, *, batch: bool) -> list[_Reply] | _Split:
        status, content = response.status, response.content or b""
        try:
            replies = _REPLIES.decode(content)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            replies = None
        if isinstance(replies, list):
            return replies
        if isinstance(replies, _Reply) and not (batch and replies.error is None):
            failure = self._failure(replies)
            if batch and failure is not None and failure.refusal is not Refusal.RATE:
                return _Split.CALLS
            return [replies]
        if batch and (status in _NO_BATCH_STATUS or b"batch" in content[:1000].lower()):
            return _Split.CALLS
        if status != 200:
            advice = "" if status >= 500 else "; is the URL (with its key) right?"
            raise self._http.status_error(status, f"HTTP status {status}{advice}", response.pause_s)
        # a web page, or JSON that was cut: often of one machine behind the URL, so the same question may be answered
        raise GarbledAnswer(self.name, f"an answer of {len(content)} bytes that is not JSON-RPC")

    def _failure(self, reply: _Reply) -> RpcFailure | None:
        match reply.error:
            case None:
                return None
            case str(message):
                return RpcFailure(0, scrub(message, self._url))
            case error:
                data = error.data if isinstance(error.data, str) and error.data.startswith("0x") else ""
                return RpcFailure(error.code, scrub(_message(error), self._url), data)

    def _matched(
        self, calls: Sequence[Call], ids: Sequence[int], replies: Sequence[_Reply], response: _Response
    ) -> list[RpcResponse] | _Split:
        failures = {at: failure for at, reply in enumerate(replies) if (failure := self._failure(reply))}
        refusals = {failure.refusal: failure for failure in failures.values()}
        if Refusal.RATE in refusals:
            raise RateLimited(self.name, str(refusals[Refusal.RATE]), response.pause_s)
        if Refusal.BATCH in refusals and len(calls) > 1:
            return _Split.CALLS
        if len(replies) == 1 and len(calls) == 1 and replies[0].id is None and failures:
            return [failures[0]]  # a server that could not read the id answers null (JSON-RPC 2.0 §5)
        by_id: dict[object, RpcResponse] = {}
        for at, reply in enumerate(replies):
            if reply.id not in ids or isinstance(reply.id, float) or reply.id in by_id:
                raise NodeFault(self.name, "an answer with an id that was not asked, or was answered before")
            by_id[reply.id] = failures.get(at, reply.result)
            if at not in failures and not len(memoryview(reply.result)):
                raise NodeFault(self.name, "an answer with neither a result nor an error")
        if len(by_id) < len(ids):
            raise NodeFault(self.name, f"only {len(by_id)} answers to {len(ids)} calls")
        if len(calls) > 1 and any(
            refused.refusal is Refusal.SIZE and not call.is_log_range
            for call, at in zip(calls, ids, strict=True)
            if isinstance(refused := by_id[at], RpcFailure)
        ):
            return _Split.BYTES
        return [by_id[at] for at in ids]


def _message(error: _Error) -> str:
    """The message of an error, and its data where only they say what is meant."""
    message = error.message or ""
    if error.data is None or classify(error.code, message) is not Refusal.OTHER:
        return message
    whole = f"{message}: {msgspec.json.encode(error.data)[:1000].decode(errors='replace')}"
    return message if classify(error.code, whole) is Refusal.OTHER else whole
