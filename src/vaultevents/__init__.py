"""Final Ethereum staking-vault events as signed webhooks, at least once."""

__version__ = "0.1.0"
