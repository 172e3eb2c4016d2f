"""Simulated fleets with many more faults than `simulate` has: fan-out, loops, poison, trims, roll-backs, and so on.

Each class extends one of `anabranch.testing.world`. The order in which they draw from the fleet's `random` must not
change: `regressions.txt` names fleets by their seeds.
"""
