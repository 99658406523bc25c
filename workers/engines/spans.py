"""Which policy version sampled which tokens of a sequence, from the counts an engine had at each swap."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["version_spans"]


def version_spans(starts: Sequence[tuple[int, int]], tokens: int) -> tuple[tuple[int, int], ...]:
    """`starts`: (version, tokens the sequence had when that version began to sample), in order, the first at 0.

    Returns (version, tokens) pairs that sum to `tokens`; versions that sampled nothing are left out. A boundary
    may lie past the end: an engine that schedules ahead can have sampled tokens that were cut off at a stop.
    """
    spans = []
    for i, (version, begin) in enumerate(starts):
        end = starts[i + 1][1] if i + 1 < len(starts) else tokens
        length = min(end, tokens) - min(begin, tokens)
        if length > 0:
            spans.append((version, length))
    return tuple(spans)
