"""Reads what a run's sinks wrote with the programs that they are for, and compares it with metrics.jsonl.

    read_back.py RUN_DIR [PROMETHEUS_URL]

Prints how many values were compared. Exits with 1 at the first difference.
"""

import json
import math
import sys
import time
import urllib.parse
import urllib.request
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

HOSTS = "sandbox_hosts"


def seconds(line: dict[str, Any]) -> float:
    return datetime.fromisoformat(line["time"]).timestamp()


def numbers(line: dict[str, Any]) -> dict[str, float]:
    """Every number of a line outside of lists, by its flat name."""
    found: dict[str, float] = {}
    for key, value in line.items():
        if key in ("schema_version", "time", "global_step", "policy_version"):
            continue
        if isinstance(value, dict):
            found |= {f"{key}/{name}": float(number) for name, number in value.items()}
        elif isinstance(value, (int, float)):
            found[key] = float(value)
    for host in line.get(HOSTS) or []:
        for name, number in host.items():
            if name != "host":
                found[f"{HOSTS}/{host['host']}/{name}"] = float(number)
    return found


def as_float32(number: float) -> float:
    return float(pd.Series([number], dtype="float32")[0])


def tensorboard(folder: Path, lines: list[dict[str, Any]]) -> int:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    found = {
        tag: [(event.step, event.value, round(event.wall_time, 3)) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }
    expected: dict[str, list[tuple[int, float, float]]] = {}
    for line in lines:
        for tag, number in numbers(line).items():
            point = (line["global_step"], as_float32(number), round(seconds(line), 3))
            expected.setdefault(tag, []).append(point)
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for tag, points in expected.items():
        assert found[tag] == points, f"{tag}: {found[tag]} instead of {points}"
    return sum(map(len, found.values()))


def table(name: str, frame: pd.DataFrame, lines: list[dict[str, Any]]) -> int:
    assert len(frame) == len(lines), f"{name}: {len(frame)} rows for {len(lines)} lines"
    unknown = {key for line in lines for key in line} - set(frame.columns)
    assert not unknown, f"{name}: no column for {unknown}"
    count = 0
    for line, (_, row) in zip(lines, frame.iterrows(), strict=True):
        for key in frame.columns:
            cell, value = row[key], line.get(key)
            where = f"{name}, step {line['global_step']}, {key}: {cell!r} instead of {value!r}"
            if value is None:
                assert pd.isna(cell), where
                continue
            count += 1
            if key == "time":
                assert abs(pd.Timestamp(cell).timestamp() - seconds(line)) < 1e-6, where
            elif isinstance(value, (dict, list)):
                assert json.loads(cell) == value, where
            else:
                assert float(cell) == float(value), where
    return count


def scraped(url: str, lines: list[dict[str, Any]]) -> int:
    """Compares values that the Prometheus server at `url` has scraped; it may have lost the target since."""

    def ask(name: str) -> dict[str, float]:
        query = urllib.parse.urlencode({"query": f"last_over_time({name}[1h])"})
        with urllib.request.urlopen(f"{url}/api/v1/query?{query}", timeout=60) as reply:
            result = json.load(reply)["data"]["result"]
        labels = ("stage", "tau", "host")
        return {
            next((series["metric"][label] for label in labels if label in series["metric"]), ""): float(
                series["value"][1]
            )
            for series in result
        }

    def is_near(name: str, label: str, expected: float) -> None:
        found = ask(name).get(label)
        assert found is not None and math.isclose(found, expected, rel_tol=1e-9), (
            f"{name}{{{label}}} is {found} instead of {expected}"
        )

    steps = [line for line in lines if "episodes" in line]
    rounds = [line for line in lines if "eval_tasks" in line]
    expected = [
        ("orchestrate_steps_total", "", len(steps)),
        ("orchestrate_global_step", "", steps[-1]["global_step"]),
        ("orchestrate_policy_version", "", steps[-1]["policy_version"]),
        ("orchestrate_episodes_total", "", sum(line["episodes"] for line in steps)),
        ("orchestrate_reward_mean", "", steps[-1]["reward_mean"]),
        ("orchestrate_time_rollout_seconds_total", "", sum(line["time_rollout_s"] for line in steps)),
        ("orchestrate_loop_lag_p99_seconds", "", steps[-1]["loop_lag_p99_ms"] / 1000),
        ("orchestrate_eval_pass_at_1", "", rounds[-1]["eval_pass_at_1"]),
        ("orchestrate_last_line_timestamp_seconds", "", seconds(lines[-1])),
    ]
    for stage in ("setup", "grade"):
        total = sum(line["broken_attempts_by_stage"][stage] for line in steps)
        expected.append(("orchestrate_broken_attempts_by_stage_total", stage, total))
    for host in steps[-1][HOSTS]:
        expected.append(("orchestrate_sandbox_host_capacity", host["host"], host["capacity"]))
    # The server stores what it has scraped a moment after the run has answered.
    end = time.monotonic() + 120
    newest = seconds(lines[-1])
    while not math.isclose(ask("orchestrate_last_line_timestamp_seconds").get("", 0.0), newest, rel_tol=1e-9):
        assert time.monotonic() < end, "the last values were not stored"
        time.sleep(0.1)
    for name, label, value in expected:
        is_near(name, label, value)
    return len(expected)


def main() -> None:
    run_dir = Path(sys.argv[1])
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    counts = {
        "lines": len(lines),
        "tensorboard": tensorboard(run_dir / "tensorboard", lines),
        "csv": table("csv", pd.read_csv(run_dir / "metrics.csv", float_precision="round_trip"), lines),
        "parquet": table("parquet", pd.read_parquet(run_dir / "metrics.parquet"), lines),
    }
    if len(sys.argv) > 2:
        counts["prometheus"] = scraped(sys.argv[2], lines)
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
