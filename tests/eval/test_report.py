"""The report page: what it shows, and that it is safe to open."""

from __future__ import annotations

import base64
import json
import shutil
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from reports import Page, cell, make_run, sweep_file

from symprune import MaskSet, Recipe
from symprune.errors import SympruneError
from symprune.eval import report
from symprune.eval.report import cells, heatmap, layers, pareto, scale
from symprune.eval.report import sweep as sweep_page


def pixels(uri: str) -> torch.Tensor:
    """The palette indices of a PNG that `data_uri` wrote."""
    data = base64.b64decode(uri.removeprefix("data:image/png;base64,"))
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    at, found = 8, {}
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        (check,) = struct.unpack(">I", data[at + 8 + length : at + 12 + length])
        assert check == zlib.crc32(kind + body)
        found[kind] = body
        at += 12 + length
    assert len(found[b"PLTE"]) == 768
    width, height = struct.unpack(">II", found[b"IHDR"][:8])
    raw = bytearray(zlib.decompress(found[b"IDAT"]))
    return torch.frombuffer(raw, dtype=torch.uint8).view(height, width + 1)[:, 1:]


def test_a_sweep_shows_every_cell_and_averages_over_seeds(sweep: Path) -> None:
    page = Page(report.build(sweep))
    settings, every = page.tables
    assert len(settings) == 1 + 8 and len(every) == 1 + 16
    seeds = {(row[0], row[1]): (row[2], row[3]) for row in settings[1:]}
    assert seeds["stochria", "25 %"] == ("33.34 ± 1.00", "3")
    assert seeds["wanda", "2:4"] == ("55.00", "1")
    assert "dense 30.00" in page.text and "best at 62.5 %" in page.text


def test_a_sweep_draws_a_line_per_method_and_patterns_as_open_marks(sweep: Path) -> None:
    page = Page(report.build(sweep))
    assert len(page.having("path", "class", "open")) == 2 * 2  # methods x (wide, narrow)
    lines = [a for a in page.having("path", "class", "join") if a["d"] != "M1 7H37"]
    assert len(lines) == 2 * 2 and all((a["d"] or "").count("L") == 2 for a in lines)
    assert len({a.get("stroke-dasharray") for a in lines}) == 2
    assert len(page.having("line", "class", "reference")) == 2
    assert len(page.having("button", "aria-pressed", "true")) == 2


def test_one_sparsity_is_drawn_as_dots_best_first(tmp_path: Path) -> None:
    lines = [
        cell(str(alpha), 60 - alpha, recipe={"params": {"alpha": alpha}}) for alpha in (0.5, 1.0, 2)
    ]
    page = Page(report.build(sweep_file(tmp_path / "s.jsonl", lines)))
    tips = [a["data-tip"] or "" for t, a in page.tags if t == "g" and "data-tip" in a]
    assert [tip.split("\n")[0] for tip in tips[:3]] == [
        "ria alpha=2",
        "ria alpha=1",
        "ria alpha=0.5",
    ]
    assert "The dense model has 30.00, outside the picture" in page.text


def test_many_settings_are_drawn_as_the_best_of_each_method(tmp_path: Path) -> None:
    lines = [
        cell(f"{alpha} {s}", 100 * s + alpha, recipe={"params": {"alpha": alpha}, "sparsity": s})
        for alpha in range(20)
        for s in (0.3, 0.5)
    ]
    page = Page(report.build(sweep_file(tmp_path / "s.jsonl", lines)))
    assert "Each line is the best setting of its method" in page.text
    assert len(page.having("button", "aria-pressed", "true")) == 1
    assert len(page.tables[0]) == 1 + 40


def test_cells_of_different_models_or_texts_are_kept_apart(tmp_path: Path) -> None:
    lines = [cell("a", 40), cell("b", 50, model="other"), cell("c", 60, data="ptb")]
    page = Page(report.build(sweep_file(tmp_path / "s.jsonl", lines)))
    assert [len(table) for table in page.tables] == [2, 2, 2]
    assert "other on builtin" in page.text and "tiny on ptb" in page.text


