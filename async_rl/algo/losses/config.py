"""What all losses have in common in `[loss]`. What one of them has besides stands beside its function."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

__all__ = ["AtLeastOne", "Cap", "Fraction", "LossConfig", "NotNegative"]

Fraction = Annotated[float, Meta(gt=0, le=1)]
NotNegative = Annotated[float, Meta(ge=0)]
Cap = Annotated[float, Meta(ge=1)]
AtLeastOne = Annotated[int, Meta(ge=1)]


class LossConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[loss]`: the correction for lag, and what is added to it. `name` chooses the loss, and with it the other
    keys: one that belongs to another loss is refused."""

    name: str = ""
    """See docs/losses.md."""
    normalise: Literal["token", "sequence", "constant"] = "token"
    """token: the mean over the loss tokens of the whole batch, so every token weighs the same (DAPO, arXiv
    2503.14476, section 3.3); sequence: the mean over samples of their means, so a token of a long answer weighs less
    (GRPO, arXiv 2402.03300); constant: the sum over a sample divided by `length_budget`, the mean over samples (Dr.
    GRPO, arXiv 2503.20783): like token, but the step's size does not depend on how long the answers are. token,
    because it has no bias towards long wrong answers and needs no further setting."""
    length_budget: Annotated[int, Meta(ge=0)] = 0
    """Tokens, of normalise = "constant". 0: sampling.max_tokens, as Dr. GRPO does."""
    reference_coef: NotNegative = 0.0
    """Weight of the KL to a frozen reference policy. 0, none, is usual with rewards that can be verified (DAPO, Dr.
    GRPO): it costs a second forward pass and the weights once more in host memory, and holds learning back."""
    reference_estimator: Literal["k1", "k2", "k3"] = "k2"
    """With x = log pi - log ref: k1 x, k2 x²/2, k3 exp(-x) - 1 + x (Schulman, "Approximating KL divergence"). As a
    loss only k2 has the gradient of the reverse KL on policy (arXiv 2510.01555); k3 is what GRPO was published with;
    k1 has a gradient whose mean is zero, and is there for comparison."""
    reference: str = ""
    """Model folder of the reference. Empty: model.path, the policy that the run began with."""
    entropy_coef: NotNegative = 0.0
    """Weight of the entropy bonus. 0: the gradient of the entropy costs time and memory over the whole vocabulary,
    and a good clip keeps the entropy up (DAPO, section 3.1)."""
