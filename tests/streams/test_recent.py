"""A dictionary of bounded size."""

from __future__ import annotations

from streams.recent import Recent


def test_the_keys_set_last_stay() -> None:
    recent = Recent[str, int](2)
    recent["a"], recent["b"] = 1, 2
    recent["a"] = 3  # newer than b now
    recent["c"] = 4
    assert dict(recent) == {"a": 3, "c": 4}
    assert recent.pop("a") == 3 and recent.get("b", 0) == 0
    recent["d"] = 5
    assert list(recent) == ["c", "d"]