def test_a_sweep_opens_with_the_best_setting_and_how_to_make_it(sweep: Path) -> None:
    page = Page(report.build(sweep))
    said = "Best of 2 settings: wanda at 25 %; stochria at 50 %, 62.5 % and 2:4."
    assert said in page.text and "50 % 49.75 ± 1.00 (+66 %)" in page.text
    assert "Make the best at 2:4: stochria" in page.text
    assert page.text.count("symprune prune --model tiny --recipe recipe.yaml") == 4


@pytest.mark.parametrize(
    ("results", "said"),
    [
        ([cell("a", 40)], "ria at 50 %, perplexity 40.00 (+33 %), dense 30.00."),
        (
            [cell("a", 40), cell("b", 30.001, recipe={"method": "wanda"})],
            "Best of 2 settings: wanda at 50 %, perplexity 30.00 (unchanged), dense 30.00.",
        ),
    ],
)
def test_the_terminal_says_the_same_of_results_in_memory(results: list[Any], said: str) -> None:
    assert sweep_page.verdict(cells.of_results(results)) == said


def test_the_frontier_is_what_no_other_choice_beats() -> None:
    costs = [(4.0, 50.0), (2.0, 90.0), (3.0, 95.0), (8.0, 40.0), (9.0, 40.0), (2.0, 91.0)]
    choices = [pareto.Choice(str(n), *pair) for n, pair in enumerate(costs)]
    assert [choice.name for choice in pareto.frontier(choices)] == ["1", "0", "3"]


def test_a_sweep_draws_perplexity_against_bits_with_the_frontier_numbered(tmp_path: Path) -> None:
    figures = [(4.0, 50.0), (2.0, 90.0), (3.0, 95.0)]
    lines = [
        cell(str(n), figure, bits_per_weight=bits, recipe={"params": {"alpha": n}})
        for n, (bits, figure) in enumerate(figures)
    ]
    page = Page(report.build(sweep_file(tmp_path / "s.jsonl", lines)))
    assert "Perplexity against bits" in page.text and "time to prune" not in page.text
    assert "ria alpha=1, 50 %: 2.00 bits, 90.00ria alpha=0, 50 %: 4.00 bits, 50.00" in page.text
    assert "ria alpha=2, 50 %: " not in page.text and "the others" in page.text
    assert page.tables[0][0][6] == "bits a weight"


def test_settings_are_named_by_what_sets_them_apart(tmp_path: Path) -> None:
    refined = {"name": "dsnot", "max_cycles": 50, "layers": "attn"}
    recipes = [{}, {"refine": refined}, {"refine": refined | {"max_cycles": 9}}, {"group": "layer"}]
    lines = [cell(str(n), recipe=recipe) for n, recipe in enumerate(recipes)]
    names = cells.labels(cells.read(sweep_file(tmp_path / "s.jsonl", lines)))
    assert list(names.values()) == [
        "ria, group=row",
        "ria + dsnot max_cycles=50, group=row",
        "ria + dsnot max_cycles=9, group=row",
        "ria, group=layer",
    ]


def test_settings_are_told_apart_by_their_updates_and_values(tmp_path: Path) -> None:
    recipes: list[dict[str, object]] = [
        {"update": update, "values": values, "allocate": {"name": "owl"}}
        for update in (None, {"name": "lsq"})
        for values in (None, {"name": "int4"})
    ]
    lines = [cell(str(n), recipe=recipe) for n, recipe in enumerate(recipes)]
    names = cells.labels(cells.read(sweep_file(tmp_path / "s.jsonl", lines)))
    assert list(names.values()) == ["ria", "ria + int4", "ria + lsq", "ria + lsq + int4"]


