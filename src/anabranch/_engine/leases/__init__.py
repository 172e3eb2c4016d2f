"""This process in the fleet: its membership, its heartbeats and the leases that it takes, keeps and gives."""
