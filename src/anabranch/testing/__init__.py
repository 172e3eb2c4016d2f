"""Tools to test what is built with anabranch: simulated fleets, checkers, the local Kinesis as a pytest fixture."""
