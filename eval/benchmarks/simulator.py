"""Simulators of VideoReasonBench: do the answered operations lead from the video's last state to the wanted one?

The benchmark has six worlds (Liu et al., 2025). A state comes from the official record, the target from the question,
the operations from the answer. The rules are those that the questions state: where the published script differs (cards
are listed from top to bottom but stored from bottom to top, chips have no order) the question wins.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

_LETTERS = "abcde"
_MOVES = re.compile(r"\b(left|right|up|down)(?:wards?)?\b", re.I)
_PAIR = re.compile(r"\(?\s*([a-e])\s*,?\s*([1-5])\s*,\s*\(?\s*([a-e])\s*,?\s*([1-5])\s*\)?", re.I)
_RANKS = r"(?:Ace|[2-9]|10|Jack|Queen|King)"
_CARD = re.compile(
    rf"\b(add|remove)\s+(?:the\s+)?({_RANKS})\s+of\s+(Hearts|Clubs|Diamonds|Spades)\s+(?:to|from)?\s*(pile\d+)", re.I
)
_CHIP = re.compile(r"\b(add|remove)\s+(?:a\s+|the\s+)?(\d+)(?:\s+chip)?\s+(?:(?:to|from)\s+)?(cup\d+)", re.I)
_COMMAND = re.compile(r"\b(touch|rm\s+-rf?)\s+(path\d+)/(\{[^}]*\}|[^\s&`{]+)", re.I)
_CHIPS = (5, 10, 20, 50, 100)
Board = list[list[int]]


class NoTargetError(ValueError):
    """The question does not name the state to be reached: the record is broken, not the answer."""


def reaches_target(world: str, question: str, record: Mapping[str, Any], answer: str) -> bool | None:
    """Whether the operations in `answer` reach the state that `question` asks for.

    Args:
        world: card, chip, cup, file_sys, grid or hrd.
        question: holds the target in backticks.
        record: official record with `states` (and `coords` for the grid).
        answer: text with the operations.

    Returns:
        None when no operation can be read.

    Raises:
        NoTargetError: the question has no target, or the record no states.
        ValueError: the world is unknown.
    """
    worlds = {"card": _cards, "chip": _chips, "cup": _cups, "file_sys": _files, "grid": _grid, "hrd": _sliding}
    if world not in worlds:
        raise ValueError(f"world {world!r}: known are {', '.join(worlds)}")
    if not record.get("states"):
        raise NoTargetError("the record has no `states`; the official questions/*.json hold them")
    # Long runs of blanks, which a model may repeat without end, would cost the patterns quadratic time.
    return worlds[world](question, record, " ".join(answer.split()))


def _target(question: str, words: str) -> str:
    found = re.search(words + r"[^`]*`([^`]+)`", question, re.I)
    if not found:
        raise NoTargetError(f"the question names no target after {words!r}")
    return found.group(1)


def _container(question: str) -> str:
    return _target(question, "to ensure that")


def _last(states: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Last state per container; states are a list, or a mapping from the command to what it left."""
    out = {}
    for name, history in states.items():
        out[name] = list(list(history.values())[-1] if isinstance(history, Mapping) else history[-1])
    return out


def _cards(question: str, record: Mapping[str, Any], answer: str) -> bool | None:
    operations = _CARD.findall(answer)
    if not operations:
        return None
    piles = _last(record["states"])  # bottom first
    for action, rank, suit, pile in operations:
        card, stack = f"{rank.capitalize()} of {suit.capitalize()}", piles.get(pile.lower())
        if stack is None or (action.lower() == "remove" and (not stack or stack[0] != card)):
            return False
        if action.lower() == "add":
            stack.append(card)
        else:
            del stack[0]
    wanted = [card.strip() for card in _target(question, "following cards from top to bottom:").split(",")]
    return piles[_container(question)][::-1] == wanted


