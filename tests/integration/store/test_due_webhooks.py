"""Claims visit marked webhooks only: every due one, at no cost for the others (rules D8 and P8)."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from datetime import timedelta
from uuid import uuid4

import pytest
from msgspec.structs import replace

from store_factories import (
    LEASE_S,
    account,
    assert_delivered,
    change,
    commit,
    funding,
    rows,
    settlement,
    shift_clock,
    simple_simulation,
    some_deliveries,
    take,
    values,
    vault,
    webhook,
)
from vaultevents.core.webhook_health import Parking
from vaultevents.store.deliveries import (
    LEAST_SHARE,
    NO_LIMITS,
    ClaimRequest,
    Delivery,
    Limits,
    Scarce,
    claim,
    next_due_s,
    settle,
    settle_and_claim,
)
from vaultevents.store.leases import end_leases, mark_queued
from vaultevents.store.outbox import Outbox
from vaultevents.store.pool import Connection, Database

pytestmark = pytest.mark.integration

PER_WEBHOOK = 3
PARKING = Parking(after=3, first=timedelta(seconds=5), longest=timedelta(seconds=20))
CLAIM = "select * from claim_due((500, gen_random_uuid(), 60, 10, '', 10, '{}', '{}', '{}', '{}'))"

# What a claim that looks at every webhook would find.
CLAIMABLE = """
select w.id from webhooks w cross join lateral (
    select coalesce(array_agg(each.id), '{}') as leased
    from leases l cross join unnest(l.delivery_ids) as each (id) where l.webhook_id = w.id
) flight
where w.active and w.deleted_at is null and (w.paused_until is null or w.paused_until <= db_now())
    and (w.parked_until is null or w.parked_until <= db_now())
    and cardinality(flight.leased) < case when w.parks > 0 then 1 else $1 end
    and exists (select from queue q where q.webhook_id = w.id and q.due_at <= db_now()
        and q.delivery_id <> all (flight.leased))
