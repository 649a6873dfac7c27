"""python tests/word_count.py [FILE ...]: unclear phrases in docstrings and comments, and their frequency."""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PHRASES = {
    "what": re.compile(r"\b(?:what|whoever|whatever)\b", re.IGNORECASE),
    "said": re.compile(r"\b(?:told|said|says)\b", re.IGNORECASE),
}


class WordCount(NamedTuple):
    """The number of words, and {phrase: sentences that hold it, once per occurrence}."""

    words: int
    matches: dict[str, list[str]]

    def per_thousand(self, phrase: str) -> float:
        return 1000 * len(self.matches[phrase]) / max(1, self.words)


def prose(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of every docstring, field docstring and comment of a module."""
    for node in ast.walk(ast.parse(source)):
        for statement in body if isinstance(body := getattr(node, "body", None), list) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("#")


def count_words(sources: dict[str, str]) -> WordCount:
    """Count over {file name: source}."""
    words, matches = 0, {phrase: [] for phrase in PHRASES}
    for name, source in sources.items():
        for line, text in prose(source):
            words += len(re.findall(r"[A-Za-z']+", text))
            for sentence in re.split(r"(?<=[.;:])\s", text):
                for phrase, pattern in PHRASES.items():
                    matches[phrase] += [f"{name}:{line}: {' '.join(sentence.split())}"] * len(pattern.findall(sentence))
    return WordCount(words, matches)


if __name__ == "__main__":
    root = Path(__file__).parent.parent
    ours = [path for folder in ("vitray", "pipelines", "tests") for path in (root / folder).rglob("*.py")]
    count = count_words({str(path): path.read_text() for path in map(Path, sys.argv[1:] or ours)})
    for phrase, sentences in count.matches.items():
        print(*sentences, f"{phrase}: {count.per_thousand(phrase):.1f} per 1,000 of {count.words} words", sep="\n")
