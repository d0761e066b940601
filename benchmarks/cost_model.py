"""How well does the cost model predict training steps that others measured?

    python benchmarks/cost_model.py [--json] [--table FILE] [--folds N] [--seed N] [--worst N] [--motivation]

Reads benchmarks/data/train_layouts.csv (provenance in every row), fits class efficiencies on all parts of it but one
and predicts that part, for each part in turn; parts are whole configurations, chosen by a fixed seed. Beside it stands
a baseline fitted on the same rows: one constant model-FLOP utilization per family. ``--table FILE`` predicts another
CSV of the same format from a fit on the repository's whole table, without the configurations that FILE holds.
``--motivation`` prints the settings under which the paper's motivating facts hold in this model.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from public_tables import motivation, serving
from public_tables.figures import Array, by_family, errors, memory_figures, rankings
from public_tables.fitting import ConstantMfu, Fit, cross_predict
from public_tables.training import DATA, Row, read

from nereus.control.efficiency import Efficiencies

TARGETS = {"mape_16_bit_explicit_8_512": 10.0, "spearman": 0.8, "regret": 5.0, "share_of_baseline": 0.5}
RANKED = ("bigscience-tr11", "amp-trials", "flagperf")


def explicit(rows: Sequence[Row]) -> list[int]:
    """Return the rows of the headline figure: 16-bit, tensor or pipeline degrees stated, 8 to 512 GPUs."""
    return [index for index, row in enumerate(rows) if row.precision == "16-bit" and 8 <= row.gpus <= 512]


def report(rows: list[Row], ours: Array, baseline: Array, memory: dict[str, Any]) -> dict[str, Any]:
    measured = np.array([row.measured_s for row in rows])
    chosen = explicit(rows)
    with (DATA / "candidate_oos_plans.csv").open(encoding="utf-8") as file:
        named = {line["row_id"] for line in csv.DictReader(file)}
    subsets = {
        "all rows": list(range(len(rows))),
        "16-bit, 8 to 512 GPUs": chosen,
        "of these, candidate_oos_plans": [index for index in chosen if rows[index].row_id in named],
    }
    families = {
        name: {
            **errors(ours[at], measured[at]),
            "baseline_mape": errors(baseline[at], measured[at])["mape"],
            "baseline_in_sample_mape": in_sample([rows[index] for index in at]),
        }
        for name, at in by_family(rows).items()
    }
    sweeps = rankings(rows, ours)
    return {
        "subsets": {
            name: {**errors(ours[at], measured[at]), "baseline_mape": errors(baseline[at], measured[at])["mape"]}
            for name, at in subsets.items()
            if at
        },
        "families": families,
        "sweeps": {
            source: summary([sweep for sweep in sweeps if sweep["source"] == source])
            for source in sorted({sweep["source"] for sweep in sweeps})
        },
        "memory": memory,
    }


def generation(seed: int, folds: int) -> dict[str, Any]:
    """Predict static batches of the public generation table by engine and hardware."""
    rows, skipped = serving.read(DATA / "infer_throughput.csv")
    ours, baseline = cross_predict(rows, seed, folds)
    measured = np.array([row.measured_s for row in rows])
    everything = {"generation, all static batches": list(range(len(rows)))}
    print(f"generation rows left out: {Counter(skip.why for skip in skipped).most_common(4)}\n")
    return {
        name: {**errors(ours[at], measured[at]), "baseline_mape": errors(baseline[at], measured[at])["mape"]}
        for name, at in {**everything, **by_family(rows)}.items()
        if len(at) >= 8
    }


def fitted_efficiencies(rows: list[Row]) -> Efficiencies:
    """Return what the public tables say about 16-bit training on A100s, no source's own habits included."""
    ampere = [row for row in rows if row.arch == "ampere" and row.precision == "16-bit"]
    fit = Fit(ampere)
    found = [fit.ids[key] for key in enumerate(("everywhere", "ampere 16-bit")) if key in fit.ids]
    offsets = fit.offsets[found]
    values = np.exp(fit.prior + (offsets[:, :-1] + offsets[:, -1:]).sum(axis=0))
    return Efficiencies(tuple(values.tolist()))


