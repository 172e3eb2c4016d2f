"""Immutable values of the domain. They know nothing of the wire, stores or time."""
