"""Running probes: at the same time, each within its deadline, none concerned by another."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from vaultevents.config import MetricsSettings, given
from vaultevents.core.errors import ConfigError, SourceUnavailable
from vaultevents.core.findings import Finding, passed
from vaultevents.probes.host import host_probes
from vaultevents.probes.probe import AT_ONCE, Probe, run_probes

pytestmark = pytest.mark.integration


async def good() -> AsyncIterator[Finding]:
    yield passed("good", "fine")


async def test_a_probe_that_hangs_or_fails_concerns_no_other() -> None:
    async def hangs() -> AsyncIterator[Finding]:
        yield passed("slow", "its first part works")
        await asyncio.Event().wait()

    async def fails() -> AsyncIterator[Finding]:
        yield passed("broken", "its first part works")
        raise SourceUnavailable("n", "cannot be reached")

    async def refuses() -> AsyncIterator[Finding]:
        raise ConfigError("it is wrong: correct it")
        yield passed("never", "reached")

    steps: list[tuple[int, int]] = []
    found = await run_probes(
        [
            Probe("slow", hangs, within_s=0.05, advice="See why"),
            Probe("broken", fails, advice="Start it"),
            Probe("refused", refuses),
            Probe("good", good),
        ],
        lambda done, of: steps.append((done, of)),
    )
    assert [finding.line() for finding in found] == [
        "✓ slow: its first part works",
        "✗ slow: does not answer within 0.05 s. See why.",
        "✓ broken: its first part works",
        "✗ broken: cannot be reached. Start it.",
        "✗ refused: it is wrong. Correct it.",
        "✓ good: fine",
    ]
    assert steps == [(done, 4) for done in range(5)]


async def test_a_bounded_number_of_probes_runs_at_once() -> None:
    running, most = 0, 0

    async def counts() -> AsyncIterator[Finding]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        running -= 1
        yield passed("x", "y")

    found = await run_probes([Probe("x", counts)] * (3 * AT_ONCE), lambda done, of: None)
    assert len(found) == 3 * AT_ONCE
    assert most == AT_ONCE


async def test_a_bug_is_no_finding() -> None:
    async def bug() -> AsyncIterator[Finding]:
        raise ZeroDivisionError
        yield passed("never", "reached")

    with pytest.raises(ExceptionGroup) as group:
        await run_probes([Probe("x", bug), Probe("good", good)], lambda done, of: None)
    assert isinstance(group.value.exceptions[0], ZeroDivisionError)


@pytest.mark.parametrize(("named", "result"), [(set(), "warning"), ({"port"}, "failed")])
async def test_the_port_of_the_metrics_in_use_fails_only_where_the_operator_named_it(
    named: set[str], result: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listener = MetricsSettings.model_construct(_fields_set=named, port=taken.getsockname()[1])
        settings = given({"network": "devnet", "chain_id": 1}, "test").model_copy(update={"metrics": listener})
        (probe,) = (probe for probe in host_probes(settings) if probe.subject == "metrics")
        (found,) = await run_probes([probe], lambda done, of: None)
    assert found.result == result
    assert "Address already in use" in found.detail
