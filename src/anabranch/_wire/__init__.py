"""Byte codecs: bytes in, values out, and back. Pure: no clock, no randomness, no I/O.

Whatever bytes arrive, a codec returns a value or raises `CodecError`, and nothing else.
"""
