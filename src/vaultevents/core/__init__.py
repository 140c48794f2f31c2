"""Pure rules: no await, clock, socket, SQL, logger or randomness; `now` and random sources are arguments."""
