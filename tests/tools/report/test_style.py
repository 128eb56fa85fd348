"""The style sheet in a browser: a report fits its window, and a wide table scrolls in it."""

import html
import json
import re
import subprocess

import jax
import pytest

import zoo
from scripts.browse_site import FLAGS, find_chromium
from zoo.tools.report import tabulate_parameters, write_report

MEASURE = """<script>addEventListener("load", () => document.title = JSON.stringify({
    page: document.scrollingElement.scrollWidth,
    boxes: [...document.querySelectorAll(".scroll")].map(x => [x.scrollWidth, x.clientWidth])}))
</script></head>"""


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("report")
    steps = [dict(step=step, bits_per_byte=8 / step, gradient_norm=1 / step, learning_rate=1e-3) for step in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
    (folder / "config.json").write_text(json.dumps({"out": "runs/" + "a-long-name" * 30}))
    sizes = {"vocab": 50_000, "embed": 256, "layers": 12, "heads": 4, "mlp": 1024, "experts": 64, "top": 2}
    mesh = zoo.make_mesh(data=2, fsdp=2, tensor=2)
    model = jax.eval_shape(lambda key: zoo.models.MixtureOfExperts(**sizes, qk_norm=True, key=key), jax.random.key(0))
    path = write_report(
        folder, title="A mixture of experts", summary="s", curves={"bits_per_byte": "training"}, unit="bits per byte",
        samples=[("def main(", "x" * 300)], parameters=tabulate_parameters(model, mesh),
    )  # fmt: skip
    return path.read_text()


def measure(report: str, folder, width: int) -> dict:
    path = folder / "report.html"
    path.write_text(report.replace("</head>", MEASURE))
    program = [find_chromium(), *FLAGS, f"--user-data-dir={folder / 'profile'}", f"--window-size={width},900"]
    done = subprocess.run([*program, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=120)
    return json.loads(html.unescape(re.search("<title>(.*?)</title>", done.stdout)[1]))


@pytest.mark.slow
@pytest.mark.skipif(find_chromium() is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [1280, 1200])
def test_report_cuts_off_no_column(report, tmp_path, width):
    found = measure(report, tmp_path, width)
    assert found["page"] <= width and len(found["boxes"]) == 2
    assert all(content <= box for content, box in found["boxes"])


@pytest.mark.slow
@pytest.mark.skipif(find_chromium() is None, reason="needs Chromium")
def test_report_on_a_narrow_screen_scrolls_in_its_tables(report, tmp_path):
    found = measure(report, tmp_path, 500)  # the least that Chromium takes
    (pairs, _), (content, box) = found["boxes"]
    assert found["page"] <= 500 and pairs <= box < content
