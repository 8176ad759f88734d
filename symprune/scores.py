"""Weight + statistics -> score. One short pure function per criterion; the lowest scores are
pruned.

Thesis chapter 6 (SymWanda), Table 6.1 and sections 6.3.2-6.3.5, in PyTorch's orientation: `weight`
is `[out, in]`, row `o` an output channel, column `i` an input channel. With x_i the l2 norm of
input channel i and y_o that of output channel o over the calibration tokens, r_o = ||W_o:||_1 and
c_i = ||W_:i||_1. (The thesis writes W as `[in, out]`: its rows are our columns.)

To add a criterion, write a function of `weight`. Its other positional arguments name the statistics
it needs, its keyword-only arguments are its parameters; the command line, recipes and sweeps find
it by itself (`criteria`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from symprune.errors import SympruneError

AT_ONCE = 2**20  # numbers


def magnitude(weight: Tensor) -> Tensor:
    """|W|"""
    return weight.abs()


def wanda(weight: Tensor, input_norm: Tensor, *, alpha: float = 1.0) -> Tensor:
    """|W| x^alpha (Corollary 6.3.2; alpha = 1 is Wanda)"""
    return weight.abs().mul_(input_norm**alpha)


def owanda(weight: Tensor, output_norm: Tensor, *, alpha: float = 1.0) -> Tensor:
    """|W| y^alpha (Corollary 6.3.3; inside one row the same order as magnitude)"""
    return weight.abs().mul_(output_norm.unsqueeze(1) ** alpha)


def wanda_plus_plus(
    weight: Tensor, input_norm: Tensor, regional_gradient: Tensor, *, strength: float = 100.0
) -> Tensor:
    """|W| (strength G + x) (Wanda++; G: root mean square over samples of the gradient of the block
    output's norm)"""
    return weight.abs().mul_(torch.add(input_norm, regional_gradient, alpha=strength))


def symwanda_general(
    weight: Tensor,
    input_norm: Tensor,
    output_norm: Tensor,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    squared: bool = False,
    balance: float | None = None,
) -> Tensor:
    """|W| (x^alpha + y^beta) (Lemma 6.3.1)

    squared: |W| sqrt(x^2alpha + y^2beta), appendix E.2. balance: x and y are normalised to mean 1
    in the layer and y is weighted by it; without it, as printed, the larger of the two scales
    rules.
    """
    x, y = _balance(input_norm**alpha, output_norm**beta, balance)
    return _weigh(weight.abs(), x, y.unsqueeze(1), _choose_sum(squared))


def symwanda(
    weight: Tensor,
    input_norm: Tensor,
    output_norm: Tensor,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    squared: bool = False,
    balance: float | None = None,
) -> Tensor:
    """|W| (x^alpha / c + y^beta / r) (Lemma 6.3.7, the general diagonal form)

    squared and balance as for symwanda-general.
    """
    x, y = _balance(input_norm**alpha, output_norm**beta, balance)
    left = x * inverse(_column_norms(weight))
    right = y.unsqueeze(1) * inverse(_row_norms(weight))
    return _weigh(weight.abs(), left, right, _choose_sum(squared))


def symmetric(weight: Tensor, *, squared: bool = False) -> Tensor:
    """|W| (||W_:i||_2 + ||W_o:||_2) (Corollary 6.3.4, weights alone)"""
    return _weigh(
        weight.abs(), _column_norms(weight, 2), _row_norms(weight, 2), _choose_sum(squared)
    )


def ri(weight: Tensor) -> Tensor:
    """|W| (1/c + 1/r) (Theorem 6.3.5, relative importance)"""
    return _weigh(weight.abs(), inverse(_column_norms(weight)), inverse(_row_norms(weight)))


def ria(weight: Tensor, input_norm: Tensor, *, alpha: float = 0.5) -> Tensor:
    """|W| (1/c + 1/r) x^alpha (Lemma 6.3.6; alpha = 0.5 is best on the thesis's models)"""
    return ri(weight).mul_(input_norm**alpha)


def col_sum(weight: Tensor, input_norm: Tensor, *, alpha: float = 0.5) -> Tensor:
    """|W| / r x^alpha (Table 6.3, the half of RIA that does the work)

    The thesis's W is `[in, out]`, so its column is an output channel, our row. Only this reading
    agrees with Table 6.3, where Col-Sum is close to RIA and Row-Sum close to Wanda: on SmolLM2-135M
    (50 % per layer) dividing by r gives 83.1 against RIA's 83.4, dividing by c 104.2 against
    Wanda's 98.0. With a `row` group it orders like Wanda, since r is the same for a whole row.
    """
    return weight.abs().mul_(inverse(_row_norms(weight))).mul_(input_norm**alpha)


def row_sum(weight: Tensor, input_norm: Tensor, *, alpha: float = 0.5) -> Tensor:
    """|W| / c x^alpha (Table 6.3, the other half; the thesis's row is our column)"""
    return weight.abs().mul_(inverse(_column_norms(weight))).mul_(input_norm**alpha)


_STRATEGIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "s1": lambda c, r: inverse(c) + inverse(r),
    "s2": lambda c, r: inverse(c + r),
    "s3": torch.add,
    "s4": lambda c, r: inverse(inverse(c) + inverse(r)),
}