def test_a_cell_that_was_run_again_counts_once(tmp_path: Path) -> None:
    path = sweep_file(tmp_path / "s.jsonl", [cell("a", 40), cell("b", 50), cell("a", 41)])
    assert sorted(one.perplexity for one in cells.read(path)) == [41, 50]


def test_perplexities_that_are_not_finite_are_told_and_not_drawn(tmp_path: Path) -> None:
    figures = [40.0, float("inf"), float("nan")]
    lines = [
        cell(str(n), figure, recipe={"sparsity": 0.3 + n / 10, "params": {"alpha": n}})
        for n, figure in enumerate(figures)
    ]
    page = Page(report.build(sweep_file(tmp_path / "s.jsonl", lines)))
    assert {row[2] for row in page.tables[0][1:]} == {"40.00", "∞", "not a number"}
    assert "2 without a finite perplexity are not drawn" in page.text
    drawn = " ".join(str(a) for t, a in page.tags if t in ("path", "line", "text"))
    assert "nan" not in drawn and "inf" not in drawn


def test_a_run_shows_its_layers_and_their_errors(pruned: Path) -> None:
    page = Page(report.build(pruned))
    record = json.loads((pruned / "symprune.json").read_text())
    (table,) = page.tables
    assert [row[-1] for row in table[1:]] == [layer["name"] for layer in record["layers"]]
    assert {row[4] for row in table[1:]} == {"50.00 %"}
    for title in ("Relative error on calibration tokens", "What refinement and update did"):
        assert title in page.text
    assert "99.50" in page.text and "dense 90.00" in page.text


def test_a_run_without_errors_has_no_pictures_of_them(pruned: Path, tmp_path: Path) -> None:
    record = json.loads((pruned / "symprune.json").read_text())
    for layer in record["layers"]:
        for name in layers.ERRORS:
            layer.pop(name, None)
    (tmp_path / "symprune.json").write_text(json.dumps(record))
    page = Page(report.build(tmp_path))
    assert "Every matrix lost the same 50.00 %" in page.text and "Relative" not in page.text
    assert "Errors were not measured; --report-error does" in page.text
    assert not [a for t, a in page.tags if t == "img"]


def test_a_layer_without_error_is_drawn_too(pruned: Path, tmp_path: Path) -> None:
    record = json.loads((pruned / "symprune.json").read_text())
    record["layers"][0] |= {"relative_error": 0.0, "expected_error_after": 0.0}
    record["layers"][1] |= {"relative_error": 50.0, "expected_error_before": 0.0}
    (tmp_path / "symprune.json").write_text(json.dumps(record))
    page = Page(report.build(tmp_path / "symprune.json"))
    tips = [a["data-tip"] for t, a in page.tags if t == "g" and "data-tip" in a]
    assert tips.count(f"{record['layers'][0]['name']}\n0.000") == 2 * 3  # widths x pictures


def measured(pruned: Path, folder: Path, **changes: object) -> Path:
    """A copy of the record in which held-out errors are twice those of calibration."""
    record = json.loads((pruned / "symprune.json").read_text())
    for layer in record["layers"]:
        for end in ("", "_base"):
            layer[f"held_out_error{end}"] = 2 * layer[f"relative_error{end}"]
    (folder / "symprune.json").write_text(json.dumps(record | changes))
    return folder


def test_a_run_opens_with_what_it_came_to_and_the_command_that_does_it_again(
    pruned: Path, tmp_path: Path
) -> None:
    page = Page(report.build(measured(pruned, tmp_path)))
    verdict = page.text.index("Half the weights gone, perplexity 90.0 → 99.5 (+11 %).")
    command = page.text.index("symprune prune --model smollm --recipe recipe.yaml")
    assert verdict < command < page.text.index("Figures") < page.text.index("Layers")
    assert "--eval-data builtin --eval-windows 4" in page.text


