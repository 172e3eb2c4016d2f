"""The values of the domain: immutable, comparable, without behaviour beyond their own arithmetic.

They know nothing of the wire, of stores or of time; everything above speaks in them.
"""
