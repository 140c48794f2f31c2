"""webhook: the URLs to which events are delivered, changed by the code that the HTTP API uses."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from vaultevents.cli.delivery import attempt_json, outcome
from vaultevents.cli.options import AccountArgument, ConfigOption, JsonOption, duration_of, overlap_of, time_of
from vaultevents.cli.settings import settings_of
from vaultevents.cli.terminal import STYLES, Fact, Rows, complete, put, put_json, put_table, say
from vaultevents.core.errors import InputError
from vaultevents.core.sealing import NONCE_BYTES, Secret
from vaultevents.core.signing import SECRET_BYTES, new_secret
from vaultevents.core.webhooks import Webhook, check_event_types, check_url
from vaultevents.store import resends, webhook_search, webhooks
from vaultevents.store.webhook_search import FailedAttempt, RecentAttempts, SecretFacts, WebhookRow
from vaultevents.wiring.database import Store, open_store
from vaultevents.wiring.delivery import url_rules

webhook = typer.Typer(
    help="Add, list, show, pause, enable, test and remove the URLs to which events are delivered.", no_args_is_help=True
)

WebhookArgument = Annotated[
    str, typer.Argument(help="The webhook's id, as 'webhook list' shows it.", metavar="WEBHOOK")
]
ASK_EVERY_S = 0.2
FAILURES_SHOWN = 10


@webhook.command("add")
def webhook_add(
    account_id: AccountArgument,
    url: Annotated[str, typer.Argument(help="https URL that receives the events.", metavar="URL")],
    event_type: Annotated[
        list[str] | None,
        typer.Option(help="Only events of this type, such as funding_received; may be repeated.", metavar="TYPE"),
    ] = None,
    vault_id: Annotated[
        list[str] | None,
        typer.Option("--vault", help="Only events of this vault; may be repeated.", metavar="VAULT"),
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Add a webhook and show its signing secret, once."""
    settings = settings_of(config)
    added = Webhook(
        id=f"wh-{secrets.token_hex(12)}",
        account_id=account_id,
        url=check_url(url, url_rules(settings)),
        event_types=check_event_types(event_type or None),
        vault_ids=tuple(dict.fromkeys(vault_id)) if vault_id else None,
        active=True,
    )
    secret = Secret(new_secret(secrets.token_bytes(SECRET_BYTES)))

    async def work() -> None:
        async with open_store(settings) as store:
            nonce = secrets.token_bytes(NONCE_BYTES)
            await webhooks.create_webhook(store.database, added, secret, store.key, nonce)

    complete(work())
    if as_json:
        put_json({**_webhook_json(added), "secretToken": secret.reveal()})
    else:
        say(f"Added webhook {added.id}. Its secret, with which the receiver verifies, is shown only now:")
        say(secret.reveal())