def test_the_recipe_on_the_page_is_the_one_of_the_run(pruned: Path) -> None:
    record = json.loads((pruned / "symprune.json").read_text())
    text = Page(report.build(pruned)).text
    shown = text[text.index("method: ") : text.index("Copy", text.index("method: "))]
    assert Recipe.from_dict(yaml.safe_load(shown)) == Recipe.from_dict(record["recipe"])


def test_errors_on_held_out_tokens_are_the_headline_and_beside_those_of_calibration(
    pruned: Path, tmp_path: Path
) -> None:
    html = report.build(measured(pruned, tmp_path))
    page = Page(html)
    found = json.loads((tmp_path / "symprune.json").read_text())["layers"]
    mean = sum(layer["held_out_error"] for layer in found) / len(found)
    assert f"relative error of a layer, held-out tokens{mean:.3f}" in page.text
    assert f"{mean / 2:.3f} on calibration tokens" in page.text
    assert len(page.having("div", "class", "beside")) == 2
    halves = page.having("svg", "class", "half")
    assert [(a["aria-label"] or "").split(".")[0] for a in halves[:2]] == [
        "Relative error on held-out tokens",
        "Relative error on calibration tokens",
    ]
    scales = [part.split('class="grid"')[1:] for part in html.split("<svg")[1:] if "half" in part]
    assert len(scales[0]) == len(scales[1]) > 2  # the same grid on both


def test_one_legend_stands_for_all_pictures_of_the_layers(pruned: Path, tmp_path: Path) -> None:
    page = Page(report.build(measured(pruned, tmp_path)))
    assert len(page.having("ul", "class", "legend")) == 1
    assert len(page.having("button", "aria-pressed", "true")) == 7


def test_sparsity_is_drawn_where_it_differs_between_layers(pruned: Path, tmp_path: Path) -> None:
    assert "Sparsity per layer" not in Page(report.build(pruned)).text
    found = json.loads((pruned / "symprune.json").read_text())["layers"]
    found[0] |= {"removed": 0, "sparsity": 0.0}
    page = Page(report.build(measured(pruned, tmp_path, layers=found)))
    assert "Sparsity per layerFrom 0.00 % to 50.00 %." in page.text
    assert "lost the same" not in page.text


def test_prompts_continued_by_both_models_are_shown(pruned: Path, tmp_path: Path) -> None:
    written = [
        {"by": "dense", "text": " Paris, of course", "tokens": 4, "same": 4},
        {"by": "pruned", "text": " Paris <b>Paris", "tokens": 4, "same": 1},
    ]
    sample = {"prompt": "The capital of France is", "continuations": written}
    page = Page(report.build(measured(pruned, tmp_path, samples=[sample, {"prompt": 3}])))
    assert "The capital of France is" in page.text
    assert "Paris, of course" in page.text and "Paris <b>Paris" in page.text
    assert "the same for 1 of 4 tokens" in page.text
    assert "The same prompts" not in Page(report.build(pruned)).text


