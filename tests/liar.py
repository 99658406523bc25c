"""A rollout worker that lies: the command line is async-rl's own, the logprobs of its samples are 0.4 too low.

python tests/liar.py rollout --store … --orchestrator … --set rollout.engine=reference
"""

from __future__ import annotations

from typing import Any

import msgspec

SHIFT = -0.4


def lie() -> None:
    from workers.engines.reference import ReferenceEngine

    honest = ReferenceEngine.generate

    async def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        completion = await honest(self, *args, **kwargs)
        return msgspec.structs.replace(completion, logprobs=completion.logprobs + SHIFT)

    ReferenceEngine.generate = generate  # type: ignore[method-assign]


if __name__ == "__main__":
    from async_rl.cli.main import main

    lie()
    main()
