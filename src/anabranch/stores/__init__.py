"""Lease stores: where a fleet keeps its leases, checkpoints and members."""
