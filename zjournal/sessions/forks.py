"""Why a prompt parted from what was kept of its conversation, by the facts alone: for a count, not for a proof.

`zj sessions diff` compares the very texts and proves a cause (diff.py); that takes two prompts and a vocabulary. What
is counted of every request may cost two rows of the journal at most.
"""

from __future__ import annotations

from typing import Literal

from zjournal.journal.events import CacheMatched, RequestAccepted
from zjournal.journal.projections import Turn

FORKED = "forked"  # as CacheMatched.reason

Cause = Literal["answer_changed", "thoughts_dropped", "input_changed", "branch", "other_conversation"]


def cause(accepted: RequestAccepted, matched: CacheMatched, nearest: Turn | None, parent: Turn | None) -> Cause | None:
    """The cause; None where the prompt did not part from anything.

    `nearest` is the turn that `matched` names, `parent` the one that `accepted` does; None: there is none any more.
    """
    if accepted.choice:
        return None  # the same prompt as that of the first choice
    if accepted.forks:
        return "answer_changed"
    if matched.reason != FORKED:
        return None
    if nearest is None or nearest.session != accepted.session:
        return "other_conversation"
    # The last token that was sampled is no input of its own turn, so that the next one computes it.
    if parent is not None and matched.cached >= parent.prompt + parent.output - 1:
        return "branch"
    return "thoughts_dropped" if accepted.rewritten else "input_changed"