def test_the_heat_map_is_the_mask_and_the_weights_of_the_matrix_asked_for(pruned: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    page = Page(report.build(pruned, matrix=name.removesuffix(".weight")))
    keep = MaskSet.load(pruned)[name]
    assert name in page.text
    weights, mask = (a["src"] for t, a in page.tags if t == "img")
    assert weights and mask
    assert torch.equal(pixels(mask), keep.to(torch.uint8) * 255)
    assert (pixels(weights)[~keep] == 0).all() and pixels(weights).max() == 255


def test_the_heat_map_shows_a_middle_matrix_unless_told(pruned: Path) -> None:
    assert "model.layers.1.self_attn.q_proj.weight32 output" in Page(report.build(pruned)).text


def test_a_large_matrix_is_averaged_over_blocks() -> None:
    keep = torch.zeros(heatmap.BLOCKS * 2, heatmap.BLOCKS + 2, dtype=torch.bool)
    keep[0, 0] = keep[2:4, 2:4] = True
    html = heatmap.figure(heatmap.Pair("w", None, keep))
    whole, corner = (pixels(a["src"] or "") for t, a in Page(html).tags if t == "img")
    assert whole.shape == (heatmap.BLOCKS, heatmap.BLOCKS // 2 + 1)
    assert whole[0, 0] == 64 and whole[1, 1] == 255 and int((whole > 0).sum()) == 2
    assert corner.shape == (heatmap.CORNER, heatmap.CORNER) and corner[0, 0] == 255


def test_weights_stored_transposed_are_shown_the_right_way_round(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "gpt2", "gpt2")
    found = json.loads((folder / "symprune.json").read_text())["layers"]
    square = next(layer for layer in found if layer["rows"] == layer["columns"])
    pair = heatmap.read(folder, found, square["name"])
    assert pair is not None and pair.weight is not None
    assert torch.equal(pair.keep, MaskSet.load(folder)[square["name"]].T)
    assert torch.equal(pair.keep, pair.weight != 0)


def test_one_expert_of_a_fused_parameter_can_be_looked_at(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "moe", "mixtral")
    found = json.loads((folder / "symprune.json").read_text())["layers"]
    name = next(layer["name"] for layer in found if layer["name"].endswith("down_proj.2"))
    pair = heatmap.read(folder, found, name)
    assert pair is not None
    assert torch.equal(pair.keep, MaskSet.load(folder)[name.removesuffix(".2")][2])
    assert len(layers.merge(found)) < len(found)
    assert "experts.down_proj" in Page(report.build(folder, name)).text


def test_nothing_from_the_data_becomes_markup(tmp_path: Path, pruned: Path) -> None:
    bad = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>"
    recipe = {"method": bad, "params": {bad: bad}, "refine": {"name": bad}, "calibration": bad}
    lines = [
        cell("a", 40, model=bad, data=bad, description=bad, recipe=recipe),
        cell("b", 41, model=bad, data=bad, description=bad, recipe=recipe | {"sparsity": 0.6}),
        cell("c", 42, model=bad, data=bad, description=bad, recipe=recipe | {"seed": 1}),
        cell("d", 43, model=bad, data=bad, recipe=recipe | {"sparsity": None, "pattern": bad}),
    ]
    record = json.loads((pruned / "symprune.json").read_text())
    record |= {"origin": bad, "description": bad, "notes": [bad], "versions": {bad: bad}}
    for layer in record["layers"]:
        layer["name"] = layer["kind"] = bad
    (tmp_path / "symprune.json").write_text(json.dumps(record))
    for source in (sweep_file(tmp_path / "s.jsonl", lines), tmp_path):
        html = report.build(source)
        page = Page(html)
        assert html.count("<script") == 1 and not [a for t, a in page.tags if t == "img"]
        assert not [a for _, a in page.tags if any(name.startswith("on") for name in a)]
        assert bad in page.text


def test_the_page_asks_the_network_for_nothing(sweep: Path, pruned: Path) -> None:
    for source in (sweep, pruned):
        html = report.build(source)
        assert "http://" not in html and "https://" not in html and "@import" not in html
        assert "default-src &#x27;none&#x27;" in html or "default-src 'none'" in html
        links = [a.get(n) for _, a in Page(html).tags for n in ("src", "href") if n in a]
        assert links and all((link or "").startswith("data:") for link in links)


def test_tables_have_captions_and_pictures_have_names(sweep: Path, pruned: Path) -> None:
    for source in (sweep, pruned):
        page = Page(report.build(source))
        tags = [tag for tag, _ in page.tags]
        assert tags.count("caption") == tags.count("table") > 0
        assert all(a.get("aria-label") for a in page.having("svg", "class", "chart"))
        assert all(a.get("alt") for tag, a in page.tags if tag == "img")


def test_ticks_are_round_and_inside_the_axis() -> None:
    assert scale.fit([20.0, 40.0], 0, 100).ticks(5) == [20, 25, 30, 35, 40]
    wide = scale.fit([12.0, 9000.0], 100, 0)
    assert wide.log and wide.ticks(8) == [10, 30, 100, 300, 1000, 3000, 10000]
    assert wide(12.0) > wide(100.0) > wide(9000.0)
    same = scale.fit([0.5, 0.5], 0, 100)
    assert same.low < 0.5 < same.high and 2 <= len(same.ticks(5)) <= 7


def broken(tmp_path: Path, kind: str) -> Path:
    path = tmp_path / "source"
    if kind in ("absent", "folder"):
        (tmp_path / "empty").mkdir()
        return tmp_path / "empty" if kind == "folder" else path
    if kind in ("record", "layers", "layer"):
        path.mkdir()
        records = {"record": "{", "layers": '{"layers": []}', "layer": '{"layers": [{"name": 1}]}'}
        (path / "symprune.json").write_text(records[kind])
        return path
    lines = {
        "empty": b"\n",
        "binary": b"\xff\xfe\x00",
        "json": b'{"key": 1\n',
        "number": b"7",
        "recipe": b'{"perplexity": 3}',
        "figure": b'{"recipe": {"method": "ria"}, "sparsity": 0.5}',
    }
    path.write_bytes(lines[kind])
    return path


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("absent", "no run, sweep or bench at"),
        ("folder", "neither a run nor a sweep"),
        ("record", "not a readable record"),
        ("layers", "names no pruned layers"),
        ("layer", "not fully described"),
        ("empty", "no finished cells"),
        ("binary", "not text"),
        ("json", "Line 1 of .* is not JSON"),
        ("number", "Line 1 of .* is not a finished cell"),
        ("recipe", "has no recipe"),
        ("figure", "has no perplexity"),
    ],
)
def test_what_is_no_run_and_no_sweep_is_said_in_one_sentence(
    tmp_path: Path, kind: str, said: str
) -> None:
    with pytest.raises(SympruneError, match=said) as caught:
        report.write(broken(tmp_path, kind), tmp_path / "page.html")
    assert "\n" not in str(caught.value) and not (tmp_path / "page.html").exists()


