"""The code in docs/kernels runs, and every operator has its page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "kernels").glob("*.md"))


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "README.md"], ids=lambda p: p.stem)
def test_the_code_of_a_page_runs(page: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, str(page), "exec"), {})


def test_every_operator_has_a_page_that_the_index_names() -> None:
    operators = {p.parent.name for p in (ROOT / "kernels").glob("*/reference.py")}
    index = (ROOT / "docs" / "kernels" / "README.md").read_text()
    assert operators <= {p.stem for p in PAGES}
    assert all(f"({p.name})" in index for p in PAGES if p.name != "README.md")
