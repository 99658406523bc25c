"""The reward of this task: how near a completion is to the answer and nothing else."""

from __future__ import annotations

import re
from collections import Counter

from async_rl.wire import Prompt


def f1(prompt: Prompt, completion: str) -> float:
    """The harmonic mean of precision and recall over words, as SQuAD scores answers (arXiv 1606.05250): 1 for the
    answer alone, 2/7 for it at the end of a sentence of six words, 0 without a word of it."""
    wanted, found = _words(prompt.answer), _words(completion)
    shared = (wanted & found).total()
    return 2 * shared / (wanted.total() + found.total()) if shared else 0.0


def _words(text: str) -> Counter[str]:
    return Counter(re.findall(r"\w+", text.casefold()))
