"""A seeded simulation on loopback for the demo, the tests and the benchmarks.

An execution node (`execution`), a beacon node (`beaconapi`), webhook receivers (`receivers`), staking-vault traffic and
the lives of validators (`simulation`), and the events that a right service must send for them (`truth`, `beacontruth`).
It is the ground truth, so it imports nothing of the service.
Everything that is decided here is a function of a seed: the same seed gives the same blocks, hashes and faults.
"""
