"""Image tables of FedP3, FedSpa, FedSparse and Sparse-ProxSkip on MNIST and Fashion-MNIST, FedP3's
ablation of ResNet layers, and FedSpa's Tables 2 and 5 and Fig. 8, at a size for one core.

    python scripts/fed/experiments_images.py [fedp3-images] [fedp3-resnet] [fedspa-images] ...
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from experiment_tables import Experiment, Row, main, show, spread
from image_runs import IMAGES, Method, accuracy, image_clients, image_table
from torch import Tensor

from symprune.fed.algorithms import build
from symprune.fed.algorithms.baselines.fedavg_epochs import FedAvgEpochs
from symprune.fed.problems.make import make_problem
from symprune.fed.problems.problem import Problem
from symprune.fed.protocol import State
from symprune.fed.simulate import Result, simulate

FEW: dict[str, Any] = {"clients": 10, "rows": 1000}  # 70 images to train on and 30 to test, each
FEDP3 = {"steps": 10, "batch": 32, "lr": 0.1, "cohort_size": 5}


def fedp3_images() -> list[Row]:
    """FedP3's Figs. 4.2 and 4.3 in small: layers sent and how they are averaged."""
    methods = [
        Method("full (FedAvg)", "fedp3", {**FEDP3, "layers": "full", "keep": 1.0}),
        *(Method(rule, "fedp3", {**FEDP3, "layers": rule}) for rule in ("opu3", "opu2", "lowerb")),
        *(
            Method(f"opu2, {kind}", "fedp3", {**FEDP3, "layers": "opu2", "aggregation": kind})
            for kind in ("weighted", "attention", "learned")
        ),
    ]
    rows = []
    for name in IMAGES:
        problem = image_clients(name, "he-mlp:48-48-48-48", "class-set:5", **FEW)
        rows += image_table(f"{name}, five layers, 10 clients", problem, methods, (30,))
    return rows


def fedp3_resnet() -> list[Row]:
    """The ResNet ablation: clients leave out one stage, or one half of one, ResNet-20 on digits."""
    rules = {
        "full": "full",
        "-B2-B3 (full)": "drop:7-13,14-20",
        "-B2 (part)": "drop:7-9,10-13",
        "-B3 (part)": "drop:14-16,17-20",
    }
    problem = make_problem(
        "digits", "resnet20", "class-set:5", clients=5, l2=0.0, client_test_share=0.3
    )
    options = {"steps": 5, "batch": 16, "lr": 0.1, "keep": 0.9}
    methods = [Method(n, "fedp3", {**options, "layers": rule}) for n, rule in rules.items()]
    return image_table("digits, ResNet-20 with GroupNorm, 5 clients", problem, methods, (20,))


FEDSPA = {"cohort_size": 5, "batch": 16, "lr": 0.05}
FEDSPA_METHODS = {
    "FedAvg": ("fedavg-epochs", {}),
    "FedSpa DST": ("fedspa", {"anneal_rounds": 20}),
    "FedSpa RSM": ("fedspa", {"search": "rsm"}),
    "Ditto": ("ditto", {}),
    "Sub-FedAvg": ("sub-fedavg", {}),
    "Local": ("local", {}),
}


def fedspa_images() -> list[Row]:
    """FedSpa's Table 1: personal accuracy with two classes a client."""
    methods = [Method(n, name, {**FEDSPA, **o}) for n, (name, o) in FEDSPA_METHODS.items()]
    rows = []
    for name in IMAGES:
        problem = image_clients(name, "mlp:50", "class:2", **FEW)
        rows += image_table(f"{name}, MLP 784-50-10, 10 clients", problem, methods, (20,))
    return rows


@dataclass(frozen=True)
class SharedForAll(FedAvgEpochs):
    """FedAvg whose one model is every client's, so that it is measured on their rows."""

    def personal_models(self, server: State, client: State, problem: Problem) -> Tensor | None:
        return server["x"].expand(problem.clients, -1)


def fedspa_run(label: str, problem: Problem, rounds: int, seed: int) -> Result:
    name, options = FEDSPA_METHODS[label]
    chosen: dict[str, Any] = {**FEDSPA, **options}
    algorithm = SharedForAll(**chosen) if label == "FedAvg" else build(name, **chosen)
    return simulate(algorithm, problem, rounds, seed=seed)


def fedspa_rounds(rounds: int = 15, seeds: int = 3) -> list[Row]:
    """FedSpa's Table 2 and Fig. 8 on Fashion-MNIST: rounds to an accuracy, and the dense global
    model against the personal ones."""
    rows = []
    for split, targets in (("iid", (0.6, 0.7)), ("class:2", (0.9, 0.95))):
        problem = image_clients("fashion-mnist", "mlp:50", split, **FEW)
        for label in ("FedAvg", "FedSpa DST", "FedSpa RSM", "Ditto"):
            runs = [fedspa_run(label, problem, rounds, seed) for seed in range(seeds)]
            row: Row = {"split": split, "method": label}
            for nth, target in zip(("first", "second"), targets, strict=True):
                first = [run.first("personal_accuracy", target) for run in runs]
                there = [record["round"] for record in first if record is not None]
                row[f"to the {nth}"] = mean(there) if len(there) == seeds else f"> {rounds}"
            shared = [run.model.expand(problem.clients, -1) for run in runs]
            found = [problem.evaluate_personal(w)["personal_accuracy"] for w in shared]
            row["global model"] = spread(found)
            row["personal models"] = spread([accuracy(run, problem) for run in runs])
            rows.append(row)
            print(row, flush=True)
    title = "Rounds to 60 and 70 % (iid), 90 and 95 % (class:2), accuracy in % at the end"
    return show(f"{title}, {rounds} rounds, {seeds} seeds", rows)


