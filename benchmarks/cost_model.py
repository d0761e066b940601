"""How well does the cost model predict what others measured?

    python benchmarks/cost_model.py [--json] [--table FILE] [--only PART] [--folds N] [--seed N] [--worst N]

Parts: ``training`` (steps, ranking of layouts, peak memory), ``generation``, ``operators``, ``motivation``. Training
fits class efficiencies on all parts of benchmarks/data/train_layouts.csv (provenance in every row) but one and predicts
that part, for each part in turn; parts are whole configurations, chosen by a fixed seed. Beside it stands a baseline
fitted on the same rows: one constant model-FLOP utilization per family. ``--table FILE`` predicts another CSV of that
format from a fit on the repository's whole table, without the configurations that FILE holds. What the figures mean
and which targets they miss: docs/cost_model.md.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from public_tables import motivation, operators, serving
from public_tables.figures import Array, by_family, errors, memory_figures, noise_floor, rankings
from public_tables.fitting import ConstantMfu, Fit, cross_predict
from public_tables.training import DATA, Row, Skipped, read

from nereus.control.efficiency import Efficiencies

TARGETS = {"mape_16_bit_explicit_8_512": 10.0, "spearman": 0.8, "regret": 5.0, "share_of_baseline": 0.5}
PARTS = ("training", "generation", "operators", "motivation")
HEADLINE = "16-bit, 8 to 512 GPUs"
LEAST = 8
"""Rows of a generation family that gets a line of its own."""


def against_baseline(rows: Sequence[Row], ours: Array, baseline: Array, at: Sequence[int]) -> dict[str, float]:
    """Return the errors of some rows, the baseline's on the same rows, and the baseline's when it has seen them."""
    chosen = [rows[index] for index in at]
    measured = np.array([row.measured_s for row in chosen])
    seen = ConstantMfu(chosen).predict(chosen)
    return {
        **errors(ours[list(at)], measured),
        "baseline_mape": errors(baseline[list(at)], measured)["mape"],
        "baseline_in_sample_mape": errors(seen, measured)["mape"],
        "noise_floor_mape": noise_floor(chosen),
    }


def steps(rows: list[Row], ours: Array, baseline: Array) -> dict[str, Any]:
    """Return step-time errors of all rows, of the headline's and of each family."""
    sized = [index for index, row in enumerate(rows) if 8 <= row.gpus <= 512]
    headline = [index for index in sized if rows[index].precision == "16-bit"]
    with (DATA / "candidate_oos_plans.csv").open(encoding="utf-8") as file:
        named = {line["row_id"] for line in csv.DictReader(file)}
    subsets = {
        "all rows": list(range(len(rows))),
        HEADLINE: headline,
        "the same with MLPerf rows of unstated precision": [
            index for index in sized if rows[index].precision in ("16-bit", "unstated")
        ],
        f"{HEADLINE}, tp or pp above 1": [i for i in headline if rows[i].setups.tp[0] * rows[i].setups.pp[0] > 1],
        f"{HEADLINE}, without bigscience-v100": [i for i in headline if rows[i].source != "bigscience-v100"],
        f"{HEADLINE}, candidate_oos_plans": [i for i in headline if rows[i].row_id in named],
        **by_family(rows),
    }
    return {name: against_baseline(rows, ours, baseline, at) for name, at in subsets.items() if at}


def training(table: Path | None, seed: int, folds: int, worst: int) -> dict[str, Any]:
    """Predict the training table, or another of its format, print the figures and return them."""
    known, skipped = read(DATA / "train_layouts.csv")
    own, trained = known, [row for row in known if not row.out_of_memory]
    if table:
        own, skipped = read(table)
        names = {row.configuration for row in own}
        trained = [row for row in trained if row.configuration not in names]
    ran = [row for row in own if not row.out_of_memory]
    if not ran:
        raise SystemExit(f"{table} has no row that can be predicted: {reasons(skipped)}")
    if table:
        ours, baseline = Fit(trained).predict(ran), ConstantMfu(trained).predict(ran)
    else:
        ours, baseline = cross_predict(ran, seed, folds)
    sweeps = rankings(ran, ours)
    found: dict[str, Any] = {
        "steps": steps(ran, ours, baseline),
        "sweeps": {
            source: summary([sweep for sweep in sweeps if sweep["source"] == source])
            for source in sorted({sweep["source"] for sweep in sweeps})
        },
        "memory": memory_figures(own, seed, folds, [] if own is known else known),
        "skipped": dict(Counter(skip.why for skip in skipped)),
    }
    print_table("step seconds, never seen by the fit", STEP_COLUMNS, found["steps"])
    print_table("ranking of layouts inside a sweep", SWEEP_COLUMNS, found["sweeps"])
    print_table("peak memory, never seen by the calibration", MEMORY_COLUMNS, found["memory"])
    print(f"left out: {reasons(skipped)}\n")
    measured = np.array([row.measured_s for row in ran])
    for index in np.argsort(-np.abs(np.log(ours / measured)))[:worst]:
        row = ran[index]
        what = f"{row.source} {row.gpu} x{row.gpus} {row.model} {row.layout} s{row.seq_len} {row.precision}"
        print(f"{row.row_id} {what}: predicted {ours[index]:.2f} s, measured {measured[index]:.2f} s")
    return found


