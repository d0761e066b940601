"""Does every key of a TOML document get the line on which it stands?"""

from __future__ import annotations

from nereus.configuration.locate import key_lines

DOCUMENT = '''# [not.a.table]
top = 1
[a]
text = """
[fake]
fake = 1
"""
list = [
  "[b]",   # comment
]
b.c = {x = 1, "y.z" = 2}

["quoted.name".d]  # comment
k = 'v'
[a.deep]
k = 1
'''


def test_lines() -> None:
    assert key_lines(DOCUMENT) == {
        ("top",): 2,
        ("a",): 3,
        ("a", "text"): 4,
        ("a", "list"): 8,
        ("a", "b"): 11,
        ("a", "b", "c"): 11,
        ("a", "b", "c", "x"): 11,
        ("a", "b", "c", "y.z"): 11,
        ("quoted.name",): 13,
        ("quoted.name", "d"): 13,
        ("quoted.name", "d", "k"): 14,
        ("a", "deep"): 15,
        ("a", "deep", "k"): 16,
    }


def test_windows_line_ends() -> None:
    assert key_lines("[a]\r\nb = 1\r\n") == {("a",): 1, ("a", "b"): 2}
