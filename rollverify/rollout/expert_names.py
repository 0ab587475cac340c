"""Which of the engine's parameters a transfer has written in full. Imports no engine library.

An engine keeps a layer's experts in two parameters, a trainer sends three weights per expert; a
parameter counts as written only if all its experts came. Does not say what a model's names must be.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

_EXPERT = re.compile(r"(?P<layer>.+\.experts)\.(?P<expert>\d+)\.(?P<projection>\w+)\.weight")
_PARTS = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}


def fully_written(
    written: Iterable[str], sent: Iterable[str], num_rows: Mapping[str, int]
) -> set[str]:
    """Parameters of which every part was sent.

    Args:
        written: names as the engine's loader reports them; it leaves `routed_experts.` out.
        sent: Hugging Face names handed to the loader.
        num_rows: size of the first dimension of each of the engine's parameters, for experts their
            number.

    Returns:
        The engine's own names; parameters of which some experts did not come are left out.
    """
    came: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in sent:
        if match := _EXPERT.fullmatch(name):
            came[match["layer"]][match["projection"]].add(match["expert"])
    full = set()
    for name in written:
        own = name if name in num_rows else name.replace(".experts.", ".experts.routed_experts.", 1)
        layer, _, leaf = own.partition(".routed_experts.")
        # A layer whose experts came in one tensor has no names of single experts.
        parts = [came[layer][part] for part in _PARTS.get(leaf, ())] if layer in came else []
        if all(len(experts) == num_rows[own] for experts in parts):
            full.add(own)
    return full
