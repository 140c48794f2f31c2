"""Turns deliveries into attempts: claim, send, settle. Knows nothing of chains."""
