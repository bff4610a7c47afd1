"""Kernel back-ends behind one registry. Each back-end folder offers the same op names; ``reference`` is the truth."""
