"""Simulated fleets: the real engine on simulated ports, in virtual time, with faults and independent checkers. A seed
decides everything. The tests of anabranch extend these classes with more faults (`tests/simulation/harsh`).
"""