def in_sample(rows: list[Row]) -> float:
    measured = np.array([row.measured_s for row in rows])
    return errors(ConstantMfu(rows).predict(rows), measured)["mape"]


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


def without_nan(value: Any) -> Any:
    """Return figures with null where there is no number, as JSON has no NaN."""
    if isinstance(value, dict):
        return {str(name): without_nan(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def show(figures: dict[str, Any]) -> None:
    columns = f"{'rows':>6}{'MAPE':>8}{'median':>8}{'worst':>8}{'R² log':>8}"
    print(f"{'step seconds, never seen by the fit':44s}{columns}  constant MFU: same rows / in sample")
    for name, row in {**figures["subsets"], **figures["families"], **figures.get("generation", {})}.items():
        sample = row.get("baseline_in_sample_mape")
        print(
            f"{name:44s}{row['n']:6d}{row['mape']:7.1f}%{row['median']:7.1f}%{row['worst']:7.0f}%{row['r2_log']:8.3f}"
            f"  {row['baseline_mape']:6.1f}%" + (f" / {sample:.1f}%" if sample is not None else "")
        )
    columns = f"{'sweeps':>7}{'rows':>6}{'Spearman':>10}{'worst':>7}{'regret':>8}{'worst':>7}"
    print(f"\n{'ranking of layouts inside a sweep':44s}{columns}")
    for name, row in figures["sweeps"].items():
        print(
            f"{name:44s}{row['sweeps']:7d}{row['layouts']:6d}{row['spearman']:10.2f}{row['worst_spearman']:7.2f}"
            f"{row['regret']:7.1f}%{row['worst_regret']:6.1f}%"
        )
    columns = f"{'rows':>6}{'MAPE':>8}{'median':>8}{'<=15 %':>8}{'OOM called':>12}"
    print(f"\n{'peak memory, never seen by the calibration':44s}{columns}")
    for name, row in figures["memory"].items():
        print(
            f"{name:44s}{row['n']:6d}{row['mape']:7.1f}%{row['median']:7.1f}%{row['within_15']:7.0f}%"
            f"{row['oom_called']:8d} of {row['oom']}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, help="predict this CSV instead")
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worst", type=int, default=0, help="also list the worst predicted rows")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--motivation", action="store_true", help="only the paper's motivating facts")
    options = parser.parse_args()
    if options.motivation:
        shown = {"prior": motivation.show("prior", Efficiencies.prior())}
        fitted = fitted_efficiencies([row for row in read(DATA / "train_layouts.csv")[0] if not row.out_of_memory])
        shown["fitted"] = motivation.show("A100 fitted", fitted)
        if options.json:
            print(json.dumps(without_nan(shown), allow_nan=False))
        return

    own, skipped = read(DATA / "train_layouts.csv")
    if options.table:
        known = own
        own, skipped = read(options.table)
        names = {row.configuration for row in own}
        ran = [row for row in own if not row.out_of_memory]
        seen = [row for row in known if not row.out_of_memory and row.configuration not in names]
        ours, baseline = Fit(seen).predict(ran), ConstantMfu(seen).predict(ran)
    else:
        ran = [row for row in own if not row.out_of_memory]
        ours, baseline = cross_predict(ran, options.seed, options.folds)
    figures = report(ran, ours, baseline, memory_figures(own, options.seed, options.folds))
    if not options.table:
        figures["generation"] = generation(options.seed, options.folds)
    reasons = Counter(skip.why for skip in skipped)
    figures |= {"skipped": dict(reasons), "seed": options.seed, "folds": options.folds, "targets": TARGETS}
    show(figures)
    print(f"\nleft out: {', '.join(f'{why} {count}' for why, count in reasons.most_common())}")
    measured = np.array([row.measured_s for row in ran])
    for index in np.argsort(-np.abs(np.log(ours / measured)))[: options.worst]:
        row = ran[index]
        what = f"{row.source} {row.gpu} x{row.gpus} {row.model} {row.layout} s{row.seq_len} {row.precision}"
        print(f"{row.row_id} {what}: predicted {ours[index]:.2f} s, measured {measured[index]:.2f} s")
    if options.json:
        print(json.dumps(without_nan(figures), allow_nan=False))


if __name__ == "__main__":
    main()
