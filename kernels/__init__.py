"""Kernel back-ends behind one registry. Each back-end folder offers the same op names; ``reference`` is the truth.

``ops.py`` states the contract of every op, ``registry.py`` chooses who runs it. No op reads a device value on the host, except
where its back-end says so.
"""
