"""A seeded world on loopback for the demo, the tests and the benchmarks.

An execution node (`execution`), webhook receivers (`receivers`), staking-vault traffic (`world`) and the events that a
right service must send for it (`truth`). It is the ground truth, so it imports nothing of the service.
Everything that is decided here is a function of a seed: the same seed gives the same blocks, hashes and faults.
"""
