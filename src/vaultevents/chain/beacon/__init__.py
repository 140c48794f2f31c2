"""The beacon chain: Beacon API, finality and validator records."""