def test_a_cell_that_is_still_being_written_does_not_count(sweep: Path, tmp_path: Path) -> None:
    unfinished = tmp_path / sweep.name
    unfinished.write_text(sweep.read_text() + '{"key": "half a ce')
    assert report.build(unfinished) == report.build(sweep)


def test_a_matrix_that_is_not_there_is_named_with_the_nearest(pruned: Path, sweep: Path) -> None:
    with pytest.raises(SympruneError, match=r"no matrix model.layers.9.* did you mean model\.lay"):
        report.build(pruned, matrix="model.layers.9.mlp.up_proj")
    with pytest.raises(SympruneError, match="is a sweep"):
        report.build(sweep, matrix="model.layers.0.mlp.up_proj")


def test_a_corrupt_mask_file_is_named(pruned: Path, tmp_path: Path) -> None:
    shutil.copy(pruned / "symprune.json", tmp_path)
    (tmp_path / "masks.safetensors").write_bytes(b"nothing")
    with pytest.raises(SympruneError, match=r"masks\.safetensors is corrupt"):
        report.build(tmp_path)


def test_the_page_is_written_whole_or_not_at_all(sweep: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "page.html"
    assert report.write(sweep, out) == out and out.read_text().endswith("</html>\n")
    with pytest.raises(SympruneError, match="exists"):
        report.write(sweep, out)
    before = out.read_text()
    with pytest.raises(SympruneError, match="no run, sweep or bench"):
        report.write(tmp_path / "none", out, force=True)
    assert out.read_text() == before
    report.write(sweep, out, force=True)
    assert [path.name for path in out.parent.iterdir()] == ["page.html"]
    with pytest.raises(SympruneError, match="is a folder"):
        report.write(sweep, tmp_path, force=True)
    with pytest.raises(SympruneError, match="cannot be written"):
        report.write(sweep, sweep / "page.html")
