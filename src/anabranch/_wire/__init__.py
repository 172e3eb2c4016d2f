"""Byte codecs: bytes in, values out, and back. Pure: no clock, no randomness, no I/O.

For any bytes, a codec returns a value or raises `CodecError`.
"""
