"""Criteria by name: every formula is one, users add their own, and bad names are named."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from symprune import criteria, scores
from symprune.errors import SympruneError


def test_every_formula_is_a_criterion_in_the_order_of_the_file() -> None:
    names = list(criteria.available())
    assert names[:3] == ["magnitude", "wanda", "owanda"] and "inverse" not in names
    for name in names:
        assert criteria.get(name).function is getattr(scores, name.replace("-", "_"))


@pytest.mark.parametrize(
    ("method", "given", "meant"),
    [
        ("symwanda", {"squared": "yes", "balance": "none"}, {"squared": True, "balance": None}),
        ("symwanda", {"squared": False, "balance": 2}, {"squared": False, "balance": 2.0}),
        ("lp", {"p": "inf", "strategy": "s2"}, {"p": float("inf"), "strategy": "s2"}),
    ],
)
def test_a_parameter_becomes_what_its_default_is(
    method: str, given: dict[str, object], meant: dict[str, object]
) -> None:
    assert criteria.get(method).check(given) == meant


def test_a_users_own_criterion_is_found_by_name() -> None:
    @criteria.criterion
    def my_own(weight: Tensor, input_norm: Tensor, *, power: float = 3.0) -> Tensor:
        """|W|^power x"""
        return weight.abs() ** power * input_norm

    try:
        found = criteria.get("my-own")
        assert found.needs == ("input_norm",) and dict(found.defaults) == {"power": 3.0}
        got = found(torch.tensor([[2.0]]), {"input_norm": torch.tensor([5.0])}, {"power": "2"})
        assert float(got) == 20.0
    finally:
        criteria._REGISTRY.pop("my-own")


def test_a_module_and_function_name_a_criterion(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(str(tmp_path))
    with open("their_scores.py", "w") as file:
        file.write("def cubed(weight):\n    '''|W|^3'''\n    return weight.abs() ** 3\n")
    with pytest.raises(SympruneError, match="runs only if it is named"):
        criteria.get("their_scores:cubed")
    for name in ("their_scores:cubed", "their_scores:missing", "no_such_module:f"):
        criteria.allow_code(name)
    found = criteria.get("their_scores:cubed")
    assert float(found(torch.tensor([[-2.0]]), {})) == 8.0
    with pytest.raises(SympruneError, match="their_scores:missing"):
        criteria.get("their_scores:missing")
    with pytest.raises(SympruneError, match="no_such_module"):
        criteria.get("no_such_module:f")


def test_bad_names_and_parameters_are_named() -> None:
    with pytest.raises(SympruneError, match="did you mean wanda"):
        criteria.get("wamda")
    with pytest.raises(SympruneError, match="magnitude has no parameter 'alpha'"):
        criteria.get("magnitude").check({"alpha": 1})
    with pytest.raises(SympruneError, match="alpha of method ria cannot be 'much'"):
        criteria.get("ria").check({"alpha": "much"})
    with pytest.raises(SympruneError, match="statistics are"):
        criteria.criterion(lambda weight, nonsense: weight)
