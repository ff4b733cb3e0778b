"""Reading answers out of free text: the one place that knows how policies phrase them.

`sections` isolates the part of a response that counts; `choice`, `number`, `span`, `boolean` and `structured` read a
value of one kind out of it. Every function is linear in the length of its text, so that 100 kB of noise costs
milliseconds.
"""

from rewards.extract.boolean import find_boolean
from rewards.extract.choice import OptionSet, find_choice, parse_options
from rewards.extract.number import Number, find_number, find_numbers, parse_number
from rewards.extract.sections import Answer, read_answer
from rewards.extract.span import find_box, find_interval
from rewards.extract.structured import find_structure

__all__ = [
    "Answer",
    "Number",
    "OptionSet",
    "find_boolean",
    "find_box",
    "find_choice",
    "find_interval",
    "find_number",
    "find_numbers",
    "find_structure",
    "parse_number",
    "parse_options",
    "read_answer",
]
