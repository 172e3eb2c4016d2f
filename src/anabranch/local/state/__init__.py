"""The state of the local Kinesis. Pure: time and entropy are arguments, so that it also runs in the simulation."""
