"""The lease protocol in a simulation without asyncio: hundreds of worlds a second and core, each from one seed.

The lease machine that ships is driven by small workers against a linearizable store, over a network that loses, delays
and repeats messages, on clocks that err and stop, in processes that pause and die. A journal watches what the workers
start and what the store accepts, and knows nothing of how either decides.
"""