def generation(seed: int, folds: int) -> dict[str, Any]:
    """Predict static batches by engine and hardware, then whole runs of single requests; print and return figures."""
    rows, skipped = serving.read(DATA / "infer_throughput.csv")
    ours, baseline = cross_predict(rows, seed, folds)
    groups = {"all static batches": list(range(len(rows))), **by_family(rows)}
    batches = {name: against_baseline(rows, ours, baseline, at) for name, at in groups.items() if len(at) >= LEAST}
    print_table("generation seconds, never seen by the fit", STEP_COLUMNS, batches)
    print(f"left out: {reasons(skipped)}\n")
    runs = serving.request_runs(DATA / "infer_requests.csv")
    requests = {
        row.row_id: {
            "predicted_s": float(guess),
            "measured_s": row.measured_s,
            "error": guess / row.measured_s * 100 - 100,
        }
        for row, guess in zip(runs, Fit(rows).predict(runs), strict=True)
    }
    columns = {"predicted_s": "9.1f s", "measured_s": "9.1f s", "error": "+7.0f %"}
    print_table("300 requests to vLLM on unseen GPUs, first to last", columns, requests)
    return {"batches": batches, "requests": requests}


def operator_tables() -> dict[str, Any]:
    found = operators.figures()
    shown = {
        name: row | {"shares": "  ".join(f"{key} {value:.2f}" for key, value in row["efficiencies"].items())}
        for name, row in found.items()
    }
    columns = {"n": "6d ", "mape": "7.1f%", "median": "7.1f%", "shares": "  s"}
    print_table("single operators, the half never seen; efficiencies", columns, shown)
    return found


def motivating_facts() -> dict[str, Any]:
    """Print under which settings the paper's motivating facts hold, with the priors and with what A100 rows teach."""
    rows = [row for row in read(DATA / "train_layouts.csv")[0] if not row.out_of_memory]
    ampere = [row for row in rows if row.arch == "ampere" and row.precision == "16-bit"]
    return {
        "prior": motivation.show("prior", Efficiencies.prior()),
        "fitted": motivation.show("A100 fitted", Fit(ampere).shared(ampere[0])),
    }


def summary(sweeps: list[dict[str, Any]]) -> dict[str, float]:
    rho = np.array([sweep["spearman"] for sweep in sweeps])
    return {
        "sweeps": len(sweeps),
        "layouts": sum(sweep["layouts"] for sweep in sweeps),
        "spearman": float(np.nanmean(rho)) if np.isfinite(rho).any() else float("nan"),
        "worst_spearman": float(np.nanmin(rho)) if np.isfinite(rho).any() else float("nan"),
        "regret": float(np.mean([sweep["regret"] for sweep in sweeps])),
        "worst_regret": float(max(sweep["regret"] for sweep in sweeps)),
    }


STEP_COLUMNS = {
    "n": "6d ",
    "mape": "7.1f%",
    "median": "7.1f%",
    "worst": "7.0f%",
    "r2_log": "8.3f",
    "baseline_mape": "7.1f%",
    "baseline_in_sample_mape": "7.1f%",
    "noise_floor_mape": "7.1f%",
}
SWEEP_COLUMNS = {
    "sweeps": "6d ",
    "layouts": "7d ",
    "spearman": "8.2f",
    "worst_spearman": "8.2f",
    "regret": "7.1f%",
    "worst_regret": "7.1f%",
}
MEMORY_COLUMNS = {
    "n": "6d ",
    "mape": "7.1f%",
    "median": "7.1f%",
    "within_15": "7.0f%",
    "oom_called": "7d ",
    "oom": "7d ",
}
HEADS = {
    "n": "rows",
    "r2_log": "R² log",
    "mape": "MAPE",
    "baseline_mape": "const. MFU",
    "baseline_in_sample_mape": "in sample",
    "noise_floor_mape": "floor",
    "within_15": "in 15 %",
    "oom_called": "OOM called",
    "oom": "of OOM",
    "worst_spearman": "worst",
    "worst_regret": "worst",
    "predicted_s": "predicted",
    "measured_s": "measured",
    "shares": "",
}


def print_table(title: str, columns: Mapping[str, str], rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Print one line for every row: its name, then each column by its format and unit; a dash where none is known."""
    heads = "".join(f"{HEADS.get(name, name):>12}" for name in columns)
    print(f"{title:52s}{heads}")
    for name, row in rows.items():
        print(f"{name:52s}" + "".join(f"{cell(row[column], form):>12}" for column, form in columns.items()))
    print()


def cell(value: Any, form: str) -> str:
    """Return a value by a format such as ``7.1f%``: what follows the type letter is its unit."""
    if isinstance(value, str):
        return f"  {value}"
    if not math.isfinite(value):
        return "-"
    letter = next(index for index, sign in enumerate(form) if sign in "df")
    return f"{value:{form[: letter + 1]}}{form[letter + 1 :]}"


def reasons(skipped: Sequence[Skipped]) -> str:
    counted = Counter(skip.why for skip in skipped)
    return ", ".join(f"{why} {count}" for why, count in counted.most_common(14)) or "nothing"


def without_nan(value: Any) -> Any:
    """Return figures with null where there is no number, as JSON has no NaN."""
    if isinstance(value, dict):
        return {str(name): without_nan(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, help="predict this CSV instead of the repository's; training only")
    parser.add_argument("--only", choices=PARTS, help="one part instead of all")
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worst", type=int, default=0, help="also list the worst predicted training rows")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON that holds all figures")
    options = parser.parse_args()
    parts = (options.only,) if options.only else ("training",) if options.table else PARTS
    figures: dict[str, Any] = {"seed": options.seed, "folds": options.folds, "targets": TARGETS}
    if "training" in parts:
        figures["training"] = training(options.table, options.seed, options.folds, options.worst)
    if "generation" in parts:
        figures["generation"] = generation(options.seed, options.folds)
    if "operators" in parts:
        figures["operators"] = operator_tables()
    if "motivation" in parts:
        figures["motivation"] = motivating_facts()
    if options.json:
        print(json.dumps(without_nan(figures), allow_nan=False))


if __name__ == "__main__":
    main()
