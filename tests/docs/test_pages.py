"""Generated files are current, a build writes the pages of the site, and it loads nothing from another host."""

import inspect
import re

import pytest
import yaml

import zoo
from scripts import check_site, make_pages, write_pages
from zoo.layers.attention.cross_layer import CrossLayerAttention
from zoo.layers.encoders.bidirectional_attention import BidirectionalAttention
from zoo.models.hf.families import FAMILIES
from zoo.models.presets.published import PRESETS
from zoo.parallel.layout import AXES


def test_generated_files_of_the_repository_are_current():
    found = sorted(make_pages.find_stale(make_pages.list_repository_files()))
    assert not found, f"stale: {', '.join(found)}. `{make_pages.COMMAND}` updates them."


def test_tree_lists_every_source_file():
    page = make_pages.build_tree_page()
    files = [path for name in make_pages.FOLDERS for path in (make_pages.ROOT / name).glob("**/*.py")]
    assert page.count(".py` ") >= len([path for path in files if path.stem != "__init__"]) > 80


def test_names_begin_with_the_promised_and_have_links():
    page = make_pages.build_names_page()
    assert (
        page.index("## Promised")
        < page.index("- [`zoo.make_mesh`](api/zoo.md#zoo.make_mesh)`(")
        < page.index("## zoo\n")
    )


def test_git_ignores_the_pages_of_the_site():
    ignored = (make_pages.ROOT / ".gitignore").read_text(encoding="utf-8").split()
    pages = make_pages.list_site_pages()
    assert len(pages) > 30
    assert [path for path in pages if path not in ignored and f"{path.rpartition('/')[0]}/" not in ignored] == []


@pytest.mark.parametrize("name", ["README.md", "docs/index.md"])
def test_figures_of_the_front_are_those_of_their_sources(name):
    def read(path):
        return (make_pages.ROOT / path).read_text(encoding="utf-8")

    front = " ".join(read(name).split())
    assert f"**{len(FAMILIES)} families in and out" in front
    assert f"**{len(list_mixers())} mixers, in any hybrid.**" in front
    methods = re.findall(r"^\| `(\w+)` \|", read("docs/adapters.md").partition("| method |")[2], re.MULTILINE)
    assert all(callable(getattr(zoo.adapters, method)) for method in methods)
    assert f"**{len(methods)} adapter methods.**" in front
    assert f"**One model, {len(AXES)} mesh axes.**" in front
    assert f"**Programs of {len(read('recipes/transformer.py').splitlines())} lines.**" in front
    assert "within 1e-4 of the largest logit and usually within 1e-6" in front
    assert "within 1e-4 of the largest logit, and usually within 1e-6" in " ".join(read("docs/checkpoints.md").split())
    assert "give the losses of one within 1e-4" in front
    assert 'jnp.array(losses["one device"]), atol=1e-4)' in read("docs/tutorials/devices.md")
    assert "**Status:** tested on CPUs, with up to eight emulated devices, and [run on one H100]" in front
    measured = ("zoo, 4 rows, remat=elementwise", "torch, 4 rows, compiled")
    rows = [re.search(rf"^\| {row} \| [\d.]+ s \| ([\d,]+)", read("docs/gpu.md"), re.MULTILINE) for row in measured]
    ours, compiled = (row[1] for row in rows)
    assert f"in bfloat16 runs at {ours} tokens/s; `torch.compile` of the same Llama at {compiled}" in front


def list_mixers():
    """Return the mixers that `zoo.models.Hybrid` takes: encoders have one of their own, and cross-layer attention needs
    the keys of another layer."""
    exported = [getattr(zoo.layers, name) for name in zoo.layers.__all__]
    mixers = {cls for cls in exported if inspect.isclass(cls) and issubclass(cls, zoo.layers.AbstractMixer)}
    others = {BidirectionalAttention, CrossLayerAttention}
    return {cls for cls in mixers if not cls.__name__.startswith("Abstract")} - others