def lp(
    weight: Tensor,
    input_norm: Tensor,
    *,
    p: float = 1.0,
    strategy: str = "s1",
    alpha: float = 0.5,
) -> Tensor:
    """|W| (1/||W_:i||_p + 1/||W_o:||_p) x^alpha (Eq. 6.3; p = 1 is RIA, p = 0 counts non-zeros)

    strategy (appendix E.3.3): s1 as above, s2 |W| / (c+r), s3 |W| (c+r), s4 |W| / (1/c + 1/r).
    """
    if p not in (0, 1, 2, 3, 4, torch.inf):
        raise SympruneError(f"Method lp takes p = 0, 1, 2, 3, 4 or inf, not {p:g}.")
    if strategy.lower() not in _STRATEGIES:
        raise SympruneError(f"Method lp takes strategy s1, s2, s3 or s4, not {strategy!r}.")
    norms = _column_norms(weight, p), _row_norms(weight, p)
    return _weigh(weight.abs(), *norms, _STRATEGIES[strategy.lower()]).mul_(input_norm**alpha)


def stochria(
    weight: Tensor,
    input_norm: Tensor,
    generator: torch.Generator,
    *,
    alpha: float = 0.5,
    beta: float = 0.1,
    sampling: str = "independent",
) -> Tensor:
    """|W| (1/||W_{S_i,i}||_1 + 1/||W_{o,S_o}||_1) x^alpha (Eq. 6.4, sums over random subsets)

    Each subset has tau = max(1, round(beta min(out, in))) entries, without replacement. sampling:
    `independent` draws one per row and one per column, as the formula says; `shared` draws one set
    of columns for all rows and one set of rows for all columns, which is a gather and much faster.
    """
    check_share(beta)
    magnitudes = weight.abs()
    tau = max(1, round(beta * min(weight.shape)))
    if sampling == "independent":
        rows = _sum_sampled(magnitudes, tau, generator)
        columns = _sum_sampled(magnitudes.T, tau, generator)
    elif sampling == "shared":
        out_channels, in_channels = weight.shape
        some_columns = _send(torch.randperm(in_channels, generator=generator)[:tau], weight)
        some_rows = _send(torch.randperm(out_channels, generator=generator)[:tau], weight)
        rows = magnitudes[:, some_columns].sum(1)
        columns = magnitudes[some_rows].sum(0)
    else:
        raise SympruneError(
            f"Method stochria takes sampling independent or shared, not {sampling!r}."
        )
    return _weigh(magnitudes, inverse(columns), inverse(rows).unsqueeze(1)).mul_(input_norm**alpha)


def _sum_sampled(matrix: Tensor, tau: int, generator: torch.Generator) -> Tensor:
    """The sum of `tau` entries of each row, drawn without replacement: they are drawn, or the
    others if those are fewer."""
    count, size = matrix.shape
    fewer = _send(_draw_subsets(count, size, min(tau, size - tau), generator), matrix)
    return (matrix.gather(1, fewer) if 2 * tau <= size else matrix.scatter(1, fewer, 0)).sum(1)


def _send(drawn: Tensor, matrix: Tensor) -> Tensor:
    """To where the matrix is, without waiting for what is done there."""
    return drawn.to(matrix.device, non_blocking=True)


def _draw_subsets(count: int, size: int, tau: int, generator: torch.Generator) -> Tensor:
    """`count` independent subsets of `tau` of `size` things, `[count, tau]`, all equally likely.

    R. W. Floyd's algorithm, for all subsets at once: the k-th draw is among the first size-tau+k
    things; one that is already in stands for the last of them, which cannot be in yet. Drawn on
    the CPU, so that every device samples the same.
    """
    last = torch.arange(size - tau, size)
    drawn = (torch.rand(tau, count, generator=generator) * (last + 1).unsqueeze(1)).long()
    taken, places = torch.zeros(count * size, dtype=torch.bool), torch.arange(count) * size
    for draw, newest in zip(drawn, last.tolist(), strict=True):
        draw.clamp_(max=newest)  # a product in fp32 may round up to what it must stay below
        draw.masked_fill_(taken[draw + places], newest)
        taken[draw + places] = True
    return drawn.T


def inverse(norm: Tensor) -> Tensor:
    """1/norm, and 0 for a dead row or column: its weights are zero and score zero. So small that
    1/norm would be infinite is dead."""
    return torch.where(norm >= torch.finfo(norm.dtype).tiny, 1 / norm, torch.zeros_like(norm))


def _row_norms(weight: Tensor, p: float = 1.0) -> Tensor:
    """||W_o:||_p as a column vector."""
    return torch.linalg.vector_norm(weight, ord=p, dim=1, keepdim=True)


def _column_norms(weight: Tensor, p: float = 1.0) -> Tensor:
    """||W_:i||_p as a row vector."""
    return torch.linalg.vector_norm(weight, ord=p, dim=0, keepdim=True)


def _weigh(
    magnitudes: Tensor,
    columns: Tensor,
    rows: Tensor,
    factor: Callable[[Tensor, Tensor], Tensor] = torch.add,
) -> Tensor:
    """|W| factor(columns, rows), in place, for a row vector and a column vector.

    Some rows at a time: the factor of all of them would be another matrix as large as W.
    """
    some = max(1, AT_ONCE // magnitudes.shape[1])
    for part, beside in zip(magnitudes.split(some), rows.split(some), strict=True):
        part.mul_(factor(columns, beside))
    return magnitudes


def _choose_sum(squared: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """left + right, or sqrt(left^2 + right^2): the objective with squared norms (appendix E.2)."""
    return torch.hypot if squared else torch.add


def check_share(beta: float) -> None:
    """The share of a row and a column that stochRIA draws."""
    if not 0 < beta <= 1:
        raise SympruneError(f"Method stochria takes beta in (0, 1], not {beta:g}.")


def _balance(x: Tensor, y: Tensor, balance: float | None) -> tuple[Tensor, Tensor]:
    """x and y as they are, or both brought to mean 1 and y weighted by `balance`."""
    if balance is None:
        return x, y
    return x * inverse(x.mean()), y * (balance * inverse(y.mean()))