def fedspa_search_time(turns: int = 3) -> list[Row]:
    """FedSpa's Table 5: processor time of the mask search, against training in a round."""
    rows = []
    for model in ("mlp:50", "lenet5"):
        problem = image_clients("mnist", model, "class:2", clients=5, rows=500)
        options = {**FEDSPA, "cohort_size": 5, "epochs": 2}
        seconds: dict[str, list[float]] = {"dst": [], "rsm": []}
        for _ in range(turns):
            for search in seconds:
                algorithm = build("fedspa", search=search, **options)
                begun = time.process_time()
                simulate(algorithm, problem, 2, evaluate_every=2)
                seconds[search].append(time.process_time() - begun)
        train, whole = median(seconds["rsm"]), median(seconds["dst"])
        rows.append({"model": model, "search / training": f"{100 * (whole / train - 1):.1f} %"})
    return show("FedSpa DST: processor time of the mask search", rows)


FEDSPARSE = {"cohort_size": 5, "batch": 8, "server_lr": 5e-3}
GATES = {
    **FEDSPARSE,
    "exempt": ("output",),
    "temperature": 1e-2,
    "gate_lr": 1e-2,
    "server_gate_lr": 2e-2,
}


def fedsparse_images(rounds: int = 20, seeds: int = 3) -> list[Row]:
    """FedSparse's Table 1 and Fig. 5: accuracy, bytes, sparsity, distance of the gates."""
    methods: dict[str, tuple[str, dict[str, Any]]] = {
        "FedAvg (server Adam)": ("fedopt", FEDSPARSE),
        **{f"FedSparse, l0 {p:g}": ("fedsparse", {**GATES, "l0": p}) for p in (1e-4, 3e-4)},
        "FedDrop, 0.5": ("feddrop", {**FEDSPARSE, "rate": 0.5}),
    }
    tables = []
    for data in IMAGES:
        problem = image_clients(data, "mlp:50", "dirichlet:0.5", **FEW)
        rows = []
        for label, (name, options) in methods.items():
            runs = [
                simulate(build(name, **options), problem, rounds, seed=seed, evaluate_every=5)
                for seed in range(seeds)
            ]
            last = [run.history[-1] for run in runs]
            row: Row = {"method": label}
            row["global"] = spread([record["accuracy"] for record in last])
            row["local"] = spread([record["personal_accuracy"] for record in last])
            row["MB"] = mean(record["bytes_up"] + record["bytes_down"] for record in last) / 1e6
            if "groups_pruned" in last[0]:
                row["pruned"] = mean(record["groups_pruned"] for record in last)
                for at in (1, 2, 4):
                    both = [
                        mean(run.history[at][key] for run in runs)
                        for key in ("gates_apart", "gates_apart_most")
                    ]
                    row[f"apart, round {5 * at}"] = " / ".join(f"{v:.3f}" for v in both)
            rows.append(row)
            print(row, flush=True)
        tables += show(f"FedSparse, {data}, {rounds} rounds, {seeds} seeds", rows)
    return tables


def sparse_images() -> list[Row]:
    """Sparse-ProxSkip's Fig. 4 in small: a network at 90 % sparsity."""
    names = {
        "Sparse-ProxSkip": "sparse-proxskip",
        "Accelerated-Server-Pruning": "accelerated-server-pruning",
        "FedHT": "fedht",
        "FedIHT": "fediht",
        "Final-TopK": "final-topk",
    }
    options = {"p": 0.1, "batch": 20, "clip": 10.0, "sparsity": 0.9}
    methods = [Method(n, name, options, ("gamma", (0.1, 0.3))) for n, name in names.items()]
    rows = []
    for data in IMAGES:
        problem = image_clients(data, "mlp:32", "dirichlet:0.3", **FEW)
        rows += image_table(f"{data}, MLP 784-32-10, 90 %, 10 clients", problem, methods, (20,))
    return rows


EXPERIMENTS: dict[str, Experiment] = {
    "fedp3-images": fedp3_images,
    "fedp3-resnet": fedp3_resnet,
    "fedspa-images": fedspa_images,
    "fedspa-rounds": fedspa_rounds,
    "fedspa-search-time": fedspa_search_time,
    "fedsparse-images": fedsparse_images,
    "sparse-images": sparse_images,
}

if __name__ == "__main__":
    main(EXPERIMENTS)
