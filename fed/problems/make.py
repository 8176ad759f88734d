"""From names to a problem: data set + partition + model -> `Problem`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from symprune.errors import SympruneError
from symprune.fed.problems.checks import check_problem
from symprune.fed.problems.datasets import Dataset, check_data, load
from symprune.fed.problems.losses import (
    Linear,
    Logistic,
    Loss,
    Module,
    Softmax,
    cross_entropy,
    squared_error,
)
from symprune.fed.problems.models.causal_lm import CausalLM, token_weights
from symprune.fed.problems.models.user_code import is_code, load_code
from symprune.fed.problems.networks import NETWORKS, check_size, network
from symprune.fed.problems.partitions import check_partition, partition
from symprune.fed.problems.problem import Problem, Rows, stack_rows
from symprune.fed.problems.quadratic import normal_equations
from symprune.fed.randomness import check_seed
from symprune.maskset import MaskSet
from symprune.validation import check_not_negative

Own = nn.Module | Loss | Callable[[], nn.Module | Loss]
"""A model of the user's own: a module, a loss, or what makes one."""
CONVEX = ("logistic", "softmax", "linear")
CODE_FREE = (*CONVEX, *NETWORKS)  # models by these first words are no user's code
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def make_problem(
    data: str | Dataset = "digits",
    model: str | Own | None = None,
    split: str = "iid",
    *,
    clients: int = 10,
    l2: float = 1e-3,
    nonconvex: float = 0.0,
    weighting: str = "mean",
    dtype: str = "float32",
    seed: int = 0,
    client_test_share: float = 0.0,
    masks: str | Path | Mapping[str, Tensor] | None = None,
    exempt: Sequence[str] = (),
    most_parameters: int | None = None,
) -> Problem:
    """A federated problem: a data set, shared out, with a loss.

    data: a data set, or the name that `load` knows it by. model: logistic, softmax, linear (by
    default the one that fits the labels), a network's name, or a module of your own or what makes
    one; both may be `module:function` if `allow_code` was told so. split: how `partition` shares
    the rows out, such as iid, class:2 or dirichlet:0.5. clients: among how many. l2: the ridge
    `l2/2 ||w||^2`. nonconvex: weight of `sum_j w_j^2/(1+w_j^2)`. weighting: of a client's rows, see
    `stack_rows`. dtype: float32 or float64. seed: of the split. client_test_share: the part of
    every client's rows that is kept for its own test. masks: a `MaskSet` or the file or folder of
    one; the problem is then one in the weights that they keep. exempt: patterns of names, such as
    *embed* or *norm*, of parameters that are not trained, not compressed and not sent.
    most_parameters: of a network by its name; a larger one is refused before memory is taken."""
    if isinstance(masks, str | Path):
        masks = MaskSet.load(masks)
    check_not_negative(l2=l2, nonconvex=nonconvex)
    check_seed(seed)
    if dtype not in DTYPES:
        raise SympruneError(f"Unknown dtype {dtype!r}; choose float32 or float64.")
    if not 0 <= client_test_share < 1:
        raise SympruneError(f"The clients' test share {client_test_share} is outside [0, 1).")
    dataset = load(data) if isinstance(data, str) else data
    dataset = _cast(dataset, DTYPES[dtype])
    model = model or {0: "linear", 2: "logistic"}.get(dataset.classes, "softmax")
    if model == "softmax":
        dataset = dataset.with_intercept()
    loss = make_loss(model, dataset, most_parameters, _patterns(exempt))
    parts = [(dataset.x[i], dataset.y[i]) for i in partition(dataset, split, clients, seed)]
    called = model if isinstance(model, str) else type(getattr(loss, "module", loss)).__name__
    name = f"{dataset.name} ({called}, {split}, {clients} clients)"
    test = None
    if dataset.test_x is not None and dataset.test_y is not None:
        test = _stack([(dataset.test_x, dataset.test_y)], "mean", dataset)
    if model == "linear" and weighting == "sum":
        if nonconvex or client_test_share:
            raise SympruneError(
                "Linear regression with weighting sum is solved by its normal equations, without "
                "a nonconvex term and without clients' own tests."
            )
        return _finished(normal_equations(parts, l2, test, name), masks)
    own_test = None
    if client_test_share:
        parts, held = _hold_out(parts, client_test_share, seed)
        own_test = _stack(held, "mean", dataset)
    rows = _stack(parts, weighting, dataset)
    problem = Problem(loss, rows, l2, nonconvex, test, own_test, name=name, words=dataset.words)
    return _finished(problem, masks)


def check_specs(data: str, model: str | None, split: str) -> None:
    """Fail where a name means nothing, without a look at the data."""
    check_data(data)
    check_partition(split)
    if model is not None:
        check_model(model)


