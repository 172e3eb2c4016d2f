"""The local Kinesis's state: pure, split by noun. Time and entropy are arguments, so it also runs inside the
simulation.
"""
