"""HTML: similarity of the element trees, 1 - tree edit distance / size of the larger tree."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar

from apted import APTED, Config

from rewards.base import Lane, Query, TaskReward, Verdict, unparsable
from rewards.extract.code import fenced

_TAG = re.compile(r"<[a-zA-Z][^>]*>")
MAX_DEPTH = 100


class Node:
    """One element: tag, own text, attributes and children, as the edit distance wants them."""

    def __init__(self, tag: str, text: str = "", attributes: frozenset[tuple[str, str]] = frozenset()) -> None:
        self.tag, self.text, self.attributes = tag, text, attributes
        self.children: list[Node] = []

    def size(self) -> int:
        """Number of elements below and including this one."""
        return 1 + sum(child.size() for child in self.children)


@lru_cache(maxsize=1024)
def parse_tree(source: str) -> Node:
    """Tree of the head's and body's elements under one artificial root; html5lib repairs what browsers repair.

    Raises ValueError for elements nested deeper than MAX_DEPTH.
    """
    import html5lib

    document = html5lib.parse(source, treebuilder="etree", namespaceHTMLElements=False)
    level, depth = list(document), 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"elements are nested deeper than {MAX_DEPTH}")
        level = [child for element in level for child in element]
    root = Node("#root")
    for part in document:
        if part.text and part.text.strip() and part.tag == "body":
            root.children.append(Node("#text", _squash(part.text)))
        root.children.extend(_convert(child) for child in part if isinstance(child.tag, str))
    return root


def _squash(text: str | None) -> str:
    return re.sub(r"\s+", " ", text or "").strip()


def _convert(element: Any) -> Node:
    """Own text includes the text between children, so that none is lost."""
    text = _squash(" ".join([element.text or "", *(child.tail or "" for child in element)]))
    node = Node(element.tag, text, frozenset((str(k), _squash(v)) for k, v in element.attrib.items()))
    node.children = [_convert(child) for child in element if isinstance(child.tag, str)]
    return node


class Costs(Config):
    """Costs of the edit distance: 1 for an element more or less."""

    def rename(self, node1: Node, node2: Node) -> float:
        """0 for equal elements, 1 for different tags, else half the text's distance plus half the attributes'."""
        from rapidfuzz.distance import Levenshtein

        if node1.tag != node2.tag:
            return 1.0
        text = 0.0
        if node1.text != node2.text:
            text = float(Levenshtein.normalized_distance(node1.text[:2000], node2.text[:2000]))
        union = node1.attributes | node2.attributes
        attributes = 1 - len(node1.attributes & node2.attributes) / len(union) if union else 0.0
        return 0.5 * text + 0.5 * attributes


class HTML(TaskReward):
    """Tree similarity (TEDS, arXiv 1911.10683, on whole pages).

    An answer with more than `max_ratio` times the gold's elements scores 0 without being compared: its similarity is
    below 1 / `max_ratio` in any case, and comparing it would cost the time of a thousand others.

    Args:
        aliases: further names of the problem type.
        max_ratio: largest accepted ratio of element counts, either way.
        seconds: time limit of one judgement.
    """

    lane: ClassVar[Lane] = "process"

    def __init__(self, aliases: Sequence[str] = (), max_ratio: float = 4.0, seconds: float = 10.0) -> None:
        super().__init__(aliases)
        if max_ratio < 1:
            raise ValueError(f"max_ratio={max_ratio} must be at least 1")
        self.max_ratio, self.seconds = max_ratio, seconds

    def time_limit(self, query: Query) -> float:
        """Seconds after which the judgement is killed."""
        return self.seconds

    def warm_up(self) -> None:
        """Import parser and edit distance."""
        self.judge(Query("", "<p>a</p>", "html"), "<p>b</p>")

    def judge(self, query: Query, answer: str) -> Verdict:
        """Accuracy in [0, 1]. Raises ValueError for a gold without elements."""
        gold = parse_tree(fenced(str(query.ground_truth)))
        if not gold.children:
            raise ValueError("the gold answer holds no HTML element")
        source = fenced(answer)
        if not _TAG.search(source):
            return unparsable("no HTML element in the answer")
        if source.strip() == fenced(str(query.ground_truth)).strip():
            return Verdict(1.0)
        try:
            tree = parse_tree(source)
        except ValueError as error:
            return unparsable(str(error))
        ours, theirs = tree.size() - 1, gold.size() - 1
        if ours == 0 or max(ours / theirs, theirs / ours) > self.max_ratio:
            return Verdict(0.0, parts={"elements": float(ours)})
        distance = float(APTED(tree, gold, Costs()).compute_edit_distance())
        return Verdict(max(0.0, 1.0 - distance / max(ours, theirs)), parts={"elements": float(ours)})

    def well_formed(self, query: Query, answer: str) -> bool:
        """At least one element."""
        return _TAG.search(fenced(answer)) is not None
