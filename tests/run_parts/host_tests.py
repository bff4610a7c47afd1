"""A pytest plugin (-p run_parts.host_tests): keeps the tests that use a host, told by the names of their fixtures."""

from __future__ import annotations

from typing import Any


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Deselect every test without a fixture whose name holds "host"."""
    kept = [item for item in items if any("host" in name for name in getattr(item, "fixturenames", ()))]
    dropped = [item for item in items if item not in kept]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept
