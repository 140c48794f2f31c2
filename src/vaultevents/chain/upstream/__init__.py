"""Several nodes of one upstream: exchange, retries, rate limits, circuit breakers, failover."""
