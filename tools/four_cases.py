"""A pytest plugin: at most four cases of each test function, spread over all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

MOST = 4


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the other cases."""
    cases: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        cases.setdefault((item.path, item.name.partition("[")[0]), []).append(item)
    kept = {
        found[number * (len(found) - 1) // (MOST - 1)].nodeid
        for found in cases.values()
        for number in range(MOST)
    }
    others = [item for item in items if item.nodeid not in kept]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item.nodeid in kept]
