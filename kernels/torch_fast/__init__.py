"""Runs on every device torch runs on, with bounded score memory.

``attend`` with lengths and ``attend_ranges`` read their small tables on the host (one synchronisation on a GPU).
"""
