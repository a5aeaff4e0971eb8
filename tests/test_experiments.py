"""The experiments' scripts run on the model: what they print, write and return."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from afdep_sim.runtime.residency import check_residency

FOLDER = Path(__file__).resolve().parent.parent / "experiments"


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


validate, roundtrip = script("validate"), script("roundtrip")


def run_validate(*arguments: str) -> int:
    return int(validate.main(["--machine", "model", *arguments]))


def test_a_few_cases_pass_on_the_model(capsys, tmp_path):
    out = tmp_path / "results.json"
    assert run_validate("--only", "afdep*", "--out", str(out), "--cases", "core", "--only", "afdep bf16 T=*") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "3 passed, 0 failed"
    assert all(line.startswith("model ok   afdep bf16 T=") for line in lines[:-1])
    results = json.loads(out.read_text())
    assert results["machine"] == "model"
    assert [r["ok"] for r in results["results"]] == [True] * 3
    assert results["results"][1]["rows"] > results["results"][0]["rows"] > 0


@pytest.mark.parametrize("only", ["fastafd_m2n not expanded", "bucket cycle", "one FFN rank, view", "route -2 refused"])
def test_odd_cases_pass_on_the_model(only, capsys):
    assert run_validate("--only", only) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 passed, 0 failed"


def test_a_wrong_row_fails_its_case_and_the_script(capsys, monkeypatch):
    from afdep_sim.model.machine import Machine

    def wrong(self: Any, plan: Any, inputs: Any) -> Any:
        run = original(self, plan, inputs)
        run.combined[1][2][3, 4] ^= np.uint16(1)
        return run

    original = Machine.run
    monkeypatch.setattr(Machine, "run", wrong)
    assert run_validate("--only", "bias") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("model FAIL bias")
    assert "Mismatch: exchange 1: token 3 element 4" in lines[0]
    assert lines[-1] == "0 passed, 1 failed"


def test_a_bad_route_that_nobody_refuses_and_a_word_left_set_fail():
    case = next(c for c in validate.core_cases() if c.bad_route)
    quiet = type("Quiet", (), {"run": lambda self, plan, inputs: None})()
    with pytest.raises(AssertionError, match="was not refused"):
        validate.run_case(case, quiet)
    from afdep_sim.model.machine import Machine
    from afdep_sim.model.profiles import load_profile

    plan = validate.Case("one", exchanges=1, workload={"tokens": 1}).plan()
    run = Machine(load_profile("H200"), received=True).run(plan, plan.inputs())
    run.words[2][-1] = 0
    validate.check_run(plan, plan.inputs(), run)
    run.words[2][validate.WORD_OFFSETS["slots"] // 8] = 1
    with pytest.raises(AssertionError, match="rank 2: slots is not clear"):
        validate.check_run(plan, plan.inputs(), run)


def test_no_case_at_all_is_no_success(capsys):
    assert run_validate("--only", "nothing of this name") == 1
    assert capsys.readouterr().out.splitlines() == ["0 passed, 0 failed"]


def test_every_case_has_a_name_of_its_own_and_fits_one_gpu():
    cases = list(validate.all_cases())
    assert len({case.name for case in cases}) == len(cases)
    assert {case.name for case in validate.core_cases()} <= {case.name for case in cases}
    for case in cases:
        check_residency(case.plan())


def test_round_trips_of_the_model_are_tabled_per_arm(capsys, tmp_path):
    out = tmp_path / "out.json"
    arguments = ["--machine", "model", "--tokens", "1,8", "--hidden", "256", "--repeats", "2", "--out", str(out)]
    assert roundtrip.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("model ") for line in lines)
    assert [line.split(":")[0] for line in lines[:4]] == [
        "model repeat 0 T=1 afdep",
        "model repeat 0 T=1 fastafd_m2n",
        "model repeat 0 T=8 afdep",
        "model repeat 0 T=8 fastafd_m2n",
    ]
    assert lines[4].startswith("model repeat 1 T=1 fastafd_m2n")
    assert "%" in lines[-1]
    results = json.loads(out.read_text())
    assert len(results["results"]) == 8
    assert all(row["us"] > 0 for row in results["results"])


def test_a_cell_that_cannot_run_leaves_the_others_and_fails_the_script(capsys):
    arguments = ["--machine", "model", "--loopback-shape", "--tokens", "1", "--hidden", "256", "--repeats", "1"]
    assert roundtrip.main([*arguments, "--sms", "34"]) == 1
    assert "136 blocks that wait for each other" in capsys.readouterr().out
    assert roundtrip.main(arguments) == 0
