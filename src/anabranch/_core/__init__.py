"""Decisions: synchronous, pure and deterministic.

Time (`now_ms`) and randomness (`entropy`) are arguments. The core starts no timer and does no I/O: it returns
what is to be done, and when it wants to be called next. So one seed replays a whole fleet.
"""
