"""The thesis's figures for chapter 6, by table, row and model, as printed there."""

from __future__ import annotations

MODELS = ("llama2-7b", "llama2-13b", "llama3-8b", "opt-1.3b")

DENSE = (5.47, 4.88, 6.14, 14.62)

# Row label -> figures in the order of MODELS; None where the thesis has none.
Row = tuple[float | None, ...]
FIGURES: dict[str, dict[str, Row]] = {
    "6.2": {
        "magnitude, 50 %": (16.03, 6.83, 205.44, 1712.39),
        "wanda, 50 %": (7.79, 6.28, 10.81, 22.19),
        "ria, 50 %": (6.88, 5.95, 9.44, 18.94),
        "stochria, 50 %": (6.91, 5.95, 9.46, 18.78),
        "ria, 2:4": (11.31, 8.40, 22.89, 27.43),
        "stochria, 2:4": (11.41, 8.44, 23.74, 26.78),
        "ria, 4:8": (8.39, 6.74, 13.77, 21.59),
        "stochria, 4:8": (8.44, 6.74, 13.93, 21.49),
    },
    "6.3": {
        "wanda, alpha 0": (16.03, 6.83, 205.44, 1712.39),
        "wanda, alpha 0.5": (7.60, 6.17, 10.66, 22.14),
        "wanda, alpha 1": (7.79, 6.28, 10.81, 22.19),
        "wanda, alpha 2": (8.66, 7.15, 12.98, 24.74),
        "col-sum, alpha 0": (11.59, 6.39, 59.41, 1062.66),
        "col-sum, alpha 0.5": (6.83, 5.87, 9.53, 18.28),
        "col-sum, alpha 1": (6.91, 5.96, 9.69, 18.41),
        "col-sum, alpha 2": (7.46, 6.55, 12.01, 22.25),
        "row-sum, alpha 0": (14.93, 6.74, 17.80, 141.92),
        "row-sum, alpha 0.5": (7.49, 6.13, 10.50, 22.09),
        "row-sum, alpha 1": (7.51, 6.24, 10.55, 22.47),
        "row-sum, alpha 2": (8.01, 7.01, 11.79, 26.62),
        "ria, alpha 0": (7.39, 5.95, 12.07, 64.70),
        "ria, alpha 0.5": (6.81, 5.93, 9.34, 18.08),
        "ria, alpha 1": (6.88, 5.95, 9.44, 18.94),
        "ria, alpha 2": (7.37, 6.56, 10.67, 23.39),
    },
    "6.4": {
        "wanda, 50 %": (7.79, 6.28, 10.81, 22.19),
        "ria, 50 %": (6.88, 5.95, 9.44, 18.94),
        "stochria, 50 %": (6.91, 5.95, 9.46, 18.78),
        "wanda, 60 %": (15.30, 9.63, 27.55, 38.81),
        "ria, 60 %": (10.39, 7.84, 19.52, 26.22),
        "stochria, 60 %": (10.62, 7.97, 19.04, 25.93),
        "wanda, 70 %": (214.93, 104.97, 412.90, 231.15),
        "ria, 70 %": (68.75, 51.96, 169.51, 98.52),
        "stochria, 70 %": (72.85, 62.15, 155.34, 93.29),
    },
    "6.5": {
        "magnitude": (6.9e3, 10.10, 4.05e5, None),
        "magnitude + dsnot": (4.1e3, 10.19, 4.18e4, None),
        "magnitude + r2-dsnot": (2.4e2, 10.09, 1.44e4, None),
        "wanda": (9.72, 7.75, 21.36, None),
        "wanda + dsnot": (10.23, 7.69, 20.70, None),
        "wanda + r2-dsnot": (10.08, 7.69, 20.50, None),
        "ria": (10.29, 7.85, 21.09, None),
        "ria + dsnot": (9.97, 7.82, 19.51, None),
        "ria + r2-dsnot": (9.96, 7.78, 18.99, None),
    },
    "E.1": {
        "p = 1": (6.88, 5.95, 9.44, 18.95),
        "p = 2": (6.90, 5.96, 9.48, 19.02),
        "p = 3": (6.95, 6.01, 9.57, 19.66),
        "p = 4": (7.12, 6.08, 9.92, 20.77),
        "p = 0": (7.78, 6.28, 10.81, 22.17),
        "p = inf": (8.60, 6.80, 11.28, 24.92),
    },
    "E.2": {
        "S1": (6.81, 5.83, 9.34, 18.08),
        "S2": (6.99, 5.91, 9.58, 19.01),
        "S3": (9.32, 6.87, 17.31, 31.66),
        "S4": (14.51, 20.78, 30.47, 53.17),
    },
    "E.3": {
        "beta = 1": (6.91, 5.95, 9.45, 18.88),
        "beta = 0.9": (6.91, 5.95, 9.43, 18.87),
        "beta = 0.5": (6.90, 5.95, 9.42, 18.84),
        "beta = 0.1": (6.91, 5.95, 9.46, 18.78),
        "beta = 0.05": (6.91, 5.96, 9.47, 18.91),
        "beta = 0.01": (6.98, 6.00, 9.69, 19.36),
    },
    # LLaMA3-8b only. "g" and "p": relative importance in growing and in pruning.
    "E.4": {
        "wanda: best (g, gamma2 1e-4)": (None, None, 18.99, None),
        "wanda: p = 1": (None, None, 19.04, None),
        "wanda: p = inf": (None, None, 18.99, None),
        "wanda: gamma2 0": (None, None, 18.99, None),
        "wanda: gamma2 1e-3": (None, None, 18.99, None),
        "wanda: neither": (None, None, 19.49, None),
        "wanda: p only": (None, None, 19.25, None),
        "wanda: g and p": (None, None, 19.63, None),
        "ria: best (p, gamma2 1e-3)": (None, None, 20.50, None),
        "ria: p = 1": (None, None, 25.61, None),
        "ria: p = inf": (None, None, 20.51, None),
        "ria: gamma2 0": (None, None, 20.51, None),
        "ria: gamma2 1e-4": (None, None, 20.52, None),
        "ria: neither": (None, None, 21.33, None),
        "ria: g only": (None, None, 22.16, None),
        "ria: g and p": (None, None, 22.60, None),
    },
    # Mean accuracy over seven tasks, in percent.
    "6.6": {
        "dense": (57.9, None, 64.2, None),
        "magnitude": (39.3, None, 35.7, None),
        "magnitude + dsnot": (41.1, None, 36.4, None),
        "magnitude + r2-dsnot": (43.4, None, 37.1, None),
        "ria": (49.5, None, 47.9, None),
        "ria + dsnot": (50.2, None, 47.9, None),
        "ria + r2-dsnot": (50.3, None, 48.1, None),
    },
}


def published(table: str, row: str, model: str) -> float | None:
    """The thesis's figure, or None where it has none for this model."""
    if model not in MODELS or row not in FIGURES[table]:
        return None
    return FIGURES[table][row][MODELS.index(model)]
