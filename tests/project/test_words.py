"""Docstrings are sentences that a stranger understands, not fragments."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import runner

_PACKAGE = Path(runner.__file__).parent
_MOST_WORDS = 12
_FRAGMENT = re.compile(
    r"(Of|On|In|With|By|From|To|At|As|Around|Behind|Until|Where|Which|What of|Whose|Who|Those|That of|That is|It is|"
    r"See the module's text)\b"
)
_ENTRY = re.compile(r"^ {4}(?P<names>\w+(?:, \w+)*): (?P<text>.*)$", re.MULTILINE)
"""An argument, an attribute or an error in a docstring's lists."""
_ENTRY_WITHOUT_NOUN = re.compile(r"(of|on|in|with|by|as|those|that of)\b")


def _docstrings(tree: ast.Module) -> Iterator[str]:
    """Docstrings of modules, classes and functions, and texts below a constant or a field."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            yield ast.get_docstring(node) or ""
            for before, after in zip(node.body, node.body[1:], strict=False):
                value = after.value if isinstance(after, ast.Expr) else None
                if isinstance(before, ast.Assign | ast.AnnAssign) and isinstance(value, ast.Constant):
                    yield str(value.value)


def _fragments(source: str) -> Iterator[str]:
    """Short texts of one line that begin with a preposition or a relative word, and entries that do."""
    for text in _docstrings(ast.parse(source)):
        if _FRAGMENT.match(text) and "\n" not in text and len(text.split()) <= _MOST_WORDS:
            yield text
        for entry in _ENTRY.finditer(text):
            if _ENTRY_WITHOUT_NOUN.match(entry["text"]):
                yield entry[0].strip()


def test_a_fragment_is_found() -> None:
    source = (
        '"""Says what it does."""\ndef f():\n    """Of a flattened boundary."""\nclass C:\n    """On request, one."""\n'
    )

    assert list(_fragments(source)) == ["Of a flattened boundary.", "On request, one."]


def test_a_fragment_below_a_constant_or_a_field_is_found() -> None:
    source = 'LIMIT = {}\n"""By name."""\nclass C:\n    a: int\n    """Of the whole model."""\n'

    assert list(_fragments(source)) == ["By name.", "Of the whole model."]


def test_an_entry_without_a_noun_is_found() -> None:
    source = (
        'def f(a, b, c):\n    """Add.\n\n    Args:\n        a: of the stage.\n        b, c: the others.\n\n'
        '    Raises:\n        ValueError: with all problems.\n    """\n'
    )

    assert list(_fragments(source)) == ["a: of the stage.", "ValueError: with all problems."]


def test_docstrings_are_no_fragments() -> None:
    files = sorted(_PACKAGE.rglob("*.py"))
    found = [f"{file.relative_to(_PACKAGE)}: {text}" for file in files for text in _fragments(file.read_text())]

    assert files
    assert found == []
