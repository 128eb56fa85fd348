"""`zoo draw`: a picture of a checkpoint or a preset on any mesh."""

import re
import xml.etree.ElementTree as ElementTree


def test_draw_writes_a_picture_of_a_checkpoint(run, refused, bytes_model, tmp_path):
    out = tmp_path / "layout.svg"
    text = run("draw", bytes_model, "--fsdp", 2, "--tensor", 2, "-o", out)[0]
    assert f"wrote {out}" in text and "fsdp 2 x tensor 2" in text
    svg = out.read_text()
    assert ElementTree.fromstring(svg).get("role") == "img"
    assert ">query<" in svg and re.search(r">heads \d+ / tensor<", svg) and "reduce-scatter over fsdp" in svg
    assert "exists already: pass another file, or --overwrite" in refused("draw", bytes_model, "-o", out)
    run("draw", bytes_model, "-o", out, "--overwrite")
    assert "on one device" in out.read_text()


def test_draw_takes_layouts(run, bytes_model, tmp_path):
    words = ("draw", bytes_model, "--overwrite", "-o", tmp_path / "layout.svg")
    run(*words, "--context", 2, "--context-attention", "gathered", "--seq-len", 64, "--width", 400)
    svg = (tmp_path / "layout.svg").read_text()
    assert "all-gather over context" in svg and "permute" not in svg and 'viewBox="0 0 400' in svg
    run(*words, "--fsdp", 2, "--tensor", 2, "--zero-stage", 2, "--sequence-parallel")
    svg = (tmp_path / "layout.svg").read_text()
    assert "reduce-scatter over tensor" in svg and "all-gather over fsdp" not in svg


def test_draw_refuses_what_it_cannot_draw(refused, bytes_model, tmp_path):
    out = ("-o", tmp_path / "layout.svg")
    assert "pass a checkpoint directory, or --preset NAME" in refused("draw", *out)
    assert "are two models" in refused("draw", bytes_model, "--preset", "gpt2", *out)
    assert "4 heads do not divide evenly over tensor=3" in refused("draw", bytes_model, "--tensor", 3, *out)
    assert "--seq-len must be at least 1" in refused("draw", bytes_model, "--seq-len", 0, *out)
    assert "2 layers do not divide evenly over pipe=4" in refused("draw", bytes_model, "--pipe", 4, *out)
    assert "exists already: pass another file" in refused("draw", bytes_model, "-o", tmp_path)
    assert not (tmp_path / "layout.svg").exists()