def test_the_plan_of_the_front_is_the_one_of_its_page():
    front, page = ((make_pages.ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/plan.md"))
    command = re.search(r"^\$ zoo plan --preset .*", front, re.MULTILINE)[0]
    assert command in page.splitlines()
    shown = re.search(r"^memory .*?(?=^```)", front, re.MULTILINE | re.DOTALL)[0].splitlines()
    assert len(shown) > 3 and set(shown) <= set(page.splitlines())


def test_home_page_groups_every_family():
    home = (make_pages.ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    table = home.partition("| kind |")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"`([\w-]+)`", table)) == sorted(FAMILIES)
    assert f"and {len(PRESETS)} published sizes" in home


def test_old_addresses_lead_to_pages():
    config = yaml.safe_load((make_pages.ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    (redirects,) = (plugin["redirects"] for plugin in config["plugins"] if "redirects" in plugin)
    written = make_pages.list_site_pages()
    for old, new in redirects["redirect_maps"].items():
        assert f"docs/{old}" not in written and not (make_pages.ROOT / "docs" / old).exists()
        assert f"docs/{new}" in written or (make_pages.ROOT / "docs" / new).exists()


def test_every_recipe_is_on_a_guide():
    """Beyond fork.md, which lists them."""
    docs = make_pages.ROOT / "docs"
    guides = [path for path in docs.rglob("*.md") if path.name != "fork.md" and "api" not in path.parts]
    text = "\n".join(path.read_text(encoding="utf-8") for path in guides if path.name != "tree.md")
    recipes = [path.stem for path in (make_pages.ROOT / "recipes").glob("*.py")]
    assert len(recipes) > 20
    assert [x for x in recipes if not re.search(rf"zoo fork {x}\b|\b{x}\.py\b", text)] == []
    listed = re.findall(r"^\| `(\w+)` \| .* \| \[", (docs / "fork.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(recipes)


@pytest.fixture
def pages(tmp_path, monkeypatch):
    monkeypatch.setattr(make_pages, "ROOT", tmp_path)
    files = {"docs/one.svg": lambda: "1\n", "docs/two.svg": lambda: "2\n"}
    monkeypatch.setattr(make_pages, "list_repository_files", lambda: files)
    monkeypatch.setattr(make_pages, "list_site_pages", lambda: {"docs/api/three.md": lambda: "3\n"})
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "one.svg").write_text("1\n")
    (tmp_path / "docs" / "two.svg").write_text("old\n")
    return tmp_path / "docs"


def test_check_names_stale_files_and_writes_nothing(pages, capsys):
    with pytest.raises(SystemExit, match=r"make_pages\.py"):
        make_pages.main(check=True)
    assert capsys.readouterr().out == "docs/two.svg is stale\n"
    assert (pages / "two.svg").read_text() == "old\n"
    assert not (pages / "api").exists()


def test_main_writes_stale_files_and_pages(pages, capsys):
    make_pages.main()
    assert capsys.readouterr().out == "docs/two.svg written\ndocs/api/three.md written\n"
    assert (pages / "two.svg").read_text() == "2\n" and (pages / "api" / "three.md").read_text() == "3\n"
    make_pages.main(check=True)


def test_hook_writes_pages_and_fills_the_menu(pages, monkeypatch):
    gone = pages / "api" / "zoo.gone.md"
    gone.parent.mkdir()
    gone.write_text("old\n")
    menu = [{"Home": "index.md"}, "plain.md", {"Reference": [{"API": "api/index.md"}, {"The tree": "tree.md"}]}]
    write_pages.write_pages.cache_clear()
    try:
        config = write_pages.on_config({"nav": menu})
    finally:
        write_pages.write_pages.cache_clear()
    assert sorted(path.name for path in pages.rglob("*.md")) == ["three.md"]
    api = {"API": [{"Packages": "api/index.md"}, {"three": "api/three.md"}]}
    assert config["nav"] == [{"Home": "index.md"}, "plain.md", {"Reference": [api, {"The tree": "tree.md"}]}]
    assert (pages / "two.svg").read_text() == "old\n", "a build of the site changed a file of the repository"


def test_caption_raises_without_a_docstring(pages):
    file = pages.parent / "bare.py"
    file.write_text("x = 1\n")
    with pytest.raises(ValueError, match=r"bare\.py has no docstring"):
        make_pages.read_caption(file)


def test_arguments_are_formatted_as_in_a_call():
    def function(a, *rest, b=(), c=1.5, d="x", e=len, f=None, g=frozenset(), **options): ...

    assert make_pages.format_arguments(function) == "a, *rest, b=(), c=1.5, d='x', e=len, f=None, g=..., **options"
    assert make_pages.format_arguments(lambda x, *, key: x) == "x, *, key"


FOREIGN = {
    "script": '<script src="https://cdn.example/x.js"></script>',
    "without a scheme": '<script src="//cdn.example/x.js"></script>',
    "style sheet": '<link rel="stylesheet" href="https://cdn.example/x.css">',
    "connection": '<link rel="preconnect" href="https://fonts.example">',
    "picture": '<img src="http://cdn.example/x.png" alt="">',
    "second of a set": '<img srcset="x.png 1x, https://cdn.example/y.png 2x">',
    "font in a style": "<style>@font-face { src: url('https://fonts.example/x.woff2') }</style>",
    "import in a style": '<style>@import "https://cdn.example/x.css";</style>',
    "inline style": '<p style="background: url(https://cdn.example/x.png)">',
    "drawing": '<svg><use href="https://cdn.example/x.svg#a"/></svg>',
    "diagram": '<pre class="mermaid"><code>graph</code></pre>',
    "facts of a repository": '<a href="https://example.org" class="md-source" data-md-component="source">',
}
OWN = {
    "link to a repository": '<a href="https://example.org" class="md-source">there</a>',
    "link to follow": '<a href="https://example.org">there</a>',
    "name of a page": '<link rel="canonical" href="https://example.org/">',
    "namespace": '<svg xmlns="http://www.w3.org/2000/svg"><path d="M0 0"/></svg>',
    "relative": '<script src="assets/x.js"></script><link rel="stylesheet" href="../x.css"><img src="a//b.png" alt="">',
    "data": "<style>a { mask: url('data:image/svg+xml,<svg xmlns=\"http://www.w3.org/2000/svg\"/>') }</style>",
    "code that is shown": "<pre><code>url(https://example.org) @import 'https://example.org'</code></pre>",
}


@pytest.mark.parametrize("html", FOREIGN.values(), ids=FOREIGN)
def test_foreign_resources_are_found(tmp_path, html):
    (tmp_path / "page.html").write_text(f"<html><body>{html}</body></html>")
    (found,) = check_site.find_foreign(tmp_path)
    assert found.startswith("page.html: ")


@pytest.mark.parametrize("html", OWN.values(), ids=OWN)
def test_own_resources_pass(tmp_path, html):
    (tmp_path / "page.html").write_text(f"<html><body>{html}</body></html>")
    assert list(check_site.find_foreign(tmp_path)) == []


def test_post_build_warns_of_foreign_styles(tmp_path, caplog):
    (tmp_path / "css").mkdir()
    (tmp_path / "css" / "x.css").write_text("a { background: url(x.png) } b { background: url(//cdn.example/x.png) }")
    check_site.on_post_build({"site_dir": str(tmp_path)})
    (record,) = caplog.records
    assert record.levelname == "WARNING" and record.name.startswith("mkdocs.")
    assert "css/x.css: //cdn.example/x.png" in record.message
