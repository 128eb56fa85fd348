"""lm_eval's own evaluator over a model of ours gives the items and metrics of its Hugging Face model."""

import importlib
import json
import shutil

import pytest

import zoo
from zoo.cli import main
from zoo.tools.evaluate import GenerationOptions, TaskOptions, load_language_model
from zoo.tools.evaluate.rows import split_rolling

from .parity import FOLDER, TASKS, TOLERANCE, read_expected

lm_eval = pytest.importorskip("lm_eval")
pytestmark = [pytest.mark.neighbors, pytest.mark.slow, pytest.mark.filterwarnings("default")]

MESHES = {"one device": {}, "data 2 x fsdp 2 x tensor 2": {"data": 2, "fsdp": 2, "tensor": 2}}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The tasks, which name their files relative to the working directory."""
    shutil.copytree(FOLDER, tmp_path / "evaluate")
    monkeypatch.chdir(tmp_path / "evaluate")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    return tmp_path / "evaluate"


@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
def test_items_and_metrics_match_the_hugging_face_model(folder, sizes):
    from zoo.tools.evaluate.lm_eval_tasks import find_lm_eval_tasks, run_lm_eval

    mesh = zoo.make_mesh(**sizes) if sizes else None
    lm = load_language_model(folder / "model", mesh=mesh, batch=4, length=64)
    expected = read_expected()
    manager = find_lm_eval_tasks(TASKS, folder)
    count = 0
    for (found,) in run_lm_eval(lm, TASKS, TaskOptions(), manager=manager):
        metrics = {f"{name},none": metric.value for name, metric in found.metrics.items()}
        assert metrics == pytest.approx(expected["results"][found.name], rel=TOLERANCE)
        for record, item in zip(found.records, expected["items"][found.name], strict=True):
            assert record["doc_id"] == item["doc_id"]
            for (response,), wanted in zip(record["resps"], item["responses"], strict=True):
                count += 1
                if isinstance(wanted, list):
                    assert response[0] == pytest.approx(wanted[0], abs=TOLERANCE) and response[1] == wanted[1]
                elif isinstance(wanted, float):
                    assert response == pytest.approx(wanted, abs=TOLERANCE)
                else:
                    assert response == wanted
    assert count == 26


GROUP = """
group: zoo_group
task: [zoo_choice, zoo_documents]
aggregate_metric_list: [{metric: acc, weight_by_size: true}]
metadata: {version: 1.0}
"""


def test_the_command_asks_in_a_chat_and_keeps_every_item(folder, capsys):
    (folder / "group.yaml").write_text(GROUP)
    words = ["evaluate", "model", "--tasks", "zoo_group, zoo_questions", "--include-path", ".", "--length", "128"]
    main([*words, "--chat", "--shots", "1", "--limit", "2", "--out", "results", "--no-compile-cache"])
    assert capsys.readouterr().out.split()[:2] == ["task", "items"]  # lm_eval's own lines go to standard error
    kept = json.loads((folder / "results" / "results.json").read_text())
    assert kept["versions"]["lm_eval"] == lm_eval.__version__
    tasks = kept["tasks"]
    assert {name: task["items"] for name, task in tasks.items()} == {
        "zoo_choice": 2,
        "zoo_documents": 2,
        "zoo_group": 4,
        "zoo_questions": 2,
    }
    assert all(len(kept["items"][name]) == 2 for name in TASKS)
    assert tasks["zoo_group"]["metrics"]["acc"]["value"] == tasks["zoo_choice"]["metrics"]["acc"]["value"]
    assert tasks["zoo_group"]["version"] == "1.0"
    asked = kept["items"]["zoo_choice"][0]["arguments"][0][0]
    assert asked.count("<|im_start|>user") == 2 and asked.endswith("<|im_start|>assistant\n")


def test_unknown_tasks_and_options_are_named(folder):
    from zoo.tools.evaluate.lm_eval import ZooLM, _read_options
    from zoo.tools.evaluate.lm_eval_tasks import find_lm_eval_tasks

    with pytest.raises(ValueError, match=r"lm_eval has no task 'zoo_choise' \(zoo_choice"):
        find_lm_eval_tasks(["zoo_choise"], folder)
    with pytest.raises(FileNotFoundError, match="a folder of YAML files"):
        find_lm_eval_tasks(["zoo_choice"], folder / "nowhere")
    options = _read_options({"until": "x", "do_sample": True, "temperature": 0.5, "top_p": 0.9}, 7)
    assert options == GenerationOptions(7, ("x",), temperature=0.5, top_p=0.9)
    assert _read_options({"until": ["x", ""], "max_gen_toks": 3, "top_p": 0.9}, 7) == GenerationOptions(3, ("x",))
    with pytest.raises(NotImplementedError, match="asks to generate with num_beams"):
        _read_options({"num_beams": 4}, 7)
    with pytest.raises(ValueError, match="pass pretrained=DIRECTORY, or a LanguageModel"):
        ZooLM()


def test_model_is_registered_and_windows_match(folder):
    utils = importlib.import_module("lm_eval.utils")
    registry = importlib.import_module("lm_eval.api.registry")
    importlib.import_module("zoo.tools.evaluate.lm_eval")
    lm = registry.get_model("zoo").create_from_arg_string("pretrained=model,tensor=2,max_length=64", {"batch_size": 4})
    assert (lm.rank, lm.world_size, lm.max_length, lm.prefix_token_id, lm.eot_token_id) == (0, 1, 64, 0, 2)
    assert lm.lm.mesh.shape["tensor"] == 2
    for count in (0, 1, 6, 7, 8, 14, 20):
        tokens = list(range(count))
        windows = map(utils.make_disjoint_window, utils.get_rolling_token_windows(tokens, -1, 7, 1))
        assert [tuple(map(list, pair)) for pair in windows] == [
            tuple(map(list, x)) for x in split_rolling(tokens, -1, 7)
        ]
