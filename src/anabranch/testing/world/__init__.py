"""Whole fleets on one seed: the real engine on simulated ports, in virtual time, with faults and independent
checkers.
"""

from anabranch.testing.world.options import FleetOptions, fleet_options_for
from anabranch.testing.world.world import FleetVerdict, run_fleet

__all__ = ["FleetOptions", "FleetVerdict", "fleet_options_for", "run_fleet"]
