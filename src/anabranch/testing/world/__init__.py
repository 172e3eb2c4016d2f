"""Simulated fleets: the real engine on simulated ports, in virtual time, with faults and independent checkers. A seed
decides everything.
"""

from anabranch.testing.world.fleet import FleetVerdict, run_fleet
from anabranch.testing.world.options import FleetOptions, fleet_options_for

__all__ = ["FleetOptions", "FleetVerdict", "fleet_options_for", "run_fleet"]
