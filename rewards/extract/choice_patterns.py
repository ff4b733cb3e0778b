"""The regular expressions of `rewards.extract.choice`, compiled once per set of labels."""

from __future__ import annotations

import re
from functools import lru_cache

# Han characters may touch a letter ("选项B"): a label ends at Latin letters and digits only.
WORD = r"[0-9A-Za-z_\u00c0-\u024f]"
_NOUN = r"(?:answer|option|choice|letter|response|sentence|caption|statement|solution|ans)"
_LINK = r"(?:\bwould\s+be\b|\bshould\s+be\b|\bmust\s+be\b|\bis\b|是|:|=|-(?=\s))"
_FILLER = r"(?:clearly|therefore|thus|probably|likely|definitely|obviously|option|choice|letter|sentence|number|选项)"
_VERB = r"(?:choose|chose|select|selected|pick|picked|go\s+with|going\s+with|say|vote\s+for|prefer|opt\s+for|guess)"
_CUE = rf"""
    (?:\b(?:final|correct|best|right|only|my|the)\s+){{0,3}}\b{_NOUN}(?:\s+(?:here|choice|option|letter))?\b["']?\s*
      {_LINK}+\s*(?:\b{_FILLER}\b\s*:?\s*)*
  | (?:答案|选项|選項)\s*(?:应该|應該)?\s*[是为為选選:]*\s*
  | \b(?:i(?:'d|'ll|\s+would|\s+will)?\s+)?{_VERB}\s+(?:(?:the\s+)?(?:option|answer|choice|letter)\s+)?
  | (?:选择|选|選擇|選|答)\s*[:是]?\s*
  | (?:\b(?:so|therefore|thus|hence|finally|conclusion|final|overall)\b[,:]?|∴)\s*
      (?:(?:it'?s|it\s+is|option|choice|answer)\s+)?:?\s*
  | \b(?:no,?\s+wait|wait|actually|correction|scratch\s+that|on\s+second\s+thought|sorry|i\s+mean)\b
      [,:;.\s-]*(?:no\b[,\s]*)?(?:i\s+mean[,\s]*)?
      (?:(?:it'?s|it\s+is|option)\s+)?
  | \b(?:most\s+likely|probably|lean(?:ing)?\s+towards?)\s+(?:option\s+)?
  | \b(?:correct|right|best)\s+one\s*{_LINK}+\s*
  | \bwe\s+(?:get|have|obtain|conclude)\s+
  | \bno,\s*(?:(?:it'?s|option)\s+)?
  | \bleav(?:es|ing)\s+(?:(?:us|me)\s+with\s+)?(?:only\s+)?(?:option\s+)?
  | \b(?:it|that|this)(?:'s|\s+is|\s+must\s+be|\s+has\s+to\s+be)\s+(?:\b{_FILLER}\b\s*)*
"""
_RIGHT = (
    r"(?:\s*[:\-(]\s*(?:correct|right|true)\b|\s*(?:is|are|looks?|seems?)\s+"
    r"(?:definitely\s+|clearly\s+|the\s+)*(?:correct|right|true|best|better|answer)\b)"
)
_WRONG = (
    r"(?:\s*[:\-(]\s*(?:also\s+)?(?:not\b|wrong|incorrect|false)"
    r"|\s*(?:is|are|was|looks?|seems?|can\s+be|must\s+be)\s+(?:also\s+|clearly\s+|definitely\s+)*"
    r"(?:not\b|n't|wrong|incorrect|false|excluded|eliminated|ruled\s+out|out\b|impossible|a\s+distractor|unlikely|closed)"
    r"|\s*(?:isn't|cannot|can't|does\s+not|doesn't)|\s*(?:选项)?(?:是)?(?:错|錯|不对|不正确))"
)
_AGAINST = (
    r"(?:\bnot|n't|\bnever|\bneither|\bnor|\brather\s+than|\binstead\s+of|\bthan|\bexcept|\bexcluding"
    r"|\b(?:any|every)thing\s+but|\bother\s+than|\ball\s+but|\bexclude|\beliminate|\brule\s+out|\bruling\s+out)\s+"
)


@lru_cache(maxsize=512)
def choice_patterns(labels: tuple[str, ...]) -> dict[str, re.Pattern[str]]:
    """Patterns by name for one set of labels. Upper case is asked for where a lower-case letter could be a word."""
    against = rf"(?:{_AGAINST}(?:(?:the\s+)?(?:option|answer|choice)\s+)?|(?:不是|不选|排除)\s*(?:选项)?)"
    longest_first = sorted(labels, key=len, reverse=True)
    upper = "|".join(re.escape(label) for label in longest_first)
    both = "|".join(re.escape(x) for label in longest_first for x in dict.fromkeys((label, label.lower())))
    end = rf"(?!{WORD}|['’])"
    mark = rf"(?:[(\[{{<\"'“]\s*(?P<p>{both})\s*[)\]}}>\"'”]|[(\[]?\s*(?P<l>{both}){end}(?!\s*=\s*\w))"
    joiner = r"(?:,?\s*(?:and/or|or|and|and\s+also|nor|&|或|和|/)|,|/|、)"
    join = rf"{joiner}\s*(?:(?:[Oo]ption|[Ss]entence|[Cc]aption|also)\s+)?[(\[]?"
    named = r"(?P<noun>(?:[Oo]ption|[Cc]hoice|[Aa]nswer|[Ss]entence|[Cc]aption|[Ss]tatement)[\s\-]+)?"
    return {
        "bare": re.compile(rf"\W*(?:(?:option|choice|answer|sentence|caption)\s+)?(?P<l>{both})\W*", re.I),
        "cue": re.compile(rf"(?:{_CUE}){mark}", re.I | re.X),
        "after": re.compile(
            rf"(?<!{WORD})(?P<l>{upper}){end}\)?(?:{_RIGHT}|\s*(?:选项)?(?:是)?(?:正确|正確|对的))", re.I
        ),
        "wrong": re.compile(rf"(?<!{WORD})[(\[]?(?P<l>{upper})[)\]]?{end}{_WRONG}", re.I),
        "against": re.compile(rf"{against}[(\[]?(?P<l>{upper}){end}", re.I),
        "lead": re.compile(rf"{named}[(\[{{]?\s*(?P<l>{upper})(?P<d>\s*[)\]}}.:,;、]|\s*[-–—]\s|\s*\n|\s+|$)"),
        "line": re.compile(rf"^\s*[-•]?\s*{named}[(\[]?(?P<l>{upper})[)\].:、]\s*(?P<t>\S.*)$", re.M),
        "paren": re.compile(rf"[(\[](?P<l>{upper})[)\]]"),
        "alone": re.compile(rf"(?<!{WORD}|['’.\-])(?P<l>{upper}){end}(?!-)"),
        "tail": re.compile(rf"(?<!{WORD})(?:{upper})\W*$"),
        "join": re.compile(rf"\s*[)\].]?\s*{join}(?:{upper}){end}"),
    }