def check_model(model: str) -> None:
    known = CODE_FREE
    if not is_code(model, known) and model.partition(":")[0] not in known:
        raise SympruneError(f"Unknown model {model!r}; choose from {', '.join(known)}.")


def make_loss(
    model: str | Own,
    data: Dataset,
    most_parameters: int | None = None,
    exempt: tuple[str, ...] = (),
) -> Loss:
    """The loss a model, or its name, stands for on this data."""
    if not isinstance(model, str) or is_code(model, CODE_FREE):
        return _own_loss(model, data, exempt)
    if data.text:
        raise SympruneError(f"Model {model} does not read text; {data.name} needs one of your own.")
    features = data.x.shape[1:]
    if model in CONVEX and exempt:
        raise SympruneError(f"Model {model} is one tensor; only a network has parts to exempt.")
    if model in CONVEX and len(features) != 1:
        raise SympruneError(
            f"Model {model} needs flat rows; {data.name} has shape {tuple(features)}."
        )
    if model == "logistic":
        if data.classes != 2:
            raise SympruneError(
                f"Model logistic needs two classes; {data.name} has {data.classes}."
            )
        return Logistic(features[0])
    if model == "softmax":
        if data.classes < 3:
            raise SympruneError(f"Model softmax needs three classes or more, not {data.classes}.")
        return Softmax(features[0], data.classes)
    if model == "linear":
        return Linear(features[0])
    check_model(model)
    if data.classes == 2:
        raise SympruneError(f"Networks need labels 0, 1, ...; {data.name} has -1 and +1.")
    make = partial(network(model), tuple(features), data.classes or 1)
    if most_parameters is not None:
        check_size(make, model, most_parameters)
    if data.classes:
        return Module(make, cross_entropy, "classification", exempt)
    return Module(make, squared_error, "regression", exempt)


def _patterns(exempt: object) -> tuple[str, ...]:
    """A list of texts; a job may bring anything."""
    known = isinstance(exempt, list | tuple) and all(isinstance(one, str) for one in exempt)
    if not known:
        raise SympruneError(f"exempt is a list of patterns of names, not {exempt!r}.")
    return tuple(cast(Sequence[str], exempt))


def _own_loss(model: str | Own, data: Dataset, exempt: tuple[str, ...]) -> Loss:
    """The loss of a user's module: that of a language model on text, else by the targets."""
    name, make = "The model", cast(Any, model)
    if isinstance(model, str):
        name, make = f"The model {model}", load_code(model, "model")
    made = make() if callable(make) and not isinstance(make, nn.Module) else make
    if not isinstance(made, nn.Module):
        if hasattr(made, "layout") and hasattr(made, "gradient"):
            if exempt:
                raise SympruneError(f"{name} is a Loss, which says itself what it trains.")
            return made
        raise SympruneError(f"{name} is a {type(made).__name__}, not an nn.Module or a Loss.")
    if data.text:
        loss = CausalLM(made, exempt)
        loss.check_tokens(data.x)
        return loss
    if data.classes and bool((data.y < 0).any()):
        raise SympruneError(f"Networks need labels 0, 1, ...; {data.name} has -1 and +1.")
    if data.classes:
        return Module(make, cross_entropy, "classification", exempt)
    return Module(make, squared_error, "regression", exempt)


def _stack(parts: list[tuple[Tensor, Tensor]], weighting: str, data: Dataset) -> Rows:
    """Clients' rows; of text every token weighs the same."""
    rows = stack_rows(parts, weighting)
    if not data.text:
        return rows
    return replace(rows, weights=token_weights(rows.weights, rows.y, data.x.shape[1]))


def _finished(problem: Problem, masks: Mapping[str, Tensor] | None) -> Problem:
    check_problem(problem)
    return problem if masks is None else problem.masked(masks)


def _cast(data: Dataset, dtype: torch.dtype) -> Dataset:
    """Numbers in this type; tokens stay whole."""

    def rows(x: Tensor) -> Tensor:
        return x.to(dtype) if x.is_floating_point() else x

    return replace(
        data,
        x=rows(data.x),
        y=data.y.to(dtype),
        test_x=None if data.test_x is None else rows(data.test_x),
        test_y=None if data.test_y is None else data.test_y.to(dtype),
    )


def _hold_out(
    parts: list[tuple[Tensor, Tensor]], share: float, seed: int
) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
    """Split every client's rows at random into its own training and test rows."""
    train, test = [], []
    for client, (x, y) in enumerate(parts):
        if len(y) < 2:
            raise SympruneError(f"Client {client} has one row: too few to keep some for a test.")
        generator = torch.Generator().manual_seed(seed * 1_000_003 + client)
        order = torch.randperm(len(y), generator=generator)
        held = min(max(1, round(share * len(y))), len(y) - 1)
        test.append((x[order[:held]], y[order[:held]]))
        train.append((x[order[held:]], y[order[held:]]))
    return train, test
