"""The names of methods, an objective with its k as in `lml-20`: made, read and ordered here alone."""

from typing import NamedTuple

from torchlml_lab.errors import BadInput
from torchlml_lab.studies.scene_graph.objectives import OBJECTIVES, Objective, takes_k


class Method(NamedTuple):
    """An objective and, where it takes one, its k."""

    objective: Objective
    k: int | None

    @property
    def name(self) -> str:
        """As in tables and options: `softmax`, `lml-20`."""
        return self.objective if self.k is None else f"{self.objective}-{self.k}"


def method_of(objective: Objective, k: int) -> Method:
    """The method of a run with these settings; a k that the objective does not take is left out."""
    return Method(objective, k if takes_k(objective) else None)


def find_method(name: str) -> Method | None:
    """The method of a name, None for a name of none.

    Example:
        >>> find_method("truncated-entropy-20")
        Method(objective='truncated-entropy', k=20)
    """
    objective, _, k = name.rpartition("-")
    for one in OBJECTIVES:
        if takes_k(one) and one == objective and k.isdecimal():
            return Method(one, int(k))
        if not takes_k(one) and one == name:
            return Method(one, None)
    return None


def parse_method(name: str) -> Method:
    """The method of a name that `--methods` gave; a name of none raises `BadInput`."""
    method = find_method(name)
    if method is None:
        known = ", ".join(f"{one}-K" if takes_k(one) else one for one in OBJECTIVES)
        raise BadInput(f"`--methods` has `{name}`, and a method is one of {known}, with a number for K.")
    return method
