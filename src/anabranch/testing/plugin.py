"""The pytest plugin: installed with anabranch, so that its fixtures are there without an import.

It is loaded by every pytest run of whoever has anabranch installed: it imports nothing of ours until a fixture is used.
"""
