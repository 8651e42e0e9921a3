"""Routing: how the experts of a token are chosen, as data. Knows no tensor, so that a config is read without torch."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Routing:
    """How a token's experts are chosen, and by what their outputs are weighed.

    Attributes:
        num_chosen: experts of each token.
        scoring: softmax over all experts, or the sigmoid of each one's logit.
        is_renormalised: the weights of a token's experts add up to 1, before `scale`.
        scale: factor of the weights.
        num_groups, num_chosen_groups: experts are chosen from the best of so many equal groups (DeepSeek-V2, arXiv 2405.04434).
        group_score: a group is as good as its best expert, or as the sum of its best two (DeepSeek-V3, arXiv 2412.19437).
        weighs_inputs: an expert's input is weighed instead of its output.
        is_wide: logits are computed in float32, whatever the weights' dtype.
    """

    num_chosen: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    is_renormalised: bool = False
    scale: float = 1.0
    num_groups: int = 1
    num_chosen_groups: int = 1
    group_score: Literal["best", "best_two"] = "best"
    is_wide: bool = False
    weighs_inputs: bool = False
