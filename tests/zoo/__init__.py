"""The zoo: a tiny configuration of every class that has a manifest, and what to call it with.

Each module beside this one holds one family: its CASES and, for the classes that people deploy,
the PUBLISHED configurations.
"""