def _chips(question: str, record: Mapping[str, Any], answer: str) -> bool | None:
    operations = _CHIP.findall(answer)
    if not operations:
        return None
    cups = {name: Counter(chips) for name, chips in _last(record["states"]).items()}
    for action, value, cup in operations:
        chip, held = int(value), cups.get(cup.lower())
        if held is None or chip not in _CHIPS or (action.lower() == "remove" and held[chip] < 1):
            return False
        held[chip] += 1 if action.lower() == "add" else -1
    wanted = Counter(int(chip) for chip in _target(question, "following chips:").split(","))
    return +cups[_container(question)] == wanted


def _files(question: str, record: Mapping[str, Any], answer: str) -> bool | None:
    commands = _COMMAND.findall(answer)
    if not commands:
        return None
    files = {path: set(names) for path, names in _last(record["states"]).items()}
    touched: set[str] = set()
    removed: set[str] = set()
    for command, path, names in commands:
        wanted = {name.strip() for name in names.strip("{}").split(",") if name.strip()}
        if path not in files:
            return False
        if command.lower() == "touch":
            files[path] |= wanted
            touched |= wanted
        else:
            files[path] -= wanted
            removed |= wanted
    if len(commands) > 2 or touched & removed:
        return False
    target = {name.strip() for name in _target(question, "following files:").split(",")}
    return files[_container(question)] == target


def _moves(answer: str) -> list[str]:
    return [move.lower() for move in _MOVES.findall(answer)]


def _board(state: Sequence[Sequence[int]]) -> Board:
    return [[int(cell) for cell in row] for row in state]


def _cups(question: str, record: Mapping[str, Any], answer: str) -> bool | None:
    swaps = _PAIR.findall(answer)
    if not swaps:
        return None
    board = _board(record["states"][-1])
    for row, column, other_row, other_column in swaps:
        r, c = _LETTERS.index(row.lower()), int(column) - 1
        s, d = _LETTERS.index(other_row.lower()), int(other_column) - 1
        if max(r, s) >= len(board) or max(c, d) >= len(board[0]):
            return False
        board[r][c], board[s][d] = board[s][d], board[r][c]
    wanted = {coin.strip() for coin in _target(question, "desired distribution of coins:").split(",")}
    coins = {f"{_LETTERS[r]}{c + 1}" for r, row in enumerate(board) for c, coin in enumerate(row) if coin}
    return coins == wanted


def _grid(question: str, record: Mapping[str, Any], answer: str) -> bool | None:
    moves = _moves(answer)
    if not moves:
        return None
    board = _board(record["states"][-1])
    x, y = record["coords"][-1]
    size = len(board)
    for move in moves:
        nx = x + {"left": -1, "right": 1}.get(move, 0)
        ny = y + {"up": -1, "down": 1}.get(move, 0)
        if not (0 <= nx < size and 0 <= ny < size):
            continue  # the official script leaves such a move out
        x, y = nx, ny
        for dx, dy in ((0, 0), (0, -1), (0, 1), (-1, 0), (1, 0)):
            if 0 <= x + dx < size and 0 <= y + dy < size:
                board[y + dy][x + dx] = 1 - board[y + dy][x + dx]
    cells = re.findall(r"\(([a-e])\s*,\s*(\d)\):\s*(black|white)", _target(question, "black and white pieces:"))
    return bool(cells) and all(board[_LETTERS.index(r)][int(c)] == (color == "black") for r, c, color in cells)


def _sliding(question: str, record: Mapping[str, Any], answer: str) -> bool | None:
    """A move is the direction in which a square slides into the gap. States list the rows from below: "a" is last."""
    moves = _moves(answer)
    if not moves:
        return None
    board = _board(record["states"][-1])
    size = len(board)
    row, column = next((r, line.index(0)) for r, line in enumerate(board) if 0 in line)
    for move in moves:
        r, c = row + {"up": -1, "down": 1}.get(move, 0), column + {"left": 1, "right": -1}.get(move, 0)
        if not (0 <= r < size and 0 <= c < size):
            continue  # the official script leaves such a move out
        board[row][column], board[r][c] = board[r][c], 0
        row, column = r, c
    cells = re.findall(r"\(([a-e])\s*,\s*(\d)\):\s*(\d+)", _target(question, "desired number arrangement:"))
    return bool(cells) and all(board[size - 1 - _LETTERS.index(r)][int(c) - 1] == int(n) for r, c, n in cells)
