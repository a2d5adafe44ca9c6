"""Every example that a reader may copy is run: Python blocks of the documentation, and docstrings."""

from __future__ import annotations

import doctest
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODULES = [
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(SOURCE.rglob("*.py"))
    if path.name != "__main__.py"
]
# A block is left out if the line above it says so: a comment that no reader sees.
BLOCK = re.compile(r"(?P<skip><!-- skip-test -->\s*)?^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def code_blocks(text: str) -> Iterator[tuple[int, str]]:
    """Find the blocks to run, each with the number of the line that it starts on."""
    for match in BLOCK.finditer(text):
        if not match["skip"]:
            yield text.count("\n", 0, match.start("code")), match["code"]


def run_blocks(path: Path) -> int:
    """Run a document's blocks in one namespace, as a reader would; tracebacks show the document's own lines."""
    namespace = {"__name__": "__main__"}
    blocks = list(code_blocks(path.read_text(encoding="utf-8")))
    for line, code in blocks:
        exec(compile("\n" * line + code, str(path), "exec"), namespace)
    return len(blocks)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_examples_of_the_document_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_blocks(path)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_to_files_of_the_project_lead_somewhere(path):
    links = re.findall(r"\]\((?!https?:|mailto:|#)([^)#\s]+)", path.read_text(encoding="utf-8"))
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_tests_that_the_page_on_failures_names_exist():
    """A name may leave its beginning or its end out: three dots."""
    there = {
        name
        for path in (ROOT / "tests").rglob("*.py")
        for name in (path.name, *re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE))
    }
    named = re.findall(
        r"`(test_\w+(?:\.py|\.\.\.)?|\.\.\.\w+)`", (ROOT / "docs/failures.md").read_text(encoding="utf-8")
    )
    assert len(named) > 60
    missing = [
        name
        for name in named
        if not any(re.fullmatch(re.escape(name).replace(r"\.\.\.", ".*"), other) for other in there)
    ]
    assert missing == []


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_the_docstrings_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = doctest.testmod(
        importlib.import_module(name), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE, report=False
    )
    assert result.failed == 0


def test_readme_shows_the_three_lines():
    code = "".join(code for _, code in code_blocks((ROOT / "README.md").read_text(encoding="utf-8")))
    assert "import torchslicer as ts" in code
    assert "ts.slice(model, n=" in code
    assert "sliced.train(" in code


def test_a_failing_block_is_reported_with_its_line(tmp_path):
    document = tmp_path / "page.md"
    document.write_text("# Title\n\n```python\nx = 1\n```\n\n```python\nx / 0\n```\n", encoding="utf-8")
    with pytest.raises(ZeroDivisionError) as raised:
        run_blocks(document)
    assert raised.traceback[-1].lineno + 1 == 8


def test_a_block_marked_so_is_skipped(tmp_path):
    document = tmp_path / "page.md"
    document.write_text("<!-- skip-test -->\n```python\n1 / 0\n```\n\n```python\nx = 1\n```\n", encoding="utf-8")
    assert run_blocks(document) == 1
