"""`mesh_costs.py` prints one line per mesh."""

import jax

import zoo
from scripts import mesh_costs


def test_mesh_costs_prints_one_line_per_mesh(capsys, monkeypatch):
    meshes = list(mesh_costs.iter_meshes(8))
    assert len(meshes) == 10 and len({str(mesh) for mesh in meshes}) == 10
    monkeypatch.setattr(mesh_costs, "iter_meshes", lambda devices: [zoo.make_mesh(fsdp=4, tensor=2)])
    mesh_costs.main(vocab=16, embed=16, layers=1, heads=2, mlp=16, seq=4)
    head, line = capsys.readouterr().out.splitlines()
    assert head.startswith("mesh") and line.startswith("fsdp 4 x tensor 2")
    for word in ("MB", "all-gather over fsdp", "reduce-scatter over fsdp", "all-reduce over tensor"):
        assert word in line
    assert jax.device_count() == 8
