"""Turns the world into event rows: sources read, `advance()` commits."""
