"""`zoo plan`: what a training run takes, on devices that are not here."""

import json

import pytest

from zoo.cli import main
from zoo.tools import plan as planning

SMALL = ("plan", "--preset", "qwen3-0.6b", "--seq-len", 128)


@pytest.mark.ci
def test_plan_of_one_mesh(run, monkeypatch):
    plans, plan_training = {}, planning.plan_training

    def plan_once(make, sizes, *rest):
        """Plan a mesh, whose plan is then shown as text and as JSON."""
        name = str(sizes)
        plans[name] = plans[name] if name in plans else plan_training(make, sizes, *rest)
        return plans[name]

    monkeypatch.setattr(planning, "plan_training", plan_once)
    text = run(*SMALL, "--on", "v5p:2x2x2", "--fsdp", -1)[0]
    assert "fsdp 8 on v5p:2x2x2: 8 devices" in text and "fits" in text and "optimizer state" in text
    assert "reduce-scatter" in text and "MFU" in text
    found = json.loads(run(*SMALL, "--on", "v5p:2x2x2", "--fsdp", 8, "--json")[0])
    assert found["fits"] and found["mesh"]["fsdp"] == 8 and sum(found["memory"].values()) == found["peak"]


def test_plan_that_does_not_fit_exits_with_the_largest(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "--preset", "llama3-8b", "--on", "h100:8", "--data", "8", "--seq-len", "128"])
    captured = capsys.readouterr()
    assert stopped.value.code == 1 and "DOES NOT FIT" in captured.out
    assert "the largest arrays per device" in captured.err.replace("\n", " ").lower()
    assert "more devices along fsdp" in " ".join(captured.err.split()) and "opt_state" in captured.err


def test_plan_refuses_what_it_cannot_plan(refused):
    assert "is not a known topology" in refused(*SMALL, "--on", "h100")
    assert "fsdp 3 are 3 devices, and h100:8 has 8" in refused(*SMALL, "--on", "h100:8", "--fsdp", 3)
    assert "--data 4 would take them all" in refused(*SMALL, "--on", "h100:8", "--fsdp", 2)
    assert "only one axis may take" in refused(*SMALL, "--on", "h100:8", "--fsdp", -1, "--data", -1)
    assert "llama3-8b" in refused("plan", "--preset", "llama9", "--on", "h100:8")
