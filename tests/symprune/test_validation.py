"""What users type: one caster for every option, one grammar for `--set`."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from symprune.errors import SympruneError
from symprune.validation import (
    cast_option,
    check_names,
    has_kinds,
    parse_assignments,
    parse_json,
    parse_yaml,
)


@pytest.mark.parametrize(
    ("kind", "value", "meant"),
    [
        ("float", 1, 1.0),
        ("float", "1e-3", 1e-3),
        ("int", "20", 20),
        ("int", 20.0, 20),
        ("bool", "off", False),
        ("bool", True, True),
        ("str", "s1", "s1"),
        ("str", 1, "1"),
        ("float | None", "None", None),
        ("str | None", None, None),
        ("int | float", 0.5, 0.5),
        ("float | tuple[float, ...]", [1, "2"], (1.0, 2.0)),
        ("tuple[tuple[int, ...], ...] | None", [[1, 2], [3]], ((1, 2), (3,))),
        ("tuple[str, ...]", ["a"], ("a",)),
    ],
)
def test_a_value_becomes_its_options_type(kind: str, value: Any, meant: Any) -> None:
    got = cast_option("dsnot", "option", kind, value)
    assert got == meant and type(got) is type(meant)


@pytest.mark.parametrize(
    ("kind", "value", "takes"),
    [
        ("int", 2.5, "a whole number"),
        ("int", True, "a whole number"),
        ("int", None, "a whole number"),
        ("float | None", "much", "a number or none"),
        ("bool", 2, "true or false"),
        ("float", [1], "a number"),
        ("str", ["a"], "text"),
        ("tuple[int, ...]", 3, "a list"),
        ("tuple[int, ...]", ["a"], "a list"),
    ],
)
def test_a_value_that_does_not_fit_is_a_sentence(kind: str, value: Any, takes: str) -> None:
    with pytest.raises(SympruneError) as raised:
        cast_option("dsnot", "cycles", kind, value)
    assert str(raised.value) == f"Option cycles of dsnot cannot be {value!r}; it takes {takes}."


def test_assignments_are_read_as_yaml() -> None:
    texts = [
        "a=1e-3",
        "local-steps = 5",
        "p=inf",
        "same=true",
        "rates=[0.1, 1e-2]",
        "name=s1",
        "b=",
    ]
    assert parse_assignments(texts) == {
        "a": 1e-3,
        "local_steps": 5,
        "p": float("inf"),
        "same": True,
        "rates": [0.1, 1e-2],
        "name": "s1",
        "b": None,
    }


@pytest.mark.parametrize("text", ["alpha", "=1", " =1", "a=[1"])
def test_what_assigns_nothing_is_named(text: str) -> None:
    with pytest.raises(SympruneError, match="--set"):
        parse_assignments([text])


def test_an_unknown_name_comes_with_what_there_is() -> None:
    with pytest.raises(SympruneError, match="Method magnitude has no parameter 'p'; it takes none"):
        check_names(["p"], [], "Method magnitude", "parameter")
    with pytest.raises(SympruneError, match="did you mean sparsity"):
        check_names(["sparsty"], ["sparsity"], "A recipe")


def test_values_that_were_read_have_the_kinds_that_are_asked_for() -> None:
    kinds = {"name": str, "count": int, "share": float, "more": dict}
    good = {"name": "a", "count": 1, "share": 0.5, "more": {}, "besides": None}
    assert has_kinds(good, kinds) and has_kinds({**good, "share": 1}, kinds)
    for name, value in (
        ("name", 1),
        ("count", True),
        ("share", "1"),
        ("share", True),
        ("more", []),
    ):
        assert not has_kinds({**good, name: value}, kinds)
    assert not has_kinds({**good, "share": 10**400}, kinds)  # larger than any float
    assert not has_kinds([good], kinds) and not has_kinds({}, kinds)


def test_json_that_is_nested_too_deeply_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json("[" * 200_000)


def test_yaml_takes_no_aliases_and_no_depth() -> None:
    for text in ("a: &x [1]\nb: *x\n", "[" * 40 + "]" * 40):
        with pytest.raises(yaml.YAMLError):
            parse_yaml(text)
