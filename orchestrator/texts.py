"""Whether a sample's text is what its tokens say, by the run's tokenizer and without torch.

The worker's tokenizer is the same file, seen through transformers, which leaves out special tokens and may tidy up
spaces. So both sides are compared without either: a text may differ in them, in nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from async_rl.log import get_logger
from async_rl.wire import Sample

__all__ = ["token_reader"]

log = get_logger(__name__)


def token_reader(model: Path) -> Callable[[Sample], bool] | None:
    """Says whether a sample's text fits its tokens. None, and a line in the log, where the folder has no
    tokenizer.json or it can't be read here: texts are then the workers' word."""
    file = model / "tokenizer.json"
    if not file.is_file():
        log.info("texts are not compared with their tokens: no tokenizer here", file=str(file))
        return None
    try:
        from tokenizers import Tokenizer

        tokenizer: Any = Tokenizer.from_file(str(file))
        marks = _marks(model, file)
    except Exception as error:  # noqa: BLE001  (the edge to a library: it raises its own plain Exceptions)
        log.warning("texts are not compared with their tokens", file=str(file), reason=str(error))
        return None

    def fits(sample: Sample) -> bool:
        said = tokenizer.decode(sample.tokens.numpy().tolist(), skip_special_tokens=False)
        return _bare(said, marks) == _bare(sample.text, marks)

    return fits


def _marks(model: Path, file: Path) -> list[str]:
    """Every token that stands for itself: special ones, and others that were added. Longest first."""
    marks = {
        each["content"] for each in json.loads(file.read_text(encoding="utf-8")).get("added_tokens") or ()
    }
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = model / name
        if path.is_file():
            table = json.loads(path.read_text(encoding="utf-8"))
            for key, value in table.items():
                if key == "added_tokens_decoder":
                    marks |= {each["content"] for each in value.values()}
                elif key.endswith(("_token", "_special_tokens")):
                    values = value if isinstance(value, list) else [value]
                    marks |= {each["content"] if isinstance(each, dict) else each for each in values}
    return sorted((mark for mark in marks if isinstance(mark, str) and mark), key=len, reverse=True)


def _bare(text: str, marks: list[str]) -> str:
    for mark in marks:
        text = text.replace(mark, "")
    return "".join(text.split()).replace("donot", "don't")  # so far goes what transformers calls tidying up