"""
IN_FLIGHT = "select webhook_id, sum(cardinality(delivery_ids))::int as number from leases group by webhook_id"

FLIP = """
update webhooks set paused_until = case when paused_until is null then db_now() + interval '1 h' end
where id = (select min(id) from webhooks)
"""


async def reads(connection: Connection, query: str) -> tuple[int, Counter[str]]:
    """How many rows a query answers, and how many it has read of the webhooks and of the queue."""

    async def so_far() -> Counter[str]:  # the session may have counts that it has not reported yet
        found = await connection.fetch(
            "select relname, (seq_tup_read + coalesce(idx_tup_fetch, 0))::int as number from pg_stat_xact_user_tables"
            " where relid in ('webhooks'::regclass, 'queue'::regclass)"
        )
        return Counter({row["relname"]: row["number"] for row in found})

    before = await so_far()
    answered = len(await connection.fetch(query))
    return answered, await so_far() - before


async def many_webhooks(database: Database, number: int, *, due: str, active: bool = True) -> None:
    """Webhooks of `acme` with a delivery each that is due then."""
    await account(database)
    await change(
        database,
        "insert into webhooks (id, account_id, url, active)"
        " select 'many-' || n, 'acme', 'https://x.example/', $2 from generate_series(1, $1::integer) n",
        number,
        active,
    )
    await change(
        database,
        "insert into queue (webhook_id, delivery_id, event_seq, attempts, due_at)"
        f" select id, row_number() over (), 1, 1, db_now() + interval '{due}' from webhooks",
    )


async def test_a_claim_without_work_reads_no_webhook(any_database: Database) -> None:
    """Each of them has a retry, far in the future."""
    await many_webhooks(any_database, 2_000, due="1 h")
    async with any_database.transaction() as connection:
        assert await reads(connection, CLAIM) == (0, {})
    due_s = await next_due_s(any_database)
    assert due_s is not None
    assert 3500 < due_s <= 3600


async def test_one_delivery_costs_the_same_beside_many_webhooks(any_database: Database) -> None:
    outbox = await simple_simulation(any_database)
    await change(
        any_database,
        "insert into webhooks (id, account_id, url, active) select 'many-' || n, 'acme', '', true"
        " from generate_series(1, 2000) n",
    )
    await change(
        any_database,
        "insert into queue (webhook_id, delivery_id, event_seq, attempts, due_at)"
        " select id, 100000 + row_number() over (), 1, 1, db_now() + interval '1 h' from webhooks",
    )
    await change(any_database, "update webhooks set active = false where id like 'many-%'")  # the fan-out goes to one
    await webhook(any_database)
    await commit(outbox, funding(1))
    async with any_database.transaction() as connection:
        found, read = await reads(connection, CLAIM)
    assert found == 1
    assert read["webhooks"] <= 3
    assert read["queue"] <= 3


async def test_a_webhook_that_is_off_costs_nothing_however_much_is_due_for_it(any_database: Database) -> None:
    await many_webhooks(any_database, 1, due="0 s")
    await change(
        any_database,
        "insert into queue (webhook_id, delivery_id, event_seq, due_at)"
        " select 'many-1', n, 1, db_now() from generate_series(2, 5000) n",
    )
    await change(any_database, "update webhooks set active = false")
    for _ in range(2):
        async with any_database.transaction() as connection:
            found, read = await reads(connection, CLAIM)
            assert (found, read["queue"]) == (0, 0)
    assert await values(any_database, "select 1 from due_webhooks") == []


async def test_without_its_mark_a_delivery_is_not_found_and_marking_all_finds_it(any_database: Database) -> None:
    """Negative control: claims do go by the marks."""
    outbox = await simple_simulation(any_database)
    await webhook(any_database)
    await change(any_database, "alter table queue disable trigger mark_inserted")
    await commit(outbox, funding(1))
    assert (await take(any_database)).deliveries == ()
    await mark_queued(any_database)
    assert len((await take(any_database)).deliveries) == 1


async def test_webhooks_with_slots_of_their_own_have_these_and_closed_accounts_get_none(any_database: Database) -> None:
    outbox = await simple_simulation(any_database)
    await account(any_database, "umbra")
    await vault(any_database, "u1", account_id="umbra", at="v1", first_block=1)
    grown, plain = await webhook(any_database), await webhook(any_database)
    other = await webhook(any_database, account_id="umbra")
    await commit(outbox, *(funding(number) for number in range(40)))

    first: list[Delivery] = []

    async def shares(limits: Limits) -> Counter[str]:
        found = await claim(any_database, ClaimRequest(500, uuid4(), LEASE_S, limits=limits))
        first.extend(found.deliveries)
        assert {delivery.target.account_id for delivery in found.deliveries if delivery.webhook_id == other.id} <= {
            "umbra"
        }
        return Counter(delivery.webhook_id for delivery in found.deliveries)

    assert await shares(Limits({grown.id: 25}, ("umbra",))) == {grown.id: 25, plain.id: 10}
    assert await shares(NO_LIMITS) == {other.id: 10}
    await settle(any_database, [settlement(one) for one in first if one.webhook_id == grown.id][:1])
    assert await shares(Limits({grown.id: 26, "unknown": 5})) == {grown.id: 2}


class Model:
    """Random work on a few webhooks; now and then a claim without limits has to leave nothing that it could take."""

    def __init__(self, database: Database, outbox: Outbox, seed: int) -> None:
        self.database = database
        self.outbox = outbox
        self.rng = random.Random(seed)
        self.held: list[Delivery] = []
        self.after = ""
        self.events = 0
        self.clock_s = 0.0

    async def commit(self) -> None:
        number = self.rng.randint(1, 4)
        await commit(self.outbox, *(funding(self.events + n) for n in range(number)))
        self.events += number

    async def claim(self) -> None:
        ids = await values(self.database, "select id from webhooks")
        scarce = Scarce(1, tuple(self.rng.sample(ids, 2))) if self.rng.random() < 0.3 else None
        limits = Limits({self.rng.choice(ids): 5}, ("acme",) if self.rng.random() < 0.2 else ())
        wanted = self.rng.randint(1, 12)
        request = ClaimRequest(wanted, uuid4(), LEASE_S, PER_WEBHOOK, self.after, scarce, limits)
        found = await claim(self.database, request)
        assert len(found.deliveries) <= wanted
        self.after = found.last
        self.held += found.deliveries

    async def accept(self) -> None:
        batch = self._some()
        if not batch:
            return
        accepted = [settlement(delivery) for delivery in batch]
        wanted = self.rng.choice((0, 1, 100))
        request = ClaimRequest(wanted, uuid4(), LEASE_S, PER_WEBHOOK)
        settled, found = await settle_and_claim(self.database, accepted, request)
        if settled is None:
            await settle(self.database, accepted, PARKING)
        self.held += found.deliveries

    async def refuse(self) -> None:
        now = await self.database.now()
        park_s = self.rng.choice((0.0, 0.0, 0.0, 30.0))
        refused = [
            settlement(delivery, "scheduled", 503, after_s=self.rng.uniform(1, 100), park_s=park_s)
            for delivery in self._some()
        ]
        await settle(self.database, [replace(one, started_at=now) for one in refused], PARKING)

    async def pass_time(self) -> None:
        """Mostly on, at times back: what was early is late then, and nothing is lost."""
        self.clock_s += self.rng.choice((1.0, 5.0, 40.0, 100.0, -30.0))
        await shift_clock(self.database, self.clock_s)
        await end_leases(self.database)

    async def switch(self) -> None:
        await change(self.database, "update webhooks set active = not active where id = $1", await self._webhook())

    async def release(self) -> None:
        await change(
            self.database,
            "update webhooks set paused_until = null, parked_until = null, parks = 0, failures = 0 where id = $1",
            await self._webhook(),
        )

    async def look(self) -> None:
        found = await claim(self.database, ClaimRequest(1000, uuid4(), LEASE_S, PER_WEBHOOK))
        self.held += found.deliveries
        assert await values(self.database, CLAIMABLE, PER_WEBHOOK) == []
        leased = await values(self.database, "select unnest(delivery_ids) from leases")
        assert len(leased) == len(set(leased))

    async def _webhook(self) -> str:
        found: str = self.rng.choice(await values(self.database, "select id from webhooks order by id"))
        return found

    def _some(self) -> list[Delivery]:
        self.rng.shuffle(self.held)
        number = self.rng.randint(0, len(self.held))
        some, self.held = self.held[:number], self.held[number:]
        return some

    async def drain(self) -> None:
        """All that is left is found by claims alone."""
        await change(self.database, "update webhooks set active = true")
        for _ in range(200):
            self.clock_s += LEASE_S + 50
            await shift_clock(self.database, self.clock_s)
            await end_leases(self.database)
            found = await claim(self.database, ClaimRequest(1000, uuid4(), LEASE_S, PER_WEBHOOK))
            await settle(self.database, [settlement(delivery) for delivery in found.deliveries], PARKING)
            if await values(self.database, "select 1 from queue limit 1") == []:
                return
        raise AssertionError(await rows(self.database, "select * from queue"))


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_happens_a_claim_finds_all_that_a_look_at_every_webhook_would(
    database: Database, seed: int
) -> None:
    outbox = await simple_simulation(database)
    for _ in range(5):
        await webhook(database)
    model = Model(database, outbox, seed)
    steps = [model.commit, model.claim, model.claim, model.accept, model.refuse, model.pass_time, model.look]
    for _ in range(100):
        await model.rng.choice([*steps, model.switch] if model.rng.random() < 0.2 else [*steps, model.release])()
    await model.drain()
    assert await values(database, "select distinct state from deliveries") == ["delivered"]


async def test_claims_settles_and_commits_at_once_lose_and_double_nothing(database: Database) -> None:
    """With a single slot each, so that every claim meets webhooks that are full and settles that free them."""
    outbox = await simple_simulation(database)
    for _ in range(3):
        await webhook(database)
    events, more = 150, True

    async def work() -> None:
        accepted: list[Delivery] = []
        while more or await values(database, "select 1 from queue limit 1"):
            batch = [settlement(delivery) for delivery in accepted]
            if batch:
                settled, found = await settle_and_claim(database, batch, ClaimRequest(5, uuid4(), LEASE_S, 1))
                assert settled is not None
                assert settled.held == len(batch)
            else:
                found = await claim(database, ClaimRequest(5, uuid4(), LEASE_S, 1))
            accepted = list(found.deliveries)
            most = await values(database, "select max(number) from (" + IN_FLIGHT + ") f")
            assert most[0] is None or most[0] <= 1

    async def flip() -> None:
        while more:
            await change(database, FLIP)
            await asyncio.sleep(0.01)
        await change(database, "update webhooks set paused_until = null")

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(work())
        flipping = group.create_task(flip())
        for number in range(events):
            await commit(outbox, funding(number))
        more = False
        await flipping
    made = (await values(database, "select count(*)::int from deliveries"))[0]
    assert await values(database, "select count(*)::int from attempts") == [made]
    await assert_delivered(database, made)


async def test_a_deep_queue_leaves_a_share_of_each_claim_to_others(any_database: Database) -> None:
    outbox, deep = await some_deliveries(any_database, 100)
    others = [await webhook(any_database) for _ in range(20)]
    await commit(outbox, funding(200))
    claimed = Counter(delivery.webhook_id for delivery in (await take(any_database, 300)).deliveries)
    assert claimed == {deep.id: LEAST_SHARE} | {other.id: 1 for other in others}
    rest = Counter(delivery.webhook_id for delivery in (await take(any_database, 300)).deliveries)
    assert rest == {deep.id: 101 - LEAST_SHARE}, "alone it gets all"
