"""Reads the world. Returns plain records, knows nothing of accounts, and believes no node (rule C2)."""
