"""The channels inside a block in an order that an N:M pattern keeps more in: hidden channels of the
MLP, or of each expert, and the values of each head.

A block is ordered when its statistics are known and nothing of it is pruned yet. It is run before
and after on a few tokens: where a product comes out differently by more than rounding, the run
ends. So whatever was found about a block's structure, no weight is ever put where it is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from symprune.engine import decide
from symprune.engine.blocks import Blocks
from symprune.engine.collect import Collector
from symprune.engine.forward import Activations
from symprune.engine.permute.links import Link, find_links, kind
from symprune.engine.permute.moves import Move, apply_all, move_columns, move_rows, take_back
from symprune.engine.permute.probe import TOKENS, Probe, Products
from symprune.engine.report import LayerReport, Report
from symprune.models.layout import Layout
from symprune.models.matrices import Matrix
from symprune.permute import HEADS, MLP, CannotPermute
from symprune.permute.order import find_order, retained, take
from symprune.recipe import Recipe
from symprune.stats import ChannelStats

BEFORE, AFTER = "retained_score_before", "retained_score"
LEAST_ALLOWED = 2.0**-15


@dataclass
class Ordered:
    """What a block's order changed: parameters, what matrices retain, what could not be ordered."""

    moves: list[Move] = field(default_factory=list)
    figures: dict[str, dict[str, float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def tell(self, report: Report, first: int) -> None:
        """Have a report say it; the block's matrices are in it, from the one numbered `first`."""
        report.notes += [note for note in self.notes if note not in report.notes]
        for number in range(first, len(report.layers)):
            layer = report.layers[number]
            found = {**layer.figures, **self.figures.get(layer.name, {})}
            report.layers[number] = replace(layer, figures=found)


def probe_tokens(layout: Layout) -> Tensor:
    """A few different tokens, whatever they stand for: structure does not depend on the text."""
    embeddings = layout.model.get_input_embeddings()  # type: ignore[operator]
    return torch.arange(TOKENS).mul(7919).remainder(embeddings.weight.shape[0]).unsqueeze(0)


def embed_probe(blocks: Blocks) -> Activations:
    """A few tokens in front of the blocks."""
    activations = blocks.embed_anew(probe_tokens(blocks.layout))
    if activations.arguments.carry_state:
        raise CannotPermute(
            f"The blocks of {type(blocks.layout.model).__name__} leave more than hidden states for "
            "later ones"
        )
    return activations


class BlockOrders:
    """Orders the blocks of a model, one after the other."""

    def __init__(self, blocks: Blocks, recipe: Recipe, parts: list[str]) -> None:
        assert recipe.n_of_m is not None
        self.recipe = recipe
        self.pattern = recipe.n_of_m
        self.parts = parts
        self.prefix = blocks.layout.prefix
        self.activations = embed_probe(blocks)
        self._known: dict[object, list[Link]] = {}

    def order(
        self,
        index: int,
        block: nn.Module,
        found: list[Matrix],
        measured: Collector,
        watched: Collector,
    ) -> Ordered:
        """Order a block in place, and the statistics of its matrices with it."""
        done, matrices = Ordered(), {matrix.name: matrix for matrix in found}
        probe = Probe(self.activations, index, block, found, f"{self.prefix}.{index}.")
        links = self._instances(self._links(probe, found), matrices)
        done.notes = self._left(found, links)
        inputs: dict[str, Tensor] = {}
        outputs: dict[str, Tensor] = {}
        for link in links:
            if not self._is_measured(link, measured):
                continue
            units = self._find_units(link, matrices, measured, done)
            for name in link.consumers:
                columns = spread(link.columns, units, matrices[name].weight.shape[1])
                inputs[name] = columns
                done.moves.append(move_columns(matrices[name], columns))
            for name, rows in link.producers:
                before = outputs.get(name, torch.arange(matrices[name].weight.shape[0]))
                outputs[name] = before[spread(rows.unsqueeze(1), units, len(before))]
        for name, rows in outputs.items():
            done.moves.append(move_rows(matrices[name], rows))
            bias = probe.biases.get(matrices[name].parameter_name)
            if bias is not None:
                piece, shape = matrices[name].piece, (len(rows),)
                done.moves.append(Move(bias, 0, rows, shape, piece))
        check_same(probe, done.moves, outputs)
        _reorder(inputs, measured.inputs, watched.inputs)
        _reorder(outputs, measured.outputs)
        for name in {**inputs, **outputs} if measured.gradients else ():
            rows, columns = (torch.arange(size) for size in matrices[name].weight.shape)
            rows, columns = outputs.get(name, rows), inputs.get(name, columns)
            order = rows.unsqueeze(1) * len(columns) + columns
            _reorder({name: order.flatten()}, measured.gradients)
        return done

    def _links(self, probe: Probe, found: list[Matrix]) -> list[Link]:
        """The links of a block, looked for once for all blocks that are built alike."""
        here = probe.prefix
        built = [(m.name.removeprefix(here), tuple(m.weight.shape), m.transposed) for m in found]
        key = (type(probe.block), tuple(built))
        if key not in self._known:
            self._known[key] = [_rename(link, here, "") for link in find_links(probe)]
        return [_rename(link, "", here) for link in self._known[key]]

    def _instances(self, links: list[Link], matrices: dict[str, Matrix]) -> list[Link]:
        """Those that are asked for and fit the pattern; one of experts once for each of them."""
        found: list[Link] = []
        for link in links:
            classes = tuple(u for u in link.classes if _fits(link.columns[u], self.pattern.m))
            fitting = replace(link, classes=classes)
            if part_of(matrices[link.consumers[0]]) not in self.parts or not classes:
                continue
            first = link.consumers[0]
            alike = [n for n in matrices if kind(n) == kind(first)] if kind(first) != first else []
            found += [fitting.of_expert(name) for name in alike] or [fitting]
        return found

    def _is_measured(self, link: Link, measured: Collector) -> bool:
        """Whether the recipe's criterion can say anything about who reads these channels."""
        needed = "input_norm" in self.recipe.criterion.needs
        return not any(
            name in measured.choosing or (needed and name not in measured.inputs)
            for name in link.consumers
        )

    def _find_units(
        self, link: Link, matrices: dict[str, Matrix], measured: Collector, done: Ordered
    ) -> Tensor:
        """Which unit goes to the place of each."""
        scores = {}
        for name in link.consumers:
            scores[name] = score_of(matrices[name], measured, self.recipe)
        units = torch.arange(len(link.columns))
        for number, some in enumerate(link.classes):
            columns = link.columns[some]
            seen = [take(s, column) for s in scores.values() for column in columns.unbind(1)]
            draw = decide.generator_for(self.recipe.seed, f"{link.consumers[0]} order {number}")
            units[some] = some[find_order(torch.cat(seen), self.pattern, draw)]
        for name, score in scores.items():
            columns = spread(link.columns, units, score.shape[1])
            done.figures[name] = figures(score, take(score, columns), self.recipe)
        return units

    def missing(self, layout: Layout, blocks: Blocks) -> list[CannotPermute]:
        """The parts of which the first block has nothing to order, and why; they are not asked for
        any longer."""
        with blocks.block(0) as block:
            found = layout.matrices(0)
            probe = Probe(self.activations, 0, block, found, f"{self.prefix}.0.")
            names = {matrix.name: matrix for matrix in found}
            known = {
                part_of(names[link.consumers[0]])
                for link in self._instances(self._links(probe, found), names)
            }
        missing = [part for part in self.parts if part not in known]
        self.parts = [part for part in self.parts if part in known]
        return [
            CannotPermute(
                f"The first block has no {_IN_WORDS[part]} whose order could be changed for "
                f"{self.pattern}",
                part,
            )
            for part in missing
        ]

    def _left(self, found: list[Matrix], known: list[Link]) -> list[str]:
        """Sentences where a block has nothing to order of a part that is asked for."""
        names = {matrix.name: matrix for matrix in found}
        there = {part_of(names[link.consumers[0]]) for link in known}
        return [
            f"There are blocks without {_IN_WORDS[part]} whose order could be changed."
            for part in self.parts
            if part not in there
        ]


_IN_WORDS = {MLP: "hidden channels", HEADS: "values of heads"}


def part_of(matrix: Matrix) -> str:
    """Which part of `--permute` the input channels of a matrix inside a block belong to."""
    return HEADS if matrix.part == "attn" else MLP


def score_of(matrix: Matrix, measured: Collector, recipe: Recipe) -> Tensor:
    """What the recipe's criterion gives each weight of a matrix, fp32."""
    stats = measured.inputs.get(matrix.name), measured.outputs.get(matrix.name)
    slopes = measured.gradients.get(matrix.name)
    return decide.score(matrix.name, matrix.weight, *stats, recipe, slopes).float()


def figures(before: Tensor, after: Tensor, recipe: Recipe) -> dict[str, float]:
    """The share of a matrix's score that the pattern keeps, in its old order and in its new one."""
    assert recipe.n_of_m is not None
    whole = float(before.sum(dtype=torch.float64)) or 1.0
    kept = (retained(score, recipe.n_of_m) / whole for score in (before, after))
    return dict(zip((BEFORE, AFTER), kept, strict=True))


def spread(places: Tensor, units: Tensor, size: int) -> Tensor:
    """The order of `size` channels in which the unit at each place is the one in `units`; what
    belongs to no unit stays."""
    order = torch.arange(size)
    order[places.flatten()] = places[units].flatten()
    return order


def check_same(probe: Probe, moves: list[Move], outputs: dict[str, Tensor]) -> None:
    """Apply moves to a block, or fail, and leave it as it was, where a product is not what it was
    but for the order of its channels."""
    before, out = probe.run()
    parameters = probe.parameters
    apply_all(parameters, moves)
    try:
        compare_with(probe, before, out, outputs)
    except CannotPermute:
        take_back(parameters, moves)
        raise


def compare_with(
    probe: Probe,
    before: Products,
    out: Tensor,
    outputs: dict[str, Tensor],
    hidden: Tensor | None = None,
) -> None:
    """Fail where a block, whose weights were moved, makes something else of a few tokens than it
    did before, but for the order of the channels in `outputs`. Later products are given what was
    expected of earlier ones."""
    seen: set[str] = set()

    def compare(name: str, _: Tensor, y: Tensor) -> None:
        expected = before.made.get(name, y)
        if name in outputs:
            expected = expected.index_select(-1, outputs[name].to(y.device))
        if name not in before.made or not is_near(y, expected):
            raise _changed(name)
        y.copy_(expected)
        seen.add(name)

    _, now = probe.run(compare, hidden)
    if seen != before.made.keys() or not is_near(now, out):
        raise _changed(f"Block {probe.index}")


def _changed(what: str) -> CannotPermute:
    return CannotPermute(f"{what} computes something else when channels change places")


def is_near(found: Tensor, expected: Tensor) -> bool:
    """Whether two results are equal but for rounding."""
    if found.shape != expected.shape:
        return False
    allowed = max(4 * torch.finfo(expected.dtype).eps, LEAST_ALLOWED)
    error = torch.linalg.vector_norm(found.float() - expected.float())
    return bool(error <= allowed * torch.linalg.vector_norm(expected.float()))


def _rename(link: Link, old: str, new: str) -> Link:
    """The link with another beginning of its names."""
    consumers = tuple(new + name.removeprefix(old) for name in link.consumers)
    producers = tuple((new + name.removeprefix(old), rows) for name, rows in link.producers)
    return replace(link, consumers=consumers, producers=producers)


def _fits(columns: Tensor, m: int) -> bool:
    """Whether the channels of units, in their order, are whole groups of M in every consumer."""
    if len(columns) % m or len(columns) <= m:
        return False
    groups = (columns // m).view(-1, m, columns.shape[1])
    return bool((groups == groups[:, :1]).all())


def _reorder(orders: dict[str, Tensor], *tables: dict[str, ChannelStats]) -> None:
    """Put statistics into the order of what they are of; those that several matrices share once."""
    for table in tables:
        done: set[int] = set()
        for name, order in orders.items():
            if name in table and id(table[name]) not in done:
                table[name].reorder(order)
                done.add(id(table[name]))


def summary(layers: list[LayerReport]) -> list[str]:
    """A sentence about what the new order brought."""
    known = [layer for layer in layers if AFTER in layer.figures]
    if not known:
        return []
    before, after = (sum(layer.figures[name] for layer in known) for name in (BEFORE, AFTER))
    was, now = (f"{100 * score / len(known):.1f} %" for score in (before, after))
    rose = f"rose from {was} to {now}" if was != now else f"stayed at {was}"
    return [
        f"The input channels of {len(known)} of {len(layers)} matrices were permuted: the retained "
        f"score {rose}."
    ]