@webhook.command("list")
def webhook_list(account_id: AccountArgument, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """List the webhooks of an account."""
    settings = settings_of(config)

    async def work() -> list[webhooks.StoredWebhook]:
        async with open_store(settings) as store:
            return await webhooks.list_webhooks(store.database, account_id)

    found = complete(work())
    if as_json:
        put_json({"webhooks": [{**_state_json(stored), "createdAt": stored.created_at} for stored in found]})
        return
    rows = [
        (
            stored.webhook.id,
            stored.webhook.url,
            "all" if stored.webhook.event_types is None else ", ".join(stored.webhook.event_types),
            "all" if stored.webhook.vault_ids is None else ", ".join(stored.webhook.vault_ids),
            _state(stored),
        )
        for stored in found
    ]
    put_table(("id", "url", "event types", "vaults", "state"), rows, "no webhooks yet: 'vaultevents webhook add'")


@webhook.command("show")
def webhook_show(webhook_id: WebhookArgument, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Show one webhook: its filters, how its newest attempts went, what is pending, and its last failures."""
    settings = settings_of(config)

    async def work() -> _Shown:
        async with open_store(settings) as store, store.database.statement() as connection:
            row = await webhook_search.webhook(connection, webhook_id)
            if row is None:
                raise InputError(
                    f"there is no webhook '{webhook_id}': 'vaultevents webhook list ACCOUNT' shows those of an account"
                )
            return _Shown(
                row,
                await webhook_search.recent_attempts(connection, webhook_id),
                await webhook_search.last_failures(connection, webhook_id, FAILURES_SHOWN),
                await webhook_search.secrets_of(connection, webhook_id),
            )

    shown = complete(work())
    if as_json:
        put_json(shown.as_json())
    else:
        put(shown.parts())


@dataclass(frozen=True, slots=True)
class _Shown:
    """What `webhook show` shows."""

    row: WebhookRow
    recent: RecentAttempts
    failures: list[FailedAttempt]
    secrets: list[SecretFacts]

    def as_json(self) -> dict[str, object]:
        row, recent = self.row, self.recent
        return {
            **_webhook_json(row.webhook),
            "accountId": row.webhook.account_id,
            "state": row.state,
            "createdAt": row.created_at,
            "deletedAt": row.deleted_at,
            "disabledReason": row.disabled_reason,
            "pausedUntil": row.paused_until,
            "parkedUntil": row.parked_until,
            "failuresInARow": row.failures,
            "pending": row.pending,
            "recentAttempts": {
                "number": recent.attempts,
                "accepted": recent.accepted,
                "successRate": recent.success_rate,
                "p50Ms": recent.p50_ms,
                "p95Ms": recent.p95_ms,
                "since": recent.since,
                "lastSuccessAt": recent.last_success_at,
            },
            "lastFailures": [{"eventId": of.event_id, **attempt_json(of.attempt)} for of in self.failures],
            "secrets": [{"createdAt": of.created_at, "validUntil": of.valid_until} for of in self.secrets],
        }

    def parts(self) -> Iterator[Fact | Rows]:
        row, recent, shown = self.row, self.recent, self.row.webhook
        yield Fact("webhook", f"{shown.id} of account {shown.account_id}")
        yield Fact("url", shown.url)
        yield Fact("types", "all" if shown.event_types is None else ", ".join(shown.event_types))
        yield Fact("vaults", "all" if shown.vault_ids is None else ", ".join(shown.vault_ids))
        yield Fact("state", self._state(), STYLES.get(row.state, ""))
        more = " or more" if row.pending >= webhook_search.PENDING_COUNTED else ""
        yield Fact("pending", f"{row.pending:,}{more} deliveries")
        if recent.success_rate is None:
            yield Fact("attempts", "none yet")
        else:
            times = f"p50 {recent.p50_ms} ms, p95 {recent.p95_ms} ms"
            yield Fact("attempts", f"{recent.success_rate:.1%} of the last {recent.attempts:,} were accepted; {times}")
        if row.failures:
            at = "" if row.first_failure_at is None else f", the first one at {_at(row.first_failure_at)}"
            yield Fact("failures", f"{row.failures} in a row{at}", "red")
        for secret in self.secrets:
            until = "" if secret.valid_until is None else f", valid until {_at(secret.valid_until)}"
            yield Fact("secret", f"since {_at(secret.created_at)}{until}")
        yield Rows.of(
            ("last failures", "event", "outcome"),
            [(_at(of.attempt.started_at), of.event_id, outcome(of.attempt)) for of in self.failures],
            "none of the newest attempts failed",
        )

    def _state(self) -> str:
        row = self.row
        if row.state == "paused":
            return "paused until 'enable'" if row.is_paused_for_good else f"paused until {_at(row.paused_until)}"
        if row.state == "parked":
            return f"parked by failures until {_at(row.parked_until)}"
        return f"off ({row.disabled_reason or 'switched off'})" if row.state == "off" else row.state


def _at(moment: datetime | None) -> str:
    return "-" if moment is None else moment.isoformat(timespec="seconds")


@webhook.command("resend")
def webhook_resend(
    webhook_id: WebhookArgument,
    event_id: Annotated[str, typer.Argument(help="The event's id.", metavar="EVENT")],
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send one event once more to a webhook, whatever the state of its delivery.

    The running service sends it; while the webhook is paused, it waits.
    """
    settings = settings_of(config)

    async def work() -> datetime | resends.Orphaned | None:
        async with open_store(settings) as store, store.database.transaction() as connection:
            account_id = await webhooks.account_of(connection, webhook_id)
            return await resends.request_resend(connection, account_id, webhook_id, event_id)

    asked_at = complete(work())
    if asked_at is None:
        raise InputError(
            f"there is no delivery of '{event_id}' to webhook {webhook_id}: 'vaultevents event show' lists its "
            "deliveries, and 'webhook recover' sends events that the webhook never had"
        )
    if isinstance(asked_at, resends.Orphaned):
        raise InputError(
            f"the block of '{event_id}' is no longer on the chain, so it is not sent: ask again when it is back"
        )
    if as_json:
        put_json({"id": webhook_id, "eventId": event_id, "requestedAt": asked_at})
    else:
        say(f"Asked for one attempt of {event_id} to webhook {webhook_id}: 'vaultevents event show' shows its outcome.")


@webhook.command("recover")
def webhook_recover(
    webhook_id: WebhookArgument,
    since: Annotated[
        str, typer.Option(help="From this time of events on: RFC 3339, or 24h for a day ago.", metavar="TIME")
    ],
    until: Annotated[str | None, typer.Option(help="Before this time, likewise.", metavar="TIME")] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send every event of a range of time that a webhook should have and that is neither delivered nor pending.

    Its present filter decides. A pause that its receiver asked for ends.
    """
    settings, now = settings_of(config), datetime.now(UTC)
    begin = time_of(since, "--since", now)
    end = None if until is None else time_of(until, "--until", now)
    if end is not None and end <= begin:
        raise InputError(f"--until '{until}' is not after --since '{since}': exchange them")

    async def work() -> int:
        async with open_store(settings) as store:
            number, next_ms = 0, _ms(begin)
            while True:  # a part at a time, so that no transaction is long
                async with store.database.transaction() as connection:
                    account_id = await webhooks.account_of(connection, webhook_id)
                    asked = await resends.request_recovery(
                        connection, account_id, webhook_id, next_ms, None if end is None else _ms(end)
                    )
                number += asked.count
                if asked.next_since_ms is None:
                    return number
                next_ms = asked.next_since_ms

    number = complete(work())
    if as_json:
        put_json({"id": webhook_id, "count": number, "since": begin, "until": end})
    else:
        say(f"Asked for {number:,} events to webhook {webhook_id}; the running service sends them.")


def _ms(moment: datetime) -> int:
    return (moment - datetime.fromtimestamp(0, UTC)) // timedelta(milliseconds=1)


@webhook.command("remove")
def webhook_remove(
    account_id: AccountArgument,
    webhook_id: WebhookArgument,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove a webhook.

    Its secret is erased, and what was still to be delivered to it is cancelled.
    """
    settings = settings_of(config)

    async def work() -> None:
        async with open_store(settings) as store:
            await webhooks.delete_webhook(store.database, account_id, webhook_id)

    complete(work())
    if as_json:
        put_json({"id": webhook_id, "removed": True})
    else:
        say(f"Removed webhook {webhook_id}.")


@webhook.command("rotate-secret")
def webhook_rotate_secret(
    account_id: AccountArgument,
    webhook_id: WebhookArgument,
    overlap: Annotated[
        str,
        typer.Option(
            help="How long the former secret stays valid, too, such as 30m or 24h, 7d at most; 0 after a disclosure.",
            metavar="TIME",
        ),
    ] = "24h",
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Give a webhook another signing secret and show it, once.

    Until the overlap ends each delivery has a signature by either, so the receiver can change over at any time.
    """
    settings = settings_of(config)
    overlap_s = overlap_of(overlap, most_days=7)
    secret = Secret(new_secret(secrets.token_bytes(SECRET_BYTES)))

    async def work() -> datetime:
        async with open_store(settings) as store:
            nonce = secrets.token_bytes(NONCE_BYTES)
            return await webhooks.rotate_secret(
                store.database, account_id, webhook_id, secret, store.key, nonce, overlap_s
            )

    until = complete(work())
    if as_json:
        put_json({"id": webhook_id, "secretToken": secret.reveal(), "previousValidUntil": until})
    else:
        former = f"valid until {until.isoformat(timespec='seconds')}" if overlap_s else "not valid any longer"
        say(f"Webhook {webhook_id} has a new secret; the former one is {former}. The new one is shown only now:")
        say(secret.reveal())


@webhook.command("enable")
def webhook_enable(webhook_id: WebhookArgument, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Switch a webhook on, also one that was switched off after failures, or end its pause.

    Its failures are forgotten, and what was kept for it is sent by the running service. Events that fired while it was
    off are sent only by 'webhook recover'.
    """
    settings = settings_of(config)

    async def work() -> webhooks.StoredWebhook:
        async with open_store(settings) as store:
            return await webhooks.switch_on(store.database, webhook_id)

    _say_state(complete(work()), as_json=as_json)


@webhook.command("pause")
def webhook_pause(
    webhook_id: WebhookArgument,
    lasting: Annotated[
        str | None,
        typer.Option(
            "--for", help="How long, such as 30m or 2h, 30d at most (default: until 'enable').", metavar="TIME"
        ),
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send nothing to a webhook for a time, or until 'enable'.

    Events are kept for it, and sent afterwards. Its owner can end the pause, too (PATCH {"active": true}).
    """
    settings = settings_of(config)
    pause_s = None if lasting is None else duration_of(lasting, "--for", most_days=30)

    async def work() -> webhooks.StoredWebhook:
        async with open_store(settings) as store:
            return await webhooks.pause(store.database, webhook_id, pause_s)

    _say_state(complete(work()), as_json=as_json)


def _say_state(stored: webhooks.StoredWebhook, *, as_json: bool) -> None:
    """Say whether a webhook is on, off or paused."""
    shown = stored.webhook
    if as_json:
        put_json(_state_json(stored))
    else:
        say(f"Webhook {shown.id} of account {shown.account_id} is {_state(stored)}.")


def _state_json(stored: webhooks.StoredWebhook) -> dict[str, object]:
    reason, until = stored.disabled_reason, stored.parked_until
    return {**_webhook_json(stored.webhook), "disabledReason": reason, "pausedUntil": until}


def _state(stored: webhooks.StoredWebhook) -> str:
    if not stored.webhook.active:
        return f"off ({stored.disabled_reason or 'switched off'})"
    if stored.parked_until is None or stored.parked_until < datetime.now(UTC):
        return "on"
    if stored.parked_until == webhooks.UNTIL_ENABLED:
        return "paused until 'enable'"
    return f"paused until {stored.parked_until.isoformat(timespec='seconds')}"


@webhook.command("test")
def webhook_test(
    webhook_id: WebhookArgument,
    wait_s: Annotated[
        float, typer.Option("--wait", help="Seconds to wait for the answer.", min=0, max=300, metavar="SECONDS")
    ] = 20.0,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send something that is no event to a webhook, and show what its receiver answers.

    The running service sends it, once, also to a webhook that is off. Exit code 1 when it was not accepted.
    """
    settings = settings_of(config)

    async def work() -> tuple[str, resends.TestResult | None]:
        async with open_store(settings) as store:
            now_ms = int((await store.database.now()).timestamp() * 1000)
            async with store.database.transaction() as connection:
                account_id = await webhooks.account_of(connection, webhook_id)
                found = await webhooks.find_webhook(connection, account_id, webhook_id)
                test_id = await resends.request_new_test(connection, found.webhook, secrets.token_hex(8), now_ms)
            return test_id, await _answer(store, webhook_id, test_id, wait_s)

    test_id, result = complete(work())
    accepted = result is not None and result.accepted
    if as_json:
        answer = None if result is None else asdict(result)
        put_json({"id": test_id, "webhookId": webhook_id, "accepted": accepted, "answer": answer})
    elif result is None:
        say(
            f"Asked for {test_id}, and it was not sent within {wait_s:g} s: see that 'vaultevents run' runs with the "
            f"role dispatch and that the webhook is not paused. Its receiver will see this id."
        )
    else:
        said = f": {result.excerpt}" if result.excerpt else ""
        outcome = f"status {result.status}{said}" if result.error is None else f"error {result.error}"
        say(f"Sent {test_id} in {result.duration_ms} ms: {'accepted' if accepted else 'not accepted'}, {outcome}")
    if not accepted:
        raise typer.Exit(1)


async def _answer(store: Store, webhook_id: str, test_id: str, wait_s: float) -> resends.TestResult | None:
    """Wait for what comes of a test; None when nothing has in time."""
    with suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            while True:
                async with store.database.statement() as connection:
                    if (result := await resends.test_result(connection, webhook_id, test_id)) is not None:
                        return result
                await asyncio.sleep(ASK_EVERY_S)
    return None


def _webhook_json(shown: Webhook) -> dict[str, object]:
    return {
        "id": shown.id,
        "url": shown.url,
        "eventTypes": shown.event_types,
        "stakingVaultIds": shown.vault_ids,
        "active": shown.active,
    }
